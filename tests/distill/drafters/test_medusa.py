"""Medusa heads as they are trained: what they learn from, their export."""

from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from distill.drafters import medusa
from distill.drafters.kind import Draft
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
