"""Publish the draft of a finished run: check it, copy it, write its model card, upload it.

python -m distill.publish outputs/code                             # check it, write its card
python -m distill.publish outputs/code --to drafts/code-draft      # a copy with a card
python -m distill.publish outputs/code --report outputs/code-vllm --to drafts/code-draft
python -m distill.publish outputs/code --push_to_hub ORG/NAME      # to the Hub, private

This command measures nothing. The card has the speeds of the reports that --report names, else of
the run's report; `python -m eval.run` has made them with the same weights.

The draft is published only if every report is of these weights, lossless, and on prompts that do
not overlap with the training prompts, and if a licence is known. --force publishes it all the same;
the first lines of the card then list the unmet conditions.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError

from align import command_line
from align.checkpoint import Checkpoint, refuse_damaged, weights_sha256
from align.command_line import Options, option
from align.errors import UserError
from align.files import atomic_folder, read_json, refuse_unwritable
from distill.card import (
    TAG,
    Publication,
    derived_licence,
    draft_weights,
    in_one_file,
    public_name,
    write_card,
)
from distill.recipe_files import read_yaml
from eval.decoding.drafters.mtp import SERVED
from eval.reporting.fields import REFERENCE, Report, read_report

# Files of an earlier push that may have no successor in this one.
OURS = ["*.safetensors", "*.safetensors.index.json", "compact/*"]


def check_files(run: Path) -> None:
    """Raise UserError where a file of the run is missing or broken."""
    if not (run / "recipe.yaml").is_file():
        raise UserError(f"{run} has no recipe.yaml; give the output folder of a finished run")
    read_yaml(run / "recipe.yaml")
    for name in ("provenance.json", "draft/config.json", "draft/tokenizer.json"):
        read_json(run / name)
    refuse_damaged(run / "draft")


def reports_of(run: Path, named: Sequence[Path]) -> list[Report]:
    """The run's report, if it has one, and the named ones.

    named: as for `read_report`. Raises ReportError for a broken report, and if there is no report
    at all.
    """
    own_report = run / "report" / "report.json"
    paths = [own_report, *named] if own_report.exists() or not named else named
    return [read_report(path) for path in paths]


def unmet_conditions(
    run: Path, reports: Sequence[Report], weights: set[str], licence: str | None, source: str
) -> list[str]:
    """The unmet conditions of a publication, each with its remedy.

    weights: the hashes of the draft's weights. source: the licence's source, or why it is unknown.
    """
    unmet = []
    named = run.name if run.is_absolute() else run  # a card has it, too
    for report in reports:
        again = f"measure it again: python -m eval.run --run {named}"
        if report.engine != REFERENCE:
            again = "measure it again with the command in its provenance"
        drafts = {name: d for name, d in report.drafts.items() if d.sha256 in weights}
        if not drafts and any(draft.sha256 for draft in report.drafts.values()):
            unmet.append(
                f"The report of engine {report.engine} measured other weights than draft/ has; "
                f"{again}."
            )
        elif not drafts:
            unmet.append(
                f"The report of engine {report.engine} does not say which weights were served; "
                f"measure it again with --run {named} and --base_url tuned=URL."
            )
        for name, draft in drafts.items():
            if draft.lossless.unexplained:
                unmet.append(
                    f"In engine {report.engine} {draft.lossless.unexplained} of "
                    f"{draft.lossless.prompts} outputs are mismatches; find the cause in the "
                    f"report's list of divergences, and {again}."
                )
            elif name in report.broken:
                unmet.append(
                    f"In engine {report.engine} sampled outputs have other log-probabilities with "
                    f"the draft ({draft.sampled_check}); {again}."
                )
        if report.prompts.overlap_with_training is None:
            unmet.append(
                f"The report of engine {report.engine} does not know whether its prompts were "
                f"trained on; measure it again with --run {named} and without --prompts."
            )
        elif report.prompts.overlap_with_training > 0:
            unmet.append(
                f"{report.prompts.overlap_with_training:g} evaluation prompts of engine "
                f"{report.engine} were trained on; use others."
            )
    if licence is None:
        unmet.append(f"There is no licence ({source}); give it with --license ID, as apache-2.0.")
    return unmet


def publish(
    run: Path,
    to: Path | None = None,
    reports: Sequence[Path] = (),
    push_to_hub: str | None = None,
    public: bool = False,
    force: bool = False,
    licence: str | None = None,
) -> None:
    """Check the run, copy its draft to a new folder, write its card, and upload it.

    to: None checks the run and writes the card of its own draft; a push then copies it to
    `published/` in the run. reports: as for `reports_of`. licence: None derives it from target and
    draft. Raises UserError for an incomplete run or an unmet condition, before anything is
    written, and if the Hub refuses the upload.
    """
    check_files(run)
    recipe, measured = read_yaml(run / "recipe.yaml"), reports_of(run, reports)
    source = "as its publisher states"
    if licence is None:
        licence, source = derived_licence([recipe["target"], *filter(None, [recipe.get("draft")])])
    destination = to or (run / "published" if push_to_hub else run / "draft")
    refuse_unwritable(destination)
    weights = draft_weights(run)
    unmet = unmet_conditions(run, measured, weights, licence, source)
    name = push_to_hub or destination.name
    if destination == run / "draft":
        write_card(destination, run, measured, Publication(name, licence, source))
        print(f"model card: {destination / 'README.md'}")
        for line in unmet:
            print(f"Not to be published yet: {line}")
        return
    if unmet and not force:
        raise UserError(
            "\n- ".join(["not to be published yet; --force does, and the card says why", *unmet])
        )
    earlier = destination == run / "published" or weights_sha256(destination) in weights
    if (
        destination.exists()
        and not earlier
        and not (destination.is_dir() and not any(destination.iterdir()))
    ):
        raise UserError(
            f"{destination} exists already: give the name of a new folder, or remove it"
        )
    about = Publication(name, licence, source, unmet)
    named = recipe.get("target_hub_id") or public_name(recipe["target"])
    copy_draft(run, destination, measured, about, named)
    print(f"draft: {destination}")
    target = destination.with_name(f"{destination.name}-target")
    if in_one_file(recipe["target"]) and to is not None and not target.exists():
        with atomic_folder(target) as folder:
            shutil.copytree(Checkpoint.open(recipe["target"]).folder, folder, dirs_exist_ok=True)
        print(f"target: {target}")
    if push_to_hub is not None:
        print(f"pushed: {push_folder(destination, push_to_hub, public)}")


def copy_draft(
    run: Path,
    place: Path,
    reports: Sequence[Report],
    publication: Publication,
    target: str | None = None,
) -> None:
    """Copy the run's draft to `place`, with a model card; the folder appears whole.

    target: its name on the Hub, for the files of the draft.
    """
    with atomic_folder(place) as folder:
        # `SERVED` has links to the target's own files
        shutil.copytree(run / "draft", folder, symlinks=True, dirs_exist_ok=True)
        if target is not None:
            name_target(folder, target)
        write_card(folder, run, reports, publication)


def name_target(folder: Path, target: str) -> None:
    """Put the target's name into the files of a draft that name it, by a path as it may be."""
    path = folder / "config.json"
    config = read_json(path)
    if verifier := config.get("speculators_config", {}).get("verifier"):
        verifier["name_or_path"] = target
        path.write_text(json.dumps(config, indent=2))
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        about = read_json(adapter) | {"base_model_name_or_path": target}
        adapter.write_text(json.dumps(about, indent=2))


