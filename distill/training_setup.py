"""What a training begins with: its SFTConfig, checkpoint, processes, weights and optimiser."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import (
    DistributedDataParallelKwargs,
    ProjectConfiguration,
    parse_flag_from_env,
)
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from trl import SFTConfig, SFTTrainer

from align.machine import from_first, usual_dtype
from distill.checkpoint import last_checkpoint, launch_of
from distill.drafters.kind import RATED_WIDTH, DraftKind
from distill.recipe import Recipe
from distill.recipe_files import RecipeError

# trl and this file use the old name, because transformers 5.17 has it, too
warnings.filterwarnings(
    "ignore", message="`(is_)?gradient_checkpointing(_enable)?`", category=FutureWarning
)

TRAINED_RATES = (5e-5, 2e-4)  # of a sibling (careful guesses): full fine-tuning, LoRA
LEAST_CONTINUED = 1e-5
WARMUP = 0.1  # share of the steps of a draft that was trained before
LORA_RATE = 5e-3  # of a new draft of hidden size RATED_WIDTH
FITTED_SHARE = 0.1  # factor on the rate of least-squares-initialised weights (docs/lab-notes.md)
WAIT = 7 * 24 * 3600  # seconds of waiting for a process; the launcher notices a dead one


def continued_rate(kind: DraftKind, rate: float) -> float:
    """The learning rate of a draft that was made from a target at `rate` (docs/lab-notes.md).

    Higher rates gain as much on new text and lose more on the old.
    """
    return rate / 3 if kind.language_model else max(LEAST_CONTINUED, rate / 10)


def usual_rate(recipe: Recipe, width: int) -> float:
    """The learning rate where the recipe names none. width: the draft's hidden size.

    The rate of new weights falls with the width, because a step of Adam changes a layer's outputs
    by the rate times the number of inputs (arXiv 2203.03466). At 1,536 the best rates were even
    lower than that, so the exponent is 2 (docs/lab-notes.md).
    """
    kind, trained = recipe.kind, TRAINED_RATES[recipe.use_peft]
    fall = min(1, RATED_WIDTH / width) ** 2
    if recipe.starts_trained:
        if kind.language_model:
            return trained
        return continued_rate(kind, kind.rate * fall)
    new, least = (LORA_RATE, trained) if recipe.use_peft else (kind.rate, kind.least_rate)
    return max(least, new * fall)


def training_config(recipe: Recipe, width: int = RATED_WIDTH) -> SFTConfig:
    """The recipe's SFTConfig. width: the draft's hidden size.

    Raises RecipeError for values that transformers refuses, a tracker that is not installed, and a
    missing checkpoint.
    """
    resumed(recipe)
    usual = from_first(usual_dtype(recipe.training.get("use_cpu", False)))
    values: dict[str, Any] = {
        "learning_rate": usual_rate(recipe, width),
        "warmup_steps": WARMUP if recipe.starts_trained else recipe.kind.warmup,
        "bf16": usual == "bfloat16" and not recipe.training.get("fp16", False),
        "fp16": usual == "float16" and not recipe.training.get("bf16", False),
        "report_to": "none",
        "ddp_timeout": WAIT,
        "save_total_limit": 2,
    } | recipe.training
    try:
        config = SFTConfig(
            **values,
            output_dir=str(recipe.folder),
            gradient_checkpointing=recipe.activation_checkpointing,  # its name since 5.17
        )
        SFTTrainer.get_optimizer_cls_and_kwargs(config)  # may need another package
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        gpu = recipe.training.get("use_cpu", False) or torch.accelerator.is_available()
        reason = str(error) if gpu else f"torch finds no GPU here: {error}"
        raise RecipeError(
            f"transformers refuses the recipe ({reason}); correct or remove the key that it names."
        ) from error
    installed = [str(tracker.value) for tracker in get_available_trackers()]
    for tracker in config.report_to or ():
        if tracker not in installed:
            raise RecipeError(
                f"report_to names {tracker!r}, which is not one of accelerate's trackers that are "
                f"installed here ({', '.join(installed) or 'none'}); install it, or name another."
            )
    return config


def resumed(recipe: Recipe) -> Path | None:
    """The checkpoint from which training resumes, or None. All processes must call it.

    Raises RecipeError if it is missing.
    """
    named = recipe.training.get("resume_from_checkpoint")
    if named is None:
        return from_first(last_checkpoint(recipe.folder))
    if launch_of(Path(named)) is None:
        raise RecipeError(
            f"resume_from_checkpoint is {named!r}, but this folder is not a complete checkpoint; "
            "name another, or leave the key out to resume from the last complete one."
        )
    return Path(named)


def accelerator_of(config: SFTConfig) -> Accelerator:
    """The processes of this run as accelerate sees them. The config sets up their state."""
    state, precision = PartialState(), "bf16" if config.bf16 else "fp16" if config.fp16 else "no"
    sharded = parse_flag_from_env("ACCELERATE_USE_FSDP")
    if sharded and state.distributed_type == DistributedType.MULTI_CPU:
        # accelerate shards only over accelerators. On CPU processes it would use DDP without a
        # warning. Nothing else depends on this name
        state.distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        cpu=config.use_cpu,
        mixed_precision=precision,
        log_with=config.report_to or None,
        project_config=ProjectConfiguration(config.output_dir, f"{config.output_dir}/runs"),
        # checkpointed activations and unused parameters cannot go together
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=not config.gradient_checkpointing)
        ],
    )
    if accelerator.is_fsdp2 and config.bf16:
        # accelerate's own policy would sum gradients in bf16, too
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy
    return accelerator


def trainable_model(recipe: Recipe, model: Any, new_entries: bool) -> Any:
    """The model with its frozen parts and adapters.

    An input embedding that is not tied to the head is frozen, unless it has new entries; then LoRA
    also trains embedding and head in full.
    """
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding is not None and head.weight is embedding.weight
    if embedding is not None and not tied and not new_entries:
        embedding.weight.requires_grad_(False)
    if not recipe.use_peft:
        return model
    # on all linear layers, because queries and values alone have too few weights; not on the
    # head, because an adapter on a head that is tied to the embedding is merged wrongly
    adapters = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    if new_entries:
        whole = [embedding] if tied else [embedding, head]
        adapters.modules_to_save = [names[part] for part in whole]
        adapters.ensure_weight_tying = tied
    if modules := recipe.kind.added_modules:
        adapters.modules_to_save = [*(adapters.modules_to_save or []), *modules]
    torch.manual_seed(recipe.seed)  # all processes make the same adapters
    return get_peft_model(model, adapters)


def optimizer_of(recipe: Recipe, config: SFTConfig, model: nn.Module) -> Any:
    """The recipe's optimiser. Norms and biases have no weight decay.

    Least-squares-initialised weights of a new draft get a lower learning rate, because the full
    rate destroys the initialisation.
    """
    fitted = recipe.kind.fitted_weights if recipe.draft is None else ()
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decay = config.weight_decay if p.dim() > 1 else 0.0
            share = FITTED_SHARE if name.startswith(fitted) else 1
            rate = config.learning_rate * share
            groups.setdefault((decay, rate), []).append(p)
    optimizer_class, arguments = SFTTrainer.get_optimizer_cls_and_kwargs(config)
    parameters = [
        {"params": members, "weight_decay": decay, "lr": rate}
        for (decay, rate), members in groups.items()
    ]
    return optimizer_class(parameters, **arguments)
