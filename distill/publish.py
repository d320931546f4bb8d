"""Make the draft of a finished run loadable by others, with a model card made from its report.

python -m distill.publish outputs/code                          # write the card into draft/
python -m distill.publish outputs/code --to drafts/code-draft   # and copy draft/ there
python -m distill.publish outputs/code --push_to_hub ORG/NAME   # or upload it to the Hub
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import hashlib
import re
import shutil

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open

from align.atomic import DiskFullError, atomic_file, atomic_folder
from align.sources import read_json
from distill.recipe import read_yaml
from eval.reporting.report import DraftReport, Measured, Report, read_report
from eval.reporting.tables import DEFINITIONS, gamma_text, tables

RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
REPORT = Path("report", "report.json")
TEMPLATE = Path(__file__).with_name("card.md.j2")
TABLES = ("Acceptance by position", "By category")  # of the report, which the card repeats


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
    read_json(_found(folder / PROVENANCE))
    return _report(folder)


def _report(folder: Path) -> Report:
    """The report, which must have what the card says, or come from servers, which do not tell."""
    report = read_report(folder / REPORT)
    for field in () if report.engine == "vllm" else ("memory", "payoff"):
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


# ---------------------------------------------------------------------------------------------
# The card


def model_card(run_folder: Path | str) -> str:
    """The model card (README.md) of the run's draft, from its report, recipe and provenance.

    Raises `PublishError`, or another ValueError, for what is missing or broken.
    """
    folder = Path(run_folder)
    report, recipe = _report(folder), read_yaml(folder / RECIPE)
    name, draft = report.tuned
    domain = str(recipe.get("domain", "")).strip()
    target = public_name(report.target)
    numbers = _numbers(report, name, draft)
    card = ModelCard.from_template(
        ModelCardData(
            base_model=target if is_hub_id(report.target) else None,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["speculative-decoding", "draft-model", "draftsmith", *filter(None, [domain])],
            model_name=f"{Path(target).name}-draft",
            eval_results=[_result(report, label, value) for label, value, _ in numbers],
        ),
        template_path=str(TEMPLATE),
        target=target,
        domain=domain,
        report=report,
        draft=draft,
        numbers=numbers,
        gamma=draft.payoff.best_gamma if draft.payoff else draft.gamma,
        definitions={key: DEFINITIONS[key] for key in ("alpha", "tau", "speed-up")},
        tables=[table for table in tables(report) if table.title in TABLES],
        train_prompts=public_name(str(recipe.get("train_prompts", "the recipe"))),
        eval_prompts=public_name(report.prompts.source),
        provenance_sha256=hashlib.sha256((folder / PROVENANCE).read_bytes()).hexdigest(),
    )
    return f"{card}\n"


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


def is_hub_id(spec: str) -> bool:
    """Whether `spec` reads as ORG/NAME on the Hub and not as a path or a `pypi:` file."""
    return bool(re.fullmatch(r"[\w][\w.-]*/[\w.-]+", spec)) and not Path(spec).exists()


def public_name(spec: str) -> str:
    """A name for a model or data set that tells others nothing about the machine it was made on.

    Hub ids and `pypi:` files stay as they are; of a local path only the last part is kept.
    """
    if is_hub_id(spec) or spec.startswith("pypi:"):
        return spec
    return Path(spec).name


# ---------------------------------------------------------------------------------------------
# The command


def write_card(run_folder: Path | str) -> Path:
    """Write the model card into the run's draft folder, and return its path."""
    card = model_card(run_folder)
    path = Path(run_folder) / "draft" / "README.md"
    with atomic_file(path) as file:
        file.write(card)
    return path


def copy_draft(run_folder: Path | str, to: Path | str) -> None:
    """Copy the draft to the folder `to`, which appears whole or not at all.

    Raises `PublishError` where `to` exists and is not empty.
    """
    to = Path(to)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise PublishError(f"{to} exists already: give the name of a new folder, or remove it")
    to.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(to) as folder:
        shutil.copytree(Path(run_folder) / "draft", folder, dirs_exist_ok=True)


def push_draft(run_folder: Path | str, repo_id: str) -> str:
    """Upload the draft to the Hub repository `repo_id` (made if need be) and return its address.

    Raises `PublishError` for an ill-formed name, without a login, and where the Hub is not reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    if not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", repo_id):
        raise PublishError(f"{repo_id!r} is no Hub repository: write it as ORG/NAME")
    api = HfApi()
    try:
        api.whoami()
        address = str(api.create_repo(repo_id, exist_ok=True))
        api.upload_folder(
            repo_id=repo_id, folder_path=Path(run_folder) / "draft", commit_message="Draft model"
        )
    except LocalTokenNotFoundError:
        raise PublishError(
            "not logged in to the Hub: run `hf auth login` or set HF_TOKEN"
        ) from None
    except HfHubHTTPError as error:
        raise PublishError(
            f"the Hub refused {repo_id} ({error}): check that the token may write there"
        ) from error
    except (HTTPError, ConnectionError) as error:
        raise PublishError(
            f"the Hub was not reached ({error}): publish with --to FOLDER, or go online and unset "
            f"HF_HUB_OFFLINE"
        ) from error
    return address


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m distill.publish", description="Publish the draft of a finished run."
    )
    parser.add_argument("run", metavar="DIR", help="the output folder of a finished run")
    parser.add_argument("--to", metavar="FOLDER", help="copy the draft to this new folder")
    parser.add_argument("--push_to_hub", metavar="ORG/NAME", help="upload the draft to the Hub")
    args = parser.parse_args(argv)
    try:
        check_run(args.run)
        print(f"model card: {write_card(args.run)}")
        if args.to:
            copy_draft(args.run, args.to)
            print(f"draft: {args.to}")
        if args.push_to_hub:
            print(f"pushed: {push_draft(args.run, args.push_to_hub)}")
    except (ValueError, DiskFullError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
