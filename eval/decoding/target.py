"""Loads the target. Functions for the bytes of any model, and the hash of a tensor."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.forward import Decoder


@dataclass
class Target:
    """The target as transformers' `model` and as our `decoder`, on the same weights."""

    checkpoint: Checkpoint
    model: PreTrainedModel
    decoder: Decoder
    stops: frozenset[int]

    @property
    def bytes(self) -> int:
        return model_bytes(self.model)

    @property
    def vocab_size(self) -> int:
        return self.decoder.embedding.shape[0]


def load_target(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str, context_length: int
) -> Target:
    """The target, for contexts of up to `context_length` tokens.

    device: see `Checkpoint.load`. Raises UserError for a model that cannot be read or decoded here.
    """
    model = checkpoint.load(dtype, device)
    return Target(checkpoint, model, build_decoder(model, context_length), checkpoint.stops)


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes; the tensor may be on any device."""
    data = tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.data).hexdigest()


def device_count(model: PreTrainedModel) -> int:
    """The number of devices that a model is on."""
    return len({parameter.device for parameter in model.parameters()})


def model_bytes(model: PreTrainedModel, *shared: str) -> int:
    """Bytes of a model's parameters; tied parameters count once. shared: names of others'."""
    return sum(p.nbytes for name, p in model.named_parameters() if name not in shared)
