"""Adapters on one shared base: kept as peft writes them, and what our code makes of them."""

import json
import re
import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from align.sources import SourceError
from distill import train
from distill.forms import export_forms
from distill.lora import full_head
from distill.publish import publish
from distill.recipe import RecipeError
from distill.train import run
from eval.decoding.drafters.adapter import AdapterError
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.prompts import load_prompts

BASE = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 290, "max_steps": 0}
LORA = {"draft": None, "use_peft": True, "lora_r": 4, "lora_alpha": 8, "max_steps": 12}


@pytest.fixture(scope="module")
def base(job, tmp_path_factory):
    recipe = job(tmp_path_factory.mktemp("base") / "run", **BASE)
    assert run(recipe) == 0
    return recipe.folder


@pytest.fixture(scope="module")
def tuned(job, base, tmp_path_factory):
    """The folder of a run with adapters on that base."""
    recipe = job(tmp_path_factory.mktemp("lora") / "run", base=str(base), **LORA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *_: None)
        assert run(recipe) == 0
    return recipe.folder


def ids():
    return torch.randint(0, 300, (2, 24), generator=torch.Generator().manual_seed(1))


def test_a_base_is_kept_as_it_was_prepared(base):
    report = json.loads((base / "report" / "report.json").read_text())
    assert list(report["drafts"]) == ["lookup", "tuned", "tuned+lookup"]
    one = load_file(base / "prepared" / "model.safetensors")
    other = load_file(base / "draft" / "compact" / "model.safetensors")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), torch.float32, "cpu", 200)


def forced(spec, target):
    """q of a draft along a text."""
    (q,) = load_drafter(str(spec), target).teacher_forced(
        [5, 9, 20, 40], [7, 8, 30, 31], [Sampling(1.0)], {}
    )
    return q


def test_the_adapter_on_the_base_is_the_merged_draft(base, tuned, target):
    """For peft alone, in the form that other engines load, and for our decoder's form."""
    model = AutoModelForCausalLM.from_pretrained(base / "draft").eval()
    before = model(ids()).logits
    with torch.no_grad():
        by_peft = PeftModel.from_pretrained(model, str(tuned / "draft" / "adapter"))(ids()).logits
        merged = AutoModelForCausalLM.from_pretrained(tuned / "draft").eval()(ids()).logits
    assert not torch.allclose(before, merged, atol=0.1)
    torch.testing.assert_close(by_peft, merged, atol=2e-4, rtol=1e-4)
    assert by_peft.argmax(-1).equal(merged.argmax(-1))
    ours = forced(f"adapter:{tuned / 'draft' / 'adapter'}", target)
    assert ours.equal(forced(tuned / "draft", target))
    assert not ours.equal(forced(base / "draft", target))


def test_an_adapter_changes_no_text(base, tuned, folder, target):
    prompts = load_prompts(str(folder / "train.jsonl"))[:4]
    given = prompts, [target.tokenizer(prompt.prompt)["input_ids"] for prompt in prompts]
    how = Decoding(Sampling(), target.stops, 24)
    alone = [run.tokens for run in decode(target.decoder, None, *given, how, DraftLength(0))]
    place = f"adapter:{tuned / 'draft' / 'adapter'}"
    for spec in (place, f"{place}@{base / 'draft'}", f"lookup-first:{place}"):
        runs = decode(target.decoder, load_drafter(spec, target), *given, how, DraftLength(3))
        assert [run.tokens for run in runs] == alone, spec
        assert sum(sum(run.drafted) for run in runs) > 0


def test_a_sibling_is_the_base_of_its_adapters(folder, target, tmp_path):
    """A whole checkpoint, and an adapter that others trained: of kinds that no recipe here has."""
    torch.manual_seed(5)
    sibling = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    with torch.no_grad():
        sibling.model.layers[1].mlp.down_proj.weight.mul_(0.5)
    place = shutil.copytree(folder / "target", tmp_path / "sibling")
    sibling.save_pretrained(place)
    config = LoraConfig(r=4, use_rslora=True, use_dora=True, target_modules=["q_proj", "up_proj"])
    model = get_peft_model(sibling, config)
    for name, weight in model.named_parameters():
        weight.data += 0.1 * torch.randn_like(weight) if "lora" in name else 0
    model.peft_config["default"].base_model_name_or_path = str(place)
    model.save_pretrained(str(tmp_path / "adapter"))
    shutil.copytree(place, tmp_path / "merged")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    ours = forced(f"adapter:{tmp_path / 'adapter'}", target)
    torch.testing.assert_close(ours, forced(tmp_path / "merged", target))
    assert not torch.allclose(ours, forced(place, target), atol=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_a_head_is_merged_or_refused(folder, target, tmp_path, tiny_llama, tied):
    place = shutil.copytree(folder / "target", tmp_path / "sibling")
    tiny_llama(3, vocab_size=300, tie_word_embeddings=tied).save_pretrained(place)
    sibling = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    model = get_peft_model(sibling, LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
    for name, weight in model.named_parameters():
        weight.data += 0.1 * torch.randn_like(weight) if "lora" in name else 0
    model.peft_config["default"].base_model_name_or_path = str(place)
    model.save_pretrained(str(tmp_path / "adapter"))
    if tied:
        with pytest.raises(SourceError, match=r"lm_head, which in .* is head and embed"):
            forced(f"adapter:{tmp_path / 'adapter'}", target)
        return
    text = torch.tensor([[5, 9, 20, 40, 7, 8, 30, 31]])
    with torch.no_grad():
        by_peft = model(text).logits[0, 3:7].softmax(-1)
    torch.testing.assert_close(forced(f"adapter:{tmp_path / 'adapter'}", target)[0], by_peft)


def test_the_adapter_knows_its_base(base, tuned):
    folder = tuned / "draft" / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "base.json",
    ]
    about = json.loads((folder / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base / "draft")
    assert len(json.loads((folder / "base.json").read_text())["base_sha256"]) == 2
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
        ({"lora_target_modules": "lm_head"}, "trimmed head"),
        ({"lora_target_modules": "q_proj,lm_head"}, "trimmed head"),
    ],
)
def test_adapters_that_cannot_be_are_refused(job, tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message):
        job(tmp_path, **changes)


