"""The rows a draft is trained on, as a memory-mapped file, and the batches made of them.

Legend: P prompt tokens, R response tokens, C cached tokens at each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from datasets import Dataset, Features, List, Value
from datasets.arrow_writer import ArrowWriter
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from align.files import atomic_file
from align.vocab_map import Retokenizer
from distill.drafters.batch import WIDTH
from distill.losses import sharpen
from distill.teacher.store import CachedAnswer

TRAINING_SET = "training_set.arrow"
# Tokens that are written at once, and lie together in the file: reading one column of all rows
# brings a page or more of each such block into memory.
BLOCK = 2**17


def training_set(
    path: Path,
    answers: Iterable[CachedAnswer],
    head_rows: Tensor | None,
    teacher_temperature: float = 1.0,
    retokenizer: Retokenizer | None = None,
) -> Dataset:
    """The rows of `training_rows` at `path`, mapped: numpy arrays of int64 and float32 when read.

    The first process writes them, always anew, so that no file of other answers or another head is
    ever taken for theirs; the others wait and map the same file. Raises DiskFullError.
    """
    # what is cached is fp16 already, what was sharpened is not
    logprobs = "float16" if teacher_temperature == 1 else "float32"
    features = Features(
        {name: Value("int64") for name in ("index", "length")}
        | {name: List(Value("int32")) for name in ("input_ids", "positions", "top_ids")}
        | {"top_logprobs": List(Value(logprobs))}
    )
    state = PartialState()
    with state.main_process_first():
        # processes with a folder each (a dry run's) have a file each
        if state.is_main_process or not path.exists():
            with atomic_file(path, "wb") as file:
                writer = ArrowWriter(features=features, stream=file)
                tokens = 0
                for row in training_rows(answers, head_rows, teacher_temperature, retokenizer):
                    writer.write(row)
                    tokens += len(row["positions"])
                    if tokens >= BLOCK:
                        writer.write_examples_on_file()
                        tokens = 0
                writer.finalize(close_stream=False)
    return Dataset.from_file(str(path)).with_format("numpy")


def training_rows(
    answers: Iterable[CachedAnswer],
    head_rows: Tensor | None,
    teacher_temperature: float = 1.0,
    retokenizer: Retokenizer | None = None,
) -> Iterator[dict[str, Any]]:
    """One row an answer: input_ids [P + R], the positions [R] that predict, cached tokens [R * C].

    head_rows: for each target id its row in the draft's head [V], -1 where it has none; None when
    they are equal. teacher_temperature: below 1 it sharpens p (losses.sharpen). retokenizer: how a
    draft with ids of its own reads the text; the end of what it read of a token is where it
    predicts the next. Nested lists would read ten times slower than the flat columns.
    """
    for answer in answers:
        logprobs = answer.top_logprobs
        if teacher_temperature != 1:
            logprobs = sharpen(logprobs, teacher_temperature)
        ids = answer.top_ids if head_rows is None else head_rows[answer.top_ids]
        prompt, response = answer.prompt_ids.tolist(), answer.response_ids.tolist()
        pieces = [prompt, *([i] for i in response)]
        if retokenizer is not None:
            pieces = [
                retokenizer.from_start(prompt),
                *(retokenizer.of_token(i) for i in response),
            ]
        ends = itertools.accumulate(map(len, pieces[:-1]))
        input_ids = [i for piece in pieces for i in piece]
        yield {
            "index": answer.index,
            "length": len(input_ids),
            "input_ids": input_ids,
            # the logits that predict token t stand at position t - 1
            "positions": [end - 1 for end in ends],
            "top_ids": ids.flatten().numpy(),
            "top_logprobs": logprobs.flatten().numpy(),
        }


def _padded(rows: list[Tensor], value: int = 0) -> Tensor:
    """Rows [T', …] as one tensor [B, T, …], `value` behind them, T a multiple of WIDTH."""
    whole = pad_sequence(rows, True, value)
    return F.pad(whole, (0, 0) * (whole.dim() - 2) + (0, -whole.shape[1] % WIDTH), value=value)


class DistillationCollator:
    """Right-padded batches; each response token with the target's distribution there.

    Without an attention mask: no token looks at what follows it, which the padding does.

    states: of the answer of each index the target's hidden states [P + R - 1, L, H], for a draft
    that reads them.
    """

    def __init__(self, pad_token_id: int, states: Mapping[int, Tensor] | None = None) -> None:
        self.pad_token_id, self.states = pad_token_id, states

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        input_ids = _padded(ids, self.pad_token_id)
        predicting = [torch.tensor(row["positions"]) for row in rows]
        # only counted by the trainer, which leaves the first of each row out
        labels = [F.pad(torch.ones_like(at), (1, 0), value=-100) for at in predicting]
        width, cached = input_ids.shape[1], len(rows[0]["top_ids"]) // len(predicting[0])

        def flat(column: str) -> Tensor:
            return torch.cat([torch.tensor(row[column]) for row in rows]).view(-1, cached)

        batch = {
            "input_ids": input_ids,
            "labels": _padded(labels, -100),
            "positions": torch.cat([b * width + at for b, at in enumerate(predicting)]),
            "top_ids": flat("top_ids"),
            "top_logprobs": flat("top_logprobs"),
            "index": torch.tensor([row["index"] for row in rows]),
        }
        if self.states is not None:
            states = [self.states[row["index"]] for row in rows]
            # the last token is only predicted: its state is not read
            batch["states"] = _padded([F.pad(s, (0, 0, 0, 0, 0, 1)) for s in states])
        return batch
