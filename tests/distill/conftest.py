"""A pair of models of a few kilobytes, and recipes for them."""

import json
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from distill.prepare import PreparedDraft
from distill.recipe import build_recipe
from distill.trainer import build_trainer
from tests.conftest import cache_without_answers

WORDS = "the cat sat on a mat and the dog ran to the red barn while rain fell on old stones"
TEXTS = [" ".join(WORDS.split()[i:] + WORDS.split()[:i]) for i in range(18)]


def tokenizer(texts, size, end):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end)


@pytest.fixture(autouse=True)
def no_answers(tmp_path_factory, monkeypatch):
    """No target has answered anything before a test."""
    cache = cache_without_answers(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("DRAFTSMITH_CACHE", cache)


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tiny_llama):
    """target/, draft/ with other tokens, moved/ with the target's in another order, and prompts."""
    folder = tmp_path_factory.mktemp("pair")
    for name, texts, size, end in (
        ("target", TEXTS, 300, "</s>"),
        ("draft", [t[::2] for t in TEXTS] + TEXTS[:1], 290, "<|end|>"),
    ):
        words = tokenizer(texts, size, end)
        words.save_pretrained(folder / name)
        model = tiny_llama(len(name), spread=3, vocab_size=len(words), eos_token_id=0)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)  # sure of itself, so that there is something to learn
        model.generation_config.eos_token_id = 0
        model.save_pretrained(folder / name)
    words = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    backend = json.loads(words.backend_tokenizer.to_str())
    vocabulary = backend["model"]["vocab"]
    size = len(vocabulary)
    turned = {token: i if i == 0 else size - i for token, i in vocabulary.items()}
    backend["model"]["vocab"] = turned
    (folder / "moved").mkdir()
    for path in (folder / "target").iterdir():
        (folder / "moved" / path.name).write_bytes(path.read_bytes())
    (folder / "moved" / "tokenizer.json").write_text(json.dumps(backend))
    for name, count in (("train", 12), ("eval", 6)):
        start = 0 if name == "train" else 12
        rows = [{"prompt": " ".join(t.split()[:6])} for t in TEXTS[start : start + count]]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(scope="session")
def plain_trainer():
    """Makes the trainer of a model that is no pair's draft, and whose head covers all words."""

    def make(recipe, model, answers, held_out=(), new_rows=False):
        words = models.WordLevel({f"w{i}": i for i in range(model.vocab_size)}, unk_token="w0")
        pair = SimpleNamespace(
            trained_rows=lambda token_ids: token_ids,
            load_tokenizer=lambda: PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1"
            ),
            retokenizer=None,
            new_rows=new_rows,
        )
        prepared = PreparedDraft(model, None, None, 0.0)
        return build_trainer(recipe, pair, prepared, answers, held_out=held_out)

    return make


@pytest.fixture(scope="session")
def job(folder):
    """Makes a recipe: job(output folder, **keys to change)."""

    def make(output, **changes):
        return build_recipe(
            {
                "target": str(folder / "target"),
                "draft": str(folder / "draft"),
                "train_prompts": str(folder / "train.jsonl"),
                "eval_prompts": str(folder / "eval.jsonl"),
                "output_dir": str(output),
                "dtype": "float32",
                "answer_max_new_tokens": 24,
                "max_new_tokens": 16,
                "tuning_prompts": 1,
                "speed_prompts": 3,
                "max_gamma": 2,
                "cache_top_k": 30,
                "learning_rate": 5e-3,
                "max_steps": 40,
                "per_device_train_batch_size": 4,
                "use_cpu": True,
                "bf16": False,
                "disable_tqdm": True,
            }
            | changes
        )

    return make
