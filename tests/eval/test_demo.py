"""`python -m eval.demo` on the folder of a run: one prompt, without and with the draft."""

import re
import shutil
import sys

import pytest

import eval.run
from eval.decoding.prompt_run import PromptRun
from eval.demo import GREEN, PLAIN, main, print_figures, printer
from eval.prompts import Prompt, load_prompts


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """What a finished run has of a pair that often agrees."""
    finished = tmp_path_factory.mktemp("run")
    shutil.copytree(folder / "draft", finished / "draft")
    (finished / "prompts").mkdir()
    for name in ("eval", "tuning"):
        shutil.copy(folder / "prompts.jsonl", finished / "prompts" / f"{name}.jsonl")
    (finished / "vocab_check.json").write_text("{}")
    keys = "draft: null\ndtype: float32\nmax_new_tokens: 24\ntemperature: 0.7\n"
    (finished / "recipe.yaml").write_text(f"target: {folder / 'target'}\n{keys}")
    draft = ("--draft", f"tuned={finished / 'draft'}", "--gamma", "3", "--speed_prompts", "2")
    assert eval.run.main(["--run", str(finished), *draft]) == 0
    return finished


def sections(text):
    """The prompt, the output of the target alone, and the output with the draft and the figures."""
    return re.split("^--- .*\n", text, flags=re.MULTILINE)[1:]


@pytest.mark.parametrize("no_color", ["", "1"])
@pytest.mark.parametrize("terminal", [True, False])
def test_in_a_terminal_accepted_tokens_are_green(finished, capsys, monkeypatch, terminal, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert main([str(finished)]) == 0
    prompt, alone, drafted = sections(capsys.readouterr().out)
    asked = {prompt.text for prompt in load_prompts(str(finished / "prompts" / "eval.jsonl"))}
    assert prompt.strip("\n") in asked
    accepted, rejected = map(int, re.search(r"(\d+) accepted, (\d+) rejected", drafted).groups())
    assert accepted > 0
    assert rejected > 0
    assert GREEN not in alone
    assert drafted.count(GREEN) == (accepted if terminal and not no_color else 0)
    assert drafted.replace(GREEN, "").replace(PLAIN, "").startswith(alone.rstrip("\n"))
    counts = re.findall(r"(?:target alone|with the draft) +(\d+) ", drafted)
    assert counts[0] == counts[1]
    assert "token-identical: yes" in drafted


def test_a_prompt_is_named(finished, tmp_path, capsys):
    assert main([str(finished), "--prompt", "def mine():"]) == 0
    assert sections(capsys.readouterr().out)[0] == "def mine():\n\n"
    (tmp_path / "p.jsonl").write_text('{"prompt": "def other():"}')
    assert main([str(finished), "--prompts", str(tmp_path / "p.jsonl")]) == 0
    assert sections(capsys.readouterr().out)[0] == "def other():\n\n"


def test_what_cannot_be_shown(finished, tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no report" in capsys.readouterr().err
    assert main([str(finished), "--prompt", " "]) == 2
    assert main([str(finished), "--prompts", str(tmp_path / "none.jsonl")]) == 2


def test_other_outputs_and_letters_of_two_tokens(capsys):
    prompt = Prompt("1", "a")
    alone, other = (PromptRun.of(prompt, 1, [s, s], [[0], [t]]) for s, t in ((0.5, 1), (0.25, 2)))
    show = printer(lambda token: "é".encode()[token : token + 1])
    show(PromptRun.of(prompt, 1, [0.5], [[0]]))
    assert capsys.readouterr().out == ""  # half a letter
    show(alone)
    assert capsys.readouterr().out == "é"
    print_figures(alone, other)
    shown = capsys.readouterr().out
    assert "2.00x" in shown
    assert "identical: no" in shown
