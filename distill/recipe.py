"""Recipes: flat keys, named as in trl and transformers, checked before anything runs.

`--recipe code` is recipes/code/default.yaml, `--recipe code/lora` is recipes/code/lora.yaml, and a
file of your own is given by its path. Every key can be overridden: `--learning_rate 1e-4`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import io
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from distill.losses import LossName
from eval.decoding.drafters.kind import Kind, kinds
from eval.decoding.verification import Sampling
from eval.prompts import LongPrompts

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

# Keys of SFTConfig that a recipe may not set, by the reason.
_FIXED = {
    "lengths are set by max_prompt_length, long_prompts and answer_max_new_tokens": (
        "max_length truncation_mode"
    ),
    "prompts and answers are tokenised by this run": (
        "dataset_text_field dataset_kwargs dataset_num_proc shuffle_dataset chat_template_path "
        "eos_token pad_token"
    ),
    "every row brings its own cached distributions, in columns that must reach the loss": (
        "packing packing_strategy padding_free eval_packing pad_to_multiple_of "
        "remove_unused_columns label_names length_column_name"
    ),
    "the key loss names one of distill/losses.py, on answer tokens only": (
        "loss_type completion_only_loss assistant_only_loss label_smoothing_factor "
        "router_aux_loss_coef use_liger_kernel liger_kernel_config"
    ),
    "target and draft are loaded by this run, and never run code of their own": (
        "model_init_kwargs trust_remote_code use_cache"
    ),
    "alpha is followed on held_out_prompts; drafts are evaluated after training, on eval_prompts": (
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
    "the key activation_checkpointing sets it": (
        "gradient_checkpointing gradient_checkpointing_kwargs"
    ),
    "what is sharded is sharded by FSDP2 (recipes/accelerate/fsdp2.yaml)": "deepspeed",
    "the launcher sets it": "local_rank",
}
FIXED = {key: reason for reason, keys in _FIXED.items() for key in keys.split()}

# Keys, kinds of draft and losses of earlier versions, and what to do instead.
GONE = {
    "data": "only the target's answers to train_prompts are trained on: other text was no better "
    "at equal minutes",
    "fixed_text": "only the target's answers are trained on; name the texts' beginnings as "
    "train_prompts",
    "on_policy_draft": "only the target's answers are trained on, which were as good at equal "
    "minutes",
    "select_fraction": "every position is trained on; what the loss weighs is said by loss",
    "reference_draft": "every position is trained on; what the loss weighs is said by loss",
    "position_weights": "all positions weigh the same, which was as good at equal minutes",
    "use_rslora": "set lora_alpha, which scales the adapters",
    "use_dora": "use_peft is LoRA, which was as good at equal minutes",
    "init_lora_weights": "LoRA starts as peft starts it, which was as good at equal minutes",
    "sequential_rank": "medusa drafts each token by a head of its own",
    "lookup_first": "every run measures prompt lookup alone and in front of the draft",
}
GONE_DRAFTERS = {
    "features": "use eagle3, which reads the target's states and is served by vLLM",
    "recurrent": "use eagle3, which reads the target's states and is served by vLLM",
    "parallel": "use medusa, which drafts several tokens in a pass and is served by vLLM",
}
GONE_LOSSES = {
    "ce": "use forward_kl, which came out best for greedy decoding",
    "ce_tv": "use forward_kl, which came out best for greedy decoding",
}

# Names that other programs have for keys, by the keys that an error then names.
_ALSO_CALLED = {
    "target": "model model_name model_name_or_path model_id base_model target_model teacher "
    "teacher_model teacher_model_name_or_path",
    "draft": "student student_model assistant assistant_model draft_model speculative_model "
    "model_draft",
    "drafter": "method speculative_method spec_type draft_type",
    "train_prompts": "dataset dataset_name train_data train_dataset train_file prompts",
    "eval_prompts": "eval_data eval_dataset eval_file validation_file test_file",
    "max_train_prompts": "max_samples max_train_samples num_prompts",
    "max_eval_prompts": "max_eval_samples",
    "output_dir": "out output out_dir output_path output_folder save_dir",
    "gamma max_gamma": "k num_speculative_tokens num_assistant_tokens num_draft_tokens lookahead "
    "speculation_length draft_length draft_max",
    "max_new_tokens answer_max_new_tokens": "max_tokens n_predict max_completion_tokens",
    "max_prompt_length answer_max_new_tokens": "max_seq_length max_seq_len seq_len seq_length "
    "sequence_length max_model_len context_length ctx_size",
    "temperature answer_temperature": "temp",
    "loss": "loss_fn objective divergence",
    "num_draft_layers": "layers num_layers num_hidden_layers",
    "cache_top_k": "logprobs top_logprobs",
    "answer_url": "base_url api_base server_url",
    "answer_model": "served_model_name",
    "learning_rate": "lr",
    "per_device_train_batch_size": "bs batch_size train_batch_size micro_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps accumulation_steps",
    "num_train_epochs": "epochs num_epochs",
    "max_steps": "steps num_steps train_steps max_train_steps num_training_steps",
    "warmup_steps": "warmup warmup_ratio num_warmup_steps",
    "lr_scheduler_type": "scheduler lr_scheduler",
    "optim": "optimizer",
    "use_peft": "lora use_lora peft",
    "lora_r": "r rank lora_rank",
    "lora_target_modules": "target_modules",
    "dtype": "torch_dtype precision",
    "use_cpu device_map": "cpu no_cuda device",
    "seed": "random_seed random_state",
    "resume_from_checkpoint": "resume checkpoint",
}
ALSO_CALLED = {name: keys.split() for keys, names in _ALSO_CALLED.items() for name in names.split()}


class RecipeError(ValueError):
    """A recipe that cannot be used: which key or file, why, and what to do."""


COMPARING = 30  # minutes, at least, of a run with drafter: auto
Strategy = Literal["auto", "direct", "padded", "remap", "transplant", "intersection"]
Text = Annotated[str, Field(min_length=1)]
HubId = Annotated[str, Field(pattern=r"^\w[\w.-]*/[\w.-]+$")]
Count = Annotated[int, Field(ge=1)]
AtLeastNone = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


@dataclass(frozen=True)
class Recipe:
    """What a run does. The comments are the help text of `--help` and of docs/recipes.md."""

    target: Text  # model to speed up: Hub id, folder, GGUF file or pypi: file
    train_prompts: Text  # prompts to distil on: Hub data set, pypi: file, .jsonl, or embedded:…
    eval_prompts: Text  # prompts to evaluate on; near-duplicates of them are never trained on
    name: Text = "run"  # of the run and its output folder; left out: the name of the recipe's file
    domain: Text = "general"  # what the draft is for, in words (goes to the model card)
    target_hub_id: HubId | None = None  # ORG/NAME of a target that is a file, for the model card
    draft: Text | None = None  # to tune: a sibling, or heads that others trained; null makes one
    drafter: Text | None = None  # null: pruned, or sibling where draft is named; auto: compares
    base: Text | None = None  # a run whose pruned draft this one starts from, as its adapters do
    output_dir: Text | None = None  # null: outputs/ and the name
    minutes: Positive | None = None  # time for the whole run; null: the other keys decide
    instruction: Text | None = None  # how an Instruct target is asked a prompt, put at {prompt}
    chat_template_kwargs: dict[str, Any] | None = None  # for the target's template; a prompt's win
    max_prompt_length: Count | None = None  # tokens of a prompt; null: what the context leaves
    long_prompts: LongPrompts = "error"  # of longer ones: error, drop or truncate_left
    max_train_prompts: Count = 2000  # at most so many prompts, drawn with the seed
    max_eval_prompts: Count | None = None  # at most so many prompts; null: all of them
    strategy: Strategy = "auto"  # how vocabularies are bridged; auto moves foreign ones over
    num_draft_layers: Count = 2  # layers kept of a pruned target
    draft_vocab_size: Count | None = None  # rows of the draft's head; null keeps all
    fit_tokens: Count = 20_000  # answer tokens that the head is fitted on
    device_map: Literal["auto"] | None = None  # auto: the target's layers over all GPUs
    answers: Literal["auto", "local", "vllm", "server"] = "auto"  # who writes the target's answers
    answer_url: Text | None = None  # of the server that answers: http://HOST:PORT
    answer_model: Text | None = None  # the target's name there; null: the one model it serves
    speculative_url: Text | None = None  # server of target and draft; null: do not evaluate
    answer_temperature: NotNegative = 0.0  # how the target answers the training prompts
    answers_per_prompt: Count = 1  # answers drawn for each training prompt
    train_on_prompts: bool = False  # the target's distributions within the prompts teach as well
    max_answers: Count | None = None  # most answers in all; with minutes the run decides
    answer_max_new_tokens: Count = 128  # longest answer, in tokens
    answer_batch_size: Count = 48  # prompts answered at once, or in flight to the server
    cache_top_k: Count = 15  # most likely tokens kept of each distribution
    loss: LossName | Literal["auto"] = "auto"  # of distill/losses.py; auto goes by `temperature`
    held_out_prompts: AtLeastNone = 32  # to follow alpha on while training; a 20th of all at most
    early_stopping_patience: Count | None = 5  # measurements of them without a best; null: never
    teacher_temperature: Positive = 1.0  # the draft learns p ** (1 / this); 1 at most
    activation_checkpointing: bool = False  # computed twice: a third slower, far less memory
    use_peft: bool = False  # LoRA instead of full fine-tuning
    lora_r: Count = 64  # rank of the adapters
    lora_alpha: Count = 128  # the adapters are scaled by lora_alpha / lora_r
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # dropout on the adapters
    lora_target_modules: Text = "all-linear"  # every linear layer but the head, or a comma list
    temperature: NotNegative = 0.0  # deployed sampling; 0 is greedy
    top_k: Count | None = None  # deployed top-k; null keeps every token
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0  # deployed top-p; 1 keeps every token
    max_new_tokens: Count = 128  # longest answer in the evaluation, in tokens
    gamma: Count | None = None  # draft length; null chooses it on prompts that are not evaluated
    max_gamma: Count = 6  # longest draft length tried
    execute: bool = False  # run functions that the target writes on the tests that prompts bring
    speed_prompts: Count = 40  # evaluation prompts that are timed; with minutes at most
    tuning_prompts: Count = 8  # training prompts set aside for choosing gamma
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of target and saved draft
    dry_run: bool = False  # check and price the run, then stop
    coverage_curve: bool = False  # answer, print what trimmed heads would lose, then stop
    training: dict[str, Any] = field(default_factory=dict)  # any other field of trl.SFTConfig

    @property
    def kind_name(self) -> str:
        """A file of eval/decoding/drafters; the plainest until `auto` chooses."""
        if self.drafter is None or self.drafter == "auto":
            return "pruned" if self.draft is None else "sibling"
        return self.drafter

    @property
    def kind(self) -> Kind:
        kind = kinds()[self.kind_name]
        return kind if self.draft is None else kind.of_sibling or kind

    @property
    def sibling(self) -> str | None:
        """`draft` where it is a model of its own, and not heads on the target's states."""
        return self.draft if self.kind.language_model else None

    @property
    def planned(self) -> bool:
        """Whether `minutes` has to decide how much is done."""
        return self.minutes is not None and self.max_answers is None

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or f"outputs/{self.name}")

    def values(self) -> dict[str, Any]:
        """Every key of ours and those that were set of SFTConfig."""
        return {name: getattr(self, name) for name in OWN} | self.training

    @property
    def seed(self) -> int:
        return int(self.training.get("seed", 42))

    @property
    def sampling(self) -> Sampling:
        """As deployed."""
        return Sampling(self.temperature, self.top_k, self.top_p)


