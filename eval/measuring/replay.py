"""Draft lengths compared by replay: what every length would have done, from one pass over texts.

At each place of texts that the target writes, the drafter drafts the longest length; noted are how
many tokens verification would accept, and how sure the draft was at each. Any other length, and any
stop, is computed from these and from measured step costs: no clock's noise decides between near
equals. Greedily exact, up to what is cut at a text's end; sampled, the shorter lengths are those of
token by token verification, which accepts no more than block verification does.

Legend: B rows, G drafted tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from tqdm import tqdm

from eval.decoding.drafters.drafter import Drafter, Texts
from eval.decoding.forward import starts
from eval.decoding.loop import Decoding, DraftLength, prefill
from eval.decoding.target import Target
from eval.decoding.verification import choose, verify
from eval.measuring.runs import StepCosts
from eval.prompts import PromptSet

NEVER = 1e-30  # as `stop_below`: the draft says how sure it is, and does not stop
ROWS = 8  # texts at once
TEXT_TOKENS = 64  # of an answer are enough to compare draft lengths
# a token in hand pays from about (draft + width) / target on
STOP_BELOW = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


class Place(NamedTuple):
    """A draft of the longest length, after one token of a text.

    certainty: how sure the draft was when it went on to each token [G]. accepted: how many of them.
    free: no step of a model was taken.
    """

    certainty: list[float]
    accepted: int
    free: bool


@torch.inference_mode()
def places(
    target: Target, drafter: Drafter, prompts: PromptSet, decoding: Decoding, gamma: int
) -> list[list[Place]]:
    """Of the target's own text on each prompt, TEXT_TOKENS at most, every place but the last."""
    decoding = dataclasses.replace(
        decoding, max_new_tokens=min(decoding.max_new_tokens, TEXT_TOKENS)
    )
    texts: list[list[Place]] = []
    for at in tqdm(range(0, len(prompts.ids), ROWS), desc="choose gamma", unit="batch"):
        texts += _places(target, drafter, prompts.ids[at : at + ROWS], decoding, gamma)
    return texts


def _places(
    target: Target, drafter: Drafter, ids: Sequence[list[int]], decoding: Decoding, gamma: int
) -> list[list[Place]]:
    decoder = target.decoder
    generator = torch.Generator(decoder.device).manual_seed(decoding.seed)
    slots = max(map(len, ids)) + decoding.max_new_tokens + gamma
    cache, first, read = prefill(decoder, ids, slots, drafter.layers, decoding.sampling, generator)
    texts = [[*row, *token] for row, token in zip(ids, first, strict=True)]
    session = drafter.start(Texts([*map(list, texts)], slots, decoding.sampling, generator, read))
    drafts: list[list[Place]] = [[] for _ in ids]
    rows = list(range(len(ids)))
    while True:
        going_on = [
            i
            for i, row in enumerate(rows)
            if texts[row][-1] not in decoding.stops
            and len(drafts[row]) < decoding.max_new_tokens - 1
        ]
        if not going_on:
            return drafts
        if len(going_on) < len(rows):
            rows = [rows[i] for i in going_on]
            cache = cache.keep_rows(torch.tensor(going_on, device=decoder.device))
            session.keep(going_on)
        proposal = session.propose(gamma, NEVER)
        newest = torch.tensor([texts[row][-1:] for row in rows], device=decoder.device)
        states = dict.fromkeys(drafter.layers)
        logits = decoder.forward(
            torch.cat([newest, proposal.tokens], dim=1),
            starts([len(texts[row]) - 1 for row in rows]),
            cache,
            states=states,
        )
        accepted, _ = verify(
            logits,
            proposal.tokens,
            proposal.q,
            proposal.counts,
            decoding.sampling,
            generator,
            "token",
        )
        # the text goes on by one token, whatever was accepted
        following = choose(logits[:, 0], decoding.sampling, generator).tolist()
        shape, sure = proposal.tokens.shape, proposal.certainty
        counts = [shape[1]] * len(rows) if proposal.counts is None else proposal.counts.tolist()
        sure = torch.ones(shape) if sure is None else sure
        for i, (row, right) in enumerate(zip(rows, accepted.tolist(), strict=True)):
            certainty = sure[i, : counts[i]].tolist()
            drafts[row].append(Place(certainty, right, i in proposal.free))
            texts[row].append(following[i])
        session.commit([[token] for token in following], [0] * len(rows), states)


def blocks(text: Sequence[Place], length: DraftLength) -> Iterator[tuple[Place, int, int]]:
    """The blocks of drafts of that length: where, tokens drafted, tokens emitted."""
    at = 0
    while at < len(text):
        place = text[at]
        drafted = 0
        for sure in place.certainty[: length.gamma]:
            if sure < length.stop_below and not place.free:
                break
            drafted += 1
        emitted = min(place.accepted, drafted) + 1
        yield place, drafted, emitted
        at += emitted


def spent(text: Sequence[Place], length: DraftLength, costs: StepCosts) -> tuple[float, int]:
    """Seconds that a text takes with drafts of that length, and its tokens."""
    seconds, tokens = 0.0, 0
    for place, drafted, emitted in blocks(text, length):
        seconds += 0.0 if place.free else float(costs.draft(drafted))
        seconds += float(costs.verify(drafted + 1.0))
        tokens += emitted
    return seconds, tokens


def best_length(texts: Sequence[Sequence[Place]], costs: StepCosts, max_gamma: int) -> DraftLength:
    """The draft length with the fewest seconds a token.

    Fixed lengths from 1 to max_gamma, each also with a stop at every one of STOP_BELOW.
    """
    lengths = [DraftLength(gamma) for gamma in range(1, max_gamma + 1)]
    lengths += [DraftLength(long.gamma, stop) for long in lengths[1:] for stop in STOP_BELOW]

    def seconds_per_token(length: DraftLength) -> float:
        each = [spent(text, length, costs) for text in texts]
        return sum(s for s, _ in each) / max(sum(tokens for _, tokens in each), 1)

    return min(lengths, key=seconds_per_token)
