"""PARD drafts from a recipe to a folder that others load, made of a sibling or of the target."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.sources import read_json
from distill.drafters.batch import TrainingBatch
from distill.drafters.pard import KIND, draw_masks, give_mask
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
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
    assert not (tmp_path / "adapter").exists()
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


def test_a_held_out_text_says_how_many_of_all_drafted_tokens_are_accepted(tiny_llama):
    """Against passes over the text with the masks behind it, one mask after the other."""
    torch.manual_seed(0)
    size, most, mask, width = 40, 4, 39, 16
    model = tiny_llama(2, spread=4, vocab_size=size)
    give_mask(model, mask, most)
    texts, starts = torch.randint(1, 30, (2, width)), (3, 6)
    places = [torch.arange(start, width - 1) + row * width for row, start in enumerate(starts)]
    positions = torch.cat(places)
    logits = torch.randn(len(positions), size).log_softmax(-1)
    logprobs, ids = logits.sort(descending=True)
    plain = tiny_llama(2, spread=4, vocab_size=size)

    def agreed(output, logprobs):
        return torch.minimum(output.logits[0, -1].softmax(-1), logprobs.exp()).sum()

    with torch.no_grad():
        seeds = torch.tensor([1, 2])
        batch = TrainingBatch(texts, positions, ids, logprobs, None, seeds)
        drawn = draw_masks(batch, most)
        accepted, tokens = torch.zeros(len(positions)), torch.ones(len(positions))
        for entry, at in enumerate(positions.tolist()):
            read = texts[at // width, : at % width + 1][None]
            accepted[entry] = agreed(plain(read), logits[entry])
        first = accepted.clone()
        for entry, depth in zip(drawn.entries.tolist(), drawn.depths.tolist(), strict=True):
            at = int(positions[entry])
            text = texts[at // width, : at % width + 1].tolist()
            guess = plain(torch.tensor([[*text, *[mask] * depth]]))
            accepted[entry + depth] += agreed(guess, logits[entry + depth])
            tokens[entry + depth] += 1
        give_loss_forward(model, KIND, forward_kl)
        found = model(**batch._asdict(), temperature=1.0)
    torch.testing.assert_close(found.accepted, first)
    torch.testing.assert_close(found.drafted, accepted)
    assert torch.equal(found.tokens, tokens)
    assert len(drawn.entries) > 10
    assert tokens.max() > 2


def test_a_vocabulary_without_a_free_row_is_refused(job, folder, tmp_path):
    recipe = job(tmp_path, drafter="pard", draft=str(folder / "target"))
    with pytest.raises(ValueError, match=r"no row that no text uses.*use another drafter"):
        run(recipe)
