"""What every engine that is measured from outside reports alike: vLLM's servers, transformers.

Such an engine shows which tokens it emitted when, not what went on in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.measuring import metrics
from eval.measuring.metrics import PromptRun
from eval.prompts import Prompt
from eval.reporting.report import ALWAYS_MEASURED


def emitted_run(
    prompt: Prompt, prompt_tokens: int, blocks: Sequence[tuple[float, list[int]]]
) -> PromptRun:
    """The log of one answer, emitted in blocks of (seconds, tokens), drafted tokens left out.

    Only its times and tokens can be used: a first block of several tokens came all at once, so that
    those after the first took no time.
    """
    (first_seconds, first), *rest = blocks
    later = [(0.0, first[1:])] if first[1:] else []
    later += rest
    return PromptRun(
        prompt_id=prompt.id,
        category=prompt.category,
        prompt_tokens=prompt_tokens,
        tokens=[token for _, tokens in blocks for token in tokens],
        prefill_seconds=first_seconds,
        block_seconds=[seconds for seconds, _ in later],
        block_tokens=[len(tokens) for _, tokens in later],
        drafted=[0] * len(later),
        accepted=[0] * len(later),
        last_truncated=False,
    )


def draft_block(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun], lossless: dict[str, Any]
) -> dict[str, Any]:
    """A draft's part of the report as far as `emitted_run`s tell it; what they do not is null."""
    rows = [
        {
            "id": run.prompt_id,
            "category": run.category,
            "prompt_tokens": run.prompt_tokens,
            "tokens": len(run.tokens),
            "seconds": run.seconds,
            "baseline_tokens": len(base.tokens),
            "baseline_seconds": base.seconds,
        }
        for run, base in metrics.pair(runs, baseline)
    ]
    categories = metrics.by_category([], runs, baseline)
    return dict.fromkeys(ALWAYS_MEASURED) | {
        "speedup": metrics.speedup(runs, baseline),
        "tokens_per_s": metrics.both(metrics.tokens_per_s, baseline, runs),
        "ttft_ms": metrics.both(metrics.ttft_ms, baseline, runs),
        "itl_ms": metrics.both(metrics.itl_ms, baseline, runs),
        "loop_share": metrics.both(metrics.loop_share, baseline, runs),
        "gamma_sweep": [],
        "by_batch_size": [],
        "by_temperature": [],
        "lossless": lossless,
        "by_category": {name: {**row, "tau": None} for name, row in categories.items()},
        "other_prompts": None,
        "counters": None,
        "per_prompt": rows,
    }
