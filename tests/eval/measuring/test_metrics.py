"""Every metric by a hand-computed example, and against a slow reference."""

import dataclasses
import math
import random

import numpy as np
import pytest

from eval.decoding.prompt_run import PromptRun
from eval.measuring import metrics
from eval.measuring.cost import break_even_alpha
from eval.measuring.intervals import NothingToMeasure
from eval.measuring.metrics import replayed_blocks, replayed_tau
from eval.measuring.runs import Agreement, DraftLog, StepCosts, check_runs

COSTS = StepCosts(
    draft_step=0.1,
    target_step=1.0,
    target_verify={1: 1.0, 2: 1.1, 3: 1.2, 4: 1.4},
    context_length=9,
)


def make_run(
    prompt_id="a",
    accepted=(1, 0, 2),
    drafted=(2, 2, 2),
    seconds=(2.0, 2.0, 2.0),
    prefill=1.0,
    cut=0,
    category=None,
):
    """A run whose last block loses `cut` of its accepted + 1 tokens."""
    emitted = [a + 1 for a in accepted]
    if emitted:
        emitted[-1] -= cut
    return PromptRun(
        prompt_id=prompt_id,
        category=category,
        prompt_tokens=5,
        tokens=list(range(1 + sum(emitted))),
        prefill_seconds=prefill,
        block_seconds=list(seconds),
        block_tokens=emitted,
        drafted=list(drafted),
        accepted=list(accepted),
        last_truncated=bool(cut),
    )


def make_baseline(prompt_id="a", tokens=7, step=1.0, prefill=1.0, category=None):
    calls = tokens - 1
    return make_run(prompt_id, [0] * calls, [0] * calls, [step] * calls, prefill, category=category)


def random_runs(rng, prompts=12, gamma=4):
    runs = []
    for i in range(prompts):
        drafted = [rng.randint(0, gamma) for _ in range(rng.randint(1, 9))]
        accepted = [rng.randint(0, d) for d in drafted]
        cut = rng.randint(0, accepted[-1])
        seconds = [rng.uniform(0.5, 2) for _ in drafted]
        runs.append(make_run(f"p{i}", accepted, drafted, seconds, rng.uniform(0.5, 2), cut))
    return runs


# --- by hand ---------------------------------------------------------------------------------


def test_alpha_is_the_mean_over_positions_not_over_prompts():
    measured = metrics.alpha([Agreement("a", None, 9.0, 10), Agreement("b", None, 0.0, 90)])
    assert measured.mean == pytest.approx(0.09)
    assert measured.n == 2
    assert measured.range == (0.0, 0.9)


def test_alpha_leaves_out_prompts_without_positions():
    agreements = [Agreement("a", None, 1.0, 2), Agreement("b", None, 0.0, 0)]
    assert metrics.alpha(agreements).n == 1


def test_an_accepted_end_of_text_ends_a_whole_step_without_a_bonus_token():
    """Dropping it, and keeping the step where it was missed, would select steps by outcome."""
    ended = make_run(accepted=(1, 2), drafted=(2, 2), seconds=(1.0, 1.0))
    ended.block_tokens[-1] -= 1
    ended.tokens.pop()
    check_runs([ended])
    assert metrics.tau([ended]).mean == (2 + 2) / 2
    assert metrics.accepted_over_drafted([ended]).mean == 3 / 4


@pytest.mark.parametrize(
    ("block", "accepted", "drafted"),
    [(0, (2, 2), (2, 2)), (1, (1, 1), (2, 2)), (1, (1, 0), (2, 0))],
)
def test_only_a_whole_last_draft_may_go_without_a_bonus_token(block, accepted, drafted):
    run = make_run(accepted=accepted, drafted=drafted, seconds=(1.0, 1.0))
    run.block_tokens[block] -= 1
    run.tokens.pop()
    with pytest.raises(ValueError, match=f"block {block} emitted"):
        check_runs([run])


def test_what_the_prefill_emitted_belongs_to_no_block():
    run = make_run(seconds=(2.0, 2.0, 3.0))
    run.tokens += [7, 7]
    run.prefill_tokens = 3
    check_runs([run])
    assert metrics.tau([run]).mean == 2.0
    assert metrics.itl_ms([run]).tokens == 6
    assert metrics.tokens_per_s([run]).mean == pytest.approx(9 / 8)
    run.prefill_tokens = 2
    with pytest.raises(ValueError, match=r"9 tokens, but 2 \+ 6 were emitted"):
        check_runs([run])


def test_without_drafted_tokens_in_the_log_blocks_are_not_checked():
    run = make_run(accepted=(0, 0), drafted=(0, 0), seconds=(1.0, 1.0))
    run.block_tokens, run.tokens = [3, 4], [1] * 8
    check_runs([run], blocks=False)
    with pytest.raises(ValueError, match="block 0 emitted 3 tokens with 0 accepted"):
        check_runs([run])


