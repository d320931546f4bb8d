"""PARD as it is trained: its masks read what they read when they draft; its export."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.sources import read_json
from distill.drafters.batch import WIDTH, TrainingBatch
from distill.drafters.pard import KIND, draw_masks, give_mask, read_with_masks, with_mask_row
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.train import run
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.reporting.fields import read_report
from tests.distill.conftest import ONE_LAYER, PARD, ROWS, TOKENS
from tests.distill.drafters.conftest import MASK, VOCAB

GAMMA = 4


@pytest.fixture
def model(tiny_llama):
    """A model whose mask is not the row of its embedding."""
    model = tiny_llama(0, spread=4, num_key_value_heads=2)
    give_mask(model, MASK, GAMMA)
    torch.manual_seed(1)
    with torch.no_grad():
        model.mask.weight.normal_()
    return model


@pytest.mark.parametrize("name", ["pard sibling", "pard lora", "pard pruned", "pard trimmed"])
def test_a_run_ends_in_a_folder_that_drafts_at_once(finished, name):
    recipe = finished(name)
    draft = recipe.folder / "draft"
    about = read_json(draft / "config.json")
    assert (about["pard_token"], about["pard_tokens"], about["vocab_size"]) == (TOKENS, 3, ROWS)
    plain = AutoModelForCausalLM.from_pretrained(draft)
    drafter = load_drafter(str(draft), load_target(recipe.target, torch.float32, "cpu", 64))
    assert isinstance(drafter, PardDrafter)
    assert (drafter.mask, drafter.most) == (TOKENS, 3)
    # what our own form drafts, the full form does in a plain pass over text and masks
    text = [5, 7, 9, 11, 3, 250, 8, 14, 15, 50, 44]
    session = drafter.start(Text(text[:6], 60, Sampling(), torch.Generator(), {}, 3))
    for end, step in ((6, 2), (8, 1), (9, 2)):
        with torch.no_grad():
            logits = plain(torch.tensor([[*text[:end], TOKENS, TOKENS]])).logits[0, -3:]
        assert session.propose(3).tokens.tolist() == logits.argmax(-1).tolist()
        session.commit(text[end : end + step], step - 1, {})
    assert drafter.draft_at_once(20, Sampling(), 3) is not None  # its time is that of a whole draft


def batch_of(lengths, answers, width=16):
    """Made up: texts of so many tokens, the last ones of each an answer."""
    torch.manual_seed(3)
    ids = torch.zeros((len(lengths), width), dtype=torch.long)
    positions = []
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        ids[row, :length] = torch.randint(VOCAB - 1, (length,))
        positions += [row * width + at for at in range(length - answer - 1, length - 1)]
    count = len(positions)
    return TrainingBatch(
        ids,
        torch.tensor(positions),
        torch.zeros((count, 3), dtype=torch.long),
        torch.full((count, 3), -1.5),
        seeds=torch.arange(len(lengths)) + 7,
    )


@torch.no_grad()
def test_training_reads_what_drafting_reads(model):
    """Each mask's state is that of a plain pass over the text up to its anchor and its chain."""
    batch = batch_of([16, 9, 13], [11, 5, 1])
    drawn = draw_masks(batch, GAMMA)
    states = read_with_masks(model, batch, drawn)
    assert states.shape[1] % WIDTH == 0
    whole = with_mask_row(model)
    width = batch.width
    for row, slot, entry, depth in zip(*map(torch.Tensor.tolist, drawn[:4]), strict=True):
        anchor = int(batch.positions[entry])
        assert anchor // width == row
        assert int(batch.positions[entry + depth]) == anchor + depth
        text = batch.input_ids[row, : anchor % width + 1].tolist()
        plain = whole.model(torch.tensor([[*text, *[MASK] * depth]])).last_hidden_state[0, -1]
        torch.testing.assert_close(states[row, width + slot], plain, rtol=1e-4, atol=1e-4)
    for row in range(len(batch.input_ids)):
        plain = whole.model(batch.input_ids[row : row + 1]).last_hidden_state[0]
        torch.testing.assert_close(states[row, :width], plain, rtol=1e-4, atol=1e-4)
    assert set(drawn.depths.tolist()) == set(range(1, GAMMA))
    # no answer of one token has a second one to learn
    assert 2 not in drawn.rows.tolist()


@pytest.mark.parametrize("tied", [False, True])
def test_engines_read_the_mask_as_a_row_of_the_embedding(tiny_llama, tmp_path, tied):
    model = tiny_llama(2, tie_word_embeddings=tied)
    give_mask(model, MASK, GAMMA)
    with torch.no_grad():
        model.mask.weight.normal_()
    before = model.get_input_embeddings().weight.clone()
    whole = with_mask_row(model)
    whole.save_pretrained(tmp_path)
    assert torch.equal(model.get_input_embeddings().weight, before)
    read = type(model).from_pretrained(tmp_path)
    assert (read.config.pard_token, read.config.pard_tokens) == (MASK, GAMMA)
    assert torch.equal(read.get_input_embeddings().weight[MASK], model.mask.weight[0])
    assert not hasattr(read, "mask")
    ids = torch.tensor([[3, 1, 4, MASK]])
    torch.testing.assert_close(read(ids).logits, whole(ids).logits)


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
        for entry, depth in zip(drawn.anchors.tolist(), drawn.depths.tolist(), strict=True):
            at = int(positions[entry])
            text = texts[at // width, : at % width + 1].tolist()
            guess = plain(torch.tensor([[*text, *[mask] * depth]]))
            accepted[entry + depth] += agreed(guess, logits[entry + depth])
            tokens[entry + depth] += 1
        give_loss_forward(model, KIND, forward_kl)
        found = model(**batch._asdict(), temperature=1.0)
    torch.testing.assert_close(found.accepted, first)
    torch.testing.assert_close(found.draft_accepted, accepted)
    assert torch.equal(found.draft_tokens, tokens)
    assert len(drawn.anchors) > 10
    assert tokens.max() > 2


def test_a_sibling_with_fewer_layers_is_a_draft_that_was_made_from_it(folder, job, tmp_path):
    """Its trimmed-vocabulary checkpoint is for the sibling, so other targets read the full one."""
    cut = job(tmp_path / "cut", target=str(folder / "target"), max_steps=0, **ONE_LAYER)
    assert run(cut) == 0
    models = {"target": str(folder / "roomy"), "draft": str(cut.folder / "draft")}
    recipe = job(tmp_path / "run", **PARD | models)
    assert run(recipe) == 0
    about = read_json(recipe.folder / "draft" / "config.json")
    assert (about["num_hidden_layers"], about["pard_tokens"], about["vocab_size"]) == (1, 3, ROWS)
    drafts = read_report(recipe.folder / "report" / "report.json").drafts
    assert drafts["untuned"].path == models["draft"]
    assert drafts["tuned"].alpha.mean > drafts["untuned"].alpha.mean


def test_a_vocabulary_without_a_free_row_is_refused(job, folder, tmp_path):
    recipe = job(tmp_path, drafter="pard", draft=str(folder / "target"))
    with pytest.raises(ValueError, match=r"no entry that no text uses.*use another drafter"):
        run(recipe)
