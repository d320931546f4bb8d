"""One evaluation in the reference decoder, from loaded models to its logs."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from align.errors import UserError
from align.token_bytes import tokens_of
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.forward import Decoder, HiddenStates
from eval.decoding.graphs import WIDEST
from eval.decoding.loop import Decoding
from eval.decoding.target import Target, device_count, tensor_sha256
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.agreement import BATCH, measure_agreement, target_texts
from eval.measuring.environment import environment, gpu_name
from eval.measuring.intervals import measure
from eval.measuring.journal import Enough, Journal
from eval.measuring.losslessness import LosslessCheck, read_sampled
from eval.measuring.runs import AT_LONGEST, DraftLog, RunLog, TargetOutput
from eval.measuring.timing import (
    Contender,
    Round,
    StepTimer,
    decode_in_turns,
    fastest_length,
    over_stock_generate,
)
from eval.prompts import Prompt, PromptSet

# Shares of the time at which stages end.
OUTPUTS, STEPS, LENGTHS, ACCEPTANCE, STOCK, TIMED, CHECKED = 0.11, 0.14, 0.22, 0.3, 0.33, 0.95, 1.0
# Until then prompts are timed if an interval needs them: about a tenth of a run's minutes, because
# an evaluation has a third of them.
LATEST = 1.3
WANTED = 24  # prompts or groups, whose interval of the speed-up is narrower than 8%
# What stages measure even if the time is over.
FEWEST_OUTPUTS, FEWEST_ROUNDS, FEWEST_TUNED, FEWEST_TIMED = 12, 8, 8, 2
ROUNDS = 32  # medians of 8 rounds on a busy CPU choose the wrong draft length once in ten times
PROBED_TOKENS = 256  # tokens of a prompt whose logits identify the models


@dataclass(frozen=True)
class Plan:
    """How much an evaluation measures.

    draft_length: of all drafts; None: the fastest length of each draft, up to max_draft_length.
    speed_prompts: number of prompts to time. seconds: time of the whole evaluation, for which
    stages measure fewer prompts; None: all prompts are measured.
    """

    draft_length: int | None
    max_draft_length: int
    speed_prompts: int
    seconds: float | None = None


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter],
    evaluation: PromptSet,
    tuning: PromptSet,
    decoding: Decoding,
    plan: Plan,
    journal: Journal,
    provenance: dict[str, Any],
) -> tuple[RunLog, list[DraftLog]]:
    """The logs for a report: one of the run, and one of each draft on the same prompts.

    tuning: prompts to choose draft lengths on. journal: keeps results, so that another process can
    continue. Raises UserError if draft lengths are chosen on prompts that are evaluated, and if a
    model's logits are NaN or infinite.
    """
    began = time.monotonic()
    _refuse_evaluated(tuning, evaluation, plan)
    machine = environment(
        "torch", torch.__version__, target.decoder.device, device_count(target.model)
    )
    labels = _begin(journal, target, drafters, (evaluation, tuning), decoding, plan)
    sampling, seed = decoding.sampling, decoding.seed
    spell, _ = spelling(target)

    def until(share: float, then: str, fewest: int = 1) -> Enough:
        """Ends a stage at this share of the plan's seconds, or half of a result later.

        then: a later stage, whose results need those that this stage had in an earlier process.
        """
        started, earlier = time.monotonic(), -1

        def enough(measured: int) -> bool:
            nonlocal earlier
            earlier = measured if earlier < 0 else earlier
            if journal.has(then) or plan.seconds is None:
                return journal.has(then)
            now = time.monotonic()
            half = (now - started) / max(1, measured - earlier) / 2
            return measured >= fewest and now + half >= began + share * plan.seconds

        return enough

    # 1. The target's outputs, for the acceptance rates. If time is short, prompts without an
    # output are not evaluated; a process that continues has the same prompts.
    drawn = evaluation.drawn(len(evaluation.prompts), seed)
    to_decode = list(zip((prompt.id for prompt in drawn.prompts), drawn.ids, strict=True))
    fewest = reaching(drawn.prompts, FEWEST_OUTPUTS)
    first = BATCH if plan.seconds is None else fewest
    starts = [0, *range(first, len(to_decode), BATCH), len(to_decode)]
    pieces = [dict(to_decode[start:end]) for start, end in pairwise(starts)]
    outputs = journal.each(
        "target outputs",
        pieces,
        lambda _number, piece: target_texts(target, piece, decoding),
        list,
        "batch",
        until(OUTPUTS, "steps"),
    )
    texts = [*chain(*outputs)]
    drawn = drawn.first(len(texts))

    # 2. Step costs, in the middle of an output of mean length; again with the timed prompts.
    middles = [len(ids) + len(text) // 2 for ids, text in zip(drawn.ids, texts, strict=True)]
    context = sum(middles) // len(middles)
    longest = max(plan.max_draft_length, plan.draft_length or 0)
    timer = StepTimer(target.decoder, [*drafters.values()], context, longest, decoding)
    models = ", ".join(labels.values())
    stage = f"steps of {models}"
    enough = until(STEPS, "", FEWEST_ROUNDS)
    rounds: list[Round] = journal.each(
        stage, range(ROUNDS), lambda *_: timer.round(), dict, "round", enough
    )

    # 3. The draft length of each draft, on the tuning prompts.
    lengths, policies = [], []
    for number, ((name, drafter), draft_costs) in enumerate(
        zip(drafters.items(), timer.costs(rounds), strict=True), start=1
    ):
        length, policy = plan.draft_length, "fixed"
        if length is None:
            share = STEPS + (LENGTHS - STEPS) * number / len(drafters)
            enough = until(share, "", FEWEST_TUNED)
            arguments = target, drafter, tuning, decoding, draft_costs, longest, enough
            length, prompts = journal.once(
                f"draft length of {labels[name]}", partial(fastest_length, *arguments)
            )
            policy = f"fixed, fastest on {prompts} other prompts"
        elif drafter.most is not None and length > drafter.most:
            length, policy = drafter.most, AT_LONGEST
        lengths.append(length)
        policies.append(policy)

    # 4. Acceptance rates, and the baseline compared with transformers' `generate`.
    enough = until(ACCEPTANCE, "stock generate", fewest)
    labelled = {labels[name]: drafter for name, drafter in drafters.items()}
    rates = measure_agreement(target, labelled, drawn, texts, decoding, journal, enough)
    drawn = drawn.first(len(next(iter(rates.values()))))
    # in the order of the evaluation prompts again
    evaluation = evaluation.of_ids({prompt.id for prompt in drawn.prompts})
    numbers = {prompt.id: number for number, prompt in enumerate(drawn.prompts)}
    order = [numbers[prompt.id] for prompt in evaluation.prompts]
    timed = drawn.first(plan.speed_prompts)  # the same ones, however many are evaluated
    stock = journal.once(
        "stock generate",
        lambda: over_stock_generate(target, timed, decoding, until(STOCK, "", FEWEST_TIMED)),
    )

    # 5. The timed prompts, each without a draft and with each draft, until the time is over. If
    # tokens are sampled, prompts are decoded greedily, too: only greedy outputs can be compared.
    greedy = replace(decoding, sampling=Sampling())
    settings = [(decoding, "")] if sampling.greedy else [(decoding, ""), (greedy, ", greedy")]
    sides = {"target": None, **labelled}
    contenders = {
        f"{label}{greedily}": Contender(drafter, length, setting)
        for setting, greedily in settings
        for (label, drafter), length in zip(sides.items(), [0, *lengths], strict=True)
    }

    after = "output check" if sampling.greedy else "sampled outputs"
    in_time, latest = (until(share, after, FEWEST_TIMED) for share in (TIMED, LATEST))

    def enough_timed(measured: int) -> bool:
        over, long_over = in_time(measured), latest(measured)
        return over and (measured >= reaching(timed.prompts, WANTED) or long_over)

    decoded, between = decode_in_turns(
        target, contenders, timed, journal, (models, timer), enough_timed
    )
    costs = timer.costs([*rounds, *between])
    baseline, *runs = decoded[: 1 + len(drafters)]
    greedy_baseline, *greedy_runs = decoded[-1 - len(drafters) :]
    timed = timed.first(len(baseline))

    # 6. The output check: greedy outputs with and without each draft are compared. The target reads
    # sampled outputs, because their log-probabilities are compared.
    if not sampling.greedy:
        sampled = dict(zip(sides, [baseline, *runs], strict=True))
        read_sampled(target.decoder, timed, sampled, journal)
    check = LosslessCheck(
        target, greedy, lambda ids: b"".join(map(spell, ids)).decode("utf-8", "replace")
    )
    logs = []
    for (name, drafter), length, policy, draft_costs, mine, mine_greedily in zip(
        *(drafters.items(), lengths, policies, costs, runs, greedy_runs), strict=True
    ):
        pair = greedy_baseline, mine_greedily
        compare = partial(check.ledger, drafter, length, timed, *pair, until(CHECKED, ""))
        logs.append(
            DraftLog(
                name=name,
                about={
                    "path": drafter.path,
                    "form": drafter.form,
                    "vocabulary": dict(drafter.vocabulary),
                    "gamma": length,
                    "gamma_policy": policy,
                    "lossless": journal.once(f"output check of {labels[name]}", compare),
                    "memory": {
                        "target_bytes": target.bytes,
                        "draft_bytes": drafter.bytes,
                        "kv_bytes_per_token": {
                            "target": target.decoder.new_cache(1, 1).bytes_per_token(),
                            "draft": drafter.kv_bytes_per_token,
                        },
                    },
                },
                runs=mine,
                baseline=baseline,
                agreement=[rates[labels[name]][number] for number in order],
                costs=draft_costs,
            )
        )
    on_gpu = target.decoder.device.type == "cuda"
    ended = [run.tokens[-1] in decoding.stops for run in baseline]
    run = RunLog(
        about={
            "target": target.checkpoint.spec,
            "target_quantization": target.checkpoint.gguf_kind,
            "engine": "torch",
            "device": device_name(target.model),
            "dtype": _dtype(target),
            "decoding": decoding_facts(
                decoding, ended, gamma=lengths[-1], gamma_policy=policies[-1]
            ),
            "prompts": prompt_facts(evaluation),
            "environment": machine,
            "eager": without_graphs(target.decoder, drafters, lengths) if on_gpu else [],
            "provenance": provenance | {"resumed": journal.resumed},
        },
        over_stock_generate=measure(
            "over_stock_generate",
            stock,
            metrics.speedup_of,
            [prompt.group for prompt in timed.prompts[: len(stock)]],
        ),
        answers=[
            TargetOutput(prompt.id, ids, texts[number], prompt.group)
            for prompt, ids, number in zip(evaluation.prompts, evaluation.ids, order, strict=True)
        ],
    )
    return run, logs


def without_graphs(
    target: Decoder, drafters: Mapping[str, Drafter], lengths: Sequence[int]
) -> list[str]:
    """The names of the models that run without CUDA graphs. lengths: of each draft."""
    recorded = target.recorded and max(lengths) + 1 <= WIDEST
    eager = [name for name, drafter in drafters.items() if not drafter.recorded]
    return eager if recorded else ["target", *eager]


def reaching(prompts: Sequence[Prompt], clusters: int) -> int:
    """The number of prompts, in their order, that reach so many clusters (intervals.py).

    If even all of them do not, this number is `clusters`, because more gain no interval.
    """
    reached: set[int | str] = set()
    for number, prompt in enumerate(prompts):
        reached.add(number if prompt.group is None else prompt.group)
        if len(reached) == clusters:
            return number + 1
    return clusters


def _refuse_evaluated(tuning: PromptSet, evaluation: PromptSet, plan: Plan) -> None:
    """Raise UserError if draft lengths would be chosen on prompts that are also evaluated."""
    evaluated = {tuple(ids) for ids in evaluation.ids}
    shared = [
        prompt.id
        for prompt, ids in zip(tuning.prompts, tuning.ids, strict=True)
        if tuple(ids) in evaluated
    ]
    if plan.draft_length is None and shared:
        raise UserError(
            f"Prompt {shared[0]!r} would choose the draft length and be evaluated, as would "
            f"{len(shared) - 1} others; leave repeated prompts out, or fix the length with gamma."
        )


def decoding_facts(decoding: Decoding, ended: Sequence[bool], **engine: Any) -> dict[str, Any]:
    """The report's `decoding`. ended: whether each output of the baseline ended by a stop token.

    engine: fields that depend on the engine, at least gamma and gamma_policy.
    """
    return {
        **asdict(decoding.sampling),
        "max_new_tokens": decoding.max_new_tokens,
        "verification": decoding.verification,
        "draft_sample_method": None if decoding.sampling.greedy else decoding.draft_sample_method,
        "stop_tokens": len(decoding.stops),
        "ended_by_stop": sum(ended) / len(ended),
        **engine,
    }


def prompt_facts(prompts: PromptSet) -> dict[str, Any]:
    """The report's `prompts`."""
    return {
        "source": prompts.source,
        "n": len(prompts.prompts),
        "sha256": prompts.sha256,
        "overlap_with_training": prompts.overlap,
        "in_chat_form": prompts.in_chat_form,
        "chat_template": prompts.chat_template,
        "chat_template_kwargs": prompts.chat_template_kwargs,
    }


