"""What speculative decoding is worth on a GPU, from random weights: no network, no files.

    python tests/benchmarks/gpu.py [8B | 1.1B | tiny]

A target of that shape and a draft of its first three layers under a trimmed head. The draft's steps
are real, but its tokens are made the target's own with a chosen probability (forced acceptance), so
that speed is measured at an alpha that random weights do not have. Prints c, the verify ratio, our
baseline over stock `generate`, and at each acceptance tau, predicted and measured speed-up, decode
efficiency, and the speed-up over stock `generate`. Without a GPU only `tiny` runs, to show that the
program does; its figures mean nothing.

The figures of one row are taken again without CUDA graphs.
"""

import json
import random
import sys
import time

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from align.machine import use_machine
from distill.drafters.pruned import build_pruned
from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Drafter, Session
from eval.decoding.drafters.pruned import FORMAT
from eval.decoding.graphs import GraphedDecoder
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import Target, model_bytes
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.timing import step_costs
from eval.prompts import Prompt

# vocabulary, hidden, intermediate, layers, heads, key heads
SHAPES = {
    "8B": (128_256, 4096, 14_336, 32, 32, 8),
    "1.1B": (49_152, 2048, 5632, 22, 32, 4),
    "tiny": (512, 64, 96, 4, 4, 2),
}
DRAFT_LAYERS = 3
HEAD = 16_384  # rows of the draft's head at most
PROMPT_TOKENS, GAMMA = 128, 4
SIZES = {"cuda": (8, 128), "cpu": (2, 12)}  # prompts, and new tokens of each
ACCEPTANCES = (0.6, 0.8, 0.9, 1.0)


class Forced(Drafter):
    """A drafter whose tokens are replaced, after its own steps, by known texts' or by others."""

    def __init__(self, inner, texts, probability):
        self.__dict__.update(inner.__dict__)
        self.inner, self.texts, self.probability = inner, texts, probability

    def start(self, text):
        known = self.texts[tuple(text.ids[:-1])]
        return ForcedSession(self.inner.start(text), known, self.probability)

    def teacher_forced(self, ids, text, sampling, states):
        return self.inner.teacher_forced(ids, text, sampling, states)

    def step(self, context_length, sampling):
        return self.inner.step(context_length, sampling)


class ForcedSession(Session):
    def __init__(self, inner, text, probability):
        self.inner, self.text, self.position = inner, text, 1
        self.probability, self.random = probability, random.Random(0)

    def propose(self, count):
        made = self.inner.propose(count)
        width = len(made.tokens)
        wanted = (self.text[self.position : self.position + width] + [0] * width)[:width]
        right = [self.random.random() < self.probability for _ in wanted]
        tokens = [t if ok else (t + 1) % 100 for t, ok in zip(wanted, right, strict=True)]
        device = made.tokens.device
        return made._replace(tokens=torch.tensor(tokens, dtype=torch.long, device=device))

    def commit(self, emitted, accepted, states):
        self.position += len(emitted)
        self.inner.commit(emitted, accepted, states)


def random_pair(shape, device):
    vocab, hidden, intermediate, layers, heads, key_heads = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    head = model.lm_head.weight.detach()[:HEAD].clone()
    draft = build_pruned(model, DRAFT_LAYERS, head)
    target = Target(shape, model, None, build_decoder(model, 1024), frozenset())
    return target, FORMAT.drafter(draft, torch.arange(len(head), device=device), target)


def stock_seconds(target, ids, new_tokens):
    """Seconds of stock `generate`, which ignores the end of a text."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    config.eos_token_id = None
    tokens = torch.tensor([ids], device=target.decoder.device)
    clock = time.perf_counter()
    made = target.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), generation_config=config
    )
    made[0, -1].item()
    assert made.shape[1] == len(ids) + new_tokens
    return time.perf_counter() - clock


def main(shape):
    use_machine()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and shape != "tiny":
        sys.exit(f"no CUDA device: figures of {shape} are for a GPU; `tiny` shows the program runs")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    target, drafter = random_pair(shape, device)
    figures = {
        "device": where,
        "torch": torch.__version__,
        "target": shape,
        "target GB": round(model_bytes(target.model) / 1e9, 2),
        "draft GB": round(drafter.bytes / 1e9, 2),
    }
    vocab, (count, new_tokens) = SHAPES[shape][0], SIZES[device.type]
    choice = random.Random(0)
    ids = [[choice.randrange(vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    prompts = [Prompt(str(i), prompt="") for i in range(count)]
    how = Decoding(Sampling(), frozenset(), new_tokens)
    figures |= measured(target, drafter, prompts, ids, how)
    if isinstance(target.decoder, GraphedDecoder):
        target.decoder, drafter.decoder = target.decoder.fused, drafter.decoder.fused
        figures["without CUDA graphs"] = measured(target, drafter, prompts, ids, how)
    print(json.dumps(figures, indent=1))
    return figures


def measured(target, drafter, prompts, ids, how):
    """Costs of single steps, and speeds at each acceptance."""
    new_tokens = how.max_new_tokens
    (costs,) = step_costs(
        target.decoder, [drafter], PROMPT_TOKENS + new_tokens // 2, GAMMA, how.sampling
    )
    figures = {
        "target step ms": round(costs.target_step_ms, 3),
        "draft step ms": round(costs.draft_step_ms, 3),
        "c": round(costs.draft_step_ms / costs.target_step_ms, 3),
        "verify ratio": round(costs.target_verify_ms[GAMMA + 1] / costs.target_step_ms, 3),
    }

    def run(contender):
        rows = list(zip(prompts, ids, strict=True))
        decode(target.decoder, contender, *rows[0], how, GAMMA)  # warm-up
        return [decode(target.decoder, contender, *row, how, GAMMA) for row in rows]

    baseline = run(None)
    texts = {tuple(row): one.tokens for row, one in zip(ids, baseline, strict=True)}
    seconds = sum(one.seconds for one in baseline)
    stock_seconds(target, ids[0], new_tokens)  # warm-up
    stock = sum(stock_seconds(target, row, new_tokens) for row in ids)
    figures["over stock generate"] = round(stock / seconds, 3)
    for probability in ACCEPTANCES:
        runs = run(Forced(drafter, texts, probability))
        table = metrics.prompt_table(runs, baseline)
        predicted = metrics.predicted_speedup(costs)
        figures[f"forced acceptance {probability:g}"] = {
            "tau": round(metrics.measured(metrics.MEAN_ACCEPTANCE_LENGTH, table).mean, 2),
            "speed-up": round(metrics.measured(metrics.SPEEDUP, table).mean, 3),
            "texts as without a draft": sum(
                one.tokens == other.tokens for one, other in zip(runs, baseline, strict=True)
            ),
            "predicted": round(metrics.measured(predicted, table).mean, 3),
            "decode efficiency": round(
                metrics.measured(metrics.decode_efficiency(costs), table).mean, 3
            ),
            "speed-up over stock": round(stock / sum(one.seconds for one in runs), 3),
        }
    return figures


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "8B")
