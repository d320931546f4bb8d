"""The model card of a draft, made from its run and from the reports on its weights."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

from align.checkpoint import weights_sha256
from align.errors import abridged
from align.fetch import resolve_file
from align.files import atomic_file, read_json
from align.from_gguf import value_of
from distill.recipe import build_recipe
from distill.recipe_files import read_yaml
from eval.engines.server import ServerError
from eval.engines.start_vllm import speculation
from eval.reporting.fields import REFERENCE, Report, name_and_length
from eval.reporting.recommendation import Schedule, recommended, scheduled
from eval.reporting.tables import Table, load_table, result_table
from eval.reporting.text import plain
from eval.reporting.verdict import label, measured_in, top

TEMPLATE = Path(__file__).with_name("card.md.j2")
TAG = "draftsmith"  # of our repositories on the Hub
USUAL_GAMMA = 3  # draft length where no report has one


@dataclass(frozen=True)
class Publication:
    """Facts of a card that are neither in the run nor in its reports.

    name: the folder or the repository that the card's commands name. unmet: the conditions of
    a publication that are not met.
    """

    name: str = "draft"
    licence: str | None = None
    licence_source: str = "not looked up yet"
    unmet: list[str] = field(default_factory=list)


def draft_weights(run: Path) -> set[str]:
    """The hash of the draft's checkpoint; empty without one."""
    return {sha for sha in [weights_sha256(run / "draft")] if sha is not None}


def write_card(
    folder: Path, run: Path, reports: Sequence[Report], publication: Publication = Publication()
) -> None:
    """Write the model card (README.md) of the run's draft to the folder.

    Speeds are of the engines' reports; of the reference decoder's if there is no other.
    Raises UserError for a recipe or a provenance that is missing or broken.
    """
    recipe = build_recipe(read_yaml(run / "recipe.yaml"))
    engines = [report for report in reports if report.engine != REFERENCE]
    reports = sorted(reports, key=lambda report: report.engine == REFERENCE)
    weights, spec, hub_id = draft_weights(run), recipe.target, recipe.target_hub_id
    name = publication.name.rpartition("/")[2]
    target = f"{name}-target" if in_one_file(spec) else public_name(spec)
    short = short_name(spec if abridged(spec) == spec else hub_id or spec)
    base_model = recipe.draft or hub_id or spec
    draft_length, schedule = served_draft_length(reports, weights)
    try:
        method = recipe.draft_sample_method
        drafting = speculation(publication.name, draft_length, run / "draft", False, method)
        serve = shlex.join(scheduled(["vllm", "serve", target, *drafting], schedule))
        config = json.loads(drafting[1])
        context = read_json(run / "draft" / "config.json").get("max_position_embeddings")
        if config["method"] == "medusa":
            serve = f"# up to vLLM 0.32\n{serve}"
        elif context and config["method"] == "draft_model" and "parallel_drafting" not in config:
            serve = f"# from vLLM 0.33 on, the context is at most the draft's: {context}\n{serve}"
    except ServerError as error:
        serve = f"# vLLM does not start with it: {error}"
    if recipe.kind.adapter:
        fixed = "python -m sglang.launch_server --attention-backend fa3 --speculative-algorithm UNO"
        sglang = [*fixed.split(), "--model-path", target, "--uno-lora-path", publication.name]
        sglang += ["--speculative-num-draft-tokens", str(draft_length)]
        serve = f"# SGLang from 0.5.23 on, on one GPU with FlashAttention 3\n{shlex.join(sglang)}"
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model if is_hub_id(base_model) else None,
            license=publication.licence,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=[
                *("speculative-decoding", "draft-model", TAG),
                re.sub(r"\W+", "-", recipe.domain.strip()).lower(),
            ],
            target=public_name(spec),
        ),
        template_path=str(TEMPLATE),
        publication=publication,
        weights=sorted(weights),
        short=short,
        target=target,
        target_source=abridged(public_name(spec)).partition("#")[0],
        in_one_file=in_one_file(spec),
        recipe=recipe,
        started=recipe.draft and abridged(public_name(recipe.draft)),
        train_prompts=abridged(public_name(recipe.train_prompts)),
        eval_prompts=abridged(public_name(reports[0].prompts.source)).partition("#")[0],
        asked=reports[0].prompts,
        serve=serve,
        draft_length=draft_length,
        temperature=reports[0].decoding.temperature,
        results=[_results(report) for report in engines or reports],
        acceptance=[
            f"{label(name)} {draft.alpha:.2f}"
            for report in (reports if engines else [])
            for name, draft in report.drafts.items()
            if draft.alpha is not None
        ],
        report=reports[0],
        provenance=read_json(run / "provenance.json"),
    )
    with atomic_file(folder / "README.md") as file:
        file.write(f"{card}\n")


