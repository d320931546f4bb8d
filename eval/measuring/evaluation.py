"""One evaluation from loaded models to a report: choose gamma, time, take alpha, check, build."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from align.sources import gguf_kind
from align.token_bytes import tokens_of
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.loop import Decoding, DraftLength
from eval.decoding.target import Target, tensor_sha256
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.agreement import bits_per_token, measure_agreement, target_texts
from eval.measuring.answer_quality import is_function, passes
from eval.measuring.intervals import measure
from eval.measuring.journal import Journal
from eval.measuring.losslessness import LosslessCheck
from eval.measuring.replay import best_length, places
from eval.measuring.runs import Agreement, Answer, DraftLog, PromptRun, RunLog, StepCosts
from eval.measuring.timing import (
    ALONE,
    CHOICE_REPEATS,
    COST_REPEATS,
    decode_in_turns,
    over_stock_generate,
    step_costs,
)
from eval.prompts import Batch, Prompt, PromptSet
from eval.reporting.report import Report, build_report


@dataclass(frozen=True)
class Plan:
    """How much an evaluation measures.

    gamma: a fixed draft length for all drafts; None chooses each one's fastest, up to max_gamma.
    speed_prompts: how many are timed. execute: run the functions that the target writes where a
    prompt brings tests. seconds: None times all of speed_prompts, else no more than fit into these,
    nor than it takes for intervals within NARROW of each speed-up; FEWEST at least.
    """

    gamma: int | None
    max_gamma: int
    speed_prompts: int
    execute: bool = False
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
) -> Report:
    """The report of every draft, by name, on the same prompts.

    tuning: prompts to choose gamma on, which must not be evaluation prompts. journal: keeps what is
    measured, for a process that takes over. overlap: training prompts that equal or nearly
    duplicate an evaluation prompt, None when that is not known. Raises ValueError where a model's
    logits are no numbers.
    """
    timed = evaluation.drawn(plan.speed_prompts, decoding.seed)
    _begin(journal, target, drafters, (evaluation, tuning), decoding, plan)
    stages = _Stages(target, drafters, timed, tuning, decoding, plan, journal)
    temperature = decoding.sampling.temperature
    first = stages.decoded(
        timed.batches(1), temperature, f"speed at T={temperature:g}", stages.enough
    )
    alphas, answers = stages.agreement(evaluation, first[BASELINE])
    stages.timed = timed = timed.first(len(first[BASELINE]))
    decoded = {temperature: first}
    if not decoding.sampling.greedy:  # losslessness is
        decoded[0.0] = stages.decoded(timed.batches(1), 0.0, "speed at T=0")
    stock = journal.once("stock generate", lambda: over_stock_generate(target, timed, decoding))
    texts = [(r.prompt_tokens, len(r.tokens)) for (r,) in first[BASELINE]]
    context = sum(prompt + tokens // 2 for prompt, tokens in texts) // len(texts)
    longest = max(plan.max_gamma, *(length.gamma for length in stages.lengths.values()))
    costs = stages.step_costs("step costs", context, longest, COST_REPEATS)
    logs = [stages.draft_log(name, alphas[name], costs[name], decoded) for name in drafters]
    baseline = logs[0].baseline
    run = RunLog(
        target=target.spec,
        engine="torch",
        device=device_name(target.decoder.device),
        dtype=_dtype(target),
        decoding={
            **asdict(decoding.sampling),
            "max_new_tokens": decoding.max_new_tokens,
            "gamma": logs[-1].gamma,
            "gamma_policy": logs[-1].gamma_policy,
            "verification": decoding.verification,
            "stop_tokens": len(decoding.stops),
            "ended_by_stop": sum(r.tokens[-1] in decoding.stops for r in baseline) / len(baseline),
        },
        prompts={
            "source": evaluation.source,
            "n": len(evaluation.prompts),
            "sha256": evaluation.sha256,
            "overlap_with_training": evaluation.overlap,
            "bits_per_token": round(bits_per_token(target, evaluation.ids), 2),
            "random_bits": round(math.log2(target.decoder.embedding.shape[0]), 2),
            "in_chat_form": evaluation.in_chat_form,
            "chat_template_kwargs": evaluation.chat_template_kwargs,
            "chat_template": bool(target.tokenizer.chat_template),
        },
        provenance=provenance | {"resumed": journal.resumed},
        over_stock_generate=measure("over_stock_generate", stock, metrics.speedup_of),
        answers=answers,
        spell=stages.spell,
        special=stages.special,
        target_quantization=gguf_kind(target.spec),
    )
    return build_report(run, logs)


FEWEST = 12  # prompts that are timed: of fewer no interval says much
ROUND = 4  # prompts between two looks at the clock and the intervals
NARROW = 0.07  # of a speed-up: no more prompts are timed once its interval ends within it
PROBED_TOKENS = 256  # of a prompt, by whose logits models are known again
BASELINE = ""  # the name of what is decoded without a draft
Decoded = dict[str, list[list[PromptRun]]]  # by draft, BASELINE among them: runs [batches][rows]


class _Stages:
    """What is measured of every draft alike, kept in the journal stage by stage."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        timed: PromptSet,
        tuning: PromptSet,
        decoding: Decoding,
        plan: Plan,
        journal: Journal,
    ) -> None:
        self.target, self.drafters, self.timed, self.tuning = target, drafters, timed, tuning
        self.decoding, self.plan, self.journal = decoding, plan, journal
        self.spell, self.special = spelling(target)
        self.check = LosslessCheck(target, replace(decoding, sampling=Sampling()))
        self.lengths = self._draft_lengths()

    def _draft_lengths(self) -> dict[str, DraftLength]:
        """Of each draft the fastest length on prompts that are not evaluated, by replay."""
        tuning, decoding, longest = self.tuning, self.decoding, self.plan.max_gamma
        if self.plan.gamma is not None:
            return dict.fromkeys(self.drafters, DraftLength(self.plan.gamma))
        context = sum(map(len, tuning.ids)) // len(tuning.ids) + decoding.max_new_tokens // 2
        costs = self.step_costs("step costs for gamma", context, longest, CHOICE_REPEATS)

        def choose(name: str) -> DraftLength:
            replayed = places(self.target, self.drafters[name], tuning, decoding, longest)
            return best_length(replayed, costs[name], longest)

        return {
            name: self.journal.once(
                f"gamma of {name}", partial(choose, name), lambda fields: DraftLength(**fields)
            )
            for name in self.drafters
        }

    def agreement(
        self, prompts: PromptSet, timed: list[list[PromptRun]]
    ) -> tuple[dict[str, list[Agreement]], list[Answer]]:
        """The log of alpha by draft, and the target's answers that it was taken on.

        timed: runs without a draft, whose greedy texts are not written a second time. Sampled ones
        depend on the prompts before them.
        """
        target, decoding, journal = self.target, self.decoding, self.journal
        timed_texts = {run.prompt_id: run.tokens for (run,) in timed if decoding.sampling.greedy}
        rows = list(zip(prompts.prompts, prompts.ids, strict=True))
        unwritten = [ids for prompt, ids in rows if prompt.id not in timed_texts]
        written = iter(
            journal.once(
                "texts for alpha", lambda: unwritten and target_texts(target, unwritten, decoding)
            )
        )
        texts = [timed_texts.get(prompt.id) or next(written) for prompt in prompts.prompts]
        agreements, entropy = measure_agreement(
            target, self.drafters, prompts, texts, decoding, journal
        )
        answers = [
            self._answer(*row)
            for row in zip(prompts.prompts, prompts.ids, texts, entropy, strict=True)
        ]
        return agreements, answers

    def _answer(
        self, prompt: Prompt, ids: list[int], tokens: list[int], entropy: list[float]
    ) -> Answer:
        before = (prompt.prompt or "").encode()
        answer = Answer(prompt.id, ids, tokens, entropy, before, prompt.group)
        if prompt.entry_point is None:
            return answer
        shown = [self.spell(token) for token in tokens if token not in self.special]
        text = b"".join(shown).decode("utf-8", "replace")
        answer = replace(answer, is_function=is_function(prompt, text))
        if self.plan.execute and prompt.test is not None:
            answer = replace(answer, passes=passes(prompt, text))
        return answer

    def decoded(
        self,
        batches: list[Batch],
        temperature: float,
        stage: str,
        enough: Callable[[list[list[list[PromptRun]]]], bool] | None = None,
    ) -> Decoded:
        """The batches without a draft and with each, in turns, until it is enough."""
        decoding = replace(
            self.decoding, sampling=replace(self.decoding.sampling, temperature=temperature)
        )
        contenders = [ALONE, *((self.drafters[name], self.lengths[name]) for name in self.drafters)]
        runs = decode_in_turns(
            self.target, contenders, batches, decoding, self.journal, stage, enough
        )
        return dict(zip([BASELINE, *self.drafters], runs, strict=True))

    def enough(self, batches: list[list[list[PromptRun]]]) -> bool:
        """Whether the runs [batches][contenders][1] give narrow intervals, or time is up."""
        count = len(batches)
        if self.plan.seconds is None or count < FEWEST or count % ROUND:
            return False
        runs = [[run for (run,) in contender] for contender in zip(*batches, strict=True)]
        times = 1 if self.decoding.sampling.greedy else 2  # texts are compared greedily, once more
        spent = times * sum(run.seconds for contender in runs for run in contender)
        if spent * (count + ROUND) / count > self.plan.seconds:
            return True
        baseline, *drafts = runs
        return all(metrics.speedup(draft, baseline).within(NARROW) for draft in drafts)

    def step_costs(
        self, stage: str, context: int, longest: int, repeats: int
    ) -> dict[str, StepCosts]:
        """Of every draft beside the same steps of the target, so many tokens into a text."""
        drafters, sampling = list(self.drafters.values()), self.decoding.sampling
        costs = self.journal.once(
            stage,
            lambda: step_costs(self.target.decoder, drafters, context, longest, sampling, repeats),
            lambda each: [StepCosts.from_json(fields) for fields in each],
        )
        return dict(zip(self.drafters, costs, strict=True))

    def draft_log(
        self,
        name: str,
        agreement: list[Agreement],
        costs: StepCosts,
        decoded: dict[float, Decoded],
    ) -> DraftLog:
        """decoded: single prompts by temperature."""
        target, drafter, length = self.target, self.drafters[name], self.lengths[name]
        runs, baseline = _single(decoded[self.decoding.sampling.temperature], name)
        return DraftLog(
            name=name,
            path=drafter.path,
            form=drafter.form,
            vocabulary=dict(drafter.vocabulary),
            runs=runs,
            baseline=baseline,
            lossless=self._compared(name, decoded[0.0]),
            gamma=length.gamma,
            gamma_policy=self._policy(length),
            agreement=agreement,
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
        )

    def _policy(self, length: DraftLength) -> str:
        if self.plan.gamma is not None:
            return "fixed"
        kind = f"stops below {length.stop_below:g}" if length.stop_below else "fixed"
        return f"{kind}, fastest on {len(self.tuning.prompts)} other prompts"

    def _compared(self, name: str, decoded: Decoded) -> dict[str, Any]:
        """The ledger of greedy texts, its tokens as text."""
        stage, batches = f"texts of {name} compared", self.timed.batches(1)
        drafter, length = self.drafters[name], self.lengths[name]
        ledger = self.journal.once(
            stage,
            lambda: self.check.ledger(drafter, length, batches, decoded[BASELINE], decoded[name]),
        )
        for entry in ledger["divergences"]:
            for side in ("target", "drafted"):
                entry[side] = b"".join(map(self.spell, entry[side])).decode("utf-8", "replace")
        return dict(ledger)


