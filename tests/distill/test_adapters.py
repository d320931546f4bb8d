"""Adapters on one shared base: kept as peft writes them, and what our code makes of them."""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from distill import train
from distill.forms import export_forms
from distill.publish import Plan, publish
from distill.recipe import RecipeError
from distill.train import run
from eval.decoding.adapters import AdapterError, adapted, averaged, read_adapter

BASE = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 290, "max_steps": 0}
LORA = {"draft": None, "use_peft": True, "lora_r": 4, "lora_alpha": 8, "max_steps": 12}
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
}


@pytest.fixture(scope="module")
def base(job, tmp_path_factory):
    recipe = job(tmp_path_factory.mktemp("base") / "run", **BASE)
    assert run(recipe) == 0
    return recipe.folder


@pytest.fixture(scope="module", params=KINDS)
def tuned(request, job, base, tmp_path_factory):
    """The folder of a run with adapters of each kind on that base."""
    kind = KINDS[request.param]
    recipe = job(tmp_path_factory.mktemp(request.param) / "run", base=str(base), **LORA, **kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *_: None)
        assert run(recipe) == 0
    return recipe.folder


def ids():
    return torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))


def test_a_base_is_kept_as_it_was_prepared(base):
    report = json.loads((base / "report" / "report.json").read_text())
    assert list(report["drafts"]) == ["tuned"]
    one = load_file(base / "prepared" / "model.safetensors")
    other = load_file(base / "draft" / "compact" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_the_adapter_on_the_base_is_the_merged_draft(base, tuned):
    """For peft alone, in the form that other engines load, and for our decoder's form."""
    model = AutoModelForCausalLM.from_pretrained(base / "draft").eval()
    before = model(ids()).logits
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(model, str(tuned / "draft" / "adapter"))(ids()).logits
        merged = AutoModelForCausalLM.from_pretrained(tuned / "draft").eval()(ids()).logits
        model = AutoModelForCausalLM.from_pretrained(base / "draft").eval()
        ours = adapted(model, read_adapter(tuned / "draft" / "adapter"))(ids()).logits
    assert not torch.allclose(before, merged, atol=0.1)
    torch.testing.assert_close(by_peft, merged, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(ours, merged, atol=2e-4, rtol=1e-4)
    assert by_peft.argmax(-1).equal(merged.argmax(-1))


def test_the_adapter_knows_its_base(base, tuned):
    folder = tuned / "draft" / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
    ]
    about = json.loads((folder / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base / "draft")
    assert len(read_adapter(folder).base_sha256) == 2
    assert not (tuned / "adapter").exists()


def test_a_base_that_was_made_again_meanwhile_is_refused(job, base, tmp_path):
    recipe = job(tmp_path / "run", base=str(shutil.copytree(base, tmp_path / "base")), **LORA)
    distil = train.distil_draft

    def replaced(*args):
        path = tmp_path / "base" / "draft" / "compact" / "model.safetensors"
        save_file({k: v + 1 for k, v in load_file(path).items() if k != "t2d"}, path)
        return distil(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "distil_draft", replaced)
        with pytest.raises(RecipeError, match="was made again since"):
            run(recipe)
    assert not (recipe.folder / "draft").exists()


def test_what_an_adapter_leaves_is_shared_in_memory(base, tuned):
    model = AutoModelForCausalLM.from_pretrained(base / "draft")
    adapter = read_adapter(tuned / "draft" / "adapter")
    one = adapted(model, adapter)
    assert one.lm_head.weight is model.lm_head.weight
    assert one.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert {f"{name}.weight" for name in adapter.parts} == {
        name
        for name, weight in one.named_parameters()
        if weight is not dict(model.named_parameters())[name]
    }
    mean = averaged(model, [one, model])
    half = (one.model.layers[0].mlp.up_proj.weight + model.model.layers[0].mlp.up_proj.weight) / 2
    torch.testing.assert_close(mean.model.layers[0].mlp.up_proj.weight, half)
    assert mean.lm_head.weight is model.lm_head.weight


def test_a_full_fine_tune_starts_from_the_base_as_well(job, base, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", lambda *_: None)
    recipe = job(tmp_path / "run", base=str(base), draft=None, max_steps=12)
    assert run(recipe) == 0
    assert not (recipe.folder / "draft" / "adapter").exists()
    one, other = (
        load_file(folder / "draft" / "compact" / "model.safetensors")
        for folder in (base, recipe.folder)
    )
    assert one["d2t"].equal(other["d2t"])
    assert not one["lm_head.weight"].equal(other["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "nowhere"}, r"base is 'nowhere', but no pruned draft lies there .*--recipe base"),
        ({"num_draft_layers": 3}, "num_draft_layers is 3, but the base .* has 1"),
        ({"draft_vocab_size": 280}, "draft_vocab_size is 280, but the base .* has 290"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_first(job, base, tmp_path, changes, message):
    recipe = job(tmp_path / "run", **({"base": str(base), **LORA} | changes))
    with pytest.raises(RecipeError, match=message):
        run(recipe)
    assert not recipe.folder.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": "outputs/base", "draft": "org/sibling"}, "give one"),
        ({"use_dora": True, "init_lora_weights": "pissa"}, "leave one of them out"),
        ({"lora_target_modules": "lm_head"}, "trimmed head"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
    ],
)
def test_adapters_that_cannot_be_are_refused(job, tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message):
        job(tmp_path, **changes)


def test_the_base_of_another_target_is_refused(job, base, folder, tmp_path, tiny_llama):
    other = tmp_path / "target"
    tiny_llama(9, vocab_size=300, eos_token_id=0).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((folder / "target" / name).read_bytes())
    recipe = job(tmp_path / "run", **LORA, base=str(base), target=str(other))
    with pytest.raises(ValueError, match="made for another target"):
        run(recipe)


def changed(folder, to, **config):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    about = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(about | config))
    return to


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "sets rank_pattern"),
        ({"bias": "all"}, "sets bias"),
        ({"init_lora_weights": "pissa"}, "sets init_lora_weights"),
        ({"peft_type": "LOHA"}, "is of kind LOHA"),
    ],
)
def test_what_is_more_than_products_is_refused(tuned, tmp_path, config, message):
    folder = changed(tuned / "draft" / "adapter", tmp_path / "changed", **config)
    with pytest.raises(AdapterError, match=message):
        read_adapter(folder)


def test_an_adapter_of_another_shape_is_refused(tuned, tiny_llama):
    with pytest.raises(AdapterError, match="does not fit its base"):
        adapted(tiny_llama(hidden_size=16), read_adapter(tuned / "draft" / "adapter"))


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"is no adapter: it has no adapter_config.json"):
        read_adapter(tmp_path)


