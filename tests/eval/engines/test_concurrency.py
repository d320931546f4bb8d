"""Several requests at a time, behind fake servers, and the draft lengths that they propose."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.concurrency import concurrent_rounds, load_point, timed_round
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt
from eval.reporting.fields import Report

PROMPTS = [Prompt(str(i), prompt=f"say {i}") for i in range(10)]
DECODING = Decoding(Sampling(), frozenset(), 20)


def test_every_round_has_other_prompts_and_all_are_asked():
    rounds = concurrent_rounds(PROMPTS, 1)  # a prefix cache would make repeated prompts cheaper
    asked = [prompt.id for timed in rounds for prompt in timed.prompts]
    assert asked == [prompt.id for prompt in PROMPTS]
    rounds = concurrent_rounds(PROMPTS, 4)
    assert [len(timed.prompts) for timed in rounds] == [8] * 4
    first, second, *_ = ([prompt.id for prompt in timed.prompts] for timed in rounds)
    assert first == list("01234567")
    assert second == list("89012345")


def test_so_many_requests_are_in_flight_and_counted(fake):
    points = {}
    for load in (1, 4):
        plain, drafting = fake(1, delay=0.02), fake(3, delay=0.02)
        clients = [VllmServer(server.url, 5.0, connections=4) for server in (plain, drafting)]
        rounds = concurrent_rounds(PROMPTS, load)
        points[load] = load_point(
            load, [tuple(timed_round(c, asked, DECODING) for c in clients) for asked in rounds]
        )
        assert (plain.most_active, drafting.most_active) == (load, load)
        asked, same = (sorted(b["prompt"] for b in s.streamed) for s in (plain, drafting))
        assert asked == same
    one, four = points[1], points[4]
    # every prompt once, two a round; four rounds of eight
    assert (one["requests"], four["requests"]) == (10, 32)
    assert (one["speedup"].n, four["speedup"].n) == (5, 4)
    assert four["speedup"].ci95 is None
    # 7 steps of 20 tokens after the first one, 2 drafted tokens accepted in each
    assert four["mean_acceptance_length"].mean == 3.0
    assert four["itl_ms"].baseline.tokens == 32 * 19
    both = four["tokens_per_s"]
    assert both.speculative.mean / both.baseline.mean == pytest.approx(four["speedup"].mean)
    # four at a time wait together
    assert both.baseline.mean > 2 * one["tokens_per_s"].baseline.mean


def test_outputs_of_one_token_have_no_time_between_tokens(fake):
    clients = [VllmServer(fake(length).url, 5.0, connections=1) for length in (1, 3)]
    one = replace(DECODING, max_new_tokens=1)
    asked = concurrent_rounds(PROMPTS, 1)[0]
    round_ = tuple(timed_round(client, asked, one) for client in clients)
    assert load_point(1, [round_])["itl_ms"] is None


ALWAYS_GAINS, AT_FEW = {1: 1.2, 4: 1.1, 8: 1.05}, {1: 1.4, 4: 1.1, 8: 0.8}


@pytest.mark.parametrize(
    ("lowest_of", "ranges"),
    [
        ({3: {1: 1.4, 4: 1.1, 8: 0.8, 32: 0.6}}, {"D": [(1, 7, 3), (8, 32, 0)]}),
        ({3: {1: 1.4, 8: 1.1}}, {"D": [(1, 8, 3)]}),
        ({3: {4: 0.8, 8: 1.1}}, {"D": [(1, 7, 0), (8, 8, 3)]}),
        ({3: {1: 0.9}}, {"D": [(1, 1, 0)]}),  # and 1.1 in the mean: not shown to gain
        ({3: {}}, {}),
        ({None: {1: 1.4}}, {}),  # a server whose draft length nobody told
        ({1: ALWAYS_GAINS, 3: AT_FEW}, {"D": [(1, 7, 3), (8, 8, 1)]}),
    ],
)
def test_the_length_to_serve_with_at_each_load(lowest_of, ranges):
    drafts = {
        str(gamma): SimpleNamespace(
            gamma=gamma,
            path="D",
            by_load=[
                SimpleNamespace(
                    concurrency=load, speedup=SimpleNamespace(ci95=None, range=(lowest, 9.0))
                )
                for load, lowest in points.items()
            ],
        )
        for gamma, points in lowest_of.items()
    }
    assert Report.model_construct(drafts=drafts).draft_length_by_load == ranges
