"""Heads on the target's last state: what they learn from, their fit, a run to its report."""

import json

import pytest
import torch

from distill.drafters import medusa
from distill.drafters.medusa import attach, fit_heads, with_head_rows
from distill.losses import forward_kl, head_loss
from distill.teacher.store import CachedAnswer
from distill.train import run
from eval.decoding.drafters.medusa import MedusaConfig, MedusaModel

VOCAB, SIZE, WIDTH, HEADS = 61, 32, 9, 3
# two answers: of a prompt of 3 tokens and a response of 5, and of 2 and 7
IDS = torch.tensor([[4, 9, 2, 33, 5, 17, 8, 21, 0], [7, 1, 40, 3, 3, 59, 12, 6, 30]])
POSITIONS = torch.tensor([2, 3, 4, 5, 6, *(WIDTH + at for at in range(1, 8))])
DEPTHS = torch.tensor([3, 1, 3, 2, 3, 2, 3, 3, 1, 3, 3, 2])
KEPT = torch.arange(0, VOCAB, 2)


def heads(rank, kept=KEPT):
    torch.manual_seed(0)
    model = MedusaModel(
        MedusaConfig(
            hidden_size=SIZE,
            vocab_size=VOCAB,
            num_heads=HEADS,
            truncated_vocab_size=len(kept),
            sequential_rank=rank,
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
        if rank:
            model.sequential.weight[-1] = 0
    with_head_rows(model, kept)
    return model


def check_loss(rank):
    torch.manual_seed(4)
    model = heads(rank)
    rows = len(KEPT)
    top_ids = torch.stack([torch.randperm(rows)[:3] for _ in POSITIONS])
    logprobs = torch.tensor([[0.5, 0.3, 0.1]]).log().repeat(len(POSITIONS), 1)
    states = torch.randn(2, WIDTH, 1, SIZE)
    total, agreed, first = 0.0, 0, 0
    for entry, place in enumerate(POSITIONS.tolist()):
        row, at = divmod(place, WIDTH)
        for d in range(1, int(DEPTHS[entry]) + 1):
            if entry + d >= len(POSITIONS) or POSITIONS[entry + d] // WIDTH != row:
                continue
            # the newest token is at + 1, what head d drafts is at + 1 + d
            x, token = model.blocks[d - 1](states[row, at, 0]), int(IDS[row, at + d])
            if rank:
                before = model.sequential.weight[token // 2 if token % 2 == 0 else rows]
                x = torch.cat([x, before])
            goal = [entry + d]
            loss, same = head_loss(
                x[None].detach(), model.lm_head.weight.detach(), top_ids[goal], logprobs[goal]
            )
            total += float(loss)
            if d == 1:
                agreed, first = agreed + int(same), first + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa, "drawn_depths", lambda *_: DEPTHS)
        attach(model, forward_kl)
        output = model(
            input_ids=IDS,
            positions=POSITIONS,
            top_ids=top_ids,
            top_logprobs=logprobs,
            states=states,
            seeds=None,
        )
    # a sum over what was drawn, over what is drawn in the mean: the losses of two halves add up
    assert float(output.loss.detach()) == pytest.approx(total / (1 + 1 / 2 + 1 / 4), rel=1e-4)
    assert float(output.agreed) == pytest.approx(agreed * len(POSITIONS) / first)
    output.loss.backward()
    assert all(block.layers[0].weight.grad.abs().sum() > 0 for block in model.blocks)


@pytest.mark.parametrize("rank", [0, 5])
def test_each_head_learns_the_token_of_its_own_place(rank):
    check_loss(rank)


def test_another_token_before_is_caught(monkeypatch):
    right = medusa.with_head_rows

    def moved(model, ids):
        right(model, ids)
        model.head_row = model.head_row.roll(1)

    monkeypatch.setitem(globals(), "with_head_rows", moved)
    with pytest.raises(AssertionError):
        check_loss(5)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_fit_is_near_the_least_squares_that_blocks_cannot_be(rank):
    """States that turn by one matrix a token: head d must give what the target's head would."""
    torch.manual_seed(2)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE)).Q
    states, answers = {}, []
    for index in range(40):
        rows = [torch.randn(SIZE)]
        for _ in range(30):
            rows.append(turn @ rows[-1])
        # what every state has in common, which the fit needs to take a constant out
        states[index] = (torch.stack(rows) + 3.0)[:, None]
        text = torch.zeros(16, dtype=torch.long)
        answers.append(CachedAnswer(index, text, text, text[:, None], text[:, None].float()))
    model = heads(rank, torch.arange(VOCAB))
    with torch.no_grad():  # which tokens are likely does not hang on what all states share
        model.lm_head.weight[:, :SIZE] -= model.lm_head.weight[:, :SIZE].mean(1, keepdim=True)
    head = model.lm_head.weight[:, :SIZE].detach().clone()
    fit_heads(model, torch.randn(VOCAB, SIZE), states, answers)
    for depth, block in enumerate(model.blocks, start=1):
        x = torch.cat([states[i][15:-depth, 0] for i in range(40)])
        y = torch.cat([states[i][15 + depth :, 0] for i in range(40)])
        found = block(x).detach() @ model.lm_head.weight[:, :SIZE].detach().T
        if rank:  # all tokens here are 0
            found += model.lm_head.weight[:, SIZE:].detach() @ model.sequential.weight[0].detach()
        assert ((y @ head.T).argmax(-1) == found.argmax(-1)).float().mean() > 0.6
        untrained = (x @ head.T).argmax(-1) == (y @ head.T).argmax(-1)
        assert untrained.float().mean() < 0.3


def test_the_fit_reads_the_token_before():
    """States that hang on the token before alone: the sequential head knows it, at every depth."""
    torch.manual_seed(2)
    known, turn = torch.randn(VOCAB, SIZE), torch.randn(SIZE, SIZE)
    states, answers = {}, []
    for index in range(60):
        text = torch.randint(VOCAB, (40,))
        states[index] = (known[text][:-1] @ turn.T)[:, None]
        answers.append(CachedAnswer(index, text[:10], text[10:], text[10:, None], text[10:, None]))
    agreements = []
    for rank in (8, SIZE):
        model = heads(rank, torch.arange(VOCAB))
        own = model.lm_head.weight[:, :SIZE].detach().clone()
        fit_heads(model, known, states, answers)
        found = model.sequential.weight[:-1] @ model.lm_head.weight[:, SIZE:].T
        same = (known @ turn.T @ own.T).argmax(-1) == found.argmax(-1)
        agreements.append(float(same.float().mean()))
    assert 0.1 < agreements[0] < agreements[1] - 0.2
    assert agreements[1] > 0.9


MEDUSA = {"draft": None, "drafter": "medusa", "draft_vocab_size": 270}


def test_a_run_makes_and_measures_it(job, tmp_path):
    recipe = job(tmp_path / "run", **MEDUSA, max_gamma=3, sequential_rank=4)
    assert run(recipe) == 0
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert set(report["drafts"]) == {"untuned", "tuned"}
    for draft in report["drafts"].values():
        assert draft["lossless"]["unexplained"] == 0
        assert draft["memory"]["kv_bytes_per_token"]["draft"] == 0
    about = json.loads((recipe.folder / "draft" / "config.json").read_text())
    assert about["architectures"] == ["MedusaModel"]
    assert (about["num_heads"], about["truncated_vocab_size"]) == (3, 270)
