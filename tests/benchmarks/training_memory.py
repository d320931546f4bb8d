"""Peak memory of training from a cache of 10 M answer tokens, beside that from one of 100 k.

    python tests/benchmarks/training_memory.py

Both caches are made up: answers of 128 tokens to prompts of 100, the target's 15 most likely of
49,152 tokens at each. A process of its own for each opens the cache, writes the training set and
takes a few steps with a tiny draft over that vocabulary. Prints the peak of resident memory, which
the bar of 300 MB is on (VmHWM: pages of mapped files that were touched are counted), what of it
was the process's own at most (RssAnon, looked at every few milliseconds), and the differences.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from align.machine import use_machine
from distill.prepare import PreparedDraft
from distill.recipe import build_recipe
from distill.teacher.answers import ANSWERS_PER_SHARD
from distill.teacher.store import Answers, CachedAnswer, Store
from distill.trainer import build_trainer, distil

TOKENS = (100_000, 10_000_000)
BAR = 300  # MB
PROMPT, RESPONSE, TOP_K, VOCAB = 100, 128, 15, 49_152
STEPS = 5


def make_cache(folder: Path, tokens: int) -> None:
    """A store of so many answer tokens in `folder`."""
    store = Store(folder)
    generator = torch.Generator().manual_seed(0)
    for start in range(0, -(-tokens // RESPONSE), ANSWERS_PER_SHARD):
        shard = []
        for index in range(start, start + ANSWERS_PER_SHARD):
            texts = torch.randint(VOCAB, (PROMPT + RESPONSE,), generator=generator)
            logits = torch.randn(RESPONSE, TOP_K, generator=generator).sort(descending=True).values
            ids = torch.randint(VOCAB, (RESPONSE, TOP_K), generator=generator)
            logprobs = logits.log_softmax(-1) - 0.1  # a tenth of the mass is elsewhere
            shard.append(CachedAnswer(index, texts[:PROMPT], texts[PROMPT:], ids, logprobs))
        store.append({str(answer.index): answer.packed(VOCAB) for answer in shard})


def memory(*names: str) -> list[int]:
    """Those fields of this process's status, in MB."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [int(fields[name].split()[0]) * 1024 // 10**6 for name in names]


def train(folder: Path) -> dict[str, int]:
    """A few steps from the cache in `folder`, and what they took."""
    use_machine()
    own, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            own[0] = max(own[0], *memory("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    clock = time.perf_counter()
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=1, num_attention_heads=4))
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    recipe = build_recipe(
        {
            **dict.fromkeys(("target", "train_prompts", "eval_prompts"), "unused"),
            "output_dir": str(folder),
            "max_steps": STEPS,
            "per_device_train_batch_size": 8,
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
        }
    )
    store = Store(folder)
    pair = SimpleNamespace(
        trained_rows=lambda token_ids: token_ids,
        load_tokenizer=lambda: PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b"),
        retokenizer=None,
        new_rows=False,
    )
    prepared = PreparedDraft(model, None, None, 0.0)
    answers = Answers(store, sorted(store, key=int))
    trainer = build_trainer(recipe, pair, prepared, answers)
    distil(trainer, recipe)
    seconds = round(time.perf_counter() - clock)
    over.set()
    thread.join()
    (peak,) = memory("VmHWM")
    return {"answers": len(trainer.train_dataset), "peak": peak, "own": own[0], "seconds": seconds}


def main() -> int:
    found = []
    for tokens in TOKENS:
        with tempfile.TemporaryDirectory() as folder:
            make_cache(Path(folder), tokens)
            command = [sys.executable, __file__, folder]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            size = sum(path.stat().st_size for path in Path(folder).glob("shard-*")) // 10**6
        row = json.loads(output.splitlines()[-1])
        found.append(row)
        print(
            f"{tokens:>10} tokens ({row['answers']} answers, {size} MB on disk): peak "
            f"{row['peak']} MB, of its own at most {row['own']} MB, {row['seconds']} s"
        )
    more = found[1]["peak"] - found[0]["peak"]
    print(f"difference: {more} MB (bar: {BAR}), of its own {found[1]['own'] - found[0]['own']} MB")
    return 0 if more <= BAR else 1


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(train(Path(sys.argv[1]))))
        sys.exit()
    sys.exit(main())
