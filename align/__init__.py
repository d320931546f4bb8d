"""Check whether a draft fits a target, map vocabularies, and fetch models and files."""

import os

# huggingface_hub reads this variable once, at its import. trl and transformers report usage by
# default, and users train on private text.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
