"""PARD drafts from a recipe to a folder that others load, made of a sibling or of the target."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.sources import read_json
from distill.train import run
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.reporting.report import read_report

TOKENS, ROWS = 300, 304  # of the tokenizer, and of the target's vocabulary


@pytest.fixture(scope="module")
def roomy(folder, tmp_path_factory, tiny_llama):
    """target/ with rows behind its last token, and draft/ of its tokens without."""
    roomy = tmp_path_factory.mktemp("roomy")
    for name, rows in (("target", ROWS), ("draft", TOKENS)):
        shutil.copytree(folder / "target", roomy / name)
        model = tiny_llama(len(name), spread=3, vocab_size=rows, eos_token_id=0)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)
        model.generation_config.eos_token_id = 0
        model.save_pretrained(roomy / name)
    return roomy


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="sibling"),
        pytest.param({"use_peft": True, "lora_r": 4}, id="adapters"),
        pytest.param({"draft": None, "num_draft_layers": 1}, id="pruned"),
        pytest.param(
            {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 290}, id="trimmed head"
        ),
    ],
)
def test_a_run_ends_in_a_folder_that_drafts_at_once(job, roomy, tmp_path, changes):
    places = {"target": str(roomy / "target"), "draft": str(roomy / "draft")}
    recipe = job(tmp_path, drafter="pard", max_gamma=3, **places | changes)
    assert run(recipe) == 0
    draft = tmp_path / "draft"
    about = read_json(draft / "config.json")
    assert (about["pard_token"], about["pard_tokens"]) == (TOKENS, 3)
    assert about["vocab_size"] == ROWS
    assert not (draft / "adapter").exists()
    plain = AutoModelForCausalLM.from_pretrained(draft)
    target = load_target(places["target"], torch.float32, "cpu", 64)
    text = [5, 7, 9, 11, 3, 250, 8]
    drafter = load_drafter(str(draft), target)
    assert isinstance(drafter, PardDrafter)
    assert (drafter.mask, drafter.most) == (TOKENS, 3)
    # what our own form drafts, the full form does in a plain pass over text and masks
    session = drafter.start(Texts([[*text]], 60, Sampling(), torch.Generator(), [{}]))
    with torch.no_grad():
        logits = plain(torch.tensor([[*text, TOKENS, TOKENS]])).logits[0, -3:]
    assert session.propose(3, 0.0).tokens[0].tolist() == logits.argmax(-1).tolist()
    tuned = read_report(tmp_path / "report" / "report.json").drafts["tuned"]
    assert tuned.lossless.unexplained == 0
    assert tuned.costs.draft_block_ms > 0


def test_a_vocabulary_without_a_free_row_is_refused(job, folder, tmp_path):
    recipe = job(tmp_path, drafter="pard", draft=str(folder / "target"))
    with pytest.raises(ValueError, match=r"no row that no text uses.*use another drafter"):
        run(recipe)
