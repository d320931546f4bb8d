"""The `evaluate` metric loads from its folder, offline, and counts as the report does."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
from eval.run import main
assert "evaluate" not in sys.modules  # which takes seconds to be imported
import evaluate
metric = evaluate.load("eval/acceptance")
drafted, answers = [[1, 2, 3, 4, 5], [1, 9, 3]], [[1, 2, 3, 4, 5], [1, 2, 3]]
found = metric.compute(predictions=drafted, references=answers, gamma=3)
assert found["alpha"]["mean"] == 7 / 8, found
assert found["alpha"]["n"] == 2
none = dict.fromkeys(("ci95", "freedom"))  # of two
assert found["tau"] == {"mean": 2.5, "n": 2, "clusters": 2, "range": [1.0, 4.0], **none}
found = metric.compute(predictions=[[1, 2]], references=[[1, 3]])
assert found["alpha"]["mean"] == 0.5 and found["tau"] is None
for bad, words in (({"predictions": [[1]], "references": [[1, 2]]}, "1 predictions for 2 tokens"),
                   ({"predictions": [[1]], "references": [[1]], "gamma": 0}, "at least 1 token")):
    try:
        metric.compute(**bad)
    except ValueError as error:
        assert words in str(error), error
    else:
        raise AssertionError(bad)
"""


def test_loads_from_its_folder_without_a_network(tmp_path):
    # a process of its own: evaluate reads these variables when it is imported
    offline = {"HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    caches = {"HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=os.environ | offline | caches,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
