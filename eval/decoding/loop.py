"""The decoding loop for one text: draft, verify, emit; without a drafter, the baseline.

The output is the target's own: identical tokens when greedy, the same distribution when sampling
(arXiv 2211.17192, 2302.01318; the rules are in verification.py). Legend: G drafted tokens, V the
target's vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import torch

from eval.decoding.drafters.drafter import Drafter, Text, no_draft
from eval.decoding.forward import Decoder, HiddenStates, in_pieces
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Rule, Sampling, choose, verify
from eval.prompts import Prompt


@dataclass(frozen=True)
class Decoding:
    """How text is decoded: the deployed sampling, the stop tokens, the longest output, the seed.

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


def seed_of(run_seed: int, prompt_id: str) -> int:
    """The seed of a prompt's random numbers, so that prompts are independent."""
    text = f"{run_seed}\0{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def decode(
    target: Decoder,
    drafter: Drafter | None,
    prompt: Prompt,
    ids: list[int],
    decoding: Decoding,
    draft_length: int = 0,
) -> PromptRun:
    """The output for the prompt of these token ids, and what each speculation step took.

    drafter: None for the target alone. draft_length: tokens that a step drafts at most. The
    contexts of target and draft must hold the prompt, max_new_tokens and draft_length.
    """
    layers = () if drafter is None else drafter.layers
    device = target.device
    generator = torch.Generator(device=device)
    generator.manual_seed(seed_of(decoding.seed, prompt.id))
    slots = len(ids) + decoding.max_new_tokens + draft_length

    # 1. Prefill the target. The first token comes from its last logits, without a draft.
    clock = time.perf_counter()
    cache = target.new_cache(1, slots)
    states: HiddenStates = dict.fromkeys(layers)
    prompt_tokens = torch.tensor([ids], device=device)
    *_, logits = in_pieces(target, prompt_tokens, 0, cache, states=states)
    (first,) = choose(logits[:, -1], decoding.sampling, generator).tolist()
    now = time.perf_counter()
    run = PromptRun.of(prompt, len(ids), [now - clock], [[first]])

    # 2. The drafter takes in the text so far.
    session = None
    if drafter is not None:
        text = Text([*ids, first], slots, decoding.sampling, generator, states)
        session = drafter.start(text)

    while run.tokens[-1] not in decoding.stops and len(run.tokens) < decoding.max_new_tokens:
        # 3. Draft. The last wanted token comes from the target itself, so one less is drafted.
        clock = now
        room = decoding.max_new_tokens - len(run.tokens) - 1
        proposal = no_draft(device)
        if session is not None:
            proposal = session.propose(min(draft_length, room))

        # 4. Verify the newest token and the draft in one target call.
        newest = torch.tensor(run.tokens[-1:], device=device)
        start = len(ids) + len(run.tokens) - 1
        states = dict.fromkeys(layers)
        read = torch.cat([newest, proposal.tokens])[None]
        logits = target.forward(read, start, cache, states=states)[0]
        n_accepted, following = verify(
            logits, proposal.tokens, proposal.q, decoding.sampling, generator, decoding.rule
        )

        # 5. One transfer from the device: the draft, how many tokens of it are accepted, and the
        # target's next token.
        packed = torch.cat([proposal.tokens, n_accepted[None], following[None]])
        *draft, accepted, next_token = packed.tolist()
        now = time.perf_counter()
        emitted = _emit(run, draft, accepted, next_token, room, draft_length, decoding.stops)
        run.block_seconds.append(now - clock)
        run.free.append(run.drafted[-1] if proposal.free else 0)
        if session is not None:
            session.commit(emitted, accepted, states)
    return run


def _emit(
    run: PromptRun,
    draft: list[int],
    accepted: int,
    next_token: int,
    room: int,
    draft_length: int,
    stops: frozenset[int],
) -> list[int]:
    """Put a speculation step into the log, and return the tokens it emits.

    next_token: the target's own after the accepted ones. room: how many drafted tokens were wanted.
    """
    drafted = len(draft)
    emitted = [*draft[:accepted], next_token]
    # The last step is left out of the mean acceptance length wherever the length limit could cut a
    # step that starts here, even if this step is whole. Otherwise only the long steps would be
    # missing, and the mean would be too small.
    run.last_truncated = room < draft_length and room <= drafted
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
