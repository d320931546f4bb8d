"""Ways to train one draft, at equal minutes or equal steps: losses, LoRA, trl's GKD and SFT.

    python tests/benchmarks/distillation.py outputs/code --minutes 2 5 10
    python tests/benchmarks/distillation.py outputs/code --steps 200 --rows forward_kl lk "trl GKD"

The folder holds a finished run of a pruned draft, whose answers, prompts and recipe are used. Each
row is trained in a process of its own, whose peak memory is taken before it is evaluated. `minutes`
charge what the answers cost as well: an answer is timed here first, a step of each row is timed
before it is trained, and both say how many answers and steps the minutes buy, num_train_epochs over
each answer.
With `steps`, every row takes as many steps on as many answers as these visit once.

Ours trains the trimmed head against the cache, the target being gone. trl's trainers have what they
need: the same draft with the fitted head over the whole vocabulary, and GKD the target in memory.
alpha: greedy agreement on the target's texts to the evaluation prompts, with its 95%
interval over prompts. A row that is done is kept in OUTPUT/results.json and not run again.
"""

import argparse
import dataclasses
import json
import math
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

from align.files import atomic_file
from align.machine import use_machine
from distill.losses import LOSSES
from distill.models import TargetOfRun, check_models
from distill.plan import training_steps
from distill.prepare import prepare_draft
from distill.prompt_sets import collect_prompts
from distill.recipe import build_recipe, read_yaml
from distill.teacher.answers import answer_prompts, open_store, to_answer
from distill.teacher.store import Store
from distill.trainer import build_trainer, distil
from eval.decoding.drafters.pruned import build_pruned
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.measuring.agreement import target_texts
from eval.measuring.intervals import share

OURS = {name: {"loss": name} for name in LOSSES} | {"LoRA": {"use_peft": True}}
THEIRS = {"trl SFT": {}, "trl GKD": {"lmbda": 0.0}, "trl GKD, half on-policy": {"lmbda": 0.5}}
ROWS = [*OURS, *THEIRS]
TIMED_ANSWERS, TIMED_STEPS = 128, 6


class Work:
    """The run's pair, prompts and answers, and the folder that the rows share."""

    def __init__(self, run: Path, output: Path, evaluated: int) -> None:
        self.run, self.output, self.evaluated = run, output, evaluated
        self.keys = read_yaml(run / "recipe.yaml") | {"minutes": None, "output_dir": str(output)}
        for key in ("max_answers", "max_steps"):
            self.keys.pop(key, None)
        self.recipe = build_recipe(self.keys)
        assert self.recipe.draft is None, "the run's draft must be a pruned one"
        self.pair = check_models(self.recipe)
        self.prompts = collect_prompts(self.recipe, self.pair.target)
        self.target = TargetOfRun(self.recipe, self.pair, self.prompts)
        ids, store = self.prompts.training.ids, open_store(self.recipe, self.pair.target)
        count = read_yaml(run / "recipe.yaml")["max_answers"]
        asked = to_answer(dataclasses.replace(self.recipe, max_answers=count), ids)
        taught = self.recipe.train_on_prompts
        self.answers = answer_prompts(self.recipe, asked, self.target, store, (), taught)

    def kept(self, name: str, make):
        """What `make` gives, from OUTPUT/name.json where it is there."""
        file = self.output / f"{name}.json"
        if not file.exists():
            made = make()
            with atomic_file(file) as opened:
                json.dump(made, opened)
        return json.loads(file.read_text())

    def texts(self) -> list[list[int]]:
        ids = self.prompts.evaluation.ids[: self.evaluated]
        how = Decoding(Sampling(), self.target.stops, self.recipe.max_new_tokens, 0)
        return target_texts(self.target.loaded, ids, how)

    def cost(self) -> float:
        """Seconds of an answer."""
        asked = self.prompts.training.ids[-TIMED_ANSWERS:]
        clock = time.perf_counter()
        answer_prompts(self.recipe, asked, self.target, Store(self.output / "timed_answers"))
        return (time.perf_counter() - clock) / len(asked)


