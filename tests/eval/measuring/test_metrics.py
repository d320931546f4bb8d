"""Every number by a hand-computed example, and against a slow reference."""

import dataclasses
import random
from statistics import mean

import numpy as np
import pytest

from eval.decoding.prompt_run import PromptRun
from eval.measuring import metrics
from eval.measuring.cost import StepCosts
from eval.measuring.intervals import NothingToMeasure
from eval.measuring.metrics import difference, measured, prompt_table
from eval.measuring.runs import Agreement

COSTS = StepCosts(
    draft_step_ms=0.1,
    target_step_ms=1.0,
    target_verify_ms={1: 1.0, 2: 1.1, 3: 1.2, 4: 1.4},
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
        late=int(bool(cut)),
    )


def make_baseline(prompt_id="a", tokens=7, step=1.0, prefill=1.0):
    calls = tokens - 1
    return make_run(prompt_id, [0] * calls, [0] * calls, [step] * calls, prefill)


def table(runs=(), agreements=(), **fields):
    """The table of runs, each beside a baseline of 7 tokens."""
    return prompt_table(runs, [make_baseline(run.prompt_id) for run in runs], agreements, **fields)


def tau(runs):
    return measured(metrics.MEAN_ACCEPTANCE_LENGTH, table(runs))


def alpha(*agreements):
    return measured(metrics.ACCEPTANCE_RATE, table(agreements=agreements))


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


def test_the_acceptance_rate_is_the_mean_over_positions_not_over_prompts():
    rate = alpha(
        Agreement("a", None, 9.0, 10), Agreement("b", None, 0.0, 90), Agreement("c", None, 0.0, 0)
    )
    assert rate.mean == pytest.approx(0.09)
    assert rate.n == 2  # a prompt without positions is left out
    assert rate.range == (0.0, 0.9)
    assert alpha(Agreement("a", None, 2.0000001, 2)).mean == 1.0  # rounding


def test_an_accepted_end_of_text_ends_a_whole_step_without_a_bonus_token():
    """Dropping it, and keeping the step where it was missed, would select steps by outcome."""
    ended = make_run(accepted=(1, 2), drafted=(2, 2), seconds=(1.0, 1.0))
    ended.block_tokens[-1] -= 1
    ended.tokens.pop()
    assert tau([ended]).mean == (2 + 2) / 2
    assert measured(metrics.ACCEPTED_OVER_DRAFTED, table([ended])).mean == 3 / 4


@pytest.mark.parametrize(
    ("block", "accepted", "drafted"),
    [(0, (2, 2), (2, 2)), (1, (1, 1), (2, 2)), (1, (1, 0), (2, 0))],
)
def test_only_a_whole_last_draft_may_go_without_a_bonus_token(block, accepted, drafted):
    run = make_run(accepted=accepted, drafted=drafted, seconds=(1.0, 1.0))
    run.block_tokens[block] -= 1
    run.tokens.pop()
    with pytest.raises(ValueError, match=f"step {block} emitted"):
        table([run])


def test_what_the_prefill_emitted_belongs_to_no_block():
    run = make_run(seconds=(2.0, 2.0, 3.0))
    run.tokens += [7, 7]
    run.prefill_tokens = 3
    assert tau([run]).mean == 2.0
    assert measured(metrics.TOKENS_PER_S, table([run])).mean == pytest.approx(9 / 8)


def test_unknown_steps_are_neither_checked_nor_measured():
    run = make_run(accepted=(0, 0), drafted=(0, 0), seconds=(1.0, 1.0))
    run.block_tokens, run.tokens = [3, 4], [1] * 8
    (row,) = table([run], steps_known=False)
    assert row.tokens == 8
    assert not {"blocks", "drafted", "accepted_at"} & set(row.model_dump())
    with pytest.raises(ValueError, match="step 0 emitted 3 tokens with 0 accepted"):
        table([run])


def test_costs():
    assert metrics.cost_ratio(COSTS) == pytest.approx(0.1)
    assert COSTS.verify(3.5) == pytest.approx(1.3)  # between the timed widths


def test_what_was_looked_up_takes_no_draft_step():
    run = make_run()
    run.free = [2, 0, 2]  # of 6 drafted tokens 2 took a step: 2/3 a call
    predicted = measured(metrics.predicted_speedup(COSTS), table([run]))
    assert predicted.mean == pytest.approx(2 / (0.1 * 2 / 3 + 1.2))


