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
import json
import re
import shutil
from typing import Any

import yaml
from safetensors import SafetensorError, safe_open

from align.atomic import DiskFullError, atomic_file, atomic_folder
from eval.measuring.metrics import Measured
from eval.reporting.report import read_report
from eval.reporting.text import DEFINITIONS, gamma_text

RECIPE = "recipe.yaml"
PROVENANCE = "provenance.json"
REPORT = Path("report", "report.json")


class PublishError(ValueError):
    """The run cannot be published as it is."""


def check_run(run_folder: Path | str) -> dict[str, Any]:
    """The run's report, once draft, recipe and provenance are found to be whole.

    Raises `PublishError` (or eval.reporting.report.ReportError) naming what is missing or broken.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise PublishError(f"{folder} is no folder: give the output folder of a finished run")
    check_draft(folder / "draft")
    _recipe(folder)
    _provenance(folder)
    return read_report(folder / REPORT)


def check_draft(draft: Path) -> None:
    """Raise `PublishError` unless `draft` is a whole checkpoint: config, tokenizer, safetensors."""
    for name in ("config.json", "tokenizer.json"):
        _json(draft / name)
    index = draft / "model.safetensors.index.json"
    if index.exists():
        shards = sorted(set(_json(index)["weight_map"].values()))
    else:
        shards = ["model.safetensors"]
    for shard in shards:
        path = draft / shard
        if not path.is_file():
            raise PublishError(f"{path} is missing: the run did not finish, start it again")
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


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PublishError(f"{path} is missing: the run did not finish, start it again") from None
    except ValueError as error:
        raise PublishError(f"{path} is not whole JSON ({error}): start the run again") from None
    if not isinstance(value, dict):
        raise PublishError(f"{path} should hold a JSON object: start the run again")
    return value


def _recipe(folder: Path) -> dict[str, Any]:
    path = folder / RECIPE
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PublishError(f"{path} is missing: this is not the output folder of a run") from None
    except yaml.YAMLError as error:
        raise PublishError(f"{path} is not whole YAML ({error}): start the run again") from None
    if not isinstance(recipe, dict):
        raise PublishError(f"{path} should hold keys and values: start the run again")
    return recipe


def _provenance(folder: Path) -> str:
    """sha256 of provenance.json, which must be whole."""
    _json(folder / PROVENANCE)
    return hashlib.sha256((folder / PROVENANCE).read_bytes()).hexdigest()


# ---------------------------------------------------------------------------------------------
# The card


def model_card(run_folder: Path | str) -> str:
    """The model card (README.md) of the run's draft, from its report, recipe and provenance."""
    folder = Path(run_folder)
    report, recipe = read_report(folder / REPORT), _recipe(folder)
    name, draft = list(report["drafts"].items())[-1]
    target = public_name(report["target"])
    fixed = draft["payoff"]["best_gamma"]  # by the report's alpha and step costs
    temperature = report["decoding"]["temperature"]
    domain = str(recipe.get("domain", "")).strip()
    purpose = f" on {domain} text" if domain else ""
    changed = draft["lossless"]["unexplained"]

    front = {
        **({"base_model": target} if is_hub_id(report["target"]) else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": [
            "speculative-decoding",
            "draft-model",
            "draftsmith",
            *([domain] if domain else []),
        ],
    }
    sections = [
        "---\n" + yaml.safe_dump(front, sort_keys=False).strip() + "\n---",
        f"# A draft model for {target}",
        f"This small model drafts tokens for `{target}`{purpose}, for speculative decoding: it "
        f"guesses a few tokens, the target checks them in one call and keeps what it would have "
        f"said itself. The output is the target's; only the speed changes. It is not meant to be "
        f"used alone.",
        "## What it is worth",
        _numbers(report, name, draft),
        draft["payoff"]["verdict"],
        *_list("Read these first:", report["warnings"]),
        "## How to load it",
        *_own_ids(draft),
        "With transformers (assisted generation):",
        _code(
            "python",
            f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}")
draft = AutoModelForCausalLM.from_pretrained("PATH_OR_ID_OF_THIS_DRAFT")
# The defaults draft 20 tokens and stop on low confidence; this is the best fixed length.
draft.generation_config.num_assistant_tokens = {fixed}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0

inputs = tokenizer("...", return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, {_sampling(temperature)})
""",
        ),
        "With vLLM:",
        _code(
            "bash",
            f"vllm serve {target} --speculative-config "
            + "'"
            + json.dumps(
                {
                    "method": "draft_model",
                    "model": "PATH_OR_ID_OF_THIS_DRAFT",
                    "num_speculative_tokens": fixed,
                }
            )
            + "'",
        ),
        *_list(
            "",
            [
                f"`{report['target']}` is a file on the package index; load the target from a "
                f"copy of it."
            ]
            if report["target"].startswith("pypi:")
            else [],
        ),
        "## Limits",
        *_list(
            "",
            [
                f"Made for `{target}` as it was served in the measurement, chat template and "
                f"temperature {temperature} included. A fine-tuned or otherwise quantised target "
                f"needs its own draft.",
                "Measured at batch size 1. At large batches the target is no longer bound by "
                "memory traffic, and speculation can cost more than it saves.",
                f"Outside its domain it is accepted less; at alpha below "
                f"{_break_even(draft)} it slows the target down.",
                f"The speed-up is of engine {report['engine']} on {report['device']}, "
                f"{report['dtype']}; measure it again on yours.",
                *(
                    [f"NOT LOSSLESS in the measurement: {changed} prompts changed. Do not serve."]
                    if changed
                    else []
                ),
            ],
        ),
        "## Data and licence",
        *_list(
            "",
            [
                f"Trained on answers of `{target}` to prompts of "
                f"`{public_name(str(recipe.get('train_prompts', 'the recipe')))}`.",
                f"Evaluated on {report['prompts']['n']} prompts of "
                f"`{public_name(str(report['prompts']['source']))}` (sha256 "
                f"`{report['prompts']['sha256']}`); overlap with the training prompts: "
                f"{report['prompts']['overlap_with_training']}.",
                "The weights derive from the target or from the draft that the run started with, "
                "and from the target's answers: the licences of both, and the terms of the prompt "
                "data, apply. No licence is stated here on their behalf; add `license:` to this "
                "card's head before publishing it.",
            ],
        ),
        "## Provenance",
        f"Made with draftsmith; sha256 of the run's provenance.json: `{_provenance(folder)}`.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _numbers(report: dict[str, Any], name: str, draft: dict[str, Any]) -> str:
    def row(label: str, value: Measured, unit: str = "") -> str:
        low, high = value["ci95"]
        return f"| {label} | {value['mean']:.2f}{unit} | {low:.2f} to {high:.2f} | {value['n']} |"

    lossless = draft["lossless"]
    rows = [
        "| | mean | 95% interval | prompts |",
        "| --- | --- | --- | --- |",
        row("alpha", draft["alpha"]),
        row(f"tau (gamma {gamma_text(report['decoding'])})", draft["tau"]),
        row("speed-up", draft["speedup"], "x"),
    ]
    rows += [
        row(f"gain of alpha over `{entry['over']}`", entry["alpha"])
        for entry in report["gain"]
        if entry["draft"] == name
    ]
    return (
        "\n".join(rows)
        + f"\n\nMemory: {draft['memory']['overhead']:.1%} of the target's, in the "
        + f"{draft['form']} form that was measured. Greedy check: {lossless['identical']} of "
        + f"{lossless['prompts']} prompts identical, {lossless['tie_divergences']} part at a tie, "
        + f"{lossless['unexplained']} unexplained.\n\n"
        + "\n".join(f"- **{key}**: {DEFINITIONS[key]}" for key in ("alpha", "tau", "speed-up"))
    )


def _own_ids(draft: dict[str, Any]) -> list[str]:
    """What a reader must know of a draft that speaks other ids than its target."""
    if draft["vocabulary"]["strategy"] not in ("intersection", "string"):
        return []
    return [
        "**This draft has a tokenizer of its own**, so ids must be mapped. draftsmith does that "
        "without loss. transformers needs `tokenizer=` and `assistant_tokenizer=` in the call "
        "below, and vLLM `use_heterogeneous_vocab`; use both greedily only. Tune the draft with "
        "`strategy: transplant` for one that every engine loads as it is."
    ]


def _break_even(draft: dict[str, Any]) -> str:
    value = draft["payoff"]["break_even_alpha"]
    return "1" if value is None else f"{value:.2f}"


def _sampling(temperature: float) -> str:
    return "do_sample=False" if not temperature else f"do_sample=True, temperature={temperature}"


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def _list(title: str, items: list[str]) -> list[str]:
    return [title, "\n".join(f"- {item}" for item in items)] if items else []


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
