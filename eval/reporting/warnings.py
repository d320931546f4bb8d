"""Warnings about the numbers of a report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from eval.decoding.drafters import LOOKUP
from eval.reporting.fields import Report
from eval.reporting.verdict import at_loads, label, times

COPIED_MUCH = 0.5  # share of tokens copied from the output itself; such outputs mostly loop
FAIR_BASELINE = 0.95
USUAL_EFFICIENCY = (0.97, 1.02)
# Rules that keep the target's output: the same tokens if greedy, the same distribution if sampled.
LOSSLESS_RULES = ("greedy match", "block verification", "rejection sampling")


class ReportWarning(NamedTuple):
    """A warning: the code of its rule, and its text."""

    code: str
    text: str


def find_warnings(report: Report) -> list[ReportWarning]:
    """All warnings about the report; mismatches come first."""
    warnings = [*_mismatches(report), *_about_setting(report), *_about_prompts(report)]
    for name in report.drafts:
        warnings += [
            ReportWarning(code, f"{label(name)}: {text}")
            for code, text in _about_draft(report, name)
        ]
    return [*warnings, *_about_gains(report)]


def _mismatches(report: Report) -> Iterator[ReportWarning]:
    for name, draft in report.drafts.items():
        if draft.lossless.unexplained:
            wrong = next(d for d in draft.lossless.divergences if d.judged and not d.tie)
            first = f"The first: prompt {wrong.prompt}{f', {wrong.why}' if wrong.why else ''}."
            text = f"NOT LOSSLESS, do not serve {label(name)}: {draft.lossless}. {first}"
            yield ReportWarning("mismatch", text)
        elif name in report.broken:
            text = (
                f"NOT LOSSLESS, do not serve {label(name)}: sampled outputs have other "
                f"log-probabilities under the target, by {draft.sampled_check}."
            )
            yield ReportWarning("sampled-mismatch", text)
        if unjudged := [d.why for d in draft.lossless.divergences if not d.judged]:
            text = f"{label(name)}: {draft.lossless}. The first: {unjudged[0]}."
            yield ReportWarning("not-judged", text)


def _about_setting(report: Report) -> Iterator[ReportWarning]:
    decoding, stock = report.decoding, report.baseline.over_stock_generate
    if decoding.verification not in LOSSLESS_RULES:
        yield ReportWarning(
            "lossy-rule",
            f"Verification by {decoding.verification!r} is not known to keep the target's output.",
        )
    if decoding.stop_tokens == 0:
        yield ReportWarning(
            "no-stop-token",
            "No token ends an output, as with ignore_eos: text after the end repeats itself and "
            "is easy to draft, so every figure is too high.",
        )
    elif decoding.ended_by_stop == 0:
        yield ReportWarning(
            "none-ended",
            f"No output ended within {decoding.max_new_tokens} tokens: if the end of text is "
            "ignored, every figure is too high.",
        )
    if stock and stock.mean < FAIR_BASELINE:
        yield ReportWarning(
            "slow-baseline",
            f"The baseline reaches only {stock.mean:.2f} of stock generate's tokens/s, so every "
            "speed-up is too high.",
        )
    if report.eager:
        yield ReportWarning(
            "no-graphs",
            f"Without CUDA graphs ran: {', '.join(map(label, report.eager))}. Each step takes as "
            "long as the launches of its kernels, so the speed-ups are not those of a server.",
        )


def _about_prompts(report: Report) -> Iterator[ReportWarning]:
    prompts = report.prompts
    if prompts.chat_template and prompts.in_chat_form < 1:
        yield ReportWarning(
            "raw-prompts",
            f"{1 - prompts.in_chat_form:.0%} of the prompts are raw, though the target has a chat "
            "template. Raw prompts make an Instruct model copy and loop; use `messages` or an "
            "`instruction`.",
        )
    if prompts.other_ids:
        yield ReportWarning(
            "other-ids",
            f"{len(prompts.other_ids)} of {prompts.n} prompts have other token ids in the engine "
            f"than in transformers, as {prompts.other_ids[0]!r}: its chat template or tokenizer "
            "differs. A draft that is trained on transformers' ids is measured on other prompts.",
        )
    if prompts.left_out:
        text = f"{len(prompts.left_out)} prompts are in no number: {prompts.left_out[0]}"
        yield ReportWarning("left-out", text)
    if prompts.overlap_with_training is None:
        text = "It is not known whether evaluation prompts were also training prompts."
        yield ReportWarning("overlap-unknown", text)
    if (copied := report.answers.copy_share.of_answer.mean) > COPIED_MUCH:
        yield ReportWarning(
            "self-copies",
            f"{copied:.0%} of the output tokens repeat an earlier part of the output, and are easy "
            "to draft.",
        )


def _about_draft(report: Report, name: str) -> Iterator[tuple[str, str]]:
    draft, speedups = report.drafts[name], report.speedups(name)
    for entry in draft.missing:
        if entry.field == "prompts":
            yield "partial", f"only some prompts were measured: {entry.reason}"
    for over in draft.overloads:
        servers = " and ".join("the target alone" if s == "target" else "it" for s in over.servers)
        done = over.requests_per_s
        yield (
            "overload",
            f"at {over.request_rate:g} requests/s {servers} is overloaded, because the requests in "
            f"flight grow. {done.speculative:.3g} are completed per second, {done.baseline:.3g} "
            "without a draft. There is no speed-up at this rate.",
        )
    if draft.context:
        yield (
            "shorter-context",
            f"its server takes prompt and output of at most {draft.context} tokens, because vLLM "
            "cuts the context to the draft model's; the target alone takes more.",
        )
    if slower := {at: times(speedup) for at, speedup in speedups.items() if speedup.bounds[1] < 1}:
        yield "slower", f"it slows the target down, to {at_loads(slower)}."
    elif (stated := report.stated_speedup(draft)).ci95 and stated.bounds[0] <= 1:
        yield "no-effect", "the interval of the speed-up contains 1x, so no effect is shown."
    efficiency = draft.decode_efficiency
    if efficiency and efficiency.mean < USUAL_EFFICIENCY[0]:
        yield (
            "overhead",
            f"decoding reaches {efficiency.mean:.2f} of the predicted speed-up: overhead in the "
            "loop, or a busy machine.",
        )
    if efficiency and efficiency.mean > USUAL_EFFICIENCY[1]:
        yield (
            "slow-steps",
            f"decoding reaches {efficiency.mean:.2f} of the predicted speed-up: steps timed alone "
            "took longer than while decoding. Measure again on an idle machine.",
        )


def _about_gains(report: Report) -> Iterator[ReportWarning]:
    for gain in report.gain:
        # no warning about the base draft, because training was meant to improve it
        if report.drafts[gain.over].path == LOOKUP and gain.draft != "untuned":
            speedup = report.stated_speedup(gain)
            if speedup.ci95 and speedup.bounds[0] <= 0:
                shown = "slower" if speedup.bounds[1] < 0 else "not shown to be faster"
                yield ReportWarning(
                    "not-over-ngram",
                    f"{label(gain.draft)} is {shown} than n-gram speculation alone "
                    f"({speedup.mean:+.2f}x), which needs no draft.",
                )
