"""Publish the draft of a finished run: export it, load it again, measure, and only then announce.

python -m distill.publish outputs/code                              # check it, write its card
python -m distill.publish outputs/code --to drafts/code-draft       # every form in one folder
python -m distill.publish outputs/code --to drafts/code-draft --engines transformers,vllm
python -m distill.publish outputs/code-lora --adapter --to adapters/code    # without its base
python -m distill.publish outputs/code --push_to_hub ORG/NAME       # to the Hub, private

Without --to, what goes to the Hub or into engines is exported to the run's own published/.

What is measured is kept in the run's report/ and not measured again for the same weights. Nothing
is published without a report of exactly these weights, the overlap of training and evaluation
prompts, and a licence; --force goes on, and the card says so in its first lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from dataclasses import dataclass, replace

import torch
from safetensors import SafetensorError, safe_open

from align.atomic import DiskFullError, atomic_file, atomic_folder
from align.sources import load_model, read_json, resolve_checkpoint, resolve_file, split_adapter
from distill.adapters import KEPT
from distill.card import (
    EnginesFound,
    FormsFound,
    Found,
    adapter_card,
    in_one_file,
    model_card,
    overlap_of,
)
from distill.forms import export_adapter, export_forms, export_target, forms_of
from distill.hub import push_folder
from distill.licence import derived_licence
from distill.models import HEADS, OURS
from distill.recipe import read_yaml
from distill.reload import Form, reload_forms
from distill.verify import form_for, kept_report, verify
from eval.decoding.target import weights_sha256
from eval.engines.environments import NAMES, engine_name
from eval.reporting.report import Report, read_report

RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
REPORT = Path("report", "report.json")
PUBLISHED = "published"  # in the run, what goes to the Hub where no other folder is named


class PublishError(ValueError):
    """The run cannot be published as it is."""


def check_run(run_folder: Path | str) -> Report:
    """The run's report, once draft, recipe and provenance are found to be whole.

    Raises `PublishError` (or another ValueError) naming what is missing or broken.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give the output folder of a finished run")
    check_draft(folder / "draft")
    read_yaml(_found(folder / RECIPE))
    for name in (PROVENANCE, "vocab_check.json"):
        read_json(_found(folder / name))
    report = read_report(folder / REPORT)
    for field in () if report.engine == "vllm" else ("alpha", "memory", "payoff"):
        # the card must have them; servers do not tell them
        if getattr(report.tuned[1], field) is None:
            raise PublishError(
                f"{folder / REPORT} has no {field}, which the model card needs: evaluate the run "
                f"with python -m eval.run --run {folder}"
            )
    return report


def check_draft(draft: Path) -> None:
    """Raise ValueError unless `draft` is a whole checkpoint: config, tokenizer, safetensors."""
    for name in ("config.json", "tokenizer.json"):
        read_json(_found(draft / name))
    index = draft / "model.safetensors.index.json"
    shards = {"model.safetensors"}
    if index.exists():
        shards = set(read_json(index)["weight_map"].values())
    for path in (_found(draft / shard) for shard in sorted(shards)):
        try:
            with safe_open(path, framework="numpy") as weights:  # compares header and file size
                names = list(weights.keys())
        except SafetensorError as error:
            raise PublishError(f"{path} is broken ({error}): start the run again") from None
        if not names:
            raise PublishError(f"{path} holds no tensor: start the run again")
    pickles = sorted(path.name for path in draft.rglob("*") if path.suffix in (".bin", ".pt"))
    if pickles:
        raise PublishError(
            f"{draft} holds {pickles[0]}, a pickle that can run code where it is loaded: publish "
            f"safetensors only and remove it"
        )


def _found(path: Path) -> Path:
    if not path.is_file():
        raise PublishError(
            f"{path} is missing: the run did not finish (start it again), or this is not the "
            f"output folder of a run"
        )
    return path


# --- The gate