OWN = {f.name: f for f in dataclasses.fields(Recipe) if f.name != "training"}
_REQUIRED = [key for key, f in OWN.items() if f.default is dataclasses.MISSING]

# Ranges of fields that SFTConfig itself takes as they come.
_RANGES: list[tuple[str, Any]] = [
    ("per_device_train_batch_size gradient_accumulation_steps", Field(ge=1)),
    ("save_total_limit", Field(ge=2)),  # the latest may be cut short by a kill
    ("learning_rate warmup_steps weight_decay max_grad_norm", Field(ge=0)),
    ("seed data_seed dataloader_num_workers", Field(ge=0)),
    ("num_train_epochs logging_steps save_steps adam_epsilon", Field(gt=0)),
    ("adam_beta1 adam_beta2", Field(ge=0, lt=1)),
]


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
    values = {"name": path.stem} | read_yaml(path)
    if "target" in overrides:  # the recipe's own id names another model
        values.pop("target_hub_id", None)
    for key, text in overrides.items():
        values[key] = _from_command_line(key, text)
    return build_recipe(values)


def build_recipe(values: dict[str, Any]) -> Recipe:
    """A checked Recipe of flat keys. Raises RecipeError for unknown and ill-typed ones."""
    for key, value in values.items():
        if key == "drafter" and value in GONE_DRAFTERS:
            raise RecipeError(f"drafter {value!r} is gone: {GONE_DRAFTERS[value]}.")
        if key == "loss" and value in GONE_LOSSES:
            raise RecipeError(f"loss {value!r} is gone: {GONE_LOSSES[value]}.")
        try:
            _type_of(key).validate_python(value)
        except ValidationError as error:
            wrong = " or ".join(dict.fromkeys(part["msg"] for part in error.errors()))
            raise RecipeError(
                f"{key} is {yaml_text(value)} ({type(value).__name__}), but "
                f"{re.sub('(Input|String) should', 'must', wrong)}; correct its value."
            ) from error
    if lacking := [key for key in _REQUIRED if key not in values]:
        raise RecipeError(
            f"The recipe lacks {', '.join(lacking)}, without which there is no run; add it."
        )
    training = {key: value for key, value in values.items() if key not in OWN}
    recipe = Recipe(**{k: v for k, v in values.items() if k in OWN}, training=training)
    _check_together(recipe)
    return recipe


