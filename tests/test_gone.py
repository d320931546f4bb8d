"""What left answers with one sentence that says what to use instead."""

import runpy

import pytest

from eval.decoding.drafters.loading import load_drafter
from eval.run import main


@pytest.mark.parametrize(
    ("module", "instead"),
    [("eval.convert", "docs/metrics.md"), ("distill.doctor", "--dry_run true` says what is here")],
)
def test_commands_that_left(module, instead, capsys):
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__")
    assert stopped.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"error: {module} is gone: ")
    assert instead in sentence


def test_a_bank_of_adapters_left(capsys):
    with pytest.raises(SystemExit):
        main(["--bank", "outputs"])
    assert "error: --bank is gone: name each run's draft" in capsys.readouterr().err
    with pytest.raises(ValueError, match="chosen by request are gone"):
        load_drafter("lookup-first:routed:outputs", None)
