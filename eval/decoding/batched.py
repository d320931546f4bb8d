"""Many prompts decoded together, with a draft or without; each row accepts as many as stand.

The rows of a batch share every forward, and so the number of tokens that a block drafts. How many
of them are accepted, and with that each row's place in the caches, is the row's own. Legend: B
rows, G drafted tokens, V the target's vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from eval.decoding.drafting import Draft, Proposal, StringDraft, draw, likelihood
from eval.decoding.forward import Decoder
from eval.decoding.loop import Decoding, DraftLength, choose, cut, empty_run, verify
from eval.decoding.verification import Sampling
from eval.measuring.metrics import PromptRun
from eval.prompts import Prompt


def decode_batch(
    target: Decoder,
    draft: Draft | StringDraft | None,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    how: Decoding,
    length: DraftLength,
) -> list[PromptRun]:
    """The answers to all prompts, decoded as one batch: one run a prompt, in their order.

    draft: None for the target alone, the baseline of the same batch (length has no part then). A
    row that ends leaves the batch; none takes its place. The contexts of target and draft must hold
    the longest prompt, max_new_tokens and gamma. A row's seconds are those of the batch while the
    row was in it, so the batch took as long as its last row. Exact row by row: greedily each row
    has the target's own tokens (but for near-ties in bf16), sampled its distribution, since no two
    rows share a random number. Raises ValueError for a draft with a vocabulary of its own.
    """
    if draft is not None:
        draft = shared_vocabulary(draft)
    gamma = 0 if draft is None else length.gamma
    device = target.device
    generator = torch.Generator(device=device).manual_seed(how.seed)
    slots = max(map(len, ids)) + how.max_new_tokens + gamma

    # 1. Prefill the target row by row, which wastes nothing on prompts of different lengths.
    clock = time.perf_counter()
    cache = target.new_cache(len(ids), slots)
    last = [
        target.forward(torch.tensor([row], device=device), 0, cache.row(i), last_only=True)
        for i, row in enumerate(ids)
    ]
    first = choose(torch.cat(last), how.sampling, generator).tolist()
    now = time.perf_counter()
    runs = [
        empty_run(prompt, row, tokens, now - clock)
        for prompt, row, tokens in zip(prompts, ids, first, strict=True)
    ]

    # 2. So does the draft.
    rows = runs
    session: BatchSession | None = None
    if draft is not None:
        texts = [[*row, *tokens] for row, tokens in zip(ids, first, strict=True)]
        vocab_size = last[0].shape[-1]
        session = BatchSession(draft, texts, slots, vocab_size, how.sampling, generator)

    while True:
        # 3. Rows that have ended leave, and the caches close up.
        left = [i for i, run in enumerate(rows) if not _ended(run, how)]
        if not left:
            return runs
        if len(left) < len(rows):
            rows = [rows[i] for i in left]
            cache = cache.keep_rows(torch.tensor(left, device=device))
            if session is not None:
                session.keep(left)

        # 4. Draft as many tokens as any row still has room for.
        clock = now
        room = [how.max_new_tokens - len(run.tokens) - 1 for run in rows]
        proposal = Proposal(torch.zeros((len(rows), 0), dtype=torch.long, device=device), None)
        if session is not None:
            proposal = session.propose(min(gamma, max(room)), length.stop_below)

        # 5. Verify every row's last token and draft in one target call.
        newest = torch.tensor([run.tokens[-1:] for run in rows], device=device)
        block = torch.cat([newest, proposal.tokens], dim=1)
        start = starts([run.prompt_tokens + len(run.tokens) - 1 for run in rows])
        logits = target.forward(block, start, cache)
        accepted, following = verify(logits, proposal, how.sampling, generator)

        # 6. One transfer a block: of each row the draft, how many stand, the target's next token.
        results = torch.cat([proposal.tokens, accepted[:, None], following[:, None]], 1).tolist()
        now = time.perf_counter()
        texts = []
        for run, own_room, (*drafted, n, correction) in zip(rows, room, results, strict=True):
            emitted, truncated = cut([*drafted[:n], correction], own_room + 1, how.stops)
            run.tokens.extend(emitted)
            run.block_seconds.append(now - clock)
            run.block_tokens.append(len(emitted))
            run.drafted.append(len(drafted))
            run.accepted.append(n)
            # whether this one was cut hangs on what it accepted: if its like can be, it is out
            run.last_truncated = truncated or (own_room < gamma and own_room <= len(drafted))
            texts.append(emitted)
        if session is not None:
            session.extend(texts, accepted=[row[-2] for row in results])


def shared_vocabulary(draft: Draft | StringDraft) -> Draft:
    """The draft, if it speaks the target's ids; raises ValueError otherwise."""
    if isinstance(draft, StringDraft) or draft.reader is not None:
        raise ValueError(
            "A draft with a vocabulary of its own drafts for one text at a time, not for batches; "
            "move it to the target's vocabulary (--strategy transplant) or decode without batches."
        )
    return draft