@pytest.mark.parametrize(
    ("agreed", "gamma", "blocks"),
    [
        ("1111111", 2, [3, 3]),  # prefill, 3, 3 tokens
        ("1011011", 2, [1, 3]),  # prefill, a wrong one corrected, 3 tokens, one left
        ("0111", 3, []),  # no room for a draft of 3 and the bonus token
        ("01111", 3, [4]),
        # shorter drafts near the end count, the last one does not
        ("1100000", 3, [2, 1, 1, 1]),
        ("1000000", 1, [1, 1, 1, 1, 1]),
        ("", 2, []),
    ],
)
def test_blocks_by_replay(agreed, gamma, blocks):
    assert replayed_blocks([mark == "1" for mark in agreed], gamma) == blocks


def test_replayed_tau_leaves_out_answers_without_a_whole_block():
    short = Agreement("a", None, 3.0, 4, [0.0, 1.0, 1.0, 1.0])
    with pytest.raises(NothingToMeasure):
        replayed_tau([short], 3)
    assert replayed_tau([short], 2).mean == 3


def test_per_position_has_no_conditional_where_no_draft_got_that_far():
    places = metrics.per_position([make_run(accepted=(0, 0, 0))])
    assert [place.marginal.mean for place in places] == [0.0, 0.0]
    assert places[1].conditional is None


def test_costs():
    assert metrics.c(COSTS) == pytest.approx(0.1)
    assert metrics.verify_ratio(COSTS, 2) == pytest.approx(1.2)
    assert metrics.verify_ratio(COSTS, 2.5) == pytest.approx(1.3)  # between the timed widths
    with pytest.raises(ValueError, match="timed up to 4 tokens, but 5 are needed"):
        metrics.verify_ratio(COSTS, 4)


def test_costs_in_milliseconds_are_the_same_read_back():
    costs = dataclasses.replace(COSTS, draft_block=0.5)
    assert metrics.Costs.of(costs, []).draft_block_ms == 500
    assert metrics.Costs.of(costs, []).steps() == costs


def test_what_step_costs_leave_open_is_that_of_their_rounds():
    rounds = [  # the machine slows down, target and draft alike; the draft wavers by a tenth
        dataclasses.replace(
            COSTS,
            draft_step=0.1 * slow * (1 + 0.1 * (i % 3 - 1)),
            target_step=slow,
            target_verify={width: slow * cost for width, cost in COSTS.target_verify.items()},
        )
        for i, slow in enumerate(np.linspace(1, 2, 30))
    ]
    costs = dataclasses.replace(COSTS, target_step=1.5, draft_step=0.15, rounds=rounds)
    costs.target_verify = {width: 1.5 * cost for width, cost in COSTS.target_verify.items()}
    ci95 = metrics.Costs.of(costs, [make_run()]).ci95
    # the 10th and the 21st of 30, which hold the median 96 times in 100
    steps = 1000 * np.linspace(1, 2, 30)
    assert ci95["target_step_ms"] == pytest.approx((steps[9], steps[20]))
    # in a ratio what slows both cancels out
    assert ci95["c"] == pytest.approx((0.09, 0.11))
    assert ci95["verify_ratio"] == pytest.approx((1.2, 1.2))
    low, high = ci95["predicted_speedup"]
    assert low <= metrics.predicted_speedup([make_run()], costs).mean <= high < 1.1 * low
    low, high = ci95["break_even_alpha"]
    assert low < break_even_alpha(costs) < high
    assert metrics.Costs.of(COSTS, [make_run()]).ci95 == {}
    assert "verify_ratio" not in metrics.Costs.of(costs, []).ci95  # nothing was drafted


def test_what_was_looked_up_takes_no_draft_step():
    run = make_run()
    run.free = [2, 0, 2]  # of 6 drafted tokens 2 took a step: 2/3 a call
    predicted = metrics.predicted_speedup([run], COSTS)
    assert predicted.mean == pytest.approx(2 / (0.1 * 2 / 3 + 1.2))


def test_decode_efficiency_leaves_prefill_and_a_cut_step_out():
    # whole blocks: 3 tokens in 2 s; baseline 1 token a second
    run = make_run(seconds=(1.0, 1.0, 50.0), prefill=70.0, cut=1)
    baseline = make_baseline(prefill=30.0)
    # a speed-up of 1.5; a mean acceptance length of 1.5 at draft length 2 predicts 1.5 / 1.4
    efficiency = metrics.decode_efficiency([run], [baseline], COSTS)
    assert efficiency.mean == pytest.approx(1.4)


