"""Tiny pairs that tests of drafters share: byte-level tokenizers, decoders that remember."""

import json

import torch

from align.vocabulary import read_vocabulary
from tests.align.conftest import byte_level


def make_side(folder, tokens, merges=(), added=(), eos=None):
    """A byte-level tokenizer in a folder of its own, read as one side of a pair."""
    names = [(len(tokens) + i, *about) for i, about in enumerate(added)]
    backend = byte_level({token: i for i, token in enumerate(tokens)}, names, [*merges])
    folder.mkdir()
    size = len(tokens) + len(added)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eos} if eos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return read_vocabulary(str(folder))


class Slots(list):
    """The tokens that a Remembered's cache holds."""

    def bytes_per_token(self):
        return 0


class Remembered:
    """A decoder that computes what follows a text once; a stale slot of its cache would show."""

    def __init__(self, decoder):
        self.decoder, self.known = decoder, {}
        for name in ("device", "dtype", "context_length", "embedding", "own_bytes"):
            setattr(self, name, getattr(decoder, name))

    def new_cache(self, rows, slots):
        return Slots([None] * slots)

    def after(self, text, layers):
        if (text, layers) not in self.known:
            states = dict.fromkeys(layers)
            cache = self.decoder.new_cache(1, len(text))
            logits = self.decoder.forward(torch.tensor([text]), 0, cache, states=states)[0, -1]
            self.known[text, layers] = logits, [states[layer][0, -1] for layer in layers]
        return self.known[text, layers]

    @torch.inference_mode()
    def forward(self, tokens, start, cache, last_only=False, states=None):
        layers, found = tuple(states or ()), []
        for i, token in enumerate(tokens[0].tolist()):
            cache[start + i] = token
            found.append(self.after(tuple(cache[: start + i + 1]), layers))
        for number, layer in enumerate(layers):
            states[layer] = torch.stack([read[number] for _, read in found])[None]
        return torch.stack([logits for logits, _ in found])[None][:, -1 if last_only else 0 :]