def _dtype(target: Target) -> str:
    return str(target.decoder.dtype).removeprefix("torch.")


def _begin(
    journal: Journal,
    target: Target,
    drafters: Mapping[str, Drafter],
    parts: Sequence[PromptSet],
    decoding: Decoding,
    plan: Plan,
) -> dict[str, str]:
    """Make the journal continue if it belongs to exactly this target, prompts and settings.

    Returns a label of each draft, which changes with everything else on which its results depend.
    The plan's seconds are not compared, because a process that continues has fewer seconds left.
    """
    ids, dtype = parts[0].ids[0][:PROBED_TOKENS], _dtype(target)
    states: HiddenStates = dict.fromkeys(k for drafter in drafters.values() for k in drafter.layers)
    logits = teacher_forced_logits(target.decoder, ids, 1, states)
    labels = {}
    for name, drafter in drafters.items():
        # the last token of a text is not read
        q = drafter.teacher_forced(ids[:1], [*ids[1:], 0], Sampling(1.0), states)
        lengths = [plan.draft_length, plan.max_draft_length]
        about = [_hash_of_numbers(name, q, dtype), drafter.path, drafter.vocabulary, lengths]
        labels[name] = f"{name} ({hashlib.sha256(json.dumps(about).encode()).hexdigest()[:8]})"
    journal.begin(
        _hash_of_numbers(target.checkpoint.spec, logits, dtype),
        [(part.ids, [(p.id, p.category, p.group) for p in part.prompts]) for part in parts],
        asdict(decoding) | {"stops": sorted(decoding.stops)},
        [plan.speed_prompts, plan.seconds is None, "whole steps"],
        (device_name(target.model), dtype, torch.__version__),
    )
    return labels


