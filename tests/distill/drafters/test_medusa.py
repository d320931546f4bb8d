"""Medusa heads as they are trained: what they learn from, their fit, their export."""

from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from distill.drafters import medusa
from distill.drafters.kind import Draft
from distill.drafters.medusa import fit_heads
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl, head_loss
from eval.decoding.drafters.medusa import MedusaConfig, MedusaModel
from eval.reporting.fields import read_report
from tests.distill.drafters.batches import batch_of, planned

VOCAB, SIZE, HEADS = 61, 32, 3
# two answers: of a prompt of 3 tokens and a response of 5, and of 2 and 7
TEXTS, PROMPTS = [[4, 9, 2, 33, 5, 17, 8, 21], [7, 1, 40, 3, 3, 59, 12, 6, 30]], (3, 2)
DEPTHS = torch.tensor([3, 1, 3, 2, 3, 2, 3, 3, 1, 3, 3, 2])
KEPT = torch.arange(0, VOCAB, 2)


def heads(kept=KEPT):
    torch.manual_seed(0)
    model = MedusaModel(
        MedusaConfig(
            hidden_size=SIZE, vocab_size=VOCAB, num_heads=HEADS, truncated_vocab_size=len(kept)
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    return model


def test_each_head_learns_the_token_of_its_own_place(monkeypatch):
    torch.manual_seed(4)
    model = heads()
    rows = len(KEPT)
    top_ids = torch.stack([torch.randperm(rows)[:3] for _ in DEPTHS])
    logprobs = torch.tensor([[0.5, 0.3, 0.1]]).log().repeat(len(DEPTHS), 1)
    states = [torch.randn(len(text) - 1, 1, SIZE) for text in TEXTS]
    batch = batch_of(TEXTS, PROMPTS, states)
    batch = batch._replace(top_ids=top_ids, top_logprobs=logprobs)
    of_text = batch.texts.flatten()[batch.positions].tolist()
    total = 0.0
    for entry, (text, at) in enumerate(zip(of_text, batch.numbers.tolist(), strict=True)):
        # the first head learns at each position, from the state before it
        learned = [(entry, 0, states[text][at - 1, 0])]
        for d in range(2, int(DEPTHS[entry]) + 1):
            if entry + d < len(DEPTHS) and of_text[entry + d] == text:
                # the newest token is at + 1, what head d drafts is at + 1 + d
                learned.append((entry + d, d - 1, states[text][at, 0]))
        for goal, head, state in learned:
            x, goal = model.blocks[head](state), [goal]
            total += float(
                head_loss(
                    x[None].detach(), model.lm_head.weight.detach(), top_ids[goal], logprobs[goal]
                )
            )
    monkeypatch.setattr(medusa, "drawn_depths", lambda *_: DEPTHS)
    give_loss_forward(model, medusa.KIND, forward_kl)
    output = model(**planned(batch, medusa.KIND, model)._asdict())
    # a sum over what was drawn, over what is drawn in the mean: the losses of two halves add up
    assert float(output.loss.detach()) == pytest.approx(total / (1 + 1 / 2 + 1 / 4), rel=1e-4)
    output.loss.backward()
    assert all(block.layers[0].weight.grad.abs().sum() > 0 for block in model.blocks)


def test_the_fit_is_near_the_least_squares_that_blocks_cannot_be():
    """States that turn by one matrix a token: head d must give what the target's head would."""
    torch.manual_seed(2)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE)).Q
    texts = []
    for _ in range(40):
        rows = [torch.randn(SIZE)]
        for _ in range(30):
            rows.append(turn @ rows[-1])
        # what every state has in common, which the fit needs to take a constant out
        texts.append(torch.stack(rows[15:]) + 3.0)
    model = heads(torch.arange(VOCAB))
    with torch.no_grad():  # which tokens are likely does not depend on what all states share
        model.lm_head.weight -= model.lm_head.weight.mean(1, keepdim=True)
    head = model.lm_head.weight.detach().clone()
    fit_heads(model, texts)
    for depth, block in enumerate(model.blocks, start=1):
        x = torch.cat([states[:-depth] for states in texts])
        y = torch.cat([states[depth:] for states in texts])
        drafted = model.lm_head(block(x)).argmax(-1)
        assert ((y @ head.T).argmax(-1) == drafted).float().mean() > 0.6
        untrained = (x @ head.T).argmax(-1) == (y @ head.T).argmax(-1)
        assert untrained.float().mean() < 0.3


@pytest.mark.parametrize("length", [1, 3])
def test_heads_deeper_than_every_output_are_not_fitted(length):
    torch.manual_seed(2)
    model = heads()
    before = [block.layers[0].weight.detach().clone() for block in model.blocks]
    fit_heads(model, [torch.randn(length, SIZE) for _ in range(200)])
    assert all(weight.isfinite().all() for weight in model.parameters())
    same = [torch.equal(a, b.layers[0].weight) for a, b in zip(before, model.blocks, strict=True)]
    assert same == [depth >= length for depth in range(1, HEADS + 1)]


def test_heads_are_read_as_they_were_saved_and_by_no_other_target(tmp_path):
    model, embedding = heads(), torch.randn(VOCAB, SIZE)
    medusa.KIND.save(tmp_path, Draft(model, KEPT), embedding, Checkpoint("a target", Path()))
    found, ids, *_ = medusa.KIND.load(tmp_path, embedding, None)
    assert torch.equal(ids, KEPT)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    with pytest.raises(UserError):
        medusa.KIND.load(tmp_path, embedding + 1, None)


def test_the_export_has_the_names_that_engines_load(finished):
    recipe = finished("medusa")
    about = read_json(recipe.folder / "draft" / "config.json")
    assert about["architectures"] == ["MedusaModel"]
    assert (about["num_heads"], about["truncated_vocab_size"]) == (3, 270)
    for draft in read_report(recipe.folder / "report" / "report.json").drafts.values():
        if draft.path and "lookup" not in draft.path:
            assert draft.memory.kv_bytes_per_token.draft == 0
