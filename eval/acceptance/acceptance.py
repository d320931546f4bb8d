"""alpha and tau of a draft as a metric of Hugging Face `evaluate`, loaded from this folder.

    metric = evaluate.load("eval/acceptance")
    metric.compute(predictions=draft_tokens, references=target_tokens, gamma=4)

The same pure functions as a report's (eval/measuring/metrics.py), on token ids alone.
"""

import datasets
import evaluate

from eval.measuring.metrics import alpha, or_none, replayed_tau
from eval.measuring.runs import Agreement

DESCRIPTION = """
How often the argmax of a draft model is the token that the target model generated, and how many
tokens greedy speculative decoding with that draft emits per target call (arXiv 2211.17192).
"""
INPUTS = """
predictions: for each answer of the target, the draft's argmax token id at every position, given
    the target's own tokens before it (teacher-forced).
references: the target's greedy answers as token ids, as long as the predictions; taken as ended by
    the length limit.
gamma: the draft length that tau is taken at.

Returns `alpha` and `tau`, each {"mean", "ci95", "n", "clusters", "freedom", "range"}: the interval
and the range over the answers; ci95 is null of fewer than 10. tau has the bonus token in, the
prefill token and a cut last block out; null where no answer is long enough for one whole block.
"""
CITATION = """
@inproceedings{leviathan2023fast,
  title={Fast Inference from Transformers via Speculative Decoding},
  author={Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle={ICML},
  year={2023}
}
"""


class Acceptance(evaluate.Metric):
    """Greedy acceptance of a draft."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(
        self, predictions: list[list[int]], references: list[list[int]], gamma: int = 4
    ) -> dict[str, object]:
        if gamma < 1:
            raise ValueError(f"gamma is {gamma}, but a draft has at least 1 token; give 1 or more.")
        answers = []
        for i, (drafted, tokens) in enumerate(zip(predictions, references, strict=True)):
            if len(drafted) != len(tokens):
                raise ValueError(
                    f"Answer {i} has {len(drafted)} predictions for {len(tokens)} tokens; give one "
                    "for every position."
                )
            values = [float(a == b) for a, b in zip(drafted, tokens, strict=True)]
            answers.append(Agreement(str(i), None, sum(values), len(values), values))
        tau = or_none(lambda: replayed_tau(answers, gamma))
        return {
            "alpha": alpha(answers).model_dump(mode="json"),
            "tau": tau.model_dump(mode="json") if tau else None,
        }
