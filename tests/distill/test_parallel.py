"""A parallel draft: what a row of training is, and a run from its command to its report."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from distill.answer_cache import CachedAnswer
from distill.drafters import parallel
from distill.drafters.parallel import (
    KEEP,
    attach,
    drawn_depths,
    fit_sequential,
    for_training,
    plain_form,
    read_masks,
    with_masks,
)
from distill.losses import forward_kl, head_loss
from distill.prepare import PreparedDraft
from distill.recipe import RecipeError
from distill.train import run
from eval.decoding.build import build_decoder
from eval.decoding.drafters.in_turn import SequentialHead
from eval.decoding.drafters.parallel import Parts

VOCAB, DEPTH, WIDTH = 61, 4, 9
# two answers: of a prompt of 3 tokens and a response of 5, and of 2 and 7
IDS = torch.tensor([[4, 9, 2, 33, 5, 17, 8, 21, 0], [7, 1, 40, 3, 3, 59, 12, 6, 30]])
POSITIONS = torch.tensor([2, 3, 4, 5, 6, *(WIDTH + at for at in range(1, 8))])
DEPTHS = torch.tensor([4, 1, 3, 2, 4, 2, 4, 4, 1, 3, 4, 2])


@pytest.fixture
def model(tiny_llama):
    """As it is trained, with a trimmed head and a sequential one that adds something."""
    made, kept, rank = tiny_llama(3, spread=3), torch.arange(0, VOCAB, 2), 5
    made.lm_head = nn.Linear(32, len(kept), bias=False)
    torch.manual_seed(1)
    read = torch.randn(len(kept) + 1, rank)
    read[-1] = 0
    sequential = SequentialHead(read, torch.randn(len(kept), rank))
    for_training(made, kept, Parts(torch.randn(DEPTH - 1, 32), sequential))
    return made


def groups():
    """Anchor, depth and row of every mask that DEPTHS asks for and its answer has room for."""
    for entry, (place, depth) in enumerate(zip(POSITIONS.tolist(), DEPTHS.tolist(), strict=True)):
        row, at = divmod(place, WIDTH)
        for d in range(2, depth + 1):
            if entry + d - 1 < len(POSITIONS) and POSITIONS[entry + d - 1] // WIDTH == row:
                yield row, at, d, entry + d - 1


def check_states(model):
    """The state of each mask is that of a plain causal pass: the text so far, and masks behind."""
    batch = with_masks(IDS, POSITIONS, DEPTHS, VOCAB)
    table = model.model.embed_tokens

    def embed(ids):
        return torch.cat([table.weight, model.masks])[ids]

    hidden = torch.where(batch.visible, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        together = model.model(
            inputs_embeds=embed(batch.ids),
            attention_mask=hidden[:, None],
            position_ids=batch.position_ids,
        ).last_hidden_state
        text = model.model(input_ids=IDS).last_hidden_state
    torch.testing.assert_close(together[:, :WIDTH], text, atol=1e-5, rtol=1e-5)
    found = dict(zip(batch.places.tolist(), batch.entries.tolist(), strict=True))
    wide = batch.ids.shape[1]
    seen = {}
    for place, entry in found.items():
        row, slot = divmod(place, wide)
        d = int(batch.ids[row, slot]) - VOCAB + 2
        at = int(batch.position_ids[row, slot]) - d + 1
        seen[row, at, d] = entry
        masks = torch.arange(VOCAB, VOCAB + d - 1)
        with torch.no_grad():
            alone = model.model(inputs_embeds=embed(torch.cat([IDS[row, : at + 1], masks]))[None])
        torch.testing.assert_close(
            together[row, slot], alone.last_hidden_state[0, -1], atol=1e-5, rtol=1e-5
        )
    assert seen == {(row, at, d): entry for row, at, d, entry in groups()}
    before = [IDS[row, at + d - 1] for row, at, d in seen]
    assert batch.before.tolist() == before


def test_a_mask_learns_in_the_place_where_it_will_draft(model):
    check_states(model)


@pytest.mark.parametrize(
    "changed",
    [
        lambda batch: batch._replace(position_ids=batch.position_ids + (batch.ids >= VOCAB)),
        lambda batch: batch._replace(ids=torch.where(batch.ids > VOCAB, batch.ids - 1, batch.ids)),
        lambda batch: batch._replace(entries=(batch.entries - 1).clamp_min(0)),
        lambda batch: batch._replace(visible=batch.visible | batch.visible.roll(1, 2)),
        lambda batch: batch._replace(before=batch.before.roll(1)),
    ],
    ids=["position", "depth", "distribution", "attention", "token before"],
)
def test_a_mask_off_by_one_is_caught(model, monkeypatch, changed):
    right = with_masks
    monkeypatch.setitem(globals(), "with_masks", lambda *given: changed(right(*given)))
    with pytest.raises(AssertionError):
        check_states(model)


def test_the_loss_is_a_sum_over_text_and_masks(model, monkeypatch):
    torch.manual_seed(4)
    rows = len(model.lm_head.weight)
    top_ids = torch.stack([torch.randperm(rows)[:3] for _ in POSITIONS])
    logprobs = torch.tensor([[0.5, 0.3, 0.1]]).log().repeat(len(POSITIONS), 1)
    monkeypatch.setattr(parallel, "drawn_depths", lambda *_: DEPTHS)
    plain, parts = plain_form(model)
    attach(model, forward_kl)
    output = model(
        input_ids=IDS, positions=POSITIONS, top_ids=top_ids, top_logprobs=logprobs, seeds=None
    )
    table = torch.cat([plain.model.embed_tokens.weight, parts.masks])
    with torch.no_grad():
        text = plain.model(input_ids=IDS).last_hidden_state.flatten(0, 1)[POSITIONS]
        total, agreed = head_loss(text, plain.lm_head.weight, top_ids, logprobs)
        for row, at, d, entry in groups():
            ids = torch.cat([IDS[row, : at + 1], torch.arange(VOCAB, VOCAB + d - 1)])
            state = plain.model(inputs_embeds=table[ids][None]).last_hidden_state[0, -1]
            token = int(IDS[row, at + d - 1])
            before = torch.tensor(token // 2 if token % 2 == 0 else rows)
            logits = plain.lm_head(state) + parts.sequential(before)
            total += head_loss(logits[None], torch.eye(rows), top_ids[[entry]], logprobs[[entry]])[
                0
            ]
    drawn = sum(KEEP**depth for depth in range(1 + len(model.masks)))  # a position, in the mean
    torch.testing.assert_close(output.loss, total / drawn, rtol=1e-4, atol=1e-4)
    assert output.agreed == agreed
    output.loss.backward()
    assert model.masks.grad.abs().sum() > 0
    assert model.sequential.weight.grad[-1].abs().sum() == 0  # of tokens that the head lacks


def test_masks_are_drawn_as_deep_as_they_will_be_reached():
    positions = torch.arange(2 * 4000)
    seeds = torch.tensor([5, 6])
    drawn = drawn_depths(positions, 4000, seeds, 4)
    shares = [(drawn >= d).float().mean().item() for d in (1, 2, 3, 4, 5)]
    expected = [1.0, KEEP, KEEP**2, KEEP**3, 0.0]
    assert shares == pytest.approx(expected, abs=0.03)
    assert torch.equal(drawn, drawn_depths(positions, 4000, seeds, 4))
    # a row has the same ones whichever process computes it
    assert torch.equal(drawn[4000:], drawn_depths(positions[:4000], 4000, seeds[1:], 4))
    assert not torch.equal(drawn, drawn_depths(positions, 4000, seeds + 2, 4))


def test_the_sequential_head_starts_with_what_the_token_before_says(tiny_llama):
    """A target whose next token hangs on the last one alone: masks know nothing, the head does."""
    target = tiny_llama(5)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.lm_head.weight.mul_(50)
    generator = torch.Generator().manual_seed(0)
    answers = []
    for index in range(30):
        text = torch.randint(VOCAB, (40,), generator=generator)
        answers.append(CachedAnswer(index, text[:4], text[4:], text[4:, None], text[4:, None]))
    rank = 32
    draft = copy.deepcopy(target)
    read = torch.randn((VOCAB + 1, rank), generator=generator)
    parts = Parts(torch.zeros(DEPTH - 1, 32), SequentialHead(read, torch.zeros(VOCAB, rank)))
    prepared = PreparedDraft(draft, None, None, 0.0)
    loaded = SimpleNamespace(model=target, decoder=build_decoder(target, 64))
    batch = with_masks(IDS, POSITIONS, DEPTHS, VOCAB)

    def agreement():
        with torch.no_grad():
            states = read_masks(draft, batch, parts.masks).flatten(0, 1)[batch.places]
            found = draft.lm_head(states) + parts.sequential(batch.before)
            best = target(batch.before[:, None]).logits[:, -1].argmax(-1)
        return (found.argmax(-1) == best).float().mean()

    assert agreement() < 0.3
    fit_sequential(parts, prepared, loaded, answers)
    assert agreement() > 0.8


PARALLEL = {"draft": None, "drafter": "parallel", "num_draft_layers": 1, "draft_vocab_size": 270}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_gamma": 1}, "max_gamma is 1, but drafter 'parallel' drafts several tokens"),
        ({"use_peft": True}, "use_peft is true, but drafter 'parallel'"),
        ({"draft": "some/sibling"}, "drafter is 'parallel', .* but draft names 'some/sibling'"),
    ],
)
def test_what_cannot_be_is_refused_first(job, tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message):
        job(tmp_path / "run", **(PARALLEL | changes))


@pytest.mark.parametrize("data", [None, {"answers": 0.5, "on_policy": 0.5}])
def test_a_run_makes_and_measures_it(job, tmp_path, data):
    recipe = job(tmp_path / "run", **PARALLEL, max_gamma=3, sequential_rank=4, data=data)
    assert run(recipe) == 0
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert set(report["drafts"]) == {"untuned", "tuned"}
    for draft in report["drafts"].values():
        assert draft["lossless"]["unexplained"] == 0
        assert draft["costs"]["draft_block_ms"] > 0
        assert max(at["position"] for at in draft["per_position"]) <= 3
    about = json.loads((recipe.folder / "draft" / "compact" / "compact.json").read_text())
    assert about["drafter"] == "parallel"


@pytest.mark.parametrize(
    ("drafter", "data"),
    [
        ("parallel", None),
        ("parallel", {"answers": 0.5, "on_policy": 0.5}),
        ("recurrent", None),
        ("medusa", None),
    ],
)
def test_a_dry_run_prices_it(job, tmp_path, capsys, drafter, data):
    changes = {"drafter": drafter, "max_gamma": 3, "dry_run": True, "data": data}
    run(job(tmp_path / "run", **(PARALLEL | changes)))
    assert "a perfect draft would reach" in capsys.readouterr().out
    assert not (tmp_path / "run" / "prepared").exists()
