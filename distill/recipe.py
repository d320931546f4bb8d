"""Recipes: flat keys, named as in trl and transformers, checked before anything runs.

`--recipe code` is recipes/code/default.yaml, `--recipe code/lora` is recipes/code/lora.yaml, and a
file of your own is given by its path. Every key can be overridden: `--learning_rate 1e-4`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from ruamel.yaml.error import YAMLError

from align.command_line import (
    SWITCH,
    AtLeastNone,
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Text,
    UpToOne,
    fault,
    parser_of,
)
from align.command_line import (
    option as _key,
)
from align.machine import usual_dtype
from distill.drafters.kind import DraftKind, kinds
from distill.losses import LossName
from distill.recipe_files import (
    RecipeError,
    find_recipe,
    new_yaml,
    read_yaml,
    recipe_files,
    yaml_text,
)
from distill.teacher.store import AnswerSettings
from eval.chat_template import LongPrompts
from eval.decoding.loop import Decoding
from eval.decoding.verification import SampleMethod, Sampling
from eval.engines.server import check_address

Strategy = Literal["auto", "direct", "padded", "remap", "transplant"]
Answerer = Literal["auto", "local", "vllm", "server", "logged"]
WITHOUT_PROMPTS = ("vllm", "server", "logged")  # sources without distributions within prompts
Schedule = Literal["linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt"]
HubId = Annotated[str, Field(pattern=r"^\w[\w.-]*/[\w.-]+$")]


@dataclass(frozen=True)
class Recipe:
    """The settings of a run; each field except `training` is a recipe key."""

    target: Text = _key(
        "model to speed up: Hub id, folder, GGUF file or pypi: file", group="target and prompts"
    )
    train_prompts: Text = _key("training prompts: Hub data set, pypi: file, .jsonl or embedded:…")
    eval_prompts: Text = _key("evaluation prompts; near-duplicates of them are not trained on")
    old_prompts: Text | None = _key("prompts that a trained draft knows: 3 in 10 to train on", None)
    instruction: Text | None = _key("user message; {prompt} stands for the prompt", None)
    chat_template_kwargs: dict[str, Any] | None = _key("arguments of the chat template", None)
    max_prompt_length: Count | None = _key("most tokens of a prompt; null: what fits", None)
    long_prompts: LongPrompts = _key("longer prompts: error, drop or truncate_left", "error")
    max_train_prompts: Count = _key("most training prompts; the seed draws them", 2000)
    max_eval_prompts: Count | None = _key("most evaluation prompts; null: all", None)
    name: Text = _key("name of run and output folder; default: the file's name", "run", group="run")
    domain: Text = _key("what the draft is for, as text for the model card", "general")
    target_hub_id: HubId | None = _key("the target's ORG/NAME on the Hub, for the model card", None)
    output_dir: Text | None = _key("output folder; null: outputs/NAME", None)
    minutes: Positive | None = _key("time budget of the run; null: no time limit", None)
    dtype: Literal["bfloat16", "float16", "float32"] = _key(
        "dtype of target and draft; without bf16 instructions float32 on a CPU, float16 on a GPU",
        "bfloat16",
    )
    device_map: Literal["auto"] | None = _key("auto: the target's layers over all GPUs", None)
    dry_run: bool = _key("print what the run needs and a draft can gain, then stop", False)
    coverage_curve: bool = _key("print what trimmed heads would lose, then stop", False)
    draft: Text | None = _key(
        "sibling or published draft; null: made from the target", None, group="draft"
    )
    drafter: Text | None = _key("kind of draft; null: sibling if draft is set, else pruned", None)
    strategy: Strategy = _key("vocabulary mapping; auto: the one that fits the pair", "auto")
    num_draft_layers: Count = _key("layers of a pruned draft (the target's first) or of DFlash", 2)
    draft_vocab_size: Count | None = _key("entries of the draft's LM head; null: all", None)
    fit_tokens: Count = _key("output tokens for the least-squares initialisation", 20_000)
    use_peft: bool = _key("LoRA on all linear layers but the head; false: full fine-tuning", False)
    lora_r: Count = _key("rank of the adapters", 64)
    lora_alpha: Count = _key("the adapters are scaled by lora_alpha / lora_r", 128)
    answers: Answerer = _key(
        "source of the target's outputs: local, vllm, server, logged",
        "auto",
        group="outputs of the target",
    )
    answer_url: Text | None = _key("address of the target's server, http://HOST:PORT", None)
    answer_model: Text | None = _key("the target's name on its server; null: its only model", None)
    answer_temperature: NotNegative = _key("temperature of the outputs to train on", 0.0)
    answers_per_prompt: Count = _key("outputs for each training prompt", 1)
    train_on_prompts: bool = _key("also train on the distributions within prompts", False)
    max_answers: Count | None = _key("most outputs to train on, of all prompts; null: all", None)
    answer_max_new_tokens: Count = _key("most tokens of an output to train on", 128)
    answer_batch_size: Count = _key("prompts in a batch, or requests in flight", 48)
    cache_top_k: Count = _key("likeliest tokens that are cached of each distribution", 15)
    loss: LossName | Literal["auto"] = _key(
        "function of losses.py; auto: by temperature", "auto", group="training"
    )
    held_out_prompts: AtLeastNone = _key(
        "held out to choose the best weights; at most 1 in 20, of a trained draft 1 in 5", 32
    )
    early_stopping_patience: Count | None = _key("end after N measurements without a new best", 5)
    teacher_temperature: UpToOne = _key("below 1 sharpens the target: p ** (1 / value)", 1.0)
    tokens_per_step: Count | None = _key("tokens of a step's texts; null: 2048, GPU: 8192", None)
    ttt_steps: Count = _key("steps of an EAGLE-3 draft that are trained together", 3)
    activation_checkpointing: bool = _key("recompute activations: slower, far less memory", False)
    temperature: NotNegative = _key("deployed temperature; 0: greedy", 0.0, group="evaluation")
    top_k: Count | None = _key("deployed top-k; null: every token", None)
    top_p: UpToOne = _key("deployed top-p; 1: every token", 1.0)
    max_new_tokens: Count = _key("most tokens of an output in the evaluation", 128)
    gamma: Count | None = _key("draft length; null: chosen on the tuning prompts", None)
    max_gamma: Count = _key("longest draft length", 6)
    speed_prompts: Count = _key("most evaluation prompts that are timed", 40)
    tuning_prompts: Count = _key("training prompts set aside to choose the draft length", 8)
    engine: Literal["auto", "vllm"] | None = _key(
        "also measures the drafts; auto: vllm if it is installed; null: none", "auto"
    )
    training: dict[str, Any] = field(default_factory=dict)  # fields of TrainingArguments

    @property
    def kind_name(self) -> str:
        """The kind of draft: the name of a file in distill/drafters."""
        if self.drafter is None:
            return "pruned" if self.draft is None else "sibling"
        return self.drafter

    @property
    def kind(self) -> DraftKind:
        return kinds()[self.kind_name]

    @property
    def sibling(self) -> str | None:
        """`draft` if it is a language model; None without one, or if it reads states."""
        return self.draft if self.kind.language_model else None

    @property
    def starts_trained(self) -> bool:
        """Whether the base draft was trained before: a sibling, a published draft, an MTP head."""
        return self.draft is not None or self.kind.trained

    @property
    def remote_target(self) -> bool:
        """Whether the target is behind a server, so that its weights are not loaded here."""
        return self.answer_url is not None

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or f"outputs/{self.name}")

    def values(self) -> dict[str, Any]:
        """All keys of this class, and the fields of TrainingArguments that are set."""
        return {name: getattr(self, name) for name in OWN} | self.training

    @property
    def step_tokens(self) -> int:
        """The tokens of a training step, of prompts and outputs."""
        on_gpu = torch.cuda.is_available() and not self.training.get("use_cpu", False)
        return self.tokens_per_step or (8192 if on_gpu else 2048)

    @property
    def seed(self) -> int:
        return int(self.training.get("seed", 42))

    @property
    def sampling(self) -> Sampling:
        """The deployed temperature, top-k and top-p."""
        return Sampling(self.temperature, self.top_k, self.top_p)

    @property
    def draft_sample_method(self) -> SampleMethod | None:
        """How an engine must draft: the loss assumes samples of q; None: greedy decoding."""
        return "probabilistic" if self.temperature else None

    def answer_settings(self, stops: Iterable[int]) -> AnswerSettings:
        """How the target generates the training outputs. stops: its stop tokens."""
        sampling, longest = Sampling(self.answer_temperature), self.answer_max_new_tokens
        decoding = Decoding(sampling, frozenset(stops), longest, self.seed)
        logged = self.answers == "logged"
        return AnswerSettings(decoding, self.cache_top_k, self.answer_batch_size, logged)


OWN = {f.name: f for f in dataclasses.fields(Recipe) if f.name != "training"}
_REQUIRED = [key for key, f in OWN.items() if f.default is dataclasses.MISSING]

# The fields of transformers.TrainingArguments that are keys, too. The run decides all others.
_TRAINING: list[tuple[Any, str]] = [
    (Count, "gradient_accumulation_steps ddp_timeout"),
    (Literal[-1] | AtLeastNone, "max_steps"),  # 0: the base draft is kept
    (Annotated[int, Field(ge=0, lt=2**32)], "seed"),  # numpy's limit
    (NotNegative, "learning_rate warmup_steps weight_decay max_grad_norm"),
    (Positive, "num_train_epochs logging_steps save_steps adam_epsilon"),
    (BelowOne, "adam_beta1 adam_beta2"),
    (Annotated[int, Field(ge=2)], "save_total_limit"),  # the latest may be cut short by a kill
    (bool, "use_cpu bf16 fp16 tf32 disable_tqdm"),
    (Schedule, "lr_scheduler_type"),
    (Literal["steps", "epoch", "no"], "save_strategy"),  # the best weights are always saved
    (Text, "optim resume_from_checkpoint run_name project"),
    (Text | list[str], "report_to"),
]
TRAINING = {key: kind for kind, keys in _TRAINING for key in keys.split()}


def load_recipe(argv: list[str]) -> Recipe:
    """The checked recipe of `--recipe NAME-or-PATH [--key value …]`. Raises RecipeError."""
    overrides = _arguments(argv)
    path = find_recipe(overrides.pop("recipe"))
    values = {"name": path.stem} | read_yaml(path)
    if "target" in overrides:  # the id is that of the recipe's target
        values.pop("target_hub_id", None)
    if overrides.get("answers") in WITHOUT_PROMPTS:  # the recipe's value is for its own answers
        values.pop("train_on_prompts", None)
    for key, text in overrides.items():
        values[key] = _from_command_line(key, text)
    recipe = build_recipe(values)
    begun = recipe.folder / "recipe.yaml"
    if "dtype" not in values and begun.is_file():  # a run may go on at a machine of another kind
        return build_recipe(values | {"dtype": read_yaml(begun).get("dtype", recipe.dtype)})
    return recipe


def _arguments(argv: list[str]) -> dict[str, str]:
    """The command line's value of each key, as text. Exits with status 2 for a missing value."""
    parser = parser_of(Recipe, "accelerate launch distill/train.py", __doc__, as_text=True)
    names = f"a path, or one of {', '.join(recipe_files())}"
    parser.add_argument("--recipe", required=True, metavar="NAME-or-PATH", help=names)
    for key, kind in TRAINING.items():
        more: dict[str, Any] = SWITCH if kind is bool else {}
        parser.add_argument(f"--{key}", help=argparse.SUPPRESS, **more)
    fields = ", ".join(TRAINING)
    parser.epilog = f"{parser.epilog}\n\nFields of transformers.TrainingArguments: {fields}"
    options, unknown = parser.parse_known_args(argv)
    for word in unknown:
        _type_of(word.removeprefix("--").partition("=")[0])
    if unknown:
        parser.error(f"{unknown[0]!r} is not a key; write --key value")
    return vars(options)


