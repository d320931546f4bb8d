"""The check of sampled outputs: are they as likely to the target with a draft as without it?

Sampled outputs differ from run to run, so they cannot be compared token by token, but their
log-probabilities can. If verification keeps the target's distribution, the difference of a prompt's
two outputs is as often positive as negative. A permutation test (Fisher's, by sign flips) tells
whether chance explains the mean difference.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic import Field

from eval.measuring.intervals import Floats, Measured, Part, Positive, around, measure
from eval.measuring.metrics import PromptSums

FALSE_ALARMS = 0.01  # the share of reports with lossless drafts in which the check of a draft fails
FLIPS = 10_000  # the most sign patterns that are tried


class SampledCheck(Part):
    """Log-probabilities of sampled outputs, with and without the draft."""

    prompts: Positive
    difference: Measured = Field(
        description="with the draft minus without it, nats per token under the target"
    )
    p_value: float = Field(
        gt=0, le=1, description="probability of such a difference if the draft is lossless"
    )

    def __str__(self) -> str:
        return f"{self.difference:+.3f} nats per token, p = {self.p_value:.2g}"


def sampled_check(table: Iterable[PromptSums]) -> SampledCheck:
    """The check of the prompts whose outputs were read. Raises `NothingToMeasure` without any."""
    rows, groups, sums = [], [], dict[str, float]()
    for row in table:
        if row.logprob is not None and row.baseline_logprob is not None:
            rows.append((row.logprob - row.baseline_logprob, 1.0))
            groups.append(row.group)
            # turns of one conversation depend on each other, so they are flipped together
            key = row.group or f"prompt {row.id}"
            sums[key] = sums.get(key, 0.0) + rows[-1][0]
    return SampledCheck(
        prompts=len(rows),
        difference=measure("sampled_check", rows, groups=groups, ends=around),
        p_value=sign_flip_p(np.array([*sums.values()])),
    )


def sign_flip_p(differences: Floats) -> float:
    """The two-sided p-value of differences whose signs are random if nothing differs.

    It is the share of sign patterns whose sum is as far from 0. All patterns are tried; if there
    are more than FLIPS, random ones and the observed one.
    """
    count = len(differences)
    if 2**count <= FLIPS:
        bits = np.arange(2**count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(0).integers(0, 2, (FLIPS, count), dtype=np.int8)
        bits[0] = 0
    sums = np.abs((1.0 - 2.0 * bits) @ differences)
    return float((sums >= sums[0] * (1 - 1e-9)).mean())  # a sum of the same terms may be rounded
