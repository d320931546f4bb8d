"""The decoder on a GPU: its logits, its losslessness, batches and sampling."""

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.graphs import GraphedDecoder
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.timing import step_costs
from eval.prompts import Prompt

pytestmark = pytest.mark.gpu

IDS = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12], [13, 14]]
PROMPTS = [Prompt(str(i), prompt="") for i in range(len(IDS))]


@pytest.fixture
def pair(tiny_llama):
    """A target on the GPU and a trimmed draft of other weights."""

    def make(dtype=torch.float32):
        model = tiny_llama(1, spread=4, num_key_value_heads=2).to("cuda", dtype)
        draft = tiny_llama(1, spread=4, num_key_value_heads=2, num_hidden_layers=1)
        draft.lm_head = torch.nn.Linear(32, 50, bias=False)
        target = Target(
            Checkpoint("target", Path()), model, build_decoder(model, 128), frozenset({60})
        )
        decoder = build_decoder(draft.to("cuda", dtype).eval(), 128)
        about = {"vocab_size": target.vocab_size, "vocabulary": {}}
        return target, CausalLMDrafter(
            decoder=decoder, token_ids=torch.arange(50, device="cuda"), **about
        )

    return make


def test_logits_are_those_of_the_cpu(tiny_llama):
    model = tiny_llama(1, spread=4, num_key_value_heads=2)
    ids = torch.tensor([IDS[0]])
    on_cpu = build_decoder(model, 64)
    expected = on_cpu.forward(ids, 0, on_cpu.new_cache(1, 64))
    on_gpu = build_decoder(model.cuda(), 64)
    assert isinstance(on_gpu, GraphedDecoder)
    found = on_gpu.forward(ids.cuda(), 0, on_gpu.new_cache(1, 64))
    # TF32 is off by default: both sum in fp32, in another order
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_replayed_graph_computes_what_the_forward_does(tiny_llama):
    model = tiny_llama(1, spread=4, num_key_value_heads=2, max_position_embeddings=600)
    graphed = build_decoder(model.cuda(), 600)
    plain, generator = graphed.fused, torch.Generator().manual_seed(4)
    caches = graphed.new_cache(1, 600), plain.new_cache(1, 600)
    at = 0
    for width in [30, 1, 4, 1, 220, 4, 1, 3, 1, 4, 1, 1]:  # beyond the first bucket of slots
        tokens = torch.randint(61, (1, width), generator=generator).cuda()
        states = [{0: None, 2: None}, {0: None, 2: None}]
        one, other = (
            decoder.forward(tokens, at, cache, states=kept)
            for decoder, cache, kept in zip((graphed, plain), caches, states, strict=True)
        )
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for layer in (0, 2):
            torch.testing.assert_close(states[0][layer], states[1][layer], rtol=1e-4, atol=1e-4)
        at += width
    assert len(graphed._recorded) == 5  # widths 1, 3, 4; those of 1 and 4 in two buckets


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU has nothing to spread over")
def test_a_target_on_two_gpus_computes_what_it_does_on_one(tiny_llama):
    model = tiny_llama(1, spread=4, num_key_value_heads=2).cuda()
    alone = build_decoder(model, 64)
    ids = torch.tensor([IDS[0]]).cuda()
    states = [{0: None, 1: None, 2: None}, {0: None, 1: None, 2: None}]
    expected = alone.forward(ids, 0, alone.new_cache(1, 64), states=states[0])
    homes = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0}
    homes |= {"model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    spread = build_decoder(dispatch_model(model, homes), 64)
    assert {device.index for device in spread.devices} == {0, 1}
    found = spread.forward(ids, 0, spread.new_cache(1, 64), states=states[1])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for layer in (0, 1, 2):
        torch.testing.assert_close(states[1][layer], states[0][layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 3, 4])
def test_greedy_texts_are_the_targets_own(pair, length):
    target, drafter = pair()
    how = Decoding(Sampling(), target.stops, 48)
    for prompt, ids in zip(PROMPTS, IDS, strict=True):
        alone = decode(target.decoder, None, prompt, ids, how)
        drafted = decode(target.decoder, drafter, prompt, ids, how, length)
        assert drafted.tokens == alone.tokens
        assert sum(drafted.drafted) > 0


def test_sampled_first_tokens_have_the_targets_distribution(pair):
    """The second token of an output depends on the draft; 4,000 seeds are drawn."""
    target, drafter = pair(torch.bfloat16)
    counts = {}
    for name, with_it in (("alone", None), ("drafted", drafter)):
        found = torch.zeros(61)
        for seed in range(4000):
            how = Decoding(Sampling(1.0, 5), frozenset(), 3, seed)
            run = decode(target.decoder, with_it, Prompt(name, prompt=""), IDS[0], how, 2)
            found[run.tokens[1]] += 1
        counts[name] = found / found.sum()
    # total variation of two samples of 4,000 from one distribution over some 25 tokens: about 0.04
    assert 0.5 * float((counts["alone"] - counts["drafted"]).abs().sum()) < 0.08


def test_step_costs_are_of_whole_steps(pair):
    target, drafter = pair(torch.bfloat16)
    how = Decoding(Sampling(), frozenset(), 1)
    (costs,) = step_costs(target.decoder, [drafter], 40, 3, how, 30)
    assert 0 < costs.draft_step_ms < costs.target_step_ms  # one layer of two, a smaller head