def served_draft_length(reports: Sequence[Report], weights: set[str]) -> tuple[int, Schedule]:
    """The draft length to serve with, and vLLM's schedule: as the first report recommends for all
    loads; if it recommends another draft, the length that was the fastest one in any report.
    """
    lengths = list[tuple[float, int]]()
    for report in reports:
        measured = {
            name: draft
            for name, draft in report.drafts.items()
            if draft.gamma
            and (
                (draft.sha256 in weights and not draft.not_in_vllm)
                or name_and_length(name)[0] == "tuned"
            )
        }
        choice = recommended(report, measured)
        if report.engine == "vllm" and choice:
            return max(
                measured[name].gamma or 0 for name in choice.fastest.values()
            ), choice.schedule
        lengths += [
            (report.stated_speedup(draft).mean, draft.gamma or 0) for draft in measured.values()
        ]
    return max(lengths, default=(0.0, USUAL_GAMMA))[1], []


def _results(report: Report) -> str:
    """What a report says, as Markdown: verdict, output check, setting, and its main tables."""
    decoding, lines, loads = report.decoding, top(report), load_table(report)
    hardware = report.environment.hardware or "unknown hardware"  # the device may be a host's name
    setting = (
        f"Measured in {measured_in(report)} on {hardware}, temperature {decoding.temperature:g}, "
        f"up to {decoding.max_new_tokens} new tokens. Output check: {lines.output}."
    )
    tables = [*_grid(result_table(report)), *(_grid(loads) if loads.rows else ())]
    return "\n\n".join([f"**{plain(lines.verdict)}**", setting, *tables])


def _grid(table: Table) -> list[str]:
    """The title, the rows and the note of a table, as Markdown."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    rows = "\n".join(f"| {' | '.join(map(plain, line))} |" for line in lines)
    return [f"## {table.title}", rows, *filter(None, [table.note])]


# --- Names that reveal nothing about the machine


def is_hub_id(spec: str) -> bool:
    """Whether `spec` reads as ORG/NAME on the Hub and not as a path or a `pypi:` file."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", spec)) and not Path(spec).exists()


def public_name(spec: str) -> str:
    """A Hub id or a `pypi:` file, unchanged; only the last part of a local path."""
    name = re.split("[@:]", spec)[0]  # without revision, configuration and split
    if is_hub_id(name) or spec.startswith("pypi:"):
        return spec
    return Path(spec).name


def short_name(spec: str) -> str:
    """The last part of a spec, without checksum and file ending. The short name of a file in many
    pieces is the distribution of the first piece.
    """
    if abridged(spec) != spec:
        return spec.partition(":")[2].partition("==")[0]
    return Path(spec.partition("#")[0]).name.removesuffix(".gguf")


def in_one_file(spec: str) -> bool:
    """Whether a target is a GGUF file, in a wheel or here, which most engines cannot name."""
    return spec.startswith("pypi:") or Path(spec).expanduser().is_file()


# --- The licence that a draft inherits


def derived_licence(specs: list[str]) -> tuple[str | None, str]:
    """The licence of a draft made from these models, and its source; or None, and why.

    specs: the target, and the draft that the run started with.
    """
    stated = {short_name(spec): _stated_licence(spec) for spec in dict.fromkeys(specs)}
    if unknown := [name for name, licence in stated.items() if licence is None]:
        return None, f"no licence is stated by {' or '.join(unknown)}"
    if len(set(stated.values())) > 1:
        listed = ", ".join(f"{name}: {licence}" for name, licence in stated.items())
        return None, f"the licences differ ({listed})"
    licence = next(iter(stated.values()))
    return licence and licence.partition(":")[0], f"as stated by {' and '.join(stated)}"


def _stated_licence(spec: str) -> str | None:
    """The licence in a checkpoint's card or a GGUF file's metadata; None where there is none.

    One that is `other` has its name behind it, because two of them are not the same.
    """
    path = Path(spec).expanduser()
    if in_one_file(spec):
        stated = value_of(resolve_file(spec), "general.license")
        return None if stated is None else str(stated)
    if path.is_dir() and not (path / "README.md").is_file():
        return None
    try:
        card = ModelCard.load(path / "README.md" if path.is_dir() else spec)
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, ConnectionError):
        return None  # `unmet_conditions` asks for it
    licence: str | None = card.data.license
    return f"other: {card.data.get('license_name')}" if licence == "other" else licence
