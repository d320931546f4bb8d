"""The fit of a draft to a target, and the sources of models, tokenizers and files."""

import os

# Before huggingface_hub is imported: it reads the variable once. People tune on private text, and
# trl and transformers report usage unless told not to.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
