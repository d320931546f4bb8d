"""Recipes: flat keys, named as in trl and transformers, checked before anything runs.

`--recipe code` is recipes/code/default.yaml, `--recipe code/lora` is recipes/code/lora.yaml, and a
file of your own is given by its path. Every key can be overridden: `--learning_rate 1e-4`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

# Keys of SFTConfig that a recipe may not set, by the reason.
_FIXED = {
    "prompts and answers are tokenised by this run and never cut": (
        "max_length truncation_mode dataset_text_field dataset_kwargs dataset_num_proc "
        "shuffle_dataset chat_template_path eos_token pad_token"
    ),
    "every row brings its own cached distributions, in columns that must reach the loss": (
        "packing packing_strategy padding_free eval_packing pad_to_multiple_of "
        "remove_unused_columns label_names length_column_name"
    ),
    "the loss is the forward KL of distill/losses.py, on answer tokens only": (
        "loss_type completion_only_loss assistant_only_loss label_smoothing_factor "
        "router_aux_loss_coef use_liger_kernel liger_kernel_config"
    ),
    "target and draft are loaded by this run, and never run code of their own": (
        "model_init_kwargs trust_remote_code use_cache"
    ),
    "drafts are evaluated after training, on eval_prompts": (
        "do_train do_eval do_predict eval_strategy eval_steps eval_delay eval_on_start "
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "per_device_eval_batch_size bf16_full_eval fp16_full_eval prediction_loss_only "
        "batch_eval_metrics include_for_metrics load_best_model_at_end metric_for_best_model "
        "greater_is_better"
    ),
    "a draft is published with `python -m distill.publish`": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision"
    ),
    "an interrupted run goes on from whole checkpoints only": (
        "save_only_model enable_jit_checkpoint ignore_data_skip"
    ),
    "transformers calls it activation_checkpointing now": (
        "gradient_checkpointing gradient_checkpointing_kwargs"
    ),
    "the launcher sets it": "local_rank",
}
FIXED = {key: reason for reason, keys in _FIXED.items() for key in keys.split()}


class RecipeError(ValueError):
    """A recipe that cannot be used: says which key or file, why, and what to do."""


Bridge = Literal["auto", "direct", "padded", "remap", "transplant", "intersection"]


@dataclass
class Recipe:
    """What a run does. The comments are the help text of `--help` and of docs/recipes.md."""

    target: str  # model to speed up: Hub id, folder, GGUF file or pypi: file
    train_prompts: str  # prompts to distil on: Hub data set, pypi: file, .jsonl, or embedded:…
    eval_prompts: str  # prompts to evaluate on; near-duplicates of them are never trained on
    name: str = "run"  # of the run and its output folder; left out: the name of the recipe's file
    domain: str = "general"  # what the draft is for, in words (goes to the model card)
    draft: str | None = None  # a sibling to tune; null prunes the target in depth
    output_dir: str | None = None  # null: outputs/ and the name
    max_train_prompts: int = 2000  # at most so many prompts, drawn with the seed
    max_eval_prompts: int | None = None  # at most so many prompts; null: all of them
    strategy: Bridge = "auto"  # how vocabularies are bridged; auto re-homes a foreign draft
    num_draft_layers: int = 2  # layers kept of a pruned target
    draft_vocab_size: int | None = None  # rows of a pruned draft's head; null keeps all
    fit_tokens: int = 20_000  # answer tokens that the head is fitted on
    answer_temperature: float = 0.0  # how the target answers the training prompts
    answers_per_prompt: int = 1  # answers drawn for each training prompt
    answer_max_new_tokens: int = 128  # longest answer, in tokens
    answer_batch_size: int = 48  # prompts answered at once
    cache_top_k: int = 15  # most likely tokens kept of each distribution
    teacher_temperature: float = 1.0  # the draft learns p ** (1 / this); below 1 suits greedy use
    use_peft: bool = False  # LoRA instead of full fine-tuning
    lora_r: int = 64  # rank of the adapters
    lora_alpha: int = 128  # the adapters are scaled by lora_alpha / lora_r
    lora_dropout: float = 0.0  # dropout on the adapters
    lora_target_modules: str = "all-linear"  # every linear layer but the head, or a comma list
    temperature: float = 0.0  # deployed sampling; 0 is greedy
    top_k: int | None = None  # deployed top-k; null keeps every token
    top_p: float = 1.0  # deployed top-p; 1 keeps every token
    max_new_tokens: int = 128  # longest answer in the evaluation, in tokens
    gamma: int | None = None  # draft length; null chooses it on prompts that are not evaluated
    max_gamma: int = 6  # longest draft length tried
    speed_prompts: int = 40  # evaluation prompts that are timed, drawn with the seed
    tuning_prompts: int = 8  # training prompts set aside for choosing gamma
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # while decoding
    dry_run: bool = False  # check and price the run, then stop
    coverage_curve: bool = False  # print what trimmed heads would lose, then stop
    training: dict[str, Any] = field(default_factory=dict)  # any other field of trl.SFTConfig

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or f"outputs/{self.name}")

    @property
    def seed(self) -> int:
        return int(self.training.get("seed", 42))


OWN = {f.name: f for f in dataclasses.fields(Recipe) if f.name != "training"}
_REQUIRED = [key for key, f in OWN.items() if f.default is dataclasses.MISSING]

_AT_LEAST = {
    1: (
        "max_train_prompts max_eval_prompts num_draft_layers draft_vocab_size fit_tokens "
        "answers_per_prompt answer_max_new_tokens answer_batch_size cache_top_k lora_r lora_alpha "
        "top_k max_new_tokens gamma max_gamma speed_prompts tuning_prompts "
        "per_device_train_batch_size gradient_accumulation_steps save_total_limit"
    ),
    0: (
        "answer_temperature lora_dropout temperature learning_rate warmup_steps weight_decay "
        "adam_beta1 adam_beta2 max_grad_norm seed data_seed dataloader_num_workers"
    ),
}
_MORE_THAN_0 = "teacher_temperature num_train_epochs logging_steps save_steps adam_epsilon top_p"
_LESS_THAN_1 = "lora_dropout adam_beta1 adam_beta2"


def recipe_files() -> dict[str, Path]:
    """Name -> file of every recipe that ships."""
    files = (p for p in sorted(RECIPES.rglob("*.yaml")) if p.parent != RECIPES / "accelerate")
    names = ((p.relative_to(RECIPES).with_suffix("").as_posix(), p) for p in files)
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
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise RecipeError(
        f"No recipe {name!r}: it is neither a file here nor one that ships. {hint}There are "
        f"{', '.join(files)}."
    )


def load_recipe(argv: list[str]) -> Recipe:
    """The checked recipe of `--recipe NAME-or-PATH [--key value …]`. Raises RecipeError."""
    overrides = _parse_arguments(argv)
    if "recipe" not in overrides:
        raise RecipeError(
            f"No recipe was given; add --recipe and one of {', '.join(recipe_files())}, or a path."
        )
    path = find_recipe(overrides.pop("recipe"))
    values = {"name": path.stem} | _read(path)
    for key, text in overrides.items():
        values[key] = _from_command_line(key, text)
    return build_recipe(values)


def build_recipe(values: dict[str, Any]) -> Recipe:
    """A checked Recipe of flat keys. Raises RecipeError for unknown and ill-typed ones."""
    for key, value in values.items():
        _check_type(key, value, _type_of(key))
        _check_range(key, value)
    if lacking := [key for key in _REQUIRED if key not in values]:
        raise RecipeError(f"The recipe lacks {', '.join(lacking)}; no run is possible without.")
    training = {key: value for key, value in values.items() if key not in OWN}
    recipe = Recipe(**{k: v for k, v in values.items() if k in OWN}, training=training)
    _check_together(recipe)
    return recipe


def dump(recipe: Recipe) -> str:
    """The resolved recipe as YAML: every key of ours and those that were set of SFTConfig."""
    values = {name: getattr(recipe, name) for name in OWN} | recipe.training
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def comments() -> dict[str, str]:
    """Key -> what it is for: the comments of the fields of Recipe, read from this file."""
    source = Path(__file__).read_text(encoding="utf-8")
    fields = re.findall(r"^    (\w+): .*  # (.+)$", source, flags=re.MULTILINE)
    return {key: comment for key, comment in fields if key in OWN}


def help_text() -> str:
    """Every key of ours with its default and comment."""
    lines = ["accelerate launch distill/train.py --recipe NAME-or-PATH [--key value …]", ""]
    for key, comment in comments().items():
        default = "required" if key in _REQUIRED else yaml_text(OWN[key].default)
        lines.append(f"  --{key} ({default})  {comment}")
    lines += [
        "",
        "and most fields of trl.SFTConfig (learning_rate, num_train_epochs, seed …).",
    ]
    lines.append(f"Recipes: {', '.join(recipe_files())}")
    return "\n".join(lines)


def yaml_text(value: Any) -> str:
    """A value as it stands in a recipe: `null`, `true`, `1.0e-05`."""
    return yaml.dump(value, Dumper=_Dumper).removesuffix("...\n").strip()


# --- reading


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars. YAML 1.1 reads `no` as false, `1e-3` as text and `010` as 8."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", node.value[i][0].start_mark
                )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be something else in YAML 1.1 or 1.2."""


_FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$")
_Loader.yaml_implicit_resolvers = {}
for _loader, _tag, _pattern, _first in (
    (_Loader, "null", re.compile(r"(~|null|)$"), ["~", "n", ""]),
    (_Loader, "bool", re.compile(r"(true|false)$"), list("tf")),
    (_Loader, "int", re.compile(r"[-+]?(0|[1-9]\d*)$"), list("-+0123456789")),
    (_Loader, "float", _FLOAT, list("-+.0123456789")),
    (_Dumper, "float", _FLOAT, list("-+.0123456789")),
):
    _loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise RecipeError(f"{path} cannot be read as YAML ({reason}); correct it.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{path} is not a recipe; write a line `key: value` for every key.")
    return values


def _parse_arguments(argv: list[str]) -> dict[str, str]:
    overrides: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise RecipeError(f"{word!r} is not a key; write --key value.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise RecipeError(f"--{key} has no value; write --{key} VALUE.")
            value = rest.pop(0)
        overrides[key] = value
    return overrides


def _from_command_line(key: str, text: str) -> Any:
    """The text as YAML reads it, or as it is where the key wants text: `--name 7`."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text
    return value if _fits(value, _type_of(key)) or not _fits(text, _type_of(key)) else text


# --- checking


@functools.cache
def _types() -> dict[str, Any]:
    from trl import SFTConfig  # seconds

    hints = typing.get_type_hints(SFTConfig)
    training = {f.name: hints[f.name] for f in dataclasses.fields(SFTConfig) if f.init}
    own = typing.get_type_hints(Recipe)
    return {k: v for k, v in training.items() if k not in FIXED} | {k: own[k] for k in OWN}


def _type_of(key: str) -> Any:
    if key in FIXED:
        raise RecipeError(f"{key} cannot be set: {FIXED[key]}. Remove it.")
    if key not in _types():
        near = difflib.get_close_matches(key.replace("-", "_"), _types(), n=1, cutoff=0.5)
        hint = f"Did you mean {near[0]!r}?" if near else "docs/recipes.md lists all keys."
        raise RecipeError(f"Unknown key {key!r}: neither draftsmith nor SFTConfig has it. {hint}")
    return _types()[key]


def _check_type(key: str, value: Any, kind: Any) -> None:
    if not _fits(value, kind):
        quoted = " in quotes" if isinstance(value, str) and _FLOAT.match(value) else ""
        raise RecipeError(
            f"{key} is {yaml_text(value)}{quoted} ({_name(type(value))}), but must be "
            f"{_name(kind)}; correct its value."
        )


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in _UNIONS else (kind,)


_UNIONS = (typing.Union, types.UnionType)
_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a mapping",
    type(None): "null",
}


def _fits(value: Any, kind: Any) -> bool:
    options = _options(kind)
    members = _members(options)
    for option in options:
        plain = typing.get_origin(option) or option
        if option is str and members:
            continue  # `SchedulerType | str` means the value of a member
        if plain is float and type(value) in (int, float) and math.isfinite(value):
            return True
        if plain in _NAMES and type(value) is plain:
            inner = typing.get_args(option)
            return plain is not list or all(_fits(item, inner[0]) for item in value)
    return any(type(value) is type(member) and value == member for member in members)


def _members(options: tuple[Any, ...]) -> list[Any]:
    members: list[Any] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            members += typing.get_args(option)
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            members += [member.value for member in option]
    return members


def _name(kind: Any) -> str:
    options = _options(kind)
    members = [yaml_text(member) for member in _members(options)]
    plain = [typing.get_origin(option) or option for option in options]
    names = [_NAMES[p] for p in plain if p in _NAMES and not (p is str and members)]
    return " or ".join([f"one of {', '.join(members)}"] * bool(members) + names)


def _check_range(key: str, value: Any) -> None:
    if value == "" and key in OWN:
        raise RecipeError(f"{key} is empty; give a value or leave the key out.")
    if not isinstance(value, int | float):
        return
    for least, keys in _AT_LEAST.items():
        if key in keys.split() and value < least:
            raise RecipeError(f"{key} is {value}, but must be at least {least}; raise it.")
    if key in _MORE_THAN_0.split() and value <= 0:
        raise RecipeError(f"{key} is {value}, but must be more than 0; raise it.")
    if key in _LESS_THAN_1.split() and value >= 1:
        raise RecipeError(f"{key} is {value}, but must be less than 1; lower it.")
    if key == "top_p" and value > 1:
        raise RecipeError(f"top_p is {value}, but must be at most 1; 1 keeps every token.")
    if key == "max_steps" and (value < -1 or value == 0):
        raise RecipeError(f"max_steps is {value}; give 1 or more, or -1 for num_train_epochs.")


def _check_together(recipe: Recipe) -> None:
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", recipe.name):
        raise RecipeError(
            f"name is {recipe.name!r}, but names a folder; use letters, digits, '.', '-' and '_'."
        )
    if recipe.gamma is not None and recipe.gamma > recipe.max_gamma:
        raise RecipeError(
            f"gamma is {recipe.gamma}, more than max_gamma {recipe.max_gamma}; raise max_gamma."
        )
    if recipe.temperature == 0 and (recipe.top_k is not None or recipe.top_p != 1):
        raise RecipeError(
            f"top_k {recipe.top_k} and top_p {recipe.top_p} do nothing at temperature 0, which is "
            "greedy; set temperature, or leave them out."
        )
    # a tied embedding would get the head's adapter merged into it, with no more than a warning
    if re.search("lm_head|embed", recipe.lora_target_modules):
        raise RecipeError(
            f"lora_target_modules is {recipe.lora_target_modules!r}: adapters on head or "
            "embeddings merge wrongly where the two are tied; name other layers, or all-linear."
        )
