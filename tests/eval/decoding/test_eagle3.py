"""EAGLE-3: what it reads of the target, how it is trained in pieces, and its export."""

import pytest
import torch

from distill.drafters import eagle3 as training
from eval.decoding.build import build_decoder
from eval.decoding.drafters import eagle3
from eval.decoding.drafters.eagle3 import FORMAT, build_eagle3
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

VOCAB, SIZE = 13, 24
NEVER = frozenset({VOCAB + 1})
LAYERS = (1, 2)
IDS = [3, 1, 4, 1, 5, 9]
TEXT = [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 11, 8, 4, 6]


@pytest.fixture(scope="module")
def target(tiny_llama):
    # of a size that no kernel for eight bits takes: all is exact in fp32
    shape = {"hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 3}
    model = tiny_llama(0, 4, vocab_size=VOCAB, num_key_value_heads=2, **shape)
    return Target("tiny", model, None, build_decoder(model, 120), NEVER)


def made_eagle3(target, norm_before_residual=False):
    torch.manual_seed(2)
    config = training.layer_config(target.model.config)
    config.norm_before_residual = norm_before_residual
    model = build_eagle3(config, LAYERS, VOCAB).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1) if weight.ndim == 1 else weight.normal_(std=0.3)
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@pytest.fixture(scope="module")
def draft(target):
    """Makes a drafter over every token or only some."""

    def make(ids=None, **norm):
        ids = torch.arange(VOCAB) if ids is None else ids
        model = made_eagle3(target, **norm)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[ids].clone())
        return FORMAT.drafter(model, ids, target)

    return make


def known(target, whole, layers):
    states = dict.fromkeys(layers)
    cache = target.decoder.new_cache(1, len(whole))
    target.decoder.forward(torch.tensor([whole]), 0, cache, states=states)
    return states


def test_teacher_forced_reads_only_what_the_target_has_read(target, draft):
    """q before token i changes with the states two tokens earlier, and not with those after."""
    drafter, ids, text = draft(), IDS, TEXT[:9]
    states = known(target, [*ids, *text[:-1]], drafter.layers)
    before = drafter.teacher_forced(ids, text, Sampling(1.0), states)
    for place in range(len(ids) - 2, len(ids) + len(text) - 1):
        changed = {k: v.clone() for k, v in states.items()}
        for state in changed.values():
            state[:, place] += torch.linspace(-1, 1, SIZE)
        after = drafter.teacher_forced(ids, text, Sampling(1.0), changed)
        same = (after - before).abs().amax(-1) < 1e-6
        first = place + 2 - len(ids)
        assert same[: max(0, first)].all()
        assert first >= len(text) or not same[first]


def test_a_long_prompt_is_read_in_pieces(target, draft, monkeypatch):
    whole = known(target, [*IDS, *TEXT], LAYERS)
    hidden = draft().fused(whole)
    tokens = torch.tensor([[*IDS, *TEXT]])
    once = draft().decoder.from_start(tokens, hidden)
    monkeypatch.setattr(eagle3, "PIECE", 7)
    torch.testing.assert_close(draft().decoder.from_start(tokens, hidden), once)


def test_a_step_can_be_timed(draft):
    drafter = draft()
    for sampling in (Sampling(), Sampling(0.7)):
        drafter.step(20, sampling)()
    assert drafter.bytes > 0
    assert drafter.kv_bytes_per_token > 0
