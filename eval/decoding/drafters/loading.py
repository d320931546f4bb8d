"""From a spec to a drafter of the right kind."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from align.check import choose_strategy, compare
from align.sources import load_model, read_json
from align.transplant import transplant
from align.vocab_map import build_map
from align.vocabulary import read_vocabulary
from eval.decoding.build import build_decoder
from eval.decoding.drafters.base import DecoderDrafter, Drafter
from eval.decoding.drafters.by_map import MapDrafter
from eval.decoding.drafters.by_text import TextDrafter
from eval.decoding.drafters.checkpoint import CheckpointDrafter
from eval.decoding.stock import longest_context
from eval.decoding.target import Target, model_bytes, tensor_sha256

LONGER = 2  # a text in a draft's own ids has at most so many times the target's, as a rule


def load_drafter(spec: str, target: Target, strategy: str = "auto") -> Drafter:
    """The drafter of a spec.

    A folder with a compact form (or that form itself) is of the kind that its compact.json names,
    or, for another target than it was made for (quantised otherwise, say), its full form;
    other kinds are named themselves, what they are made of after a colon (`prompt-lookup`: the file
    prompt_lookup.py here; `lookup-first:SPEC`).
    Anything else is a checkpoint, whose vocabulary is bridged by `strategy` (align/check.py).
    Raises ValueError when no lossless strategy exists for the pair, or the one asked for is none.
    """
    for folder in (Path(spec) / "compact", Path(spec)):
        if (folder / "compact.json").is_file():
            about = read_json(folder / "compact.json")
            if folder != Path(spec) and _of_another_target(about, target):
                print(
                    f"{spec} was made for another target, so its compact form, which shares that "
                    "target's embedding, cannot draft here: taking the full form.",
                    file=sys.stderr,
                )
                return _load_checkpoint(spec, target, strategy)
            drafter: Drafter = _kind(about.get("drafter", "pruned")).load(folder, target, strategy)
            full = (folder if drafter.one_form else folder.parent) / "model.safetensors"
            drafter.path = str(folder)
            drafter.full_form_bytes = full.stat().st_size if full.is_file() else None
            return drafter
    name = spec.partition(":")[0].replace("-", "_")
    if name == "routed":
        raise ValueError(
            f"{spec}: adapters chosen by request are gone, no engine serves them; name one as "
            "adapter:FOLDER, or each of several as a draft of its own (docs/adapters.md)."
        )
    if (Path(__file__).parent / f"{name}.py").is_file():
        return _kind(name).load(spec, target, strategy)
    return _load_checkpoint(spec, target, strategy)


def _of_another_target(about: dict[str, Any], target: Target) -> bool:
    """Whether a compact form shares an embedding that is not this target's."""
    shared = about.get("embedding_sha256")
    return shared is not None and shared != tensor_sha256(target.decoder.embedding)


def _kind(name: str) -> Any:
    return importlib.import_module(f"eval.decoding.drafters.{name}")


def _load_checkpoint(spec: str, target: Target, strategy: str) -> Drafter:
    return checkpoint_drafter(load_model(spec, target.decoder.dtype), spec, target, strategy)


def checkpoint_drafter(loaded: Any, spec: str, target: Target, strategy: str) -> DecoderDrafter:
    """The drafter of a model that was loaded from that spec, whose tokenizer it has."""
    left, right = read_vocabulary(target.spec), read_vocabulary(spec)
    verdict = compare(left, right)
    chosen = choose_strategy(verdict, strategy, tuned=False)
    model = loaded.to(target.decoder.device)
    vocab_size, shared = target.decoder.embedding.shape[0], verdict.shared_ids
    if chosen in ("remap", "transplant"):
        model = transplant(model, build_map(left, right), left, right, vocab_size)
        shared = left.count
    context = target.decoder.context_length
    if chosen in ("intersection", "string"):
        context = min(longest_context(model.config.get_text_config()), LONGER * context)
    size, head_rows = model_bytes(model), model.get_output_embeddings().weight.shape[0]
    about: dict[str, Any] = {
        "decoder": build_decoder(model, context),
        "vocab_size": vocab_size,
        "path": spec,
        "vocabulary": {
            "relation": verdict.relation,
            "strategy": chosen,
            "coverage": verdict.coverage,
        },
        "bytes": size,
        "full_form_bytes": size,
    }
    if chosen == "intersection":
        return MapDrafter(target=left, draft=right, **about)
    if chosen == "string":
        rows = None if head_rows == right.count else right.count
        return TextDrafter(target=left, draft=right, rows=rows, **about)
    return CheckpointDrafter(rows=None if head_rows == shared else shared, **about)