def dump(recipe: Recipe, **decided: Any) -> str:
    """The resolved recipe as YAML, which is a recipe too. decided: in place of its own keys."""
    return yaml_text(recipe.values() | decided) + "\n"


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
    lines += ["", "and most fields of trl.SFTConfig (learning_rate, num_train_epochs, seed …)."]
    return "\n".join([*lines, f"Recipes: {', '.join(recipe_files())}"])


def _yaml() -> YAML:
    """YAML 1.2: `1e-3` is a number, `no` is text, `010` is ten, a key stands once."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    return yaml


def yaml_text(value: Any) -> str:
    """A value as it stands in a recipe: `null`, `true`, `1e-05`."""
    text = io.StringIO()
    _yaml().dump(value, text)
    return text.getvalue().removesuffix("...\n").strip()


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a recipe's file, not checked. Raises RecipeError for what is no mapping."""
    try:
        values = _yaml().load(path.read_text(encoding="utf-8"))
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).partition("\nTo suppress")[0].split())
        raise RecipeError(f"{path} cannot be read as YAML ({reason}); correct it.") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise RecipeError(f"{path} is not a recipe; write a line `key: value` for every key.")
    return values


def _parse_arguments(argv: list[str]) -> dict[str, str]:
    overrides: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not key:
            raise RecipeError(f"{word!r} is not a key; write --key value.")
        if not equals:
            if words and not words[0].startswith("--"):
                value = words.pop(0)
            elif key != "recipe" and _fits(key, True):  # as for transformers: --use_peft
                value = "true"
            else:
                raise RecipeError(f"--{key} has no value; write --{key} VALUE.")
        overrides[key] = value
    return overrides


