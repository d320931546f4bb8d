"""How drafts lie in folders. A kind of draft is a file beside this one that has a FORMAT.

The file of the same name in distill/drafters has how it is trained. Legend: K vocabulary
entries of the draft's head.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from align.sources import read_json
from eval.decoding import drafters
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.target import Target


class DraftFormat:
    """How the drafts of one kind lie in a folder."""

    @property
    def name(self) -> str:
        """The name of its file, which compact.json and recipes have."""
        return type(self).__module__.rpartition(".")[2]

    def head_rows(self, config: Mapping[str, Any]) -> int | None:
        """Vocabulary entries of a published draft's head, by its config.json; None for others."""
        return None

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        """Check a published draft by its config.json and the target's config alone.

        Raises ValueError for another target's draft and for one that cannot be computed here.
        """

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> Drafter:
        """A model of this kind as it drafts for that target; its weights may be used up.

        token_ids: target id of each entry of its head [K]; None for a head over all ids.
        """
        raise NotImplementedError

    def load(self, folder: Path, target: Target) -> Drafter:
        """The drafter of a folder with compact.json, or of a published one.

        Raises ValueError where it was made for another target.
        """
        raise NotImplementedError


@functools.cache
def formats() -> dict[str, DraftFormat]:
    """The format of every kind of draft by its name: the files beside this one with a FORMAT."""
    names = [module.name for module in pkgutil.iter_modules(drafters.__path__)]
    modules = [importlib.import_module(f"{drafters.__name__}.{name}") for name in names]
    return {module.FORMAT.name: module.FORMAT for module in modules if hasattr(module, "FORMAT")}


def published_format(folder: Path) -> DraftFormat | None:
    """The format of the published draft in a folder; None for a model of its own."""
    config = read_json(folder / "config.json")
    known = (form for form in formats().values() if form.head_rows(config) is not None)
    return next(known, None)
