"""A published draft in the engines that serve it: measured once, and kept in the run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.files import atomic_file
from align.sources import load_tokenizer, read_json, resolve_checkpoint, resolve_file
from align.to_gguf import write_gguf
from distill.card import GGUF_SERVED, EngineResults, gamma_of, in_one_file
from distill.forms import gguf_file
from distill.recipe import read_yaml
from eval.decoding.drafters.kind import kinds
from eval.decoding.target import weights_sha256
from eval.engines.environments import NAMES
from eval.engines.installed import measure_installed
from eval.prompts import Lengths, PromptSet, load_prompts, render_set
from eval.reporting.report import Report, checked
from eval.reporting.tables import texts_line

PROMPTS, MAX_NEW_TOKENS = 24, 64  # of each engine's check


def in_engines(run: Path, report: Report, draft: Path, asked: Sequence[str] = ()) -> EngineResults:
    """What each engine does with the published folder `draft`, or why that is not known.

    What one was found to do with the same weights, prompts and draft length before is kept in the
    run, and not measured again; of the others those that are asked for are measured.
    """
    recipe = read_yaml(run / "recipe.yaml")
    engines: EngineResults = {}
    for name in NAMES:
        form = gguf_file(draft, GGUF_SERVED) if name == "llama.cpp" else draft
        path = run / "report" / "engines" / f"{name}.json"
        length = [gamma_of(report), PROMPTS, MAX_NEW_TOKENS]
        of = [report.target, weights_sha256(str(form)), report.prompts.sha256, *length]
        kept = read_json(path) if path.is_file() else None
        if kept is not None and kept["of"] == of:
            engines[name] = checked(kept["report"])
        elif name not in asked:
            engines[name] = f"not asked for (--engines {name})"
        else:
            engines[name] = result = _verify(name, run, report, recipe, form)
            if isinstance(result, str):
                print(f"{name}: not measured, {result}")
                continue
            path.parent.mkdir(exist_ok=True)
            with atomic_file(path) as file:
                json.dump({"of": of, "report": result.model_dump(mode="json")}, file)
    return engines


def _verify(
    name: str, run: Path, report: Report, recipe: dict[str, Any], form: Path
) -> Report | str:
    """The report of one engine, or why there is none."""
    spec, kind = recipe["target"], recipe.get("drafter")
    if name not in kinds()[kind or "pruned"].engines:
        return f"it loads no draft of kind {kind}"
    if not form.exists():
        return "there is no GGUF of the draft"
    print(
        f"Verifying in {name}: {PROMPTS} prompts, {MAX_NEW_TOKENS} tokens each, with the draft and "
        "without: minutes on a CPU",
        flush=True,
    )
    target = resolve_checkpoint(spec)
    prompts = _prompts(run, report, target, recipe.get("max_prompt_length"))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if name == "llama.cpp" and in_one_file(spec):
                target = resolve_file(spec)
            elif name == "llama.cpp":
                write_gguf(target, Path(scratch) / "target.gguf", "f16")
                target = Path(scratch) / "target.gguf"
            measured = measure_installed(
                name, target, form, prompts, gamma_of(report), MAX_NEW_TOKENS
            )
    except ValueError as error:  # not installed, or not up to this pair: the card says which
        return str(error)
    draft_name, draft = measured.last
    print(f"{name}: speed-up {draft.speedup:.2f}. {texts_line(draft_name, draft.lossless)}")
    return measured


def _prompts(run: Path, report: Report, target: Path, longest: int | None) -> PromptSet:
    """Some of the run's evaluation prompts, the same for every engine."""
    prompts = load_prompts(str(run / "prompts" / "eval.jsonl"))
    room = read_json(target / "config.json")["max_position_embeddings"]
    # a server renders prompts itself and cuts none
    lengths, tokenizer = Lengths(longest, "drop"), load_tokenizer(str(target))
    source = report.prompts.source
    rendered = render_set(source, prompts, tokenizer, room, MAX_NEW_TOKENS, lengths)
    seed = report.provenance.get("seed", 0)
    assert isinstance(seed, int)
    return rendered.drawn(PROMPTS, seed)