def _from_command_line(key: str, text: str) -> Any:
    """The text as YAML reads it, or as it is where the key wants text: `--name 7`."""
    try:
        value = _yaml().load(text)
    except YAMLError:
        return text
    return text if not _fits(key, value) and _fits(key, text) else value


def _fits(key: str, value: Any) -> bool:
    try:
        _type_of(key).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _types() -> dict[str, TypeAdapter[Any]]:
    """Key -> its type, to be matched strictly: neither `true` nor `16.5` is a whole number."""
    from trl import SFTConfig  # seconds

    hints = typing.get_type_hints(SFTConfig)
    kinds: dict[str, Any] = {
        f.name: _of_members(hints[f.name])
        for f in dataclasses.fields(SFTConfig)
        if f.init and f.name not in FIXED
    }
    kinds |= {"max_steps": Literal[-1] | Annotated[int, Field(ge=0)]}  # 0: kept as prepared
    for keys, limits in _RANGES:
        kinds |= {key: Annotated[kinds[key], limits] for key in keys.split()}
    hints = typing.get_type_hints(Recipe, include_extras=True)
    kinds |= {key: hints[key] for key in OWN}
    strict = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)
    return {key: TypeAdapter(kind, config=strict) for key, kind in kinds.items()}


def _of_members(kind: Any) -> Any:
    """`SchedulerType | str` as transformers means it: the value of a member."""
    options = typing.get_args(kind)
    enums = [o for o in options if isinstance(o, type) and issubclass(o, enum.Enum)]
    return Literal[tuple(member.value for e in enums for member in e)] if enums else kind


