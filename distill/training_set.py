"""The outputs that a draft is trained on, as batches.

A batch reads its outputs from the cache when it is made, so that only one batch is in memory.

Legend: B outputs, T tokens of the longest, P prompt tokens, R response tokens, N response tokens of
all outputs of a batch, C cached tokens at each, V the target's vocabulary, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from distill.drafters.batch import WIDTH
from distill.teacher.states import States
from distill.teacher.store import CachedAnswer


def answer_rows(answers: Iterable[CachedAnswer], first: int = 0) -> Dataset:
    """One row per output: index, number of tokens, and number of response tokens.

    first: the index of the first output.
    """
    sizes = [(len(a.prompt_ids), len(a.response_ids)) for a in answers]
    return Dataset.from_dict(
        {
            "index": list(range(first, first + len(sizes))),
            "length": [prompt + response for prompt, response in sizes],
            "tokens": [response for _, response in sizes],
        }
    )


def _padded(rows: list[Tensor], value: int = 0) -> Tensor:
    """Rows [T', …] in one tensor [B, T, …], padded by `value`; T is a multiple of WIDTH."""
    whole = pad_sequence(rows, True, value)
    return F.pad(whole, (0, 0) * (whole.dim() - 2) + (0, -whole.shape[1] % WIDTH), value=value)


@dataclass
class DistillationCollator:
    """Right-padded batches; each response token with the target's distribution there.

    There is no attention mask, because attention is causal and the padding follows the text. It is
    token 0, because a tokenizer's padding token may have no entry in the embedding.
    read: the output of an index. head_entries: for each target id its entry in the draft's head
    [V], or -1; None if entries and ids are equal. states: for a draft that reads them.
    """

    read: Callable[[int], CachedAnswer]
    head_entries: Tensor | None = None
    states: States | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """rows: of `answer_rows`. Returns `input_ids` [B, T], `labels` [B, longest R + 1, padded],
        `positions` [N], `top_ids`, `top_logprobs` [N, C], `index` [B], `states` [B, T, L, H].
        """
        answers = [self.read(row["index"]) for row in rows]
        input_ids = _padded([answer.text for answer in answers])
        # the logits at a position predict the next token
        predicting = [
            len(answer.prompt_ids) - 1 + torch.arange(len(answer.response_ids))
            for answer in answers
        ]
        # the trainer only counts them; it skips the first of each row
        labels = [F.pad(torch.ones_like(p), (1, 0), value=-100) for p in predicting]
        width = input_ids.shape[1]
        top_ids = torch.cat([answer.top_ids for answer in answers])
        batch = {
            "input_ids": input_ids,
            "labels": _padded(labels, -100),
            "positions": torch.cat([b * width + p for b, p in enumerate(predicting)]),
            "top_ids": top_ids if self.head_entries is None else self.head_entries[top_ids],
            "top_logprobs": torch.cat([answer.top_logprobs for answer in answers]).float(),
            "index": torch.tensor([row["index"] for row in rows]),
        }
        if self.states is not None:
            states = [self.states(answer) for answer in answers]
            # the state of the last token is not read: zeros
            batch["states"] = _padded([F.pad(s, (0, 0, 0, 0, 0, 1)) for s in states])
        return batch
