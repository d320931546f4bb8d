"""Batches of made-up texts."""

import torch

from distill.drafters.batch import MULTIPLE, TrainingBatch


def batch_of(texts, prompts, states=None, seeds=None, packed=True, top=3):
    """texts: their token ids. prompts: tokens of each prompt. states: of each text [T, L, H].

    Packed texts are in one row; else each has its own.
    """
    longest = sum(map(len, texts)) if packed else max(map(len, texts))
    width, rows = -(-longest // MULTIPLE) * MULTIPLE, 1 if packed else len(texts)
    ids, numbers = torch.zeros(2, rows * width, dtype=torch.long)
    of_text = torch.full((rows * width,), -1)
    read = None if states is None else torch.zeros(rows * width, *states[0].shape[1:])
    positions, start = [], 0
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        start = start if packed else number * width
        place = slice(start, start + len(text))
        ids[place], of_text[place] = torch.tensor(text), number
        numbers[place] = torch.arange(len(text))
        if read is not None:
            read[start : start + len(states[number])] = states[number]
        positions += range(start + prompt - 1, start + len(text) - 1)
        start += len(text)
    torch.manual_seed(3)
    tops = torch.zeros((len(positions), top), dtype=torch.long)
    return TrainingBatch(
        *(field.view(rows, width) for field in (ids, of_text, numbers)),
        torch.tensor(positions),
        tops,
        torch.full(tops.shape, -1.5),
        None if read is None else read.unflatten(0, (rows, width)),
        torch.arange(len(texts)) + 7 if seeds is None else torch.tensor(seeds),
        packed=packed,
    )


def planned(batch, kind, model, training=True):
    return batch._replace(plan=kind.plan(model, batch, training))
