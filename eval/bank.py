"""A bank: the adapters of several runs on one base, each measured on every domain's prompts.

DIR is a folder of finished runs. Every run in it with an adapter (DIR/NAME/draft/adapter) is a
domain, NAME, with the run's own held-out prompts; runs that trained all weights from the same base
are measured beside them. Drafts, in the report's order: base, each adapter, the full fine-tunes,
average (the mean of the adapters' weights), routed (the adapter that likes the prompt best).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from eval.decoding.adapters import Adapter, AdapterError, find_adapters
from eval.decoding.drafters.adapter import SharedBase
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.routed import by_likelihood, routed
from eval.decoding.target import Target
from eval.measuring.bank import measured_bank
from eval.prompts import Prompt, PromptSet, load_prompts
from eval.reporting.report import Report

SWAPS = 5  # timed of each adapter
TAKEN = ("base", "average", "routed")  # names of drafts that are made here
SAME = ("target", "dtype", "temperature", "top_k", "top_p")  # in the recipes of all


@dataclass(frozen=True)
class Runs:
    """A folder's runs on one base: the adapters, and drafts of which all weights were trained."""

    folder: Path
    adapters: dict[str, Adapter]
    full: dict[str, Path]
    recipe: dict[str, Any]  # of the first; what SAME names is in all of them

    def prompts(self, part: str, limit: int | None, seed: int) -> list[Prompt]:
        """`eval` or `tuning` prompts of all domains by turns, each with its domain as category."""
        found = [
            [
                dataclasses.replace(
                    prompt,
                    id=f"{name}/{prompt.id}",
                    category=name,
                    group=None if prompt.group is None else f"{name}/{prompt.group}",
                )
                for prompt in load_prompts(
                    str(self.folder / name / "prompts" / f"{part}.jsonl"), limit, seed
                )
            ]
            for name in self.adapters
        ]
        return [p for turn in itertools.zip_longest(*found) for p in turn if p is not None]


def find_runs(folder: Path) -> Runs:
    """The runs of a bank's folder. Raises AdapterError where they cannot be measured together."""
    adapters = find_adapters(folder)
    recipes = {name: _recipe(folder / name) for name in adapters}
    first, recipe = next(iter(recipes.items()))
    if recipe is None:
        raise AdapterError(
            f"{folder / first} is no run: it has no recipe.yaml, which names target and prompts; "
            "give a folder of runs, or measure one adapter with --draft adapter:FOLDER."
        )
    for name, other in recipes.items():
        if name in TAKEN:
            raise AdapterError(
                f"{folder / name} has an adapter, but {name!r} is what a bank calls a draft of its "
                "own; rename that folder."
            )
        for key in SAME:
            if other is None or other.get(key) != recipe.get(key):
                raise AdapterError(
                    f"{folder / name} and {folder / first} differ in {key}; a bank is of one "
                    "target and one sampling: put their runs into folders of their own."
                )
    full = {}
    for own in sorted(folder.iterdir()):
        about = _recipe(own)
        if about is None or own.name in adapters or not (own / "draft").is_dir():
            continue
        if about.get("base") is not None and about["base"] == recipe.get("base"):
            full[own.name] = own / "draft"
    return Runs(folder, adapters, full, recipe)


def _recipe(run: Path) -> dict[str, Any] | None:
    path = run / "recipe.yaml"
    if not path.is_file():
        return None
    values: dict[str, Any] = YAML(typ="safe", pure=True).load(path)
    return values


class LoadedBank:
    """The drafts of a bank on a loaded target, by name, and what was timed while they were made."""

    def __init__(self, runs: Runs, target: Target) -> None:
        self.runs = runs
        self.base = SharedBase(next(iter(runs.adapters.values())).base, target, "auto")
        adapters = runs.adapters
        tuned = {name: self.base.drafter(adapter) for name, adapter in adapters.items()}
        self.route = by_likelihood(tuned)
        self.drafters: dict[str, Drafter] = {"base": self.base.plain, **tuned}
        self.drafters |= {name: load_drafter(str(p), target) for name, p in runs.full.items()}
        if len(adapters) > 1:
            self.drafters["average"] = self.base.average(list(adapters.values()))
            self.drafters["routed"] = routed(self.base, tuned, self.route)

    def with_bank(self, report: Report, prompts: PromptSet) -> Report:
        """The report with its `bank`."""
        chosen, seconds = {}, []
        for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
            clock = time.perf_counter()
            chosen[prompt.id] = self.route(ids)
            seconds.append(time.perf_counter() - clock)
        weights = Path(self.base.weights).glob("*.safetensors")
        base = self.base.spec, sum(path.stat().st_size for path in weights)
        about = [
            {"name": name, "bytes": adapter.bytes, "swap_ms": 1000 * self._swap(adapter)}
            for name, adapter in self.runs.adapters.items()
        ]
        several = len(about) > 1
        bank = measured_bank(
            report, base, about, chosen if several else {}, 1000 * statistics.mean(seconds)
        )
        return report.model_copy(update={"bank": bank})

    def _swap(self, adapter: Adapter) -> float:
        """Median seconds to put an adapter that is in memory on the base."""
        seconds = []
        for _ in range(SWAPS):
            clock = time.perf_counter()
            self.base.on_base(adapter)
            seconds.append(time.perf_counter() - clock)
        return statistics.median(seconds)
