"""Tiny pairs that tests of drafters share: byte-level tokenizers, decoders that remember."""

import json

import torch

from align.checkpoint import Checkpoint
from eval.decoding.forward import KVCache
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
    return Checkpoint.open(folder).vocabulary


class Remembered:
    """A decoder that computes what follows a text once; its cache holds the tokens of the text."""

    def __init__(self, decoder):
        self.decoder, self.known = decoder, {}
        for name in ("device", "dtype", "context_length", "embedding"):
            setattr(self, name, getattr(decoder, name))

    def new_cache(self, rows, slots):
        tokens = torch.full((1, 1, slots, 1), -1)  # no token: a slot that is read unwritten shows
        return KVCache([tokens], [])

    def after(self, text, layers):
        if (text, layers) not in self.known:
            states = dict.fromkeys(layers)
            cache = self.decoder.new_cache(1, len(text))
            logits = self.decoder.forward(torch.tensor([text]), 0, cache, states=states)[0, -1]
            self.known[text, layers] = logits, [states[layer][0, -1] for layer in layers]
        return self.known[text, layers]

    @torch.inference_mode()
    def forward(self, tokens, start, cache, last_only=False, states=None):
        layers, end = tuple(states or ()), start + tokens.shape[1]
        held = cache.keys[0].flatten()
        held[start:end] = tokens[0]
        text = tuple(held[:end].tolist())
        found = [self.after(text[: i + 1], layers) for i in range(start, end)]
        for number, layer in enumerate(layers):
            states[layer] = torch.stack([read[number] for _, read in found])[None]
        return torch.stack([logits for logits, _ in found])[None][:, -1 if last_only else 0 :]


class RememberedNoise:
    """The decoder of Uno drafts on the caches of a Remembered target."""

    recorded = False

    def __init__(self, target, decoder):
        self.target, self.decoder, self.known = target, decoder, {}

    def forward(self, tokens, start, cache):
        held, base = cache.keys[0].flatten(), self.target.decoder
        text, read = tuple(held[:start].tolist()), tuple(tokens[0].tolist())
        held[start : start + len(read)] = tokens[0]  # as the real one does
        if (text, read) not in self.known:
            whole = base.new_cache(1, len(text) + len(read))
            base.forward(torch.tensor([text]), 0, whole)
            self.known[text, read] = self.decoder.forward(tokens, start, whole)
        return self.known[text, read]
