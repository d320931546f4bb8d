"""What the logs of engines that are measured from outside have in common, and cannot hold.

Such an engine shows which tokens it emitted when, and not all that went on in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.decoding.loop import Decoding
from eval.measuring.runs import PromptRun
from eval.prompts import PromptSet

# Fields of a draft in the report, by what they are made from.
DISTRIBUTIONS = "alpha atlas"
BLOCKS = "tau mean_drafted accepted_over_drafted per_position decode_speedup"
STEPS = "costs c verify_ratio predicted_speedup decode_efficiency payoff"
REASONS = {
    "transformers": {
        DISTRIBUTIONS: "generate does not give the draft's distributions: take it with --engine "
        "torch",
        STEPS: "single steps are not timed in generate: see --engine torch",
    },
    "llama.cpp": {
        DISTRIBUTIONS: "only the tokens chosen are asked for: take it with --engine torch",
        STEPS: "single steps are not timed in llama.cpp",
    },
    "openvino": {
        DISTRIBUTIONS: "the pipeline does not give distributions: take it with --engine torch",
        STEPS: "single steps are not timed in OpenVINO",
        "memory": "the pipeline does not tell what its models and caches take",
    },
    "vllm": {
        DISTRIBUTIONS: "a server does not give the distributions of target and draft",
        BLOCKS: "the server counts cut blocks and no others apart: see counters for its own figure",
        STEPS: "single steps cannot be timed through a server",
        "memory": "a server does not tell what its models weigh",
    },
}


def missing(engine: str) -> dict[str, str]:
    """The report's fields that the engine leaves null, each with the reason."""
    return {name: why for names, why in REASONS[engine].items() for name in names.split()}


def log_blocks(
    run: PromptRun,
    drafted: Sequence[list[int]],
    emitted: Sequence[list[int]],
    gamma: int,
    max_new_tokens: int,
) -> PromptRun:
    """The run with what was drafted for each block, and how much of it was accepted.

    drafted, emitted: of each target call, that of the prefill first: transformers drafts for it,
    too. A drafted token was accepted where it was emitted: the target's own choice after a
    rejection is another one, also when sampled (its residual is 0 at the rejected token).
    gamma, max_new_tokens: an engine drafts fewer than gamma where the limit would cut the block.
    """
    done = run.prefill_tokens
    for i, (draft, block) in enumerate(zip(drafted[1:], emitted[1:], strict=True)):
        pairs = enumerate(zip(draft, block, strict=False))
        accepted = next((i for i, (a, b) in pairs if a != b), min(len(draft), len(block)))
        # an accepted end of text ends the draft, and no token of the target's own follows it
        run.drafted[i] = len(block) if accepted == len(block) else len(draft)
        run.accepted[i] = accepted
        run.last_truncated = len(draft) == max_new_tokens - done - 1 < gamma
        done += len(block)
    return run


def decoding(how: Decoding, ended: Sequence[bool], **own: Any) -> dict[str, Any]:
    """`RunLog.decoding`; ended: whether each answer of the baseline ended by itself.

    own: what an engine says of its own decoding, gamma and gamma_policy at least.
    """
    return {
        **asdict(how.sampling),
        "max_new_tokens": how.max_new_tokens,
        "verification": "greedy match" if how.sampling.greedy else "rejection sampling",
        "stop_tokens": len(how.stops),
        "ended_by_stop": sum(ended) / len(ended),
        **own,
    }


def prompts_used(prompts: PromptSet) -> dict[str, Any]:
    """`RunLog.prompts`; what else is known of prompts takes the target's distributions."""
    unknown = dict.fromkeys(("overlap_with_training", "bits_per_token", "random_bits"))
    about = {"source": prompts.source, "n": len(prompts.prompts), "sha256": prompts.sha256}
    return about | unknown
