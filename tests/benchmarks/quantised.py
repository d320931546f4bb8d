"""alpha of drafts distilled on, and served by, one target in bf16, q8_0 and q4_0.

    python tests/benchmarks/quantised.py
    python tests/benchmarks/quantised.py --draft outputs/code/draft --prompts 64

A shortened code recipe, once for each form of the embedded target: the same prompts and seeds, the
answers and distributions of that form. Every draft is then measured on every form, on HumanEval and
the form's own greedy texts, as a checkpoint of its own (the compact form shares one target's
embedding). Prints alpha with 95% intervals over prompts, and the gain, paired over
prompts, of the draft distilled on what is served over the one distilled on bf16.

--draft: instead, alpha of that draft, as it is and written as GGUF in several kinds, on every form.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from align.machine import free_memory, use_machine
from align.sources import resolve_checkpoint
from align.to_gguf import write_gguf
from distill.models import TargetOfRun, check_models, load_target
from distill.plan import Clock
from distill.prompt_sets import collect_prompts
from distill.recipe import load_recipe
from distill.run_folder import claim_folder
from distill.teacher.answers import answer_prompts, open_store, to_answer
from distill.train import make_draft, make_plan
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.intervals import difference
from eval.measuring.journal import Journal
from eval.measuring.metrics import alpha

SHORT = (
    "--minutes null --max_train_prompts 320 --num_train_epochs 2 --warmup_steps 10 "
    "--tuning_prompts 1"
).split()
SERVED = ("bf16", "q8_0", "q4_0")
DRAFT_KINDS = ("f16", "q8_0", "q5_1", "q4_0")


def recipe_for(target, folder, prompts):
    keys = {"recipe": "code", "target": target, "output_dir": folder, "max_eval_prompts": prompts}
    return load_recipe([*(f"--{key}={value}" for key, value in keys.items()), *SHORT])


def distil(recipe):
    """A draft for that recipe's target, in its full form alone."""
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts)
    claim_folder(recipe, pair, prompts)
    store, clock = open_store(recipe, pair.target), Clock()
    plan = make_plan(recipe, pair, prompts, target, store, clock)
    answers = answer_prompts(recipe, to_answer(recipe, prompts.training.ids), target, store)
    make_draft(recipe, pair, target, answers, plan, clock)
    shutil.rmtree(recipe.folder / "draft" / "compact")
    free_memory()


def agreements(recipe, drafts):
    """Agreement of each draft with the recipe's target, on each prompt."""
    prompts = collect_prompts(recipe, check_models(recipe).target)
    target = load_target(recipe, prompts)
    drafters = {name: load_drafter(str(draft), target) for name, draft in drafts.items()}
    how = Decoding(Sampling(), target.stops, recipe.max_new_tokens, recipe.seed)
    texts = target_texts(target, prompts.evaluation.ids, how)
    recipe.folder.mkdir(exist_ok=True)
    with Journal(recipe.folder / "measured.jsonl") as journal:
        journal.begin(recipe.target)
        found, _ = measure_agreement(target, drafters, prompts.evaluation, texts, how, journal)
    return found


def gain(mine, over):
    mine, over = (
        {a.prompt_id: (a.group, (a.alpha_sum, a.positions)) for a in side} for side in (mine, over)
    )
    return difference("alpha", mine, over)


def cell(measured, sign=""):
    return f"{measured:{sign}.3f}"


def table(recipes, drafts):
    """alpha of each draft on each form, and what all but the first gain over the first."""
    columns = list(drafts)
    heads = ["served by", *columns, *(f"{name} gains" for name in columns[1:])]
    print(f"| {' | '.join(heads)} |")
    print("| --- " * len(heads) + "|")
    for kind, recipe in recipes.items():
        found = agreements(recipe, drafts)
        first, *rest = columns
        cells = [cell(alpha(found[c])) for c in columns]
        cells += [cell(gain(found[c], found[first]), "+") for c in rest]
        print(f"| {kind} | " + " | ".join(cells) + " |", flush=True)
        free_memory()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--prompts", type=int, default=164)
    args = parser.parse_args()
    use_machine()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        embedded = resolve_checkpoint(load_recipe(["--recipe", "code"]).target)
        targets = {"bf16": embedded}
        for kind in SERVED[1:]:
            targets[kind] = folder / f"{kind}.gguf"
            write_gguf(embedded, targets[kind], kind)
        recipes = {
            kind: recipe_for(target, folder / kind, args.prompts)
            for kind, target in targets.items()
        }
        if args.draft is None:
            for recipe in recipes.values():
                distil(recipe)
            drafts = {f"distilled on {k}": folder / k / "draft" for k in SERVED}
        else:
            drafts = {
                "draft as it is": shutil.copytree(
                    args.draft, folder / "draft", ignore=shutil.ignore_patterns("compact")
                )
            }
            for kind in DRAFT_KINDS:
                drafts[kind] = folder / f"draft-{kind}.gguf"
                write_gguf(args.draft, drafts[kind], kind)
        table(recipes, drafts)


if __name__ == "__main__":
    main()
