"""What runs on a GPU only; elsewhere it is collected, imported and skipped with its reason."""

import pytest
import torch

from align.machine import use_machine
from tests.distill.conftest import folder, job, shared  # noqa: F401


@pytest.fixture(autouse=True)
def machine(request):
    """The settings under which commands run."""
    if request.node.get_closest_marker("gpu"):
        use_machine()


def pytest_collection_modifyitems(items):
    reason = f"no CUDA device (torch {torch.__version__} sees none)"
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=reason))
