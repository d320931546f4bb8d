"""Our speculative decoder against transformers' assisted generation, and both baselines.

    python tests/benchmarks/decoding.py outputs/code

The argument is the folder of a finished run: its target, its tuned draft (compact for ours, whole
for transformers, which needs the whole vocabulary), its evaluation prompts. Greedy, batch size 1,
the same fixed draft length for both, confidence thresholds off. Every prompt is decoded in four
ways, in turns. Prints tokens/s ratios with 95% intervals over prompts.
"""

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from align.machine import use_machine
from distill.recipe import read_yaml
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.measuring.intervals import measure
from eval.prompts import load_prompts, render_set

PROMPTS = 24
NEW_TOKENS = 64
GAMMA = 3


def main(folder):
    use_machine()
    recipe = read_yaml(folder / "recipe.yaml")
    dtype = getattr(torch, recipe["dtype"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = load_prompts(str(folder / "prompts" / "eval.jsonl"), PROMPTS)
    target = load_target(recipe["target"], dtype, device, 2048)
    drafter = load_drafter(str(folder / "draft"), target)
    assistant = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=dtype).to(device)
    assistant.generation_config.num_assistant_tokens = GAMMA
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    how = Decoding(Sampling(), target.stops, NEW_TOKENS)
    config = GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=sorted(target.stops),
        pad_token_id=min(target.stops),
    )

    def stock(ids, **assisted):
        tokens = torch.tensor([ids], device=device)
        output = target.model.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config, **assisted
        )
        return output.shape[1] - len(ids)

    def ours(prompt, ids, drafter=None):
        run = decode(target.decoder, drafter, prompt, ids, how, GAMMA)
        return len(run.tokens)

    ways = {
        "ours, speculative": lambda prompt, ids: ours(prompt, ids, drafter),
        "ours, baseline": ours,
        "transformers, assisted": lambda _, ids: stock(ids, assistant_model=assistant),
        "transformers, generate": lambda _, ids: stock(ids),
    }
    rows = []
    ids = render_set("", prompts, target.tokenizer, 2048, NEW_TOKENS).ids
    for turn, (prompt, prompt_ids) in enumerate(zip(prompts, ids, strict=True)):
        row = {}
        for i in range(len(ways)):  # the order rotates: no way always runs on a cool machine
            name = list(ways)[(turn + i) % len(ways)]
            clock = time.perf_counter()
            tokens = ways[name](prompt, prompt_ids)
            row[name] = (tokens, time.perf_counter() - clock)
        if turn > 0:  # the first is warm-up
            rows.append([value for name in ways for value in row[name]])
    for over, under in ((0, 2), (1, 3), (0, 1), (2, 3)):
        names = list(ways)
        ratio = measure(
            names[over],
            rows,
            lambda t, a=over, b=under: (
                (t[..., 2 * a] / t[..., 2 * a + 1]) / (t[..., 2 * b] / t[..., 2 * b + 1])
            ),
        )
        print(f"{names[over]} / {names[under]}: {ratio:.2f} times, n={ratio.n} prompts")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
