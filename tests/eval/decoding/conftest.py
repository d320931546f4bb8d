"""The decoders of all tests: as on a CPU, then as on a GPU."""

import pytest

from tests.eval.decoding.replayed import as_on_a_gpu


@pytest.fixture(scope="module", params=["eager", "replayed"])
def forwards(request):
    """How decoders run that are built from now on."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "replayed":
            as_on_a_gpu(patch)
        yield


def pytest_collection_modifyitems(items):
    """The fast set replays every kind of draft in one evaluation; its other tests are eager."""
    for item in items:
        if "world" in item.fixturenames or "small" in item.fixturenames:
            replayed = item.callspec.params["forwards"] == "replayed"
            if replayed != (item.originalname == "test_all_stand_in_a_report"):
                item.add_marker(pytest.mark.real)
