"""Recipes: flat keys, named as in trl and transformers, checked for name and type before anything runs.

`--recipe code` is recipes/code/default.yaml, `--recipe code/lora` recipes/code/lora.yaml, anything that
is a file is that file. Every key can be overridden: `--learning_rate 1e-4`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

# Keys of SFTConfig that a recipe may not set, with the reason.
FIXED = {
    "max_length": "rows are tokenised before the target answers and are never cut",
    "packing": "cached distributions belong to unpacked rows",
    "padding_free": "cached distributions belong to padded rows",
    "remove_unused_columns": "the cached distributions are such columns",
    "dataset_kwargs": "the data set is made by this run",
    "loss_type": "the loss is the forward KL of distill/losses.py",
    "completion_only_loss": "the loss is on response tokens only, always",
    "assistant_only_loss": "the loss is on response tokens only, always",
    "model_init_kwargs": "the draft is prepared by this run",
    "use_liger_kernel": "its fused loss would replace the distillation loss",
}


class RecipeError(ValueError):
    """A recipe that cannot be used: says which key or file, why, and what to do."""


@dataclass
class Recipe:
    """What a run does. Field comments are the help text of `--help`."""

    target: str  # model whose distribution is kept: Hub id, folder, GGUF or pypi: file
    train_prompts: str  # prompts to distil on: Hub data set, pypi: file, .jsonl, or embedded:…
    eval_prompts: str  # prompts to evaluate on; near-duplicates of them are never trained on
    name: str = "run"  # names the run and its default output folder
    domain: str = "general"  # what the draft is for, in words (goes to the model card)
    draft: str | None = None  # a sibling to tune; null prunes the target in depth
    output_dir: str | None = None  # null: outputs/<name>
    max_train_prompts: int = 2000  # at most so many prompts, drawn with the seed
    max_eval_prompts: int | None = None  # null: all of them
    strategy: str = "auto"  # how vocabularies are bridged; auto takes what align.check names
    num_draft_layers: int = 2  # layers kept of a pruned target
    draft_vocab_size: int | None = None  # rows of a pruned draft's head; null keeps all
    fit_tokens: int = 30_000  # response tokens that the head is fitted on
    answer_temperature: float = 0.0  # how the target answers the training prompts
    answers_per_prompt: int = 1  # answers drawn for each training prompt
    answer_max_new_tokens: int = 128  # longest answer
    answer_batch_size: int = 48  # rows answered at once
    cache_top_k: int = 15  # most likely tokens kept of each distribution
    use_peft: bool = False  # LoRA instead of full fine-tuning
    lora_r: int = 64  # rank
    lora_alpha: int = 128  # scale is lora_alpha / lora_r
    lora_dropout: float = 0.0  # dropout on the adapters
    lora_target_modules: str = "all-linear"  # all linear layers but the head, or a comma list
    temperature: float = 0.0  # deployed sampling; 0 is greedy
    top_k: int | None = None  # deployed top-k; null keeps every token
    top_p: float = 1.0  # deployed top-p; 1 keeps every token
    max_new_tokens: int = 128  # longest evaluated answer
    gamma: int | None = None  # draft length; null chooses it on prompts that are not evaluated
    max_gamma: int = 6  # longest draft length tried
    speed_prompts: int = 40  # evaluation prompts that are timed, drawn with the seed
    tuning_prompts: int = 8  # training prompts set aside for choosing gamma
    dtype: str = "bfloat16"  # of target and draft while decoding: bfloat16, float16 or float32
    dry_run: bool = False  # resolve, check and price the run, then stop
    training: dict[str, Any] = field(default_factory=dict)  # any other field of trl.SFTConfig

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or f"outputs/{self.name}")

    @property
    def seed(self) -> int:
        return int(self.training.get("seed", 42))


OWN = {f.name: f for f in dataclasses.fields(Recipe) if f.name != "training"}
AT_LEAST_ONE = (
    "max_train_prompts max_eval_prompts num_draft_layers draft_vocab_size fit_tokens "
    "answers_per_prompt answer_max_new_tokens answer_batch_size cache_top_k lora_r lora_alpha top_k "
    "max_new_tokens gamma max_gamma speed_prompts tuning_prompts"
).split()
CHOICES = {"dtype": ("bfloat16", "float16", "float32"), "strategy": ("auto", "direct", "padded")}


def recipe_files() -> dict[str, Path]:
    """Name -> file of every recipe that ships."""
    files = (p for p in sorted(RECIPES.rglob("*.yaml")) if "accelerate" not in p.parts)
    names = ((str(p.relative_to(RECIPES).with_suffix("")), p) for p in files)
    return {name.removesuffix("/default"): path for name, path in names}


def find_recipe(name: str) -> Path:
    """The file of a recipe's name or path. Raises RecipeError naming the nearest one."""
    files = recipe_files()
    if name in files:
        return files[name]
    path = Path(name)
    if path.is_file():
        return path
    near = difflib.get_close_matches(name, files, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise RecipeError(
        f"No recipe {name!r}: it is neither a file nor one that ships; {hint}There are "
        f"{', '.join(files)}."
    )


def load_recipe(argv: list[str]) -> Recipe:
    """The recipe that `--recipe NAME-or-PATH [--key value …]` asks for, checked."""
    overrides = _parse_arguments(argv)
    if "recipe" not in overrides:
        raise RecipeError(f"No --recipe was given; there are {', '.join(recipe_files())}.")
    path = find_recipe(overrides.pop("recipe"))
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML ({error}); write `key: value` lines.") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no keys; write `key: value` lines.")
    for key, text in overrides.items():
        values[key] = yaml.safe_load(text)
    return build_recipe(values)