@pytest.fixture(scope="module")
def measured(job, tmp_path_factory):
    """A run with an adapter on `base` beside it, whose head is whole, evaluated."""
    folder = tmp_path_factory.mktemp("measured")
    whole = job(folder / "base", **BASE | {"draft_vocab_size": None})
    longer = {"max_new_tokens": 48}  # of 16, one token in eight bits is more than is allowed
    recipe = job(folder / "code", base=str(whole.folder), **LORA, **longer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *_: None)
        assert run(whole) == 0
    assert run(recipe) == 0
    return recipe.folder


def test_an_adapter_is_published_alone(measured, tmp_path):
    """And what peft makes of it, alone on the base, is the draft that the run measured."""
    to = tmp_path / "shelf" / "code-adapter"
    publish(Plan(measured, to, licence="mit", adapter=True, base="org/base-draft"))
    assert sorted(path.name for path in to.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
    ]
    about = json.loads((to / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == "org/base-draft"
    model = AutoModelForCausalLM.from_pretrained(measured.parent / "base" / "draft").eval()
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(model, str(to)).generate(ids(), max_new_tokens=20)
        merged = AutoModelForCausalLM.from_pretrained(measured / "draft").eval()
        ours = merged.generate(ids(), max_new_tokens=20)
    assert by_peft.equal(ours)
    own = (measured / "draft" / "README.md").read_text()
    assert "Started from `base`" in own
    made_by = json.loads((measured / "provenance.json").read_text())
    assert made_by["hashes"]["base"] in read_adapter(to).base_sha256
    card = (to / "README.md").read_text()
    assert ModelCard(card).data.library_name == "peft"
    assert ModelCard(card).data.base_model == "org/base-draft"
    for words in (
        "| base | `org/base-draft` |",
        f"`{json.loads((to / 'base.json').read_text())['base_sha256'][0]}`",
        "| loaded again by peft on the base | alpha ",
        "gain of alpha over `untuned`",
        "On other domains' prompts: not measured",
        "--draft adapter:code-adapter@org/base-draft",
    ):
        assert words in card
    assert str(tmp_path) not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code[1], "card", "exec")


def test_the_card_names_the_folder_of_the_base_and_not_this_machines(measured, tmp_path):
    to = tmp_path / "adapter"
    publish(Plan(measured, to, licence="mit", adapter=True))
    assert "| base | `base` |" in (to / "README.md").read_text()


def test_the_merged_draft_is_published_with_its_adapter(measured, tmp_path):
    forms, left_out = export_forms(measured, tmp_path)
    assert "adapter" not in left_out
    found = {form.name: form for form in forms}
    assert found["adapter"].base == str(measured.parent / "base" / "draft")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "base"


def test_an_adapter_of_what_nobody_else_has_is_not_published(job, tmp_path):
    recipe = job(tmp_path / "run", num_draft_layers=1, **LORA)
    assert run(recipe) == 0
    with pytest.raises(AdapterError, match="no adapter of a base that others have"):
        publish(Plan(recipe.folder, tmp_path / "to", licence="mit", adapter=True))
    assert not (tmp_path / "to").exists()
    (tmp_path / "forms").mkdir()
    forms, left_out = export_forms(recipe.folder, tmp_path / "forms")
    assert "made by the run" in left_out["adapter"]
    assert "adapter" not in [form.name for form in forms]
    assert not (tmp_path / "forms" / "adapter").exists()