def build_recipe(values: dict[str, Any]) -> Recipe:
    """A checked Recipe. Raises RecipeError for unknown, ill-typed, missing or clashing keys.

    A field of TrainingArguments that is None has its default.
    """
    values = {k: v for k, v in values.items() if v is not None or k not in TRAINING}
    for key, value in values.items():
        try:
            _type_of(key).validate_python(value)
        except ValidationError as error:
            raise RecipeError(
                f"{key} is {yaml_text(value)} ({type(value).__name__}), but {fault(error)}; "
                "correct its value."
            ) from error
    if lacking := [key for key in _REQUIRED if key not in values]:
        raise RecipeError(f"The recipe lacks the required {', '.join(lacking)}; add these keys.")
    on_gpu = values.get("answers") == "vllm" and torch.cuda.is_available()
    values = {"dtype": usual_dtype(values.get("use_cpu", False) and not on_gpu)} | values
    training = {key: value for key, value in values.items() if key not in OWN}
    recipe = Recipe(**{k: v for k, v in values.items() if k in OWN}, training=training)
    _check_together(recipe)
    return recipe


def dump(recipe: Recipe, **decided: Any) -> str:
    """The resolved recipe as YAML, itself a recipe. decided: values that replace the recipe's."""
    return yaml_text(recipe.values() | decided) + "\n"


