"""Wheels made by hand, an index that is a folder, and checkpoints of a few kilobytes."""

import json
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from align.cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]
PYTHON = sys.executable

# every string that tokenizers have been seen to stumble over
STRINGS = [
    "",
    " ",
    "\r\n",
    *(" " * n for n in range(2, 33)),
    "\t\tindented\n\t    deeper\n",
    "x , y",
    "caf\u00e9",
    "cafe\u0301",
    "\ufb01ne",
    "a\u00a0b",
    "a\u200bb",
    "\ufeffstart",
    "nul\x00inside",
    "👩\u200d👩\u200d👧",
    "日本語のテキスト",
    "עברית العربية",
    "1,234,567",
    "§ 12(b)(ii)",
    "“quoted” ‘curly’",
    "user says <|im_end|> and goes on",
    "ab" * 10_000,
    "literal ▁ Ġ <0x0A>",
]


@pytest.fixture
def index(tmp_path_factory):
    """The package index: a folder of wheels."""
    return tmp_path_factory.mktemp("index")


@pytest.fixture(autouse=True)
def no_network(tmp_path, index, monkeypatch):
    """Every test has its own cache, and pip finds only the wheels in `index`."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def cached_entries():
    return [path for path in cache_folder().glob("*/*") if not path.name.endswith(".lock")]


def start(script, *arguments):
    """A Python process that runs the script in the repository; its output is piped."""
    command = [PYTHON, "-c", textwrap.dedent(script), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


@pytest.fixture
def make_wheel(index, monkeypatch):
    """make_wheel(name, version, {path: bytes}) puts a wheel into the index.

    From there this process copies it, as pip would in a second; programs that it starts use pip.
    """
    run = subprocess.run

    def copied(command, **how):
        if command[0] != PYTHON or "download" not in command:
            return run(command, **how)
        name, _, version = command[-1].partition("==")
        wheels = list(index.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        (folder,) = (word for word in command if word.startswith("--dest="))
        for wheel in wheels:
            shutil.copy(wheel, folder.removeprefix("--dest="))
        error = "" if wheels else f"ERROR: No matching distribution found for {command[-1]}"
        return subprocess.CompletedProcess(command, int(not wheels), "", error)

    monkeypatch.setattr(subprocess, "run", copied)

    def make(name, version, files):
        info = f"{name}-{version}.dist-info"
        files = files | {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        }
        with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for path, content in files.items():
                wheel.writestr(path, content)

    return make


@pytest.fixture(scope="session")
def byte_level_tokenizer():
    """Byte-level BPE with merges of its own, and <|im_end|> as id 0."""
    corpus = [*(text for text in STRINGS if len(text) < 999), "def f(x):\n    return x\n" * 4]
    return trained(corpus, 420, "<|im_end|>")


def trained(texts, size, end):
    """Byte-level BPE with merges for these texts; the end of a text is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def sentencepiece(pieces, merges):
    """Llama 2's kind of tokenizer: ▁ for a space, a token of each byte for what has no other."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


def spell(content):
    """Bytes in GPT-2's alphabet, as a byte-level vocabulary writes them."""
    alphabet = bytes_to_unicode()
    return "".join(alphabet[byte] for byte in content)


def byte_level(vocabulary, added=(), merges=()):
    """A tokenizer.json: byte-level BPE, and added tokens (id, content, special)."""
    part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": content, **flags, "special": special}
            for i, content, special in added
        ],
        "normalizer": None,
        "pre_tokenizer": part,
        "post_processor": None,
        "decoder": part,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [*merges],
        },
    }


@pytest.fixture
def write_tokenizer():
    """Writes a checkpoint without weights: letters a, b, c… as tokens, <s> and </s> after them."""

    def write(
        folder,
        tokens="abcdefgh",
        added=("<s>", "</s>"),
        rows=None,
        special=True,
        eos="</s>",
        template="{{ messages[0].content }}",
        config=None,
        generation_config=None,
        tokenizer_config=None,
    ):
        folder.mkdir(parents=True)
        vocabulary = {token: i for i, token in enumerate(tokens) if token is not None}
        added = [(len(tokens) + i, content, special) for i, content in enumerate(added)]
        ids = {content: i for i, content, _ in added}
        files = {
            "tokenizer.json": byte_level(vocabulary, added),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": eos,
            }
            | (tokenizer_config or {}),
            "config.json": {
                "model_type": "llama",
                "vocab_size": rows or len(tokens) + len(added),
                "eos_token_id": ids.get(eos),
                "tie_word_embeddings": True,
            }
            | (config or {}),
            "generation_config.json": {"eos_token_id": ids.get(eos)} | (generation_config or {}),
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return str(folder)

    return write
