"""The model card of a published draft: what the run's report says, and what was found since."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from align.sources import read_json, split_adapter
from distill.models import HEADS
from distill.recipe import read_yaml
from distill.reload import OWN_IDS, Reloaded
from eval.decoding.adapters import BASE, CONFIG, WEIGHTS
from eval.engines.environments import ENGINES
from eval.engines.installed import serve_command
from eval.engines.server import ServerError
from eval.measuring.intervals import Measured
from eval.reporting.report import DraftReport, Report
from eval.reporting.tables import DEFINITIONS, Table, gamma_text, shown, size, tables

TEMPLATE = Path(__file__).with_name("card.md.j2")
TABLES = ("Acceptance by position", "By category")  # of the report, which the card repeats
UNTUNED = "untuned"
GGUF_SERVED = "q8_0"  # the kind that llama.cpp is checked with
USUAL_GAMMA = 3  # where the report knows none

FormsFound = dict[str, tuple[Path, Reloaded | str]]  # by name: its place, and what it was found
EnginesFound = dict[str, Report | str]  # by name: its report, or why there is none


@dataclass(frozen=True)
class Found:
    """What a card says beyond the run's own report.

    unmet: what a publication should have and this one has not. left_out: forms, and why. name: the
    folder that the card's commands are for. repo_id: where the draft is on the Hub.
    """

    licence: str | None = None
    licence_source: str = "not looked up yet"
    unmet: list[str] = field(default_factory=list)
    forms: FormsFound = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    engines: EnginesFound = field(default_factory=dict)
    name: str = "draft"
    repo_id: str | None = None


def model_card(run: Path, report: Report, found: Found) -> str:
    """The model card (README.md) of the run's draft.

    Raises ValueError for a recipe or a provenance that is missing or broken.
    """
    recipe, check = read_yaml(run / "recipe.yaml"), read_json(run / "vocab_check.json")
    name, draft = report.tuned
    spec, base = str(recipe["target"]), recipe.get("draft")
    domain = str(recipe.get("domain", "")).strip()
    one_file, own_ids = in_one_file(spec), check["used"] in OWN_IDS
    exported = one_file or split_adapter(spec)[1] is not None  # nobody else can name it
    target = f"{found.name}-target" if exported else public_name(spec)
    published = {key: one for key, one in report.drafts.items() if key != UNTUNED}
    numbers = _numbers(report, name, draft)
    tags = ["speculative-decoding", "draft-model", "draftsmith"]
    hub_id = recipe.get("target_hub_id")
    base_model = str(base or hub_id or spec)
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base_model if is_hub_id(base_model) else None,
            license=found.licence,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=tags + [re.sub(r"\W+", "-", domain).lower()] * bool(domain),
            model_name=f"{short_name(spec)}-draft",
            eval_results=[
                *(_result(report, label, value) for label, value, _ in numbers),
                *_engine_results(found.engines),
            ],
            target=public_name(spec),
        ),
        template_path=str(TEMPLATE),
        found=found,
        short=short_name(spec),
        target=target,
        target_source=public_name(spec),
        target_hub_id=hub_id,
        target_gguf=None if one_file else f"{short_name(spec)}-f16.gguf",
        base=public_name(str(started)) if (started := base or recipe.get("base")) else None,
        quantised=report.target_quantization,
        domain=domain,
        report=report,
        draft=draft,
        numbers=numbers,
        looked_up=_looked_up(report, name),
        gamma=gamma_of(report),
        kind=recipe.get("drafter"),
        heads=recipe.get("drafter") in HEADS,
        vllm=_vllm_command(target, found.name, gamma_of(report), own_ids, run / "draft"),
        llama_cpp=serve_command(
            "llama.cpp",
            f"{target}/{short_name(spec)}.gguf" if one_file else f"{short_name(spec)}-f16.gguf",
            f"{found.name}/gguf/draft-{GGUF_SERVED}.gguf",
            gamma_of(report),
        ),
        openvino=serve_command("openvino", f"{target}-ir", f"{found.name}-ir", gamma_of(report)),
        definitions={key: DEFINITIONS[key] for key in ("alpha", "tau", "speed-up")},
        tables=[
            *(_forms_table(found), _engine_table(found.engines)),
            *tables(report.model_copy(update={"drafts": published, "gain": []})),
        ],
        shown_tables=TABLES,
        check=check,
        own_ids=own_ids,
        train_prompts=public_name(str(recipe.get("train_prompts", "the recipe"))),
        overlap=overlap_of(run, report),
        eval_prompts=public_name(report.prompts.source),
        recipe_name=recipe.get("name") or "a recipe of its own",
        provenance=read_json(run / "provenance.json"),
        provenance_sha256=hashlib.sha256((run / "provenance.json").read_bytes()).hexdigest(),
    )
    return f"{card}\n"


def adapter_card(run: Path, report: Report, found: Found, adapter: Path) -> str:
    """The card of an adapter that is published alone."""
    recipe = read_yaml(run / "recipe.yaml")
    name, draft = report.tuned
    spec, domain = str(recipe["target"]), str(recipe.get("domain", "")).strip()
    base = str(read_json(adapter / CONFIG)["base_model_name_or_path"])
    measured = found.forms["adapter"][1]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=base if is_hub_id(base) else None,
            license=found.licence,
            library_name="peft",
            pipeline_tag="text-generation",
            tags=["speculative-decoding", "draft-model", "draftsmith", "lora"],
            eval_results=[
                _result(report, label, n) for label, n, _ in _numbers(report, name, draft)
            ],
            model_name=f"{short_name(spec)}-draft-adapter",
        ),
        template_path=str(TEMPLATE.with_name("adapter_card.md.j2")),
        found=found,
        short=short_name(spec),
        target=public_name(spec),
        base=base,
        base_sha256=read_json(adapter / BASE)["base_sha256"],
        domain=domain,
        bytes=(adapter / WEIGHTS).stat().st_size,
        again=measured if isinstance(measured, str) else f"alpha {shown(measured.alpha, '.3f')}",
        report=report,
        eval_prompts=public_name(report.prompts.source),
        numbers=_numbers(report, name, draft),
    )
    return f"{card}\n"


def overlap_of(run: Path, report: Report) -> float | None:
    """Training prompts that (nearly) equal evaluation prompts, of the report's or the run's own."""
    known = report.prompts.overlap_with_training
    made_by = read_json(run / "provenance.json")
    same = made_by.get("hashes", {}).get("eval_prompts") == report.prompts.sha256
    if known is None and same and "overlap" in made_by:
        return float(made_by["overlap"]["exact"] + made_by["overlap"]["near"])
    return known


def gamma_of(report: Report) -> int:
    """The draft length that the card names, and that engines are checked with."""
    draft = report.tuned[1]
    return (draft.payoff.best_gamma if draft.payoff else draft.gamma) or USUAL_GAMMA


def _vllm_command(target: str, draft: str, gamma: int, own_ids: bool, folder: Path) -> str:
    try:
        command = serve_command("vllm", target, draft, gamma, folder)
    except ServerError as error:
        return f"# vLLM does not start with it: {error}"
    own = '{"use_heterogeneous_vocab": true, '  # greedily only
    return command.replace("{", own, 1) if own_ids else command


def _numbers(report: Report, name: str, draft: DraftReport) -> list[tuple[str, Measured, str]]:
    """What the draft is worth: (label, number, unit)."""
    gamma = gamma_text(draft.gamma, draft.gamma_policy)
    found = [
        ("alpha", draft.alpha, ""),
        (f"tau (gamma {gamma})", draft.tau, ""),
        ("speed-up", draft.speedup, "x"),
        *((f"gain of alpha over `{g.over}`", g.alpha, "") for g in report.gain if g.draft == name),
    ]
    return [(label, value, unit) for label, value, unit in found if value]


def _looked_up(report: Report, name: str) -> list[tuple[str, Measured, str]]:
    """The same of the draft behind prompt lookup, where the run measured it."""
    both = report.drafts.get(f"{name}+lookup")
    if both is None:
        return []
    numbers = _numbers(report, "", both)
    return [(f"{label}, looked up first", value, unit) for label, value, unit in numbers]


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
        metric_args={"ci95": [round(end, 4) for end in value.ci95], "n": value.n},
    )


def _engine_results(engines: EnginesFound) -> list[EvalResult]:
    return [
        _result(one, f"speed-up in {name}", one.last[1].speedup)
        for name, one in engines.items()
        if isinstance(one, Report)
    ]


def _forms_table(found: Found) -> Table:
    rows = []
    for name, (path, one) in found.forms.items():
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        weights = size(sum(file.stat().st_size for file in files))
        if isinstance(one, str):
            rows.append([name, weights, one, ""])
            continue
        mass = "" if one.dropped_mass is None else f"{one.dropped_mass:.3%}"
        rows.append([name, weights, shown(one.alpha, ".3f"), mass])
    rows += [[name, "", f"not made: {reason}", ""] for name, reason in found.left_out.items()]
    return Table("Forms", ["form", "weights", "alpha, loaded again", "q on dropped ids"], rows)


def _engine_table(engines: EnginesFound) -> Table:
    header = ["engine", "version", "dtype", "gamma", "speed-up", "accepted", "greedy text"]
    rows = []
    for name, one in engines.items():
        if isinstance(one, str):
            rows.append([name, "", "", "", f"not measured: {one}", "", ""])
            continue
        draft = one.last[1]
        rows.append(
            [
                name,
                engine_version(name, one),
                one.dtype,
                gamma_text(draft.gamma, draft.gamma_policy),
                f"{shown(draft.speedup)}",
                _accepted(draft),
                _verdict(draft),
            ]
        )
    return Table("Engines", header, rows)


def _accepted(draft: DraftReport) -> str:
    if draft.accepted_over_drafted is not None:
        return f"{draft.accepted_over_drafted.mean:.0%} of the drafted"
    if draft.tau is not None:
        return f"tau {shown(draft.tau)}"
    if draft.counters is not None:
        return f"{draft.counters.acceptance_rate.mean:.0%} of the drafted"
    return "not told"


def _verdict(draft: DraftReport) -> str:
    ledger = draft.lossless
    ties = f", {ledger.tie_divergences} at a tie" if ledger.tie_divergences else ""
    changed = f", {ledger.unexplained} UNEXPLAINED" if ledger.unexplained else ""
    return f"{ledger.identical} of {ledger.prompts} identical{ties}{changed}"


def engine_version(name: str, report: Report) -> str:
    """The version of an engine as its report has it, else as it is installed by us."""
    return str(report.provenance.get(name) or ENGINES[name].version)


# --- Names that tell others nothing about the machine they were made on ---


def is_hub_id(spec: str) -> bool:
    """Whether `spec` reads as ORG/NAME on the Hub and not as a path or a `pypi:` file."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", spec)) and not Path(spec).exists()


def public_name(spec: str) -> str:
    """Hub ids and `pypi:` files stay as they are; of a local path only the last part is kept."""
    base, adapter = split_adapter(spec)
    if adapter is not None:
        return f"{public_name(base)}+adapter:{adapter.name}"
    if is_hub_id(spec) or spec.startswith("pypi:"):
        return spec
    return Path(spec).name


def short_name(spec: str) -> str:
    """The last part of a spec, without the checksum and the ending of a file."""
    base, adapter = split_adapter(spec)
    if adapter is not None:
        return f"{short_name(base)}-{adapter.name}"
    return Path(spec.partition("#")[0]).name.removesuffix(".gguf")


def in_one_file(spec: str) -> bool:
    """Whether a target is a GGUF file, in a wheel or here, which most engines cannot name."""
    if split_adapter(spec)[1] is not None:
        return False
    return spec.startswith("pypi:") or Path(spec).expanduser().is_file()