def test_a_step_of_ngrams_alone_takes_no_pass_of_the_draft():
    """Mutant: the pass in every step, priced by the mean number of drafted tokens."""
    costs = StepCosts(0.0, 10.0, {1: 10.0, 5: 10.0}, 50, draft_block_ms=4.0)
    run = make_run(accepted=(4, 4), drafted=(4, 4), seconds=(0.010, 0.014))
    run.free = [4, 0]
    predicted = measured(metrics.predicted_speedup(costs), table([run]))
    assert predicted.mean == pytest.approx(5 * 10 / 12)


def test_decode_efficiency_leaves_prefill_and_a_cut_step_out():
    # whole blocks: 3 tokens in 2 s; baseline 1 token a second
    run = make_run(seconds=(1.0, 1.0, 50.0), prefill=70.0, cut=1)
    both = prompt_table([run], [make_baseline(prefill=30.0)])
    # a speed-up of 1.5; a mean acceptance length of 1.5 at draft length 2 predicts 1.5 / 1.4
    assert measured(metrics.decode_efficiency(COSTS), both).mean == pytest.approx(1.4)


def test_what_is_predicted_of_whole_outputs_has_the_prefill():
    """A step of 1 s alone is 1.4 s with 2 drafted tokens, of which all or none are accepted."""
    runs = [make_run("a", (2, 2), (2, 2), (9, 9), 4.0), make_run("b", (0, 0), (2, 2), (9, 9), 4.0)]
    both = prompt_table(runs, [make_baseline(name, prefill=3.0) for name in "ab"])
    number, free = (
        metrics.predicted_with_prefill(dataclasses.replace(COSTS, draft_step_ms=ms))
        for ms in (0.1, 0.0)
    )
    expected = [18 / (8 + 12 * step / 2) for step in (1.4, 1.2)]  # 2 tokens a step in the mean
    for each, value in zip((number, free), expected, strict=True):
        assert measured(each, both).mean == pytest.approx(value)
    gain = difference(free, both, both, rival=number)
    assert gain.mean == pytest.approx(expected[1] - expected[0])


def test_gains_are_paired_differences():
    slow = [make_run("a"), make_run("b", accepted=(0, 0, 0))]
    fast = [make_run("b", accepted=(1, 1, 1)), make_run("a", accepted=(2, 2, 2))]
    low = [Agreement(str(i), None, 0.05 * i, 1) for i in range(12)]
    high = [Agreement(str(i), None, 0.05 * i + 0.2, 1) for i in reversed(range(12))]
    mine, over = table(fast, high), table(slow, low)
    rate, length, speedup = (difference(number, mine, over) for number in metrics.COMPARED)
    # every prompt gains the same, so pairing leaves no uncertainty
    assert rate.mean == pytest.approx(0.2)
    assert rate.ci95 == pytest.approx((0.2, 0.2))
    assert length.mean == pytest.approx(15 / 6 - 9 / 6)
    speeds = [measured(metrics.SPEEDUP, one).mean for one in (mine, over)]
    assert speedup.mean == pytest.approx(speeds[0] - speeds[1])
    assert difference(metrics.SPEEDUP, mine, table([make_run("c")])) is None


def test_numbers_by_category():
    agreements = [
        Agreement("a", "x", 1.0, 2),
        Agreement("b", "y", 1.0, 1),
        Agreement("c", None, 0, 1),
    ]
    runs = [make_run("a", category="x"), make_run("b", (), (), (), category="y")]
    numbers = metrics.by_category(table(runs, agreements))
    assert list(numbers) == ["x", "y"]
    assert numbers["x"].alpha.mean == 0.5
    assert numbers["x"].tau.mean == 2.0
    assert numbers["y"].tau is None  # its only response is one token long
    assert numbers["y"].speedup.n == 1


# --- against plain loops ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_acceptance_against_a_plain_loop(seed):
    runs = random_runs(random.Random(seed))
    tokens = calls = drafted = accepted = 0
    drafts = []
    for run in runs:
        for i in range(len(run.block_tokens)):
            if i >= len(run.block_tokens) - run.late:
                continue
            tokens += run.block_tokens[i]
            calls += 1
            drafted += run.drafted[i]
            accepted += run.accepted[i]
            if run.drafted[i]:
                drafts.append(run.accepted[i])
    rows = table(runs)
    assert tau(runs).mean == pytest.approx(tokens / calls)
    assert measured(metrics.MEAN_DRAFTED, rows).mean == pytest.approx(drafted / calls)
    assert measured(metrics.ACCEPTED_OVER_DRAFTED, rows).mean == pytest.approx(accepted / drafted)
    for i, entry in enumerate(metrics.per_position(rows), start=1):
        assert (entry.position, entry.drafts) == (i, len(drafts))
        first = sum(n >= i for n in drafts)
        before = sum(n >= i - 1 for n in drafts)
        assert entry.marginal.mean == pytest.approx(first / len(drafts))
        if before:
            assert entry.conditional.mean == pytest.approx(first / before)
        else:
            assert entry.conditional is None


