"""What a run needs of a kind of drafter. A kind is one file of this folder, named by `drafter`.

Such a module has the functions of `Kind`; what it leaves in `draft/compact` is read by the file of
the same name in eval/decoding/drafters. Legend: V the target's vocabulary, K rows of the draft's
head.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from distill.losses import Divergence
from distill.recipe import Recipe
from eval.decoding.drafters.base import Drafter
from eval.decoding.target import Target

if TYPE_CHECKING:
    from distill.models import Pair, TargetOfRun
    from distill.prepare import PreparedDraft
    from distill.teacher.store import Answers, CachedAnswer


class Finished(NamedTuple):
    """A draft after training: where it is written to, and what it was made from."""

    folder: Path
    recipe: Recipe
    pair: Pair
    prepared: PreparedDraft
    tuned: PreTrainedModel
    answers: Iterable[CachedAnswer]

    @property
    def dtype(self) -> Any:
        """The torch.dtype of what is written."""
        return getattr(torch, self.recipe.dtype)


class Kind(Protocol):
    """The functions of a kind's module.

    What is trained is always a PreTrainedModel, since that is what trl, peft and FSDP save, load
    and wrap; a kind may hang modules of its own on it.
    """

    @property
    def SLOW(self) -> tuple[str, ...]:
        """Beginnings of the names of weights that learn at a third of the learning rate."""
        ...

    def layers(self, config: dict[str, Any]) -> tuple[int, ...]:
        """The target's hidden states that training reads, numbered as in eval/decoding/forward.py.

        config: the target's. Without any, no states are cached and none are in a batch.
        """
        ...

    def prepare(
        self, recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers
    ) -> PreparedDraft:
        """The untuned draft; what is made for it stays in `prepared/` and is read from there.

        The target is loaded only where that is not there yet; a sibling or a base needs none.
        """
        ...

    def attach(self, model: PreTrainedModel, divergence: Divergence) -> None:
        """Give `model` its loss by `attach_forward` (distill/trainer.py).

        loss: of the N response positions in sum; agreed: how many of them have the target's most
        likely token.
        """
        ...

    def export(self, made: Finished) -> None:
        """Write the draft, and its compact.json into the folder or `compact/` there."""
        ...

    def stand_in(
        self, recipe: Recipe, pair: Pair, target: Target
    ) -> tuple[PreTrainedModel, Tensor | None]:
        """A model of the draft's shape, to be timed, and the ids [K] of a trimmed head.

        It shares nothing with the target, which is not to be trained.
        """
        ...

    def drafter(
        self, recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
    ) -> Drafter:
        """That stand-in as it would draft."""
        ...


def kind_of(recipe: Recipe) -> Kind:
    """The module of the recipe's kind."""
    kind: Any = importlib.import_module(f"distill.drafters.{recipe.kind}")
    return kind
