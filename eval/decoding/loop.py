"""The decoding loop: draft, verify, emit, for one prompt or many; without a drafter, the baseline.

The output is the target's own: identical tokens when greedy, the same distribution when sampling
(arXiv 2211.17192, 2302.01318; the rules are in verification.py). The rows of a batch share every
forward; how many drafted tokens are accepted, and with that each row's place in the caches, is the
row's own. Legend: B rows, G drafted tokens, V the target's vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eval.decoding.drafters.drafter import Drafter, Proposal, Texts
from eval.decoding.forward import Decoder, HiddenStates, KVCache, in_pieces, starts
from eval.decoding.verification import Rule, Sampling, choose, verify
from eval.measuring.runs import PromptRun
from eval.prompts import Prompt


@dataclass(frozen=True)
class DraftLength:
    """How many tokens a block drafts: at most gamma, and no more once the draft doubts them.

    stop_below: another token is drafted only while the product of the draft's probabilities of the
    tokens drafted so far is at least this; 0 drafts gamma tokens every time. Whatever was drafted
    is verified: the decision depends on the past alone, so the output stays the target's.
    """

    gamma: int
    stop_below: float = 0.0

    def __str__(self) -> str:
        return f"{self.gamma}" + (f", stop below {self.stop_below:g}" if self.stop_below else "")


@dataclass(frozen=True)
class Decoding:
    """How text is decoded: the deployed sampling, the stop tokens, the longest answer, the seed.

    rule: how drafts are verified where tokens are sampled.
    """

    sampling: Sampling
    stops: frozenset[int]
    max_new_tokens: int
    seed: int = 0
    rule: Rule = "block"

    @property
    def verification(self) -> str:
        """The name of the rule in a report."""
        if self.sampling.greedy:
            return "greedy match"
        return "block verification" if self.rule == "block" else "rejection sampling"


def seed_of(run_seed: int, *prompt_ids: str) -> int:
    """The seed of a prompt's (or a batch's) random numbers, so that prompts are independent."""
    text = "\0".join([str(run_seed), *prompt_ids])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def decode(
    target: Decoder,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    decoding: Decoding,
    length: DraftLength,
) -> list[PromptRun]:
    """The answers to all prompts, decoded as one batch: one run a prompt, in their order.

    drafter: None for the target alone (length is not used then). A row that ends leaves the batch;
    none takes its place. The contexts of target and draft must hold the longest prompt,
    max_new_tokens and gamma. A row's seconds are those of the batch while the row was in it, so the
    batch took as long as its last row. Each row is exact: at temperature 0 it has the target's own
    tokens (but for near-ties in bf16), above 0 the target's distribution, since no two rows share a
    random number.
    """
    gamma = 0 if drafter is None else length.gamma
    layers = () if drafter is None else drafter.layers
    device = target.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed_of(decoding.seed, *(prompt.id for prompt in prompts)))
    slots = max(map(len, ids)) + decoding.max_new_tokens + gamma

    # 1. Prefill the target; its last logits give the first token, which no draft had a part in.
    clock = time.perf_counter()
    cache, first, read = prefill(target, ids, slots, layers, decoding.sampling, generator)
    now = time.perf_counter()
    runs = [
        PromptRun.of(prompt, len(row), [now - clock], [tokens])
        for prompt, row, tokens in zip(prompts, ids, first, strict=True)
    ]

    # 2. The drafter takes in the texts so far.
    session = None
    if drafter is not None:
        texts = [[*row, *tokens] for row, tokens in zip(ids, first, strict=True)]
        session = drafter.start(Texts(texts, slots, decoding.sampling, generator, read))

    active = runs  # those that have not ended
    while True:
        # 3. Rows that have ended leave, and the caches close up.
        going_on = [i for i, run in enumerate(active) if not _ended(run, decoding)]
        if not going_on:
            return runs
        if len(going_on) < len(active):
            active = [active[i] for i in going_on]
            cache = cache.keep_rows(torch.tensor(going_on, device=device))
            if session is not None:
                session.keep(going_on)

        # 4. Draft as many tokens as any row still has room for. The last wanted token comes from
        # the target itself, so one less is drafted.
        clock = now
        room = [decoding.max_new_tokens - len(run.tokens) - 1 for run in active]
        proposal = Proposal(torch.zeros((len(active), 0), dtype=torch.long, device=device))
        if session is not None:
            proposal = session.propose(min(gamma, max(room)), length.stop_below)

        # 5. Verify every row's last token and draft in one target call.
        newest = torch.tensor([run.tokens[-1:] for run in active], device=device)
        block = torch.cat([newest, proposal.tokens], dim=1)
        start = starts([run.prompt_tokens + len(run.tokens) - 1 for run in active])
        states = dict.fromkeys(layers)
        logits = target.forward(block, start, cache, states=states)
        n_accepted, following = verify(
            logits,
            proposal.tokens,
            proposal.q,
            proposal.counts,
            decoding.sampling,
            generator,
            decoding.rule,
        )

        # 6. One transfer a block: for each row its draft, how many of it are accepted, and the
        # target's next token.
        packed = torch.cat([proposal.tokens, n_accepted[:, None], following[:, None]], 1).tolist()
        counts = None if proposal.counts is None else proposal.counts.tolist()
        now = time.perf_counter()
        emitted = [
            _emit(run, row, counts[i] if counts else len(row) - 2, own_room, gamma, decoding.stops)
            for i, (run, row, own_room) in enumerate(zip(active, packed, room, strict=True))
        ]
        for i, run in enumerate(active):
            run.block_seconds.append(now - clock)
            run.free.append(run.drafted[-1] if i in proposal.free else 0)
        if session is not None:
            session.commit(emitted, [row[-2] for row in packed], states)


def prefill(
    target: Decoder,
    ids: Sequence[list[int]],
    slots: int,
    layers: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[KVCache, list[list[int]], list[HiddenStates]]:
    """The prompts in a cache, a first token for each [B][1], and the states of `layers` at each.

    Row by row, which wastes nothing on prompts of different lengths.
    """
    cache = target.new_cache(len(ids), slots)
    states: list[HiddenStates] = [dict.fromkeys(layers) for _ in ids]
    last = []
    for i, row in enumerate(ids):
        tokens = torch.tensor([row], device=target.device)
        *_, logits = in_pieces(target, tokens, 0, cache.row(i), states=states[i])
        last.append(logits)
    return cache, choose(torch.cat(last), sampling, generator).tolist(), states


def _emit(
    run: PromptRun, row: list[int], drafted: int, room: int, gamma: int, stops: frozenset[int]
) -> list[int]:
    """Put one block into the log of a row, and return the tokens it emits.

    row: the tokens proposed, how many were accepted, the target's next one. room: how many drafted
    tokens were still wanted.
    """
    *draft, accepted, following = row
    emitted = [*draft[:accepted], following][: room + 1]
    # The last block is left out of tau wherever a block that starts here could be cut by the
    # length limit, even if this one was not: else tau would rest on the shorter blocks.
    run.last_truncated = room < gamma and room <= drafted
    end = next((i for i, token in enumerate(emitted) if token in stops), None)
    if end is not None:
        emitted = emitted[: end + 1]
        if end < accepted:  # the text, and with it the draft, ends at a token that was drafted
            drafted = accepted = end + 1
    run.tokens.extend(emitted)
    run.block_tokens.append(len(emitted))
    run.drafted.append(drafted)
    run.accepted.append(accepted)
    return emitted


def _ended(run: PromptRun, decoding: Decoding) -> bool:
    return run.tokens[-1] in decoding.stops or len(run.tokens) == decoding.max_new_tokens
