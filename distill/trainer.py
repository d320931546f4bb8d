"""Distillation from cached distributions: an SFTTrainer whose loss never sees the target.

Legend: B rows, T padded length, N response positions of the batch, H hidden size, C cached tokens.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import DistributedType, PartialState
from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerState,
)
from transformers.integrations import (
    get_available_reporting_integrations,
    unset_hf_deepspeed_config,
)
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import SAFE_WEIGHTS_NAME
from trl import SFTConfig, SFTTrainer

from align.atomic import atomic_file, disk_full_explained, remove
from align.process import free_memory
from align.vocab_map import Retokenizer
from distill.adapters import lora_config, merged
from distill.held_out import (
    HELD_OUT,
    HeldOut,
    held_out_rows,
    load_best,
    read_followed,
    stopped,
    trained_rows,
)
from distill.loss_forward import give_loss_forward, take_loss_forward
from distill.losses import (
    LOSSES,
    LossName,
)
from distill.models import Pair
from distill.prepare import PreparedDraft, read_prepared
from distill.recipe import Recipe, RecipeError, chosen_loss
from distill.teacher.states import states_of
from distill.teacher.store import Answers, CachedAnswer
from distill.training_set import TRAINING_SET, DistillationCollator, training_set
from eval.decoding.drafters.drafter import Kind

# trl asks transformers for it by its old name; there is nothing a user could do about that
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)

SCORES = 2**26  # bytes of attention scores that a batch on a CPU may keep for its gradients
SLOW_RATE = 1 / 3  # of the learning rate, for weights that began as a fit
SEEDS_A_STEP = 2**31 - 1  # more than there are answers; prime: a place counted from it moves
COMPLETE = "complete"  # the last file of a checkpoint: its step, and the rows of each
WAIT = 7 * 24 * 3600  # seconds; a process that dies is noticed by the launcher, at once


def hollow_copy(model: Any) -> Any:
    """The same modules without weights: what a gathered state is put into, at no memory."""
    empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def fill(hollow: nn.Module, weights: dict[str, Tensor]) -> None:
    """Put weights into a `hollow_copy`, one tensor where the model shares one."""
    parts = list(hollow.named_parameters(remove_duplicate=False))
    filled: dict[int, nn.Parameter] = {}
    for name, empty in parts:
        if id(empty) not in filled:
            filled[id(empty)] = nn.Parameter(weights[name].float(), empty.requires_grad)
        owner, _, attribute = name.rpartition(".")
        setattr(hollow.get_submodule(owner), attribute, filled[id(empty)])


def _gathered(value: Any, kept: bool) -> Any:
    """A sharded tensor as a whole one on the CPU, where it is kept; anything else as it is."""
    if not isinstance(value, DTensor):
        return value
    whole = value.full_tensor()  # a call of all processes
    return whole.cpu() if kept else None


def cpu_attention(config: PreTrainedConfig, rows: int, width: int) -> str:
    """The attention that a batch of so many rows and tokens trains with on a CPU.

    Two products take 0.9 to 1 of the time of torch's fused attention there (docs/lab-notes.md),
    but every layer keeps its scores twice, in fp32 and in bf16: bytes that grow as width².
    """
    text = config.get_text_config()
    if not hasattr(text, "num_attention_heads"):
        return "eager"  # a draft without attention
    scores = rows * text.num_attention_heads * width**2 * text.num_hidden_layers
    return "eager" if 6 * scores <= SCORES else "sdpa"


class _Progress(ProgressCallback):
    """The bar of steps, with the latest loss beside it in place of a line for every log."""

    def __init__(self, loss: LossName) -> None:
        super().__init__()
        self.loss = loss

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description("distil")

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if self.training_bar is not None and "learning_rate" in logs:  # not the final totals
            self.training_bar.set_postfix_str(
                f"{self.loss} {logs[self.loss]:.3f}, "
                f"greedy agreement {logs['greedy_agreement']:.3f}, lr {logs['learning_rate']:.1e}"
            )


class SameOrder(LengthGroupedSampler):
    """Rows in groups of like length, in an order that depends on the seed and the epoch alone.

    So it is the same for any number of processes, and after any interruption: `batch` rows at a
    time make an optimiser step, whoever computes them. The last step of an epoch is filled up with
    rows drawn a second time, the shortest, so that no process is left without.
    """

    def __init__(self, lengths: list[int], batch: int, seed: int) -> None:
        super().__init__(batch, lengths=lengths)
        self.seed, self.epoch = seed, 0

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size) * self.batch_size

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        order = list(super().__iter__())
        again = itertools.cycle(reversed(order))
        return itertools.chain(order, itertools.islice(again, len(self) - len(order)))


class DistillationTrainer(SFTTrainer):
    """A loss of distill/losses.py on response tokens, against the cache (2310.08461).

    Any number of processes computes the same steps. Checkpoints hold whole models and optimiser
    states whether they were sharded or not, so that any other number goes on from them.
    """

    def __init__(
        self,
        *args: Any,
        loss: LossName = "forward_kl",
        kind: Kind,
        **kwargs: Any,
    ) -> None:
        """kind: of the draft that is trained."""
        self.loss_name, self.slow = loss, kind.slow
        self.whole: Any = None  # where its weights go when they are sharded
        self.sums = torch.zeros(3)  # since the last log, here: divergence, agreements, tokens
        super().__init__(*args, **kwargs)
        # every kind's forward takes what a batch has; Trainer looks before that is attached, and
        # would then take the mean of small batches' means, where short answers weigh more
        self.model_accepts_loss_kwargs = True
        self.checkpoints_kept, self.args.save_total_limit = self.args.save_total_limit, None
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback):
            self.add_callback(_Progress(loss))
        model: Any = self.model
        plain: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
        give_loss_forward(plain, kind, LOSSES[loss])

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # as bits: FSDP and DeepSpeed round every float that they see where the weights are bf16
        bits = inputs["top_logprobs"].float().view(torch.int32)
        return super()._prepare_inputs(inputs | {"top_logprobs": bits})

    def create_optimizer(self, model: Any = None) -> Any:
        """Weights that began as a fit learn slower: at the full rate a minute undoes the fit."""
        optimizer = super().create_optimizer(model)
        trained: Any = model or self.model
        names = {id(p): name for name, p in trained.named_parameters()}
        for group in list(optimizer.param_groups) if self.slow else ():
            slow = [p for p in group["params"] if names[id(p)].startswith(self.slow)]
            held = {id(p) for p in slow}
            group["params"] = [p for p in group["params"] if id(p) not in held]
            rest = {k: v for k, v in group.items() if k != "params"}
            if slow:
                optimizer.add_param_group({**rest, "params": slow, "lr": group["lr"] * SLOW_RATE})
        return optimizer

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        index = inputs.pop("index")
        if self.args.device.type == "cpu":
            config = self.model.config
            config._attn_implementation = cpu_attention(config, *inputs["input_ids"].shape)
        # the same random numbers for an answer, whichever process has it in this step
        outputs = model(**inputs, seeds=index + SEEDS_A_STEP * self.state.global_step)
        tokens = len(inputs["positions"])
        if not torch.isfinite(outputs.loss):
            mean = float(outputs.loss.detach()) / tokens
            raise ValueError(
                f"The loss is {mean} at step {self.state.global_step + 1}, on answers "
                f"{index.tolist()} of the cache; training stopped before the weights took "
                "it. Lower learning_rate, or look at those answers; the last checkpoint is whole."
            )
        sums = torch.stack([outputs.loss.detach(), outputs.agreed.float()])
        self.sums = self.sums.to(sums.device) + F.pad(sums, (0, 1), value=tokens)
        count = tokens if num_items_in_batch is None else num_items_in_batch
        loss = outputs.loss / count
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        total, agreed, tokens = self.accelerator.reduce(self.sums, "sum").tolist()
        if tokens:
            self._metrics["train"][self.loss_name].append(total / tokens)
            self._metrics["train"]["greedy_agreement"].append(agreed / tokens)
        self.sums = torch.zeros_like(self.sums)
        super().log(logs, start_time)

    def save_trained(self, path: Path) -> None:
        """Write the weights that are trained, whole. A call of all processes."""
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if not self.args.should_save:
            return
        model: Any = self.model
        names = [  # as in the state, which has no names of what recomputes activations
            name.replace(_CHECKPOINT_PREFIX, "")
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        with atomic_file(path, "wb") as file:
            save_file({name: state[name].contiguous() for name in names}, file.name)

    def log_apart(self, logs: dict[str, float]) -> None:
        """Log what is not a mean since the last log."""
        super(SFTTrainer, self).log(logs)

    def create_accelerator_and_postprocess(self) -> None:
        state = PartialState()
        sharded = self.args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")
        if sharded and state.distributed_type == DistributedType.MULTI_CPU:
            # accelerate shards over accelerators only: over a CPU's processes it would train with
            # DDP and not say so; nothing else hangs on this name
            state.distributed_type = DistributedType.MULTI_GPU
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            plugin = self.accelerator.state.fsdp_plugin
            if plugin.fsdp_version != 2:
                raise RecipeError(
                    f"fsdp_version is {plugin.fsdp_version}, whose checkpoints would not be whole; "
                    "set it to 2, as recipes/accelerate/fsdp2.yaml does."
                )
            plugin.set_state_dict_type("FULL_STATE_DICT")
            if self.args.bf16:  # accelerate's own policy would sum gradients in bf16, too
                policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
                plugin.mixed_precision_policy = policy

    @property
    def global_batch(self) -> int:
        """Rows of an optimiser step, over all processes."""
        args = self.args
        return args.train_batch_size * args.gradient_accumulation_steps * args.world_size

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Any:
        if self.args.train_sampling_strategy != "group_by_length":
            return super()._get_train_sampler(train_dataset)
        rows: Any = self.train_dataset
        lengths = rows[self.args.length_column_name][:]  # a list, faster than one by one
        self.order = SameOrder(lengths, self.global_batch, self.args.seed)
        return self.order

    def _run_epoch(self, model: Any, epoch: int, *args: Any, **kwargs: Any) -> None:
        if self.args.train_sampling_strategy == "group_by_length":
            self.order.epoch = epoch  # accelerate does not reach it behind the batches it skips
        super()._run_epoch(model, epoch, *args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        if self.is_fsdp_enabled and resume_from_checkpoint is not None:
            self._load_from_checkpoint(resume_from_checkpoint)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            self.whole = hollow_copy(self.model)
        return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif model is None:  # else it is sharded by now, and was loaded before
            whole: Any = self.model
            if isinstance(whole, PeftModel):
                whole.load_adapter(resume_from_checkpoint, "default", is_trainable=True)
            else:
                weights = load_file(Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME)
                whole.load_state_dict(weights, strict=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        optimizer, schedule = self._stateful()
        first = self.args.should_save
        state = tree_map(lambda value: _gathered(value, first), optimizer.state_dict())
        if first:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(schedule.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer, schedule = self._stateful()
        state = torch.load(Path(checkpoint) / OPTIMIZER_NAME, "cpu", weights_only=True, mmap=True)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, of_parameter in state["state"].items():
            sharded = parameters[index]
            for name, value in of_parameter.items():
                if value.shape == sharded.shape:
                    of_parameter[name] = distribute_tensor(
                        value.to(sharded.device), sharded.device_mesh, sharded.placements
                    )
        optimizer.load_state_dict(state)
        schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _stateful(self) -> tuple[Any, Any]:
        return self.optimizer, self.lr_scheduler

    def whole_model(self) -> PreTrainedModel | PeftModel | None:
        """The model as it stands, unwrapped and unsharded, on the first process; None elsewhere.

        A call of all processes where it is sharded.
        """
        unset_hf_deepspeed_config()  # models loaded from here on are not to be sharded
        if self.whole is None:
            return self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        state = self.accelerator.get_state_dict(self.model_wrapped)
        if not self.args.should_save:
            return None
        fill(self.whole, state)
        return self.whole

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        free_memory()  # steps of other lengths leave other holes: none are kept for minutes
        first = self.args.should_save
        if first:
            (folder / COMPLETE).unlink(missing_ok=True)  # of one that is written over
        self.accelerator.wait_for_everyone()
        with disk_full_explained(folder):
            super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if not first:
            return
        (folder / "README.md").unlink(missing_ok=True)  # peft's
        # written last: a checkpoint without it was cut short and is never resumed from
        with atomic_file(folder / COMPLETE) as file:
            file.write(f"{self.state.global_step} {self.global_batch}\n")
        if self.checkpoints_kept is not None:
            for old in whole_checkpoints(folder.parent)[: -self.checkpoints_kept]:
                remove(old)

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: trl's knows neither target nor report. `write_card` makes the draft's own."""


