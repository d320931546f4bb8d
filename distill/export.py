"""The distilled draft as engines load it.

A language model gets a head over the whole vocabulary. Other kinds are in the formats of engines,
where a head may be trimmed. Legend: V the target's vocabulary, H hidden size, N states.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.files import atomic_folder, read_json, write_json
from distill.drafters.kind import Draft
from distill.drafters.pruned import HEAD_ENTRIES, with_head
from distill.models import Pair
from distill.recipe import Recipe
from distill.teacher.store import Answers, CachedAnswer
from eval.decoding.forward import input_embedding

BASE_KEPT = "base_draft_kept.json"  # in a run's folder: why `draft/` is the base draft
SUPPRESSION = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0)  # subtracted from logits, tried in order
CALIBRATION_TOKENS = 8_000  # half to fit the suppression, half to check it
# Most probability of trimmed tokens. It is measured on training outputs; on new text the trimmed
# tokens have many times more (docs/lab-notes.md).
DROPPED_MASS = 1e-4


def export_draft(
    recipe: Recipe, pair: Pair, prepared: Draft, distilled: Any, answers: Answers | None
) -> None:
    """Write `draft/`, which engines and the reference decoder load."""
    with atomic_folder(recipe.folder / "draft") as partial:
        write_draft(recipe, pair, prepared._replace(model=distilled), partial, answers)


def write_draft(
    recipe: Recipe, pair: Pair, draft: Draft, folder: Path, answers: Answers | None = None
) -> None:
    """Write a draft to an existing folder, as engines load it.

    answers: for the full head of a language model whose head is trimmed.
    """
    kind, dtype = recipe.kind, getattr(torch, recipe.dtype)
    pair.target.tokenizer.save_pretrained(folder)
    if not kind.language_model:
        kind.save(folder, draft, pair.target_embedding(dtype), pair.target)
    else:
        full = draft.model.to(dtype)
        if recipe.sibling is None:
            embedding = input_embedding(full).to(dtype)
            # because a FrozenEmbedding returns fp32
            full.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
        if draft.token_ids is not None:
            assert draft.full_head is not None
            assert answers is not None
            read = answers.until(CALIBRATION_TOKENS)
            full = full_vocabulary(full, draft.token_ids, draft.full_head, read)
        kind.exported(full).save_pretrained(folder)
    for_older_transformers(folder)


def for_older_transformers(folder: Path) -> None:
    """Rewrite a saved draft's config and tokenizer so that transformers 4 and 5 read the same."""
    about = read_json(folder / "config.json")
    about.pop("auto_map", None)  # it names files with code, which the folder does not have
    for keys in (about, about.get("transformer_layer_config", {})):
        rope = dict(keys.get("rope_parameters") or {})
        if keys.get("model_type") == "gemma3_text":  # rotary parameters by type of layer
            keys["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = dict(rope["full_attention"])
        if "rope_theta" in rope:
            moved = rope.keys() & {"rope_theta", "partial_rotary_factor"}
            keys |= {key: rope.pop(key) for key in moved}
            scaled = rope.get("rope_type", "default") != "default"
            keys["rope_scaling"] = rope if scaled else None
    write_json(folder / "config.json", about)
    words = read_json(folder / "tokenizer_config.json")
    for argument in ("is_local", "local_files_only"):  # arguments of our call
        words.pop(argument, None)
    if words.get("tokenizer_class") == "TokenizersBackend":
        words["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(words.get("extra_special_tokens"), list):
        words["additional_special_tokens"] = words.pop("extra_special_tokens")
    write_json(folder / "tokenizer_config.json", words)


@torch.no_grad()
def full_vocabulary(
    distilled: PreTrainedModel,
    token_ids: Tensor,
    full_head: Tensor,
    answers: Iterable[CachedAnswer],
) -> PreTrainedModel:
    """The distilled draft under a head over the target's whole vocabulary [V, H].

    Entries of trimmed tokens come from `full_head`, and their logits are lowered by a constant,
    because training has changed the states and some of these logits would be the highest. The head
    has no bias, so the constant is an entry w with w·h = -1 (least squares over half of the draft's
    states h). Its smallest multiple is taken with which, over the other half, the greedy choice is
    the trimmed head's on 999 of 1000 positions, and the trimmed tokens have no more than
    DROPPED_MASS of the draft's probability.
    """
    token_ids, full_head = token_ids.to(distilled.device), full_head.to(distilled.device)
    states = []
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None].to(distilled.device)
        hidden = distilled.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        states.append(hidden[0, len(answer.prompt_ids) - 1 :].float())
    h = torch.cat(states)
    trimmed = torch.ones(len(full_head), dtype=torch.bool, device=h.device)
    trimmed[token_ids] = False
    fitted, h = h.double().tensor_split(2)
    # on the CPU, because CUDA's solver needs states of full rank
    fitted = fitted.cpu()
    lower = torch.linalg.lstsq(fitted, -torch.ones_like(fitted[:, :1])).solution.to(h.device)
    h = h.float()
    trained_head = distilled.get_output_embeddings().weight
    best, total = _best_and_sum(h, trained_head.split(HEAD_ENTRIES))
    # at a position all trimmed logits are lowered equally, so their best stays the best
    pieces = trimmed.nonzero()[:, 0].split(HEAD_ENTRIES)
    rival, trimmed_sum = _best_and_sum(h, (full_head[rows] for rows in pieces))
    loss = (h @ lower.float())[:, 0]
    for strength in SUPPRESSION:
        kept = float((rival + strength * loss < best).float().mean())
        mass = float((trimmed_sum + strength * loss - total).sigmoid().mean())
        if kept >= 0.999 and mass <= DROPPED_MASS:
            break
    else:
        warnings.warn(
            "The draft may have a lower acceptance rate with its head over the whole vocabulary: "
            f"its greedy token differs at {1 - kept:.1%} of positions, and trimmed tokens have "
            f"{mass:.2%} of the probability.",
            stacklevel=2,
        )
    head = torch.empty_like(full_head, dtype=trained_head.dtype)
    for rows in pieces:
        head[rows] = (full_head[rows].float() + strength * lower.T.float()).to(head.dtype)
    head[token_ids] = trained_head
    return with_head(distilled, head)


def _best_and_sum(h: Tensor, pieces: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The maximum, and the logsumexp, of a head's logits at each state [N]."""
    by_piece = []
    for rows in pieces:
        logits = h @ rows.float().T
        by_piece.append((logits.amax(-1), logits.logsumexp(-1)))
        del logits  # before the next ones are computed
    bests, sums = zip(*by_piece, strict=True)
    return torch.stack(bests).amax(0), torch.stack(sums).logsumexp(0)
