"""Acceptance rate and mean acceptance length of a draft, as a metric of Hugging Face `evaluate`.

    metric = evaluate.load("eval/acceptance")
    metric.compute(predictions=draft_tokens, references=target_tokens, gamma=4)

The numbers are those of a report (eval/measuring/metrics.py), computed from token ids alone.
"""

import datasets
import evaluate

from eval.measuring.metrics import (
    ACCEPTANCE_RATE,
    MEAN_ACCEPTANCE_LENGTH,
    measured,
    measured_or_none,
    replayed_table,
)

DESCRIPTION = """
How often the argmax of a draft model is the token that the target model generated, and how many
tokens greedy speculative decoding with that draft emits per target call (arXiv 2211.17192).
"""
INPUTS = """
predictions: for each output of the target, the draft's argmax token id at every position, given
    the target's tokens before it (teacher-forced).
references: the target's greedy outputs as token ids, as long as the predictions; taken as ended
    by the length limit.
gamma: the draft length of tau.

Returns `alpha` (acceptance rate) and `tau` (mean acceptance length), each {"mean", "ci95", "n",
"clusters", "freedom", "range"}: interval and range over the outputs; ci95 is null for fewer than
10. tau counts the bonus token, and neither the prefill token nor last steps without room for a
whole draft; it is null where no output is long enough for one whole step.
"""


class Acceptance(evaluate.Metric):
    """Greedy acceptance of a draft."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="arXiv 2211.17192",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(
        self, predictions: list[list[int]], references: list[list[int]], gamma: int = 4
    ) -> dict[str, object]:
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}, but a draft has at least 1 token; give 1 or more.")
        for i, (drafted, tokens) in enumerate(zip(predictions, references, strict=True)):
            if len(drafted) != len(tokens):
                raise ValueError(
                    f"Output {i} has {len(drafted)} predictions for {len(tokens)} tokens; give "
                    "one prediction per token."
                )
        pairs = zip(predictions, references, strict=True)
        agreed = [[a == b for a, b in zip(*pair, strict=True)] for pair in pairs]
        table = replayed_table(agreed, gamma)
        length = measured_or_none(MEAN_ACCEPTANCE_LENGTH, table)
        rate, hidden = measured(ACCEPTANCE_RATE, table), {"over_starts"}  # no server is timed
        return {
            "alpha": rate.model_dump(mode="json", exclude=hidden),
            "tau": length.model_dump(mode="json", exclude=hidden) if length else None,
        }
