"""Every command tells an error that a user can mend from a fault of the program."""

import subprocess
import sys

import pytest

from align import check, to_gguf
from align.errors import UserError
from distill import adapt, cli, publish, train
from eval import alive, demo, drift
from eval import run as evaluate

COMMANDS = {  # the module, what its `main` calls, and arguments
    "check": (check, "check_pair", ["--target", "T", "--draft", "D"]),
    "to_gguf": (to_gguf, "write_gguf", ["T", "F"]),
    "train": (train, "run", ["--recipe", "code"]),
    "run": (evaluate, "_measure", ["--target", "T", "--draft", "D", "--prompts", "P"]),
    "drift": (drift, "read_report", ["R", "--metrics", "M"]),
    "alive": (alive, "check", ["T", "D"]),
    "demo": (demo, "read_report", ["R"]),
    "publish": (publish, "publish", ["R"]),
    "adapt": (adapt, "adapt", [".", "--traffic", "T"]),
}


@pytest.fixture(params=COMMANDS)
def ended(request, tmp_path, monkeypatch):
    """The exit status of a command that meets an error: ended(error)."""
    module, called, arguments = COMMANDS[request.param]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "T").mkdir()
    (tmp_path / "T" / "config.json").write_text("{}")  # a checkpoint

    def end(error):
        def fail(*_, **__):
            raise error

        monkeypatch.setattr(module, called, fail)
        try:
            return module.main(arguments)
        except SystemExit as stop:
            return stop.code

    return end


@pytest.mark.parametrize("error", [UserError("What, why."), PermissionError(13, "Denied", "f")])
def test_what_a_user_can_mend_is_told_in_a_line(ended, capsys, error):
    assert ended(error) == 2
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_fault_of_the_program_keeps_its_traceback(ended, capsys, request):
    fault = ValueError("of a library")
    if "[adapt]" in request.node.name:  # its status 1 is a refused draft
        assert ended(fault) == 2
        assert "Traceback" in capsys.readouterr().err
    else:
        with pytest.raises(ValueError, match="of a library"):
            ended(fault)


def called(*arguments):
    """One call of `draftsmith` in a process without the libraries that take seconds to import."""
    script = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    script += "from distill.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True
    )


def test_one_command_names_the_others_without_their_libraries():
    helped = called("--help")
    assert helped.returncode == 0
    for name, module in cli.COMMANDS.items():
        summary = cli.source(module).read_text(encoding="utf-8").split("\n")[0].strip('"')
        assert f"{name:8} {summary}\n" in helped.stdout
    unknown = called("evaluate")
    assert unknown.returncode == 2
    assert "eval" in unknown.stderr


def test_one_command_calls_the_others(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["draftsmith", "demo", str(tmp_path)])
    assert cli.main() == 2
    assert "no report" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["draftsmith", "demo", "--help"])
    with pytest.raises(SystemExit):
        cli.main()
    helped = capsys.readouterr().out
    assert "draftsmith demo" in helped
    assert "eval.demo" not in helped
    started = []
    monkeypatch.setattr("os.execv", lambda path, words: sys.exit(started.extend(words)))
    monkeypatch.setattr(sys, "argv", ["draftsmith", "train", "--recipe", "code"])
    with pytest.raises(SystemExit):
        cli.main()
    assert started[-3:] == [str(cli.source("distill.train")), "--recipe", "code"]
