"""A pair of models of a few kilobytes, recipes for them, and their finished runs."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from distill.clock import Clock
from distill.drafters.kind import Draft
from distill.recipe import build_recipe
from distill.teacher.store import Answers, CachedAnswer, Store, name_of
from distill.train import run
from distill.trainer import DraftTrainer
from eval.prompts import Prompt, PromptSet
from tests.align.conftest import trained
from tests.conftest import WORKER, cache_without_answers
from tests.distill.training import FOLLOWED
from tests.mtp import save_target

WORDS = "the cat sat on a mat and the dog ran to the red barn while rain fell on old stones"
TEXTS = [" ".join(WORDS.split()[i:] + WORDS.split()[:i]) for i in range(18)]

TOKENS, ROWS = 300, 304  # of the tokenizer, and of a head with room for a mask
ONE_LAYER = {"draft": None, "num_draft_layers": 1}
TRIMMED = ONE_LAYER | {"draft_vocab_size": 270}
LORA = {"use_peft": True, "lora_r": 4}
PARD = {"drafter": "pard", "max_gamma": 3, "target": "roomy"}
# One run of each kind of draft, and of each way onto the target's ids: keys of its recipe
RUNS = {
    "transplant": {"draft": "draft", "max_steps": 120},
    "remap": {"draft": "moved"},
    "padded": {"draft": "small", "target": "large"},
    "padded before": {"draft": "large", "target": "small"},
    "padded lora": {"draft": "small", "target": "large"} | LORA,
    "pruned": ONE_LAYER,
    "trimmed": TRIMMED,
    "trimmed lora": TRIMMED | LORA,
    "eagle3": TRIMMED | {"drafter": "eagle3"},
    "eagle3 bf16": TRIMMED | {"drafter": "eagle3", "dtype": "bfloat16"},  # drafts in eight bits
    "medusa": TRIMMED | {"drafter": "medusa", "max_gamma": 3},
    "whole medusa": ONE_LAYER | {"drafter": "medusa", "max_steps": 5},  # to be tuned further
    "dflash": ONE_LAYER | PARD | {"drafter": "dflash", "num_draft_layers": 2},
    "dflash trimmed bf16": TRIMMED | PARD | {"drafter": "dflash", "dtype": "bfloat16"},
    "mtp": ONE_LAYER | {"drafter": "mtp", "target": "mtp", "max_steps": 120},
    "mtp hybrid": ONE_LAYER | {"drafter": "mtp", "target": "hybrid", "max_steps": 120},
    "pard sibling": {"draft": "target"} | PARD,
    "pard lora": {"draft": "target"} | PARD | LORA,
    "pard pruned": ONE_LAYER | PARD,
    "uno": {"draft": None, "drafter": "uno", "max_gamma": 3, "lora_r": 4, "lora_alpha": 16},
    "pard trimmed": ONE_LAYER | PARD | {"draft_vocab_size": 290},
}


def tokenizer(texts, size, end):
    made = trained(texts, size, end)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end, pad_token=end)


@pytest.fixture(autouse=True)
def no_answers(tmp_path_factory, monkeypatch):
    """No target has answered anything before a test."""
    cache = cache_without_answers(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("DRAFTSMITH_CACHE", cache)


@pytest.fixture
def followed(monkeypatch):
    """Prompts are held out of few as well, and the draft is measured on them often."""
    for module, name, value in FOLLOWED:
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="session")
def texts():
    return TEXTS


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """shared(name, make): a folder that every worker has; the first that asks makes it."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if WORKER else base) / "shared"
    root.mkdir(exist_ok=True)

    def made(name, make):
        with FileLock(root / f"{name}.lock"):
            if not (root / f"{name}.made").exists():
                make(root / name)
                (root / f"{name}.made").touch()
        return root / name

    return made


@pytest.fixture(scope="session")
def folder(shared, tiny_llama):
    """Models, each with its tokenizer, and prompts.

    target/ and roomy/, which has rows behind its last token; draft/ with other tokens; moved/ with
    the target's in another order; small/ and large/ with padded heads; mtp/ with an MTP head,
    hybrid/ with one and with a layer of linear attention.
    """
    return shared("pair", lambda made: make_models(made, tiny_llama))


