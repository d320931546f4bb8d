"""alpha of drafts distilled on, and served by, one target in bf16, q8_0 and q4_0.

    python tests/benchmarks/quantised.py
    python tests/benchmarks/quantised.py --draft outputs/code/draft

A shortened code recipe, once for each form of the embedded target: the same prompts and seeds, the
answers and distributions of that form. Every draft is then measured on every form, on HumanEval and
the form's own greedy texts, as a checkpoint of its own (the compact form shares one target's
embedding). Prints alpha with 95% bootstrap intervals over prompts, and the gain, paired over
prompts, of the draft distilled on what is served over the one distilled on bf16.

--draft: instead, alpha of that draft written as GGUF in several kinds, on the target in bf16.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from align.gguf import write_gguf
from align.process import free_memory, use_machine
from align.sources import resolve_checkpoint
from distill.answers import answer_prompts
from distill.models import TargetOfRun, check_models, load_target
from distill.prompts import collect_prompts
from distill.recipe import load_recipe
from distill.run_folder import claim_folder
from distill.train import make_draft
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.journal import Journal
from eval.measuring.metrics import alpha, measure

SHORT = "--max_train_prompts 320 --num_train_epochs 2 --warmup_steps 10 --tuning_prompts 1".split()
SERVED = ("bf16", "q8_0", "q4_0")
DRAFT_KINDS = ("f16", "q8_0", "q4_0")


def distil(target, folder):
    """A draft for that target by the shortened recipe; its run, to measure on."""
    recipe = load_recipe(
        ["--recipe", "code", "--target", str(target), "--output_dir", str(folder), *SHORT]
    )
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    loaded = TargetOfRun(recipe, pair, prompts)
    claim_folder(recipe, pair, prompts)
    make_draft(recipe, pair, loaded, answer_prompts(recipe, prompts.training.ids, loaded))
    shutil.rmtree(folder / "draft" / "compact")
    free_memory()
    return recipe, prompts


def agreements(recipe, prompts, drafts, folder):
    """Agreement of each draft with the recipe's target, on each prompt."""
    target = load_target(recipe, prompts)
    drafters = {name: load_drafter(str(draft), target) for name, draft in drafts.items()}
    how = Decoding(Sampling(), target.stops, recipe.max_new_tokens, recipe.seed)
    texts = target_texts(target, prompts.evaluation.ids, how)
    with Journal(folder / "measured.jsonl") as journal:
        journal.begin(recipe.target)
        found, _ = measure_agreement(target, drafters, prompts.evaluation, texts, how, journal)
    return found


def gain(mine, over):
    rows = [
        (a.alpha_sum, a.positions, b.alpha_sum, b.positions)
        for a, b in zip(mine, over, strict=True)
    ]
    return measure("gain", rows, lambda t: t[..., 0] / t[..., 1] - t[..., 2] / t[..., 3])


def cell(measured, sign=""):
    low, high = measured.ci95
    return f"{measured.mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


def table_of_targets(folder):
    embedded = resolve_checkpoint(load_recipe(["--recipe", "code"]).target)
    targets = {"bf16": embedded}
    for kind in SERVED[1:]:
        targets[kind] = folder / f"{kind}.gguf"
        write_gguf(embedded, targets[kind], kind)
    runs = {kind: distil(targets[kind], folder / kind) for kind in SERVED}
    drafts = {kind: folder / kind / "draft" for kind in SERVED}
    print("| served by | " + " | ".join(f"distilled on {k}" for k in SERVED) + " | gain |")
    print("| --- " * (len(SERVED) + 2) + "|")
    for kind in SERVED:
        found = agreements(*runs[kind], drafts, folder)
        gained = "" if kind == "bf16" else cell(gain(found[kind], found["bf16"]), "+")
        print(f"| {kind} | " + " | ".join(cell(alpha(found[k])) for k in SERVED) + f" | {gained} |")
        free_memory()


def table_of_drafts(draft, folder):
    drafts = {"as it is": draft}
    for kind in DRAFT_KINDS:
        drafts[kind] = folder / f"{kind}.gguf"
        write_gguf(draft, drafts[kind], kind)
    recipe = load_recipe(["--recipe", "code", "--output_dir", str(folder)])
    found = agreements(recipe, collect_prompts(recipe, check_models(recipe).target), drafts, folder)
    print("| draft | MB | alpha | against it as it is |")
    print("| --- " * 4 + "|")
    for name, path in drafts.items():
        weights = path if path.is_file() else path / "model.safetensors"
        lost = cell(gain(found[name], found["as it is"]), "+")
        size = weights.stat().st_size / 1e6
        print(f"| {name} | {size:.0f} | {cell(alpha(found[name]))} | {lost} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--draft", type=Path)
    draft = parser.parse_args().draft
    use_machine()
    with tempfile.TemporaryDirectory() as folder:
        if draft is None:
            table_of_targets(Path(folder))
        else:
            table_of_drafts(draft, Path(folder))


if __name__ == "__main__":
    main()
