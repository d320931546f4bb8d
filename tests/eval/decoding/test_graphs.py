"""Recorded forwards, without a GPU: what is recorded, when, and that a broken graph is noticed."""

import gc
import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from align.checkpoint import Checkpoint
from eval.decoding import forward, fused, generation, graphs, loop
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter, teacher_forced_logits
from eval.decoding.drafters.lookup import lookup_first
from eval.decoding.generation import generate_batched
from eval.decoding.graphs import GraphedDecoder, StaticCache
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring import losslessness
from eval.measuring.evaluation import Plan, evaluate
from eval.measuring.losslessness import LosslessCheck
from eval.measuring.output_check import Ledger
from eval.measuring.timing import Contender, decode_in_turns, step_costs
from eval.prompts import Prompt, PromptSet
from tests.eval.decoding.replayed import Replayed, as_on_a_gpu

VOCAB, CONTEXT = 61, 200
IDS = [3, 14, 15, 9, 2, 6, 5, 35]


@pytest.fixture
def pair(tiny, monkeypatch):
    """A fused decoder, the same one graphed, and its recorder; buckets of 32 slots."""
    monkeypatch.setattr(graphs, "BUCKET", 32)
    monkeypatch.setattr(graphs, "WIDEST", 6)
    plain = build_decoder(tiny(0), CONTEXT)
    recorder = Replayed()
    return plain, GraphedDecoder(plain, recorder), recorder


def steps(decoder, widths, layers=()):
    """Logits, and states, of a text read in pieces of these widths, some of them twice."""
    generator = torch.Generator().manual_seed(4)
    cache, at, found = decoder.new_cache(1, 120), 0, []
    for width in widths:
        for back in (0, 1):  # the second time from one token further back
            start = max(0, at - back)
            tokens = torch.randint(VOCAB, (1, width), generator=generator)
            states = dict.fromkeys(layers)
            logits = decoder.forward(tokens, start, cache, last_only=width == 2, states=states)
            found.append([logits, *states.values()])
        at += width
    return found


