"""One evaluation from loaded models to a report: choose gamma, take alpha, time, check, build."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from align.token_bytes import tokens_of
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.checkpoint import teacher_forced_logits
from eval.decoding.loop import Decoding, DraftLength
from eval.decoding.target import Target, tensor_sha256
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.agreement import bits_per_token, measure_agreement, target_texts
from eval.measuring.atlas import Answer
from eval.measuring.build import build_report
from eval.measuring.journal import Journal
from eval.measuring.log import Agreement, DraftLog, PromptRun, RunLog, StepCosts
from eval.measuring.losslessness import LosslessCheck
from eval.measuring.timing import (
    ALONE,
    Contender,
    choose_gamma,
    decode_in_turns,
    over_stock_generate,
    step_costs,
    sweep_gamma,
)
from eval.prompts import Batch, PromptSet
from eval.reporting.report import Report


@dataclass(frozen=True)
class Plan:
    """How much an evaluation measures.

    gamma: a fixed draft length for all drafts; None chooses each one's fastest, up to max_gamma.
    speed_prompts: how many are timed. sweep_prompts: measure every fixed length on so many of
    those. batch_sizes, temperatures: decode them also in batches of each size, and at each
    temperature.
    """

    gamma: int | None
    max_gamma: int
    speed_prompts: int
    sweep_prompts: int = 0
    batch_sizes: Sequence[int] = ()
    temperatures: Sequence[float] = ()


def evaluate(
    target: Target,
    drafters: Mapping[str, Drafter],
    evaluation: PromptSet,
    tuning: PromptSet,
    how: Decoding,
    plan: Plan,
    journal: Journal,
    overlap: int | None,
    provenance: dict[str, Any],
    others: PromptSet | None = None,
) -> Report:
    """The report of every draft, by name, on the same prompts.

    tuning: prompts to choose gamma on, which must not be evaluation prompts. journal: keeps what is
    measured, for a process that takes over. overlap: training prompts that equal or nearly
    duplicate an evaluation prompt, None when that is not known. others: prompts outside the domain,
    to take alpha on as well. Raises ValueError where a model's logits are no numbers.
    """
    timed = evaluation.drawn(plan.speed_prompts, how.seed)
    if plan.batch_sizes and max(plan.batch_sizes) > len(timed.prompts):
        raise ValueError(
            f"A batch of {max(plan.batch_sizes)} needs as many timed prompts, but there are "
            f"{len(timed.prompts)}; raise --speed_prompts, give more prompts, or ask for smaller "
            "--batch_sizes."
        )
    _begin(journal, target, drafters, (evaluation, tuning, others), how, plan)
    lengths = {
        name: _draft_length(target, name, drafter, tuning, how, plan, journal)
        for name, drafter in drafters.items()
    }
    alphas, entropy, texts = _agreement(target, drafters, evaluation, how, journal, "alpha")
    outside = _agreement(target, drafters, others, how, journal, "other prompts")[0]
    spell = speller(target)
    answers = [
        Answer(prompt.id, list(map(spell, text)), bits, (prompt.prompt or "").encode())
        for prompt, text, bits in zip(evaluation.prompts, texts, entropy, strict=True)
    ]

    contenders: list[Contender] = [ALONE, *((d, lengths[name]) for name, d in drafters.items())]

    def decoded(batches: list[Batch], sampling: Sampling, stage: str) -> _Decoded:
        some = dataclasses.replace(how, sampling=sampling)
        return decode_in_turns(target, contenders, batches, some, journal, stage)

    alone = timed.batches(1)
    by_temperature = {
        t: decoded(alone, dataclasses.replace(how.sampling, temperature=t), f"speed at T={t:g}")
        # losslessness is always measured greedily
        for t in dict.fromkeys([how.sampling.temperature, 0.0, *plan.temperatures])
    }
    by_size = {
        size: decoded(batches, how.sampling, f"batch size {size}")
        for size in plan.batch_sizes
        for batches in [timed.batches(size)]
    }
    runs = _rows(by_temperature[how.sampling.temperature])
    baseline = runs[0]
    stock = journal.once("stock generate", lambda: over_stock_generate(target, timed, how))

    check = LosslessCheck(target, dataclasses.replace(how, sampling=Sampling()))
    context = sum(r.prompt_tokens + len(r.tokens) // 2 for r in baseline) // len(baseline)
    swept = timed.drawn(plan.sweep_prompts, how.seed)
    logs = []
    for i, (name, drafter) in enumerate(drafters.items(), start=1):
        length = lengths[name]
        longest = max(plan.max_gamma, length.gamma)
        costs = journal.once(
            f"step costs of {name}",
            partial(step_costs, target.decoder, drafter, context, longest, how.sampling),
            StepCosts.from_json,
        )

        def compared(
            batches: list[Batch], found: _Decoded, stage: str, i: int = i
        ) -> dict[str, Any]:
            drafter, length = contenders[i]
            assert drafter is not None
            ledger = partial(check.ledger, drafter, length, batches, found[0], found[i])
            return _spelt(journal.once(stage, ledger), spell)

        logs.append(
            DraftLog(
                name=name,
                path=drafter.path,
                form=drafter.form,
                vocabulary=dict(drafter.vocabulary),
                runs=runs[i],
                baseline=baseline,
                lossless=compared(alone, by_temperature[0.0], f"texts of {name} compared"),
                gamma=length.gamma,
                gamma_policy=_policy(length, plan, tuning),
                agreement=alphas[name],
                costs=costs,
                memory={
                    "target_bytes": target.bytes,
                    "draft_bytes": drafter.bytes,
                    "kv_bytes_per_token": {
                        "target": target.decoder.new_cache(1, 1).bytes_per_token(),
                        "draft": drafter.kv_bytes_per_token,
                    },
                },
                full_form_bytes=drafter.full_form_bytes,
                gamma_sweep=sweep_gamma(target, name, drafter, swept, how, plan.max_gamma, journal)
                if plan.sweep_prompts
                else [],
                other_prompts=None
                if others is None
                else {
                    "source": others.source,
                    "sha256": others.sha256,
                    "alpha": metrics.alpha(outside[name]),
                },
                by_batch_size=[
                    {
                        "batch_size": size,
                        "prompts": size * len(found[0]),
                        "lossless": compared(
                            timed.batches(size),
                            found,
                            f"texts of {name} compared, batch size {size}",
                        )
                        if how.sampling.greedy
                        else None,
                        **metrics.by_batch(found[i], found[0]),
                    }
                    for size, found in by_size.items()
                ],
                by_temperature={
                    t: (_rows(by_temperature[t])[i], _rows(by_temperature[t])[0])
                    for t in plan.temperatures
                },
            )
        )
    run = RunLog(
        target=target.spec,
        engine="torch",
        device=device_name(target.decoder.device),
        dtype=str(target.decoder.dtype).removeprefix("torch."),
        decoding={
            "temperature": how.sampling.temperature,
            "top_k": how.sampling.top_k,
            "top_p": how.sampling.top_p,
            "max_new_tokens": how.max_new_tokens,
            "gamma": logs[-1].gamma,
            "gamma_policy": logs[-1].gamma_policy,
            "verification": "greedy match" if how.sampling.greedy else "rejection sampling",
            "stop_tokens": len(how.stops),
            "ended_by_stop": sum(r.tokens[-1] in how.stops for r in baseline) / len(baseline),
        },
        prompts={
            "source": evaluation.source,
            "n": len(evaluation.prompts),
            "sha256": evaluation.sha256,
            "overlap_with_training": overlap,
            "bits_per_token": round(bits_per_token(target, evaluation.ids), 2),
            "random_bits": round(math.log2(target.decoder.embedding.shape[0]), 2),
        },
        provenance=provenance | {"resumed": journal.resumed},
        over_stock_generate=metrics.measure(
            "over_stock_generate",
            stock,
            lambda t: (t[..., 0] / t[..., 1]) / (t[..., 2] / t[..., 3]),
        ),
        answers=answers,
        spell=spell,
    )
    return build_report(run, logs)


_Decoded = list[list[list[PromptRun]]]  # runs [contenders][batches][rows]


def _rows(decoded: _Decoded) -> list[list[PromptRun]]:
    """Runs [contenders][prompts]."""
    return [[run for batch in batches for run in batch] for batches in decoded]


def _begin(
    journal: Journal,
    target: Target,
    drafters: Mapping[str, Drafter],
    parts: Sequence[PromptSet | None],
    how: Decoding,
    plan: Plan,
) -> None:
    """Take up what the journal holds of just these models, prompts and settings."""
    ids = next(part for part in parts if part is not None).ids[0]
    dtype = str(target.decoder.dtype).removeprefix("torch.")
    logits = teacher_forced_logits(target.decoder, ids, 1)
    known_by = [_hash_of_numbers(target.spec, logits, dtype)]
    known_by += [_hash_of_numbers(name, d.probe(ids), dtype) for name, d in drafters.items()]
    journal.begin(
        known_by,
        [(name, drafter.vocabulary) for name, drafter in drafters.items()],
        [
            (part.ids, [(prompt.id, prompt.category, prompt.group) for prompt in part.prompts])
            for part in parts
            if part is not None
        ],
        dataclasses.asdict(how) | {"stops": sorted(how.stops)},
        dataclasses.asdict(plan),
        (device_name(target.decoder.device), dtype, torch.__version__),
    )


def _hash_of_numbers(name: str, computed: Tensor, dtype: str) -> str:
    """The hash by which a model is known again; the argmax of NaN would pass for a token.

    Minus infinity is a number here: it rules a token out.
    """
    if computed.isnan().any() or computed.isposinf().any():
        raise ValueError(
            f"{name} gives logits that are no numbers in {dtype}: its weights are damaged, or too "
            "large for float16; take a checkpoint that is whole, or --dtype bfloat16 or float32."
        )
    return tensor_sha256(computed)


def _draft_length(
    target: Target,
    name: str,
    drafter: Drafter,
    tuning: PromptSet,
    how: Decoding,
    plan: Plan,
    journal: Journal,
) -> DraftLength:
    if plan.gamma is not None:
        return DraftLength(plan.gamma)
    length: DraftLength = journal.once(
        f"gamma of {name}",
        lambda: choose_gamma(target, drafter, tuning, how, plan.max_gamma),
        lambda fields: DraftLength(**fields),
    )
    return length


def _policy(length: DraftLength, plan: Plan, tuning: PromptSet) -> str:
    if plan.gamma is not None:
        return "fixed"
    kind = f"stops below {length.stop_below:g}" if length.stop_below else "fixed"
    return f"{kind}, fastest on {len(tuning.prompts)} other prompts"


def _agreement(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: PromptSet | None,
    how: Decoding,
    journal: Journal,
    stage: str,
) -> tuple[dict[str, list[Agreement]], list[list[float]], list[list[int]]]:
    """Agreements by draft, entropy, and the target's texts they were taken on."""
    if prompts is None:
        return {}, [], []
    texts = journal.once(f"texts for {stage}", lambda: target_texts(target, prompts.ids, how))
    return *measure_agreement(target, drafters, prompts, texts, how, journal, stage), texts


def speller(target: Target) -> Callable[[int], bytes]:
    """The bytes of a token id of the target; none for padding rows that no token has."""
    keys = tokens_of(target.tokenizer)

    def spell(token: int) -> bytes:
        key = keys[token] if token < len(keys) else None
        return key[1] if key else b""

    return spell


def _spelt(ledger: dict[str, Any], spell: Callable[[int], bytes]) -> dict[str, Any]:
    """The ledger with the divergences' tokens as text."""
    entries = [
        entry
        | {
            side: b"".join(map(spell, entry[side])).decode("utf-8", "replace")
            for side in ("target", "drafted")
        }
        for entry in ledger["divergences"]
    ]
    return ledger | {"divergences": entries}


def device_name(device: torch.device) -> str:
    """The GPU's name, or how many CPU threads were used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def context_length(ids: Sequence[Sequence[int]], max_new_tokens: int, max_gamma: int) -> int:
    """Positions that the longest prompt, its answer and one draft beyond it may take."""
    return max(map(len, ids)) + max_new_tokens + max_gamma + 1