def _hash_of_numbers(name: str, computed: Tensor, dtype: str) -> str:
    """A hash of a model's outputs, which identifies the model.

    Raises UserError for NaN and infinity, because their argmax looks like a token. Minus infinity
    is allowed, because it excludes a token.
    """
    if computed.isnan().any() or computed.isposinf().any():
        raise UserError(
            f"{name} computes NaN or infinite logits in {dtype}: its weights are damaged, or too "
            "large for float16. Fetch the checkpoint again, or use --dtype bfloat16 or float32."
        )
    return tensor_sha256(computed)


def spelling(target: Target) -> tuple[Callable[[int], bytes], frozenset[int]]:
    """A function from a token id to its bytes (empty if unknown), and the target's special ids."""
    tokens = tokens_of(target.checkpoint.tokenizer)

    def spell(token: int) -> bytes:
        spelt = tokens[token] if token < len(tokens) else None
        return spelt[1] if spelt else b""

    return spell, frozenset(i for i, t in enumerate(tokens) if t and t[0] == "special")


def device_name(model: PreTrainedModel) -> str:
    """The name of the GPUs that a model is on, or the number of CPU threads."""
    if model.device.type == "cuda":
        return gpu_name(model.device, device_count(model))
    return f"cpu ({torch.get_num_threads()} threads)"


def context_length(ids: Sequence[Sequence[int]], max_new_tokens: int, longest_draft: int) -> int:
    """The most positions of a prompt, its output and a draft after it."""
    return max(map(len, ids)) + max_new_tokens + longest_draft + 1
