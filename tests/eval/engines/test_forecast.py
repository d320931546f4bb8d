"""What drafts can gain, from times of steps that a made-up server tells."""

from collections.abc import Sequence

import pytest

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines import forecast
from eval.engines.contender import Output
from eval.engines.forecast import Step, repeating, timed_step
from eval.engines.load import WARM_UP
from eval.engines.server import ServerError
from eval.measuring.runs import Speculation
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Load

GREEDY = Decoding(Sampling(), frozenset(), 61)
PROMPTS = [Prompt(str(i), prompt="x") for i in range(3)]


class Told:
    """A server whose n-th request at a time has the n-th of these outputs.

    Each output is (seconds, tokens) of its messages; counts: of all its outputs together.
    """

    url = "http://made-up"

    def __init__(self, counts: Speculation, *outputs: Sequence[tuple[float, int]]) -> None:
        self.counts, self.outputs, self.asked = counts, outputs, []

    def counters(self):
        return {}

    def generate(self, prompt, decoding):
        self.asked.append((prompt.id, decoding.max_new_tokens))
        seconds, sizes = zip(*self.outputs[PROMPTS.index(prompt) % len(self.outputs)], strict=True)
        run = PromptRun.of(prompt, 3, seconds, [[7] * size for size in sizes])
        share = len(self.outputs)
        counts = Speculation(*(count / share for count in self.counts[:3]), [])
        return Output(run, [1, 2, 3], False, counts)


def step_of(server, count=1):
    return timed_step(server, PROMPTS[:count], Load(concurrency=count), GREEDY)


@pytest.mark.parametrize(
    ("counts", "messages", "seconds", "drafting"),
    [
        ((0, 0, 0), [(0.03, 1)] * 60, 0.03, 0),
        ((60, 240, 0), [(0.05, 1)] * 60, 0.05, 1),
        # the server's API sends two steps in one message
        ((60, 240, 0), [(0.1, 2)] * 30, 0.05, 1),
        # all accepted; the last step is cut after three tokens, but counts as four accepted
        ((12, 48, 48), [(0.05, 5)] * 11 + [(0.05, 3)], 0.05, 1),
        # half of the steps emit 5 tokens, half draft nothing
        ((30, 120, 120), [(0.07, 5), (0.03, 1)] * 30, 0.05, 0.5),
    ],
)
def test_the_time_of_a_step(counts, messages, seconds, drafting):
    server = Told(Speculation(*counts, []), [(1.0, 1), *messages])
    step = step_of(server)
    assert step.drafting == pytest.approx(drafting)
    assert step.seconds == pytest.approx(seconds, rel=0.01)
    (_, first), *others = server.asked
    assert first == WARM_UP
    assert {new for _, new in others} == {61}


def test_only_steps_of_all_requests_together_are_timed():
    """While others are read, a step takes longer; after the first has ended, it takes shorter."""
    early = [(1.0, 1), *[(0.5, 1)] * 4, *[(0.03, 1)] * 40]
    late = [(3.0, 1), *[(0.03, 1)] * 40, *[(0.01, 1)] * 20]
    server = Told(Speculation(104, 416, 0, []), early, late)
    assert step_of(server, 2) == pytest.approx((0.03, 1.0), rel=0.01)


def test_requests_that_wait_for_each_other_are_refused():
    one = [(1.0, 1), *[(0.03, 1)] * 60]
    other = [(9.0, 1), *[(0.03, 1)] * 60]
    with pytest.raises(ServerError, match="--max-num-seqs"):
        step_of(Told(Speculation(0, 0, 0, []), one, other), 2)


def test_break_even_and_the_most_gain():
    gain = forecast._gain("own", 4, Load(concurrency=8), Step(0.02, 0.0), Step(0.05, 1.0))
    assert (gain.plain_step_ms, gain.step_ms) == pytest.approx((20, 50))
    assert (gain.break_even, gain.perfect_speedup) == pytest.approx((2.5, 2.0))
    # half of the steps drafted nothing and took a plain step
    gain = forecast._gain("n-gram", 4, Load(concurrency=8), Step(0.02, 0.0), Step(0.035, 0.5))
    assert gain.break_even == pytest.approx(2.5)


@pytest.mark.parametrize("known", [True, False])
def test_prompts_repeat_a_part(known):
    prompts = PromptSet("", [Prompt("a", prompt=16 * "ab")], [[*range(48)]])
    text_of = (lambda ids: " ".join(map(str, ids))) if known else None
    [prompt] = repeating(prompts, text_of)
    assert (prompt.id, prompt.prompt) == ("a", 16 * ("24 25 26" if known else "ab"))