def push_folder(folder: Path, repo_id: str, public: bool) -> str:
    """Upload `folder` to the model repository `repo_id`, which is created if missing.

    Returns the address. huggingface_hub first uploads large files by their hashes, and one commit
    adds all files at the end. So a repository never has a part of a draft, and the same call after
    a failure resumes the upload.

    The token is that of the environment or of `hf auth login`, and no message contains it. Raises
    UserError for a repository of the other visibility or with weights of others, without a login,
    and if the Hub refuses or cannot be reached.
    """
    api = HfApi()
    try:
        api.whoami()
        address = api.create_repo(repo_id, private=not public, exist_ok=True)
        info = api.model_info(repo_id)
        weights = any(file.rfilename.endswith(".safetensors") for file in info.siblings or ())
        if weights and TAG not in (info.tags or ()):
            raise UserError(
                f"{repo_id} has weights that draftsmith did not publish, and the upload would "
                "delete them; name another repository"
            )
        if info.private == public:
            remedy = "leave --public out" if public else "give --public"
            raise UserError(
                f"{repo_id} exists and is {'private' if public else 'public'}: change that in its "
                f"settings on the Hub, {remedy}, or name another repository"
            )
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message="Draft model",
            ignore_patterns=[f"{SERVED}/*"],
            delete_patterns=OURS,
        )
    except UserError:
        raise
    except (OSError, HTTPError, RuntimeError, ValueError) as error:
        # huggingface_hub wraps the error of a file's upload in a RuntimeError
        cause = error.__cause__ if type(error) is RuntimeError and error.__cause__ else error
        text = " ".join(str(cause).split()) or type(cause).__name__
        if token := get_token():  # a server may repeat it
            text = text.replace(token, "***")
        raise UserError(
            f"the upload of {repo_id} failed ({text}). None of its files is visible yet; run the "
            "same command again to resume, or publish with --to FOLDER"
        ) from None
    return str(address)


@dataclass(frozen=True)
class PublishOptions(Options):
    run: Path = option("output folder of a finished run", positional=True, metavar="DIR")
    to: Path | None = option("copy the draft to this new folder", None, metavar="FOLDER")
    report: Sequence[Path] = option("reports of these weights, for the card; repeatable", ())
    push_to_hub: str | None = option("upload the draft, private", None, metavar="ORG/NAME")
    public: bool = option("make the repository public", False)
    license: str | None = option("licence; default: that of both models", None, metavar="ID")
    force: bool = option("publish although a condition is not met", False)

    def refusals(self) -> Iterator[str]:
        if self.public and self.push_to_hub is None:
            yield "--public needs --push_to_hub"


def main(argv: Sequence[str]) -> None:
    args = command_line.parse(PublishOptions, "python -m distill.publish", __doc__, argv)
    settings = args.push_to_hub, args.public, args.force, args.license
    if status := command_line.exit_status(
        lambda: publish(args.run, args.to, args.report, *settings)
    ):
        sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
