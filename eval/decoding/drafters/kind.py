"""What sets a kind of draft apart. A new kind is a file beside this one that has a KIND.

Legend: N response positions of a batch, V the target's vocabulary, K rows of the draft's head, H
hidden size.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from align.sources import read_json
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.training import AnsweredText, HeadInput, Start, TrainingBatch
from eval.decoding.target import Target


class Kind(ABC):
    """What sets a kind of draft apart: its traits, and what its head reads in training.

    engines: that load what is published of it. language_model: it is a causal LM by itself, which
    may have adapters, another tokenizer, a GGUF file. keeps_layers: of the target, as many as
    num_draft_layers says. slow: beginnings of the names of weights that began as a fit, and learn
    more slowly. own_modules: names of those it adds to a language model, trained whole beside
    adapters. of_sibling: the kind in its place where a sibling is named.
    """

    engines: tuple[str, ...] = ()
    language_model = False
    keeps_layers = False
    slow: tuple[str, ...] = ()
    own_modules: tuple[str, ...] = ()
    of_sibling: Kind | None = None

    @property
    def from_target(self) -> FromTarget | None:
        """The kind itself where it is made of the target, else None."""
        return None

    def layers(
        self, config: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """The target's hidden states it reads, numbered as in forward.py.

        config: the target's. about: that of a published draft, which may name others.
        """
        return ()

    def begin(self, model: PreTrainedModel, mask: int | None, max_gamma: int) -> PreTrainedModel:
        """A sibling with the target\'s rows as it begins to be trained. mask: as of Start."""
        return model

    def stand_in(self, drafter: Drafter, max_gamma: int) -> Drafter:
        """A sibling's drafter as it will draft, to be timed."""
        return drafter

    def masks(self, max_gamma: int) -> float:
        """How many masks a response position brings into a training batch, on average."""
        return 0.0

    def exported(self, model: PreTrainedModel) -> PreTrainedModel:
        """A language model that was trained, as engines load it."""
        return model

    @abstractmethod
    def first_input(self, model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
        """What the head reads for the first token of a draft, at each response position [N, H]."""

    def head_inputs(self, model: PreTrainedModel, batch: TrainingBatch) -> Iterator[HeadInput]:
        """What the head reads for all drafted tokens that are trained, the first tokens first."""
        yield HeadInput(self.first_input(model, batch))


class FromTarget(Kind):
    """A kind of draft that is made of the target: its start, its folder, its drafter."""

    @property
    def from_target(self) -> FromTarget:
        return self

    @abstractmethod
    def start(self, start: Start) -> tuple[PreTrainedModel, Tensor | None]:
        """The untrained draft, sharing nothing with the target that is trained, and its head over
        all of V [V, H] where that is not the target's own.

        It is a PreTrainedModel, since that is what trl, peft and FSDP save, load and wrap.
        """

    @abstractmethod
    def save(
        self,
        folder: Path,
        model: PreTrainedModel,
        token_ids: Tensor | None,
        embedding: Tensor,
        target: str,
    ) -> None:
        """Write the form that `load` reads into a folder that is there.

        embedding: the target's [V, H], whose dtype is taken, and of which only the hash is kept.
        target: its name.
        """

    @abstractmethod
    def load_to_train(
        self, folder: Path, embedding: Tensor
    ) -> tuple[PreTrainedModel, Tensor | None]:
        """The model that `save` wrote, on the target's embedding, and its head's ids [K].

        Raises ValueError where it was made for another target.
        """

    @abstractmethod
    def drafter(self, model: PreTrainedModel, token_ids: Tensor | None, target: Target) -> Drafter:
        """The model as it drafts for that target, which takes its weights over."""

    def load(self, folder: Path, target: Target) -> Drafter:
        """The drafter of a folder. Raises ValueError where it was made for another target."""
        model, token_ids = self.load_to_train(folder, target.decoder.embedding)
        return self.drafter(model, token_ids, target)


class Heads(FromTarget):
    """A kind that reads the target's hidden states, and that others publish as well."""

    @abstractmethod
    def rows_of(self, about: Mapping[str, Any]) -> int | None:
        """The rows of the head of a published draft of this kind, by its config.json; else None."""

    @abstractmethod
    def check_published(self, folder: Path, target: PreTrainedConfig) -> None:
        """Raise ValueError for a published draft that no such target has, or that is not computed
        here, as far as the configs say.
        """

    @abstractmethod
    def published(
        self, folder: Path, target: PreTrainedModel, texts: Sequence[AnsweredText] = ()
    ) -> tuple[PreTrainedModel, Tensor | None]:
        """A published draft on the target's embedding, and the ids of its head [K].

        texts: that it will be trained on, if it will. Raises ValueError where it was made for
        another target, or cannot be trained here.
        """


def published_kind(folder: Path) -> Heads | None:
    """The kind of the published draft in a folder; None for a model of its own."""
    about = read_json(folder / "config.json")
    heads = [kind for kind in kinds().values() if isinstance(kind, Heads)]
    return next((kind for kind in heads if kind.rows_of(about) is not None), None)


@functools.cache
def kinds() -> dict[str, Kind]:
    """Every kind of draft by its name: the files beside this one that have a KIND."""
    package = Path(__file__).parent
    names = [module.name for module in pkgutil.iter_modules([str(package)])]
    modules = {name: importlib.import_module(f"{__package__}.{name}") for name in names}
    return {name: module.KIND for name, module in modules.items() if hasattr(module, "KIND")}