def whole_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints that were written to their end, the latest last."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return sorted(whole, key=lambda path: int(path.name.rpartition("-")[2]))


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that was written to its end, None when there is none."""
    return next(reversed(whole_checkpoints(folder)), None)


def process_timeout(recipe: Recipe) -> float:
    """Seconds that processes wait for one another: `ddp_timeout`, or as long as any stage takes."""
    return float(recipe.training.get("ddp_timeout", WAIT))


def training_config(recipe: Recipe) -> SFTConfig:
    """The recipe's SFTConfig. Raises RecipeError for values that transformers refuses.

    Where a checkpoint of another number of processes is gone on from, its steps stay as they are:
    each process takes another share of the same rows.
    """
    ours: dict[str, Any] = {
        "activation_checkpointing": False,
        "train_sampling_strategy": "group_by_length",
        "report_to": "none",
        "ddp_timeout": WAIT,
    }
    try:
        config = SFTConfig(
            **(ours | {k: v for k, v in recipe.training.items() if k != "resume_from_checkpoint"}),
            output_dir=str(recipe.folder),
            max_length=None,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
    except (ValueError, TypeError) as error:
        raise RecipeError(f"SFTConfig refuses the recipe: {error}") from error
    # with more the trainer takes torch's DataParallel, which would cut a batch's flat positions
    config._n_gpu = min(1, config.n_gpu)
    _refuse_missing_trackers(config)
    checkpoint = _resumed(recipe)
    batch = None if checkpoint is None else _trained_batch(checkpoint)
    rows, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    if batch is not None and batch != rows * steps * config.world_size:
        share, left = divmod(batch, config.world_size)
        if left:
            raise RecipeError(
                f"{checkpoint} was trained {batch} rows a step, which {config.world_size} "
                "processes cannot share evenly; start a number of them that divides it."
            )
        rows = max(n for n in range(1, min(rows, share) + 1) if share % n == 0)
        config.per_device_train_batch_size = rows
        config.gradient_accumulation_steps = share // rows
    return config


def _refuse_missing_trackers(config: SFTConfig) -> None:
    """Raise RecipeError for a tracker that is not here; the trainer itself says so after hours."""
    asked: Any = config.report_to  # a list by now
    here = get_available_reporting_integrations()
    if lacking := [name for name in asked if name not in here]:
        raise RecipeError(
            f"report_to names {lacking[0]!r}, which is not installed here (there is "
            f"{', '.join(here) or 'no tracker'}); run `pip install {lacking[0]}`, or leave "
            "report_to out."
        )


def _resumed(recipe: Recipe) -> Path | None:
    """The checkpoint that training goes on from, None at its start."""
    asked = recipe.training.get("resume_from_checkpoint")
    if asked is None:
        return last_checkpoint(recipe.folder)
    if not (Path(asked) / TRAINER_STATE_NAME).is_file():
        raise RecipeError(
            f"resume_from_checkpoint is {asked!r}, which is no folder of a checkpoint (it has no "
            f"{TRAINER_STATE_NAME}); name one, or leave it out: a run goes on from its last."
        )
    return Path(asked)


def _trained_batch(checkpoint: Path) -> int | None:
    """Rows of each step that led to it, None where that was not written down (before 0.2)."""
    marker = checkpoint / COMPLETE
    words = marker.read_text().split() if marker.exists() else []
    return int(words[1]) if len(words) > 1 else None


def build_trainer(
    model: PreTrainedModel,
    answers: Iterable[CachedAnswer],
    head_rows: Tensor | None,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    retokenizer: Retokenizer | None = None,
    new_rows: bool = False,
    states: Mapping[int, Tensor] | None = None,
) -> DistillationTrainer:
    """A trainer of the draft in fp32, of the recipe's kind.

    An input embedding that is not the head as well stays as it is, unless it has `new_rows` that
    were never trained (a transplant): then LoRA trains embedding and head whole, too. retokenizer:
    as for `training_set`. states: as for DistillationCollator.
    """
    model = model.float()
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding is not None and head.weight is embedding.weight
    if embedding is not None and not tied and not new_rows:
        embedding.weight.requires_grad_(False)
        # it is read from where it came from; most of a small draft's checkpoint would be this
        model._keys_to_ignore_on_save = {f"{names[embedding]}.weight"}
    adapters = None
    if recipe.use_peft:
        adapters = lora_config(recipe)
        if new_rows:
            whole = [embedding] if tied else [embedding, head]
            adapters.modules_to_save = [names[part] for part in whole]
            adapters.ensure_weight_tying = tied
    return DistillationTrainer(
        model=model,
        args=training_config(recipe),
        train_dataset=training_set(
            recipe.folder / TRAINING_SET,
            answers,
            head_rows,
            recipe.teacher_temperature,
            retokenizer,
        ),
        data_collator=DistillationCollator(pad_id(tokenizer), states),
        processing_class=tokenizer,
        peft_config=adapters,
        loss=chosen_loss(recipe)[0],
        kind=recipe.kind,
    )


def distil_draft(
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    answers: Answers,
    prompts: Sequence[Sequence[int]],
) -> PreTrainedModel | None:
    """The draft in fp32 after training on the answers, on the first process; None elsewhere.

    prompts: token ids of all training prompts.

    Of adapters it is made as `merged` says but for a draft moved onto other tokens, which nobody
    else has as the base of its adapters. With `max_steps: 0` it is as it was prepared.
    """
    if recipe.training.get("max_steps") == 0:
        return prepared.model.float() if PartialState().is_main_process else None
    rows = pair.trained_rows(prepared.token_ids)
    trainer = build_trainer(
        prepared.model,
        answers,
        rows,
        pair.load_tokenizer(),
        recipe,
        pair.retokenizer,
        pair.new_rows,
        states_of(recipe, pair, answers),
    )
    held_out = held_out_rows(recipe.folder, rows, pair.retokenizer)
    if held_out:
        gamma, patience = recipe.gamma or recipe.max_gamma, recipe.early_stopping_patience
        trainer.add_callback(
            HeldOut(
                trainer,
                held_out,
                trained_rows(recipe, prompts, answers, rows, pair.retokenizer),
                recipe.folder,
                recipe.temperature,
                gamma,
                patience,
            )
        )
    rehomed = pair.strategy in ("remap", "transplant")
    return distil(trainer, recipe, None if rehomed else lambda: read_prepared(recipe, pair).model)


def distil(
    trainer: DistillationTrainer,
    recipe: Recipe,
    fresh: Callable[[], PreTrainedModel] | None = None,
) -> PreTrainedModel | None:
    """The trainer's draft after training, whole and in fp32; None on all but the first process.

    fresh: the draft as it was before, where its adapters are to be kept (`merged`).
    Goes on from the last whole checkpoint in the recipe's folder, or from resume_from_checkpoint.
    """
    checkpoint = _resumed(recipe)
    asked = "resume_from_checkpoint" in recipe.training
    if checkpoint is not None and not asked and _is_final(checkpoint, recipe):
        trainer._load_from_checkpoint(str(checkpoint))  # `train` would take a step more
    else:
        if checkpoint is not None:
            _refuse_other_shards(trainer, checkpoint)
            rows, at_once = trainer.global_batch, trainer.args.train_batch_size
            print(f"going on from {checkpoint}: {rows} rows a step, {at_once} a process at once")
        if trainer.args.world_size > 1:
            how = trainer.accelerator.distributed_type.value
            print(f"training over {trainer.args.world_size} processes: {how}")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    tuned: Any = trainer.whole_model()
    if not PartialState().is_main_process:
        return None
    load_best(recipe.folder, tuned)
    if recipe.use_peft and fresh is not None:
        tuned = merged(recipe, tuned, fresh)
    elif recipe.use_peft:
        tuned = tuned.merge_and_unload(safe_merge=True)
    take_loss_forward(tuned)
    tuned._keys_to_ignore_on_save = None
    tuned.set_attn_implementation("sdpa")
    tuned.config.use_cache = True  # SFTTrainer turns it off
    return tuned.eval()


def _refuse_other_shards(trainer: DistillationTrainer, checkpoint: Path) -> None:
    """Raise RecipeError where DeepSpeed's optimiser state was left by other processes than these.

    It is in parts, one of each process, and nobody else reads them.
    """
    parts = len(list(checkpoint.glob("global_step*/*_optim_states.pt")))
    readers = trainer.args.world_size if trainer.is_deepspeed_enabled else 0
    if parts != readers:
        raise RecipeError(
            f"{checkpoint} was left by {parts or 'no'} processes of DeepSpeed, and "
            f"{readers or 'none'} would go on from it; its optimiser state fits as many only. "
            "Start it as before, or delete the checkpoints."
        )


def _is_final(checkpoint: Path, recipe: Recipe) -> bool:
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    known = read_followed(recipe.folder / HELD_OUT).seen
    seen = [one for one in known if one.step <= state.global_step]
    early = bool(seen) and seen[-1].step == state.global_step
    return state.global_step >= state.max_steps or (
        early and stopped(seen, recipe.early_stopping_patience)
    )


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token to pad with; padding is masked by length, so any id does."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