def _from_command_line(key: str, text: str) -> Any:
    """The value as YAML reads it; a text as it is written, because YAML ends `sql #2` at the #."""
    try:
        value = new_yaml().load(text)
    except YAMLError:
        return text
    if isinstance(value, str) or (_fits(key, text) and not _fits(key, value)):
        return text
    return value


def _fits(key: str, value: Any) -> bool:
    try:
        _type_of(key).validate_python(value)
    except ValidationError:
        return False
    return True


@functools.cache
def _types() -> dict[str, TypeAdapter[Any]]:
    """The type of each key. It is matched strictly: neither `true` nor `16.5` is an integer."""
    hints = typing.get_type_hints(Recipe, include_extras=True)
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    keys = TRAINING | {key: hints[key] for key in OWN}
    return {key: TypeAdapter(kind, config=strict) for key, kind in keys.items()}


def _type_of(key: str) -> TypeAdapter[Any]:
    if key not in _types():
        near = difflib.get_close_matches(key.replace("-", "_"), _types(), n=1)
        if key in ("per_device_train_batch_size", "group_by_length"):  # as in transformers
            near = ["tokens_per_step"]
        hint = f"Did you mean {near[0]!r}?" if near else "--help lists all keys."
        raise RecipeError(f"Unknown key {key!r}. {hint}")
    return _types()[key]


