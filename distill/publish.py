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
from collections.abc import Sequence
from dataclasses import replace

import torch
from safetensors import SafetensorError, safe_open

from align.files import DiskFullError, atomic_file, atomic_folder
from align.sources import load_model, read_json, split_adapter
from distill.card import (
    CardFacts,
    FormResults,
    derived_licence,
    in_one_file,
    model_card,
    overlap_of,
)
from distill.forms import export_adapter, export_forms, export_target, forms_of
from distill.hub import push_folder
from distill.lora import KEPT
from distill.recipe import read_yaml
from distill.reload import Form, reload_forms
from distill.verify import in_engines
from eval.decoding.target import weights_sha256
from eval.engines.environments import NAMES, engine_name
from eval.reporting.report import Report, read_report

REPORT = Path("report", "report.json")
NEEDED = (
    "recipe.yaml",
    "provenance.json",
    "vocab_check.json",
    "draft/config.json",
    "draft/tokenizer.json",
)
PUBLISHED = "published"  # in the run, what goes to the Hub where no other folder is named


class PublishError(ValueError):
    """The run cannot be published as it is."""


def check_run(folder: Path) -> Report:
    """The report of a run, once draft, recipe and provenance are found to be whole.

    Raises `PublishError` (or another ValueError) naming what is missing or broken.
    """
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give the output folder of a finished run")
    for name in NEEDED:
        path = _present(folder / name)
        _ = read_yaml(path) if path.suffix == ".yaml" else read_json(path)
    _check_weights(folder / "draft")
    report = read_report(folder / REPORT)
    for field in () if report.engine == "vllm" else ("alpha", "memory", "payoff"):
        # the card must have them; servers do not tell them
        if getattr(report.tuned[1], field) is None:
            raise PublishError(
                f"{folder / REPORT} has no {field}, which the model card needs: evaluate the run "
                f"with python -m eval.run --run {folder}"
            )
    return report


def _check_weights(draft: Path) -> None:
    """Raise PublishError unless the weights are whole, and safetensors alone."""
    index, shards = draft / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        shards = set(read_json(index)["weight_map"].values())
    for path in (_present(draft / shard) for shard in sorted(shards)):
        try:
            with safe_open(path, framework="numpy"):  # compares header and file size
                pass
        except SafetensorError as error:
            raise PublishError(f"{path} is broken ({error}): start the run again") from None
    pickles = sorted(path.name for path in draft.rglob("*") if path.suffix in (".bin", ".pt"))
    if pickles:
        raise PublishError(
            f"{draft} holds {pickles[0]}, a pickle that can run code where it is loaded: publish "
            f"safetensors only and remove it"
        )


def _present(path: Path) -> Path:
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
    if draft.sha256 is None:
        unmet.append(f"The report does not name the weights that it measured: run {again}.")
    elif draft.sha256 not in [weights_sha256(str(form)) for form in (folder, folder / "compact")]:
        unmet.append(
            f"The report is of other weights (sha256 {draft.sha256[:12]}…) than the draft's: run "
            f"{again}."
        )
    if draft.lossless.unexplained:
        unmet.append(
            f"The draft is not lossless ({draft.lossless}): find out why in the report's tie "
            f"ledger, and measure it again: {again}."
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


def write_card(run: Path) -> None:
    """Write the card of a run that was just measured into its draft folder."""
    _write(run / "draft", model_card(run, check_run(run), CardFacts()))


def publish(
    run: Path,
    to: Path | None = None,
    engines: Sequence[str] = (),
    push_to_hub: str | None = None,
    public: bool = False,
    force: bool = False,
    licence: str | None = None,
    adapter: bool = False,
    base: str | None = None,
) -> None:
    """Export, load again, measure, verify; then announce, and push.

    to: a new folder; None of all three checks the run's own draft and writes its card. engines: to
    verify it in. licence: None takes the one it derives from. adapter: publish the adapter alone.
    base: the name of what it is for, None takes the run's. Raises ValueError for a run that is not
    whole, a condition that is not met, a form that is not what was measured, and a Hub that does
    not take it. But for the last, nothing has appeared then.
    """
    report, recipe = check_run(run), read_yaml(run / "recipe.yaml")
    source = "as its publisher states"
    if licence is None:
        started = recipe.get("draft")
        specs = [recipe["target"], *([] if started is None else [started])]
        licence, source = derived_licence(specs)
    unmet = unmet_conditions(run, report, licence, source)
    facts = CardFacts(licence=licence, licence_source=source)
    if to is None and push_to_hub is None and not engines:
        draft = run / "draft"
        forms = _measured(run, report, forms_of(draft, recipe.get("drafter")))
        facts = replace(facts, forms=forms, engines=in_engines(run, report, draft))
        print(f"model card: {_write(draft, model_card(run, report, facts))}")
        for line in unmet:
            print(f"Not to be published yet: {line}")
        return
    if unmet and not force:
        raise PublishError(
            "\n- ".join(["not to be published yet; --force does so, and its card says why", *unmet])
        )
    place, spec = to or run / PUBLISHED, recipe["target"]
    _check_free(place, run / "draft" / KEPT if adapter else run / "draft", run)
    name = place.name if to or not push_to_hub else push_to_hub.partition("/")[2]
    facts = replace(facts, unmet=unmet, name=name, repo_id=push_to_hub)
    with atomic_folder(place) as folder:
        if adapter:
            exported = export_adapter(run, folder, base)
            facts = replace(facts, adapter=folder, forms=_measured(run, report, exported))
        else:
            exported, left_out = export_forms(run, folder)
            facts = replace(facts, forms=_measured(run, report, exported), left_out=left_out)
            facts = replace(facts, engines=in_engines(run, report, folder, engines))
            if to is not None and (in_one_file(spec) or split_adapter(spec)[1] is not None):
                export_target(spec, to.parent / f"{name}-target")
        _write(folder, model_card(run, report, facts))
    print(f"draft: {place}")
    if push_to_hub is not None:
        print(f"pushed: {push_folder(place, push_to_hub, public)}")


def _measured(run: Path, report: Report, forms: list[Form]) -> FormResults:
    """What each form was found to be; of a served target's draft, only that it loads."""
    if report.tuned[1].alpha is not None:
        reloaded = reload_forms(run, report, forms)
        return {form.name: (form.path, reloaded[form.name]) for form in forms}
    load_model(str(run / "draft"), torch.bfloat16)
    reason = "not measured: the target is behind a server"
    print(f"The full checkpoint loads; its alpha is {reason}")
    return {form.name: (form.path, reason) for form in forms}


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
    add = parser.add_argument
    add("run", type=Path, metavar="DIR", nargs="?", help="the output folder of a finished run")
    add("--to", type=Path, metavar="FOLDER", help="export to this new folder")
    add(
        "--engines",
        type=_engines,
        default=(),
        metavar="NAME,…",
        help=f"verify it there: {','.join(NAMES)} or none (default); minutes each",
    )
    add("--push_to_hub", metavar="ORG/NAME", help="upload it to the Hub, private")
    add("--adapter", action="store_true", help="the adapter alone, for who has its base")
    add("--base", metavar="NAME", help="with --adapter: the base as published")
    add("--public", action="store_true", help="visible to all on the Hub")
    add("--license", dest="licence", metavar="ID", help="default: that of target and draft")
    add("--force", action="store_true", help="publish although not all is there")
    add("--target", metavar="T", help="export only this target, a pypi: or GGUF file")
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
    target = vars(args).pop("target")
    try:
        if target is None:
            publish(**vars(args))
        else:
            export_target(target, args.to)
            print(f"target: {args.to}")
    except (ValueError, DiskFullError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
