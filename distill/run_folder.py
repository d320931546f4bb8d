"""A run's output folder: its recipe, its provenance, and the files that stay at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import PartialState
from filelock import FileLock, Timeout

from align.errors import UserError
from align.files import atomic_file, read_json, remove, write_json
from align.vocab_map import VOCAB_MAP, save_map
from distill.checkpoint import OPTIMIZER, last_checkpoint, launch_of, mark_complete
from distill.models import Pair
from distill.prompt_sets import Prompts, keep_prompts
from distill.recipe import Recipe, chosen_loss, dump
from distill.recipe_files import RecipeError, read_yaml
from distill.teacher.answers import USED, AnsweringTarget
from distill.teacher.store import names_of
from eval.measuring.environment import made_by
from eval.prompts import prompts_sha256

# Keys that may change between two starts of a run.
FREE_KEYS = set(
    "dry_run coverage_curve resume_from_checkpoint output_dir logging_steps save_steps report_to "
    "answer_url target_hub_id device_map engine".split()
)
# Keys that may change until the draft exists; a checkpoint has the number of tokens of a step.
BATCH_KEYS = {"tokens_per_step", "gradient_accumulation_steps"}
MODELS = "models.json"  # in a run's folder: hashes of what its recipe names


def refuse_another_run(recipe: Recipe) -> None:
    """Raise RecipeError if the output folder belongs to another recipe."""
    path = recipe.folder / "recipe.yaml"
    if not path.exists():
        return
    written, asked = read_yaml(path), recipe.values()
    free = FREE_KEYS if (recipe.folder / "draft").exists() else FREE_KEYS | BATCH_KEYS
    if not {"server", "logged"} & {written.get("answers"), recipe.answers}:
        free = free | {"answers"}  # `local` and `vllm` share a store
    changed = sorted(
        key for key in (written.keys() | asked) - free if written.get(key) != asked.get(key)
    )
    if changed:
        detail = "; ".join(f"{k}: {written.get(k)!r} -> {asked.get(k)!r}" for k in changed)
        raise RecipeError(
            f"{recipe.folder} has a run of another recipe ({detail}). Give this run another "
            f"{named_by(recipe)}; it will use the cached outputs."
        )


def named_by(recipe: Recipe) -> str:
    """The option that decides the run's folder."""
    return "--output_dir" if recipe.output_dir else "--name"


@contextmanager
def only_start(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder. Raises UserError if another start of the run holds it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))  # the folder is not claimed yet
    if PartialState().is_main_process:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise UserError(
                f"Another process is at work on {folder}; wait until it has ended, or give this "
                "run another --name."
            ) from None
    try:
        yield
    finally:
        lock.release()


def claim_folder(
    recipe: Recipe, pair: Pair, prompts: Prompts, target: AnsweringTarget | None
) -> None:
    """Write recipe, verdict, map, prompts and hashes: the folder now belongs to this recipe.

    Only the first process calls it, after all checks. target: None if the draft exists. Raises
    RecipeError if the folder was claimed with another target, template or draft of the same name.
    """
    folder, path = recipe.folder, recipe.folder / MODELS
    words, draft = pair.target.vocabulary, pair.published or pair.draft
    models = {
        "tokenizer": words.sha256,
        "chat template": hashlib.sha256((words.chat_template or "").encode()).hexdigest(),
    }
    if not recipe.remote_target:
        models["target config"] = pair.target.config_sha256
    if target is not None:
        models["target weights"] = target.store.key["target weights"]
    elif not recipe.remote_target:
        models["target weights"] = str(pair.target.sha256)
    if recipe.draft is not None:
        models["draft weights"] = str(draft.sha256)
    claimed = read_json(path) if path.exists() else {}
    if changed := [name for name in claimed if claimed[name] != models.get(name, claimed[name])]:
        raise RecipeError(
            f"{folder} was started with another {' and '.join(changed)} than the recipe's models "
            f"have now; restore these, or give this run another {named_by(recipe)}."
        )
    write_json(path, claimed | models)
    if pair.vocab_map is not None and not (folder / VOCAB_MAP).exists():
        save_map(folder / VOCAB_MAP, pair.vocab_map, words, draft.vocabulary)
    write_json(folder / "vocab_check.json", pair.verdict.to_json() | {"used": pair.strategy})
    keep_prompts(folder, prompts)
    with atomic_file(folder / "recipe.yaml") as file:
        file.write(dump(recipe))


def provenance(recipe: Recipe, prompts: Prompts) -> dict[str, Any]:
    """The origin of a report: command, versions, commit, seed, hashes of models and prompts."""
    used, ids = read_json(recipe.folder / USED), names_of(prompts.training.ids)
    models = read_json(recipe.folder / MODELS)
    return {
        **made_by(recipe.seed),
        "processes": PartialState().num_processes,
        "hashes": {
            **models,
            "dtype": used["key"]["dtype"],
            "answers": used["answers"],
            "train_prompts": prompts_sha256(prompts.training.prompts),
            "eval_prompts": prompts_sha256(prompts.evaluation.prompts),
            "train_ids": hashlib.sha256(" ".join(ids).encode()).hexdigest(),
        },
        "loss": dict(zip(("name", "why"), chosen_loss(recipe), strict=True)),
        "answers": used["by"],
        "overlap": asdict(prompts.overlap),
    }


def delete_training_state(folder: Path) -> None:
    """Delete the files of a finished run that only further training needs.

    Both drafts stay, and what makes `draft/` again: the weights and marker of the last checkpoint,
    and the best weights.
    """
    last = last_checkpoint(folder)
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint != last:
            remove(checkpoint)
    if last is not None:
        mark_complete(last, str(launch_of(last)), last / OPTIMIZER)
        remove(last / OPTIMIZER)
