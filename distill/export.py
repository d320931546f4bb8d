"""The tuned draft as others load it: a checkpoint over the target's whole vocabulary."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from align.atomic import atomic_folder, remove
from distill.adapters import KEPT
from distill.drafters.base import Finished, kind_of
from distill.models import Pair
from distill.prepare import HEAD_ROWS, PreparedDraft, until
from distill.recipe import Recipe
from distill.teacher.store import CachedAnswer
from eval.decoding.weights import linear

SUPPRESSION = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0)  # logits below the fitted ones, tried in order
CALIBRATION_TOKENS = 4_000
# The draft has learnt these answers: on text it has not seen, it is less sure of its own tokens,
# and what it leaves to the trimmed ones is many times as much (docs/lab-notes.md).
DROPPED_MASS = 1e-4


def export_draft(
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    tuned: PreTrainedModel,
    answers: Iterable[CachedAnswer],
) -> None:
    """`draft/`: a checkpoint for every engine, and `draft/compact/` for our decoder."""
    adapter = recipe.folder / KEPT
    with atomic_folder(recipe.folder / "draft") as partial:
        kind_of(recipe).export(Finished(partial, recipe, pair, prepared, tuned, answers))
        pair.load_tokenizer().save_pretrained(partial)
        if adapter.is_dir():  # that training has left
            shutil.copytree(adapter, partial / KEPT)
    remove(adapter)


def full_form(made: Finished, tuned: PreTrainedModel) -> PreTrainedModel:
    """The draft over the target's whole vocabulary; where its head has that, as it is.

    tuned: the draft as a plain language model.
    """
    recipe, prepared = made.recipe, made.prepared
    if prepared.token_ids is None:
        return tuned
    assert prepared.full_head is not None
    if recipe.base is not None and recipe.use_peft:  # the base's own, as others load it
        return with_head(tuned, prepared.full_head.to(tuned.device))
    return full_vocabulary(tuned, prepared.token_ids, prepared.full_head, made.answers)


@torch.no_grad()
def full_vocabulary(
    tuned: PreTrainedModel,
    token_ids: Tensor,
    full_head: Tensor,
    answers: Iterable[CachedAnswer],
) -> PreTrainedModel:
    """The tuned draft under a head over the target's whole vocabulary, for engines that need one.

    Rows of trimmed tokens are the fitted ones from before training, lowered by a constant: without
    it they would win now and then against states that training has moved. A head has no bias here,
    so the constant is the least-squares row w with w·h = -1 over the draft's own states h; the
    smallest multiple is taken at which the greedy choice is the trimmed head's on 999 of 1000
    positions, and the trimmed tokens hold no more than DROPPED_MASS of the draft's probability.
    """
    token_ids, full_head = token_ids.to(tuned.device), full_head.to(tuned.device)
    states = []
    for answer in until(answers, CALIBRATION_TOKENS):
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None].to(tuned.device)
        hidden = tuned.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        states.append(hidden[0, len(answer.prompt_ids) - 1 :].float())
    h = torch.cat(states)
    trimmed = torch.ones(len(full_head), dtype=torch.bool, device=h.device)
    trimmed[token_ids] = False
    lower = torch.linalg.lstsq(h.double(), -torch.ones(len(h), 1).double().to(h.device)).solution
    tuned_rows = tuned.get_output_embeddings().weight
    best, own = _best_and_sum(h, tuned_rows.split(HEAD_ROWS))
    # lowered, all trimmed rows lose the same at a position: the best of them stays the best
    pieces = trimmed.nonzero()[:, 0].split(HEAD_ROWS)
    rival, others = _best_and_sum(h, (full_head[rows] for rows in pieces))
    loss = (h @ lower.float())[:, 0]
    for strength in SUPPRESSION:
        kept = float((rival + strength * loss < best).float().mean())
        mass = float((others + strength * loss - own).sigmoid().mean())
        if kept >= 0.999 and mass <= DROPPED_MASS:
            break
    else:
        warnings.warn(
            f"The full-vocabulary form makes another greedy choice than the compact one on "
            f"{1 - kept:.1%} of positions, and gives {mass:.2%} of its probability to tokens that "
            f"were trimmed; expect that much less alpha from it.",
            stacklevel=2,
        )
    head = torch.empty_like(full_head, dtype=tuned_rows.dtype)
    for rows in pieces:
        head[rows] = (full_head[rows].float() + strength * lower.T.float()).to(head.dtype)
    head[token_ids] = tuned_rows
    return with_head(tuned, head)


def with_head(tuned: PreTrainedModel, head: Tensor) -> PreTrainedModel:
    """A model of its own on the same weights, but for its head [V, H]."""
    model = copy.deepcopy(tuned, {id(weight): weight for weight in tuned.parameters()})
    model.lm_head = linear(head)
    model.config.vocab_size = head.shape[0]
    return model


def _best_and_sum(h: Tensor, pieces: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The best logit of a head's rows at each state [N], and the log of the sum of their exp."""
    found = []
    for rows in pieces:
        logits = h @ rows.float().T
        found.append((logits.amax(-1), logits.logsumexp(-1)))
        del logits  # else the next ones are made beside them
    bests, sums = zip(*found, strict=True)
    return torch.stack(bests).amax(0), torch.stack(sums).logsumexp(0)