@pytest.mark.parametrize("layers", [(), (0, 2)])
def test_a_replay_is_right_at_every_place_and_for_every_token(pair, layers):
    plain, graphed, recorder = pair
    widths = [9, 1, 3, 1, 2, 6, 3, 1, 2, 4, 1]  # 9 is wider than is recorded
    for one, other in zip(
        steps(plain, widths, layers), steps(graphed, widths, layers), strict=True
    ):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    # a width once for each bucket in which it was asked for, however often it was
    asked, at = set(), 0
    for width in widths:
        asked |= {(width, (start + width - 1) // 32) for start in (max(0, at - 1), at)}
        at += width
    assert sorted(recorder.made) == sorted((1, width) for width, _ in asked if width <= 6)
    assert len(recorder.made) < 2 * len(widths) - 2


def test_what_is_read_once_is_not_recorded(pair, monkeypatch):
    """The last piece of a prompt, a response that is teacher-forced, prompts that are answered."""
    _, graphed, recorder = pair
    for module in (forward, generation):
        monkeypatch.setattr(module, "PIECE", 7)
    how = Decoding(Sampling(), frozenset(), 2)
    for length in range(7, 14):
        ids = [*range(length)]
        teacher_forced_logits(graphed, ids, length - 3)
        list(generate_batched(graphed, [ids], how, 1, [0]))
        decode(graphed, None, Prompt("p", prompt="unused"), ids, how)
    assert recorder.made == [(1, 1)]  # the step after a prompt


def test_what_a_replay_returned_stays_after_the_next(pair):
    _, graphed, _ = pair
    cache = graphed.new_cache(1, 40)
    first = graphed.forward(torch.tensor([[5]]), 0, cache)
    kept = first.clone()
    graphed.forward(torch.tensor([[7]]), 1, cache)
    assert torch.equal(first, kept)


def test_a_number_read_by_the_host_is_caught(pair, monkeypatch):
    _, graphed, _ = pair
    bias = fused.causal_bias
    monkeypatch.setattr(
        fused, "causal_bias", lambda start, *rest: bias(torch.tensor([int(start)]), *rest)
    )
    with pytest.raises(RuntimeError, match="item"):
        graphed.forward(torch.tensor([[5]]), 3, graphed.new_cache(1, 40))


def test_caches_are_given_back_and_never_shared(pair):
    _, graphed, recorder = pair
    one, other = graphed.new_cache(1, 40), graphed.new_cache(1, 50)
    assert one.slots == other.slots == 256  # the whole context
    assert one.number != other.number
    assert one.keys[0].data_ptr() != other.keys[0].data_ptr()
    expected = graphed.forward(torch.tensor([[5, 6]]), 0, one)
    one.keys[0].fill_(1e4)  # what stands where nobody has written in this text is masked
    one.values[0].fill_(1e4)
    number = one.number
    del one
    gc.collect()
    again = graphed.new_cache(1, 33)
    assert again.number == number
    assert torch.equal(graphed.forward(torch.tensor([[5, 6]]), 0, again), expected)
    assert len(recorder.made) == 1
    assert not isinstance(graphed.new_cache(2, 40), StaticCache)
    assert not isinstance(graphed.new_cache(1, 257), StaticCache)
    del again, other
    again = graphed.new_cache(1, 33)
    assert again.number == number  # and not the other's, with graphs of its own
    resized = again.resized(40)
    assert not isinstance(resized, StaticCache)
    resized.keys[0].zero_()
    assert again.keys[0].abs().sum() > 0


def draft(tiny, graph):
    """A draft whose weights are near the target's."""
    near = tiny(0)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(0.05 * weight.std() * torch.randn_like(weight))
    decoder = graph(build_decoder(near, CONTEXT))
    return CausalLMDrafter(decoder=decoder, vocab_size=VOCAB, vocabulary={})


def test_graphs_and_caches_do_not_grow_with_the_number_of_texts(tiny, pair):
    _, graphed, recorder = pair
    near = draft(tiny, lambda decoder: GraphedDecoder(decoder, recorder))
    both, how = [near, lookup_first(near, frozenset())], Decoding(Sampling(), frozenset(), 8)
    step_costs(graphed, both, 20, 4, how, 2)  # holds a cache of each draft
    for length in range(3, 80):
        decode(graphed, near, Prompt("p", prompt="unused"), (IDS * 10)[:length], how, 4)
    assert (next(graphed._numbers), next(near.decoder._numbers)) == (1, 2)  # caches so far
    assert len(graphed._recorded) <= 5 * 3  # widths and buckets
    assert len(near.decoder._recorded) <= 6 * 3


def test_nothing_is_recorded_within_a_timed_text(tiny, pair, monkeypatch, journal):
    """A recording takes 1000 seconds here. Texts of several buckets, drafts of several widths."""
    plain, made, ticks = pair[0], [], itertools.count()

    def recorder(run, inputs):
        made.append(inputs[0].shape)
        return lambda: run(*inputs)

    def graph(decoder):
        return GraphedDecoder(decoder, recorder)

    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / 1e3 + 1000 * len(made))
    monkeypatch.setattr(loop, "time", clock)
    target = Target(Checkpoint("tiny", Path()), tiny(0), graph(plain), frozenset())
    near = draft(tiny, graph)
    how = Decoding(Sampling(), frozenset(), 30)
    contenders = {
        "target": Contender(None, 0, how),
        "near": Contender(near, 4, how),
        "first": Contender(lookup_first(near, target.stops), 3, how),
    }
    ids = [IDS[:3], IDS * 5, IDS * 9]
    prompts = PromptSet("made up", [Prompt(f"p{i}", prompt="unused") for i in range(3)], ids)
    timer = SimpleNamespace(round=dict)
    decoded, _ = decode_in_turns(target, contenders, prompts, journal, ("", timer))
    assert len(made) > 10
    assert all(run.seconds < 1000 for runs in decoded for run in runs)


def test_a_graph_that_is_wrong_in_an_early_bucket_is_a_mismatch(tiny, pair, monkeypatch):
    """Outputs without and with a draft are equally wrong; later graphs are right."""
    monkeypatch.setattr(losslessness, "BUCKET", 32)

    def early(run, inputs):
        replay = Replayed()(run, inputs)

        def changed():
            logits, *states = replay()
            return [logits.roll(1, -1) if int(inputs[1]) < 32 else logits, *states]

        return changed

    target = Target(
        Checkpoint("tiny", Path()), tiny(0), GraphedDecoder(pair[0], early), frozenset()
    )
    how, prompt = Decoding(Sampling(), frozenset(), 60), Prompt("p", prompt="unused")
    run = decode(target.decoder, None, prompt, IDS, how)
    check, prompts = LosslessCheck(target, how, str), PromptSet("made up", [prompt], [IDS])
    none = SimpleNamespace(layers=())
    (entry,) = check.ledger(none, 0, prompts, [run], [run])["divergences"]
    assert not entry["tie"]
    assert entry["position"] == 32 - len(IDS)  # the last step of the first bucket


def stale_position(run, inputs):
    frozen = inputs[1].clone()
    return Replayed()(lambda tokens, start, *held: run(tokens, frozen, *held), inputs)


def with_mask(run, inputs, start_of):
    right = fused.causal_bias
    with patch.object(fused, "causal_bias", lambda start, *rest: right(start_of(start), *rest)):
        return Replayed()(run, inputs)


def stale_mask(run, inputs):
    frozen = inputs[1].clone()
    return with_mask(run, inputs, lambda start: frozen)


def one_slot_too_few(run, inputs):
    return with_mask(run, inputs, lambda start: start - 1)


def buffers_swapped(run, inputs):
    count = len(inputs) // 2 + 1
    values_first = [*inputs[:2], *inputs[count:], *inputs[2:count]]
    return Replayed()(run, values_first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # in bf16 ties are near
@pytest.mark.parametrize(
    "record", [Replayed(), stale_position, stale_mask, one_slot_too_few, buffers_swapped]
)
def test_a_broken_graph_is_a_mismatch_and_no_near_tie(
    tiny, letters, journal, monkeypatch, record, dtype
):
    as_on_a_gpu(monkeypatch, lambda: record)
    model = tiny(0).to(dtype)
    checkpoint = Checkpoint("tiny", Path())
    checkpoint.tokenizer = letters(VOCAB)
    target = Target(checkpoint, model, build_decoder(model, CONTEXT), frozenset({99}))
    near = draft(lambda seed: tiny(seed).to(dtype), lambda decoder: decoder)
    ids = [[*range(i, i + 7)] for i in range(4)]
    prompts = PromptSet("made up", [Prompt(f"p{i}", prompt="unused") for i in range(4)], ids)
    how = Decoding(Sampling(), target.stops, 12)
    _, (log,) = evaluate(target, {"near": near}, prompts, prompts, how, Plan(3, 3, 4), journal, {})
    checked = Ledger(**log.about["lossless"])
    right = isinstance(record, Replayed)
    assert checked.unexplained == (0 if right else 4)
    assert right or checked.tie_divergences == 0