def _parse_arguments(argv: list[str]) -> dict[str, str]:
    overrides: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise RecipeError(f"{word!r} is not a key; write --key value.")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise RecipeError(f"--{key} has no value; write --{key} VALUE.")
            value = rest.pop(0)
        overrides[key] = value
    return overrides


def build_recipe(values: dict[str, Any]) -> Recipe:
    """A checked Recipe of flat keys. Raises RecipeError for unknown and ill-typed ones."""
    own_types = typing.get_type_hints(Recipe)
    training_types = _training_types()
    own: dict[str, Any] = {}
    training: dict[str, Any] = {}
    for key, value in values.items():
        if key in OWN:
            own[key] = _typed(key, value, own_types[key])
        elif key in FIXED:
            raise RecipeError(f"{key} cannot be set: {FIXED[key]}; remove it.")
        elif key in training_types:
            training[key] = _typed(key, value, training_types[key])
        else:
            near = difflib.get_close_matches(str(key), [*OWN, *training_types], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see docs/recipes.md for all keys."
            raise RecipeError(
                f"Unknown key {key!r}: neither draftsmith nor SFTConfig has it; {hint}"
            )
    for key in ("target", "train_prompts", "eval_prompts"):
        if key not in own:
            raise RecipeError(f"The recipe lacks {key}, without which no run is possible; add it.")
    for key in AT_LEAST_ONE:
        if own.get(key) is not None and own[key] < 1:
            raise RecipeError(f"{key} is {own[key]}, but must be at least 1; raise it.")
    for key, choices in CHOICES.items():
        if key in own and own[key] not in choices:
            raise RecipeError(f"{key} is {own[key]!r}, but must be one of {', '.join(choices)}.")
    for key in ("temperature", "answer_temperature", "lora_dropout"):
        if key in own and own[key] < 0:
            raise RecipeError(f"{key} is {own[key]}, but must not be negative; use 0 or more.")
    return Recipe(**own, training=training)


def _training_types() -> dict[str, Any]:
    from trl import SFTConfig

    hints = typing.get_type_hints(SFTConfig)
    return {
        f.name: hints[f.name]
        for f in dataclasses.fields(SFTConfig)
        if f.init and f.name not in FIXED and f.name not in OWN
    }


def _typed(key: str, value: Any, kind: Any) -> Any:
    """The value as the type asks for it; RecipeError where it is of another type."""
    options = typing.get_args(kind) if _is_union(kind) else (kind,)
    for option in options:
        if option is type(None) and value is None:
            return None
        plain = typing.get_origin(option) or option
        if plain is typing.Literal and value in typing.get_args(option):
            return value
        if plain is Any:
            return value
        if plain is float and not isinstance(value, bool):
            # YAML 1.1 reads 1e-3 as text
            if isinstance(value, (int, float)):
                return float(value)
            if isinstance(value, str) and _is_number(value):
                return float(value)
        is_plain_type = isinstance(plain, type) and plain is not float
        if is_plain_type and isinstance(value, plain):
            if isinstance(value, bool) and plain is not bool:
                continue
            return value
        if is_plain_type and issubclass(plain, str) and plain is not str and isinstance(value, str):
            return value  # transformers' string enumerations check their own members
    name = getattr(kind, "__name__", None) if not _is_union(kind) else None
    expected = name or str(kind).replace("typing.", "")
    raise RecipeError(
        f"{key} is {value!r} ({type(value).__name__}), but must be {expected}; correct its value."
    )


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key of ours and those given of SFTConfig."""
    values = {name: getattr(recipe, name) for name in OWN} | recipe.training
    return yaml.safe_dump(values, sort_keys=False)


def help_text() -> str:
    """Every key of ours with its default and comment, read from this file."""
    lines = ["accelerate launch distill/train.py --recipe NAME-or-PATH [--key value ...]", ""]
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    for line in source:
        code, _, comment = line.strip().partition("  # ")
        name = code.partition(":")[0]
        if comment and name in OWN:
            lines.append(f"  --{code.replace(': ', ' (', 1)})  {comment}")
    lines += ["", "and any field of trl.SFTConfig. Recipes: " + ", ".join(recipe_files())]
    return "\n".join(lines)