@pytest.mark.parametrize("modules", ["q_prj", "q_proj,q_prj", "q_proj, q_prj"])
def test_adapters_on_what_no_draft_has_are_refused_first(job, tmp_path, modules):
    recipe = job(tmp_path / "run", use_peft=True, lora_target_modules=modules)
    with pytest.raises(
        RecipeError, match=r"names '.?q_prj', which .* \(.*, q_proj, .* are\); corr"
    ):
        run(recipe)
    assert not recipe.folder.exists()


def test_the_base_of_another_target_is_refused(job, base, folder, tmp_path, tiny_llama):
    other = tmp_path / "target"
    tiny_llama(9, vocab_size=300, eos_token_id=0).save_pretrained(other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((folder / "target" / name).read_bytes())
    recipe = job(tmp_path / "run", **LORA, base=str(base), target=str(other))
    with pytest.raises(ValueError, match="made for another target"):
        run(recipe)


def with_config(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def of_another_base(folder):
    (folder / "base.json").write_text(json.dumps({"base_sha256": ["ab" * 32]}))


def of_a_base_that_is_gone(folder):
    with_config(folder, base_model_name_or_path="gone/base/draft")


def of_two_layers(folder):
    """For a base of one, of which peft would take the first alone."""
    with_tensors(
        folder, lambda t: t | {k.replace("rs.0.", "rs.1."): v.clone() for k, v in t.items()}
    )


def of_a_narrower_base(folder):
    with_tensors(folder, lambda t: {k: v[:, :2].contiguous() for k, v in t.items()})


def with_rows_of_its_own(folder):
    rows = {"base_model.model.model.embed_tokens.weight": torch.zeros(300, 32)}
    with_tensors(folder, lambda t: t | rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (shutil.rmtree, "is no adapter: it lacks adapter_config.json"),
        (of_another_base, "was trained on another base"),
        (of_a_base_that_is_gone, r"gone/base/draft.* was not found"),
        (of_two_layers, r"does not fit .*only one of them has .*layers\.1\."),
        (of_a_narrower_base, "does not fit"),
        (with_rows_of_its_own, "TOK-013"),
    ],
)
def test_adapters_that_fit_no_base_are_refused(tuned, target, tmp_path, change, message):
    folder = shutil.copytree(tuned / "draft" / "adapter", tmp_path / "adapter")
    change(folder)
    with pytest.raises(ValueError, match=message):
        load_drafter(f"adapter:{folder}", target)


def test_the_head_of_a_full_form_is_found(base):
    assert full_head(str(base)).shape == (300, 32)


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
    publish(measured, to, licence="mit", adapter=True, base="org/base-draft")
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
    about = json.loads((to / "base.json").read_text())
    assert made_by["hashes"]["base"] in about["base_sha256"]
    card = (to / "README.md").read_text()
    assert ModelCard(card).data.library_name == "peft"
    assert ModelCard(card).data.base_model == "org/base-draft"
    for words in (
        "A LoRA adapter of `org/base-draft`",
        f"`{json.loads((to / 'base.json').read_text())['base_sha256'][0]}`",
        "| adapter | ",
        "The gain of alpha over `untuned` is",
        "--draft org/base-draft+adapter:code-adapter",
    ):
        assert words in card
    assert str(tmp_path) not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code[1], "card", "exec")


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
        publish(recipe.folder, tmp_path / "to", licence="mit", adapter=True)
    assert not (tmp_path / "to").exists()
    (tmp_path / "forms").mkdir()
    forms, left_out = export_forms(recipe.folder, tmp_path / "forms")
    assert "made by the run" in left_out["adapter"]
    assert "adapter" not in [form.name for form in forms]
    assert not (tmp_path / "forms" / "adapter").exists()
