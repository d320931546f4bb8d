"""Gone: says what to use instead."""

import sys

print(
    "error: distill.doctor is gone: `accelerate launch distill/train.py --recipe code --dry_run "
    "true` says what is here and what is missing.",
    file=sys.stderr,
)
sys.exit(2)