def chosen_loss(recipe: Recipe) -> tuple[LossName, str]:
    """The loss that a run trains with, and why."""
    if recipe.loss != "auto":
        return recipe.loss, "the recipe names it"
    if recipe.temperature == 0:
        return "forward_kl", (
            "greedy verification asks for the likeliest token, and of the losses measured this one "
            "was best, with teacher_temperature 0.5 (docs/lab-notes.md)"
        )
    return "lk", "rejection sampling accepts sum min(p, q), and this loss raises it (2602.23881)"


def _check_together(recipe: Recipe) -> None:
    """Raise RecipeError for keys that are valid alone and contradict each other."""
    if not re.fullmatch(r"[\w.-]*\w[\w.-]*", recipe.name):
        raise RecipeError(
            f"name is {recipe.name!r}, but becomes a folder; use letters, digits, '.', '-' and '_'."
        )
    if recipe.kind_name not in kinds():
        raise RecipeError(
            f"drafter is {recipe.kind_name!r}, but must be one of {', '.join(kinds())}; correct it."
        )
    if recipe.answer_url is not None:
        check_address(recipe.answer_url)
    values = recipe.values() | {"drafter": recipe.kind_name}

    def refuse(keys: str, reason: str) -> NoReturn:
        named = ", ".join(f"{key} is {yaml_text(values.get(key))}" for key in keys.split())
        raise RecipeError(f"{named}: {reason}.")

    kind, remote, logged = recipe.kind, recipe.remote_target, recipe.answers == "logged"
    if recipe.answers_per_prompt > 1 and recipe.answer_temperature == 0:
        refuse(
            "answers_per_prompt answer_temperature",
            "all outputs for a prompt would be the same; set a temperature",
        )
    if recipe.gamma is not None and recipe.gamma > recipe.max_gamma:
        refuse("gamma max_gamma", "no draft longer than max_gamma is tried; raise max_gamma")
    if recipe.temperature == 0 and (recipe.top_k is not None or recipe.top_p != 1):
        reason = "greedy decoding ignores top_k and top_p; set temperature, or leave them out"
        refuse("temperature top_k top_p", reason)
    if ("target" if recipe.sibling is None else "sibling") not in kind.made_from:
        remedy = (
            "remove draft, or set drafter to sibling" if recipe.sibling else "name one with draft"
        )
        sources = " or a ".join(kind.made_from)
        refuse("drafter draft", f"this drafter starts from a {sources}; {remedy}")
    if not kind.language_model and (recipe.use_peft or recipe.strategy not in ("auto", "direct")):
        reason = "this drafter has new weights and the target's ids; set use_peft to false and "
        refuse("drafter use_peft strategy", f"{reason}strategy to auto")
    if kind.adapter and recipe.max_gamma == 1:
        reason = "the first token of a draft is the target's own; set max_gamma to 2 or more"
        refuse("drafter max_gamma", reason)
    if kind.adapter and recipe.engine == "vllm":
        refuse("drafter engine", "SGLang alone serves this drafter; set engine to null")
    if any(getattr(recipe, key) for key in kind.unused):
        keys = " ".join(("drafter", *kind.unused))
        refuse(keys, "this drafter cannot use these keys; leave them out")
    if recipe.answers in WITHOUT_PROMPTS and recipe.train_on_prompts:
        refuse(
            "train_on_prompts answers",
            "distributions within prompts are neither requested from servers nor read with logged "
            "outputs; set train_on_prompts to false",
        )
    if logged and recipe.old_prompts is not None:
        reason = "old prompts have no logged output; add logged rows of them to train_prompts"
        refuse("old_prompts answers", reason)
    if logged and (recipe.answers_per_prompt > 1 or recipe.cache_top_k == 1):
        refuse(
            "answers answers_per_prompt cache_top_k",
            "a logged output is read once, with several likely tokens; set answers_per_prompt to 1 "
            "and cache_top_k to 15",
        )
    needless = not logged and (remote or recipe.answer_model is not None)
    if not remote if recipe.answers == "server" else needless:
        refuse(
            "answers answer_url answer_model",
            "answers: server needs answer_url (http://HOST:PORT), answers: logged may have it, and "
            "other values of answers use no server; set both, or remove these keys",
        )
    if remote and recipe.sibling is None:
        refuse(
            "answer_url drafter draft",
            "this drafter reads the target's weights or hidden states, and a server sends neither; "
            "name a sibling with draft, or set answers to vllm without answer_url, which runs here",
        )
