"""Distillation from cached distributions, as a loop over accelerate.

No line of a step waits for the device: losses, and whether gradients were finite, are read at a
log, a measurement or a checkpoint. The steps are the same for any number of processes.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import islice, takewhile
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import PreTrainedModel, get_scheduler

from align.errors import UserError
from align.files import atomic_file, remove, write_json
from align.machine import from_first, wait_on_host
from distill import checkpoint as files
from distill.clock import Clock
from distill.drafters.batch import TrainingBatch
from distill.drafters.kind import Draft
from distill.export import BASE_KEPT
from distill.held_out import FIRST_INDEX, FORWARD, HeldOut, Measurement
from distill.loss_forward import give_loss_forward, take_loss_forward
from distill.losses import LOSSES
from distill.models import Pair, head_entries
from distill.prefetch import Prefetcher
from distill.prepare import read_prepared
from distill.recipe import Recipe, chosen_loss, dump
from distill.recipe_files import RecipeError
from distill.teacher.states import computed_states
from distill.teacher.store import Answers, name_of
from distill.training_set import SEEDS_A_STEP, Part, TrainingSet
from distill.training_setup import (
    accelerator_of,
    optimizer_of,
    resumed,
    trainable_model,
    training_config,
)
from eval.decoding.target import Target
from eval.prompts import PromptSet

REPEAT = "repeat.yaml"  # in a run's folder: the recipe with the run's numbers of outputs and steps
SKIPPED = 3  # steps in a row without finite gradients that end the training
EPOCHS = 3  # of a base draft that was trained before; more only while they gain
THREADS = 4  # most threads of a process that trains on a GPU
KEPT = ("step", "steps", "place", "tokens", "ended", "log_history")  # attributes in a checkpoint


class DraftTrainer:
    """The training of one draft by a loss of distill/losses.py on response tokens (2310.08461).

    trl's DistillationTrainer is not used: it needs the target at each step, and supports neither
    cached distributions nor a trimmed vocabulary. step: steps that are over. place: the epoch of
    the next step, and its number there. tokens: the different response tokens that were trained on.
    """

    def __init__(
        self,
        recipe: Recipe,
        pair: Pair,
        prepared: Draft,
        answers: Answers,
        held_out: Answers,
        prompts: PromptSet,
        clock: Clock,
        target: Target | None = None,
    ) -> None:
        """prompts: those of `held_out`; a logged output that is left out has none there. target:
        computes the states that are not stored, in each step.
        """
        self.recipe, self.clock = recipe, clock
        model: Any = prepared.model.float()
        width = model.config.get_text_config().hidden_size
        self.config = config = training_config(recipe, width)
        self.accelerator = accelerator = accelerator_of(config)
        if accelerator.device.type == "cuda":
            torch.set_num_threads(min(THREADS, torch.get_num_threads()))
        self.attention = model.config._attn_implementation
        # entries of a transplant are for tokens that the draft was never trained on
        model = trainable_model(recipe, model, new_entries=pair.strategy == "transplant")
        # receives the weights at the end if they are sharded
        self.hollow = hollow_copy(model) if accelerator.is_fsdp2 else None
        plain = model.get_base_model() if recipe.use_peft else model
        packed = recipe.kind.packs(plain)
        give_loss_forward(plain, recipe.kind, LOSSES[chosen_loss(recipe)[0]])
        if recipe.activation_checkpointing:
            model.gradient_checkpointing_enable()
        self.data, self.measured = (
            TrainingSet(
                outputs,
                head_entries(prepared.token_ids, pair.target.vocabulary.vocab_size),
                answers.store.of_states(pair.layers) if pair.layers and target is None else None,
                partial(recipe.kind.plan, plain, training=training),
                packed,
                recipe.step_tokens,
                recipe.seed,
                config.gradient_accumulation_steps,
                accelerator.num_processes,
                accelerator.process_index,
                temperature=recipe.teacher_temperature if training else 1.0,
                first=0 if training else FIRST_INDEX,
            )
            for outputs, training in ((answers, True), (held_out, False))
        )
        # of a batch, by the sizes of its texts
        self.states: Callable[[TrainingBatch, list[int]], Tensor] | None = None
        if target is not None:
            self.states = partial(computed_states, target.decoder, pair.layers)
        self.steps = config.max_steps
        if self.steps < 0:
            self.steps = math.ceil(config.num_train_epochs * len(self.data.steps(0)))
        prompt_of = dict(zip(map(name_of, prompts.ids), prompts.prompts, strict=True))
        measured = [prompt_of[name_of(answer.prompt_ids)] for answer in held_out]
        cost = FORWARD * sum(self.measured.sizes) / recipe.step_tokens
        self.held_out = HeldOut(recipe.folder, measured, cost, clock)
        optimizer = optimizer_of(recipe, config, model)
        self.warmup = config.get_warmup_steps(self.steps)
        schedule = get_scheduler(config.lr_scheduler_type, optimizer, self.warmup, self.steps)
        self.rate = schedule.lr_lambdas[0]  # the factor on the learning rates at a position
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.plain: Any = accelerator.unwrap_model(self.model)
        self.step, self.place, self.tokens = 0, (0, 0), 0
        self.by_time, self.ended = 0.0, False  # the share of the time that is over
        # since the latest log: its time, the steps, their tokens and loss, the seconds of waiting
        self.began, self.since, self.trained, self.waited = 0.0, 0, 0, 0.0
        self.loss = torch.zeros((), device=accelerator.device)
        self.unread: list[tuple[list[int], Tensor]] = []  # a step's outputs; whether it was skipped
        self.skipped = 0  # steps in a row
        self.log_history: list[dict[str, float]] = []

    @property
    def launch(self) -> str:
        """What a training that continues a checkpoint must have in common with its writer."""
        return f"{self.recipe.step_tokens} tokens a step"

    @property
    def progress(self) -> float:
        """The share of the training that is over, by steps or by time, whichever is larger."""
        return max(self.by_time, self.step / self.steps)

    def train(self) -> None:
        """Train to the end, from the last complete checkpoint of the run if there is one."""
        self.resume()
        if self.ended:
            return
        project, settings = self.config.project, self.recipe.training
        settings = {k: v for k, v in settings.items() if isinstance(v, int | float | str)}
        self.accelerator.init_trackers(project, settings, {"wandb": {"name": self.config.run_name}})
        if self.step == 0:
            began = time.perf_counter()
            self.measure()
            self.clock.ending = time.perf_counter() - began  # the last measurement takes as long
            if self.recipe.starts_trained and self.measured.sizes:
                files.save_start(self.recipe.folder, self.plain)
        self.model.train()
        bar = tqdm(total=self.steps, initial=self.step, disable=self.config.disable_tqdm)
        parts = self.data.parts(self.step, *self.place)
        with Prefetcher(self.data, parts, self.accelerator.device) as batches, bar:
            self.began = time.perf_counter()
            while not self.ended:
                self.by_time = self.clock.training_progress()
                self.train_step(batches)
                bar.update()
                if self.step % _steps(self.config.logging_steps, self.steps) == 0:
                    bar.set_postfix(loss=f"{self.write_log(batches):.3f}")
                self.after_step()
        self.read_skipped()
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def train_step(self, batches: Prefetcher) -> None:
        """Fetch, forward, backward, update."""
        rate = self.rate(self.progress * self.steps)
        # the time may be ahead of the steps; a share of them is of the steps that there are
        if self.step < self.warmup and self.config.warmup_steps >= 1:
            rate = min(rate, self.step / self.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
        # of dropout: the same after an interruption
        torch.manual_seed(hash((self.recipe.seed, self.step, self.accelerator.process_index)))
        loss = torch.zeros_like(self.loss)
        for part, batch in islice(batches, self.config.gradient_accumulation_steps - 1):
            with self.accelerator.no_sync(self.model):
                loss += self.backward(part, batch)
        part, batch = next(batches)
        loss += self.backward(part, batch)
        limit = self.config.max_grad_norm or math.inf
        norm: Any = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        # with fp16 a norm may be infinite because of the factor on the loss, which then changes
        skipped = ~torch.isfinite(norm if self.accelerator.scaler is None else loss)
        self.optimizer.optimizer.found_inf = skipped.float()  # a fused optimiser reads it
        skips = self.accelerator.scaler or self.optimizer.optimizer.defaults.get("fused")
        if skips or not skipped.item():
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss += loss.masked_fill(skipped, 0)
        self.unread.append((part.outputs, skipped))
        self.tokens += part.tokens if part.epoch == 0 else 0
        self.step, self.place = self.step + 1, part.after
        self.since, self.trained = self.since + 1, self.trained + part.tokens

    def backward(self, part: Part, batch: TrainingBatch) -> Tensor:
        """Add the gradients of a batch. Returns its share of the step's mean loss."""
        batch = self.with_states(self.data, part, batch)
        loss: Tensor = self.model(**batch._asdict()).loss * (part.weight / part.tokens)
        self.accelerator.backward(loss * self.accelerator.num_processes)  # they are averaged
        return loss.detach()

    def with_states(self, data: TrainingSet, part: Part, batch: TrainingBatch) -> TrainingBatch:
        """The batch with the target's states, if they are computed here."""
        if self.states is None:
            return batch
        return batch._replace(states=self.states(batch, [data.sizes[text] for text in part.texts]))

    def read_skipped(self) -> None:
        """Name the steps that were skipped. Raises UserError after SKIPPED in a row."""
        first, unread, self.unread = self.step - len(self.unread) + 1, self.unread, []
        for step, (outputs, skipped) in enumerate(unread, first):
            self.skipped = self.skipped + 1 if skipped.item() else 0
            if self.skipped:
                tqdm.write(
                    f"step {step} is skipped, because its gradients are not finite, on outputs "
                    f"{outputs} of the cache"
                )
            if self.skipped == SKIPPED:
                raise UserError(
                    f"The gradients of {SKIPPED} steps in a row are not finite, until step {step} "
                    f"on outputs {outputs} of the cache. Lower learning_rate, or inspect these "
                    "outputs; the last checkpoint is complete."
                )

    def write_log(self, batches: Prefetcher) -> float:
        """Print, store and track the means since the last log. Returns the mean loss."""
        self.read_skipped()
        total: Any = self.accelerator.reduce(self.loss, "sum")
        seconds = time.perf_counter() - self.began
        logged = {
            "loss": total.item() / self.since,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
            "tokens_per_second": self.trained / seconds,
            "waiting": (batches.waited - self.waited) / seconds,
        }
        self.began, self.since, self.trained = time.perf_counter(), 0, 0
        self.waited = batches.waited
        self.loss.zero_()
        self.log_history.append({"step": self.step, **logged})
        self.accelerator.log(logged, step=self.step)
        tqdm.write(
            f"step {self.step}: loss {logged['loss']:.3f}, learning rate "
            f"{logged['learning_rate']:.2g}, {logged['tokens_per_second']:,.0f} tokens/s, "
            f"{logged['waiting']:.0%} waiting for data"
        )
        return logged["loss"]

    def after_step(self) -> None:
        """Measure and save what is due after a step, and decide whether it was the last one."""
        self.ended = self.progress >= 1
        if self.held_out.due(self.step, self.progress):
            began = time.perf_counter()
            self.measure()
            self.held_out.pauses.append(time.perf_counter() - began)
            self.began += self.held_out.pauses[-1]
            patience = self.recipe.early_stopping_patience or math.inf
            if self.recipe.starts_trained and self.place[0] >= EPOCHS:
                patience = 1
            self.ended |= self.held_out.without_gain(self.step) >= patience
        strategy = self.recipe.training.get("save_strategy", "steps")
        due = {
            "steps": self.step % _steps(self.config.save_steps, self.steps) == 0,
            "epoch": self.place[1] == 0,
        }
        if strategy in due and (due[strategy] or self.ended):
            self.read_skipped()
            folder, limit = self.recipe.folder, int(self.config.save_total_limit or 0)
            state = {name: getattr(self, name) for name in KEPT} | {"launch": self.launch}
            folder = folder / f"checkpoint-{self.step}"
            files.save_checkpoint(folder, self.plain, self.optimizer, state, limit)

    def step_back(self) -> None:
        """If all of the change is not better than a trained base draft, try parts of it.

        Weights between both may have learnt new text, and lost less of the old (2109.01903).
        """
        start = self.recipe.folder / files.START
        if from_first(start.exists()):
            for change in (1 / 2, 1 / 4):
                if self.held_out.best == self.held_out.in_order[0]:
                    files.halve_change(self.recipe.folder, self.plain)
                    self.measure(change)
            wait_on_host()
            if PartialState().is_main_process:
                remove(start)

    def measure(self, change: float = 1.0) -> None:
        """Measure the draft on held-out outputs, and save its weights if they are the best.

        change: as in `Measurement`.
        A deployed temperature above 1 is measured at 1, because the cache does not determine p
        above 1.
        """
        if not self.measured.sizes:
            return
        self.read_skipped()
        device, temperature = self.accelerator.device, min(self.recipe.temperature, 1.0)
        sums = torch.zeros(4, len(self.measured.sizes), dtype=torch.float64, device=device)
        parts = takewhile(lambda part: part.epoch == 0, self.measured.parts())
        self.model.eval()
        with torch.no_grad(), Prefetcher(self.measured, parts, device) as batches:
            for part, batch in batches:
                batch = self.with_states(self.measured, part, batch)
                rates = self.model(**batch._asdict(), temperature=temperature)
                counted = torch.stack([*rates.to_tuple(), torch.ones_like(rates.accepted)])
                outputs = batch.seeds % SEEDS_A_STEP - FIRST_INDEX
                of_positions = outputs[batch.texts.flatten()[batch.positions]]
                sums.index_add_(1, of_positions, counted.double() * part.weight)
        self.model.train()
        for module in self.plain.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward pass some weights stay whole
        total: Any = self.accelerator.reduce(sums, "sum")
        accepted, lacking, emitted, positions = total.tolist()
        counts = [int(number) for number in positions]
        latest = Measurement(self.step, self.tokens, accepted, lacking, counts, emitted, change)
        self.accelerator.log({"tokens_per_step": latest.tokens_per_step}, step=self.step)
        if from_first(self.held_out.record(latest, self.progress)):
            files.save_best(self.recipe.folder, self.plain, asdict(latest))

    def resume(self) -> None:
        """Continue from the last complete checkpoint of the run, or from resume_from_checkpoint.

        Raises RecipeError for a checkpoint of other steps.
        """
        checkpoint = resumed(self.recipe)
        if checkpoint is None:
            if PartialState().is_main_process:
                remove(self.recipe.folder / files.BEST)  # of a training without a checkpoint
            self.clock.training = None  # the schedule begins anew, in the time that is left
            return
        if (launch := files.launch_of(checkpoint)) != self.launch:
            raise RecipeError(
                f"{checkpoint} was trained with {launch}, and cannot be resumed with "
                f"{self.launch}; change tokens_per_step, or train under another --name with the "
                "cached outputs."
            )
        print(f"resuming from {checkpoint}")
        state = files.load_checkpoint(checkpoint, self.plain, self.optimizer)
        vars(self).update({name: state[name] for name in KEPT if name != "steps"})
        again = "resume_from_checkpoint" in self.recipe.training
        self.ended = self.step >= self.steps or (self.ended and not again)
        self.held_out.resume(self.step, self.progress)

    def distilled(self) -> PreTrainedModel | None:
        """The best draft in fp32, unsharded, on the first process; None elsewhere."""
        if (best := self.held_out.best) is not None:
            print(f"kept: the draft after step {best.step} of {self.step}, {best}")
            if best.step > 0:
                print(f"gain over the base draft: {self.held_out.gain(best):+.3f} tokens a step")
                files.load_weights(self.recipe.folder / files.BEST, self.plain)
        draft: Any = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        state = None if self.hollow is None else self.accelerator.get_state_dict(self.model)
        if not PartialState().is_main_process:
            return None
        if self.hollow is not None:
            draft = self.hollow
            draft.load_state_dict(state, assign=True)
            draft.tie_weights()
        if self.recipe.use_peft:
            draft = draft.merge_and_unload(safe_merge=True)
        take_loss_forward(draft)
        draft.set_attn_implementation(self.attention)
        return draft.eval()


