"""Distillation from cached distributions: an SFTTrainer whose loss never sees the target.

Legend: B rows, T padded length, N response positions of the batch, H hidden size, C cached tokens.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    ProgressCallback,
    TrainerState,
)
from transformers.utils import ModelOutput
from trl import SFTConfig, SFTTrainer

from align.atomic import atomic_file, disk_full_explained
from align.vocab_map import Retokenizer
from distill.answer_cache import CachedAnswer
from distill.losses import head_loss, sharpen
from distill.models import Pair
from distill.prepare import PreparedDraft
from distill.recipe import Recipe, RecipeError

# trl asks transformers for it by its old name; there is nothing a user could do about that
warnings.filterwarnings("ignore", message="`is_gradient_checkpointing`", category=FutureWarning)

COMPLETE = "complete"  # the last file of a checkpoint


def training_rows(
    answers: Iterable[CachedAnswer],
    head_rows: Tensor | None,
    teacher_temperature: float = 1.0,
    retokenizer: Retokenizer | None = None,
) -> Dataset:
    """One row an answer: input_ids [P + R], the positions [R] that predict, cached tokens [R * C].

    head_rows: for each target id its row in the draft's head [V], -1 where it has none; None when
    they are equal. teacher_temperature: below 1 it sharpens p (losses.sharpen). retokenizer: how a
    draft with ids of its own reads the text; the end of what it read of a token is where it
    predicts the next. Nested lists would read ten times slower than the flat columns.
    """

    def rows() -> Iterable[dict[str, Any]]:
        for answer in answers:
            logprobs = answer.top_logprobs
            if teacher_temperature != 1:
                logprobs = sharpen(logprobs, teacher_temperature)
            ids = answer.top_ids if head_rows is None else head_rows[answer.top_ids]
            prompt, response = answer.prompt_ids.tolist(), answer.response_ids.tolist()
            pieces = [prompt, *([i] for i in response)]
            if retokenizer is not None:
                pieces = [
                    retokenizer.from_start(prompt),
                    *(retokenizer.of_token(i) for i in response),
                ]
            ends = itertools.accumulate(map(len, pieces[:-1]))
            input_ids = [i for piece in pieces for i in piece]
            yield {
                "index": answer.index,
                "length": len(input_ids),
                "input_ids": input_ids,
                # the logits that predict token t stand at position t - 1
                "positions": [end - 1 for end in ends],
                "top_ids": ids.flatten().tolist(),
                "top_logprobs": logprobs.flatten().tolist(),
            }

    return Dataset.from_list(list(rows()))


class DistillationCollator:
    """Right-padded batches; each response token with the target's distribution there."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        input_ids = pad_sequence(ids, True, self.pad_token_id)
        predicting = [torch.tensor(row["positions"]) for row in rows]
        # only counted by the trainer, which leaves the first of each row out
        labels = [F.pad(torch.ones_like(at), (1, 0), value=-100) for at in predicting]
        width, cached = input_ids.shape[1], len(rows[0]["top_ids"]) // len(predicting[0])

        def flat(column: str) -> Tensor:
            return torch.cat([torch.tensor(row[column]) for row in rows]).view(-1, cached)

        return {
            "input_ids": input_ids,
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
            "labels": pad_sequence(labels, True, -100),
            "positions": torch.cat([b * width + at for b, at in enumerate(predicting)]),
            "top_ids": flat("top_ids"),
            "top_logprobs": flat("top_logprobs"),
            "index": torch.tensor([row["index"] for row in rows]),
        }


def attach_distillation_forward(model: PreTrainedModel) -> None:
    """Make `model.forward` return the summed loss over response positions instead of logits.

    Inside forward, so that DDP's gradient hooks, PEFT's adapters and autocast all see it. The head
    is applied to response positions only. Raises ValueError for a head that is more than a product.
    """
    body, head = model.base_model, model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if head.bias is not None or softcap:
        what = "a bias" if head.bias is not None else f"softcap {softcap}"
        raise ValueError(
            f"TOK-012: the draft's head has {what}, which the loss here does not know; use "
            "another draft, or none: the target is pruned."
        )

    def forward(
        input_ids: Tensor,
        attention_mask: Tensor,
        positions: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
        **_: Any,
    ) -> ModelOutput:
        states = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        hidden = states.last_hidden_state.flatten(0, 1)[positions]
        loss, agreed = head_loss(hidden, head.weight, top_ids, top_logprobs)
        return ModelOutput(loss=loss, agreed=agreed)

    model.forward = forward


class _Progress(ProgressCallback):
    """The bar of steps, with the latest loss beside it in place of a line for every log."""

    def on_log(self, *_: Any, logs: Any = None, **__: Any) -> None:
        if self.training_bar is not None and "learning_rate" in logs:  # not the final totals
            self.training_bar.set_postfix_str(
                f"KL {logs['kl']:.3f}, greedy agreement {logs['greedy_agreement']:.3f}, "
                f"lr {logs['learning_rate']:.1e}"
            )


