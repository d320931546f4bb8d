"""The outputs that a draft is trained on: the steps of an epoch, and their batches.

A step has about `tokens_per_step` tokens. The steps depend on the seed and the epoch alone. Each
step is divided into parts, one for each pass of each process, and a part is one batch.

Legend: B rows, T tokens of a row, L layers of the target, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from distill.drafters.batch import MULTIPLE, Plan, TrainingBatch, text_starts
from distill.losses import sharpen
from distill.teacher.store import Answers, Store, name_of

LOOKED_AT = 32  # texts of which one may fill a step, so that the order stays nearly random
SEEDS_A_STEP = 2**31 - 1  # more than there are outputs, so that no two steps share a seed


class Part(NamedTuple):
    """A part of the training step with the number `step`, in this epoch.

    texts: indices of outputs. after: the epoch of the next step, and its number there. outputs,
    tokens: the outputs and the number of response tokens of the whole step. weight: 0 for a part
    that repeats another's text, because the step has too few; else 1.
    """

    texts: list[int]
    step: int
    epoch: int
    after: tuple[int, int]
    outputs: list[int]
    tokens: int
    weight: float


def packed_steps(
    sizes: Sequence[int], tokens: int, order: Sequence[int], packed: bool = True
) -> list[list[int]]:
    """The texts of each step, up to `tokens` each; a longer text is a step of its own.

    sizes: tokens of each text. order: indices of texts. A step takes the next text that fits.
    packed: False: each text has a row, whose padding counts.
    """
    waiting, steps = list(reversed(order)), list[list[int]]()
    while waiting:
        step, place = [waiting.pop()], 1
        total = widest = sizes[step[0]]
        while place <= min(LOOKED_AT, len(waiting)):
            size = sizes[waiting[-place]]
            if total + size <= tokens and (packed or (len(step) + 1) * max(widest, size) <= tokens):
                step.append(waiting.pop(-place))
                total, widest = total + size, max(widest, size)
            else:
                place += 1
        steps.append(step)
    return steps


def divided(texts: Sequence[int], sizes: Sequence[int], parts: int) -> list[list[int]]:
    """The texts in parts of nearly equal tokens: the longest text first, to the smallest part."""
    shares, totals = [list[int]() for _ in range(parts)], [0] * parts
    for text in sorted(texts, key=lambda text: -sizes[text]):
        smallest = totals.index(min(totals))
        shares[smallest].append(text)
        totals[smallest] += sizes[text]
    return shares


@dataclass
class TrainingSet:
    """Outputs of the cache, as parts and batches of one process.

    head_entries: for each target id its entry in the draft's head [V], or -1; None if entries and
    ids are equal. states: the target's states, for a draft that reads them; None if they are not
    stored. plan: makes a batch's plan. packed: whether a row may have several texts. passes: parts
    of a step in each process. temperature: see `sharpen`. first: the index of the first output,
    from which its seeds come.
    """

    answers: Answers
    head_entries: Tensor | None
    states: Store | None
    plan: Callable[[TrainingBatch], Plan | None]
    packed: bool
    tokens_per_step: int
    seed: int
    passes: int = 1
    processes: int = 1
    rank: int = 0
    temperature: float = 1.0
    first: int = 0

    def __post_init__(self) -> None:
        self.sizes = [self.answers.tokens(number) for number in range(len(self.answers))]
        self.responses = self.answers.response_lengths

    def steps(self, epoch: int) -> list[list[int]]:
        """The texts of each step of an epoch."""
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * epoch)
        order = torch.randperm(len(self.sizes), generator=generator).tolist()
        return packed_steps(self.sizes, self.tokens_per_step, order, self.packed)

    def parts(self, step: int = 0, epoch: int = 0, number: int = 0) -> Iterator[Part]:
        """This process's parts, without end, from the step of this number in the epoch."""
        parts = self.processes * self.passes
        while True:
            steps = self.steps(epoch)
            for texts in steps[number:]:
                number += 1
                after = (epoch, number) if number < len(steps) else (epoch + 1, 0)
                tokens = sum(self.responses[text] for text in texts)
                shares = divided(texts, self.sizes, parts)[self.rank * self.passes :]
                for share in shares[: self.passes]:
                    weight = float(len(share) > 0)
                    yield Part(share or texts[-1:], step, epoch, after, texts, tokens, weight)
                step += 1
            epoch, number = epoch + 1, 0

    def batch(self, part: Part, buffer: list[Tensor], pinned: bool = False) -> TrainingBatch:
        """The batch of a part, on the CPU. Its padding is token 0, because a tokenizer's padding
        token may have no entry in the embedding.

        buffer: keeps the memory of `states` for later batches. pinned: for a copy to a GPU.
        """
        answers = [self.answers[text] for text in part.texts]
        sizes = [len(answer.text) for answer in answers]
        if self.packed:
            share = -(-self.tokens_per_step // (self.processes * self.passes))
            rows, width = 1, max(share, sum(sizes))
        else:
            rows, width = len(sizes), max(sizes)
        width += -width % MULTIPLE
        starts = text_starts(sizes, width, self.packed)
        input_ids, position_ids = torch.zeros(2, rows * width, dtype=torch.long)
        texts = torch.full_like(input_ids, -1)
        positions = []
        for text, (answer, start) in enumerate(zip(answers, starts, strict=True)):
            place = slice(start, start + sizes[text])
            input_ids[place], texts[place] = answer.text, text
            position_ids[place] = torch.arange(sizes[text])
            # the logits at a position predict the next token
            positions.append(torch.arange(start + len(answer.prompt_ids), place.stop) - 1)
        top_ids = torch.cat([answer.top_ids for answer in answers])
        logprobs = torch.cat([answer.top_logprobs for answer in answers]).float()
        if self.temperature != 1:
            logprobs = sharpen(logprobs, self.temperature)
        states = None
        if self.states is not None:
            names = [name_of(answer.text) for answer in answers]
            states = self._states(self.states, names, starts, rows * width, buffer, pinned)
        batch = TrainingBatch(
            input_ids.view(rows, width),
            texts.view(rows, width),
            position_ids.view(rows, width),
            torch.cat(positions),
            top_ids if self.head_entries is None else self.head_entries[top_ids],
            logprobs.view(torch.int32),  # because FSDP rounds every float if the weights are bf16
            None if states is None else states.unflatten(0, (rows, width)),
            torch.tensor(part.texts) + self.first + SEEDS_A_STEP * part.step,
            packed=self.packed,
        )
        return batch._replace(plan=self.plan(batch))

    @staticmethod
    def _states(
        store: Store,
        names: list[str],
        starts: list[int],
        tokens: int,
        buffer: list[Tensor],
        pinned: bool,
    ) -> Tensor:
        """The states of the texts that start there, read into the buffer; else 0 [B * T, L, H]."""
        shape = store.shape(names[0], "states")[1:]
        if not buffer or len(buffer[0]) < tokens:
            buffer[:] = [torch.empty(tokens, *shape, dtype=torch.bfloat16, pin_memory=pinned)]
        flat, end = buffer[0][:tokens], 0
        for name, start in zip(names, starts, strict=True):
            flat[end:start].zero_()
            end = start + store.length(name, "states")
            store.read_into(name, "states", flat[start:end])
        flat[end:].zero_()
        return flat
