"""A published draft in the engines that serve it: measured once, and kept in the run.

In vLLM it must be the draft that was trained: as many of its tokens are accepted at each position
as by our own decoder, up to chance. Else something between the two has changed, and the likely
cause is named.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from align.files import atomic_file
from align.machine import free_memory, use_machine
from align.sources import (
    load_config,
    load_tokenizer,
    read_json,
    resolve_checkpoint,
    resolve_file,
)
from align.to_gguf import write_gguf
from distill.card import GGUF_SERVED, EngineResults, gamma_of, in_one_file, shares
from distill.drafters.kind import kinds
from distill.forms import gguf_file
from distill.models import target_device
from distill.recipe import read_yaml
from distill.reload import OWN_IDS
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target, load_target, weights_sha256
from eval.decoding.verification import Sampling
from eval.engines.environments import NAMES
from eval.engines.installed import measure_installed
from eval.measuring.evaluation import context_length
from eval.prompts import Lengths, PromptSet, load_prompts, render_set
from eval.reporting.report import DraftReport, Report, checked
from eval.reporting.tables import texts_line

PROMPTS, MAX_NEW_TOKENS = 24, 64  # of each engine's check
CLOSE = 0.02  # of all drafts, at each position; a few hundred drafts differ more by chance
# In the provenance of vLLM's report: what our decoder accepts at each position, and why not so many
HERE, MISMATCH = "accepted_by_our_decoder", "mismatch"


def in_engines(run: Path, report: Report, draft: Path, asked: Sequence[str] = ()) -> EngineResults:
    """What each engine does with the published folder `draft`, or why that is not known.

    A result for the same weights, prompts and draft length is kept in the run, and not measured
    again; of the other engines those that are asked for are measured.
    """
    recipe = read_yaml(run / "recipe.yaml")
    engines: EngineResults = {}
    for name in NAMES:
        form = gguf_file(draft, GGUF_SERVED) if name == "llama.cpp" else draft
        path = run / "report" / "engines" / f"{name}.json"
        length = [gamma_of(report), PROMPTS, MAX_NEW_TOKENS]
        key = [report.target, weights_sha256(str(form)), report.prompts.sha256, *length]
        kept = read_json(path) if path.is_file() else None
        if kept is not None and kept["of"] == key:
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
                json.dump({"of": key, "report": result.model_dump(mode="json")}, file)
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
    free_memory()  # a target that alpha was taken on: an engine loads its own
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
    speeds = (f"{d.speedup:.2f} at gamma {d.gamma}" for d in measured.drafts.values())
    print(f"{name}: speed-up {', '.join(speeds)}. {texts_line(draft_name, draft.lossless)}")
    if draft.speedup.bounds[0] <= 1:
        print(
            f"Warning: no speed-up is shown in {name}: the interval ({draft.speedup:.2f}) holds 1x "
            "or ends below it."
        )
        if name == "vllm":
            print(
                "vLLM looks up without a draft, too. To compare them: python -m eval.run --run "
                f"{run} --engine vllm --gamma 2,4 --output_dir {run}-vllm"
            )
    if name == "vllm" and draft.counters is not None:
        accepted = draft.counters.acceptance_per_position
        ours = _compare(run, report, recipe, form, prompts, draft)
        measured = measured.model_copy(update={"provenance": measured.provenance | ours})
        print(f"{name}: accepted by position {shares(accepted)}, here {shares(ours[HERE])}")
        if ours[MISMATCH]:
            print(f"Warning: it is not served as it was trained. Likely cause: {ours[MISMATCH]}.")
    return measured


def _compare(
    run: Path,
    report: Report,
    recipe: dict[str, Any],
    form: Path,
    prompts: PromptSet,
    served: DraftReport,
) -> dict[str, Any]:
    """HERE and MISMATCH of a published folder that vLLM served; None: it is served as trained."""
    assert served.counters is not None
    there, drafts = served.counters.acceptance_per_position, served.counters.num_drafts
    gamma = len(there)
    strategy = read_json(run / "vocab_check.json")["used"]
    length = context_length(prompts.ids, MAX_NEW_TOKENS + gamma, gamma)
    dtype = getattr(torch, report.dtype)
    target = load_target(recipe["target"], dtype, target_device(recipe), length)

    def by_us(folder: Path) -> list[float]:
        drafter = load_drafter(str(folder), target, strategy)
        return accepted_by_position(target, drafter, prompts, gamma, MAX_NEW_TOKENS)

    def apart(here: list[float], there: list[float]) -> bool:
        # rounding moves where a draft begins, so that they are others
        return any(
            abs(a - b) > max(CLOSE, 1.96 * math.sqrt((a * (1 - a) + b * (1 - b)) / drafts))
            for a, b in zip(here, there, strict=True)
        )

    def cause() -> str:
        read = {row.id: row.prompt_tokens for row in served.per_prompt}
        asked = {p.id: len(ids) for p, ids in zip(prompts.prompts, prompts.ids, strict=True)}
        if other := [prompt for prompt, tokens in read.items() if tokens != asked[prompt]]:
            name = other[0]
            return (
                f"the template: vLLM read {len(other)} of {len(read)} prompts otherwise ({name!r} "
                f"in {read[name]} tokens, here {asked[name]})"
            )
        if strategy in OWN_IDS:
            return "the vocabulary: the draft has ids of its own, and vLLM maps them in its own way"
        if apart(exported := by_us(form), here):
            return (
                f"q: of what was exported our decoder accepts {shares(exported)}, so its weights, "
                "their form or the vocabulary it covers changed on the way"
            )
        served_in = load_config(str(resolve_checkpoint(recipe["target"]))).dtype
        if served_in != dtype:
            return f"the dtype: vLLM computes in {served_in}, the run did in {dtype}"
        return "vLLM itself: prompts, weights and dtype are the same"

    use_machine()
    here = by_us(run / "draft")
    return {HERE: here, MISMATCH: cause() if apart(here, there) else None}


def accepted_by_position(
    target: Target, drafter: Drafter, prompts: PromptSet, gamma: int, max_new_tokens: int
) -> list[float]:
    """The share of greedy drafts whose first i tokens are accepted, as vLLM counts them [gamma].

    That is, with the last draft of a text as long as the others.
    """
    decoding = Decoding(Sampling(), target.stops, max_new_tokens + gamma)
    drafts, accepted = 0, np.zeros(gamma)
    for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
        (run,) = decode(target.decoder, drafter, [prompt], [ids], decoding, DraftLength(gamma))
        done = run.prefill_tokens
        for tokens, count in zip(run.block_tokens, run.accepted, strict=True):
            if done < max_new_tokens:
                drafts += 1
                accepted += np.arange(gamma) < count
            done += tokens
    return [float(share) for share in accepted / drafts]


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
