"""The tutorial: the cells of its notebook in their order, shortened, as a reader runs them."""

import json
import re
from pathlib import Path

import pytest

from eval.reporting.fields import read_report

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "tutorial.md"
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"


def code_cells():
    book = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def test_page_and_notebook_make_the_same_prompts():
    (script,) = re.findall(r"```python\n(import ast\n.*?)```\n", PAGE.read_text("utf-8"), re.S)
    cell = next(cell for cell in code_cells() if cell.startswith("import ast"))
    loop = cell[cell.index("ASK = ") :].replace("(FOLDER / name)", "Path(name)")
    assert script.endswith(loop.replace('f"{NAME}-', '"explain-') + "\n")


@pytest.mark.real
def test_the_notebook_ends_with_a_report_and_a_published_draft(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    parameters, *steps = code_cells()
    names = {}
    exec(parameters, names)
    names |= {"REPOSITORY": ROOT, "SHORT": True}
    said = []
    for step in steps:
        exec(step, names)
        said.append(capsys.readouterr().out)

    depths = re.findall(r"(\d) layers? +\d\.\d{3} +(\S+) +(\d\.\d\d)x", said[1])  # of the dry run
    assert [layers for layers, *_ in depths] == ["1", "2", "3", "4"]
    # the machine decides; near 1 both are rounded to it, and a rate below 0.005 to 0
    for _, needed, best in depths:
        assert float(best) <= 1 if needed == "none" else 0 <= float(needed) <= 1 <= float(best)
    outputs, drafts = tmp_path / "tutorial" / "outputs", tmp_path / "tutorial" / "drafts"
    report = read_report(outputs / "explain" / "report" / "report.json")
    assert list(report.drafts) == ["lookup", "tuned", "tuned+lookup"]
    assert not any(draft.lossless.unexplained for draft in report.drafts.values())
    assert [
        text for text in said if "outputs: 0 of 40 generated" in text
    ]  # cached outputs are used
    assert (drafts / "explain" / "model.safetensors").is_file()
    assert any('vllm serve explain-target --speculative-config \'{"method"' in t for t in said)
    assert len(said[-2].split()) > 10  # words of the target's output
    assert "traffic: 4 rows are kept" in said[-1]
    assert "nothing to gain: " in said[-1]  # too few rows
