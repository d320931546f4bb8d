"""A pruned draft taught to draft several tokens in one pass (PARD, arXiv 2504.18583).

A row of training is an answer and, behind it, mask tokens at positions drawn anew in every step.
The masks behind token t see the text up to t and each other, at the position ids of the tokens they
stand for: just as when drafting. Mask d learns the target's distribution d positions on, which the
cache has. Each further mask of a group is drawn with chance KEEP (PARD's conditional drop), so that
the masks of an answer are hardly more than its tokens, and a depth is trained about as often as it
will be reached. The sequential head is part of the output head: `lm_head` reads the state and,
beside it, what the token before reads of `sequential`; without a token before, zeros. So the first
token's path stays a plain causal LM. It starts as a fit: the map of the token before's embedding
that is least squares to what the states at masks lack of the target's own.
Legend: B rows, T positions, N response positions of the batch, M masks of a row, D tokens drafted
at most, V the target's vocabulary, K rows of the draft's head, H hidden size, r the rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distill.drafters import pruned
from distill.drafters.base import Finished
from distill.drafters.low_rank import cut_to_rank, with_none
from distill.losses import Divergence, head_loss
from distill.models import Pair, TargetOfRun, head_rows
from distill.prepare import LeastSquares, PreparedDraft, domain_mass, prepare_pruned, until
from distill.recipe import Recipe
from distill.teacher.states import states_at
from distill.teacher.store import Answers, CachedAnswer
from distill.trainer import accepted_at, attach_forward
from distill.training_set import Batch
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.in_turn import SequentialHead
from eval.decoding.drafters.parallel import PARTS, Parts, parallel_drafter
from eval.decoding.forward import embedded, input_embedding
from eval.decoding.target import Target
from eval.decoding.weights import linear

SLOW: tuple[str, ...] = ()
KEEP = 0.5  # of the positions that have a mask of some depth, those that have one deeper


class WithMasks(NamedTuple):
    """A batch with its masks behind each row, padded.

    ids, position_ids [B, T+M]. visible [B, T+M, T+M]: what each position sees. places: of each of
    all the masks in the flattened batch. entries: which of the N distributions it learns. before:
    the token before the one it stands for.
    """

    ids: Tensor
    position_ids: Tensor
    visible: Tensor
    places: Tensor
    entries: Tensor
    before: Tensor


def with_masks(input_ids: Tensor, positions: Tensor, depths: Tensor, first_mask: int) -> WithMasks:
    """The batch with a group of masks behind each response position.

    input_ids: [B, T]. positions: of the N response positions in the flattened batch, row by row.
    depths: how many tokens a draft from each of them has [N], as far as the answer goes; a mask of
    depth d, 2 at least, is id first_mask + d - 2.
    """
    rows, width = input_ids.shape
    row, at = positions // width, positions % width
    found = [positions.new_zeros((3, 0))]
    for d in range(2, int(depths.max()) + 1):
        behind = torch.arange(max(0, len(positions) - d + 1), device=row.device)
        behind = behind[depths[behind] >= d]
        behind = behind[row[behind] == row[behind + d - 1]]
        found.append(torch.stack([behind, behind + d - 1, torch.full_like(behind, d)]))
    masks = torch.cat(found, dim=1)
    masks = masks[:, row[masks[0]].argsort(stable=True)]
    behind, entries, mask_depth = masks
    mask_row = row[behind]
    counts = mask_row.bincount(minlength=rows)
    extra = int(counts.max())
    slot = width + torch.arange(len(mask_row), device=row.device)
    slot -= (counts.cumsum(0) - counts)[mask_row]

    # padding stands at depth 0 at position -1, seen by nothing but itself
    anchor = F.pad(torch.arange(width, device=row.device).repeat(rows, 1), (0, extra), value=-1)
    depth = F.pad(torch.ones_like(input_ids), (0, extra))
    ids = F.pad(input_ids, (0, extra))
    where = (mask_row, slot)
    anchor[where], depth[where] = at[behind], mask_depth
    ids[where] = first_mask + mask_depth - 2
    text = torch.arange(width + extra, device=row.device) < width
    of_text = text & (anchor[:, None, :] <= anchor[:, :, None])
    of_group = (anchor[:, None, :] == anchor[:, :, None]) & (depth[:, None, :] <= depth[:, :, None])
    of_group &= ~text & ~text[:, None]
    return WithMasks(
        ids,
        (anchor + depth - 1).clamp_min(0),
        of_text | of_group,
        mask_row * (width + extra) + slot,
        entries,
        input_ids[mask_row, at[entries]],
    )


def drawn_depths(positions: Tensor, width: int, seeds: Tensor, most: int) -> Tensor:
    """How many tokens a draft from each response position has [N].

    d or more with chance KEEP ** (d - 1), and no more than `most`.
    positions: as of `with_masks`, of a batch of that width. seeds: of each row's random numbers.
    """
    counts = (positions // width).bincount(minlength=len(seeds)).tolist()
    uniform = torch.cat(
        [
            torch.rand(count, generator=torch.Generator().manual_seed(seed))
            for count, seed in zip(counts, seeds.tolist(), strict=True)
        ]
    )
    drawn = 1 + uniform.clamp_min(1e-9).log() / math.log(KEEP)
    return drawn.long().clamp(max=most).to(positions.device)


def mean_depth(most: int) -> float:
    """Of `drawn_depths`. What is divided by it, not by what was drawn, adds up over processes."""
    return float(sum(KEEP**depth for depth in range(most)))


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    return ()


def prepare(recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers) -> PreparedDraft:
    """The pruned draft; every mask is the mean of the domain's tokens."""
    prepared = prepare_pruned(recipe, pair, target, answers)
    folder = recipe.folder / "prepared"
    if not (folder / PARTS).exists():
        embedding = input_embedding(prepared.model).float()
        mass = domain_mass(answers, len(embedding)).float()
        parts = first_parts(recipe, prepared.model, mass @ embedding / mass.sum())
        if parts.sequential is not None:
            fit_sequential(parts, prepared, target.loaded, until(answers, recipe.fit_tokens))
        parts.save(folder)
    for_training(prepared.model, prepared.token_ids, Parts.load(folder))
    return prepared