def unmet_conditions(run: Path, report: Report, licence: str | None, why: str) -> list[str]:
    """What a publication needs and this run lacks, a sentence each with its remedy."""
    unmet = []
    draft, again = report.tuned[1], "python -m eval.run --run DIR"
    folder = run / "draft"
    own = [weights_sha256(str(form)) for form in (folder, folder / "compact")]
    if draft.sha256 is None:
        unmet.append(f"The report does not name the weights that it measured: run {again}.")
    elif draft.sha256 not in own:
        unmet.append(
            f"The report is of other weights (sha256 {draft.sha256[:12]}…) than the draft's: run "
            f"{again}."
        )
    if overlap_of(run, report) is None:
        unmet.append(
            "How far training and evaluation prompts overlap is not known: only a training run "
            "finds it out."
        )
    if licence is None:
        unmet.append(f"There is no licence ({why}): give it with --license ID, as apache-2.0.")
    return unmet


# --- The command


@dataclass(frozen=True)
class Plan:
    """What is to be published, and where: the command line's arguments.

    to: a new folder. engines: to verify it in. licence: None takes the one it derives from.
    adapter: publish the adapter alone. base: the name of what it is for, None takes the run's.
    """

    run: Path
    to: Path | None = None
    engines: tuple[str, ...] = ()
    push_to_hub: str | None = None
    public: bool = False
    force: bool = False
    licence: str | None = None
    adapter: bool = False
    base: str | None = None


def write_card(run_folder: Path | str) -> Path:
    """Write the card of a run that was just measured into its draft folder; return its path."""
    run = Path(run_folder)
    return _write(run / "draft", model_card(run, check_run(run), Found()))


def publish(plan: Plan) -> None:
    """Export, load again, measure, verify; then announce, and push.

    Raises ValueError for a run that is not whole, a condition that is not met, a form that is not
    what was measured, and a Hub that does not take it. But for the last, nothing has appeared then.
    """
    run, report = plan.run, check_run(plan.run)
    recipe = read_yaml(run / RECIPE)
    licence, source = plan.licence, "as its publisher states"
    if licence is None:
        base = recipe.get("draft")
        licence, source = derived_licence([recipe["target"], *([] if base is None else [base])])
    unmet = unmet_conditions(run, report, licence, source)
    about = Found(licence=licence, licence_source=source)
    if plan.to is None and plan.push_to_hub is None and not plan.engines:
        check_and_describe(run, report, about)
        for line in unmet:
            print(f"Not to be published yet: {line}")
        return
    if unmet and not plan.force:
        raise PublishError(
            "\n- ".join(["not to be published yet; --force does so, and its card says why", *unmet])
        )
    to = plan.to or run / PUBLISHED
    _check_free(to, run / "draft" / KEPT if plan.adapter else run / "draft", run)
    with atomic_folder(to) as folder:
        found = replace(about, unmet=unmet)
        if plan.adapter:
            found = replace(found, name=to.name, repo_id=plan.push_to_hub)
            found = replace(
                found, forms=_measured(run, report, export_adapter(run, folder, plan.base))
            )
            card = adapter_card(run, report, found, folder)
        else:
            forms, left_out = export_forms(run, folder)
            found = replace(found, forms=_measured(run, report, forms), left_out=left_out)
            card = model_card(run, report, _verified(plan, report, folder, to, found))
        _write(folder, card)
    print(f"draft: {to}")
    if plan.push_to_hub is not None:
        print(f"pushed: {push_folder(to, plan.push_to_hub, plan.public)}")


def check_and_describe(run: Path, report: Report, about: Found) -> None:
    """Load the run's own draft again, and write its card into `draft/`."""
    kind = read_yaml(run / RECIPE).get("drafter")
    measured = _measured(run, report, forms_of(run / "draft", kind))
    found = replace(about, forms=measured, engines=_kept(run, report, run / "draft"))
    print(f"model card: {_write(run / 'draft', model_card(run, report, found))}")


def _measured(run: Path, report: Report, forms: list[Form]) -> FormsFound:
    """What each form was found to be; of a served target's draft, only that it loads."""
    if report.tuned[1].alpha is not None:
        reloaded = reload_forms(run, report, forms)
        return {form.name: (form.path, reloaded[form.name]) for form in forms}
    load_model(str(run / "draft"), torch.bfloat16)
    reason = "not measured: the target is behind a server"
    print(f"The full checkpoint loads; its alpha is {reason}")
    return {form.name: (form.path, reason) for form in forms}


