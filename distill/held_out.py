"""alpha on held-out prompts while a draft is trained: followed, the best weights kept, early stop.

Some training prompts are never trained on, nor is what nearly repeats them. The target answers them
as it does the others; now and then the draft is taken on these answers, teacher-forced. They cost
SHARE of the training steps at most. In the end it is taken on as many answers that it was trained
on: more text brings held-out alpha nearer to that one, and not beyond.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState

from align.atomic import remove, write_json
from align.vocab_map import Retokenizer
from distill.recipe import Recipe
from distill.teacher.answers import USED
from distill.teacher.store import Answers, CachedAnswer, Store
from distill.training_set import training_rows

HELD_OUT = "held_out"  # its folder: the weights kept, and what was seen
FIRST_INDEX = 2**30  # of the answers to held-out prompts: no two answers of a run share one
SEEN = "seen.json"
BEST = "best.safetensors"
SHARE = 0.025  # of the steps' time; a forward pass takes a third of a step
FORWARD = 1 / 3
IN_FIRST_EPOCH = 6  # measurements, each at twice as many tokens as the one but one before it
AFTER = 10  # and so many over all steps


@dataclass
class Seen:
    """A measurement: after how many steps, and of how many different tokens trained on.

    Sums of each held-out prompt: accepted, lacking (`losses.acceptance`), positions, and the target
    calls that a simulated chain of gamma drafted tokens would take.
    """

    step: int
    tokens: int
    sums: list[list[float]]

    @property
    def alpha(self) -> float:
        accepted, _, positions, _ = map(sum, zip(*self.sums, strict=True))
        return accepted / positions

    @property
    def lacking(self) -> float:
        _, lacking, positions, _ = map(sum, zip(*self.sums, strict=True))
        return lacking / positions

    @property
    def tau(self) -> float:
        """Tokens per target call; the first token of an answer is the prefill's."""
        _, _, positions, calls = map(sum, zip(*self.sums, strict=True))
        return (positions - len(self.sums)) / calls if calls else 1.0


@dataclass
class Followed:
    """What a run has written of its measurements.

    gamma: of the simulated tau. trained: the sums of rows that were trained on, after training;
    None where it did not end yet.
    """

    gamma: int
    seen: list[Seen]
    trained: list[list[float]] | None = None


def followed_steps(steps: int, epoch: int, warmup: int) -> list[int]:
    """After which of so many optimiser steps the draft is measured, an epoch having `epoch`."""
    first = {round(epoch / 2 ** (i / 2)) for i in range(IN_FIRST_EPOCH)}
    after = {round(steps * (i + 1) / AFTER) for i in range(AFTER)}
    return sorted(step for step in first | after if max(1, warmup) <= step <= steps)


def followed_rows(rows: int, steps: int, batch: int, measured: int) -> int:
    """How many held-out rows keep to SHARE, of so many that there are."""
    return min(rows, int(SHARE * steps * batch / (FORWARD * measured)))


def held_out_answers(folder: Path) -> Sequence[CachedAnswer]:
    """The target's answers to the held-out prompts of a run; none where it has not noted any."""
    if not (path := folder / USED).exists():
        return []
    used = json.loads(path.read_text())
    return Answers(Store(Path(used["store"])), used["held_out"], FIRST_INDEX)


def held_out_rows(
    folder: Path, head_rows: Tensor | None, retokenizer: Retokenizer | None
) -> list[dict[str, Any]]:
    """The target's answers to the held-out prompts as `training_rows`; none where none are kept."""
    return list(training_rows(held_out_answers(folder), head_rows, 1.0, retokenizer))


def trained_rows(
    recipe: Recipe,
    prompts: Sequence[Sequence[int]],
    answers: Iterable[CachedAnswer],
    head_rows: Tensor | None,
    retokenizer: Retokenizer | None,
) -> list[dict[str, Any]]:
    """Rows like those of `held_out_rows`, of the first answers that are trained on.

    prompts: token ids of all training prompts, answered in this order.
    """

    def answer_alone(one: CachedAnswer) -> CachedAnswer:
        """Without what is taught of its prompt."""
        taught = len(prompts[one.index % len(prompts)]) - 1 if recipe.train_on_prompts else 0
        text = torch.cat([one.prompt_ids, one.response_ids])
        return replace(
            one,
            prompt_ids=text[: len(one.prompt_ids) + taught],
            response_ids=one.response_ids[taught:],
            top_ids=one.top_ids[taught:],
            top_logprobs=one.top_logprobs[taught:],
        )

    some = itertools.islice(map(answer_alone, answers), recipe.held_out_prompts)
    return list(training_rows(some, head_rows, 1.0, retokenizer))


def simulated_calls(accepted: Sequence[float], gamma: int) -> float:
    """Expected target calls for tokens that are accepted with these chances, gamma drafted each.

    A call emits what was accepted in a row, and one token more (arXiv 2211.17192). Chances of text
    that the target wrote: the same text goes on whatever is drafted.
    """
    calls = [0.0] * (len(accepted) + gamma + 2)
    for at in range(len(accepted) - 1, -1, -1):
        expected, reached = 1.0, 1.0
        for drafted in range(gamma):
            chance = accepted[at + drafted] if at + drafted < len(accepted) else 1.0
            expected += reached * (1 - chance) * calls[at + drafted + 1]
            reached *= chance
        calls[at] = expected + reached * calls[at + gamma + 1]
    return calls[0]


