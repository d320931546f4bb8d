"""Answers by our batched generation, distributions captured, against stock `generate`.

    python tests/benchmarks/answers.py

The embedded code recipe's target, prompts and temperature, 48 rows, on the device that is there, in
turns. Stock generates batch by batch, padded on the left, every row until the last one has
ended, and captures nothing. Prints tokens/s (up to each answer's own end) and their ratio with a
95% interval over rounds.
"""

import time

import torch
from transformers import GenerationConfig

from align.machine import use_machine
from distill.prompt_sets import training_prompts
from distill.recipe import load_recipe
from distill.teacher.answers import top_logprobs
from eval.decoding.generation import Kept, generate_batched
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.measuring.intervals import measure
from eval.prompts import render_set

ROUNDS = 4
BATCHES = 2  # in a round


def stock(target, ids, recipe):
    """Tokens that transformers' own generate answers with, stop tokens included."""
    config = GenerationConfig(
        max_new_tokens=recipe.answer_max_new_tokens,
        do_sample=True,
        temperature=recipe.answer_temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=sorted(target.stops),
        pad_token_id=min(target.stops),
    )
    total = 0
    for at in range(0, len(ids), recipe.answer_batch_size):
        rows = ids[at : at + recipe.answer_batch_size]
        width = max(map(len, rows))
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        output = target.model.generate(
            tokens.to(target.device),
            attention_mask=mask.to(target.device),
            generation_config=config,
        )
        for row in output[:, width:].tolist():
            ends = [i for i, token in enumerate(row) if token in target.stops]
            total += ends[0] + 1 if ends else len(row)
    return total


def ours(target, ids, recipe):
    return sum(
        len(answer.tokens)
        for answer in generate_batched(
            target.decoder,
            ids,
            Decoding(
                Sampling(recipe.answer_temperature), target.stops, recipe.answer_max_new_tokens
            ),
            recipe.answer_batch_size,
            [seed_of(recipe.seed, str(number)) for number in range(len(ids))],
            Kept(lambda logits: top_logprobs(logits, recipe.cache_top_k)),
        )
    )


def main():
    use_machine()
    recipe = load_recipe(["--recipe", "code", "--answer_batch_size", "48", "--minutes", "null"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(recipe.target, torch.bfloat16, device, 1024)
    size = BATCHES * recipe.answer_batch_size
    prompts, _ = training_prompts(recipe.train_prompts, [], ROUNDS * size, recipe.seed)
    ids = render_set("", prompts, target.tokenizer, 1024, recipe.answer_max_new_tokens).ids
    rows = []
    for at in range(0, len(ids), size):
        row = []
        for answer in (ours, stock):
            clock = time.perf_counter()
            tokens = answer(target, ids[at : at + size], recipe)
            row += [tokens, time.perf_counter() - clock]
        rows.append(row)
        print(
            f"round {len(rows)}: ours {row[0] / row[1]:.0f}, stock {row[2] / row[3]:.0f} tokens/s"
        )
    ratio = measure("answers", rows, lambda t: (t[..., 0] / t[..., 1]) / (t[..., 2] / t[..., 3]))
    print(f"ours / stock: {ratio:.2f} times, n={ratio.n} rounds")


if __name__ == "__main__":
    main()
