"""A real vLLM serves tiny drafts of every kind: outputs without a draft's, acceptance as ours.

It needs a Python with vLLM (docs/engines.md), and no model.
"""

import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters.kind import kinds
from distill.teacher.answers import USED
from distill.teacher.states import LocalStates, states_of
from distill.teacher.store import Answers, Store, name_of
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.counters import between
from eval.engines.server import ServerError
from eval.engines.start_vllm import serve_vllm, speculation
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt
from tests.distill.conftest import TEXTS
from tests.distill.drafters.test_published import KIND_OF, publish
from tests.real.conftest import FP32
from tests.siblings import LARGE, SMALL, save_sibling

pytestmark = pytest.mark.real
PROMPTS = [Prompt(text, prompt=text[:20]) for text in TEXTS[:8]]
NEW = 100  # tokens of an output


@pytest.fixture
def accepted(tmp_path, vllm):
    """Serves a draft and compares outputs: accepted(draft, gamma) -> shares by position, there.

    Greedy outputs must be those of the target alone.
    """

    def served(*arguments):
        with serve_vllm(tmp_path / "target", *FP32, *arguments) as address:
            server, greedy = VllmServer(address, 600), Decoding(Sampling(), frozenset(), NEW)
            before = server.counters()
            outputs = [server.decode(prompt, greedy).run.tokens for prompt in PROMPTS]
            return outputs, between(before, server.counters())

    plain = cache(served)  # without arguments: once for all drafts of a test

    def compared(draft, gamma):
        outputs, counts = served(*speculation(draft, gamma))
        assert outputs == plain()[0]
        assert counts.drafts > 0
        return np.array(counts.accepted_at) / counts.drafts

    return compared


def accepted_here(tmp_path, draft, gamma):
    """The share of greedy drafts whose first i tokens are accepted, as vLLM counts them [gamma].

    The last draft of an output is as long as the others.
    """
    target = load_target(Checkpoint.open(tmp_path / "target"), torch.float32, "cpu", 256)
    drafter = load_drafter(str(draft), target)
    decoding = Decoding(Sampling(), target.stops, NEW + gamma)
    drafts, counts = 0, np.zeros(gamma)
    for prompt in PROMPTS:
        ids = target.checkpoint.tokenizer(prompt.prompt)["input_ids"]
        run = decode(target.decoder, drafter, prompt, ids, decoding, gamma)
        done = run.prefill_tokens
        for tokens, count in zip(run.block_tokens, run.accepted, strict=True):
            if done < NEW:
                drafts += 1
                counts += np.arange(gamma) < count
            done += tokens
    return counts / drafts


@pytest.mark.parametrize(("draft_rows", "target_rows"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_a_draft_of_another_size(tmp_path, distilled, vllm, accepted, draft_rows, target_rows):
    save_sibling(tmp_path / "draft", draft_rows, 0)
    save_sibling(tmp_path / "target", target_rows, 1)
    if draft_rows < target_rows:  # as it was before it was padded
        with pytest.raises(ServerError, match="ended with status"):
            vllm(tmp_path / "target", *speculation(tmp_path / "draft", 2))
    draft = distilled("run", draft=str(tmp_path / "draft"), max_steps=60)
    assert len(accepted(draft, 2)) == 2


@pytest.mark.parametrize("kind", ["sibling", "pruned"])
def test_a_draft_that_drafts_from_masks(tmp_path, distilled, accepted, kind):
    save_sibling(tmp_path / "target", LARGE, 1)
    save_sibling(tmp_path / "draft", SMALL, 0)
    keys = {"draft": str(tmp_path / "draft")} if kind == "sibling" else {"num_draft_layers": 1}
    draft = distilled("run", drafter="pard", max_gamma=3, max_steps=150, **keys)
    assert '"parallel_drafting": true' in speculation(draft, 3)[1]
    here = accepted_here(tmp_path, draft, 3)
    assert np.allclose(accepted(draft, 3), here, atol=0.03)
    assert here[1] > 0.1


@pytest.mark.parametrize("layout", KIND_OF)
def test_heads_that_others_published_before_and_after_distillation(
    tmp_path, distilled, accepted, layout
):
    save_sibling(tmp_path / "target", LARGE, 1)
    rows = 270 if layout == "eagle" else None  # vLLM maps a trimmed head's ids, a whole one's not
    keys = {"max_gamma": 2, "learning_rate": 3e-3}
    made = {"drafter": KIND_OF[layout], "draft_vocab_size": rows, "max_steps": 10}
    publish(distilled("first", **made, **keys), tmp_path / "published", layout)
    again = distilled("second", draft=str(tmp_path / "published"), max_steps=150, **keys)
    firsts = []
    for draft in (tmp_path / "published", again):
        here = accepted_here(tmp_path, draft, 2)
        assert np.allclose(accepted(draft, 2), here, atol=0.02)
        firsts.append(here[0])
    assert firsts[1] > firsts[0] + 0.02


def in_eight_bits(folder, made):
    """A copy of a checkpoint as compressed-tensors W8A8: its layers, a scale for each row."""
    shutil.copytree(folder, made)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n, t in tensors.items() if ".layers." in n and t.ndim > 1]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors[name] = (tensors[name] / scale).round().to(torch.int8)
        tensors[name.replace("weight", "weight_scale")] = scale
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    rows = eight | {"strategy": "channel", "dynamic": False}
    tokens = eight | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": rows, "input_activations": tokens}
    about = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    about |= {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    config = read_json(made / "config.json") | {"quantization_config": about}
    (made / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("kind", "bits"), [("eagle3", 32), ("dflash", 8)])
def test_a_draft_of_states_from_vllm(tmp_path, distilled, accepted, kind, bits):
    save_sibling(tmp_path / "whole", LARGE, 1)
    make = in_eight_bits if bits == 8 else shutil.copytree
    make(tmp_path / "whole", tmp_path / "target")
    draft = distilled("run", drafter=kind, answers="vllm", max_gamma=2, max_steps=150)
    target = load_target(Checkpoint.open(tmp_path / "whole"), torch.float32, "cpu", 256)
    store = Store(Path(read_json(draft.parent / USED)["store"]))
    config = target.model.config.to_dict()
    for layers in (kinds()[kind].target_layers(config), kinds()[kind].fit_layers(config, 1)):
        states, found = states_of(store, layers), store.of_states(layers)
        assert set(found.made_by(list(found))) <= {"vllm"}
        answers = [each for each in Answers(store, list(store)) if name_of(each.text) in found]
        assert bool(answers) == bool(layers)
        local = LocalStates(lambda: target).read([answer.text for answer in answers], layers)
        for answer, expected in zip(answers, local, strict=True):
            error = (states(answer).float() - expected.float()).norm() / expected.float().norm()
            assert error < (2**-8 if bits == 32 else 0.1)  # both are rounded to bf16
    shares = accepted(draft, 2)
    assert shares[0] > 0.1
    if bits == 32:
        assert np.allclose(shares, accepted_here(tmp_path, draft, 2), atol=0.02)
