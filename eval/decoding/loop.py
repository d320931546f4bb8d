"""The decoding loop for one text: draft, verify, emit. Without a drafter it is the baseline.

Drafts do not change the target's output: the same tokens when greedy (except at near-ties, if bits
differ), the same distribution when sampling (arXiv 2211.17192, 2302.01318; see verification.py).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from eval.decoding.drafters.drafter import Drafter, Text, no_draft
from eval.decoding.forward import Decoder, HiddenStates, in_pieces
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Rule, SampleMethod, Sampling, choose, verify
from eval.prompts import Prompt


@dataclass(frozen=True)
class Decoding:
    """How text is decoded.

    rule, draft_sample_method: how drafted tokens are verified and proposed if tokens are sampled.
    draft_sample_method None: a server does not report it. ignore_eos: servers write max_new_tokens,
    whatever `stops` has.
    """

    sampling: Sampling
    stops: frozenset[int]
    max_new_tokens: int
    seed: int = 0
    rule: Rule = "block"
    draft_sample_method: SampleMethod | None = "probabilistic"
    ignore_eos: bool = False

    @property
    def draft_sampling(self) -> Sampling:
        """The sampling with which a draft proposes."""
        return Sampling() if self.draft_sample_method == "greedy" else self.sampling

    @property
    def verification(self) -> str:
        """The report's name of the verification rule."""
        if self.sampling.greedy:
            return "greedy match"
        return "block verification" if self.rule == "block" else "rejection sampling"


def seed_of(run_seed: int, prompt_id: str) -> int:
    """The seed, below 2**56, of a prompt's random numbers; other prompts do not change it."""
    text = f"{run_seed}\0{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def decode(
    target: Decoder,
    drafter: Drafter | None,
    prompt: Prompt,
    ids: list[int],
    decoding: Decoding,
    draft_length: int = 0,
    on_step: Callable[[PromptRun], None] = lambda run: None,
) -> PromptRun:
    """The output for a prompt with these token ids, and the seconds of each speculation step.

    drafter: None for the target alone. draft_length: the most tokens that a step drafts. The
    target's context must have room for the prompt, max_new_tokens and draft_length. on_step: called
    with the log after the prefill and after each speculation step.
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

    # 2. The drafter reads the text so far. As in engines, the first token is emitted after that.
    session = None
    if drafter is not None:
        sampling = decoding.draft_sampling
        text = Text([*ids, first], slots, sampling, generator, states, draft_length, cache)
        session = drafter.start(text)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    now = time.perf_counter()
    run = PromptRun.of(prompt, len(ids), [now - clock], [[first]])
    on_step(run)

    while run.tokens[-1] not in decoding.stops and len(run.tokens) < decoding.max_new_tokens:
        # 3. Draft. Every step emits one token of the target's choice, so one less is drafted.
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

        # 5. One transfer from the device, because each transfer waits for the device.
        packed = torch.cat([proposal.tokens, n_accepted[None], following[None]])
        *draft, accepted, next_token = packed.tolist()
        now = time.perf_counter()
        emitted = _emit(run, draft, accepted, next_token, room, draft_length, decoding.stops)
        run.block_seconds.append(now - clock)
        run.free.append(run.drafted[-1] if proposal.free else 0)
        on_step(run)
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
    """Log a speculation step, and return the tokens that it emits.

    next_token: the target's, after the accepted tokens. room: the most drafted tokens that fit.
    """
    drafted = len(draft)
    emitted = [*draft[:accepted], next_token]
    run.late += room < draft_length
    end = next((i for i, token in enumerate(emitted) if token in stops), None)
    if end is not None:
        emitted = emitted[: end + 1]
        if end < accepted:  # a drafted token ends the text, so later drafted tokens do not count
            drafted = accepted = end + 1
    run.tokens.extend(emitted)
    run.block_tokens.append(len(emitted))
    run.drafted.append(drafted)
    run.accepted.append(accepted)
    return emitted
