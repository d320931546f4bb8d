"""What runs on a GPU only; elsewhere it is collected, imported and skipped with its reason."""

import pytest
import torch

from tests.distill.conftest import folder, job, texts  # noqa: F401


def pytest_collection_modifyitems(items):
    reason = f"no CUDA device (torch {torch.__version__} sees none)"
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=reason))
