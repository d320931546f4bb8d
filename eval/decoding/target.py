"""Loads the target. Functions for the bytes and hashes of any model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from align.sources import (
    file_sha256,
    load_model,
    load_tokenizer,
    resolve_checkpoint,
    weight_files,
)
from align.vocabulary import stop_tokens
from eval.decoding.build import build_decoder
from eval.decoding.drafters import LOOKUP_FIRST
from eval.decoding.forward import Decoder


@dataclass
class Target:
    """The target as transformers' `model` and as our `decoder`, on the same weights."""

    spec: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    stops: frozenset[int]

    @property
    def bytes(self) -> int:
        return model_bytes(self.model)

    @property
    def vocab_size(self) -> int:
        return self.decoder.embedding.shape[0]


def load_target(spec: str, dtype: torch.dtype, device: str, context_length: int) -> Target:
    """The target of a spec, for contexts of up to `context_length` tokens.

    device: see `load_model`. Raises UserError for a model that cannot be read or decoded here.
    """
    model, tokenizer = load_model(spec, dtype, device), load_tokenizer(spec)
    decoder = build_decoder(model, context_length)
    stops = stop_tokens(resolve_checkpoint(spec), tokenizer)
    return Target(spec, model, tokenizer, decoder, stops)


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes; the tensor may be on any device."""
    data = tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.data).hexdigest()


def weights_sha256(path: str) -> str | None:
    """The sha256 of a draft's weight file; for several files, of the text that `sha256sum` prints.

    path: as in a log, with or without `lookup-first:`. None if it names no files on this machine.
    """
    place = Path(path.removeprefix(LOOKUP_FIRST))
    files = [place] if place.is_file() else weight_files(place)
    lines = [f"{file_sha256(file)}  {file.name}\n" for file in files]
    if len(lines) > 1:
        return hashlib.sha256("".join(lines).encode()).hexdigest()
    return lines[0].partition(" ")[0] if lines else None


def device_count(model: PreTrainedModel) -> int:
    """The number of devices that a model is on."""
    return len({parameter.device for parameter in model.parameters()})


def model_bytes(model: PreTrainedModel, *shared: str) -> int:
    """Bytes of a model's parameters; tied parameters count once. shared: names of others'."""
    return sum(p.nbytes for name, p in model.named_parameters() if name not in shared)
