"""What the raw logs of all engines outside have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.decoding.loop import Decoding
from eval.prompts import PromptSet

# Fields of a draft in the report that take distributions, or the time of single steps.
DISTRIBUTIONS = ("alpha", "atlas")
STEPS = ("costs", "c", "verify_ratio", "predicted_speedup", "decode_efficiency", "payoff")
# Fields that no engine outside can measure, each with the reason.
MISSING = {
    **dict.fromkeys(DISTRIBUTIONS, "it gives no distributions: see --engine torch"),
    **dict.fromkeys(STEPS, "its single steps are not timed: see --engine torch"),
}


def decoding_facts(decoding: Decoding, ended: Sequence[bool], **engine: Any) -> dict[str, Any]:
    """`RunLog.decoding`. ended: whether each output of the baseline reached its end of text.

    engine: what the engine says of its own decoding, gamma and gamma_policy at least.
    """
    return {
        **asdict(decoding.sampling),
        "max_new_tokens": decoding.max_new_tokens,
        "verification": "greedy match" if decoding.sampling.greedy else "rejection sampling",
        "stop_tokens": len(decoding.stops),
        "ended_by_stop": sum(ended) / len(ended),
        **engine,
    }


def prompts_used(prompts: PromptSet) -> dict[str, Any]:
    """`RunLog.prompts`, without what only the target's distributions can tell."""
    return {
        "source": prompts.source,
        "n": len(prompts.prompts),
        "sha256": prompts.sha256,
        "overlap_with_training": prompts.overlap,
        "bits_per_token": None,
        "random_bits": None,
        "in_chat_form": prompts.in_chat_form,
        "chat_template_kwargs": prompts.chat_template_kwargs,
    }
