"""Drafts that others published, tuned further: EAGLE-3 in both layouts, Medusa heads, DFlash."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from distill.models import check_models, open_models, with_published_kind
from distill.train import run
from eval.decoding.drafters import dflash, eagle3, medusa
from eval.decoding.drafters.compact import weights_of
from eval.decoding.forward import input_embedding
from eval.reporting.fields import read_report
from tests.dflash import save_published
from tests.eagle3 import PublishedEagle3

# by layout
KIND_OF = {"speculators": "eagle3", "eagle": "eagle3", "medusa": "medusa", "z-lab": "dflash"}
EAGLE3 = ("speculators, by default since 2026", "speculators, Qwen3 layers")
DFLASH = ("z-lab, by others", "speculators, DFlash", "speculators, DFlash with a window")
RANDOM = EAGLE3 + DFLASH
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
WINDOW |= {"use_sliding_window": True}
KIND_OF |= dict.fromkeys(EAGLE3, "eagle3") | dict.fromkeys(DFLASH, "dflash")
# the target that has a vocabulary entry for the mask
TARGET_OF = {layout: "roomy" for layout, kind in KIND_OF.items() if kind == "dflash"}


def publish(draft, folder, layout):
    """A draft as it lies on the Hub: nothing of ours beside it. RANDOM: with random weights."""
    if layout in DFLASH:
        about = read_json(draft / "config.json")
        ids = None if layout == DFLASH[0] else torch.arange(2, about["vocab_size"] - 4)
        save_published(folder, about, about["dflash_config"]["target_layer_ids"], ids)
        if layout == DFLASH[2]:
            path = folder / "config.json"
            about = read_json(path) | {"sliding_window_non_causal": False}
            about["transformer_layer_config"] |= WINDOW
            path.write_text(json.dumps(about))
        return
    if layout in EAGLE3:
        random_eagle3(draft, layout).save(folder)
        return
    shutil.copytree(draft, folder)
    (folder / "compact.json").unlink()
    if layout != "eagle":
        return
    about = read_json(folder / "config.json")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": about["draft_vocab_size"],
    }
    own["eagle_config"] = {eagle3.LAYERS: about[eagle3.LAYERS]}
    (folder / "config.json").write_text(json.dumps(about["transformer_layer_config"] | own))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    save_file(renamed, folder / "model.safetensors")


def random_eagle3(draft, layout):
    """A draft of the layout for the target of an EAGLE-3 draft of ours."""
    about, tensors = read_json(draft / "config.json"), load_file(draft / "model.safetensors")
    rows = len(tensors["lm_head.weight"])
    token_ids = torch.arange(rows) + tensors.get("d2t", torch.zeros(rows, dtype=int))
    ours = about["transformer_layer_config"]
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    shape = {key: ours[key] for key in ("vocab_size", "hidden_size", "intermediate_size", *heads)}
    return PublishedEagle3(layout, shape, about[eagle3.LAYERS], token_ids)


def of_kind(recipe):
    return with_published_kind(recipe, *open_models(recipe))


@pytest.fixture(scope="module")
def published(finished, tmp_path_factory):
    """Folders by layout, and the alpha that each trained draft was left with."""
    root, alphas = tmp_path_factory.mktemp("published"), {}
    for layout, kind in KIND_OF.items():
        made = finished("whole medusa" if kind == "medusa" else kind).folder
        publish(made / "draft", root / layout, layout)
        if layout not in RANDOM:
            alphas[layout] = read_report(made / "report" / "report.json").drafts["tuned"].alpha
    return root, alphas


def test_a_published_head_may_have_fewer_entries_than_a_new_one(job, folder, tmp_path):
    shape = read_json(folder / "target" / "config.json")
    PublishedEagle3("speculators", shape, [1], torch.arange(99)).save(tmp_path / "draft")
    recipe = of_kind(job(tmp_path, draft=str(tmp_path / "draft")))
    assert recipe.draft_vocab_size == 99
    check_models(recipe, *open_models(recipe))
    new = replace(recipe, draft=None)
    with pytest.raises(UserError, match="draft_vocab_size"):
        check_models(new, *open_models(new))


@pytest.mark.real
@pytest.mark.parametrize("layout", KIND_OF)
def test_it_starts_as_it_was_is_tuned_and_leaves_in_its_layout(
    job, published, folder, tmp_path, layout
):
    (root, alphas), target = published, str(folder / TARGET_OF.get(layout, "target"))
    keys = {"draft": str(root / layout), "target": target}
    recipe = job(tmp_path / "run", **keys, max_steps=60, logging_steps=10)
    assert run(recipe) == 0
    report = read_report(recipe.folder / "report" / "report.json")
    untuned, tuned = report.drafts["untuned"], report.drafts["tuned"]
    if layout in alphas:
        assert untuned.alpha.mean == pytest.approx(alphas[layout].mean, abs=1e-6)
    state = read_json(recipe.folder / "checkpoint-60" / "trainer_state.json")
    losses = [log["loss"] for log in state["log_history"] if "loss" in log]
    assert losses[-1] < 0.9 * losses[0]
    assert untuned.lossless.unexplained == tuned.lossless.unexplained == 0
    folders = root / layout, recipe.folder / "draft"
    was, now = (read_json(folder / "config.json") for folder in folders)
    changed = {"torch_dtype", "dtype", "speculators_config", "transformers_version"}
    if was.pop("auto_map", None):
        assert "auto_map" not in now  # dflash.py is not in the folder
    if shape := was.get("transformer_layer_config"):  # which has gained its class's defaults
        layers = now.pop("transformer_layer_config")
        assert {key: layers[key] for key in was.pop("transformer_layer_config")} == shape
    for key in was.keys() - changed:
        assert now[key] == was[key]
    was, now = (load_file(folder / "model.safetensors") for folder in folders)
    assert {name: t.shape for name, t in now.items()} == {n: t.shape for n, t in was.items()}
    # an interrupted run goes on
    shutil.rmtree(recipe.folder / "report")
    assert run(recipe) == 0


def test_the_kind_and_the_head_are_read_from_the_draft(job, published, tmp_path):
    root, _ = published
    found = of_kind(job(tmp_path, draft=str(root / "eagle")))
    assert (found.kind_name, found.draft_vocab_size, found.sibling) == ("eagle3", 270, None)
    whole = of_kind(job(tmp_path, draft=str(root / "medusa")))
    assert (whole.kind_name, whole.draft_vocab_size) == ("medusa", None)
    plain = job(tmp_path)
    assert of_kind(plain) is plain
    with pytest.raises(ValueError, match=r"drafter is 'medusa', but draft .* of kind 'eagle3'"):
        of_kind(job(tmp_path, draft=str(root / "eagle"), drafter="medusa"))
    with pytest.raises(ValueError, match=r"drafter is 'eagle3', but draft .* of kind 'sibling'"):
        of_kind(job(tmp_path, drafter="eagle3"))
    shutil.copytree(root / "eagle", tmp_path / "other")
    about = read_json(root / "eagle" / "config.json") | {"hidden_size": 96}
    (tmp_path / "other" / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match="target with hidden_size 96"):
        of_kind(job(tmp_path, draft=str(tmp_path / "other")))
    with pytest.raises(ValueError, match="use_peft is true"):
        of_kind(job(tmp_path, draft=str(root / "eagle"), use_peft=True))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("eagle", {"num_hidden_layers": 2}, "weights of .* do not fit"),
        ("eagle", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "layers of type Eagle3Deep"),
        ("eagle", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ("eagle", {"attention_bias": True}, "attention_bias True"),
        ("eagle", {"hidden_size": 96}, "target with hidden_size 96, but this target has"),
        ("eagle", {"norm_before_fc": True}, "weights of .* do not fit"),
        ("eagle", {"eagle_config": {eagle3.LAYERS: [2]}}, "layers .2."),  # vLLM's is not normed
        ("z-lab", {"attention_bias": True}, "attention_bias True"),
        ("z-lab", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("z-lab", {"layer_types": ["sliding_attention"] * 2}, "lack of sliding_window"),
        ("z-lab", {"dflash_config": {"use_swa": True}, "num_target_layers": 3}, "use_swa True"),
        ("z-lab", {"is_neox_style": False}, "is_neox_style False"),
        ("z-lab", {"dflash_config": {"attention_value_scale": 0.7}}, "attention_value_scale 0.7"),
        (
            "z-lab",
            {"dflash_config": {"mask_token_id": 300}, "num_target_layers": None},
            "lack of target_layer_ids",
        ),
        ("z-lab", {"dflash_config": {"mask_token_id": 300, "target_layer_ids": [1]}}, "layers .2."),
        ("z-lab", {"dflash_config": {"mask_token_id": 999, "target_layer_ids": [0]}}, "token 999"),
        ("medusa", {"original_lm_head": False}, "original_lm_head False"),
        ("medusa", {"original_lm_head": None}, "original_lm_head False"),
        ("medusa", {"medusa_fc_bias": None}, "medusa_fc_bias False"),
        ("medusa", {"num_heads": 5}, "weights of .* do not fit"),
    ],
)
def test_what_cannot_be_computed_is_refused(published, folder, tmp_path, layout, changes, message):
    """changes: of config.json; None: the key is left out."""
    shutil.copytree(published[0] / layout, tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    about = (read_json(path) | changes).items()
    path.write_text(json.dumps({key: value for key, value in about if value is not None}))
    target = Checkpoint.open(folder / TARGET_OF.get(layout, "target")).load(torch.float32)

    def load_dflash(draft, embedding, config):
        return dflash.load_dflash(draft, embedding, target.lm_head.weight, config)

    loads = {"eagle3": eagle3.load_eagle3, "medusa": medusa.load_heads, "dflash": load_dflash}
    with pytest.raises(ValueError, match=message):
        loads[KIND_OF[layout]](tmp_path / "draft", input_embedding(target), target.config)


def test_medusa_heads_of_the_whole_vocabulary_need_not_name_its_size(published, folder, tmp_path):
    path = shutil.copytree(published[0] / "medusa", tmp_path / "draft") / "config.json"
    about = read_json(path)
    path.write_text(json.dumps({k: v for k, v in about.items() if k != "truncated_vocab_size"}))
    target = Checkpoint.open(folder / "target").load(torch.float32)
    model, _ = medusa.load_heads(path.parent, input_embedding(target), target.config)
    assert len(model.lm_head.weight) == about["vocab_size"]


def test_an_embedding_of_its_own_is_refused_and_the_targets_is_dropped(published, folder, tmp_path):
    shutil.copytree(published[0] / "eagle", tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    target = Checkpoint.open(folder / "target").load(torch.float32)
    own = target.get_input_embeddings().weight.detach().clone()
    tensors = load_file(path)
    save_file(tensors | {"embed_tokens.weight": own}, path)
    model, ids = eagle3.load_eagle3(tmp_path / "draft", own, target.config)
    assert len(ids) == 270
    assert model.own_embedding
    save_file(tensors | {"embed_tokens.weight": own + 1}, path)
    with pytest.raises(ValueError, match="another input embedding"):
        eagle3.load_eagle3(tmp_path / "draft", own, target.config)


def test_a_published_pard_draft_is_trained_as_one(job, finished, tmp_path):
    draft = str(finished("pard sibling").folder / "draft")
    assert of_kind(job(tmp_path, draft=draft)).kind_name == "pard"
    assert of_kind(job(tmp_path, draft=draft, drafter="pard")).kind_name == "pard"
    with pytest.raises(UserError, match="sibling"):
        of_kind(job(tmp_path, draft=draft, drafter="sibling"))


@pytest.mark.parametrize(
    ("name", "drafter"),
    [("target", "eagle3"), ("target", "medusa"), ("mtp", "mtp"), ("hybrid", "mtp")],
)
def test_a_draft_is_rebuilt_for_its_target_after_a_fine_tune(
    job, finished, folder, tmp_path, name, drafter
):
    """The fine-tune of a target with MTP has dropped the layer, as transformers does."""
    base = folder / name
    model = Checkpoint.open(base).load(torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02 * float(weight.std(correction=0)))
    model.save_pretrained(tmp_path / "target")
    for path in base.glob("token*"):
        shutil.copy(path, tmp_path / "target")
    draft = base if drafter == "mtp" else finished(drafter).folder / "draft"
    keys = {"target": str(tmp_path / "target"), "draft": str(draft), "drafter": drafter}
    recipe = job(tmp_path / "run", **keys, max_steps=2, max_eval_prompts=2)
    assert run(recipe) == 0
    drafts = read_report(recipe.folder).drafts
    assert drafts["untuned"].sha256 != drafts["tuned"].sha256
    began, was = (weights_of(path, "cpu") for path in (recipe.folder / "prepared", draft))
    same = began.keys() & was.keys()
    assert len(same) > 5
    for name in same:
        torch.testing.assert_close(began[name], was[name])
