"""A target that is itself adapted (MODEL+adapter:FOLDER): checked, answered, published."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from align.check import main as check
from align.sources import SourceError, load_model, load_tokenizer, read_json, split_adapter
from distill.card import derived_licence, public_name, short_name
from distill.forms import export_target
from distill.teacher.answers import USED
from distill.train import run

SHORT = {"draft": None, "num_draft_layers": 1, "max_steps": 6}


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory):
    """Drawn at random, and large: the adapted target says something else."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=16, init_lora_weights=False, target_modules="all-linear")
    path = tmp_path_factory.mktemp("of") / "support-desk"
    get_peft_model(model, config).save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def spec(folder, adapter):
    return f"{folder / 'target'}+adapter:{adapter}"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def test_it_is_what_peft_makes_of_both(folder, adapter, spec):
    ids = torch.tensor([[5, 9, 20]])
    base = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    before = base(ids).logits
    expected = PeftModel.from_pretrained(base, str(adapter)).eval()(ids).logits
    found = load_model(spec, torch.float32)(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found, before, atol=0.1)
    text = "the cat sat"
    own, bases = load_tokenizer(spec), load_tokenizer(str(folder / "target"))
    assert own(text)["input_ids"] == bases(text)["input_ids"]


def test_it_is_merged_once_and_again_where_the_adapter_changes(spec, adapter, tmp_path, capsys):
    load_model(spec, torch.float32)
    capsys.readouterr()
    load_model(spec, torch.float32)
    assert "Merging" not in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    path = other / "adapter_model.safetensors"
    save_file({k: 2 * v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})
    load_model(f"{split_adapter(spec)[0]}+adapter:{other}", torch.float32)
    assert "Merging other into" in capsys.readouterr().err


def test_the_check_knows_it(folder, spec, capsys):
    assert check(["--target", spec, "--draft", str(folder / "target"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["relation"] == "identical"


def test_a_run_answers_with_it_and_not_with_the_base_target(job, folder, spec, tmp_path):
    plain = job(tmp_path / "plain", **SHORT)
    assert run(plain) == 0
    recipe = job(tmp_path / "adapted", **SHORT, target=spec)
    assert run(recipe) == 0
    stores = [read_json(made.folder / USED)["store"] for made in (plain, recipe)]
    assert stores[0] != stores[1]
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert report["target"] == spec
    assert all(d["lossless"]["unexplained"] == 0 for d in report["drafts"].values())
    card = (recipe.folder / "draft" / "README.md").read_text()
    assert "The target is `target+adapter:support-desk`" in card
    assert "target-support-desk" in card
    assert str(folder) not in card
    # the base target's draft, with an adapter for the adapted one
    lora = {"use_peft": True, "lora_r": 4, "draft": None, "max_steps": 6}
    tuned = job(tmp_path / "tuned", target=spec, base=str(plain.folder), **lora)
    assert run(tuned) == 0
    about = json.loads((tuned.folder / "draft" / "adapter" / "base.json").read_text())
    assert about["target"] == spec


def test_others_get_it_as_a_folder(spec, tmp_path):
    export_target(spec, tmp_path / "target")
    ids = torch.tensor([[5, 9, 20]])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "target")(ids).logits
    torch.testing.assert_close(exported, load_model(spec, torch.float32)(ids).logits)


def test_its_names_and_its_licence():
    spec = "org/model+adapter:/home/me/support-desk"
    assert public_name(spec) == "org/model+adapter:support-desk"
    assert short_name(spec) == "model-support-desk"
    assert public_name("pypi:a==1/m.gguf+adapter:x/y") == "pypi:a==1/m.gguf+adapter:y"


def test_the_licence_must_be_that_of_both(folder, tmp_path):
    for name, licence in (("model", "mit"), ("adapter", "apache-2.0")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "README.md").write_text(f"---\nlicense: {licence}\n---\n# A model\n")
    licence, why = derived_licence([f"{tmp_path / 'model'}+adapter:{tmp_path / 'adapter'}"])
    assert licence is None
    assert why == "the licences differ (model: mit, adapter: apache-2.0)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "adapter_model.safetensors").unlink(), "is no adapter: it lacks"),
        (lambda path: shutil.rmtree(path), "is no adapter: it lacks"),
    ],
)
def test_what_is_no_adapter_is_refused(folder, adapter, tmp_path, change, message):
    path = shutil.copytree(adapter, tmp_path / "adapter")
    change(path)
    with pytest.raises(SourceError, match=message):
        load_model(f"{folder / 'target'}+adapter:{path}", torch.float32)


def test_an_adapter_of_another_model_is_refused(adapter, folder, tiny_llama, tmp_path):
    tiny_llama(vocab_size=300, hidden_size=16).save_pretrained(tmp_path / "narrow")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(folder / "target" / name, tmp_path / "narrow" / name)
    with pytest.raises(SourceError, match="does not fit"):
        load_model(f"{tmp_path / 'narrow'}+adapter:{adapter}", torch.float32)


def test_one_that_brings_rows_of_its_own_is_refused(folder, adapter, tmp_path, capsys):
    path = shutil.copytree(adapter, tmp_path / "adapter")
    file = path / "adapter_model.safetensors"
    rows = {"base_model.model.model.embed_tokens.weight": torch.zeros(301, 32)}
    save_file(load_file(file) | rows, file, metadata={"format": "pt"})
    target = f"{folder / 'target'}+adapter:{path}"
    assert check(["--target", target, "--draft", str(folder / "target")]) == 2
    assert "TOK-013" in capsys.readouterr().err
