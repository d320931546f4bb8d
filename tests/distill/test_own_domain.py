"""The commands of docs/own-domain.md, in their order, on a pair of a few kilobytes."""

import re

import pytest
from ruamel.yaml import YAML

import distill.train
from align import check
from distill.recipe import yaml_text
from eval import convert
from eval import run as evaluation
from tests.test_docs import ROOT, blocks, recorded

PAGE = ROOT / "docs" / "own-domain.md"
# what the page's recipe gets on top, to be as short as possible
SHORT = {"dtype": "float32", "use_cpu": True, "bf16": False, "max_steps": 4, "cache_top_k": 30,
         "answer_max_new_tokens": 24, "max_new_tokens": 16, "tuning_prompts": 1, "speed_prompts": 2,
         "max_gamma": 2, "lora_r": 4, "disable_tqdm": True}  # fmt: skip
EVALUATED = ["--gamma", "2", "--speed_prompts", "2", "--batch_sizes", "1,2"]


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    """A folder with what the page has its reader write: two files of prompts and a recipe."""
    for name, source in (("train", "train"), ("eval", "eval"), ("last-week", "eval")):
        text = (folder / f"{source}.jsonl").read_text(encoding="utf-8")
        (tmp_path / f"sql-{name}.jsonl").write_text(text, encoding="utf-8")
    (recipe,) = [body for language, body in blocks(PAGE) if language == "yaml"]
    pair = {"target": str(folder / "target"), "draft": str(folder / "draft")}
    values = YAML(typ="safe", pure=True).load(recipe) | pair | SHORT
    (tmp_path / "sql.yaml").write_text(yaml_text(values), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_from_top_to_bottom(here, folder, capsys):
    tried = []
    for language, body in blocks(PAGE):
        for words in recorded(body, here) if language == "bash" else []:
            words = [re.sub(r"^Qwen/.*-7B-.*", str(folder / "target"), word) for word in words]
            words = [re.sub(r"^Qwen/.*", str(folder / "draft"), word) for word in words]
            match words:
                case ["accelerate", "launch", "distill/train.py", *arguments]:
                    if "--report_to" in arguments:  # tests/distill/test_trackers.py
                        continue
                    assert distill.train.main(arguments) in (0, int("--dry_run" in arguments))
                case ["python", "-m", "align.check", *arguments]:
                    assert check.main(arguments) == 0
                case ["python", "-m", "eval.run", *arguments]:
                    # the draft learns nothing in four steps: the page's floor for alpha is not met
                    floor = "--fail_under_alpha" in arguments
                    assert evaluation.main([*arguments, *EVALUATED]) == int(floor)
                case ["python", "-m", "eval.convert", *arguments]:
                    assert convert.main(arguments) == 0
                case _:
                    continue
            tried.append(words[2])
    assert tried == [
        "align.check",
        "distill/train.py",
        "distill/train.py",
        "eval.run",
        "eval.convert",
        "eval.run",
    ]
    for name in ("sql", "sql-closer", "sql-last-week"):
        assert (here / "outputs" / name / "report" / "report.html").is_file()