@pytest.mark.parametrize("seed", range(8))
def test_speed_against_a_plain_loop(seed):
    rng = random.Random(seed)
    runs = random_runs(rng)
    baseline = [
        make_baseline(run.prompt_id, rng.randint(2, 9), rng.uniform(0.5, 2)) for run in runs
    ]
    rng.shuffle(baseline)
    rows, sides = prompt_table(runs, baseline), []
    paired = {row.id: row.baseline_tokens for row in rows}
    assert paired == {run.prompt_id: len(run.tokens) for run in baseline}
    for side, rate, ttft in (
        (runs, metrics.TOKENS_PER_S, metrics.TTFT_MS),
        (baseline, metrics.BASELINE_TOKENS_PER_S, metrics.BASELINE_TTFT_MS),
    ):
        seconds = tokens = first = 0
        between = []
        for run in side:
            first += run.prefill_seconds
            seconds += run.prefill_seconds + sum(run.block_seconds)
            tokens += len(run.tokens)
            for step, emitted in zip(run.block_seconds, run.block_tokens, strict=True):
                between += [1000 * step / emitted] * emitted
        assert measured(rate, rows).mean == pytest.approx(tokens / seconds)
        assert measured(ttft, rows).mean == pytest.approx(1000 * first / len(side))
        itl = metrics.itl_ms(side)
        assert (itl.p50, itl.p95) == pytest.approx(np.percentile(between, [50, 95]))
        sides.append(seconds / tokens)
    speedup = measured(metrics.SPEEDUP, rows)
    assert speedup.mean == pytest.approx(sides[1] / sides[0])
    assert speedup.ci95[0] < speedup.mean < speedup.ci95[1]
    length, drafted = tau(runs).mean, measured(metrics.MEAN_DRAFTED, rows).mean
    step = drafted * 0.1 + np.interp(drafted + 1, [1, 2, 3, 4], [1, 1.1, 1.2, 1.4])
    wide = StepCosts(0.1, 1.0, {**COSTS.target_verify_ms, 5: 1.5}, 9)
    predicted = measured(metrics.predicted_speedup(wide), rows)
    assert predicted.mean == pytest.approx(length / step)


# --- degenerate input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: alpha(Agreement("a", None, 0.0, 0)),
        lambda: tau([]),
        lambda: tau([make_run("a", (1,), (2,), (1.0,), cut=1)]),  # only a cut block
        lambda: measured(metrics.MEAN_DRAFTED, []),
        lambda: measured(metrics.ACCEPTED_OVER_DRAFTED, table([make_baseline()])),
        lambda: metrics.per_position(table([make_baseline()])),
        lambda: metrics.itl_ms([make_baseline(tokens=1)]),
    ],
)
def test_nothing_to_measure_is_an_error(call):
    with pytest.raises(NothingToMeasure):
        call()


@pytest.mark.parametrize(("accepted", "reason"), [(3, "accepted 3 of 2"), (1, "one more is due")])
def test_a_log_that_contradicts_itself_is_refused(accepted, reason):
    run = make_run()
    run.accepted = [1, 0, accepted]
    with pytest.raises(ValueError, match=reason):
        table([run])


def test_whole_steps_are_as_long_as_all_steps_of_an_endless_output():
    """A rule that leaves out a last long step alone gives 2.69 here."""
    rng, outputs = random.Random(1), 20_000
    steps = [
        count
        for _ in range(outputs)
        for count in metrics.replayed_steps([rng.random() < 0.7 for _ in range(24)], 4)
    ]
    assert mean(steps) == pytest.approx((1 - 0.7**5) / (1 - 0.7), rel=0.005)


@pytest.mark.parametrize(
    ("agreed", "draft_length", "steps"),
    [
        ("1111111", 2, [3, 3]),  # prefill, 3, 3 tokens
        ("1011011", 2, [1, 3]),  # prefill, a wrong one corrected, 3 tokens, one left
        ("0111", 3, []),  # no room for a draft of 3 and the bonus token
        ("01111", 3, [4]),
        ("1100000", 3, [2, 1]),  # later ones have no room for a draft of 3
        ("1000000", 1, [1, 1, 1, 1, 1]),
        ("", 2, []),
    ],
)
def test_steps_by_replay(agreed, draft_length, steps):
    assert metrics.replayed_steps([mark == "1" for mark in agreed], draft_length) == steps