def test_a_decoder_without_overhead_has_efficiency_one():
    block = 2 * COSTS.draft_step + 1.2
    runs = [make_run(str(i), seconds=(block,) * 3) for i in range(10)]
    baseline = [make_baseline(str(i)) for i in range(10)]
    efficiency = metrics.decode_efficiency(runs, baseline, COSTS)
    assert efficiency.mean == pytest.approx(1.0)
    assert efficiency.ci95 == pytest.approx((1.0, 1.0))


def make_log(runs=(), baseline=(), agreement=None, **fields):
    about = {"name": "a", "path": "", "form": "", "vocabulary": {}, "lossless": {}}
    about |= {"gamma": 2, "gamma_policy": "fixed"}
    return DraftLog(runs=runs, baseline=baseline, agreement=agreement, **(about | fields))


def test_gains_are_paired_differences():
    slow = [make_run("a"), make_run("b", accepted=(0, 0, 0))]
    fast = [make_run("b", accepted=(1, 1, 1)), make_run("a", accepted=(2, 2, 2))]
    base = [make_baseline("a"), make_baseline("b")]
    low = [Agreement(str(i), None, 0.05 * i, 1) for i in range(12)]
    high = [Agreement(str(i), None, 0.05 * i + 0.2, 1) for i in reversed(range(12))]
    gain = metrics.gain(make_log(fast, base, high), make_log(slow, base, low, name="b"))
    assert (gain["draft"], gain["over"]) == ("a", "b")
    # every prompt gains the same, so pairing leaves no uncertainty
    assert gain["alpha"].mean == pytest.approx(0.2)
    assert gain["alpha"].ci95 == pytest.approx((0.2, 0.2))
    assert gain["tau"].mean == pytest.approx(15 / 6 - 9 / 6)
    speedups = metrics.speedup(fast, base).mean, metrics.speedup(slow, base).mean
    assert gain["speedup"].mean == pytest.approx(speedups[0] - speedups[1])


def test_by_category():
    agreements = [
        Agreement("a", "x", 1.0, 2),
        Agreement("b", "y", 1.0, 1),
        Agreement("c", None, 0, 1),
    ]
    runs = [make_run("a", category="x"), make_run("b", (), (), (), category="y")]
    baseline = [make_baseline("a", category="x"), make_baseline("b", tokens=1, category="y")]
    log = make_log(runs, baseline, agreements)
    numbers = metrics.by_category(log, lambda row: row.category)
    assert list(numbers) == ["x", "y"]
    assert numbers["x"].alpha.mean == 0.5
    assert numbers["x"].tau.mean == 2.0
    assert numbers["y"].tau is None  # its only answer is one token long
    assert numbers["y"].speedup.n == 1


def test_by_context():
    lengths = {"a": 511, "b": 512, "c": 2_048, "d": 2_049, "e": 8_192, "f": 8_193}
    agreements = [
        Agreement(name, None, 1.0, 2, prompt_tokens=tokens) for name, tokens in lengths.items()
    ]
    agreements.append(Agreement("g", None, 1.0, 2))  # nobody knows how long it is
    runs = [dataclasses.replace(make_run(name), prompt_tokens=lengths[name]) for name in "fb"]
    runs.append(dataclasses.replace(make_run("h"), prompt_tokens=0))  # a server did not tell
    baseline = [make_baseline(name) for name in "fbh"]
    numbers = metrics.by_context(make_log(runs, baseline, agreements))
    assert {name: (n.alpha.n, n.speedup and n.speedup.n) for name, n in numbers.items()} == {
        "below 512 tokens": (1, None),
        "512 to 2,048 tokens": (2, 1),
        "2,048 to 8,192 tokens": (2, None),
        "above 8,192 tokens": (1, 1),
    }
    assert list(numbers) == list(metrics.CONTEXTS)  # not by the alphabet


# --- against plain loops ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_acceptance_against_a_plain_loop(seed):
    runs = random_runs(random.Random(seed))
    tokens = calls = drafted = accepted = 0
    drafts = []
    for run in runs:
        for i in range(len(run.block_tokens)):
            if run.last_truncated and i == len(run.block_tokens) - 1:
                continue
            tokens += run.block_tokens[i]
            calls += 1
            drafted += run.drafted[i]
            accepted += run.accepted[i]
            if run.drafted[i]:
                drafts.append(run.accepted[i])
    assert metrics.tau(runs).mean == pytest.approx(tokens / calls)
    assert metrics.mean_drafted(runs) == pytest.approx(drafted / calls)
    assert metrics.accepted_over_drafted(runs).mean == pytest.approx(accepted / drafted)
    for i, measured in enumerate(metrics.per_position(runs), start=1):
        assert (measured.position, measured.drafts) == (i, len(drafts))
        first = sum(n >= i for n in drafts)
        before = sum(n >= i - 1 for n in drafts)
        assert measured.marginal.mean == pytest.approx(first / len(drafts))
        if before:
            assert measured.conditional.mean == pytest.approx(first / before)
        else:
            assert measured.conditional is None


