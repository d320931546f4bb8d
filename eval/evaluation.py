"""One evaluation from loaded models to a report: choose gamma, take alpha, time, check, build."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from align.token_bytes import token_keys
from eval import metrics
from eval.atlas import Answer, text_of
from eval.batched import shared_vocabulary
from eval.drafting import Draft, StringDraft
from eval.drafts import Candidate, Target
from eval.forward import Decoder
from eval.prompts import Prompt, draw, prompts_sha256
from eval.report import DraftMeasurement, RunInfo, build_report
from eval.speculative import Decoding, DraftLength
from eval.speed import (
    LosslessCheck,
    bits_per_token,
    choose_gamma,
    interleave,
    measure_agreement,
    measure_batches,
    over_stock_generate,
    step_costs,
    sweep_gamma,
    target_texts,
)
from eval.verification import Sampling


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their token ids, and where they came from."""

    source: str
    prompts: list[Prompt]
    ids: list[list[int]]

    def drawn(self, count: int, seed: int) -> PromptSet:
        """`count` of them, drawn with the seed."""
        chosen = {p.id for p in draw(self.prompts, count, seed)}
        keep = [i for i, p in enumerate(self.prompts) if p.id in chosen]
        return PromptSet(self.source, [self.prompts[i] for i in keep], [self.ids[i] for i in keep])


def evaluate_drafts(
    target: Target,
    candidates: Sequence[Candidate],
    evaluation: PromptSet,
    tuning: PromptSet,
    how: Decoding,
    gamma: int | None,
    max_gamma: int,
    speed_prompts: int,
    overlap: int | None,
    provenance: dict[str, Any],
    sweep_prompts: int = 0,
    others: PromptSet | None = None,
    batch_sizes: Sequence[int] = (),
    temperatures: Sequence[float] = (),
) -> dict[str, Any]:
    """The report (eval/report.py) of every candidate on the same prompts.

    gamma: a fixed draft length for all of them; None chooses the last candidate's fastest on
    `tuning`, which must not be evaluation prompts. overlap: evaluation prompts that were trained
    on, None when that is not known. sweep_prompts: measure every fixed length on so many of the
    timed prompts. others: prompts outside the domain, to take alpha on as well. batch_sizes,
    temperatures: decode the timed prompts also in batches of each size, and at each temperature.
    Raises ValueError where a model's logits are no numbers.
    """
    timed = evaluation.drawn(speed_prompts, how.seed)
    _check_batches(candidates, batch_sizes, len(timed.prompts))
    _refuse_no_numbers(target.spec, target.decoder, evaluation.ids[0])
    for candidate in candidates:
        _refuse_no_numbers(candidate.name, candidate.draft.decoder, evaluation.ids[0])
    if gamma is not None:
        length, policy = DraftLength(gamma), "fixed"
    else:
        length = choose_gamma(
            target, candidates[-1].draft, tuning.prompts, tuning.ids, how, max_gamma
        )
        kind = f"stops below {length.stop_below:g}" if length.stop_below else "fixed"
        policy = f"{kind}, fastest on {len(tuning.prompts)} other prompts"

    texts = target_texts(target, evaluation.ids, how)
    drafts = [candidate.draft for candidate in candidates]
    agreements, entropy = measure_agreement(
        target, drafts, evaluation.prompts, evaluation.ids, texts, how.sampling
    )
    spell = speller(target)
    answers = [
        Answer(
            prompt.id,
            [spell(token) for token in text],
            bits,
            b"" if prompt.prompt is None else prompt.prompt.encode(),
        )
        for prompt, text, bits in zip(evaluation.prompts, texts, entropy, strict=True)
    ]
    outside = _outside(target, drafts, others, how) if others else [None] * len(drafts)

    greedy = Decoding(Sampling(), how.stops, how.max_new_tokens, how.seed)
    decoded = {}
    # losslessness is always measured greedily
    for temperature in dict.fromkeys([how.sampling.temperature, 0.0, *temperatures]):
        sampling = dataclasses.replace(how.sampling, temperature=temperature)
        decoded[temperature] = interleave(
            target,
            candidates,
            timed.prompts,
            timed.ids,
            dataclasses.replace(how, sampling=sampling),
            length,
        )
    baseline, runs = decoded[how.sampling.temperature]
    greedy_baseline, greedy_runs = decoded[0.0]
    stock = over_stock_generate(target, timed.prompts, timed.ids, how)
    batched = measure_batches(
        target, candidates, timed.prompts, timed.ids, how, length, batch_sizes
    )
    check = LosslessCheck(target, greedy, length)

    mean_context = sum(run.prompt_tokens + len(run.tokens) // 2 for run in baseline) // len(
        baseline
    )
    longest = max(max_gamma, length.gamma)
    swept = timed.drawn(sweep_prompts, how.seed)
    measurements = []
    for i, candidate in enumerate(candidates):
        measurements.append(
            DraftMeasurement(
                name=candidate.name,
                path=candidate.path,
                form=candidate.form,
                vocabulary=candidate.vocabulary,
                agreement=agreements[i],
                runs=runs[i],
                baseline_runs=baseline,
                costs=step_costs(
                    target.decoder, candidate.draft, mean_context, longest, how.sampling
                ),
                memory={
                    "target_bytes": target.bytes,
                    "draft_bytes": candidate.draft_bytes,
                    "kv_bytes_per_token": {
                        "target": target.decoder.new_cache(1, 1).bytes_per_token(),
                        "draft": candidate.draft.decoder.new_cache(1, 1).bytes_per_token(),
                    },
                },
                full_form_bytes=candidate.full_form_bytes,
                lossless=_spelt(
                    check.ledger(
                        candidate.draft, timed.prompts, timed.ids, greedy_baseline, greedy_runs[i]
                    ),
                    spell,
                ),
                gamma_sweep=sweep_gamma(
                    target, candidate.draft, swept.prompts, swept.ids, how, max_gamma
                )
                if sweep_prompts
                else [],
                other_prompts=outside[i],
                by_batch_size=batched[i],
                by_temperature={t: (decoded[t][1][i], decoded[t][0]) for t in temperatures},
            )
        )
    info = RunInfo(
        target=target.spec,
        engine="torch",
        device=device_name(target.decoder.device),
        dtype=str(target.decoder.dtype).removeprefix("torch."),
        decoding={
            "temperature": how.sampling.temperature,
            "top_k": how.sampling.top_k,
            "top_p": how.sampling.top_p,
            "max_new_tokens": how.max_new_tokens,
            "gamma": length.gamma,
            "gamma_policy": policy,
            "verification": "greedy match" if how.sampling.greedy else "rejection sampling",
            "stop_tokens": len(how.stops),
            "ended_by_stop": sum(run.tokens[-1] in how.stops for run in baseline) / len(baseline),
        },
        prompts={
            "source": evaluation.source,
            "n": len(evaluation.prompts),
            "sha256": prompts_sha256(evaluation.prompts),
            "overlap_with_training": overlap,
            "bits_per_token": round(bits_per_token(target, evaluation.ids), 2),
            "random_bits": round(math.log2(target.decoder.embedding.shape[0]), 2),
        },
        provenance=provenance,
        over_stock_generate=stock,
        answers=answers,
        spell=spell,
    )
    return build_report(info, measurements)