def _single(decoded: Decoded, name: str) -> tuple[list[PromptRun], list[PromptRun]]:
    """A draft's runs of single prompts, and the baseline's."""
    runs, baseline = ([run for (run,) in decoded[contender]] for contender in (name, BASELINE))
    return runs, baseline


def _dtype(target: Target) -> str:
    return str(target.decoder.dtype).removeprefix("torch.")


def _begin(
    journal: Journal,
    target: Target,
    drafters: Mapping[str, Drafter],
    parts: Sequence[PromptSet],
    decoding: Decoding,
    plan: Plan,
) -> None:
    """Go on from what the journal holds of exactly these models, prompts and settings."""
    ids, dtype = parts[0].ids[0][:PROBED_TOKENS], _dtype(target)
    logits = teacher_forced_logits(target.decoder, ids, 1)
    known_by = [_hash_of_numbers(target.spec, logits, dtype)]
    known_by += [_hash_of_numbers(name, d.probe(ids), dtype) for name, d in drafters.items()]
    journal.begin(
        known_by,
        [(name, drafter.path, drafter.vocabulary) for name, drafter in drafters.items()],
        [(part.ids, [(p.id, p.category, p.group) for p in part.prompts]) for part in parts],
        asdict(decoding) | {"stops": sorted(decoding.stops)},
        asdict(plan),
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


def spelling(target: Target) -> tuple[Callable[[int], bytes], frozenset[int]]:
    """The bytes of a token id of the target, none for one that no token has; its special ids."""
    tokens = tokens_of(target.tokenizer)

    def spell(token: int) -> bytes:
        spelt = tokens[token] if token < len(tokens) else None
        return spelt[1] if spelt else b""

    return spell, frozenset(i for i, t in enumerate(tokens) if t and t[0] == "special")


def device_name(device: torch.device) -> str:
    """The GPU's name, or how many CPU threads were used."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({torch.get_num_threads()} threads)"


def context_length(ids: Sequence[Sequence[int]], max_new_tokens: int, max_gamma: int) -> int:
    """Positions that the longest prompt, its answer and one draft beyond it may take."""
    return max(map(len, ids)) + max_new_tokens + max_gamma + 1
