"""What is exported is loaded again by its users' loaders, and must be what the run measured."""

import json
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distill import reload
from distill.card import derived_licence
from distill.drafters.pruned import KIND
from distill.forms import export_forms, forms_of
from distill.publish import check_run, publish
from distill.reload import ReloadError, reload_forms
from distill.train import run
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.runs import Agreement

SHORT = {"max_steps": 10}
PRUNED = {"draft": None, "num_draft_layers": 1}


@pytest.fixture(scope="module")
def pruned_run(job, tmp_path_factory):
    recipe = job(tmp_path_factory.mktemp("pruned") / "run", **PRUNED, **SHORT)
    assert run(recipe) == 0
    return recipe.folder


@pytest.fixture
def pruned(pruned_run, tmp_path):
    return Path(shutil.copytree(pruned_run, tmp_path / "run"))


def test_every_form_is_what_the_run_measured(pruned, tmp_path, capsys):
    publish(pruned, tmp_path / "shelf" / "draft", licence="mit")
    shown = capsys.readouterr().out
    for form in ("full checkpoint", "compact form"):
        assert re.search(rf"^{form}: alpha 0\.\d+ .*in the run 0\.\d+$", shown, re.MULTILINE), form
    assert shown.rstrip().endswith(f"draft: {tmp_path / 'shelf' / 'draft'}")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "shelf" / "draft")
    assert model.config.vocab_size == 300
    card = (tmp_path / "shelf" / "draft" / "README.md").read_text()
    assert "| full checkpoint |" in card
    assert "| compact form |" in card


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_drafts_on_states_are_published_as_they_were_measured(job, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(reload, "ALPHA_TOLERANCE", 0.025)  # one token of 96 is 0.01
    changes = PRUNED | {"drafter": kind, "max_gamma": 3, "draft_vocab_size": 280}
    recipe = job(tmp_path / "run", **changes, **SHORT)
    assert run(recipe) == 0
    to = tmp_path / "shelf" / "draft"
    publish(recipe.folder, to, licence="mit")
    report, card = check_run(recipe.folder), (to / "README.md").read_text()
    (form,) = forms_of(to, kind)
    again = reload_forms(recipe.folder, report, [form])[kind]
    assert again.alpha.mean == pytest.approx(report.tuned[1].alpha.mean, abs=0.025)
    assert f"| {kind} |" in card
    assert "This draft is no language model" in card
    assert "AutoModelForCausalLM" not in card
    if kind == "eagle3":
        assert '"method": "eagle3"' in card
    else:
        assert "vLLM does not start with it" in card  # its heads are trimmed


def test_the_compact_form_names_ids_as_vllm_reads_them(tiny_llama, tmp_path):
    model, token_ids = tiny_llama(vocab_size=12), torch.tensor([2, 3, 7, 11])
    embedding = model.get_input_embeddings().weight.detach()
    model.lm_head = torch.nn.Linear(32, 4, bias=False)
    (tmp_path / "compact").mkdir()
    KIND.save(tmp_path / "compact", model, token_ids, embedding, "")
    tensors = load_file(tmp_path / "compact" / "model.safetensors")
    rows = torch.arange(len(tensors["lm_head.weight"]))
    assert (rows + tensors["d2t"]).tolist() == token_ids.tolist()  # as EAGLE-3's are read there
    assert tensors["t2d"].nonzero()[:, 0].tolist() == token_ids.tolist()


def test_alpha_when_sampled_is_that_of_the_run(job, tmp_path):
    recipe = job(tmp_path / "run", **PRUNED, **SHORT, temperature=0.8)
    assert run(recipe) == 0
    report = check_run(recipe.folder)
    found = reload_forms(recipe.folder, report, forms_of(recipe.folder / "draft", None))
    alpha = report.tuned[1].alpha.mean
    assert 0 < alpha < 1
    for one in found.values():
        assert one.alpha.mean == pytest.approx(alpha, abs=0.01)


def test_a_form_of_other_weights_is_an_error_with_both_numbers(pruned):
    path = pruned / "draft" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file(tensors, path, metadata={"format": "pt"})
    report = check_run(pruned)
    alpha = report.tuned[1].alpha.mean
    message = rf"The full checkpoint, .* alpha 0\.0\d+, but the run measured {alpha:.4f}"
    with pytest.raises(ReloadError, match=message):
        reload_forms(pruned, report, forms_of(pruned / "draft", "pruned"))


@pytest.mark.parametrize(
    ("moved", "refused"),
    [
        ([0, 0, 1, 0, 0, -2, 0, 2, 2, 1, 1, 0], False),  # 0.013, as much as chance moves
        ([1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1], True),  # 0.018, one way
        ([0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0], False),  # 0.005
    ],
)
def test_alpha_may_differ_by_a_hundredth_or_by_chance(moved, refused):
    rows = [Agreement(str(n), None, 9.0, 32) for n in range(len(moved))]
    again = [replace(a, alpha_sum=9.0 + more) for a, more in zip(rows, moved, strict=True)]
    found = reload.Reloaded(metrics.alpha(again), metrics.alpha_apart(again, rows))
    report = SimpleNamespace(tuned=("tuned", SimpleNamespace(alpha=metrics.alpha(rows))))
    form = reload.Form("full checkpoint", Path("draft"))
    with pytest.raises(ReloadError, match="apart") if refused else nullcontext():
        reload.check(form, found, report)
    reload.check(replace(form, quantised=True), found, report)


def test_mass_on_dropped_ids_is_an_error(pruned, capsys):
    compact = pruned / "draft" / "compact" / "model.safetensors"
    tensors = load_file(compact)
    tensors["t2d"] = torch.arange(300) < 150  # as if half of the ids had no row
    save_file(tensors, compact, metadata={"format": "pt"})
    full = forms_of(pruned / "draft", "pruned")[0]
    with pytest.raises(ReloadError, match=r"gives \d+\.\d\d% of its probability to tokens that"):
        reload_forms(pruned, check_run(pruned), [full])
    assert "of q's mass on ids that the head dropped" in capsys.readouterr().out


def test_what_was_measured_is_kept_for_the_same_weights_and_prompts(pruned, monkeypatch):
    report, forms = check_run(pruned), forms_of(pruned / "draft", "pruned")
    found = reload_forms(pruned, report, forms)

    def load(*_):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(reload, "load_target", load)
    assert reload_forms(pruned, report, forms) == found
    report.decoding.max_new_tokens += 1
    with pytest.raises(AssertionError, match="the target was loaded"):
        reload_forms(pruned, report, forms)


def test_a_report_on_other_prompts_is_refused(pruned):
    report = check_run(pruned)
    report.prompts.sha256 = "ab" * 32
    with pytest.raises(ReloadError, match=r"on other prompts .* python -m eval.run --run"):
        reload_forms(pruned, report, forms_of(pruned / "draft", "pruned"))


def test_base_and_adapter_are_the_merged_draft_to_the_bit(job, folder, tmp_path):
    # buffers that are computed in fp32, as rotary frequencies, stay in fp32
    adapters = {"draft": str(folder / "target"), "use_peft": True, "lora_r": 4, "lora_alpha": 8}
    recipe = job(tmp_path / "run", **adapters, **SHORT, dtype="bfloat16")
    assert run(recipe) == 0
    to = tmp_path / "draft"
    to.mkdir()
    forms = {form.name: form for form in export_forms(recipe.folder, to)[0]}
    target = load_target(recipe.target, torch.bfloat16, "cpu", 64)
    text = [5 + i for i in range(24)]
    merged, of_adapter = (
        next(iter(reload._plain(forms[name], target)(text, text[::-1], [Sampling(1.0)])))
        for name in ("full checkpoint", "adapter")
    )
    assert torch.equal(merged, of_adapter)


def test_an_adapter_stands_beside_what_it_was_merged_into(job, folder, tmp_path):
    adapters = {"draft": str(folder / "target"), "use_peft": True, "lora_r": 4, "lora_alpha": 8}
    # of few tokens a single one, rounded otherwise on another CPU, is more than the tolerance
    recipe = job(tmp_path / "run", **adapters, **SHORT | {"max_new_tokens": 64})
    assert run(recipe) == 0
    to = tmp_path / "draft"
    to.mkdir()
    forms, _ = export_forms(recipe.folder, to)
    assert "adapter" in [form.name for form in forms]
    config = json.loads((to / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "target"  # and not this machine's folder
    report = check_run(recipe.folder)
    assert report.drafts["tuned"].sha256 is not None
    found = reload_forms(recipe.folder, report, forms)
    assert found["adapter"].alpha.mean == pytest.approx(report.tuned[1].alpha.mean, abs=0.01)


def test_licences_are_those_of_what_the_draft_derives_from(tmp_path):
    for name, licence in (("target", "mit"), ("sibling", "mit"), ("other", "apache-2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\nlicense: {licence}\n---\n# A model\n")
    (tmp_path / "bare").mkdir()
    target, sibling, other, bare = (
        str(tmp_path / name) for name in ("target", "sibling", "other", "bare")
    )
    assert derived_licence([target]) == ("mit", "as stated by target")
    assert derived_licence([target, sibling]) == ("mit", "as stated by target and sibling")
    licence, why = derived_licence([target, other])
    assert licence is None
    assert why == "the licences differ (target: mit, other: apache-2.0)"
    assert derived_licence([target, bare]) == (None, "no licence stands with bare")