def train_row(work: Work, name: str, minutes: float | None, steps: int | None) -> dict:
    """Train one row and take its alpha; called in a process of its own."""
    texts, per_answer = work.kept("texts", work.texts), work.kept("cost", work.cost)
    prepared = prepare_draft(work.recipe, work.pair, work.target, work.answers)
    work.target.release()
    recipe = build_recipe(work.keys | OURS.get(name, {}))
    make = ours if name in OURS else theirs
    batch = work.keys["per_device_train_batch_size"]
    charged = 0.0
    if minutes is not None:
        per_step = timed(lambda count: make(work, name, prepared, recipe, batch * count, count))
        steps_each = training_steps(recipe, len(work.answers)) / len(work.answers)
        rows = int(60 * minutes / (per_answer + steps_each * per_step))
        rows = min(rows, len(work.answers))
        steps = max(1, math.ceil(steps_each * rows))
        charged = rows * per_answer
    else:
        rows = batch * steps
    train, drafts, taught, count_rows = make(work, name, prepared, recipe, rows, steps)
    clock = time.perf_counter()
    draft = train()
    seconds = time.perf_counter() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    passes = steps * batch / count_rows
    agreed = agreement(draft, drafts, work.prompts.evaluation.ids, texts)
    alpha = share("alpha", [(None, *row) for row in agreed])
    return {
        "row": name,
        "minutes": minutes,
        "steps": steps,
        "rows": count_rows,
        "taught": taught,
        "data_s": charged,
        "train_s": seconds,
        "tokens_per_s": passes * taught / seconds,
        "peak_gib": peak / 2**30,
        "alpha": alpha.mean,
        "ci95": alpha.ci95,
        "n": alpha.n,
    }


class Clock(TrainerCallback):
    """Seconds from the end of the first step to that of the last."""

    def on_step_end(self, args, state, control, **_):
        self.ends = [*getattr(self, "ends", []), time.perf_counter()]


def timed(make) -> float:
    """Seconds of a step, of a few that are thrown away."""
    clock = Clock()
    train, *_ = make(TIMED_STEPS)
    train(clock)
    return (clock.ends[-1] - clock.ends[0]) / (len(clock.ends) - 1)


def ours(work, name, prepared, recipe, count, steps):
    """How this project trains: the trimmed head against the cache."""
    folder = work.output / f"{name.replace(' ', '-')}-{count}"
    few = {"max_steps": steps, "save_strategy": "no", "report_to": "none"}
    fewer = dataclasses.replace(
        recipe, output_dir=str(folder), max_answers=count, training=recipe.training | few
    )
    rows = work.answers[:count]
    work.target.release()

    def train(callback=None):
        draft = prepare_draft(work.recipe, work.pair, work.target, work.answers)
        trainer = build_trainer(fewer, work.pair, draft, rows)
        if callback is not None:
            trainer.add_callback(callback)
        return distil(trainer, fewer)

    return train, prepared.token_ids, sum(len(row.response_ids) for row in rows), len(rows)


def theirs(work, name, prepared, recipe, count, steps):
    """trl's trainer on the same answers, the head over the whole vocabulary."""
    answers = work.answers[:count]
    tokenizer = work.pair.load_tokenizer()
    taken = "per_device_train_batch_size learning_rate adam_beta2 weight_decay lr_scheduler_type "
    taken += "warmup_steps max_grad_norm use_cpu bf16 seed logging_steps"
    keys = {key: work.keys[key] for key in taken.split() if key in work.keys}
    keys |= {"output_dir": str(work.output / "trl"), "max_steps": steps, "save_strategy": "no"}
    keys |= {"report_to": "none", "max_length": None, "gradient_checkpointing": False}
    rows = Dataset.from_list(
        [
            {
                "input_ids": [*a.prompt_ids.tolist(), *a.response_ids.tolist()],
                "completion_mask": [0] * len(a.prompt_ids) + [1] * len(a.response_ids),
            }
            for a in answers
        ]
    )

    def train(callback=None):
        target = work.target.loaded
        draft = build_pruned(target.model, recipe.num_draft_layers, prepared.full_head).float()
        draft.load_state_dict(
            {k: v for k, v in prepared.model.state_dict().items() if k != "lm_head.weight"},
            strict=False,
        )
        draft.get_input_embeddings().weight.requires_grad_(False)
        about = {"model": draft, "train_dataset": rows, "processing_class": tokenizer}
        if name == "trl SFT":
            work.target.release()
            trainer = SFTTrainer(args=SFTConfig(**keys, completion_only_loss=True), **about)
        else:
            new = recipe.answer_max_new_tokens
            config = GKDConfig(**keys, **THEIRS[name], beta=0.0, max_new_tokens=new)
            collate = Collator(tokenizer.pad_token_id or 0)
            trainer = GKDTrainer(
                teacher_model=target.model, args=config, data_collator=collate, **about
            )
        if callback is not None:
            trainer.add_callback(callback)
        trainer.train()
        return trainer.model.eval()

    return train, None, sum(len(a.response_ids) for a in answers), len(answers)


