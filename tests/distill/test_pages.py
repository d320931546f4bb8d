"""The commands of README and docs, run in their order on a pair of a few kilobytes.

Models and prompts of this test replace the reader's. Commands that need a server or another engine
are parsed only (tests/test_docs.py).
"""

import shutil

import pytest
from ruamel.yaml import YAML

import distill.publish
import distill.train
from align import check
from distill import dry_run
from distill.recipe_files import read_yaml, recipe_files, yaml_text
from eval import demo
from eval import run as evaluation
from eval.measuring.cost import StepCosts
from tests.test_docs import PAGES, ROOT, blocks, commands

# what every recipe gets on top, to be as short as possible
SHORT = {"dtype": "float32", "use_cpu": True, "bf16": False, "max_steps": 4, "cache_top_k": 30,
         "answer_max_new_tokens": 12, "max_new_tokens": 8, "tuning_prompts": 1, "speed_prompts": 2,
         "max_gamma": 2, "lora_r": 4, "disable_tqdm": True, "minutes": None, "num_draft_layers": 1,
         "draft_vocab_size": None, "warmup_steps": 0, "fit_tokens": 400,
         "max_train_prompts": 12, "max_eval_prompts": None,
         "answers": "local", "answer_url": None}  # fmt: skip
MODULES = {
    "align.check": check.main,
    "distill.publish": distill.publish.main,
    "eval.run": evaluation.main,
    "eval.demo": demo.main,
}
# a command with these words is only parsed
# (the tiny vocabulary has no row for a mask)
PARSED = ["--report", "vllm", "--base_url", "llama.cpp", "server", "explain-2", "pard", "wide"]
PARSED += ["mtp-stale", "sql-2"]  # targets that somebody has fine-tuned
GAINING = StepCosts(0.1, 1.0, {1: 1.0, 2: 1.0, 3: 1.0}, 20)  # a dry run ends with 0


@pytest.fixture(scope="module")
def desk(folder, tmp_path_factory):
    """What a reader has by then: models, prompts, recipes, the runs of README and the tutorial."""
    desk = tmp_path_factory.mktemp("desk")
    for name in ("target", "draft"):
        shutil.copytree(folder / name, desk / name)
        (desk / name / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    for name, source in (("sql-train", "train"), ("sql-eval", "eval"), ("last-week", "eval"),
                         ("explain-train", "train"), ("explain-eval", "eval")):  # fmt: skip
        text = (folder / f"{source}.jsonl").read_text(encoding="utf-8")
        (desk / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (own,) = [b for kind, b in blocks(ROOT / "docs" / "recipes.md") if kind == "yaml"]
    recipes = {"sql": YAML(typ="safe", pure=True).load(own)}
    recipes |= {name: read_yaml(path) for name, path in recipe_files().items()}
    mine = {"target": "target", "target_hub_id": None} | SHORT
    for name, values in recipes.items():
        values |= mine | {"draft": values.get("draft") and "draft"}
        values |= {"train_prompts": "sql-train.jsonl", "eval_prompts": "sql-eval.jsonl"}
        path = desk / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml_text({"name": path.stem} | values), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        for name in ("code", "code/pruned"):
            assert distill.train.main(["--recipe", f"{name}.yaml"]) == 0
    return desk


def own_words(words):
    """A command's words with the reader's things in them."""
    for word in words:
        if word.startswith("Qwen/") or word in ("TARGET", "T", "D"):
            word = "target" if "7B" in word or word[0] == "T" else "draft"
        elif word.partition("=")[2].startswith("Qwen/"):
            word = f"{word.partition('=')[0]}=draft"
        elif word in recipe_files():
            word += ".yaml"
        yield word


def commands_of(page):
    """The words of each command of ours in the page's blocks that is run."""
    scripts = [body for language, body in blocks(page) if language == "bash"]
    for words in (words for script in scripts for words in commands(script)):
        module = words[2] if words[:2] == ["python", "-m"] else None
        ours = "distill/train.py" in words or module in MODULES
        if ours and not any(part in words for part in PARSED):
            yield words


def run(words):
    """The exit status of a command of ours, and the one that it should have."""
    if "distill/train.py" in words:
        return distill.train.main(words[words.index("distill/train.py") + 1 :]), 0
    _, _, module, *arguments = words
    if module == "eval.run":
        arguments += ["--speed_prompts", "2", *([] if "--gamma" in words else ["--gamma", "2"])]
    # nothing is learned in four steps: no floor of the acceptance rate is reached
    return MODULES[module](arguments) or 0, int("--fail_under_alpha" in words)


@pytest.mark.real
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "CHANGELOG.md" and [*commands_of(page)]],
    ids=lambda page: page.name,
)
def test_the_commands_of_a_page(page, desk, tmp_path, monkeypatch, capsys):
    shutil.copytree(desk, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(dry_run, "step_costs", lambda *_: [GAINING])
    for words in commands_of(page):
        status, expected = run(list(own_words(words)))
        assert status == expected, (words, capsys.readouterr().err)


def test_most_pages_have_commands():
    assert len([page for page in PAGES if [*commands_of(page)]]) > 6