def make_models(folder, tiny_llama):
    from tests.siblings import LARGE, SMALL, save_sibling  # which imports this module

    save_sibling(folder / "small", SMALL, 0)
    save_sibling(folder / "large", LARGE, 1)
    for name, seed, texts, rows, end in (
        ("target", 6, TEXTS, TOKENS, "</s>"),
        ("draft", 5, [t[::2] for t in TEXTS] + TEXTS[:1], 290, "<|end|>"),
        ("roomy", 5, TEXTS, ROWS, "</s>"),
    ):
        words = tokenizer(texts, min(rows, TOKENS), end)
        words.save_pretrained(folder / name)
        model = tiny_llama(seed, spread=3, vocab_size=rows, eos_token_id=0)
        with torch.no_grad():
            model.lm_head.weight.mul_(8)  # sure of itself, so that there is something to learn
        model.generation_config.eos_token_id = 0
        if name == "draft":
            model.config.auto_map = {"AutoModel": "code.Draft"}
        model.save_pretrained(folder / name)
    for name, family, seed, sure in (("mtp", "deepseek_v3", 6, 8), ("hybrid", "qwen3_next", 0, 24)):
        keys = {"vocab_size": TOKENS, "eos_token_id": 0}
        save_target(folder / name, family, seed, spread=1, sure=sure, **keys)
        words.from_pretrained(folder / "target").save_pretrained(folder / name)
    backend = json.loads((folder / "target" / "tokenizer.json").read_text())
    vocabulary = backend["model"]["vocab"]
    size = len(vocabulary)
    turned = {token: i if i == 0 else size - i for token, i in vocabulary.items()}
    backend["model"]["vocab"] = turned
    shutil.copytree(folder / "target", folder / "moved")
    (folder / "moved" / "tokenizer.json").write_text(json.dumps(backend))
    for name, count in (("train", 12), ("eval", 6)):
        start = 0 if name == "train" else 12
        rows = [{"prompt": " ".join(t.split()[:6])} for t in TEXTS[start : start + count]]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="session")
def finished(shared, folder, job, tmp_path_factory):
    """finished(name): the recipe of a finished run of RUNS, not to be written to."""
    cache = cache_without_answers(tmp_path_factory.mktemp("cache"))

    def recipe(name):
        keys = RUNS[name]
        models = {key: str(folder / keys[key]) for key in ("target", "draft") if keys.get(key)}

        def make(output):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DRAFTSMITH_CACHE", cache)
                assert run(job(output, **keys | models)) == 0

        return job(shared(name.replace(" ", "-"), make), **keys | models)

    return recipe


def made_answers(count=24, vocab_size=50, top=6):
    """Random answers of several lengths, with the distributions of a target that nobody has."""
    generator = torch.Generator().manual_seed(5)
    answers = []
    for index in range(count):
        prompt, response = 3 + index % 4, 4 + index % 7
        logp = torch.randn(response, vocab_size, generator=generator).log_softmax(-1)
        logprobs, ids = logp.topk(top, dim=-1)
        text = torch.randint(2, vocab_size, (prompt + response,), generator=generator)
        answers.append(CachedAnswer(text[:prompt], text[prompt:], ids, logprobs))
    return answers


def plain_recipe(folder, **changes):
    """A recipe of what trains alone: it names no models and no prompts."""
    keys = {"target": "unused", "train_prompts": "unused", "eval_prompts": "unused"}
    keys |= {"output_dir": str(folder), "learning_rate": 1e-2, "tokens_per_step": 48}
    keys |= {"use_cpu": True, "bf16": False, "disable_tqdm": True, "warmup_steps": 0}
    return build_recipe(keys | changes)


def stored(folder, answers, vocab_size=50):
    """The outputs in a store of this folder."""
    store = Store(folder)
    store.append({name_of(answer.text): answer.packed(vocab_size) for answer in answers}, "local")
    return Answers(store, [name_of(answer.text) for answer in answers])


@pytest.fixture(scope="session")
def plain_trainer():
    """Makes the trainer of a model that is no pair's draft, and whose head covers all words."""

    def make(recipe, model, answers, held_out=(), strategy="direct"):
        vocabulary = SimpleNamespace(vocab_size=model.vocab_size)
        target = SimpleNamespace(vocabulary=vocabulary)
        pair = SimpleNamespace(target=target, strategy=strategy, layers=())
        outputs = (stored(recipe.folder / "outputs", part) for part in (answers, held_out))
        clock = Clock(recipe.folder, recipe.minutes)
        ids = [answer.prompt_ids.tolist() for answer in held_out]
        prompts = PromptSet("", [Prompt(str(i), "?") for i in range(len(ids))], ids)
        return DraftTrainer(recipe, pair, Draft(model, None), *outputs, prompts, clock)

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
                "engine": None,
                "cache_top_k": 30,
                "learning_rate": 5e-3,
                "warmup_steps": 0,
                "max_steps": 40,
                "tokens_per_step": 136,
                "use_cpu": True,
                "bf16": False,
                "disable_tqdm": True,
            }
            | changes
        )

    return make
