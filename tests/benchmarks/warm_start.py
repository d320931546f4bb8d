"""Tunes a trained EAGLE-3 draft on text that it knows and on text that it does not, in many ways.

    python tests/benchmarks/warm_start.py RUN DOMAIN RATE EPOCHS […] [--bare]

RUN is a finished run of the recipe `code`, whose draft is tuned. DOMAIN is `code` (prompts that RUN
has not trained on) or `legal`. For each number of EPOCHS it prints the gain over the draft of RUN
in tokens a step, teacher-forced and paired, on 48 outputs of each domain that nothing has seen:
of the draft that is saved, and of the last weights. A share of 0.3 of the outputs are of RUN's own
prompts. --bare: none of them are, and no draft is kept for its held-out prompts.
"""

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

from align.files import read_json, remove
from align.machine import join_processes, use_machine
from distill.clock import Clock
from distill.drafters.kind import Draft
from distill.held_out import HeldOut, Measurement
from distill.models import check_models, open_models, target_loader, with_published_kind
from distill.prepare import prepare_draft
from distill.prompt_sets import collect_prompts
from distill.recipe import load_recipe
from distill.teacher.answers import to_answer
from distill.teacher.states import cache_states
from distill.teacher.store import Answers
from distill.teacher.vllm_states import state_reader
from distill.teacher.vllm_target import answering_target
from distill.trainer import DraftTrainer
from eval.prompts import PromptSet

TRAINED, OLD_SHARE, HELD_OUT, TESTED = 200, 0.3, 32, 48
OTHER = {"code": "legal", "legal": "code"}
KEYS = {"minutes": "null", "engine": "null", "save_strategy": "no", "logging_steps": 1000}


def recipe_of(domain: str, run: Path, folder: Path, **keys: object):
    keys = KEYS | {"draft": run / "draft", "output_dir": folder} | keys
    options = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    recipe = load_recipe(["--recipe", domain, "--drafter", "null", *options])
    return with_published_kind(recipe, *open_models(recipe))


class Outputs:
    """Outputs of both domains with their hidden states; each part has other prompts."""

    def __init__(self, run: Path, folder: Path) -> None:
        trained = read_json(run / "answers.json")["count"]
        self.parts, self.prompts = {}, {}
        for domain in OTHER:
            recipe = recipe_of(domain, run, folder / domain)
            self.pair = pair = check_models(recipe, *open_models(recipe))
            prompts = collect_prompts(recipe, pair.target)
            load = target_loader(recipe, pair, prompts)
            target = answering_target(recipe, pair, prompts, load)
            first = trained if domain == "code" else 0
            sizes = {"train": TRAINED, "held_out": HELD_OUT, "test": TESTED}
            with state_reader(recipe, pair, target, load) as reader:
                for part, size in sizes.items():
                    self.add(domain, part, prompts.training, first, size, target)
                    first += size
                if domain == "code":  # what RUN has trained on
                    self.add(domain, "old", prompts.training, 0, TRAINED, target)
                    self.add(domain, "old held_out", prompts.held_out, 0, HELD_OUT, target)
                names = [
                    n for (d, _), part in self.parts.items() if d == domain for n in part.names
                ]
                cache_states({pair.layers: Answers(target.store, names)}, reader)
            load.cache_clear()
            self.load, self.store = load, target.store

    def add(
        self, domain: str, part: str, prompts: PromptSet, first: int, size: int, target
    ) -> None:
        ids = prompts.ids[first : first + size]
        with target:
            self.parts[domain, part] = target.answers(to_answer(ids, 1, None))
        chosen = [replace(p, category=domain) for p in prompts.prompts[first : first + size]]
        self.prompts[domain, part] = PromptSet("", chosen, ids)

    def mixed(self, *parts: tuple[str, str, int]) -> tuple[Answers, PromptSet]:
        """The first outputs of each part (domain, part, number), and their prompts."""
        names = [name for *part, size in parts for name in self.parts[*part].names[:size]]
        sets = [self.prompts[*part].first(size) for *part, size in parts]
        prompts = PromptSet(
            "", [p for s in sets for p in s.prompts], [i for s in sets for i in s.ids]
        )
        return Answers(self.store, names), prompts


def judged(recipe, outputs: Outputs, model, token_ids, train: Answers) -> dict[str, Measurement]:
    """Measurements of a draft on the test outputs of each domain."""
    measurements = {}
    for domain in OTHER:
        apart = replace(recipe, output_dir=f"{recipe.folder}-test")
        held_out = outputs.mixed((domain, "test", TESTED))
        draft, clock = Draft(model, token_ids), Clock(apart.folder, None)
        judge = DraftTrainer(apart, outputs.pair, draft, train, *held_out, clock)
        judge.measure()
        measurements[domain] = judge.held_out.measurements[0]
    return measurements


def gains(outputs: Outputs, before: dict, after: dict) -> str:
    texts = []
    for domain in OTHER:
        followed = HeldOut(Path(), outputs.prompts[domain, "test"].prompts, 0.0, None)
        later = replace(after[domain], step=1)
        followed.measurements = {0: before[domain], 1: later}
        share = followed.gain(later).mean / before[domain].tokens_per_step
        texts.append(f"{domain} {followed.gain(later):+.3f} ({share:+.1%})")
    return ", ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("domain", choices=OTHER)
    parser.add_argument("rate", type=float)
    parser.add_argument("epochs", type=int, nargs="+")
    parser.add_argument("--bare", action="store_true")
    args = parser.parse_args()
    use_machine(join_processes(True, 600.0))
    root = Path(tempfile.mkdtemp())
    outputs = Outputs(args.run, root)
    old, old_held_out = (0 if args.bare else round(OLD_SHARE * n) for n in (TRAINED, HELD_OUT))
    train, _ = outputs.mixed((args.domain, "train", TRAINED - old), ("code", "old", old))
    held_out = outputs.mixed(
        (args.domain, "held_out", HELD_OUT - old_held_out), ("code", "old held_out", old_held_out)
    )
    for epochs in args.epochs:
        keys = {"learning_rate": args.rate, "num_train_epochs": epochs, "disable_tqdm": "true"}
        if args.bare:
            held_out = Answers(outputs.store, []), PromptSet("", [], [])
            keys["max_steps"] = epochs * math.ceil(sum(map(train.tokens, range(TRAINED))) / 2048)
        recipe = recipe_of(args.domain, args.run, root / f"run-{epochs}", **keys)
        base = prepare_draft(recipe, outputs.pair, outputs.load, train)
        before = judged(recipe, outputs, base.model, base.token_ids, train)
        clock = Clock(recipe.folder, None)
        trainer = DraftTrainer(recipe, outputs.pair, base, train, *held_out, clock)
        trainer.train()
        last = judged(recipe, outputs, trainer.plain, base.token_ids, train)
        trainer.step_back()
        best, saved = trainer.held_out.best, last
        if best is not None:
            saved = before
            if best.step > 0:
                saved = judged(recipe, outputs, trainer.distilled(), base.token_ids, train)
        origin = ", ".join(f"{d} {m.tokens_per_step:.3f}" for d, m in before.items())
        print(
            f"RESULT {args.domain} rate {args.rate:g} epochs {epochs} bare {args.bare} | origin "
            f"{origin} | kept step {best and best.step} of {trainer.step}, "
            f"{best and best.change} of the change | saved "
            f"{gains(outputs, before, saved)} | last {gains(outputs, before, last)}",
            flush=True,
        )
        remove(recipe.folder)
    remove(root)


if __name__ == "__main__":
    main()
