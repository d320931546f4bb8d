"""Whether a draft fits a target, and where models, tokenizers and files come from."""

import os

# Before huggingface_hub is imported: it reads the variable once. People tune on private text, and
# trl and transformers report usage unless told not to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
