"""A pruned draft that drafts all its tokens in one pass (PARD, arXiv 2504.18583).

Behind the newest token stand mask tokens, one a further token to be drafted: the state at the mask
of depth d predicts the token d positions after the newest one. Masks stand where the drafted tokens
will, so their position ids and what they attend to (the text, and the masks before) are those of a
plain causal pass. The first token's path knows no mask: there the draft is an ordinary LM. Each
depth has an embedding of its own, since a draft of a few layers has none to spare for counting
masks. On top, a sequential head corrects every token by the one drafted before it.
Legend: B rows, T positions, D the most tokens it drafts, H hidden size, K rows of the draft's head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from align.atomic import atomic_file, write_json
from align.sources import read_json
from eval.decoding.drafters.base import Proposal, Session, Texts, timed_choice
from eval.decoding.drafters.checkpoint import CheckpointDrafter, TokenSession
from eval.decoding.drafters.in_turn import SequentialHead
from eval.decoding.drafters.pruned import load_compact, pruned_drafter
from eval.decoding.forward import starts
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

NEW_TOKENS = 2  # that a pass reads before its masks, as it is timed: about a block's tokens
PARTS = "parallel.safetensors"


class Parts(NamedTuple):
    """What it has beyond a pruned draft: masks [D-1, H], and a sequential head."""

    masks: Tensor
    sequential: SequentialHead | None

    def save(self, folder: Path) -> None:
        """Into the folder of a pruned draft's compact form, which from then on is of this kind."""
        tensors = {"masks": self.masks.contiguous()}
        for name, tensor in (self.sequential._asdict() if self.sequential else {}).items():
            tensors[f"sequential.{name}"] = tensor.contiguous()
        with atomic_file(folder / PARTS, "wb") as file:
            save_file(tensors, file.name)
        about = read_json(folder / "compact.json") | {"drafter": "parallel"}
        write_json(folder / "compact.json", about)

    @classmethod
    def load(cls, folder: Path) -> Parts:
        tensors = load_file(folder / PARTS)
        masks = tensors.pop("masks")
        sequential = None
        if tensors:
            sequential = SequentialHead(tensors["sequential.read"], tensors["sequential.write"])
        return cls(masks, sequential)

    def like(self, weight: Tensor) -> Parts:
        """The same on a weight's device and in its dtype."""
        sequential = self.sequential
        if sequential is not None:
            sequential = SequentialHead(*(part.to(weight) for part in sequential))
        return Parts(self.masks.to(weight), sequential)


@dataclass(kw_only=True)
class ParallelDrafter(CheckpointDrafter):
    """Its decoder reads mask d as id V + d - 2, d from 2 to `depth`. depth: D."""

    alike: bool = False
    depth: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.bytes += sum(part.nbytes for part in self.sequential or ())

    def masks(self, count: int) -> list[int]:
        """The ids that stand for the second to the last of `count` tokens to be drafted."""
        first = len(self.decoder.embedding)
        return list(range(first, first + count - 1))

    def start(self, texts: Texts) -> Session:
        return ParallelSession(self, texts)

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """The choice of one token: its logits came with the pass."""
        rows = len(self.decoder.embedding) if self.token_ids is None else len(self.token_ids)
        logits = torch.zeros((1, rows), dtype=self.decoder.dtype, device=self.decoder.device)
        before = torch.zeros(1, dtype=torch.long, device=logits.device)

        return timed_choice(lambda: self.corrected(logits, before), sampling)

    def block(self, context_length: int) -> Callable[[], None]:
        decoder = self.decoder
        ids = [1] * NEW_TOKENS + self.masks(self.depth)
        tokens = torch.tensor([ids], device=decoder.device)
        cache = decoder.new_cache(1, context_length + len(ids))

        def run() -> None:
            decoder.forward(tokens, context_length, cache)[0, 0, 0].item()

        return run


class ParallelSession(TokenSession):
    """What a cache has `seen` of a text are no masks."""

    drafter: ParallelDrafter

    def __init__(self, drafter: ParallelDrafter, texts: Texts) -> None:
        super().__init__(drafter, texts)
        self.read_alone()

    def propose(self, count: int, stop_below: float) -> Proposal:
        drafter, device = self.drafter, self.drafter.decoder.device
        lengths = [len(text) for text in self.texts]
        count = min(count, drafter.depth, self.slots - max(lengths) + 1)
        if count < 1:
            return Proposal(torch.zeros((len(lengths), 0), dtype=torch.long, device=device))
        # All rows read as many tokens as the one with the most new ones, some a second time; a text
        # that has not so many reads on beyond its masks, where nothing looks.
        width = max(length - seen for length, seen in zip(lengths, self.seen, strict=True))
        masks = drafter.masks(count)
        rows = [text[-width:] + masks for text in self.texts]
        rows = [row + [0] * (width + len(masks) - len(row)) for row in rows]
        start = starts([max(0, length - width) for length in lengths])
        tokens = torch.tensor(rows, device=device)
        logits = drafter.decoder.forward(tokens, start, self.cache)
        newest = torch.tensor([min(length, width) - 1 for length in lengths], device=device)
        at = torch.arange(len(rows), device=device)
        self.seen = lengths
        return drafter.in_turn(
            lambda depth, _: logits[at, newest + depth],
            count,
            stop_below,
            self.sampling,
            self.generator,
        )


def parallel_drafter(
    model: PreTrainedModel, token_ids: Tensor | None, parts: Parts, target: Target
) -> ParallelDrafter:
    """A draft of that model and those parts, otherwise as `pruned_drafter`."""
    parts = parts.like(target.decoder.embedding)
    plain = pruned_drafter(model, token_ids, target, parts.masks)
    known = {field.name: getattr(plain, field.name) for field in fields(plain)}
    own = {"alike": False, "depth": len(parts.masks) + 1, "sequential": parts.sequential}
    return ParallelDrafter(**known | own)


def load(folder: Path, target: Target, strategy: str) -> ParallelDrafter:
    """The parallel draft in `folder`."""
    model, token_ids = load_compact(folder, target.decoder.embedding)
    return parallel_drafter(model, token_ids, Parts.load(folder), target)
