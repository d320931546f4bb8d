"""What a reader must know first of a report: the headline, and every warning.

docs/metrics.md lists the rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from eval.decoding.drafters.lookup import LOOKUP, LOOKUP_FIRST
from eval.measuring.intervals import FEWEST_CLUSTERS, Measured, Part

if TYPE_CHECKING:  # a report holds what is found here
    from eval.measuring.losslessness import Ledger
    from eval.reporting.report import DraftReport, Gain, Report

FEW_DRAFTS = 300
HIGH_LOOP_SHARE = 0.2
FAIR_BASELINE = 0.95
USUAL_EFFICIENCY = (0.8, 1.1)
RANDOM_SHARE = 0.75  # of the bits that random tokens take; text of any language takes far fewer
# Rules that leave the output as the target's: greedily the same tokens, sampled the same
# distribution. Whatever else a report names is taken for lossy.
LOSSLESS_RULES = ("greedy match", "block verification", "rejection sampling")


def headline(report: Report) -> str:
    """One sentence on the last draft of the report (the tuned one of a training run)."""
    name, draft = report.last
    low, high = draft.speedup.bounds
    interval = f"95% interval {low:.2f} to {high:.2f}" if draft.speedup.ci95 else "no interval"
    speedup = f"{draft.speedup.mean:.2f}x ({interval}, {draft.speedup.n} prompts)"
    if not draft.speedup.ci95:
        effect = f"was measured on too few prompts to say more than {speedup}"
    elif low > 1:
        effect = f"speeds the target up {speedup}"
    elif high < 1:
        effect = f"SLOWS the target DOWN to {speedup}"
    else:
        effect = f"makes no measurable difference in speed, {speedup}"
    facts = [
        _added(gain, report.drafts[gain.over])
        for gain in _over_lookup(report)
        if gain.draft == name
    ]
    facts += [f"alpha {draft.alpha:.2f}"] if draft.alpha else []
    if draft.memory:
        facts.append(f"memory +{draft.memory.overhead:.0%}")
    facts.append(f"{'NOT LOSSLESS, ' if draft.lossless.unexplained else ''}{draft.lossless}")
    return f"Draft {name} {effect}: {', '.join(facts)}."


def recommendation(report: Report) -> str:
    """What to serve, in a sentence: of the drafts that are shown to pay, the surest."""
    paying = {
        name: draft
        for name, draft in report.drafts.items()
        if draft.speedup.bounds[0] > 1 and not draft.lossless.unexplained
    }
    if not paying:
        return "Serve without a draft: none is shown to be faster and to leave the text as it is."
    name = max(paying, key=lambda name: paying[name].speedup.bounds[0])
    draft = paying[name]
    gamma = "" if draft.gamma is None else f", gamma {draft.gamma}"
    low, high = draft.speedup.bounds
    expected = f"expect {draft.speedup.mean:.2f}x, {low:.2f} to {high:.2f} on such prompts."
    if report.engine == "torch":
        engines = ""
        if draft.path.startswith(LOOKUP_FIRST):
            speedups = [
                f"{label} {rival.speedup.mean:.2f}x"
                for label, rival in paying.items()
                if not rival.path.startswith(LOOKUP_FIRST)
            ]
            shown = ", ".join(speedups) or "neither pays"
            engines = f"; engines look up or draft, not both (here {shown})"
        return (
            f"Best: {name} in draftsmith's own decoder{gamma}: {expected} That decoder is no "
            f"server{engines}: measure the draft in your engine before you serve it."
        )
    return f"Serve {name} in {report.engine}{gamma}: {expected}"


def _over_lookup(report: Report) -> list[Gain]:
    """What drafts add to prompt lookup alone, where both were measured."""
    return [gain for gain in report.gain if report.drafts[gain.over].path == LOOKUP]


def _added(gain: Gain, over: DraftReport) -> str:
    low, high = gain.speedup.bounds
    adds = "loses" if high < 0 else "adds nothing that shows," if low <= 0 else "adds"
    if gain.speedup.ci95 is None:
        adds = "perhaps adds"
    return f"prompt lookup alone {over.speedup.mean:.2f}x, the draft {adds} {gain.speedup:+.2f}"


def find_warnings(report: Report) -> list[str]:
    """Every warning about the report, the gravest first."""
    warnings = [
        f"NOT LOSSLESS, do not serve draft {name}: {ledger}, greedily, against the target alone"
        f"{_first_reason(ledger)}."
        for name, ledger in report.ledgers()
        if ledger.unexplained
    ]
    warnings += _about_setting(report)
    warnings += _on_few(report)
    for name, draft in report.drafts.items():
        warnings += [f"{name}: {warning}" for warning in _about_draft(draft)]
    for gain in _over_lookup(report):
        if gain.speedup.ci95 and gain.speedup.ci95[0] <= 0:
            shown = "slower" if gain.speedup.ci95[1] < 0 else "not shown to be faster"
            warnings.append(
                f"{gain.draft} is {shown} than prompt lookup alone ({gain.speedup:+.2f}x), which "
                "needs no draft: serve lookup, or train longer."
            )
    return warnings + [
        f"The interval of alpha's gain ({gain.draft} over {gain.over}) holds 0."
        for gain in report.gain
        if gain.alpha and gain.alpha.ci95 and gain.alpha.ci95[0] <= 0 <= gain.alpha.ci95[1]
    ]


def _first_reason(ledger: Ledger) -> str:
    """Why the first changed text is not the same up to ties, where that is said in words."""
    reasons = [entry.why for entry in ledger.divergences if not entry.tie and entry.why]
    return f" (the first one {reasons[0]})" if reasons else ""


def _on_few(report: Report) -> Iterator[str]:
    """How many numbers have no interval, in all parts of the report, and where most of them are."""
    few: Counter[str] = Counter()
    for part in (report.baseline, *report.drafts.values(), *report.gain):
        for field, value in part:
            few[field] += _few_in(value)
    if total := few.total():
        most = ", ".join(
            f"{count} in {field.replace('_', ' ')}" for field, count in few.most_common(3) if count
        )
        yield (
            f"Fewer than {FEWEST_CLUSTERS} prompts (groups, batches) stand behind {total} numbers "
            f"({most}): too few for a 95% interval; parentheses hold the lowest and the highest."
        )


def _few_in(value: object) -> int:
    """How many numbers without an interval a value is, or holds."""
    if isinstance(value, Measured):
        return value.ci95 is None
    if isinstance(value, Part):
        return sum(_few_in(part) for _, part in value)
    parts = [*value.values()] if isinstance(value, dict) else value
    return sum(map(_few_in, parts)) if isinstance(parts, list) else 0


def _about_setting(report: Report) -> list[str]:
    """What makes every number of the report look better than it is."""
    warnings: list[str] = []
    decoding, prompts = report.decoding, report.prompts
    if decoding.verification not in LOSSLESS_RULES:
        warnings.append(
            f"LOSSY: verification by {decoding.verification!r} is not known to leave the output "
            f"as the target's; a speed-up bought with other text cannot be compared."
        )
    if decoding.stop_tokens == 0:
        warnings.append(
            "No token ends a text, as with ignore_eos: what follows the end of an answer repeats "
            "itself, is easy to draft, and flatters every number."
        )
    elif decoding.ended_by_stop == 0:
        warnings.append(
            f"Not one answer ended by itself within {decoding.max_new_tokens} tokens: if the "
            f"end of text is ignored, as with ignore_eos, every number is flattered."
        )
    bits, random_bits = prompts.bits_per_token, prompts.random_bits
    if bits is not None and random_bits is not None and bits > RANDOM_SHARE * random_bits:
        warnings.append(
            f"The prompts look random: the target finds {bits:.1f} bits in each of their tokens, "
            f"and random ones hold {random_bits:.1f}. Acceptance on such text says nothing about a "
            f"domain."
        )
    if prompts.chat_template and prompts.in_chat_form < 1:
        warnings.append(
            f"{1 - prompts.in_chat_form:.0%} of the prompts are completed as they stand, though "
            "the target has a chat template: an Instruct model answers such prompts with talk and "
            "copies, which are easy to draft. Ask it as it is served: give `messages`, or an "
            "`instruction`."
        )
    stock = report.baseline.over_stock_generate
    if stock and stock.mean < FAIR_BASELINE:
        warnings.append(
            f"The baseline reaches only {stock.mean:.2f} of stock generate's tokens/s: every "
            f"speed-up here is flattered by that."
        )
    if prompts.overlap_with_training is None:
        warnings.append("It is not known whether evaluation prompts were trained on.")
    elif prompts.overlap_with_training:
        warnings.append(
            f"Evaluation prompts overlap with the training data: {prompts.overlap_with_training}."
        )
    return warnings


def _about_draft(draft: DraftReport) -> list[str]:
    warnings = [
        f"measured in part only, {entry.reason}"
        for entry in draft.missing
        if entry.field == "prompts"
    ]
    low, high = draft.speedup.bounds
    if high < 1:
        warnings.append(f"it slows the target down, to {draft.speedup:.2f}x.")
    elif draft.speedup.ci95 and low <= 1:
        warnings.append("the interval of the speed-up holds 1x; no effect is shown.")
    drafts = draft.per_position[0].drafts if draft.per_position else FEW_DRAFTS
    if not draft.per_position and draft.counters:
        drafts = draft.counters.num_drafts
    if drafts < FEW_DRAFTS:
        warnings.append(
            f"acceptance rests on {drafts} drafts; take longer answers or more prompts, to have "
            f"{FEW_DRAFTS} at least."
        )
    if draft.loop_share and draft.loop_share.speculative.mean > HIGH_LOOP_SHARE:
        warnings.append(
            f"{draft.loop_share.speculative.mean:.0%} of the emitted tokens stand in repeated "
            f"loops, which are easy to draft; acceptance on useful text is lower."
        )
    efficiency = draft.decode_efficiency
    if efficiency and not USUAL_EFFICIENCY[0] <= efficiency.mean <= USUAL_EFFICIENCY[1]:
        cause = (
            "look for overhead in the loop or for a noisy machine"
            if efficiency.mean < 1
            else "single steps were timed in a slower moment than texts were decoded, so c and the "
            "predicted speed-up look worse than they are; measure again on a quiet machine"
        )
        warnings.append(
            f"the decode phase reaches {efficiency.mean:.2f} of what its step costs predict; "
            f"{cause}."
        )
    return warnings
