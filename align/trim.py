"""Trim a draft's LM head to the domain's tokens (arXiv 2502.14856, 2506.22694).

Legend: V the target's vocabulary, K the kept tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from align.errors import UserError
from align.token_bytes import Token


def byte_units(tokens: Iterable[Token | None]) -> list[int]:
    """Ids of the single-byte tokens. A trimmed draft needs these to write every text."""
    return [i for i, token in enumerate(tokens) if token is not None and len(token[1]) == 1]


def choose_tokens(mass: Tensor, size: int, forced: Iterable[int]) -> Tensor:
    """The `size` ids [K] with the most probability mass, and always `forced`, ascending.

    mass: the target's probability of each token on the domain [V]. Raises UserError for a `size`
    below the number of `forced` or above V.
    """
    keep = torch.zeros(len(mass), dtype=torch.bool)
    keep[torch.tensor(sorted(set(forced)), dtype=torch.long)] = True
    if not int(keep.sum()) <= size <= len(mass):
        raise UserError(
            f"draft_vocab_size {size} must be at least {int(keep.sum())} (stops, special tokens "
            f"and single bytes are always kept) and at most {len(mass)}, the target's "
            "vocabulary; choose a size between, or null to keep the whole head."
        )
    ranked = mass.masked_fill(keep, -1).argsort(descending=True, stable=True)
    keep[ranked[: size - int(keep.sum())]] = True
    return keep.nonzero()[:, 0]


def coverage_curve(mass: Tensor, forced: Iterable[int]) -> list[tuple[int, float]]:
    """Pairs (head size, lost mass). The lost mass never grows with the size.

    The sizes are the powers of two that have room for `forced`, then V. mass: see `choose_tokens`.
    """
    kept = set(forced)
    size, sizes = 1 << max(len(kept) - 1, 1).bit_length(), []
    while size < len(mass):
        sizes.append(size)
        size *= 2
    return [(k, lost_mass(mass, choose_tokens(mass, k, kept))) for k in [*sizes, len(mass)]]


def lost_mass(mass: Tensor, kept: Tensor) -> float:
    """Share of the target's probability on trimmed tokens: a bound of 1 - acceptance rate."""
    return 1 - float(mass[kept].sum() / mass.sum())
