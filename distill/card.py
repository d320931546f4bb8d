"""The model card of a draft, made from its run and from the reports on its weights."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

from align.files import atomic_file
from align.sources import abridged, gguf_reader, read_json, resolve_file
from distill.recipe import build_recipe, read_yaml
from eval.decoding.target import weights_sha256
from eval.engines.local_vllm import speculation
from eval.engines.server import ServerError
from eval.reporting.fields import REFERENCE, DraftReport, Report
from eval.reporting.text import plain
from eval.reporting.verdict import label, measured_in

TEMPLATE = Path(__file__).with_name("card.md.j2")
USUAL_GAMMA = 3  # draft length where no report has one
DISTILLED = label("tuned")


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
    """The hashes of the draft's checkpoints: full-vocabulary, and trimmed-vocabulary if any."""
    hashes = (weights_sha256(str(form)) for form in (run / "draft", run / "draft" / "compact"))
    return {sha for sha in hashes if sha is not None}


def write_card(
    folder: Path, run: Path, reports: Sequence[Report], publication: Publication = Publication()
) -> None:
    """Write the model card (README.md) of the run's draft to the folder, engines' reports first.

    Raises UserError for a recipe or a provenance that is missing or broken.
    """
    recipe = build_recipe(read_yaml(run / "recipe.yaml"))
    reports = sorted(reports, key=lambda report: report.engine == REFERENCE)
    weights, spec, hub_id = draft_weights(run), recipe.target, recipe.target_hub_id
    name = publication.name.rpartition("/")[2]
    target = f"{name}-target" if in_one_file(spec) else public_name(spec)
    short = short_name(spec if abridged(spec) == spec else hub_id or spec)
    base_model = recipe.draft or hub_id or spec
    gamma = served_gamma(reports, weights)
    try:
        method = recipe.draft_sample_method
        drafting = speculation(publication.name, gamma, run / "draft", False, method)
        vllm = shlex.join(["vllm", "serve", target, *drafting])
    except ServerError as error:
        vllm = f"# vLLM does not start with it: {error}"
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model if is_hub_id(base_model) else None,
            license=publication.licence,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=[
                *("speculative-decoding", "draft-model", "draftsmith"),
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
        trimmed=(run / "draft" / "compact").is_dir(),
        in_engines=reports[0].engine != REFERENCE,
        started=recipe.draft and abridged(public_name(recipe.draft)),
        train_prompts=public_name(recipe.train_prompts),
        eval_prompts=public_name(reports[0].prompts.source).partition("#")[0],
        asked=reports[0].prompts,
        vllm=vllm,
        gamma=gamma,
        temperature=reports[0].decoding.temperature,
        rows=[row for report in reports for row in _rows(report, weights)],
        started_twice=any(report.starts for report in reports),
        few_prompts=any(d.speedup.ci95 is None for r in reports for d in r.drafts.values()),
        acceptance=[
            f"{_shown_name(name, draft, weights)} {draft.alpha:.2f}"
            for report in reports
            for name, draft in report.drafts.items()
            if draft.alpha is not None
        ],
        limits=[line for report in reports for line in _limits(report, weights)],
        report=reports[0],
        provenance=read_json(run / "provenance.json"),
    )
    with atomic_file(folder / "README.md") as file:
        file.write(f"{card}\n")


def served_gamma(reports: Sequence[Report], weights: set[str]) -> int:
    """The draft length to serve with: the fastest one in vLLM, else the fastest one measured."""
    found = [
        (report.engine == "vllm", draft.speedup.mean, draft.gamma)
        for report in reports
        for name, draft in report.drafts.items()
        if _shown_name(name, draft, weights) == DISTILLED and draft.gamma
    ]
    return max(found)[-1] if found else USUAL_GAMMA


# --- Figures


def _shown_name(name: str, draft: DraftReport, weights: set[str]) -> str:
    """The draft's name in the card, without its draft length."""
    published = draft.sha256 in weights and draft.serves_alone
    return DISTILLED if published else label(name.partition(", gamma ")[0])


def _rows(report: Report, weights: set[str]) -> Iterator[list[str]]:
    """A row of the table for each draft: names, draft length, speed-up, tokens a step, prompts."""
    for name, draft in report.drafts.items():
        length = draft.counters.mean_acceptance_length if draft.counters else draft.tau
        yield [
            measured_in(report),
            plain(_shown_name(name, draft, weights)),
            "not known" if draft.gamma is None else str(draft.gamma),
            f"{draft.speedup:.2f}",
            "not measured" if length is None else f"{length:.2f}",
            str(draft.speedup.n),
        ]


def _limits(report: Report, weights: set[str]) -> Iterator[str]:
    """Sentences on machine, output check, concurrency, and settings without a speed-up."""
    engine, decoding = measured_in(report), report.decoding
    yield (
        f"Measured in {engine} on {report.device}, {report.dtype}, temperature "
        f"{decoding.temperature:g}, up to {decoding.max_new_tokens} new tokens, one request at a "
        "time. Measure it again on your machine."
    )
    for name, draft in report.drafts.items():
        if _shown_name(name, draft, weights) != DISTILLED:
            continue
        check = draft.lossless
        length = f" at draft length {draft.gamma}" if draft.gamma else ""
        counts = (
            f"{check.prompts} greedy outputs with and without the draft: {check.identical} exact "
            f"matches, {check.tie_divergences} near-tie divergences, {check.unexplained} mismatches"
        )
        yield f"Output check in {engine}{length}: {counts}."
        if draft.speedup.bounds[0] <= 1:
            yield f"In {engine}{length} no speed-up is shown: {draft.speedup:.2f}."
        for point in draft.by_load:
            yield (f"In {engine}{length}, {point.load}: speed-up {point.speedup:.2f}.")


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
    return next(iter(stated.values())), f"as stated by {' and '.join(stated)}"


def _stated_licence(spec: str) -> str | None:
    """The licence in a checkpoint's card or a GGUF file's metadata; None where there is none."""
    path = Path(spec).expanduser()
    if in_one_file(spec):
        stated = gguf_reader(resolve_file(spec)).get_field("general.license")
        return None if stated is None else str(stated.contents())
    if path.is_dir() and not (path / "README.md").is_file():
        return None
    try:
        card = ModelCard.load(path / "README.md" if path.is_dir() else spec)
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, ConnectionError):
        return None  # `unmet_conditions` asks for it
    licence: str | None = card.data.license
    return licence
