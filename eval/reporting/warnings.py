"""What a reader must know before quoting a number of a report. docs/metrics.md lists the rules."""

from __future__ import annotations

from eval.reporting.report import DraftReport, Findings, not_lossless

FEW_PROMPTS = 32
FEW_DRAFTS = 300
HIGH_LOOP_SHARE = 0.2
FAIR_BASELINE = 0.95
USUAL_EFFICIENCY = (0.8, 1.1)
RANDOM_SHARE = 0.75  # of the bits that random tokens take; text of any language takes far fewer
# Rules that leave the output as the target's: greedily the same tokens, sampled the same
# distribution. Whatever else a report names is taken for lossy.
LOSSLESS_RULES = ("greedy match", "block verification", "rejection sampling")


def find_warnings(report: Findings) -> list[str]:
    """Every warning about the report, the gravest first."""
    found = [not_lossless(*one) for one in report.ledgers() if one[1].unexplained]
    found += _about_setting(report)
    for name, draft in report.drafts.items():
        found += [f"{name}: {warning}" for warning in _about_draft(draft)]
    return found + [
        f"The interval of alpha's gain ({one.draft} over {one.over}) holds 0."
        for one in report.gain
        if one.alpha and one.alpha.ci95[0] <= 0 <= one.alpha.ci95[1]
    ]


def _about_setting(report: Findings) -> list[str]:
    """What makes every number of the report look better than it is."""
    found: list[str] = []
    decoding, prompts = report.decoding, report.prompts
    if decoding.verification not in LOSSLESS_RULES:
        found.append(
            f"LOSSY: verification by {decoding.verification!r} is not known to leave the output "
            f"as the target's; a speed-up bought with other text cannot be compared."
        )
    if decoding.stop_tokens == 0:
        found.append(
            "No token ends a text, as with ignore_eos: what follows the end of an answer repeats "
            "itself, is easy to draft, and flatters every number."
        )
    elif decoding.ended_by_stop == 0:
        found.append(
            f"Not one answer ended by itself within {decoding.max_new_tokens} tokens: if the "
            f"end of text is ignored, as with ignore_eos, every number is flattered."
        )
    bits, random_bits = prompts.bits_per_token, prompts.random_bits
    if bits is not None and random_bits is not None and bits > RANDOM_SHARE * random_bits:
        found.append(
            f"The prompts look random: the target finds {bits:.1f} bits in each of their tokens, "
            f"and random ones hold {random_bits:.1f}. Acceptance on such text says nothing about a "
            f"domain."
        )
    stock = report.baseline.over_stock_generate
    if stock and stock.mean < FAIR_BASELINE:
        found.append(
            f"The baseline reaches only {stock.mean:.2f} of stock generate's tokens/s: every "
            f"speed-up here is flattered by that."
        )
    if prompts.overlap_with_training is None:
        found.append("It is not known whether evaluation prompts were trained on.")
    elif prompts.overlap_with_training:
        found.append(
            f"Evaluation prompts overlap with the training data: {prompts.overlap_with_training}."
        )
    return found


def _about_draft(draft: DraftReport) -> list[str]:
    found = [
        f"measured in part only, {entry.reason}"
        for entry in draft.missing
        if entry.field == "prompts"
    ]
    low, high = draft.speedup.ci95
    if low <= 1 <= high:
        found.append("the interval of the speed-up holds 1x; no effect is shown.")
    if draft.speedup.n < FEW_PROMPTS:
        found.append(
            f"the speed-up rests on {draft.speedup.n} prompts; intervals of fewer than "
            f"{FEW_PROMPTS} are too narrow."
        )
    drafts = draft.per_position[0].drafts if draft.per_position else FEW_DRAFTS
    if not draft.per_position and draft.counters:
        drafts = draft.counters.num_drafts
    if drafts < FEW_DRAFTS:
        found.append(
            f"acceptance rests on {drafts} drafts; take longer answers or more prompts, to have "
            f"{FEW_DRAFTS} at least."
        )
    if draft.loop_share and draft.loop_share.speculative.mean > HIGH_LOOP_SHARE:
        found.append(
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
        found.append(
            f"the decode phase reaches {efficiency.mean:.2f} of what its step costs predict; "
            f"{cause}."
        )
    return found
