"""A real llama-server drafts with tiny DFlash and EAGLE-3 drafts as the reference decoder does.

It needs a llama-server (docs/engines.md), and no model.
"""

import numpy as np
import pytest
import torch

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.machine import cores
from eval.decoding.drafters import LOOKUP_FIRST
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines import llama_cpp
from eval.engines.llama_cpp import LlamaLauncher, LlamaServer, llama_server
from eval.prompts import Prompt
from tests.distill.conftest import TEXTS
from tests.siblings import LARGE, save_sibling

pytestmark = pytest.mark.real
PROMPTS = [Prompt(text, prompt=text[:20]) for text in TEXTS[:8]]
GREEDY = Decoding(Sampling(), frozenset(), 100)
MOST = 3  # tokens of a draft


def accepted_up_to(outputs):
    """The share of speculation steps whose first i draft tokens are accepted [MOST].

    The last step of an output is left out, because it may be cut.
    """
    emitted = np.concatenate([run.block_tokens[:-1] for run in outputs])
    return (emitted[:, None] > 1 + np.arange(MOST)).mean(0)


def save_ascii_target(folder):
    """A target that writes ASCII, because llama-server refuses outputs that are no UTF-8."""
    save_sibling(folder, LARGE, 1, layers=7)  # fewer have no three states for an EAGLE-3 draft
    model, words = (
        Checkpoint.open(folder).load(torch.float32),
        Checkpoint.open(folder).tokenizer.get_vocab(),
    )
    others = [i for token, i in words.items() if not token.replace("Ġ", "").isascii()]
    with torch.no_grad():
        head = model.lm_head.weight
        head[others] = head[0].clone()
    model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("drafter", "keys"),
    [("dflash", {"max_gamma": MOST}), ("eagle3", {"draft_vocab_size": 280, "ttt_steps": MOST})],
)
def test_a_draft_that_reads_states(drafter, keys, tmp_path, distilled, monkeypatch):
    try:
        llama_server()
    except UserError as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("LLAMA_ARG_THREADS", str(cores()))  # it counts cores without `taskset`
    monkeypatch.setattr(llama_cpp, "DRAFT_KIND", "f32")  # rounded, drafts of this size are others
    save_ascii_target(tmp_path / "target")
    draft = str(distilled("run", drafter=drafter, max_steps=150, **keys))
    (tmp_path / "gguf").mkdir()
    spec = str(tmp_path / "target")
    servers = LlamaLauncher(
        Checkpoint.open(spec), [draft, LOOKUP_FIRST + draft], tmp_path / "gguf", 200, 1, ()
    )
    assert not servers.unreadable

    target = load_target(Checkpoint.open(spec), torch.float32, "cpu", 256)
    drafter = load_drafter(draft, target)

    def served(*drafting):
        with servers.serve(*drafting, None) as address:
            server = LlamaServer(address, 600)
            return [server.decode(prompt, GREEDY).run for prompt in PROMPTS]

    def decoded(prompt, length):
        ids = target.checkpoint.tokenizer(prompt.prompt)["input_ids"]
        return decode(target.decoder, drafter, prompt, ids, GREEDY, length)

    plain = served("", 0)
    for length in (2, MOST):
        there, here = served(draft, length), [decoded(prompt, length) for prompt in PROMPTS]
        assert [run.tokens for run in there] == [run.tokens for run in plain]
        assert np.allclose(accepted_up_to(there), accepted_up_to(here), atol=0.02)
        assert accepted_up_to(here)[1] > 0.1
    both = served(LOOKUP_FIRST + draft, MOST)
    assert [run.tokens for run in both] == [run.tokens for run in plain]