def _ended(run: PromptRun, how: Decoding) -> bool:
    return run.tokens[-1] in how.stops or len(run.tokens) == how.max_new_tokens


def starts(positions: list[int]) -> int | Tensor:
    """`start` of Decoder.forward for rows at these positions.

    One row alone steps just as in eval/decoding/loop.py.
    """
    return positions[0] if len(positions) == 1 else torch.tensor(positions)


class BatchSession:
    """A draft at work on the texts of a batch: `texts` in ids, `seen` how much of each it has fed.

    Rows draft equally many tokens.
    """

    def __init__(
        self,
        draft: Draft,
        texts: list[list[int]],
        slots: int,
        vocab_size: int,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> None:
        self.draft, self.vocab_size = draft, vocab_size
        self.sampling, self.generator = sampling, generator
        self.texts, self.seen = texts, [len(text) - 1 for text in texts]
        decoder = draft.decoder
        self.cache = decoder.new_cache(len(texts), slots)
        for row, text in enumerate(texts):
            head = torch.tensor([text[:-1]], device=decoder.device)
            decoder.forward(head, 0, self.cache.row(row), last_only=True)

    def propose(self, count: int, stop_below: float) -> Proposal:
        """At most `count` tokens a row, fewer once the rows' mean confidence is too low.

        What one token more costs, it costs all rows; what it brings is the mean of the chances that
        it is reached (`DraftLength.stop_below` for one row).
        """
        draft, device = self.draft, self.draft.decoder.device
        # what is new to a row is one token, or two after a full acceptance; all read as many
        width = max(len(text) - seen for text, seen in zip(self.texts, self.seen, strict=True))
        step = torch.tensor([text[-width:] for text in self.texts], device=device)
        start = starts([len(text) - width for text in self.texts])
        confidence = torch.ones(len(self.texts), device=device)
        drafted: list[Tensor] = []
        q: list[Tensor] = []
        while len(drafted) < count and not (stop_below and float(confidence.mean()) < stop_below):
            logits = draft.decoder.forward(step, start, self.cache, last_only=True)[:, -1]
            logits = draft.cut(logits)
            chosen, drawn_from = draw(logits, self.sampling, self.generator)
            if drawn_from is not None:
                q.append(drawn_from)
            if stop_below:
                confidence = confidence * likelihood(chosen, logits, drawn_from)
            drafted.append(draft.to_target_ids(chosen)[:, None])
            start = start + step.shape[1]
            step = drafted[-1]
        tokens = torch.cat(drafted, dim=1) if drafted else step[:, :0]
        self.seen = [len(text) + len(drafted) - 1 for text in self.texts]
        if not q:
            return Proposal(tokens, None)
        return Proposal(tokens, draft.over_target_ids(torch.stack(q, dim=1), self.vocab_size))

    def extend(self, emitted: list[list[int]], accepted: list[int]) -> None:
        """Each text goes on by its `emitted` ids, the first `accepted` of them as proposed."""
        for row, (text, new, n) in enumerate(zip(self.texts, emitted, accepted, strict=True)):
            # what it fed itself beyond the accepted tokens is stale and will be overwritten
            self.seen[row] = min(self.seen[row], len(text) + n)
            text += new

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, in this order."""
        self.texts = [self.texts[row] for row in rows]
        self.seen = [self.seen[row] for row in rows]
        self.cache = self.cache.keep_rows(torch.tensor(rows, device=self.draft.decoder.device))
