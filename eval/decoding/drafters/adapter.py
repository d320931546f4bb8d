"""Adapters on a base draft that is in memory once (`adapter:FOLDER`, or `adapter:FOLDER@BASE`).

An adapter is merged into copies of the layers that it changes: a step takes no longer than the
base's, and eight bits round what a merged draft would have. The embedding, the head and the last
norm stay the base's own. A swap makes the layers of one adapter anew and reads nothing of the base
from disk; where all are kept, it is the choice of a decoder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from align.sources import load_model, resolve_checkpoint
from eval.decoding.adapters import Adapter, AdapterError, adapted, averaged, read_adapter
from eval.decoding.drafters.base import DecoderDrafter, Drafter
from eval.decoding.drafters.loading import checkpoint_drafter
from eval.decoding.drafters.pruned import load_compact, pruned_drafter
from eval.decoding.target import Target, weights_sha256


class SharedBase:
    """A base draft: `plain` as it stands, and drafters of adapters on it."""

    def __init__(self, spec: str, target: Target, strategy: str) -> None:
        found = (Path(spec) / "compact", Path(spec))
        folder = next((one for one in found if (one / "compact.json").is_file()), None)
        self.spec = spec
        self.weights = str(folder or resolve_checkpoint(spec))
        if folder is not None:
            self.model, token_ids = load_compact(folder, target.decoder.embedding)
            self.plain: DecoderDrafter = pruned_drafter(self.model, token_ids, target)
        else:
            loaded: Any = load_model(spec, target.decoder.dtype)
            self.model = loaded.to(target.decoder.device)
            self.plain = checkpoint_drafter(self.model, spec, target, strategy)
            if self.plain.vocabulary["strategy"] in ("remap", "transplant"):
                raise AdapterError(
                    f"{spec} was moved onto the target's tokens when it was loaded, and its "
                    "adapters are for what it was moved to; use the merged draft."
                )
        self.plain.path = self.weights

    def drafter(self, adapter: Adapter) -> DecoderDrafter:
        """The base with that adapter. Raises AdapterError for one of another base."""
        if adapter.base_sha256 and weights_sha256(self.weights) not in adapter.base_sha256:
            raise AdapterError(
                f"{adapter.path} was trained on another base than {self.spec} (sha256 "
                f"{adapter.base_sha256[0][:12]}…); name its own as adapter:FOLDER@BASE, or train "
                "it again on this one."
            )
        return self.on_base(adapter)

    def on_base(self, adapter: Adapter) -> DecoderDrafter:
        """A swap: the adapter's layers made anew."""
        return self._of(adapted(self.model, adapter), str(adapter.path))

    def average(self, adapters: Sequence[Adapter]) -> DecoderDrafter:
        """One draft with the mean of the adapters' weights."""
        models = [adapted(self.model, adapter) for adapter in adapters]
        names = ", ".join(str(adapter.path) for adapter in adapters)
        return self._of(averaged(self.model, models), f"mean of {names}")

    def _of(self, model: PreTrainedModel, path: str) -> DecoderDrafter:
        decoder = self.plain.decoder.with_layers(model)
        return dataclasses.replace(self.plain, decoder=decoder, path=path)


def load(spec: str, target: Target, strategy: str) -> Drafter:
    """Of `adapter:FOLDER` or `adapter:FOLDER@BASE`."""
    folder, _, base = spec.partition(":")[2].partition("@")
    adapter = read_adapter(Path(folder))
    return SharedBase(base or adapter.base, target, strategy).drafter(adapter)