def hollow_copy(model: Any) -> Any:
    """A copy of the model without weights, into which gathered weights are loaded."""
    empty = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, empty)


def _steps(number: float, steps: int) -> int:
    """A number of steps, from a number or a share of all steps."""
    return int(number) if number >= 1 else math.ceil(number * steps)


def distil_draft(
    recipe: Recipe,
    pair: Pair,
    prepared: Draft,
    answers: Answers,
    held_out: Answers,
    prompts: PromptSet,
    clock: Clock,
    load: Callable[[], Target] | None = None,
) -> PreTrainedModel | None:
    """The distilled draft in fp32, on the first process; None elsewhere. prompts: of `held_out`.
    load: returns the target that DraftTrainer needs; None if the states are stored.

    Writes `repeat.yaml`: the recipe without `minutes`, with the same number of outputs and steps.
    If no measurement is `HeldOut.better` than the first one, the base draft is kept.
    """
    if recipe.training.get("max_steps") == 0:
        return prepared.model.float() if PartialState().is_main_process else None
    target = None if load is None else load()
    trainer = DraftTrainer(recipe, pair, prepared, answers, held_out, prompts, clock, target)
    distilled = distil(trainer)
    if distilled is None:
        return None
    counts = {"max_answers": answers.asked, "max_steps": trainer.step}
    with atomic_file(recipe.folder / REPEAT) as file:
        launch = f"accelerate launch --num_processes {trainer.accelerator.num_processes}"
        file.write(f"# {launch} distill/train.py --recipe {REPEAT}\n")
        file.write(dump(recipe, minutes=None, tokens_per_step=recipe.step_tokens, **counts))
    best = trainer.held_out.best
    remove(recipe.folder / BASE_KEPT)  # of a draft that has been deleted
    if best is not None and best.step == 0:
        reason = "no gain over it is shown on the held-out prompts"
        print(f"draft/ is the base draft: {reason}")
        write_json(recipe.folder / BASE_KEPT, {"reason": reason})
        return read_prepared(recipe, pair).model.float()
    return distilled


def distil(trainer: DraftTrainer) -> PreTrainedModel | None:
    """The distilled draft in fp32, unsharded, on the first process; None elsewhere."""
    print(f"learning rate: {trainer.config.learning_rate:g}")
    if (count := trainer.accelerator.num_processes) > 1:
        strategy = trainer.accelerator.distributed_type.value
        print(f"training in {count} processes ({strategy}), {trainer.launch}")
    trainer.train()
    trainer.step_back()
    return trainer.distilled()