def _type_of(key: str) -> TypeAdapter[Any]:
    if key in FIXED:
        raise RecipeError(f"{key} cannot be set: {FIXED[key]}. Remove it.")
    if key not in _types():
        if key in GONE:
            raise RecipeError(f"{key} is no key any more: {GONE[key]}. Remove it.")
        keys = ALSO_CALLED | {ours: [ours] for ours in _types()}
        near = difflib.get_close_matches(key.replace("-", "_"), keys, n=1)
        meant = " or ".join(repr(ours) for name in near for ours in keys[name])
        hint = f"Did you mean {meant}?" if near else "docs/recipes.md lists all keys."
        raise RecipeError(f"Unknown key {key!r}: neither draftsmith nor SFTConfig has it. {hint}")
    return _types()[key]


def chosen_loss(recipe: Recipe) -> tuple[LossName, str]:
    """The loss that a run trains with, and why."""
    if recipe.loss != "auto":
        return recipe.loss, "the recipe names it"
    if recipe.temperature == 0:
        return "forward_kl", (
            "greedy verification asks for the likeliest token; of the losses this one, against a "
            "sharpened p, came out best there (docs/lab-notes.md)"
        )
    return "lk", "rejection sampling accepts sum min(p, q), which this loss raises (2602.23881)"


def _check_together(recipe: Recipe) -> None:
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", recipe.name):
        raise RecipeError(
            f"name is {recipe.name!r}, but names a folder; use letters, digits, '.', '-' and '_'."
        )
    if recipe.teacher_temperature > 1:
        raise RecipeError(
            f"teacher_temperature is {recipe.teacher_temperature}, but must be at most 1: above 1 "
            "most of p would move to tokens that were not cached, and how much cannot be known."
        )
    _check_long_prompts(recipe)
    _check_minutes(recipe)
    _check_server(recipe)
    if recipe.device_map is not None and recipe.training.get("use_cpu", False):
        raise RecipeError(
            "device_map is auto, which spreads the target over GPUs, but use_cpu is true; set it "
            "to false, or leave device_map out."
        )
    _check_drafter(recipe)
    if recipe.gamma is not None and recipe.gamma > recipe.max_gamma:
        raise RecipeError(
            f"gamma is {recipe.gamma}, more than max_gamma {recipe.max_gamma}; raise max_gamma."
        )
    if recipe.temperature == 0 and (recipe.top_k is not None or recipe.top_p != 1):
        raise RecipeError(
            f"top_k {recipe.top_k} and top_p {recipe.top_p} do nothing at temperature 0, which is "
            "greedy; set temperature, or leave them out."
        )
    _check_adapters(recipe)


def _check_adapters(recipe: Recipe) -> None:
    # a tied embedding would get the head's adapter merged into it, with no more than a warning
    if re.search("lm_head|embed", recipe.lora_target_modules):
        raise RecipeError(
            f"lora_target_modules is {recipe.lora_target_modules!r}: adapters on head or "
            "embeddings merge wrongly where the two are tied, and one on a trimmed head fits no "
            "other engine's; name other layers, or all-linear."
        )
    if recipe.use_peft and recipe.training.get("max_steps") == 0:
        raise RecipeError(
            "max_steps is 0, which trains nothing, and use_peft is true: there would be no "
            "adapter; leave max_steps out, or set use_peft to false to make a base."
        )
    if recipe.base is not None and recipe.draft is not None:
        raise RecipeError(
            f"base is {recipe.base!r}, a pruned draft, and draft is {recipe.draft!r}, a sibling; "
            "give one. A sibling is the base of its adapters by itself."
        )


def _check_long_prompts(recipe: Recipe) -> None:
    if recipe.long_prompts != "truncate_left":
        return
    if recipe.max_prompt_length is None:
        raise RecipeError(
            "long_prompts is truncate_left, but max_prompt_length is null; say how many tokens are "
            "kept."
        )
    if recipe.speculative_url is not None:
        raise RecipeError(
            "long_prompts is truncate_left, but the servers of speculative_url render the prompts "
            "of the evaluation themselves, whole; set it to drop."
        )


