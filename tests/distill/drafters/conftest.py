"""A target of a few kilobytes, and untrained drafts of it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters import eagle3
from distill.drafters.kind import Origin, kinds
from distill.drafters.mtp import to_train
from eval.decoding.build import build_decoder
from eval.decoding.target import Target
from tests.eagle3 import PublishedEagle3
from tests.mtp import mtp_config, random_head

VOCAB, SIZE, MASK = 61, 24, 60


@pytest.fixture(scope="session")
def target(tiny_llama):
    # of a size that no kernel for eight bits takes: all is exact in fp32
    shape = {"hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 3}
    model = tiny_llama(0, 4, vocab_size=VOCAB, num_key_value_heads=2, **shape)
    return Target(
        Checkpoint("tiny", Path()), model, build_decoder(model, 120), frozenset({VOCAB + 1})
    )


@pytest.fixture(scope="session")
def random_draft(target):
    """random_draft(name, token_ids, layers, max_gamma): a draft of that kind, random matrices."""

    def make(name, token_ids=None, layers=None, max_gamma=3):
        kind = kinds()[name]
        read = layers or kind.target_layers(target.model.config.to_dict())
        if name == "mtp":
            config = mtp_config("deepseek_v3", hidden_size=SIZE, vocab_size=VOCAB)
            return to_train(random_head(config, 2), target.decoder.embedding)
        lora = {"lora_r": 4, "lora_alpha": 2}  # a larger one would drown what is read
        origin = Origin(target, token_ids, [], 1, max_gamma, read, MASK, **lora)
        model = kind.initialise(origin).model.float()
        torch.manual_seed(2)
        with torch.no_grad():
            for weight in (p for p in model.parameters() if p.requires_grad and p.ndim > 1):
                weight.normal_(std=0.3)
        return model

    return make


@pytest.fixture(scope="session")
def states(target):
    """states(ids, layers): the target's states at these ids, by layer."""

    def read(ids, layers):
        found = dict.fromkeys(layers)
        cache = target.decoder.new_cache(1, len(ids))
        target.decoder.forward(torch.tensor([ids]), 0, cache, states=found)
        return found

    return read


@pytest.fixture(scope="session")
def kept_bytes():
    """kept_bytes(model, read): bytes that read() keeps for its backward pass, and the gradients."""

    def measure(model, read):
        kept = {}

        def keep(tensor):
            kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            states = read()
        states.pow(2).sum().backward()
        return sum(kept.values()), [p.grad for p in model.parameters() if p.grad is not None]

    return measure


@pytest.fixture
def warm_start(target, tmp_path):
    """warm_start(layout): a published EAGLE-3 draft of this target, its folder, and the draft that
    is trained from it.
    """

    def make(layout, dtype=torch.float32):
        kept, heads = torch.arange(0, VOCAB, 2), {"num_attention_heads": 4, "head_dim": 6}
        shape = {"vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 40}
        shape |= heads | {"num_key_value_heads": 2}
        published = PublishedEagle3(layout, shape, (1, 2), kept)
        folder = published.save(tmp_path / "published", dtype)
        origin = Origin(target, kept, [], 1, 3, (1, 2), published=folder)
        return published, folder, eagle3.KIND.initialise(origin)

    return make


@pytest.fixture
def copied(tmp_path):
    """copied(folder, changes, name): a copy of the folder with other keys in that file."""

    def make(folder, changes=None, name="config.json"):
        path = shutil.copytree(folder, tmp_path / "copy") / name
        path.write_text(json.dumps(read_json(path) | (changes or {})))
        return tmp_path / "copy"

    return make