def first_parts(recipe: Recipe, model: PreTrainedModel, mask: Tensor) -> Parts:
    """The untrained parts: every mask this embedding [H], a sequential head that adds nothing."""
    head_rows, rank = len(model.get_output_embeddings().weight), recipe.sequential_rank
    sequential = None
    if rank:
        read = torch.randn(
            (head_rows + 1, rank), generator=torch.Generator().manual_seed(recipe.seed)
        )
        read[-1] = 0
        sequential = SequentialHead(read, torch.zeros((head_rows, rank)))
    return Parts(mask.repeat(recipe.max_gamma - 1, 1), sequential)


@torch.no_grad()
def fit_sequential(
    parts: Parts, prepared: PreparedDraft, target: Target, answers: Iterable[CachedAnswer]
) -> None:
    """Put the fit of the module's docstring into the parts.

    With h the draft's states, y the target's and e the embeddings before, A is the map of h to y at
    tokens, and C that of e to y - A h at masks: that of e to y, less A times that of e to h.
    """
    model, ids, sequential = prepared.model.float(), prepared.token_ids, parts.sequential
    assert sequential is not None
    head = target.model.get_output_embeddings().weight.detach().cpu()
    embedding = input_embedding(model)
    own, known = (part if ids is None else part[ids] for part in (head, embedding))
    table, rows = with_none(known.float()), rows_of(ids, len(embedding))
    size, layer = embedding.shape[1], target.model.config.num_hidden_layers
    of_tokens, of_masks = LeastSquares(size, size), LeastSquares(size, 2 * size)
    for answer in answers:
        text = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        positions = torch.arange(len(answer.prompt_ids) - 1, text.shape[1] - 1)
        seeds = torch.tensor([answer.index])
        depths = drawn_depths(positions, text.shape[1], seeds, len(parts.masks) + 1)
        batch = with_masks(text, positions, depths, len(embedding))
        h = read_masks(model, batch, parts.masks)[0].float()
        y = states_at(target.decoder, answer, (layer,))[positions, 0].float()
        of_tokens.add(h[positions], y)
        seen = torch.cat([y[batch.entries], h[batch.places]], dim=1)
        of_masks.add(table[rows[batch.before]], seen)
    to_y, to_h = of_masks.solution().split(size)
    rank = min(sequential.read.shape[1], size)
    fitted = to_y - of_tokens.solution() @ to_h
    cut = cut_to_rank(fitted, of_masks.gram, table, own.float(), rank)
    sequential.read[:, :rank], sequential.write[:, :rank] = cut


