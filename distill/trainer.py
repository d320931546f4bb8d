"""Distillation from cached distributions: an SFTTrainer whose loss never sees the target.

Legend: B rows, T padded length.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import LoraConfig, PeftModel
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedModel,
    ProgressCallback,
    TrainerCallback,
)
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTConfig, SFTTrainer

from align.errors import UserError
from align.files import atomic_file, remove, write_errors_explained, write_json
from align.machine import free_memory, from_first, usual_dtype
from align.sources import SourceError, read_json
from distill.clock import Clock, TrainingClock
from distill.drafters.kind import Draft
from distill.held_out import FIRST_INDEX, METRIC, PADDING, HeldOut, best_of, read_measurements
from distill.loss_forward import give_loss_forward, take_loss_forward
from distill.losses import LOSSES, sharpen
from distill.models import Pair, head_entries
from distill.prepare import read_prepared
from distill.recipe import Recipe, RecipeError, chosen_loss, dump
from distill.teacher.states import States, states_of
from distill.teacher.store import Answers, CachedAnswer
from distill.training_set import DistillationCollator, answer_rows

# trl and this file use the old name, because transformers 5.17 has it, too
warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing`", category=FutureWarning)

SCORES = 2**26  # bytes of attention scores that a batch on a CPU may keep for its gradients
# Learning rates where a recipe names none: (full fine-tuning, LoRA). NEW_RATES are for a draft made
# of a target whose hidden size is WIDTH, TRAINED_RATES for the recipe's `draft` and an MTP head.
# docs/lab-notes.md has measurements of NEW_RATES; 5e-5 is a careful guess.
NEW_RATES, TRAINED_RATES, WIDTH = (3e-3, 5e-3), (5e-5, 2e-4), 576
SLOW_RATE = 1 / 3  # factor on the learning rate of least-squares-initialised weights
SEEDS_A_STEP = 2**31 - 1  # more than there are outputs, so that no two steps share a seed
REPEAT = "repeat.yaml"  # in a run's folder: the recipe with the run's numbers of outputs and steps
COMPLETE = "complete"  # the last file of a checkpoint (`mark_complete`)
WAIT = 7 * 24 * 3600  # seconds of waiting for a process; the launcher notices a dead one


def hollow_copy(model: Any) -> Any:
    """A copy of the model without weights, into which gathered weights are loaded."""
    empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def cpu_attention(config: PreTrainedConfig, rows: int, width: int) -> str:
    """The attention implementation for training on a CPU on a batch [rows, width].

    Eager attention takes 0.9 to 1 times as long as torch's fused attention (docs/lab-notes.md), but
    every layer keeps its scores twice, in fp32 and in bf16. Their size grows as width².
    """
    text = config.get_text_config()
    if not hasattr(text, "num_attention_heads"):
        return "eager"  # a draft without attention
    scores = rows * text.num_attention_heads * width**2 * text.num_hidden_layers
    return "eager" if 6 * scores <= SCORES else "sdpa"


class _Progress(ProgressCallback):
    """A progress bar that shows the latest loss, instead of one line for every log."""

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if self.training_bar is not None and "loss" in logs:  # not the final totals
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}")


class SameOrder(LengthGroupedSampler):
    """Rows in groups of like length, in an order that depends on the seed and the epoch alone.

    The order is the same for any number of processes and after any interruption. An optimiser step
    takes the next `batch` rows. The last step of an epoch is filled with the last rows of the order
    a second time, so that every process has rows.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        super().__init__(batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        order = list(super().__iter__())
        repeats = itertools.cycle(reversed(order))
        return itertools.chain(order, itertools.islice(repeats, len(self) - len(order)))


class DraftTrainer(SFTTrainer):
    """A loss of distill/losses.py on response tokens, against cached distributions (2310.08461).

    trl's DistillationTrainer is not used: it needs the target at each step, and supports neither
    cached distributions nor a trimmed vocabulary. The steps are the same for any number of
    processes, and any number can resume a checkpoint, unless FSDP sharded it.
    """

    def __init__(self, recipe: Recipe, clock: TrainingClock | None, **kwargs: Any) -> None:
        self.recipe, self.clock = recipe, clock
        super().__init__(**kwargs)
        # Trainer decides this before our forward is attached. It would average the means of small
        # batches, and tokens of short outputs would weigh more
        self.model_accepts_loss_kwargs = True
        if self.pop_callback(ProgressCallback):
            self.add_callback(_Progress())
        model: Any = self.model
        self.attention = model.config._attn_implementation
        # receives the weights at the end if they are sharded
        self.whole = hollow_copy(model) if self.is_fsdp_enabled else None
        plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        give_loss_forward(plain, recipe.kind, LOSSES[chosen_loss(recipe)[0]])

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # as integers, because FSDP rounds every float if the weights are bf16
        bits = inputs["top_logprobs"].float().view(torch.int32)
        return super()._prepare_inputs(inputs | {"top_logprobs": bits})

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimiser. Least-squares-initialised weights get a lower learning rate, because the
        full rate destroys the initialisation.
        """
        optimizer = super().create_optimizer(model)
        trained: Any = model or self.model
        prefixes = self.recipe.kind.fitted_weights
        names = {id(p): name for name, p in trained.named_parameters()}
        for group in list(optimizer.param_groups) if prefixes else ():
            fitted = [p for p in group["params"] if names[id(p)].startswith(prefixes)]
            fitted_ids = {id(p) for p in fitted}
            group["params"] = [p for p in group["params"] if id(p) not in fitted_ids]
            keys = {k: v for k, v in group.items() if k != "params"}
            if fitted:
                optimizer.add_param_group({**keys, "params": fitted, "lr": group["lr"] * SLOW_RATE})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The recipe's schedule; with a clock it follows steps or time, whichever is later."""
        schedule: Any = super().create_scheduler(num_training_steps, optimizer)
        if (clock := self.clock) is not None:
            schedule.lr_lambdas = [
                lambda step, rate=rate: rate(clock.position(step, num_training_steps))
                for rate in schedule.lr_lambdas
            ]
        return schedule

    def compute_loss(
        self, model: nn.Module, inputs: Any, *_: Any, num_items_in_batch: Any = None, **__: Any
    ) -> Any:
        index = inputs.pop("index")
        if self.recipe.teacher_temperature != 1:
            logprobs = inputs["top_logprobs"].view(torch.float32)  # see `_prepare_inputs`
            sharper = sharpen(logprobs, self.recipe.teacher_temperature)
            inputs["top_logprobs"] = sharper.view(torch.int32)
        # other implementations are those of models that torch's fused attention cannot compute
        if self.args.device.type == "cpu" and self.attention == "sdpa":
            draft: Any = self.model
            attention = cpu_attention(draft.config, *inputs["input_ids"].shape)
            draft.config._attn_implementation = attention
        # an output's random numbers do not depend on its process
        loss = model(**inputs, seeds=index + SEEDS_A_STEP * self.state.global_step).loss
        if not torch.isfinite(loss):
            raise UserError(
                f"The loss is {float(loss.detach())} at step {self.state.global_step + 1}, on "
                f"outputs {index.tolist()} of the cache; training stopped without this step. Lower "
                "learning_rate, or inspect these outputs; the last checkpoint is complete."
            )
        if num_items_in_batch is None:
            return loss / len(inputs["positions"])
        # the number covers all processes, and their gradients are averaged
        return loss / num_items_in_batch * self.accelerator.num_processes

    def prediction_step(self, model: nn.Module, inputs: Any, *_: Any, **__: Any) -> Any:
        """Returns no loss, the four results of `loss_forward._acceptance`, each [B, T] with PADDING
        where no token is predicted, and the labels.

        A deployed temperature above 1 is measured at 1, because the cache does not determine p
        above 1.
        """
        inputs, temperature = self._prepare_inputs(inputs), min(self.recipe.temperature, 1.0)
        with torch.no_grad(), self.compute_loss_context_manager():
            # the same random numbers at each measurement
            outputs = model(**inputs, seeds=inputs["index"], temperature=temperature)
        ids = inputs["input_ids"]
        parts = outputs.accepted, outputs.lacking, outputs.draft_accepted, outputs.draft_tokens
        by_token = torch.full((len(parts), ids.numel()), float(PADDING), device=ids.device)
        by_token[:, inputs["positions"]] = torch.stack(parts).float()
        return None, tuple(by_token.view(-1, *ids.shape)), inputs["labels"]

    def create_accelerator_and_postprocess(self) -> None:
        state = PartialState()
        sharded = parse_flag_from_env("ACCELERATE_USE_FSDP")
        if sharded and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate shards only over accelerators. On CPU processes it would use DDP without a
            # warning. Nothing else depends on this name
            state.distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled and self.args.bf16:
            # accelerate's own policy would sum gradients in bf16, too
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> SameOrder:
        rows: Any = self.train_dataset
        lengths = rows[self.args.length_column_name][:]  # a list, faster than one by one
        batch = self.get_total_train_batch_size(self.args)
        self.order = SameOrder(lengths, batch, self.args.seed)
        return self.order

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        saved: Any = self.state.stateful_callbacks
        ended = saved["TrainerControl"]["args"]["should_training_stop"]
        if ended and self.args.resume_from_checkpoint is None:
            self.control.should_training_stop = True  # the resumed training had already ended
            return
        self.order.epoch = epoch  # accelerate does not set it when it skips batches
        super()._run_epoch(model, epoch, *args, **kwargs)

    @property
    def processes(self) -> str:
        """The number of processes that train together, and their parallelism."""
        count = self.args.world_size
        strategy = self.accelerator.distributed_type.value if count > 1 else "alone"
        return f"{count} process{'es' if count > 1 else ''} ({strategy})"

    @property
    def launch(self) -> str:
        """What the processes that resume a checkpoint must have in common with its writers."""
        steps = f"{self.get_total_train_batch_size(self.args)} sequences a step"
        return f"{steps} in {self.processes}" if self.is_fsdp_enabled else steps

    def whole_model(self) -> PreTrainedModel | PeftModel | None:
        """The current model, unwrapped and unsharded.

        A sharded model (FSDP) is gathered: all processes call this, and only the first one gets
        the model, the others None. Without sharding each process gets its own.
        """
        if self.whole is None:
            return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if not self.args.should_save:
            return None
        self.whole.load_state_dict(state, assign=True)
        self.whole.tie_weights()
        return self.whole

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        free_memory()  # steps of other lengths left free blocks
        if self.args.should_save:
            remove(folder)  # an older one of this step
        self.accelerator.wait_for_everyone()
        # an older checkpoint is deleted when this one is complete
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        with write_errors_explained(folder):
            super()._save_checkpoint(model, trial)
        self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (folder / "README.md").unlink(missing_ok=True)  # peft's
            os.sync()
            mark_complete(folder, self.launch)
            rotate_checkpoints(
                str(folder.parent), limit, self.state.best_model_checkpoint, use_mtime=True
            )

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write nothing: `write_card` makes the draft's card."""


def mark_complete(checkpoint: Path, launch: str, spent: Sequence[Path] = ()) -> None:
    """Write the last file of a checkpoint: `DraftTrainer.launch`, and the bytes of each file.

    spent: files and folders that may be deleted afterwards.
    """
    sizes = {
        file.relative_to(checkpoint).as_posix(): file.stat().st_size
        for file in checkpoint.rglob("*")
        if file.is_file() and file.name != COMPLETE and not {file, *file.parents} & {*spent}
    }
    write_json(checkpoint / COMPLETE, {"launch": launch, "bytes": sizes})


def launch_of(checkpoint: Path) -> str | None:
    """The `DraftTrainer.launch` that wrote a complete checkpoint; None if it is incomplete."""
    try:
        marker = read_json(checkpoint / COMPLETE)
        for name, size in marker["bytes"].items():
            if (checkpoint / name).stat().st_size != size:
                return None
    except (SourceError, FileNotFoundError):
        return None
    return str(marker["launch"])


def last_checkpoint(folder: Path) -> Path | None:
    """The latest complete checkpoint, or None."""
    whole = [path for path in folder.glob("checkpoint-*") if launch_of(path) is not None]
    return max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def usual_rate(recipe: Recipe, width: int) -> float:
    """The learning rate where the recipe names none. width: the draft's hidden size.

    The rate of new weights falls with the width, because a step of Adam changes a layer's outputs
    by the rate times the number of inputs (arXiv 2203.03466). At 1,536 the best rates were even
    lower than that, so the exponent is 2.
    """
    new, trained = NEW_RATES[recipe.use_peft], TRAINED_RATES[recipe.use_peft]
    if recipe.draft is not None or recipe.kind.trained:
        return trained
    return max(trained, new * min(1, WIDTH / width) ** 2)


def training_config(recipe: Recipe, followed: bool = False, width: int = WIDTH) -> SFTConfig:
    """The recipe's SFTConfig.

    followed: the draft is evaluated before training and when `HeldOut` requests it, and its best
    weights are kept. width: the draft's hidden size.

    Raises RecipeError for values that transformers refuses, a tracker that is not installed, and a
    missing checkpoint.
    """
    resumed = _resumed(recipe)
    usual = from_first(usual_dtype(recipe.training.get("use_cpu", False)))
    values: dict[str, Any] = {
        "learning_rate": usual_rate(recipe, width),
        "bf16": usual == "bfloat16" and not recipe.training.get("fp16", False),
        "report_to": "none",
        "ddp_timeout": WAIT,
        "save_total_limit": 2,
    } | recipe.training
    if followed:
        if values.get("save_strategy") == "no":
            values["save_strategy"] = "best"  # saves only the best weights
        values |= {
            "eval_strategy": "epoch" if values.get("save_strategy") == "epoch" else "steps",
            "eval_steps": values.get("save_steps", SFTConfig.save_steps),
            "eval_delay": math.inf,  # so only when `HeldOut` requests it
            "eval_on_start": resumed is None,
            "per_device_eval_batch_size": values.get(
                "per_device_train_batch_size", SFTConfig.per_device_train_batch_size
            ),
            "load_best_model_at_end": True,
            "metric_for_best_model": METRIC,
            "greater_is_better": True,
            "restore_callback_states_from_checkpoint": True,
        }
    elif values.get("save_strategy") == "best":
        values["save_strategy"] = "no"  # nothing is measured
    try:
        config = SFTConfig(
            **values,
            output_dir=str(recipe.folder),
            gradient_checkpointing=recipe.activation_checkpointing,  # its name since 5.17
            max_length=None,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        # an optimiser or a tracker may need another package
        SFTTrainer.get_optimizer_cls_and_kwargs(config)
        for tracker in get_reporting_integration_callbacks(config.report_to):
            tracker()
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        gpu = recipe.training.get("use_cpu", False) or torch.accelerator.is_available()
        reason = str(error) if gpu else f"torch finds no GPU here: {error}"
        raise RecipeError(
            f"transformers refuses the recipe ({reason}); correct or remove the key that it names."
        ) from error
    if not (config.bf16 or config.fp16):  # not the one of `accelerate config`, which is for all
        config.mixed_precision = "no"
    # with more GPUs the trainer would use DataParallel, and that splits `positions` wrongly
    config._n_gpu = min(1, config.n_gpu)
    return config


def _resumed(recipe: Recipe) -> Path | None:
    """The checkpoint from which training resumes, or None. All processes must call it.

    Raises RecipeError if it is missing.
    """
    asked = recipe.training.get("resume_from_checkpoint")
    if asked is None:
        return from_first(last_checkpoint(recipe.folder))
    if launch_of(Path(asked)) is None:
        raise RecipeError(
            f"resume_from_checkpoint is {asked!r}, but this folder is not a complete checkpoint; "
            "name another, or leave the key out to resume from the last complete one."
        )
    return Path(asked)


def build_trainer(
    recipe: Recipe,
    pair: Pair,
    prepared: Draft,
    answers: Sequence[CachedAnswer],
    states: States | None = None,
    held_out: Sequence[CachedAnswer] = (),
    clock: Clock | None = None,
) -> DraftTrainer:
    """A trainer of the prepared draft in fp32.

    An input embedding that is not tied to the head is frozen. After a transplant it has untrained
    entries: then it is trained, and LoRA also trains embedding and head in full. states: see
    DistillationCollator. held_out: outputs to measure on while training. clock: ends the training
    of a run with `minutes`.
    """
    model = prepared.model.float()
    entry_of = head_entries(prepared.token_ids, pair.target.vocab_size)
    tokenizer = copy.deepcopy(pair.target.tokenizer)  # the trainer changes it
    if pair.target.special_ids["pad_token"] is None:
        tokenizer.pad_token = None  # else trl writes an id without an entry into the draft's config
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding is not None and head.weight is embedding.weight
    new_entries = pair.strategy == "transplant"  # for tokens that the draft was never trained on
    if embedding is not None and not tied and not new_entries:
        embedding.weight.requires_grad_(False)
        # it is read from its source again; it would be most of a small draft's checkpoint
        frozen = [part for part in (embedding, head) if not part.weight.requires_grad]
        model._keys_to_ignore_on_save = {f"{names[part]}.weight" for part in frozen}
    adapters = None
    if recipe.use_peft:
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
    width = model.config.get_text_config().hidden_size
    config = training_config(recipe, len(held_out) > 0, width)
    rows = answer_rows(answers)
    timing = None if clock is None or clock.minutes is None else TrainingClock(clock)
    callbacks: list[TrainerCallback] = [] if timing is None else [timing]
    evaluation: dict[str, Any] = {}
    if held_out:
        followed = HeldOut(recipe.folder, config, rows, held_out, timing)
        evaluation = {"eval_dataset": followed.rows, "compute_metrics": followed.metrics}
        callbacks.append(followed)
        if recipe.early_stopping_patience is not None:
            callbacks.append(EarlyStoppingCallback(recipe.early_stopping_patience))

    read = partial(_output_at, answers, held_out)
    return DraftTrainer(
        recipe,
        timing,
        model=model,
        args=config,
        train_dataset=rows,
        data_collator=DistillationCollator(read, entry_of, states),
        processing_class=tokenizer,
        peft_config=adapters,
        callbacks=callbacks,
        **evaluation,
    )


def _output_at(
    answers: Sequence[CachedAnswer], held_out: Sequence[CachedAnswer], index: int
) -> CachedAnswer:
    """The output of an index. A function of the module, which spawned workers can unpickle."""
    return answers[index] if index < FIRST_INDEX else held_out[index - FIRST_INDEX]


def distil_draft(
    recipe: Recipe, pair: Pair, prepared: Draft, answers: Answers, held_out: Answers, clock: Clock
) -> PreTrainedModel | None:
    """The distilled draft in fp32, on the first process; None elsewhere.

    Writes `repeat.yaml`: the recipe without `minutes`, with the same number of outputs and steps.
    If no measurement after a step is better than the first one (`best_of`), the base draft is kept.
    """
    if recipe.training.get("max_steps") == 0:
        return prepared.model.float() if PartialState().is_main_process else None
    states = states_of(answers.store, pair.layers)
    trainer = build_trainer(recipe, pair, prepared, answers, states, held_out, clock)
    distilled = distil(trainer, recipe)
    if distilled is None:
        return None
    counts = {"max_answers": answers.asked, "max_steps": trainer.state.global_step}
    with atomic_file(recipe.folder / REPEAT) as file:
        launch = f"accelerate launch --num_processes {trainer.accelerator.num_processes}"
        file.write(f"# {launch} distill/train.py --recipe {REPEAT}\n")
        file.write(dump(recipe, minutes=None, **counts))
    best = best_of(read_measurements(recipe.folder))
    if best is not None and best.step == 0:
        print("training did not improve the draft on held-out prompts: the base draft is kept")
        return read_prepared(recipe, pair).model.float()
    return distilled


def distil(trainer: DraftTrainer, recipe: Recipe) -> PreTrainedModel | None:
    """The distilled draft in fp32, unsharded, on the first process; None elsewhere.

    Resumes from the last complete checkpoint of the run, or from resume_from_checkpoint.
    Raises RecipeError for a checkpoint of other steps or, with FSDP, of other processes.
    """
    checkpoint = _resumed(recipe)
    if checkpoint is not None:
        if (launch := launch_of(checkpoint)) != trainer.launch:
            raise RecipeError(
                f"{checkpoint} was trained with {launch}, and cannot be resumed with "
                f"{trainer.launch}; launch the same processes, or change "
                "gradient_accumulation_steps, or train under another --name with the cached "
                "outputs."
            )
        best = read_json(checkpoint / TRAINER_STATE_NAME)["best_global_step"]
        if best and launch_of(checkpoint.with_name(f"checkpoint-{best}")) is None:
            raise RecipeError(
                f"checkpoint-{best} has the best weights of {checkpoint.parent}, but is damaged or "
                "missing; restore it, or train under another --name with the cached outputs."
            )
        print(f"resuming from {checkpoint}")
    print(f"learning rate: {trainer.args.learning_rate:g}")
    if trainer.args.world_size > 1:
        print(f"training in {trainer.processes}, {trainer.launch}")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    distilled: Any = trainer.whole_model()
    if not PartialState().is_main_process:
        return None
    if recipe.use_peft:
        distilled = distilled.merge_and_unload(safe_merge=True)
    take_loss_forward(distilled)
    distilled._keys_to_ignore_on_save = None
    distilled.set_attn_implementation(trainer.attention)
    distilled.config.use_cache = True  # SFTTrainer turns it off
    return distilled.eval()
