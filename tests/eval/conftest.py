"""What tests of the decoders share: a tiny model whose text does not repeat, and an adversary."""

import json
from types import SimpleNamespace

import pytest

from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.measuring.journal import Journal
from tests.byte_level import SHAPE, noisy, save

WORDS = ["def", "return", "the", "total", "value", "for", "in", "if"]


@pytest.fixture(scope="session")
def tiny(tiny_llama):
    return lambda seed, vocab=61: tiny_llama(
        seed, spread=4, vocab_size=vocab, num_key_value_heads=2
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny_llama):
    """Checkpoints `target` and `draft` of one byte-level tokenizer, and prompts.jsonl."""
    root = tmp_path_factory.mktemp("pair")
    for noise, name in ((0.0, "target"), (0.1, "draft")):
        save(root / name, noisy(tiny_llama(spread=4, **SHAPE), noise))
    rows = (
        {
            "prompt": f"def total(value):\n {WORDS[i % 8]} {i}",
            "category": "odd" if i % 2 else "even",
        }
        for i in range(12)
    )
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (root / "prompts.jsonl").write_text(text, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def drafter():
    """Makes a drafter of a decoder over the target's ids: drafter(decoder, **fields to change)."""

    def make(decoder, vocab_size=61, **fields):
        return CausalLMDrafter(decoder=decoder, vocab_size=vocab_size, vocabulary={}, **fields)

    return make


@pytest.fixture(scope="session")
def letters():
    """Makes a tokenizer of so many letters, as far as a report needs one."""

    def make(vocab_size):
        vocab = {chr(0x41 + i): i for i in range(vocab_size)}
        text = json.dumps(
            {"model": {"type": "BPE", "vocab": vocab}, "decoder": {"type": "ByteLevel"}}
        )
        backend = SimpleNamespace(to_str=lambda: text)
        return SimpleNamespace(is_fast=True, backend_tokenizer=backend, chat_template=None)

    return make


@pytest.fixture(scope="session")
def adversary():
    """A decoder that always drafts what the given one, the target, likes second best."""

    class SecondChoice:
        def __init__(self, decoder):
            self.decoder = decoder
            self.new_cache, self.device = decoder.new_cache, decoder.device

        def forward(self, *args, **kwargs):
            logits = self.decoder.forward(*args, **kwargs)
            return logits.scatter(-1, logits.argmax(-1, keepdim=True), float("-inf"))

    return SecondChoice


@pytest.fixture
def journal(tmp_path):
    """Where nothing has been measured yet."""
    return Journal(tmp_path / "measured.jsonl")