def _check_minutes(recipe: Recipe) -> None:
    if recipe.minutes is None:
        return
    if recipe.answers == "server":
        raise RecipeError(
            "minutes cannot be kept where a server answers: how fast it is changes with its other "
            "load; set minutes to null, and max_train_prompts and max_steps."
        )
    if (recipe.max_answers is None) != (recipe.training.get("max_steps", -1) < 0):
        raise RecipeError(
            "minutes decides max_answers and max_steps; leave both out, set minutes to null, or "
            "give both as a run has decided them."
        )


def _check_drafter(recipe: Recipe) -> None:
    name = recipe.kind_name
    if name not in kinds():
        raise RecipeError(
            f"drafter is {name!r}, but must be auto or one of {', '.join(kinds())}; correct it."
        )
    if recipe.drafter == "auto" and not (recipe.planned and (recipe.minutes or 0) >= COMPARING):
        raise RecipeError(
            f"minutes is {yaml_text(recipe.minutes)}, max_answers {yaml_text(recipe.max_answers)}, "
            "but drafter is auto, which compares kinds of draft for a tenth of the minutes; give "
            f"{COMPARING} or more without max_answers and max_steps, or name a drafter."
        )
    if recipe.drafter == "auto" and (recipe.draft or recipe.base) is not None:
        key = "draft" if recipe.draft else "base"
        raise RecipeError(
            f"drafter is auto, which compares what can be made of the target, but {key} is "
            f"{getattr(recipe, key)!r}; remove one of the two."
        )
    if not recipe.kind.from_target and recipe.draft is None:
        raise RecipeError(
            f"drafter is {name!r}, but draft is null; name the draft with --draft, or set drafter "
            "to pruned."
        )
    if recipe.kind.from_target and recipe.sibling is not None:
        raise RecipeError(
            f"drafter is {name!r}, which is made from the target itself, but draft names "
            f"{recipe.draft!r}; remove one of the two."
        )
    if recipe.kind.language_model:
        return
    if recipe.base is not None:
        raise RecipeError(
            f"base is {recipe.base!r}, a pruned draft, but drafter {name!r} is made anew; leave "
            "one of them out."
        )
    if recipe.use_peft:
        raise RecipeError(
            f"use_peft is true, but drafter {name!r} has weights that start at nothing, which "
            "adapters of a low rank do not train; set use_peft to false."
        )
    if recipe.strategy not in ("auto", "direct"):
        raise RecipeError(
            f"strategy is {recipe.strategy!r}, but drafter {name!r} drafts in the target's own "
            "ids, so there is nothing to bridge; set strategy to auto."
        )


def _check_server(recipe: Recipe) -> None:
    if recipe.answers == "vllm" and recipe.train_on_prompts:
        raise RecipeError(
            "train_on_prompts is true, but answers is vllm, which is asked for distributions of "
            "answers only; set it to false, or answers to local."
        )
    if recipe.answers != "server":
        keys = ("answer_url", "answer_model", "speculative_url")
        if unused := [key for key in keys if getattr(recipe, key) is not None]:
            raise RecipeError(
                f"{unused[0]} is {getattr(recipe, unused[0])!r}, but answers is {recipe.answers}, "
                "where no server of yours is asked; set answers to server, or remove it."
            )
        return
    if recipe.answer_url is None:
        raise RecipeError(
            "answers is server, but answer_url is null; give the address of the server that "
            "serves the target, as http://HOST:PORT."
        )
    if recipe.device_map is not None:
        raise RecipeError(
            "device_map is auto, but answers is server, and then no target is loaded here; leave "
            "one of them out."
        )
    if recipe.train_on_prompts:
        raise RecipeError(
            "train_on_prompts is true, but answers is server, which is asked for distributions of "
            "answers only; set it to false, or answer locally."
        )
    if recipe.sibling is None:
        raise RecipeError(
            f"answers is server, but drafter {recipe.kind_name!r} takes the target's own weights, "
            "and with a server they are never loaded; name a sibling with --draft, or answer "
            "locally."
        )
    if recipe.speculative_url == recipe.answer_url:
        raise RecipeError(
            f"speculative_url is {recipe.speculative_url!r}, and so is answer_url, but the one "
            "speculates and the other must not; start two servers."
        )