def _kept(run: Path, report: Report, folder: Path) -> EnginesFound:
    """What engines were found to do before, of those that were not asked for now."""
    found: EnginesFound = {}
    for name in NAMES:
        kept = kept_report(name, run, report, weights_sha256(str(form_for(name, folder))))
        found[name] = kept or f"not asked for (--engines {name})"
    return found


def _verified(plan: Plan, report: Report, folder: Path, to: Path, found: Found) -> Found:
    """With the engines' reports, and the names that the card's commands use."""
    spec = report.target
    target_gguf = resolve_file(spec) if in_one_file(spec) else None
    engines = _kept(plan.run, report, folder)
    kind = read_yaml(plan.run / RECIPE).get("drafter")
    for name in plan.engines:
        if kind in HEADS and (name != "vllm" or kind in OURS):
            engines[name] = f"it loads no draft of kind {kind}"
            print(f"{name}: not measured, {engines[name]}")
            continue
        target = resolve_checkpoint(spec)
        engines[name] = verify(name, plan.run, report, folder, target, target_gguf)
    name = to.name if plan.push_to_hub is None else plan.push_to_hub.partition("/")[2]
    if plan.to is not None:
        name = to.name
        if target_gguf is not None or split_adapter(spec)[1] is not None:
            export_target(spec, to.parent / f"{name}-target")
    return replace(found, engines=engines, name=name, repo_id=plan.push_to_hub)


def _check_free(to: Path, draft: Path, run: Path) -> None:
    """Raise PublishError where `to` holds anything but an earlier export of this draft."""
    earlier = weights_sha256(str(to)) == weights_sha256(str(draft))
    free = not to.exists() or (to.is_dir() and not any(to.iterdir()))
    if not (free or earlier or to == run / PUBLISHED):
        raise PublishError(f"{to} exists already: give the name of a new folder, or remove it")


def _write(folder: Path, card: str) -> Path:
    with atomic_file(folder / "README.md") as file:
        file.write(card)
    return folder / "README.md"


def _engines(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(map(engine_name, text.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(NAMES)}, none")
    return names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m distill.publish", description="Publish the draft of a finished run."
    )
    parser.add_argument("run", metavar="DIR", nargs="?", help="the output folder of a finished run")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="export to this new folder")
    parser.add_argument(
        "--engines",
        type=_engines,
        default=(),
        metavar="NAME,…",
        help=f"verify it there: {','.join(NAMES)} or none (default); minutes each",
    )
    parser.add_argument("--push_to_hub", metavar="ORG/NAME", help="upload it to the Hub, private")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter alone, for who has its base"
    )
    parser.add_argument("--base", metavar="NAME", help="with --adapter: the base as published")
    parser.add_argument("--public", action="store_true", help="visible to all on the Hub")
    parser.add_argument("--license", metavar="ID", help="default: that of target and draft")
    parser.add_argument("--force", action="store_true", help="publish although not all is there")
    parser.add_argument(
        "--target", metavar="T", help="export only this target, a pypi: or GGUF file"
    )
    args = parser.parse_args(argv)
    if (args.run is None) == (args.target is None) or (args.target and args.to is None):
        parser.error("give the output folder of a run, or --target T --to FOLDER")
    if args.public and args.push_to_hub is None:
        parser.error("--public is of --push_to_hub")
    if args.adapter and args.to is None and args.push_to_hub is None:
        parser.error("--adapter needs --to FOLDER or --push_to_hub ORG/NAME")
    if args.adapter and args.engines:
        parser.error("--engines load whole drafts; leave --adapter out to verify the merged one")
    if args.base is not None and not args.adapter:
        parser.error("--base is of --adapter")
    try:
        if args.target is not None:
            export_target(args.target, args.to)
            print(f"target: {args.to}")
        else:
            plan = Plan(
                Path(args.run),
                args.to,
                args.engines,
                args.push_to_hub,
                args.public,
                args.force,
                args.license,
                args.adapter,
                args.base,
            )
            publish(plan)
    except (ValueError, DiskFullError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