def read_masks(model: PreTrainedModel, batch: WithMasks, masks: Tensor) -> Tensor:
    """The states of a model at text and masks [B, T+M, H]; masks: their embeddings [D-1, H]."""
    table: Any = model.get_input_embeddings()
    x = embedded(batch.ids, table, len(table.weight), masks)
    bias = torch.zeros_like(batch.visible, dtype=x.dtype)
    bias.masked_fill_(~batch.visible, torch.finfo(x.dtype).min)
    states: Tensor = model.base_model(
        inputs_embeds=x,
        attention_mask=bias[:, None],
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state
    return states


def rows_of(token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Each target id's row of a head [V]; the number of its rows where it has none."""
    rows = head_rows(token_ids, vocab_size)
    if rows is None:
        return torch.arange(vocab_size)
    return rows.where(rows >= 0, int(rows.max()) + 1)


def for_training(model: Any, token_ids: Tensor | None, parts: Parts) -> None:
    """Hang the parts on the model, in fp32; `plain_form` is the way back."""
    parts = parts.like(torch.empty(0, device=model.device))
    model.masks = nn.Parameter(parts.masks)
    rows = rows_of(token_ids, len(input_embedding(model))).to(model.device)
    model.register_buffer("head_row", rows, persistent=False)
    if parts.sequential is not None:
        read, write = parts.sequential
        # the last row is for tokens before that the head has no row for: zero, and never trained
        model.sequential = nn.Embedding.from_pretrained(
            read, freeze=False, padding_idx=len(read) - 1
        )
        weight = torch.cat([model.lm_head.weight.detach().float(), write], dim=1)
        model.lm_head = linear(weight)


def plain_form(model: PreTrainedModel) -> tuple[PreTrainedModel, Parts]:
    """The plain LM in a model that is trained, on the same weights, and the parts beside it."""
    plain: Any = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    size, weight = plain.config.hidden_size, plain.lm_head.weight.detach()
    sequential = None
    if hasattr(plain, "sequential"):
        sequential = SequentialHead(plain.sequential.weight.detach(), weight[:, size:])
        del plain.sequential
    parts = Parts(plain.masks.detach(), sequential)
    del plain.masks, plain.head_row
    plain.lm_head = linear(weight[:, :size])
    return plain, parts


def attach(model: PreTrainedModel, divergence: Divergence) -> None:
    """The loss: the sum over text and masks, over how many of both a position has in the mean."""
    parallel: Any = model
    head: Any = parallel.lm_head
    vocab_size = len(parallel.get_input_embeddings().weight)

    def first(batch: Batch) -> Tensor:
        """The first token of a draft needs no mask."""
        states = parallel.base_model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False
        )
        read: Tensor = states.last_hidden_state.flatten(0, 1)[batch.positions]
        return F.pad(read, (0, head.in_features - read.shape[1]))

    def compute(batch: Batch) -> ModelOutput:
        positions, width = batch.positions, batch.width
        depths = drawn_depths(positions, width, batch.seeds, len(parallel.masks) + 1)
        masked = with_masks(batch.input_ids, positions, depths, vocab_size)
        flat = read_masks(parallel, masked, parallel.masks).flatten(0, 1)
        text = positions // width * masked.ids.shape[1] + positions % width
        read = flat[torch.cat([text, masked.places])]
        if hasattr(parallel, "sequential"):
            before = parallel.sequential(parallel.head_row[masked.before])
            read = torch.cat([read, F.pad(before, (0, 0, len(text), 0))], dim=1)
        entries = torch.cat([torch.arange(len(text), device=text.device), masked.entries])
        cached = batch.top_ids[entries], batch.top_logprobs[entries]
        loss, agreed = head(read, *cached, of_text=len(text))
        return ModelOutput(loss=loss / mean_depth(len(parallel.masks) + 1), agreed=agreed)

    def head_forward(
        read: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
        temperature: float | None = None,
        of_text: int = 0,
    ) -> Any:
        if temperature is not None:
            return accepted_at(read, head.weight, top_ids, top_logprobs, temperature)
        if top_logprobs.dtype == torch.int32:  # DraftTrainer._prepare_inputs
            top_logprobs = top_logprobs.view(torch.float32)
        cached = [part.split([of_text, len(part) - of_text]) for part in (top_ids, top_logprobs)]
        text, masks = zip(read.split([of_text, len(read) - of_text]), *cached, strict=True)
        loss, agreed = head_loss(text[0], head.weight, text[1], text[2], divergence)
        return loss + head_loss(masks[0], head.weight, masks[1], masks[2], divergence)[0], agreed

    head.forward = head_forward
    attach_forward(model, head, first, compute)


def export(made: Finished) -> None:
    """The plain LM is what other engines load: one token a step."""
    plain, parts = plain_form(made.tuned)
    pruned.export(made._replace(tuned=plain))
    parts.like(torch.empty(0, dtype=made.dtype)).save(made.folder / "compact")


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    model, ids = pruned.stand_in(recipe, pair, target)
    for_training(model, ids, first_parts(recipe, model, input_embedding(model)[0].float()))
    return model, ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    plain, parts = plain_form(model)
    head: Any = plain.lm_head  # in fp32 where it is trained
    head.weight = nn.Parameter(head.weight.to(target.decoder.dtype))
    return parallel_drafter(plain, ids, parts, target)