class DistillationTrainer(SFTTrainer):
    """Forward KL on response tokens against the cache (sequence-level data of 2310.08461)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback):
            self.add_callback(_Progress)
        model: Any = self.model
        attach_distillation_forward(
            model.get_base_model() if hasattr(model, "get_base_model") else model
        )

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        index = inputs.pop("index")
        outputs = model(**inputs)
        tokens = len(inputs["positions"])
        mean = float(outputs.loss.detach()) / tokens
        if not torch.isfinite(outputs.loss):
            raise ValueError(
                f"The loss is {mean} at step {self.state.global_step + 1}, on answers "
                f"{index.tolist()} of the cache; training stopped before the weights took "
                "it. Lower learning_rate, or look at those answers; the last checkpoint is whole."
            )
        self._metrics["train"]["kl"].append(mean)
        self._metrics["train"]["greedy_agreement"].append(float(outputs.agreed) / tokens)
        self._total_train_tokens += tokens
        count = tokens if num_items_in_batch is None else num_items_in_batch
        loss = outputs.loss / count
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return loss

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with disk_full_explained(folder):
            super()._save_checkpoint(model, trial)
        (folder / "README.md").unlink(missing_ok=True)  # peft's
        # written last: a checkpoint without it was cut short and is never resumed from
        with atomic_file(folder / COMPLETE) as file:
            file.write(f"{self.state.global_step}\n")

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: trl's knows neither target nor report. `write_card` makes the draft's own."""


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that was written to its end, None when there is none."""
    whole = [p.parent for p in folder.glob(f"checkpoint-*/{COMPLETE}")]
    return max(whole, key=lambda p: int(p.name.rpartition("-")[2]), default=None)


def training_config(recipe: Recipe) -> SFTConfig:
    """The recipe's SFTConfig. Raises RecipeError for values that transformers refuses."""
    ours: dict[str, Any] = {
        "activation_checkpointing": False,
        "train_sampling_strategy": "group_by_length",
        "report_to": "none",
    }
    try:
        return SFTConfig(
            **(ours | {k: v for k, v in recipe.training.items() if k != "resume_from_checkpoint"}),
            output_dir=str(recipe.folder),
            max_length=None,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
        )
    except (ValueError, TypeError) as error:
        raise RecipeError(f"SFTConfig refuses the recipe: {error}") from error


def build_trainer(
    model: PreTrainedModel,
    answers: Iterable[CachedAnswer],
    head_rows: Tensor | None,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    retokenizer: Retokenizer | None = None,
    new_rows: bool = False,
) -> DistillationTrainer:
    """A trainer of the draft in fp32.

    An input embedding that is not the head as well stays as it is, unless it has `new_rows` that
    were never trained (a transplant): then LoRA trains embedding and head whole, too. retokenizer:
    as for `training_rows`.
    """
    model = model.float()
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    if not tied and not new_rows:
        embedding.weight.requires_grad_(False)
        # it is read from where it came from; most of a small draft's checkpoint would be this
        model._keys_to_ignore_on_save = {f"{names[embedding]}.weight"}
    adapters = None
    if recipe.use_peft:
        modules = recipe.lora_target_modules
        whole = [embedding] if tied else [embedding, head]
        adapters = LoraConfig(
            r=recipe.lora_r,
            lora_alpha=recipe.lora_alpha,
            lora_dropout=recipe.lora_dropout,
            target_modules=modules if modules == "all-linear" else modules.split(","),
            task_type="CAUSAL_LM",
            modules_to_save=[names[part] for part in whole] if new_rows else None,
            ensure_weight_tying=tied and new_rows,
        )
    trainer = DistillationTrainer(
        model=model,
        args=training_config(recipe),
        train_dataset=training_rows(answers, head_rows, recipe.teacher_temperature, retokenizer),
        data_collator=DistillationCollator(pad_id(tokenizer)),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    if trainer.args.device.type == "cpu":
        # torch's fused attention takes twice the time of two products there, its backward thrice
        model.set_attn_implementation("eager")
    return trainer


def distil_draft(
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    answers: Iterable[CachedAnswer],
) -> PreTrainedModel:
    """The draft in fp32 after training on the answers."""
    trainer = build_trainer(
        prepared.model,
        answers,
        pair.trained_rows(pair.vocab_size, prepared.token_ids),
        pair.load_tokenizer(),
        recipe,
        pair.retokenizer,
        pair.new_rows,
    )
    return distil(trainer, recipe)


def distil(trainer: DistillationTrainer, recipe: Recipe) -> PreTrainedModel:
    """The trainer's draft after training, in fp32.

    Goes on from the last whole checkpoint in the recipe's folder, or from resume_from_checkpoint.
    """
    asked, last = recipe.training.get("resume_from_checkpoint"), last_checkpoint(recipe.folder)
    if asked is None and last is not None and _is_final(last):
        trainer._load_from_checkpoint(str(last))  # `train` would take a step more
    else:
        resume = asked or last
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    tuned: Any = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if recipe.use_peft:
        tuned = tuned.merge_and_unload(safe_merge=True)
    del tuned.forward  # the instance's own: the class's forward, which gives logits, is back
    tuned._keys_to_ignore_on_save = None
    tuned.set_attn_implementation("sdpa")
    tuned.config.use_cache = True  # SFTTrainer turns it off
    return tuned.eval()


def _is_final(checkpoint: Path) -> bool:
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return state.global_step >= state.max_steps


def pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """A token to pad with; padding is masked by length, so any id does."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
