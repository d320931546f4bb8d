"""Block verification against token by token, where tokens are sampled: tau of both.

    python tests/benchmarks/verification.py outputs/code

The argument is the folder of a finished run. Its evaluation prompts are decoded at temperature 1
with its tuned draft, verified by blocks. Of every block the length that each rule accepts is also
computed in expectation, over the same draft and the same p and q: what is compared has no noise of
acceptance in it. Prints ratios of tau with 95% intervals over prompts.
"""

import sys
from pathlib import Path

import torch

from align.machine import use_machine
from distill.recipe import read_yaml
from eval.decoding import verification
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling, acceptance
from eval.measuring.intervals import measure
from eval.prompts import load_prompts, render_set

PROMPTS = 40
NEW_TOKENS = 64
GAMMAS = (3, 5)


def main(folder):
    use_machine()
    recipe = read_yaml(folder / "recipe.yaml")
    prompts = load_prompts(str(folder / "prompts" / "eval.jsonl"), PROMPTS)
    target = load_target(recipe["target"], getattr(torch, recipe["dtype"]), "cpu", 2048)
    drafter = load_drafter(str(folder / "draft"), target)
    ids = render_set("", prompts, target.tokenizer, 2048, NEW_TOKENS).ids
    how = Decoding(Sampling(1.0), target.stops, NEW_TOKENS, rule="block")
    seen = []
    verify_sampled = verification.verify_sampled

    def recorded(p, q, tokens, generator, counts, rule):
        expected = []
        for compared in ("block", "token"):
            chances, _ = acceptance(p, q, tokens, counts, compared)
            expected.append(float((chances * torch.arange(chances.shape[1])).sum()))
        seen.append(expected)
        return verify_sampled(p, q, tokens, generator, counts, rule)

    verification.verify_sampled = recorded
    for gamma in GAMMAS:
        rows = []
        for prompt, prompt_ids in zip(prompts, ids, strict=True):
            seen.clear()
            decode(target.decoder, drafter, [prompt], [prompt_ids], how, DraftLength(gamma))
            if seen:
                block, token = (sum(one) for one in zip(*seen, strict=True))
                rows.append((len(seen) + block, len(seen) + token, len(seen)))
        for name, numerator, denominator in (
            ("tau by block", 0, 2),
            ("tau by token", 1, 2),
            ("block / token", 0, 1),
        ):
            found = measure(name, rows, lambda t, a=numerator, b=denominator: t[..., a] / t[..., b])
            print(f"gamma {gamma}, {name}: {found:.4f}, n={found.n} prompts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
