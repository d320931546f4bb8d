"""What a vocabulary bridge costs: the check of a large pair, and a draft step by map.

    python tests/benchmarks/vocabulary.py

1. `align.check` as a command on a byte-level vocabulary of 150k and a SentencePiece-like one of
   262k tokens, both with a merge for every token: seconds, bar 10.
2. A draft step of a model of SmolLM2-135M's shape (random weights; bf16, as a run loads it) by
   intersection, 85% of its tokens mapped, over a plain step, interleaved: bar 1.05. Greedy and
   sampled, with a fixed draft length and with one that depends on the draft's certainty, which runs
   choose where it pays. Prints the ratio with a 95% interval over rounds.
"""

import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from align.machine import use_machine
from eval.decoding.build import build_decoder
from eval.decoding.drafters.bridged import MapDrafter
from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.drafter import Texts
from eval.decoding.verification import Sampling
from eval.measuring.intervals import measure

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 32
STEPS = 20  # in a round
BLOCK = 4  # steps of a proposal
CONTEXT = 200
NEVER_STOPS = 1e-99  # a confidence that is computed and compared, and always enough


def words(count, letters):
    """`count` tokens and the merges that build them, each one letter longer than an earlier one."""
    tokens, merges = [*letters], []
    at = 0
    while len(tokens) < count:
        for letter in letters:
            tokens.append(tokens[at] + letter)
            merges.append([tokens[at], letter])
        at += 1
    return tokens[:count], merges[: count - len(letters)]


def write(folder, count, byte_level):
    """A checkpoint folder without weights."""
    space = "Ġ" if byte_level else "▁"
    tokens, merges = words(count - (0 if byte_level else 256), f"{space}abcdefghijklmnopqrstuvwxyz")
    if byte_level:
        part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        parts = {"normalizer": None, "pre_tokenizer": part, "decoder": part}
    else:
        tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), *tokens]
        replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        decoder = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}]}
        back = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        parts = {"normalizer": back, "pre_tokenizer": None, "decoder": decoder}
    backend = {
        "version": "1.0",
        "added_tokens": [],
        "post_processor": None,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
            "byte_fallback": not byte_level,
        },
        **parts,
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": count}))
    return str(folder)


def check_seconds():
    with tempfile.TemporaryDirectory() as name:
        target = write(Path(name) / "target", 262_144, byte_level=False)
        draft = write(Path(name) / "draft", 151_665, byte_level=True)
        corpus = Path(name) / "corpus.txt"
        corpus.write_text("the cat sat on a mat and so it goes\n" * 20_000)
        command = [sys.executable, "-m", "align.check", "--target", target, "--draft", draft]
        for extra in ([], ["--corpus", str(corpus)]):
            clock = time.perf_counter()
            subprocess.run(
                [*command, *extra, "--json"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
            )
            print(
                f"align.check, 262144 against 151665 tokens{', a corpus of 0.7 MB' * bool(extra)}: "
                f"{time.perf_counter() - clock:.1f} s"
            )


class Mapped(MapDrafter):
    """A map made up, between no tokenizers."""

    def __post_init__(self):
        CausalLMDrafter.__post_init__(self)

    def read(self, ids, begins=False):
        return list(ids)


def step_ratio():
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval().bfloat16()
    decoder = build_decoder(model, CONTEXT + STEPS + 8)
    mapped = torch.randperm(49_152)[: int(0.85 * 49_152)].sort().values
    token_ids = torch.randperm(262_144)[: len(mapped)]
    by_map = Mapped(
        decoder=decoder,
        vocab_size=262_144,
        vocabulary={},
        token_ids=token_ids,
        target=None,
        draft=None,
    )
    by_map.mapped = by_map.own_ids = mapped
    arms = (CausalLMDrafter(decoder=decoder, vocab_size=49_152, vocabulary={}), by_map)
    ids = torch.randint(49_152, (CONTEXT,)).tolist()
    samplings = (Sampling(), Sampling(temperature=0.8))
    for sampling, stop_below in itertools.product(samplings, (0.0, NEVER_STOPS)):
        rows = []
        for turn in range(ROUNDS + 1):
            sessions = []
            for drafter in arms:
                generator = torch.Generator().manual_seed(turn)
                slots = CONTEXT + STEPS + 8
                session = TokenSession(drafter, Texts([ids], slots, sampling, generator, [{}]))
                session.propose(1, 0.0)  # reads the context
                sessions.append(session)
            seconds = [0.0, 0.0]
            for block in range(STEPS // BLOCK):
                for arm in (0, 1) if (turn + block) % 2 else (1, 0):
                    clock = time.perf_counter()
                    sessions[arm].seen = [CONTEXT - 1]
                    assert sessions[arm].propose(BLOCK, stop_below).tokens.shape[1] == BLOCK
                    seconds[arm] += time.perf_counter() - clock
            if turn > 0:  # the first is warm-up
                rows.append(seconds)
        ratio = measure("step", rows, lambda t: t[..., 1] / t[..., 0])
        milliseconds = 1e3 * sum(row[0] for row in rows) / ROUNDS / STEPS
        kind = "greedy" if sampling.greedy else "sampled"
        print(
            f"draft step by map / plain, {kind}{', confidence' * bool(stop_below)}: "
            f"{ratio:.3f}, n={ROUNDS} rounds of {STEPS} steps, "
            f"plain {milliseconds:.2f} ms"
        )


if __name__ == "__main__":
    use_machine()
    check_seconds()
    step_ratio()
