"""The `evaluate` metric loads from its folder, offline, and counts as the report does."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "eval" / "acceptance"


def test_loads_from_its_folder_without_a_network(tmp_path, monkeypatch):
    assert "evaluate" not in sys.modules  # it takes seconds to import, and nothing else needs it
    for name in ("HF_HUB_OFFLINE", "HF_EVALUATE_OFFLINE"):
        monkeypatch.setenv(name, "1")
    for name in ("HF_EVALUATE_CACHE", "HF_MODULES_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    import evaluate

    metric = evaluate.load(str(FOLDER))
    drafted, outputs = [[1, 2, 3, 4, 5], [1, 9, 3]], [[1, 2, 3, 4, 5], [1, 2, 3]]
    found = metric.compute(predictions=drafted, references=outputs, gamma=3)
    assert (found["alpha"]["mean"], found["alpha"]["n"]) == (7 / 8, 2)
    few = dict.fromkeys(("ci95", "freedom"))  # one output has room for a draft of three
    assert found["tau"] == {"mean": 4.0, "n": 1, "clusters": 1, "range": [4.0, 4.0], **few}
    found = metric.compute(predictions=[[1, 2]], references=[[1, 3]])
    assert (found["alpha"]["mean"], found["tau"]) == (0.5, None)
    with pytest.raises(ValueError, match="1 predictions for 2 tokens"):
        metric.compute(predictions=[[1]], references=[[1, 2]])
    with pytest.raises(ValueError, match="at least 1 token"):
        metric.compute(predictions=[[1]], references=[[1]], gamma=0)
