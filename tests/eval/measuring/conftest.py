"""A tiny target whose responses are known, the target as its own draft, and another draft."""

from pathlib import Path

import pytest

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.target import Target
from tests.eval.measuring.made_up import NEVER, VOCAB


@pytest.fixture(scope="session")
def tiny(tiny_llama):
    return lambda seed: tiny_llama(
        seed, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None
    )


@pytest.fixture(scope="session")
def target(tiny):
    model = tiny(0)
    return Target(Checkpoint("tiny", Path()), model, build_decoder(model, 100), NEVER)


@pytest.fixture(scope="session")
def own(target, drafter):
    """The target as its own draft."""
    return drafter(target.decoder, VOCAB)


@pytest.fixture(scope="session")
def other(tiny, drafter):
    return drafter(build_decoder(tiny(1), 100), VOCAB)
