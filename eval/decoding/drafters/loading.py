"""Loads the drafter that a spec names."""

from __future__ import annotations

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.formats import formats, published_format
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.drafters.sibling import sibling_drafter
from eval.decoding.target import Target


def load_drafter(spec: str, target: Target, strategy: str = "auto") -> Drafter:
    """The drafter of a spec: `prompt-lookup`, `lookup-first:SPEC`, or a model's."""
    if spec == LOOKUP:
        return prompt_lookup(target)
    if spec.startswith(LOOKUP_FIRST):
        return lookup_first(
            load_drafter(spec.removeprefix(LOOKUP_FIRST), target, strategy), target.stops
        )
    return model_drafter(Checkpoint.open(spec), target, strategy)


def model_drafter(draft: Checkpoint, target: Target, strategy: str = "auto") -> Drafter:
    """The drafter of a folder with compact.json, of a published EAGLE-3 or DFlash draft or Medusa
    heads, or of any other model, whose vocabulary is mapped by `strategy` (align/check.py).

    Raises UserError if the draft cannot draft for the target without loss.
    """
    if (compact := draft.folder / "compact.json").is_file():
        name = read_json(compact)["drafter"]
        if (kind := formats().get(name)) is None:
            raise UserError(
                f"{draft.spec} is a draft of kind {name!r}, but this version knows only "
                f"{', '.join(formats())}; train a draft of one of these kinds."
            )
    else:
        kind = published_format(draft.folder)
    if kind is None:
        return sibling_drafter(draft, target, strategy)
    draft.fetch()
    draft.refuse_quantised()
    positions, needed = kind.positions(draft.config_json), target.decoder.context_length
    if positions is not None and positions < needed:  # where engines stop drafting
        raise UserError(
            f"{draft.spec} drafts up to position {positions}, but the longest prompt and its "
            f"output take {needed}; lower max_new_tokens or shorten the prompts, or raise "
            "max_position_embeddings in its config.json."
        )
    drafter = kind.load(draft.folder, target)
    drafter.path = draft.spec
    return drafter
