"""Drafts that read the target's hidden states: prepared, trained over several steps, exported."""

import pytest

from distill.train import run

PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}


@pytest.mark.parametrize("drafter", ["eagle3"])
def test_the_main_job(job, tmp_path, capsys, drafter):
    recipe = job(tmp_path / "run", **PRUNED, drafter=drafter)
    assert run(recipe) == 0
    print(capsys.readouterr().out)
