"""What is measured on a pair: agreement, step costs, interleaved timing, losslessness."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

from eval.decoding.batched import decode_batch
from eval.decoding.drafting import Draft, StringDraft
from eval.decoding.drafts import Candidate, Target
from eval.decoding.forward import Decoder, KVCache
from eval.decoding.generation import generate_batched
from eval.decoding.loop import Decoding, DraftLength, decode_baseline, decode_speculative
from eval.decoding.verification import Sampling, agreement, likeliest, warp
from eval.measuring import metrics
from eval.measuring.journal import Journal
from eval.measuring.metrics import Agreement, Measured, PromptRun, StepCosts
from eval.prompts import Prompt

P = TypeVar("P")
Ids = TypeVar("Ids")
R = TypeVar("R")

COST_REPEATS = 30
RULE_TEMPERATURES = (0.0, 0.6, 1.0)  # at which the verification rules are compared
RULE_PROMPTS = 40  # of the evaluation's are enough to compare them
SURPRISE_PROMPTS = 8  # and so many tokens of each tell text from noise
SURPRISE_TOKENS = 256
STOCK_PROMPTS = 6
STOCK_TOKENS = 64
ALPHA_BATCH = 48
WARM_UP_TOKENS = 8
STOP_BELOW = (0.2, 0.4, 0.6)  # a token in hand pays from about (draft + width) / target on
TUNING_TOKENS = 64  # of an answer are enough to compare draft lengths


def target_texts(target: Target, prompts: list[list[int]], how: Decoding) -> list[list[int]]:
    """The target's own answer to each prompt, batched: the text that alpha is taken on."""
    answers: list[list[int]] = [[] for _ in prompts]
    bar = tqdm(total=len(prompts), desc="target texts", unit="prompt")
    for answer in generate_batched(
        target.decoder,
        prompts,
        how.max_new_tokens,
        how.stops,
        how.sampling,
        ALPHA_BATCH,
        how.seed,
    ):
        answers[answer.index] = answer.tokens
        bar.update()
    bar.close()
    return answers


