"""A published draft in the engines that serve it: measured once, and kept in the run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from align.atomic import atomic_file
from align.sources import load_tokenizer, read_json
from align.to_gguf import write_gguf
from distill.card import GGUF_SERVED, gamma_of
from distill.forms import gguf_file
from eval.decoding.target import weights_sha256
from eval.engines.installed import measure_installed
from eval.prompts import PromptSet, load_prompts, render_all
from eval.reporting.report import Report, checked
from eval.reporting.tables import lossless_line

PROMPTS, MAX_NEW_TOKENS = 24, 64  # of each engine's check


def verify(
    name: str, run: Path, report: Report, draft: Path, target: Path, target_gguf: Path | None
) -> Report | str:
    """The report of one engine on the published folder `draft`, or why there is none.

    What it was found to do with the same weights, prompts and draft length before is kept in the
    run. target: a checkpoint's folder; target_gguf: the same as one file, made where there is none.
    """
    form = form_for(name, draft)
    if not form.exists():
        print(f"{name}: not measured, there is no GGUF of the draft")
        return "there is no GGUF of the draft"
    sha256 = weights_sha256(str(form))
    kept = kept_report(name, run, report, sha256)
    if kept is not None:
        print(f"{name}: measured before, and kept in {run / 'report' / 'engines'}")
        return kept
    print(
        f"Verifying in {name}: {PROMPTS} prompts, {MAX_NEW_TOKENS} tokens each, with the draft and "
        "without: minutes on a CPU",
        flush=True,
    )
    prompts = _prompts(run, report, target)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            if name == "llama.cpp":
                target = target_gguf or _as_gguf(target, Path(scratch))
            found = measure_installed(name, target, form, prompts, gamma_of(report), MAX_NEW_TOKENS)
    except ValueError as error:  # not installed, or not up to this pair: the card says which
        print(f"{name}: not measured, {error}")
        return str(error)
    one = found.last[1]
    print(f"{name}: speed-up {one.speedup:.2f}. {lossless_line(name, one.lossless)}")
    path = _path(name, run)
    path.parent.mkdir(exist_ok=True)
    with atomic_file(path) as file:
        content = {"of": _about(report, sha256), "report": found.model_dump(mode="json")}
        json.dump(content, file)
    return found


def form_for(name: str, draft: Path) -> Path:
    """What an engine loads of a published folder."""
    return gguf_file(draft, GGUF_SERVED) if name == "llama.cpp" else draft


def kept_report(name: str, run: Path, report: Report, sha256: str | None) -> Report | None:
    """What an engine was found to do with just these weights, prompts and draft length."""
    if not _path(name, run).is_file():
        return None
    kept = read_json(_path(name, run))
    return checked(kept["report"]) if kept["of"] == _about(report, sha256) else None


def _path(name: str, run: Path) -> Path:
    return run / "report" / "engines" / f"{name}.json"


def _about(report: Report, sha256: str | None) -> list[object]:
    length = [gamma_of(report), PROMPTS, MAX_NEW_TOKENS]
    return [report.target, sha256, report.prompts.sha256, *length]


def _as_gguf(target: Path, scratch: Path) -> Path:
    write_gguf(target, scratch / "target.gguf", "f16")
    return scratch / "target.gguf"


def _prompts(run: Path, report: Report, target: Path) -> PromptSet:
    """Some of the run's evaluation prompts, the same for every engine."""
    prompts = load_prompts(str(run / "prompts" / "eval.jsonl"))
    room = read_json(target / "config.json")["max_position_embeddings"]
    ids = render_all(prompts, load_tokenizer(str(target)), room, MAX_NEW_TOKENS)
    seed = report.provenance.get("seed", 0)
    assert isinstance(seed, int)
    return PromptSet(report.prompts.source, prompts, ids).drawn(PROMPTS, seed)
