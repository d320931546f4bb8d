"""Loads the drafter that a spec names."""

from __future__ import annotations

from pathlib import Path

from align.errors import UserError
from align.sources import load_model, read_json, resolve_checkpoint
from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.formats import DraftFormat, formats, published_format
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.drafters.sibling import sibling_drafter
from eval.decoding.target import Target


def load_drafter(spec: str, target: Target, strategy: str = "auto") -> Drafter:
    """The drafter of a spec.

    spec: `prompt-lookup`; `lookup-first:SPEC`; a folder with compact.json; a published EAGLE-3 or
    DFlash draft or Medusa heads; or any other model, whose vocabulary is mapped by `strategy`
    (align/check.py). Raises UserError if the draft cannot draft for the target without loss.
    """
    if spec == LOOKUP:
        return prompt_lookup(target)
    if spec.startswith(LOOKUP_FIRST):
        return lookup_first(
            load_drafter(spec.removeprefix(LOOKUP_FIRST), target, strategy), target.stops
        )
    if (Path(spec) / "compact.json").is_file():
        name = read_json(Path(spec) / "compact.json")["drafter"]
        if (kind := formats().get(name)) is None:
            raise UserError(
                f"{spec} is a draft of kind {name!r}, but this version knows only "
                f"{', '.join(formats())}; train a draft of one of these kinds."
            )
    else:
        kind = published_format(resolve_checkpoint(spec, weights=False))
    if kind is None:
        return sibling_drafter(load_model(spec, target.decoder.dtype), spec, target, strategy)
    folder = resolve_checkpoint(spec)
    refuse_longer(folder, kind, target)
    drafter = kind.load(folder, target)
    drafter.path = spec
    return drafter


def refuse_longer(folder: Path, kind: DraftFormat, target: Target) -> None:
    """Raise UserError if engines stop drafting before the end of the target's longest text."""
    positions = kind.positions(read_json(folder / "config.json"))
    needed = target.decoder.context_length
    if positions is not None and positions < needed:
        raise UserError(
            f"{folder} drafts up to position {positions}, but the longest prompt and its output "
            f"take {needed}; lower max_new_tokens or shorten the prompts, or raise "
            "max_position_embeddings in its config.json."
        )
