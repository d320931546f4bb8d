"""Move a draft to its target's vocabulary: only embedding and LM head get new rows.

If the two differ in padding alone ("padded"), rows are added or cut behind the last token. If the
draft has every token of the target ("remap"), rows only move and the logits stay the same. Else
("transplant") the rows of new tokens are computed from those of their pieces, and the draft is then
distilled. Every engine can serve the result.

Legend: V vocabulary entries of the target, H hidden size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.token_bytes import is_used
from align.vocab_map import Retokenizer, VocabMap
from align.vocabulary import Vocabulary

# In a new token's output row the first piece weighs most, because the draft predicted that piece:
# the weights are FRONT ** 0, FRONT ** 1, …, normalised.
FRONT = 0.5
PARD_TOKEN = "pard_token"  # config key: the id of a draft's mask (distill/drafters/pard.py)
NEVER = -1e4  # a bias within fp16's range that no logit outweighs


def resized(model: PreTrainedModel, draft: Vocabulary, rows: int) -> PreTrainedModel:
    """A copy of `model` with `rows` vocabulary entries; `model` itself if it already has these.

    It shares the other weights. New entries are never likely.
    """
    assert rows >= draft.count, "a token would lose its row"
    old = model.get_output_embeddings().weight.shape[0]
    if rows == old:
        return model
    memo = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    moved: Any = copy.deepcopy(model, memo)
    moved.resize_token_embeddings(rows, mean_resizing=False)  # would add noise
    if rows < old:
        if getattr(moved.config, PARD_TOKEN, -1) >= rows:
            delattr(moved.config, PARD_TOKEN)
        return moved
    embedding, head = moved.get_input_embeddings(), moved.get_output_embeddings()
    with torch.no_grad():
        for weight in (embedding.weight, head.weight):
            weight[old:] = _unlikely(weight[:old])
        if head.bias is not None:
            head.bias[old:] = NEVER
    return moved


def transplant(
    model: PreTrainedModel, vocab_map: VocabMap, target: Vocabulary, draft: Vocabulary, rows: int
) -> PreTrainedModel:
    """A copy of `model` over the target's ids [rows = V]; `model` itself is not changed.

    A mapped token keeps its row. A new token is split into tokens of the draft: its input row is
    that of the last piece, its output row the front-weighted mean of the pieces' rows. If the
    weights are tied, this mean is used for both. Ids without a token get a row that is never
    likely. The head has no bias, and the logits are not changed after it (`choose_strategy`).
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    assert head.bias is None, "new tokens have no value for it"
    assert rows >= target.count, "a token would have no row"
    tied = head.weight is embedding.weight
    retokenizer = Retokenizer(vocab_map, target, draft)
    pieces = [
        retokenizer.of_token(i) if is_used(token) else [] for i, token in enumerate(target.tokens)
    ][:rows]
    pieces += [[]] * (rows - len(pieces))  # none for entries without a token
    unused = torch.tensor([not piece for piece in pieces])
    old_in, old_out = embedding.weight.detach(), head.weight.detach()
    new_out = _weighted(old_out, pieces)
    new_out[unused] = _unlikely(old_out)
    new_in = new_out
    if not tied:
        new_in = _weighted(old_in, [piece[-1:] for piece in pieces])
        new_in[unused] = _unlikely(old_in)

    # neither old matrix is copied
    memo: dict[int, Any] = {id(t): nn.Parameter(t[:0]) for t in (embedding.weight, head.weight)}
    moved: Any = copy.deepcopy(model, memo)
    new_embedding, new_head = moved.get_input_embeddings(), moved.get_output_embeddings()
    new_embedding.weight = nn.Parameter(new_in)
    new_head.weight = new_embedding.weight if tied else nn.Parameter(new_out)
    new_embedding.num_embeddings = new_head.out_features = rows
    new_embedding.padding_idx = None
    moved.config.get_text_config().vocab_size = moved.vocab_size = rows
    _rewrite_special_ids(moved, target)
    if hasattr(moved.config, PARD_TOKEN):  # the id is another token's now
        delattr(moved.config, PARD_TOKEN)
    return moved


def _weighted(rows: Tensor, pieces: list[list[int]]) -> Tensor:
    """For each token the weighted mean of its pieces' rows [V, H]; zero where it has none.

    A token with one piece has that very row, bit by bit.
    """
    new = rows.new_zeros((len(pieces), rows.shape[1]))
    single = {i: piece[0] for i, piece in enumerate(pieces) if len(piece) == 1}
    new[[*single]] = rows[[*single.values()]]
    for i, piece in enumerate(pieces):
        if len(piece) > 1:
            weights = FRONT ** torch.arange(len(piece), dtype=torch.float32, device=rows.device)
            new[i] = ((weights / weights.sum()) @ rows[piece].float()).to(rows.dtype)
    return new


def _unlikely(head: Tensor) -> Tensor:
    """A row [H] of an embedding or head [V, H] for ids without a token: the mean of all.

    In a head its logit is the mean of all logits at every state, also after training. So it is
    never the best, and at any temperature its probability is at most 1 / V (Jensen's inequality).
    A zero row would be likely at states where most logits are negative, and a row opposite to the
    mean state at states that turn away from this mean (docs/lab-notes.md).
    """
    return head.mean(0, dtype=torch.float32).to(head.dtype)


def _rewrite_special_ids(model: Any, target: Vocabulary) -> None:
    """bos, eos and pad of config and generation config become the target's."""
    stops = sorted(target.all_stops)
    for config in (model.config.get_text_config(), model.generation_config):
        config.bos_token_id = target.special_ids.get("bos_token")
        config.pad_token_id = target.special_ids.get("pad_token")
        config.eos_token_id = stops[0] if len(stops) == 1 else stops or None