@pytest.mark.parametrize("seed", range(8))
def test_speed_against_a_plain_loop(seed):
    rng = random.Random(seed)
    runs = random_runs(rng)
    baseline = [
        make_baseline(run.prompt_id, rng.randint(2, 9), rng.uniform(0.5, 2)) for run in runs
    ]
    rng.shuffle(baseline)
    sides = []
    for side in (runs, baseline):
        seconds = tokens = first = 0
        between = []
        for run in side:
            first += run.prefill_seconds
            seconds += run.prefill_seconds + sum(run.block_seconds)
            tokens += len(run.tokens)
            for step, emitted in zip(run.block_seconds, run.block_tokens, strict=True):
                between += [1000 * step / emitted] * emitted
        assert metrics.tokens_per_s(side).mean == pytest.approx(tokens / seconds)
        assert metrics.ttft_ms(side).mean == pytest.approx(1000 * first / len(side))
        itl = metrics.itl_ms(side)
        assert (itl.p50, itl.p95) == pytest.approx(np.percentile(between, [50, 95]))
        assert itl.tokens == len(between)
        sides.append(seconds / tokens)
    speedup = metrics.speedup(runs, baseline)
    assert speedup.mean == pytest.approx(sides[1] / sides[0])
    assert speedup.ci95[0] < speedup.mean < speedup.ci95[1]
    tau, drafted = metrics.tau(runs).mean, metrics.mean_drafted(runs)
    step = drafted * 0.1 + np.interp(drafted + 1, [1, 2, 3, 4], [1, 1.1, 1.2, 1.4])
    wide = StepCosts(0.1, 1.0, {**COSTS.target_verify, 5: 1.5}, 9)
    assert metrics.predicted_speedup(runs, wide).mean == pytest.approx(tau / step)


# --- degenerate input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: metrics.alpha([]),
        lambda: metrics.alpha([Agreement("a", None, 0.0, 0)]),
        lambda: metrics.tau([]),
        lambda: metrics.tau([make_run("a", (1,), (2,), (1.0,), cut=1)]),  # only a cut block
        lambda: metrics.mean_drafted([]),
        lambda: metrics.accepted_over_drafted([make_baseline()]),
        lambda: metrics.per_position([make_baseline()]),
        lambda: metrics.speedup([], []),
        lambda: metrics.tokens_per_s([]),
        lambda: metrics.itl_ms([make_baseline(tokens=1)]),
        lambda: metrics.agreed(make_log()),
        lambda: metrics.timed(make_log()),
        lambda: metrics.memory(make_log()),
    ],
)
def test_nothing_to_measure_is_an_error(call):
    with pytest.raises(NothingToMeasure):
        call()


def test_zero_time_is_an_error_not_infinity():
    idle = make_run(seconds=(0.0, 0.0, 0.0), prefill=0.0)
    with pytest.raises(ValueError, match="speedup is not a finite number"):
        metrics.speedup([idle], [make_baseline()])
    with pytest.raises(ValueError, match="a time is zero"):
        check_runs([idle])
    with pytest.raises(ValueError, match="the target's above 0"):
        metrics.c(StepCosts(0.1, 0.0, {1: 1.0}, 9))


def test_other_prompts_on_both_sides_are_an_error():
    with pytest.raises(ValueError, match="'a' among them"):
        metrics.speedup([make_run("a")], [make_baseline("b")])
    with pytest.raises(ValueError, match="same prompts"):
        metrics.gain(
            make_log(agreement=[Agreement("a", None, 1, 1)]),
            make_log(agreement=[Agreement("b", None, 1, 1)]),
        )


def test_impossible_agreement_is_an_error():
    with pytest.raises(ValueError, match="alpha_sum 3"):
        metrics.alpha([Agreement("a", None, 3.0, 2)])
    rounding = metrics.alpha([Agreement("a", None, 2.0000001, 2)])
    assert rounding.mean == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 2]}, "were emitted"),
        ({"drafted": [2, 2]}, "differ in length"),
        ({"accepted": [1, 0, 3]}, "accepted 3 of 2"),
        ({"accepted": [1, 0, 1]}, "one more is due"),
        ({"block_seconds": [1.0, -1.0, 1.0]}, "a time is zero or negative"),
    ],
)
def test_a_log_that_contradicts_itself_is_refused(change, message):
    run = make_run()
    for name, value in change.items():
        setattr(run, name, value)
    with pytest.raises(ValueError, match=message):
        check_runs([run])


def test_good_logs_pass_and_doubles_do_not():
    runs = random_runs(random.Random(0))
    check_runs(runs)
    assert all(math.isfinite(run.seconds) for run in runs)
    with pytest.raises(ValueError, match="occurs twice"):
        check_runs([runs[0], runs[0]])