def _check_batches(candidates: Sequence[Candidate], sizes: Sequence[int], prompts: int) -> None:
    """Raise ValueError, before anything is timed, for batches that cannot be measured."""
    if not sizes:
        return
    if max(sizes) > prompts:
        raise ValueError(
            f"A batch of {max(sizes)} needs as many timed prompts, but there are {prompts}; raise "
            "--speed_prompts, give more prompts, or ask for smaller --batch_sizes."
        )
    for candidate in candidates:
        try:
            shared_vocabulary(candidate.draft)
        except ValueError as error:
            raise ValueError(f"--batch_sizes cannot take draft {candidate.name}: {error}") from None


@torch.inference_mode()
def _refuse_no_numbers(name: str, decoder: Decoder, ids: list[int]) -> None:
    """Look at a model's logits [1, T, V] once: the argmax of NaN would pass for a token.

    Minus infinity is a number here: it rules a token out.
    """
    # of another vocabulary: any of its ids will do
    own = [i % decoder.embedding.shape[0] for i in ids][: decoder.context_length]
    logits = decoder.forward(
        torch.tensor([own], device=decoder.device), 0, decoder.new_cache(1, len(own))
    )
    if logits.isnan().any() or logits.isposinf().any():
        dtype = str(decoder.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} gives logits that are no numbers in {dtype}: its weights are damaged, or too "
            "large for float16; take a checkpoint that is whole, or --dtype bfloat16 or float32."
        )


def speller(target: Target) -> Callable[[int], bytes]:
    """The bytes of a token id of the target; none for padding rows that no token has."""
    keys = token_keys(target.tokenizer)

    def spell(token: int) -> bytes:
        key = keys[token] if token < len(keys) else None
        return key[1] if key else b""

    return spell


def _spelt(ledger: dict[str, Any], spell: Callable[[int], bytes]) -> dict[str, Any]:
    """The ledger with the divergences' tokens as text."""
    entries = [
        entry | {side: text_of(b"".join(map(spell, entry[side]))) for side in ("target", "drafted")}
        for entry in ledger["divergences"]
    ]
    return ledger | {"divergences": entries}


def _outside(
    target: Target, drafts: Sequence[Draft | StringDraft], others: PromptSet, how: Decoding
) -> list[dict[str, Any]]:
    """alpha of each draft on prompts of other domains."""
    texts = target_texts(target, others.ids, how)
    found, _ = measure_agreement(target, drafts, others.prompts, others.ids, texts, how.sampling)
    about = {"source": others.source, "sha256": prompts_sha256(others.prompts)}
    return [about | {"alpha": metrics.alpha(agreement)} for agreement in found]


def device_name(device: torch.device) -> str:
    """The GPU's name, or how many CPU threads were used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def context_length(ids: Sequence[Sequence[int]], max_new_tokens: int, max_gamma: int) -> int:
    """Positions that the longest prompt, its answer and one draft beyond it may take."""
    return max(map(len, ids)) + max_new_tokens + max_gamma + 1
