"""What a server's start changes of its speed: simulated servers, whose true speed is known."""

import math
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.comparison import Comparison
from eval.engines.contender import Contender, Output, Task
from eval.engines.measure import UNTOLD
from eval.engines.server import ServerError
from eval.engines.visits import take_turns, there_and_back
from eval.measuring.environment import environment
from eval.prompts import Prompt, PromptSet
from eval.reporting.recommendation import recommended
from eval.reporting.tables import result_table

PROMPTS = PromptSet("made up", [Prompt(str(i), prompt=f"say {i}") for i in range(16)], [])
GREEDY = Decoding(Sampling(), frozenset(), 20)
DRAFTS = {"lookup": "prompt-lookup", "own": "D"}  # paths by name
TRUTH = 1.6  # the speed-up of each
SPREAD = 0.1  # of its logarithm over prompts


class Simulated:
    """A server; seconds: of an output, by the number of the prompt."""

    def __init__(self, seconds):
        self.seconds = seconds

    def decode(self, prompt, decoding):
        times = [self.seconds(int(prompt.id)) / 2] * 2
        return Output(PromptRun.of(prompt, 1, times, [[7] * 10] * 2), [], False)

    def read(self, greedy):
        return None

    def is_up(self):
        return False


def evaluated(rng, deviation, order=there_and_back, broken=None):
    """The report of two drafts that are equally fast with each prompt.

    deviation: between starts of a server. broken: name and start of the server that fails after 12
    prompts.
    """
    plain = 0.5 * rng.lognormal(0, 0.2, len(PROMPTS.prompts))
    drafting = plain / TRUTH * np.exp(rng.normal(0, SPREAD, len(plain)))
    started = dict.fromkeys(("", *DRAFTS), 0)

    @contextmanager
    def running(name):
        started[name] += 1
        start = name, started[name]
        seconds = (drafting if name else plain) * np.exp(rng.normal(0, deviation))

        def timed(prompt):
            if start == broken and prompt >= 12:
                raise ServerError("broke off")
            return seconds[prompt] * np.exp(rng.normal(0, 0.01))

        yield Simulated(timed)

    facts = {"form": "", "gamma": 3, "gamma_policy": "fixed", "missing": UNTOLD | {"counters": ""}}
    facts["vocabulary"] = {"relation": "", "strategy": "", "coverage": None}
    contenders = [
        Contender(partial(running, name), name, facts | {"path": DRAFTS.get(name)})
        for name in started
    ]
    comparison = Comparison(contenders, Task(PROMPTS, GREEDY))
    comparison.run(order)
    of_run = {"target": "T", "engine": "vllm", "device": "cpu", "dtype": ""}
    of_run["environment"] = environment("vllm", None, torch.device("cpu"))
    logs = [comparison.log(draft) for draft in comparison.drafting]
    return comparison.report(logs, "", None, **of_run)


@pytest.mark.parametrize("deviation", [0.0, 0.03])
def test_intervals_hold_the_truth_and_no_draft_is_faster_than_itself(deviation):
    rng = np.random.default_rng(1)
    held, told_apart, preferred, trials = 0, 0, 0, 400
    truth = TRUTH / np.exp(SPREAD**2 / 2)  # of the sums over all prompts
    for _ in range(trials):
        report = evaluated(rng, deviation)
        bounds = [draft.speedup.bounds for draft in report.drafts.values()]
        held += sum(low <= truth <= high for low, high in bounds)
        low, high = report.gain[0].speedup.bounds
        told_apart += not low <= 0 <= high
        found = recommended(report)
        preferred += (
            bool(found) and "own" in found.fastest.values()
        )  # to n-gram speculation, which needs no draft
    assert held / (2 * trials) >= 0.93
    assert told_apart / trials <= 0.08  # 5%, and what chance adds in 400 trials
    assert preferred / trials <= 0.05  # 2.5%


@pytest.mark.parametrize("count", [2, 3])
def test_a_report_of_several_starts(count):
    report = evaluated(np.random.default_rng(2), 0.03, partial(there_and_back, starts=count))
    starts, draft = report.starts, report.drafts["own"]
    lengths = {name: len(times) for name, times in starts.seconds_per_token.items()}
    assert lengths == dict.fromkeys(("target", "lookup", "own"), count)
    variances = [np.var(np.log(times), ddof=1) for times in starts.seconds_per_token.values()]
    assert starts.freedom == 3 * (count - 1)
    assert starts.deviation == pytest.approx(math.sqrt(np.mean(variances)))
    rows = draft.per_prompt
    assert {(row.outputs, row.tokens, row.baseline_tokens) for row in rows} == {
        (count, 20 * count, 20 * count)
    }
    seconds = [sum(getattr(row, name) for row in rows) for name in ("baseline_seconds", "seconds")]
    assert draft.speedup.mean == pytest.approx(seconds[0] / seconds[1])
    assert draft.speedup.n == draft.lossless.prompts == report.prompts.n == 16
    assert draft.ttft_ms.speculative.mean == pytest.approx(1000 * seconds[1] / 2 / (16 * count))


@pytest.mark.parametrize("broken", ["own", ""])
@pytest.mark.parametrize(("count", "wider"), [(2, 1.2), (3, 1.1)])
def test_a_start_that_fails_does_not_count(broken, count, wider):
    """Its times are left out, and the error is that of the other starts."""
    order = partial(there_and_back, starts=count)
    report = evaluated(np.random.default_rng(3), 0.05, order, (broken, 2))
    assert "started again, after 12 of 16 prompts: broke off" in report.provenance["failures"]
    assert report.starts.freedom == 3 * (count - 1)
    draft = report.drafts["own"]
    assert draft.speedup.n == 16
    assert {row.outputs for row in draft.per_prompt} == {count - 1}
    lookup, own = (np.log(d.speedup.ci95[1] / d.speedup.mean) for d in report.drafts.values())
    assert (own > wider * lookup) == (broken == "own")


def test_what_the_intervals_cover_is_told():
    rng = np.random.default_rng(4)
    report = evaluated(rng, 0.03)
    assert f"{report.starts.deviation:.1%}" in result_table(report).note
    running = evaluated(rng, 0.03, take_turns)
    assert running.starts is None
    assert "not covered" in result_table(running).note
    reference = running.model_copy(update={"engine": "torch"})
    assert "covered" not in result_table(reference).note