class Collator:
    """Batches as GKDTrainer reads them: whole texts padded right, prompts padded left."""

    def __init__(self, pad: int) -> None:
        self.pad = pad

    def __call__(self, rows):
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        taught = [torch.tensor(row["completion_mask"]) == 1 for row in rows]
        prompts = [one[~mask] for one, mask in zip(ids, taught, strict=True)]
        labels = [one.masked_fill(~mask, -100) for one, mask in zip(ids, taught, strict=True)]

        def ones(parts, side):
            return pad_sequence([torch.ones_like(one) for one in parts], True, 0, side)

        return {
            "input_ids": pad_sequence(ids, True, self.pad),
            "attention_mask": ones(ids, "right"),
            "labels": pad_sequence(labels, True, -100),
            "prompts": pad_sequence(prompts, True, self.pad, "left"),
            "prompt_attention_mask": ones(prompts, "left"),
        }


@torch.inference_mode()
def agreement(draft, token_ids, prompts, texts) -> list[tuple[int, int]]:
    """Of each text how many tokens the draft has, greedily, and how many there are."""
    found = []
    for ids, text in zip(prompts, texts, strict=False):
        read = torch.tensor([[*ids, *text[:-1]]])
        with torch.autocast("cpu", torch.bfloat16):
            guess = draft(input_ids=read).logits[0, len(ids) - 1 :].argmax(-1)
        guess = guess if token_ids is None else token_ids[guess]
        found.append((int((guess == torch.tensor(text)).sum()), len(text)))
    return found


def table(found: list[dict]) -> str:
    """All rows that are there, in Markdown."""
    lines = [
        "| row | minutes | steps | rows | different tokens | tokens/s | peak GiB | alpha |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found:
        low, high = one["ci95"]
        charged = (one["data_s"] + one["train_s"]) / 60
        lines.append(
            f"| {one['row']} | {charged:.1f} | {one['steps']} | {one['rows']} | {one['taught']} "
            f"| {one['tokens_per_s']:.0f} | {one['peak_gib']:.1f} "
            f"| {one['alpha']:.3f} [{low:.3f}, {high:.3f}] |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--rows", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--minutes", nargs="+", type=float, help="each is a training of its own")
    parser.add_argument("--steps", type=int, help="instead of minutes: nothing is charged")
    parser.add_argument("--prompts", type=int, default=164, help="evaluation prompts")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark-distillation"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in its process
    args = parser.parse_args()
    if (args.minutes is None) == (args.steps is None):
        parser.error("give --minutes or --steps")
    args.output.mkdir(parents=True, exist_ok=True)
    results = args.output / "results.json"
    found = json.loads(results.read_text()) if results.exists() else []
    if args.one:
        use_machine()
        work = Work(args.run, args.output, args.prompts)
        minutes = args.minutes[0] if args.minutes else None
        found.append(train_row(work, args.rows[0], minutes, args.steps))
        with atomic_file(results) as file:
            json.dump(found, file, indent=1)
        return
    for minutes in args.minutes or [None]:
        for name in args.rows:
            same = {"row": name, "minutes": minutes}
            if any(
                same.items() <= one.items() and args.steps in (None, one["steps"]) for one in found
            ):
                continue
            amount = ["--steps", args.steps] if minutes is None else ["--minutes", minutes]
            command = [sys.executable, __file__, args.run, "--rows", name, *amount, "--one"]
            command += ["--prompts", args.prompts, "--output", args.output]
            subprocess.run([str(word) for word in command], check=True)
            found = json.loads(results.read_text())
            print(table(found[-1:]), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
