"""Loads the drafter that a spec names."""

from __future__ import annotations

import sys
from pathlib import Path

from align.errors import UserError
from align.sources import load_model, read_json, resolve_checkpoint
from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.decoding.drafters.compact import OtherEmbedding
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.formats import DraftFormat, formats, published_format
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.drafters.sibling import sibling_drafter
from eval.decoding.target import Target


def load_drafter(spec: str, target: Target, strategy: str = "auto") -> Drafter:
    """The drafter of a spec.

    spec: `prompt-lookup`; `lookup-first:SPEC`; a folder with compact.json or with a
    trimmed-vocabulary checkpoint in compact/; a published EAGLE-3 or DFlash draft or Medusa heads;
    or any other model, whose vocabulary is mapped by `strategy` (align/check.py). If the
    trimmed-vocabulary checkpoint was made for another target (for example, another quantisation),
    the full-vocabulary checkpoint is loaded.
    Raises UserError if the draft cannot draft for the target without loss.
    """
    if spec == LOOKUP:
        return prompt_lookup(target)
    if spec.startswith(LOOKUP_FIRST):
        return lookup_first(
            load_drafter(spec.removeprefix(LOOKUP_FIRST), target, strategy), target.stops
        )
    for folder in (Path(spec) / "compact", Path(spec)):
        if not (folder / "compact.json").is_file():
            continue
        about = read_json(folder / "compact.json")
        if (kind := formats().get(about["drafter"])) is None:
            raise UserError(
                f"{folder} is a draft of kind {about['drafter']!r}, but this version knows only "
                f"{', '.join(formats())}; train a draft of one of these kinds."
            )
        refuse_longer(folder, kind, target)
        try:
            drafter = kind.load(folder, target)
        except OtherEmbedding as error:
            if folder == Path(spec):
                raise
            print(f"{error}\n{spec}: taking the full-vocabulary checkpoint.", file=sys.stderr)
            break
        published = kind.head_size(read_json(folder / "config.json")) is not None
        full = (folder if published else folder.parent) / "model.safetensors"
        drafter.path = str(folder)
        drafter.full_form_bytes = full.stat().st_size if full.is_file() else None
        return drafter
    if published_kind := published_format(resolve_checkpoint(spec, weights=False)):
        folder = resolve_checkpoint(spec)
        refuse_longer(folder, published_kind, target)
        drafter = published_kind.load(folder, target)
        drafter.path = spec
        return drafter
    return sibling_drafter(load_model(spec, target.decoder.dtype), spec, target, strategy)


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