@torch.inference_mode()
def measure_agreement(
    target: Target,
    drafts: Sequence[Draft | StringDraft],
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    texts: Sequence[list[int]],
    sampling: Sampling,
    journal: Journal,
    stage: str = "alpha",
) -> tuple[list[list[Agreement]], list[list[float]]]:
    """alpha of each draft on each prompt [drafts][prompts], teacher-forced, in one target pass.

    Also the entropy in bits of the target's distribution at temperature 1, at each position
    [prompts][positions]. Raises ValueError where the target's logits are no numbers.
    """
    every = -(-len(prompts) // RULE_PROMPTS)

    def measure(
        number: int, row: tuple[Prompt, list[int], list[int]]
    ) -> tuple[list[Agreement], list[float]]:
        prompt, ids, text = row
        sequence = torch.tensor([[*ids, *text[:-1]]], device=target.decoder.device)
        scores = _teacher_forced(target.decoder, sequence, len(ids))
        temperatures = RULE_TEMPERATURES if number % every == 0 else ()
        samplings = [dataclasses.replace(sampling, temperature=t) for t in temperatures]
        p, *p_compared = (warp(scores, one) for one in (sampling, *samplings))
        agreements = []
        for draft in drafts:
            q, *q_compared = draft.teacher_forced(
                ids, text, scores.shape[-1], (sampling, *samplings)
            )
            alpha = agreement(p, q)[0]
            compared = zip(temperatures, p_compared, q_compared, strict=True)
            agreements.append(
                Agreement(
                    prompt.id,
                    prompt.category,
                    float(alpha.sum()),
                    alpha.numel(),
                    alpha.tolist(),
                    likeliest(q)[0].tolist(),
                    {t: rule_acceptance(*both) for t, *both in compared},
                )
            )
        bits = entropy_bits(scores)[0]
        if not bits.isfinite().all():
            raise ValueError(
                f"{target.spec} gives logits that are no numbers in its answer to prompt "
                f"{prompt.id}: its weights are damaged, or too large for float16; take a "
                "checkpoint that is whole, or --dtype bfloat16 or float32."
            )
        return agreements, bits.tolist()

    rows = list(zip(prompts, prompt_ids, texts, strict=True))
    found = journal.each(stage, rows, measure, lambda row: row, "prompt")
    agreed = [[Agreement.from_json(row[0][draft]) for row in found] for draft in range(len(drafts))]
    return agreed, [row[1] for row in found]


def _teacher_forced(decoder: Decoder, sequence: Tensor, prompt_length: int) -> Tensor:
    """Logits [1, R, V] that predict each token after the prompt."""
    cache = decoder.new_cache(1, sequence.shape[1])
    first = decoder.forward(sequence[:, :prompt_length], 0, cache, last_only=True)
    if sequence.shape[1] == prompt_length:
        return first
    rest = decoder.forward(sequence[:, prompt_length:], prompt_length, cache)
    return torch.cat([first, rest], dim=1)


def entropy_bits(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in bits of softmax(logits) over [..., V]."""
    # finite, since 0 * -inf is nan: a masked token adds nothing
    scores = logits.float().clamp_min(torch.finfo(torch.float32).min)
    mean = torch.linalg.vecdot(scores.softmax(-1), scores)
    return ((scores.logsumexp(-1) - mean) / math.log(2)).clamp_min(0)


def rule_acceptance(p: torch.Tensor, q: torch.Tensor) -> dict[str, float]:
    """Accepted drafted tokens under three exact rules, summed over the positions of [..., V].

    exact: rejection sampling, sum min(p, q) (arXiv 2211.17192). greedy_match: the draft proposes
    argmax q, accepted where the target samples it, p(argmax q). target_probability: x drawn from q
    is accepted with probability p(x), else the next token is drawn from p without x, sum q p.
    """
    guess = likeliest(q)[..., None]
    return {
        "exact": float(agreement(p, q).sum()),
        "greedy_match": float(p.gather(-1, guess).sum()),
        "target_probability": float((p * q).sum()),
    }


@torch.inference_mode()
def bits_per_token(target: Target, prompt_ids: Sequence[list[int]]) -> float:
    """Mean surprise of the target, in bits, at the tokens of a few of the prompts.

    Tokens drawn at random cost log2(V) bits at least on average, whatever the model.
    """
    bits, count = 0.0, 0
    for ids in prompt_ids[:SURPRISE_PROMPTS]:
        if len(ids) < 2:
            continue
        tokens = torch.tensor([ids[:SURPRISE_TOKENS]], device=target.decoder.device)
        logits = _teacher_forced(target.decoder, tokens[:, :-1], 1)
        chosen = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])
        bits -= float(chosen.sum()) / math.log(2)
        count += tokens.shape[1] - 1
    return bits / max(count, 1)


def sweep_gamma(
    target: Target,
    candidate: Candidate,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    how: Decoding,
    max_gamma: int,
    journal: Journal,
) -> list[dict[str, Any]]:
    """Measured speed-up and tau of every fixed draft length from 1 to max_gamma, interleaved."""
    lengths = [DraftLength(gamma) for gamma in range(1, max_gamma + 1)]
    decoders = [partial(decode_baseline, target.decoder, how=how)]
    decoders += [
        partial(decode_speculative, target.decoder, candidate.draft, how=how, length=length)
        for length in lengths
    ]
    rows = list(zip(prompts, prompt_ids, strict=True))
    decoders[1](*rows[0])  # warm-up
    stage = f"gamma sweep of {candidate.name}"
    baseline, *runs = in_turns(decoders, rows, journal, stage, PromptRun.from_json, "prompt")
    return [
        {
            "gamma": length.gamma,
            "tau": metrics.tau(mine),
            "speedup": metrics.speedup(mine, baseline),
        }
        for length, mine in zip(lengths, runs, strict=True)
    ]


def step_costs(
    target: Decoder,
    draft: Draft | StringDraft,
    context_length: int,
    max_gamma: int,
    sampling: Sampling,
) -> StepCosts:
    """Median seconds of isolated steps at one context length, the widths interleaved.

    A step is what the decoder does for it: forward, head, and the choice of a token.
    """
    synchronise = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None

    def step(
        decoder: Decoder, cut: Callable[[Tensor], Tensor], width: int, cache: KVCache
    ) -> Callable[[], None]:
        tokens = torch.ones((1, width), dtype=torch.long, device=decoder.device)

        def run() -> None:
            logits = cut(decoder.forward(tokens, context_length, cache))
            (likeliest(logits) if sampling.greedy else warp(logits, sampling)).sum().item()

        return run

    slots = context_length + max_gamma + 1
    target_cache, draft_cache = target.new_cache(1, slots), draft.decoder.new_cache(1, slots)
    steps = {0: step(draft.decoder, draft.cut, 1, draft_cache)}
    for width in range(1, max_gamma + 2):
        steps[width] = step(target, lambda logits: logits, width, target_cache)
    seconds: dict[int, list[float]] = {width: [] for width in steps}
    for repeat in range(COST_REPEATS + 3):
        for width, run in steps.items():
            synchronise()
            clock = time.perf_counter()
            run()
            synchronise()
            if repeat >= 3:
                seconds[width].append(time.perf_counter() - clock)
    median = {width: statistics.median(values) for width, values in seconds.items()}
    draft_step = median.pop(0)
    return StepCosts(draft_step, median[1], median, context_length)


def choose_gamma(
    target: Target,
    draft: Draft | StringDraft,
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    how: Decoding,
    max_gamma: int,
) -> DraftLength:
    """The draft length with the least wall time per token on prompts that are not evaluated.

    Fixed lengths from 1 to max_gamma, and max_gamma with each of STOP_BELOW. After every quarter of
    the prompts the slower half drops out: what is left decides between near equals.
    """
    how = dataclasses.replace(how, max_new_tokens=min(how.max_new_tokens, TUNING_TOKENS))
    lengths = [DraftLength(gamma) for gamma in range(1, max_gamma + 1)]
    lengths += [DraftLength(max_gamma, stop_below) for stop_below in STOP_BELOW]
    seconds = dict.fromkeys(lengths, 0.0)
    tokens = dict.fromkeys(lengths, 0)

    def per_token(length: DraftLength) -> float:
        return seconds[length] / tokens[length]

    rows = list(zip(prompts, prompt_ids, strict=True))
    quarter = -(-len(rows) // 4)
    decode_speculative(target.decoder, draft, *rows[0], how, lengths[0])  # warm-up
    for done, (prompt, ids) in enumerate(tqdm(rows, desc="choose gamma", unit="prompt"), 1):
        for length in lengths:
            run = decode_speculative(target.decoder, draft, prompt, ids, how, length)
            seconds[length] += run.seconds
            tokens[length] += len(run.tokens)
        if done % quarter == 0:
            lengths = sorted(lengths, key=per_token)[: -(-len(lengths) // 2)]
    return min(lengths, key=per_token)


def interleave(
    target: Target,
    candidates: Sequence[Candidate],
    prompts: Sequence[Prompt],
    prompt_ids: Sequence[list[int]],
    how: Decoding,
    length: DraftLength,
    journal: Journal,
) -> tuple[list[PromptRun], list[list[PromptRun]]]:
    """Every prompt decoded without a draft and with each: baseline, [drafts]."""
    decoders: list[Callable[[Prompt, list[int]], PromptRun]] = [
        partial(decode_baseline, target.decoder, how=how)
    ]
    for candidate in candidates:
        decoders.append(
            partial(decode_speculative, target.decoder, candidate.draft, how=how, length=length)
        )
    for decode in decoders:  # warm-up, not counted
        decode(prompts[0], prompt_ids[0])
    rows = list(zip(prompts, prompt_ids, strict=True))
    stage = f"speed at T={how.sampling.temperature:g}"
    baseline, *drafted = in_turns(decoders, rows, journal, stage, PromptRun.from_json, "prompt")
    return baseline, drafted


def in_turns(
    decoders: Sequence[Callable[[P, Ids], R]],
    rows: Sequence[tuple[P, Ids]],
    journal: Journal,
    stage: str,
    read: Callable[[Any], R],
    unit: str,
) -> list[list[R]]:
    """What each decoder makes of each row [decoders][rows], row by row.

    The order rotates from row to row, so that no contender always runs on a cool machine. read: a
    result from its JSON.
    """

    def measure(turn: int, row: tuple[P, Ids]) -> list[R]:
        made = {}
        for i in range(len(decoders)):
            which = (turn + i) % len(decoders)
            made[which] = decoders[which](*row)
        return [made[which] for which in range(len(decoders))]

    found = journal.each(stage, rows, measure, lambda row: [read(made) for made in row], unit)
    return [[row[which] for row in found] for which in range(len(decoders))]


def interleave_batches(
    target: Target,
    candidates: Sequence[Candidate],
    batches: Sequence[tuple[Sequence[Prompt], Sequence[list[int]]]],
    how: Decoding,
    length: DraftLength,
    journal: Journal,
) -> list[list[list[PromptRun]]]:
    """Every batch of prompts and their ids decoded without a draft and with each.

    Returns the runs [1 + drafts][batches][rows], the baseline's first.
    """
    contenders = [None, *(candidate.draft for candidate in candidates)]
    short = dataclasses.replace(how, max_new_tokens=min(how.max_new_tokens, WARM_UP_TOKENS))
    for draft in contenders:
        decode_batch(target.decoder, draft, *batches[0], short, length)
    decoders = [
        partial(decode_batch, target.decoder, draft, how=how, length=length) for draft in contenders
    ]

    def read(batch: list[dict[str, Any]]) -> list[PromptRun]:
        return [PromptRun.from_json(run) for run in batch]

    return in_turns(decoders, batches, journal, f"batch size {len(batches[0][0])}", read, "batch")


def over_stock_generate(
    target: Target, prompts: Sequence[Prompt], prompt_ids: Sequence[list[int]], how: Decoding
) -> Measured:
    """Tokens/s of our baseline / of transformers' `generate` on the same model, interleaved.

    Both greedy: the cost of a step hardly depends on how its token is chosen.
    """
    length = min(how.max_new_tokens, STOCK_TOKENS)
    greedy = Decoding(Sampling(), how.stops, length, how.seed)
    config = GenerationConfig(
        max_new_tokens=greedy.max_new_tokens,
        do_sample=False,
        eos_token_id=sorted(how.stops),
        pad_token_id=min(how.stops),
    )
    stock: Any = target.model  # transformers wraps `generate` in a type that mypy cannot call
    rows = []
    some = list(zip(prompts, prompt_ids, strict=True))[:STOCK_PROMPTS]
    for turn, (prompt, ids) in enumerate([some[0], *some]):
        tokens = torch.tensor([ids], device=target.decoder.device)
        clock = time.perf_counter()
        output = stock.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )
        stock_seconds = time.perf_counter() - clock
        ours = decode_baseline(target.decoder, prompt, ids, greedy)
        if turn > 0:  # the first is warm-up
            emitted = output.shape[1] - len(ids)
            rows.append((len(ours.tokens), ours.seconds, emitted, stock_seconds))
    return metrics.measure(
        "over_stock_generate", rows, lambda t: (t[..., 0] / t[..., 1]) / (t[..., 2] / t[..., 3])
    )
