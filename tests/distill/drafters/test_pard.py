"""PARD as it is trained: its masks read what they read when they draft; its export."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters.pard import KIND, give_mask, read_with_masks, with_mask_row
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
from tests.distill.drafters.batches import batch_of, planned
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
    drafter = load_drafter(
        str(draft), load_target(Checkpoint.open(recipe.target), torch.float32, "cpu", 64)
    )
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


def texts_of(lengths, most=VOCAB - 1):
    torch.manual_seed(3)
    return [torch.randint(most, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("packed", [True, False])
@torch.no_grad()
def test_training_reads_what_drafting_reads(model, packed):
    """Each mask's state is that of a plain pass over the text up to its anchor and its chain."""
    texts, prompts = texts_of([16, 9, 13]), (5, 4, 12)
    batch = planned(batch_of(texts, prompts, packed=packed), KIND, model)
    whole = with_mask_row(model)
    if packed:  # else as a model whose layers are not `layers.PLAIN`
        give_loss_forward(model, KIND, forward_kl)
    states = read_with_masks(model, batch)
    count, depths = len(batch.positions), set()
    of_text = batch.texts.flatten()[batch.positions].tolist()
    masks = [(row, slot) for row, slot in (batch.plan.anchors >= 0).nonzero().tolist()]
    entries = [(int(batch.plan.anchors[at]), int(batch.plan.depths[at])) for at in masks]
    entries = [(number, 0) for number in range(count)] + sorted(entries)
    learned = dict.fromkeys(entries)
    for state, goal in zip(states, batch.plan.learned.tolist(), strict=True):
        same = [entry for entry in entries if sum(entry) == goal and learned[entry] is None]
        expected = {entry: plain_state(whole, texts, batch, of_text, entry) for entry in same}
        entry = min(expected, key=lambda each: (expected[each] - state).abs().max())
        torch.testing.assert_close(state, expected[entry], rtol=1e-4, atol=1e-4)
        learned[entry] = state
        depths.add(entry[1])
    assert None not in learned.values()
    assert depths == set(range(GAMMA))
    # no answer of one token has a second one to learn
    assert all(of_text[number] != 2 for number, depth in entries if depth)


def plain_state(whole, texts, batch, of_text, entry):
    number, depth = entry
    text = texts[of_text[number]][: int(batch.numbers[number]) + 1]
    return whole.model(torch.tensor([[*text, *[MASK] * depth]])).last_hidden_state[0, -1]


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
    size, most, mask = 40, 4, 39
    model = tiny_llama(2, spread=4, vocab_size=size)
    give_mask(model, mask, most)
    texts = texts_of([16, 16], 30)
    batch = batch_of(texts, (4, 7))
    positions = batch.positions
    logits = torch.randn(len(positions), size).log_softmax(-1)
    logprobs, ids = logits.sort(descending=True)
    batch = planned(batch._replace(top_ids=ids, top_logprobs=logprobs), KIND, model, False)
    plain = tiny_llama(2, spread=4, vocab_size=size)

    def agreed(depth, number, goal):
        text = texts[int(batch.texts.flatten()[positions[number]])]
        read = [*text[: int(batch.numbers[number]) + 1], *[mask] * depth]
        q = plain(torch.tensor([read])).logits[0, -1].softmax(-1)
        return torch.minimum(q, logits[goal].exp()).sum()

    with torch.no_grad():
        count = len(positions)
        first = torch.stack([agreed(0, number, number) for number in range(count)])
        anchors, depths = batch.plan[:2]
        chains, tokens = [[rate] for rate in first], torch.ones(count)
        for at in sorted((anchors >= 0).nonzero().tolist(), key=lambda at: int(depths[*at])):
            number, depth = int(anchors[*at]), int(depths[*at])
            chains[number].append(chains[number][-1] * agreed(depth, number, number + depth))
            tokens[number + depth] += 1
        give_loss_forward(model.eval(), KIND, forward_kl)
        found = model(**batch._asdict(), temperature=1.0)
    torch.testing.assert_close(found.accepted, first)
    torch.testing.assert_close(found.emitted, torch.stack([1 + sum(chain) for chain in chains]))
    assert (anchors >= 0).sum() > 10
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
