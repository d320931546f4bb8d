"""Distillation from the cache against a plain loop with the target online, in the same run.

    python tests/benchmarks/training_speed.py

Both train the embedded code recipe's draft (the target's first layers) on the same batches of
the target's answers, on the device that is there, in turns. The plain loop is what one writes
first: stock forwards of target and draft over prompt and answer, the draft's head over the whole
vocabulary, KL of the whole distributions. Prints tokens/s of answer tokens and their ratio with a
95% interval over batches; also for our loss on an untrimmed head, and the answers' own
cost, which the cache pays once and the plain loop pays too, as it needs the same texts.
"""

import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from align.machine import use_machine
from align.trim import choose_tokens
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import head_rows
from distill.prepare import domain_mass
from distill.prompt_sets import training_prompts
from distill.recipe import load_recipe
from distill.teacher.answers import answer_prompts
from distill.teacher.store import Store
from distill.trainer import cpu_attention
from distill.training_set import DistillationCollator, training_rows
from eval.decoding.drafters import pruned
from eval.decoding.drafters.pruned import build_pruned
from eval.decoding.target import load_target
from eval.measuring.intervals import measure
from eval.prompts import render_set

BATCHES = 12


def cached_loop(target, recipe, batches, token_ids):
    """One optimiser step of our loss on a batch, as DraftTrainer takes it."""
    head = target.model.get_output_embeddings().weight.detach()
    draft = build_pruned(
        target.model,
        recipe.num_draft_layers,
        head.clone() if token_ids is None else head[token_ids],
    ).float()
    draft.get_input_embeddings().weight.requires_grad_(False)
    give_loss_forward(draft.train(), pruned.KIND, forward_kl)
    optimizer = adamw(draft)

    def step(number):
        batch = {k: v.to(target.decoder.device) for k, v in batches[number].items() if k != "index"}
        if target.decoder.device.type == "cpu":
            how = cpu_attention(draft.config, *batch["input_ids"].shape)
            draft.config._attn_implementation = how
        with torch.autocast(target.decoder.device.type, torch.bfloat16):
            loss = draft(**batch).loss
        finish(draft, optimizer, loss / len(batch["positions"]))

    return step


def plain_loop(target, recipe, batches):
    """One optimiser step with the target online and KL over the full vocabulary."""
    head = target.model.get_output_embeddings().weight.detach()
    draft = build_pruned(target.model, recipe.num_draft_layers, head.clone()).float().train()
    draft.get_input_embeddings().weight.requires_grad_(False)
    optimizer = adamw(draft)

    def step(number):
        batch = {k: v.to(target.decoder.device) for k, v in batches[number].items() if k != "index"}
        ids = batch["input_ids"]
        with torch.no_grad():
            p = target.model(ids, use_cache=False).logits
        with torch.autocast(target.decoder.device.type, torch.bfloat16):
            q = draft(ids, use_cache=False).logits
        log_p, log_q = (
            logits.flatten(0, 1)[batch["positions"]].float().log_softmax(-1) for logits in (p, q)
        )
        finish(draft, optimizer, F.kl_div(log_q, log_p, log_target=True, reduction="batchmean"))

    return step


def adamw(draft):
    weights = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(weights, lr=1e-4, fused=True)


def finish(draft, optimizer, loss):
    loss.backward()
    torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main():
    use_machine()
    recipe = load_recipe(["--recipe", "code", "--minutes", "null"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(recipe.target, torch.bfloat16, device, 1024)
    count = BATCHES * recipe.training["per_device_train_batch_size"]
    prompts, _ = training_prompts(recipe.train_prompts, [], count, recipe.seed)
    ids = render_set("", prompts, target.tokenizer, 1024, recipe.answer_max_new_tokens).ids
    vocab_size = target.decoder.embedding.shape[0]
    with tempfile.TemporaryDirectory() as folder:
        clock = time.perf_counter()
        answers = answer_prompts(recipe, ids, target, Store(Path(folder)))
        answering = time.perf_counter() - clock
        answers = sorted(answers, key=lambda a: len(a.prompt_ids) + len(a.response_ids))
    tokens = sum(len(answer.response_ids) for answer in answers)
    print(f"answers: {tokens} tokens, {tokens / answering:.0f} tokens/s, capture included")

    forced = set(target.tokenizer.all_special_ids)
    kept = choose_tokens(domain_mass(answers, vocab_size), recipe.draft_vocab_size, forced)
    size = recipe.training["per_device_train_batch_size"]
    collate = DistillationCollator(0)
    made = {}
    for name, rows in (("trimmed", head_rows(kept, vocab_size)), ("whole", None)):
        data = list(training_rows(answers, rows))
        made[name] = [collate(data[at : at + size]) for at in range(0, len(data), size)]
    steps = {
        "cached, trimmed head (the recipe)": cached_loop(target, recipe, made["trimmed"], kept),
        "cached, whole head": cached_loop(target, recipe, made["whole"], None),
        "plain online loop": plain_loop(target, recipe, made["whole"]),
    }
    seconds = {name: [] for name in steps}
    for number in [0, *range(len(made["whole"]))]:  # the first round is warm-up
        for name, step in steps.items():
            clock = time.perf_counter()
            step(number)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - clock)
    sizes = [len(batch["positions"]) for batch in made["whole"]]
    for name, times in seconds.items():
        print(f"{name}: {sum(sizes) / sum(times[1:]):.0f} tokens/s")
    plain = seconds.pop("plain online loop")[1:]
    for name, times in seconds.items():
        ratio = measure(
            name, list(zip(plain, times[1:], strict=True)), lambda t: t[..., 0] / t[..., 1]
        )
        print(f"{name} / plain: {ratio:.2f} times, n={ratio.n} batches")


if __name__ == "__main__":
    main()
