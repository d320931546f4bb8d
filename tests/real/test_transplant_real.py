"""Rows that stand for nothing get next to nothing of a real model's q, at every token of a text."""

import inspect
import textwrap

import pytest
import torch

from align.sources import load_model
from align.transplant import resized
from align.vocabulary import read_vocabulary
from tests.real.test_sources_real import SPEC

pytestmark = pytest.mark.real

ROWS, TOKENS = 128, 600


@torch.inference_mode()
def test_padded_rows_are_never_likely():
    model, draft = load_model(SPEC, torch.float32), read_vocabulary(SPEC)
    padded = resized(model, draft, draft.count + ROWS)
    ids = draft.tokenizer.encode(inspect.getsource(textwrap), add_special_tokens=False)[:TOKENS]

    def share():
        q = padded(torch.tensor([ids])).logits.softmax(-1)
        return q[..., draft.count :].sum(-1)

    assert float(share().mean()) < 1e-4
    assert float(share().max()) < 1e-3
    padded.get_output_embeddings().weight[draft.count :] = 0
    assert float(share().max()) > 1e-2  # what zeros would get
