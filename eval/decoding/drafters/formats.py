"""How drafts are stored in folders. A kind of draft is a file in this folder with a FORMAT.

The file of the same name in distill/drafters trains it. Legend: K entries of the draft's head.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedConfig

from align.errors import UserError
from align.files import read_json
from eval.decoding import drafters
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.target import Target

# What drafts of others would need here, by a part of the name of their architecture.
LACKING = {
    "peagle": "one pass over masks with a learned state (P-EAGLE)",
    "dspark": "a bias by the token drafted before, and a token drafted by the anchor (DSpark)",
    "xpress": "passes that refine the drafted tokens (XPress)",
}


class DraftFormat:
    """How drafts of one kind are stored in a folder."""

    @property
    def name(self) -> str:
        """The name of its file; compact.json and recipes use this name."""
        return type(self).__module__.rpartition(".")[2]

    def head_size(self, config: Mapping[str, Any]) -> int | None:
        """Head entries of a published draft by its config.json; None if it is of another kind."""
        return None

    def longest(self, config: Mapping[str, Any]) -> int | None:
        """The longest draft by a config.json of this kind; None: any length, or another kind."""
        return None

    def positions(self, config: Mapping[str, Any]) -> int | None:
        """The longest text by a config.json of this kind; None: as long as the target's."""
        return None

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        """Check a published draft by its config.json and the target's config, without weights.

        Raises UserError for a draft of another target, or that cannot be computed here.
        """

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> Drafter:
        """The drafter of a model of this kind for that target. It may replace the model's weights.

        token_ids: target id of each head entry [K]; None for a head over all ids.
        """
        raise NotImplementedError

    def load(self, folder: Path, target: Target) -> Drafter:
        """The drafter of a folder with compact.json or of a published draft's folder.

        Raises UserError if the draft was made for another target.
        """
        raise NotImplementedError


@functools.cache
def formats() -> dict[str, DraftFormat]:
    """The FORMAT of each file in this folder that has one, by name."""
    names = [module.name for module in pkgutil.iter_modules(drafters.__path__)]
    modules = [importlib.import_module(f"{drafters.__name__}.{name}") for name in names]
    return {module.FORMAT.name: module.FORMAT for module in modules if hasattr(module, "FORMAT")}


def published_format(folder: Path) -> DraftFormat | None:
    """The format of the published draft in a folder; None for an ordinary model.

    Raises UserError for an architecture that neither Transformers nor a format knows, because
    Transformers would ignore its name and load the class of its model_type.
    """
    config = read_json(folder / "config.json")
    for form in formats().values():
        if form.head_size(config) is not None:
            return form
    names = config.get("architectures") or ()
    if names and not any(hasattr(transformers, name) for name in names):
        needs = [lack for part, lack in LACKING.items() if part in "".join(names).lower()]
        reason = f", which needs {needs[0]} and" if needs else ", which"
        raise UserError(
            f"{folder} has architecture {', '.join(names)}{reason} cannot be computed here. If an "
            "engine knows it, start that server and measure it (eval.run --base_url)."
        )
    return None


def longest_draft(config: Mapping[str, Any]) -> int | None:
    """The longest draft of the draft with this config.json; None: any length."""
    lengths = (form.longest(config) for form in formats().values())
    return next((length for length in lengths if length is not None), None)
