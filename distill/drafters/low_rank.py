"""How a sequential head starts (eval/decoding/drafters/in_turn.py): a fit, cut to its rank.

Legend: H hidden size, K rows of the draft's head, r the rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from distill.prepare import FIT_RIDGE
from eval.decoding.drafters.in_turn import SequentialHead


def with_none(known: Tensor) -> Tensor:
    """The embeddings of the head's tokens [K, H] at a usual size of 1, and a zero row [K+1, H].

    The zero stands for a token that the head has no row for.
    """
    return F.pad(known / known.pow(2).mean().sqrt(), (0, 0, 0, 1))


def cut_to_rank(
    fitted: Tensor, gram: Tensor, table: Tensor, own: Tensor, rank: int
) -> SequentialHead:
    """The head that adds `own @ fitted @ e` to the logits after a token of embedding e.

    fitted: [H, H]. gram: of the embeddings that it was fitted on [H, H]: where they vary most, the
    cut loses least. table: e of each of the head's tokens [K+1, H], as of `with_none`. own: what
    makes logits of a state [K, H]. rank: at most H.
    """
    values, vectors = torch.linalg.eigh(gram.float())
    roots = values.clamp_min(values[-1] * FIT_RIDGE).sqrt()
    u, s, v = torch.linalg.svd(fitted @ (vectors * roots))
    read = table @ (vectors / roots) @ v[:rank].T
    usual = read.pow(2).mean().sqrt()
    return SequentialHead(read / usual, own @ (u[:, :rank] * s[:rank] * usual))