class HeldOut(TrainerCallback):
    """Measures the draft while it is trained, keeps its best weights, and may stop the training."""

    def __init__(
        self,
        trainer: Any,
        rows: list[dict[str, Any]],
        trained: list[dict[str, Any]],
        folder: Path,
        temperature: float,
        gamma: int,
        patience: int | None,
    ) -> None:
        """trained: some of the rows that are trained on. temperature: deployed; above 1 it is not
        known from the cache, and 1 is taken.
        """
        self.trainer, self.rows, self.folder = trainer, rows, folder / HELD_OUT
        self.trained = trained
        self.temperature, self.gamma, self.patience = min(temperature, 1.0), gamma, patience
        self.seen: list[Seen] = []
        self.steps: list[int] = []

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        batch, rows = self.trainer.global_batch, len(self.trainer.train_dataset)
        epoch = -(-rows // batch)
        self.steps = followed_steps(state.max_steps, epoch, args.get_warmup_steps(state.max_steps))
        count = followed_rows(len(self.rows), state.max_steps, batch, max(1, len(self.steps)))
        self.rows = self.rows[:count]
        taught = self.trainer.train_dataset.data.column("positions")
        self.tokens = sum(len(chunk.flatten()) for chunk in taught.chunks)
        known = read_followed(self.folder).seen
        self.seen = [one for one in known if one.step <= state.global_step]

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if not self.rows or state.global_step not in self.steps:
            return
        before = best_of(self.seen)
        self.seen.append(found := self.measured(state.global_step))
        better = before is None or found.alpha >= before.alpha
        if better:
            self.trainer.save_trained(self.folder / BEST)
        self._write()
        if PartialState().is_main_process:
            lacks = f" (up to {found.lacking:.3f} more: the cut)" if found.lacking > 5e-4 else ""
            line = f"step {found.step}: held-out alpha {found.alpha:.3f}{lacks}, "
            line += f"simulated tau {found.tau:.2f} at gamma {self.gamma}"
            tqdm.write(line + (", the best so far" if better else ""), file=sys.stdout)
        self.trainer.log_apart({"held_out_alpha": found.alpha, "held_out_tau": found.tau})
        if stopped(self.seen, self.patience):
            control.should_training_stop = control.should_save = True

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.rows and self.trained:
            self._write(self.sums(self.trained[: len(self.rows)]))

    def _write(self, trained: list[list[float]] | None = None) -> None:
        if PartialState().is_main_process:
            write_json(self.folder / SEEN, asdict(Followed(self.gamma, self.seen, trained)))

    def measured(self, step: int) -> Seen:
        """The draft as it is, on all held-out rows."""
        share = min(1.0, step * self.trainer.global_batch / len(self.trainer.train_dataset))
        return Seen(step, round(share * self.tokens), self.sums(self.rows))

    @torch.no_grad()
    def sums(self, of: list[dict[str, Any]]) -> list[list[float]]:
        """The sums of `Seen` of each row. A call of all processes: each takes them all, since the
        weights may be shared out.
        """
        trainer = self.trainer
        model, batch = trainer.model_wrapped, trainer.args.per_device_train_batch_size
        model.eval()
        sums: list[list[float]] = []
        for at in range(0, len(of), batch):
            rows = of[at : at + batch]
            inputs = trainer._prepare_inputs(trainer.data_collator(rows))
            inputs.pop("index")
            with trainer.compute_loss_context_manager():
                found = model(**inputs, temperature=self.temperature)
            lengths = [len(row["positions"]) for row in rows]
            parts = (part.float().cpu().split(lengths) for part in (found.accepted, found.lacking))
            for accepted, lacking in zip(*parts, strict=True):
                chances = accepted.tolist()
                calls = simulated_calls(chances[1:], self.gamma)
                sums.append([sum(chances), float(lacking.sum()), len(chances), calls])
        model.train()
        return sums


def read_followed(folder: Path) -> Followed:
    """What a run has written; nothing seen where it has not."""
    path = folder / SEEN
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"gamma": 0}
    return Followed(**found | {"seen": [Seen(**one) for one in found.get("seen", [])]})


def best_of(seen: Sequence[Seen]) -> Seen | None:
    """The measurement of the highest alpha, the last of equals; None of none."""
    return max(reversed(seen), key=lambda one: one.alpha, default=None)


def stopped(seen: Sequence[Seen], patience: int | None) -> bool:
    """Whether so many measurements in a row, the last ones, have not been as good as the best."""
    alphas = [one.alpha for one in reversed(seen)]
    return patience is not None and bool(alphas) and alphas.index(max(alphas)) >= patience


def load_best(folder: Path, model: Any) -> None:
    """Put the best weights into the model, where some were kept, and say which."""
    seen = read_followed(folder / HELD_OUT).seen
    best = best_of(seen)
    if best is None:
        return
    print(f"held-out alpha {best.alpha:.3f} after step {best.step} of {seen[-1].step}: kept")
    if best is not seen[-1]:
        model.load_state_dict(load_file(folder / HELD_OUT / BEST), strict=False)
    else:
        remove(folder / HELD_OUT / BEST)
