"""Gone: says what to use instead."""

import sys

print(
    "error: eval.convert is gone: report.json has the numbers, and docs/metrics.md their names in "
    "vLLM, SGLang and Spec-Bench (How other tools count).",
    file=sys.stderr,
)
sys.exit(2)
