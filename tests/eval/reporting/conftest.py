"""Reports are looked at here, not their intervals: fewer resamples make them as well."""

from functools import partial

import pytest

from eval.measuring import intervals


@pytest.fixture(autouse=True, scope="module")
def fewer_resamples():
    fewer = partial(intervals.bootstrap_totals, resamples=500)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intervals, "bootstrap_totals", fewer)
        yield
