import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, Gemma3TextConfig, LlamaConfig, PreTrainedTokenizerFast

from align.checkpoint import Checkpoint
from distill.drafters.kind import Draft
from distill.export import export_draft, for_older_transformers
from distill.trainer import distil
from tests.distill.conftest import made_answers, plain_recipe

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_an_exported_draft_is_in_the_words_of_transformers_4_and_5(scaling, tmp_path):
    rotary = (scaling or {"rope_type": "default"}) | {"rope_theta": 500_000.0}
    config = LlamaConfig(vocab_size=448, rope_parameters=rotary)
    config.save_pretrained(tmp_path)
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=["<|x|>"],
        is_local=True,
        local_files_only=True,
    )
    words.save_pretrained(tmp_path)
    for_older_transformers(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["rope_theta"] == 500_000.0
    assert about["rope_scaling"] == scaling
    assert Checkpoint.open(tmp_path).config.rope_parameters == config.rope_parameters
    about = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only", "extra_special_tokens"} & about.keys()
    assert about["tokenizer_class"] == "PreTrainedTokenizerFast"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.extra_special_tokens == ["<|x|>"]
    assert tokenizer("a <|x|>").input_ids == words("a <|x|>").input_ids


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}]
)
def test_rotary_parameters_by_type_of_layer_are_in_the_words_of_transformers_4(scaling, tmp_path):
    full, sliding = scaling | {"rope_theta": 2e6}, {"rope_type": "default", "rope_theta": 2e4}
    rotary = {"full_attention": full, "sliding_attention": sliding}
    config = Gemma3TextConfig(rope_parameters=rotary)
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for_older_transformers(tmp_path)
    about = json.loads((tmp_path / "config.json").read_text())
    assert (about["rope_theta"], about["rope_local_base_freq"]) == (2e6, 2e4)
    assert about["rope_scaling"] == (scaling if "factor" in scaling else None)
    assert Checkpoint.open(tmp_path).config.rope_parameters == rotary


def test_the_layers_of_a_draft_in_the_layout_of_speculators_too(tmp_path):
    layers = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})
    about = {"transformer_layer_config": layers.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(about))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for_older_transformers(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    assert (shape["rope_theta"], shape["rope_scaling"]) == (500_000.0, None)
    assert shape["rope_parameters"] == layers.rope_parameters


@pytest.mark.parametrize("draft", ["a sibling", None])
def test_trained_adapters_are_saved_in_the_dtype_of_the_recipe(
    draft, tmp_path, tiny_llama, plain_trainer
):
    keys = {"use_peft": True, "lora_r": 4, "max_steps": 2, "dtype": "bfloat16", "draft": draft}
    recipe, model = plain_recipe(tmp_path, **keys), tiny_llama(vocab_size=50, pad_token_id=0)
    trained = distil(plain_trainer(recipe, model, made_answers()))
    expected = {name: weight.bfloat16() for name, weight in trained.state_dict().items()}
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0})))
    pair = SimpleNamespace(target=SimpleNamespace(tokenizer=words))
    export_draft(recipe, pair, Draft(model, None), trained, made_answers())
    saved = load_file(tmp_path / "draft" / "model.safetensors")
    assert saved.keys() >= expected.keys()
    for name, weight in saved.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, expected[name])
