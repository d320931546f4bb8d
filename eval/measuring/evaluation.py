"""One evaluation from loaded models to a report: choose gamma, take alpha, time, check, build."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from align.token_bytes import token_keys
from eval.decoding.batched import shared_vocabulary
from eval.decoding.drafting import Draft, StringDraft
from eval.decoding.drafts import Candidate, Target, tensor_sha256
from eval.decoding.forward import Decoder
from eval.decoding.loop import Decoding, DraftLength
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.atlas import Answer, text_of
from eval.measuring.journal import Journal
from eval.measuring.losslessness import LosslessCheck
from eval.measuring.metrics import StepCosts
from eval.measuring.timing import (
    bits_per_token,
    choose_gamma,
    interleave,
    interleave_batches,
    measure_agreement,
    over_stock_generate,
    step_costs,
    sweep_gamma,
    target_texts,
)
from eval.prompts import Prompt, draw, prompts_sha256
from eval.reporting.report import DraftMeasurement, RunInfo, build_report


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


@dataclass(frozen=True)
class Plan:
    """How much an evaluation measures.

    gamma: a fixed draft length for all drafts; None chooses the last one's fastest, up to
    max_gamma. speed_prompts: how many are timed. sweep_prompts: measure every fixed length on so
    many of those. batch_sizes, temperatures: decode them also in batches of each size, and at each
    temperature.
    """

    gamma: int | None
    max_gamma: int
    speed_prompts: int
    sweep_prompts: int = 0
    batch_sizes: Sequence[int] = ()
    temperatures: Sequence[float] = ()


def evaluate_drafts(
    target: Target,
    candidates: Sequence[Candidate],
    evaluation: PromptSet,
    tuning: PromptSet,
    how: Decoding,
    plan: Plan,
    journal: Journal,
    overlap: int | None,
    provenance: dict[str, Any],
    others: PromptSet | None = None,
) -> dict[str, Any]:
    """The report (eval/reporting/report.py) of every candidate on the same prompts.

    tuning: prompts to choose gamma on, which must not be evaluation prompts. journal: keeps what is
    measured, for a process that takes over. overlap: evaluation prompts that were trained on, None
    when that is not known. others: prompts outside the domain, to take alpha on as well. Raises
    ValueError where a model's logits are no numbers.
    """
    timed = evaluation.drawn(plan.speed_prompts, how.seed)
    _check_batches(candidates, plan.batch_sizes, len(timed.prompts))
    said = [
        _refuse_no_numbers(name, decoder, evaluation.ids[0])
        for name, decoder in (
            (target.spec, target.decoder),
            *((candidate.name, candidate.draft.decoder) for candidate in candidates),
        )
    ]
    journal.begin(
        said,
        [(candidate.name, candidate.vocabulary) for candidate in candidates],
        [
            (part.ids, [(prompt.id, prompt.category) for prompt in part.prompts])
            for part in (evaluation, tuning, others)
            if part is not None
        ],
        dataclasses.asdict(how) | {"stops": sorted(how.stops)},
        dataclasses.asdict(plan),
        (device_name(target.decoder.device), str(target.decoder.dtype), torch.__version__),
    )
    if plan.gamma is not None:
        length, policy = DraftLength(plan.gamma), "fixed"
    else:
        length = journal.once(
            "choice of gamma",
            lambda: choose_gamma(
                target, candidates[-1].draft, tuning.prompts, tuning.ids, how, plan.max_gamma
            ),
            lambda fields: DraftLength(**fields),
        )
        kind = f"stops below {length.stop_below:g}" if length.stop_below else "fixed"
        policy = f"{kind}, fastest on {len(tuning.prompts)} other prompts"

    texts = journal.once("target texts", lambda: target_texts(target, evaluation.ids, how))
    drafts = [candidate.draft for candidate in candidates]
    agreements, entropy = measure_agreement(
        target, drafts, evaluation.prompts, evaluation.ids, texts, how.sampling, journal
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
    outside = _outside(target, drafts, others, how, journal) if others else [None] * len(drafts)

    greedy = Decoding(Sampling(), how.stops, how.max_new_tokens, how.seed)
    decoded = {}
    # losslessness is always measured greedily
    for temperature in dict.fromkeys([how.sampling.temperature, 0.0, *plan.temperatures]):
        sampling = dataclasses.replace(how.sampling, temperature=temperature)
        decoded[temperature] = interleave(
            target,
            candidates,
            timed.prompts,
            timed.ids,
            dataclasses.replace(how, sampling=sampling),
            length,
            journal,
        )
    baseline, runs = decoded[how.sampling.temperature]
    greedy_baseline, greedy_runs = decoded[0.0]
    stock = journal.once(
        "stock generate", lambda: over_stock_generate(target, timed.prompts, timed.ids, how)
    )
    check = LosslessCheck(target, greedy, length)
    batched = _by_batch_size(
        target, candidates, timed, how, length, plan.batch_sizes, check, spell, journal
    )
    alone = [([p], [ids]) for p, ids in zip(timed.prompts, timed.ids, strict=True)]

    mean_context = sum(run.prompt_tokens + len(run.tokens) // 2 for run in baseline) // len(
        baseline
    )
    longest = max(plan.max_gamma, length.gamma)
    swept = timed.drawn(plan.sweep_prompts, how.seed)
    measurements = []
    for i, candidate in enumerate(candidates):
        costs = journal.once(
            f"step costs of {candidate.name}",
            partial(
                step_costs, target.decoder, candidate.draft, mean_context, longest, how.sampling
            ),
            StepCosts.from_json,
        )
        lossless = journal.once(
            f"texts of {candidate.name} compared",
            partial(
                check.ledger,
                candidate.draft,
                alone,
                [[run] for run in greedy_baseline],
                [[run] for run in greedy_runs[i]],
            ),
        )
        measurements.append(
            DraftMeasurement(
                name=candidate.name,
                path=candidate.path,
                form=candidate.form,
                vocabulary=candidate.vocabulary,
                agreement=agreements[i],
                runs=runs[i],
                baseline_runs=baseline,
                costs=costs,
                memory={
                    "target_bytes": target.bytes,
                    "draft_bytes": candidate.draft_bytes,
                    "kv_bytes_per_token": {
                        "target": target.decoder.new_cache(1, 1).bytes_per_token(),
                        "draft": candidate.draft.decoder.new_cache(1, 1).bytes_per_token(),
                    },
                },
                full_form_bytes=candidate.full_form_bytes,
                lossless=_spelt(lossless, spell),
                gamma_sweep=sweep_gamma(
                    target, candidate, swept.prompts, swept.ids, how, plan.max_gamma, journal
                )
                if plan.sweep_prompts
                else [],
                other_prompts=outside[i],
                by_batch_size=batched[i],
                by_temperature={t: (decoded[t][1][i], decoded[t][0]) for t in plan.temperatures},
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
        provenance=provenance | {"resumed": journal.resumed},
        over_stock_generate=stock,
        answers=answers,
        spell=spell,
    )
    return build_report(info, measurements)


def _by_batch_size(
    target: Target,
    candidates: Sequence[Candidate],
    timed: PromptSet,
    how: Decoding,
    length: DraftLength,
    sizes: Sequence[int],
    check: LosslessCheck,
    spell: Callable[[int], bytes],
    journal: Journal,
) -> list[list[dict[str, Any]]]:
    """What each draft brings at each batch size [candidates][sizes]: points of `by_batch_size`.

    The prompts in their order, so many a batch, the last ones left out where they fill none.
    """
    points: list[list[dict[str, Any]]] = [[] for _ in candidates]
    for size in sizes:
        batches = [
            (timed.prompts[at : at + size], timed.ids[at : at + size])
            for at in range(0, len(timed.prompts) - size + 1, size)
        ]
        baseline, *drafted = interleave_batches(target, candidates, batches, how, length, journal)
        for candidate, mine, found in zip(candidates, drafted, points, strict=True):
            lossless = None
            if how.sampling.greedy:
                stage = f"texts of {candidate.name} compared, batch size {size}"
                ledger = partial(check.ledger, candidate.draft, batches, baseline, mine)
                lossless = _spelt(journal.once(stage, ledger), spell)
            found.append(
                {
                    "batch_size": size,
                    "prompts": size * len(batches),
                    "lossless": lossless,
                    **metrics.by_batch(mine, baseline),
                }
            )
    return points


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
def _refuse_no_numbers(name: str, decoder: Decoder, ids: list[int]) -> str:
    """Look at a model's logits [1, T, V] once: the argmax of NaN would pass for a token.

    Minus infinity is a number here: it rules a token out. Returns the logits' hash, by which the
    model is known again.
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
    return tensor_sha256(logits)


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
    target: Target,
    drafts: Sequence[Draft | StringDraft],
    others: PromptSet,
    how: Decoding,
    journal: Journal,
) -> list[dict[str, Any]]:
    """alpha of each draft on prompts of other domains."""
    stage = "other prompts"
    texts = journal.once(f"texts of {stage}", lambda: target_texts(target, others.ids, how))
    found, _ = measure_agreement(
        target, drafts, others.prompts, others.ids, texts, how.sampling, journal, f"alpha, {stage}"
    )
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
