"""transformers' assisted generation against its stock `generate`, on the same target.

Both are timed as their users call them (huggingface.co/docs/transformers, "Assisted decoding"), at
batch size 1 with a fixed gamma. What each target call drafted and emitted is read off from outside:
a streamer sees the tokens emitted, a hook those that the target was fed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from align.check import compare
from align.sources import load_model, load_tokenizer
from align.vocabulary import read_vocabulary
from eval.decoding.drafts import model_bytes, stop_tokens, tensor_sha256
from eval.decoding.lookup import LOOKUP
from eval.decoding.loop import Decoding, empty_run
from eval.decoding.verification import Sampling
from eval.engines.outside import draft_block, emitted_run
from eval.measuring import metrics
from eval.measuring.evaluation import PromptSet, device_name
from eval.measuring.journal import Journal
from eval.measuring.losslessness import tie
from eval.measuring.metrics import PromptRun
from eval.measuring.timing import in_turns
from eval.prompts import Prompt, prompts_sha256
from eval.reporting.report import SCHEMA, finished

NO_DISTRIBUTIONS = "generate does not give the draft's distributions: take it with --engine torch"
NO_STEPS = "single steps are not timed in generate: see --engine torch"
REASONS = {
    "alpha": NO_DISTRIBUTIONS,
    "costs": NO_STEPS,
    "c": NO_STEPS,
    "verify_ratio": NO_STEPS,
    "predicted_speedup": NO_STEPS,
    "decode_efficiency": NO_STEPS,
    "payoff": NO_STEPS,
    "waterfall": NO_STEPS,
    "gamma_curve": NO_STEPS,
    "atlas": NO_DISTRIBUTIONS,
}


@dataclass
class StockTarget:
    """The target as transformers runs it."""

    spec: str
    model: Any  # transformers wraps `generate` in a type that mypy cannot call
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]


@dataclass
class Assistant:
    """A draft that speaks the target's ids, as transformers runs it."""

    name: str
    spec: str
    model: Any
    vocabulary: dict[str, Any]


def load_stock(spec: str, dtype: torch.dtype, device: torch.device) -> StockTarget:
    """The target of a spec. Raises SourceError when it cannot be read."""
    loaded: Any = load_model(spec, dtype)
    model, tokenizer = loaded.to(device), load_tokenizer(spec)
    stops = stop_tokens(model, tokenizer)
    # `generate` fills what a call leaves open from here: a checkpoint's repetition penalty, say
    model.generation_config = GenerationConfig()
    return StockTarget(spec, model, tokenizer, stops)


def load_assistant(name: str, spec: str, target: StockTarget, gamma: int) -> Assistant:
    """A draft for assisted generation, gamma tokens a time.

    Raises ValueError for what transformers cannot draft with, or not without loss.
    """
    if spec == LOOKUP:
        raise ValueError(f"Draft {name!r}: {LOOKUP} has no model to assist; use --engine torch.")
    if (Path(spec) / "compact.json").is_file():
        raise ValueError(
            f"Draft {name!r}: {spec} is the compact form, which our own decoder reads alone; give "
            f"the full form beside it, {Path(spec).parent}."
        )
    verdict = compare(read_vocabulary(target.spec), read_vocabulary(spec))
    if verdict.strategy not in ("direct", "padded"):
        raise ValueError(
            f"Draft {name!r}: its vocabulary is {verdict.relation} to the target's, and what "
            f"transformers does across tokenizers changes the text; tune the draft for this target "
            f"(distill/train.py) and give its draft/, or use --engine torch, which bridges them "
            f"without loss."
        )
    loaded: Any = load_model(spec, target.model.dtype)
    rows, target_rows = (m.config.get_text_config().vocab_size for m in (loaded, target.model))
    if rows != target_rows:
        raise ValueError(
            f"Draft {name!r}: its head has {rows} rows, the target's {target_rows}, and "
            f"transformers takes equal ones only; pad the draft's (resize_token_embeddings), or "
            f"use --engine torch."
        )
    model = loaded.to(target.model.device)
    # arguments of `generate` are not asked for these; the defaults draft 20, and fewer when unsure
    model.generation_config = GenerationConfig(
        num_assistant_tokens=gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    vocabulary = {
        "relation": verdict.relation,
        "strategy": verdict.strategy,
        "coverage": verdict.coverage,
    }
    return Assistant(name, spec, model, vocabulary)


class _Clock(BaseStreamer):
    """The tokens of each target call, and when they were there."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.blocks.append(value.flatten().tolist())

    def end(self) -> None:
        self.times[-1] = time.perf_counter()


@dataclass(frozen=True)
class Answer:
    """One answer, and the part of it that tau is taken on.

    decode: without what was drafted for the prefill: transformers drafts before the target's first
    call, so that the prefill is a verification, too.
    """

    run: PromptRun
    decode: PromptRun

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(PromptRun.from_json(fields["run"]), PromptRun.from_json(fields["decode"]))


def generate(
    target: StockTarget, assistant: Assistant | None, prompt: Prompt, ids: list[int], how: Decoding
) -> Answer:
    """One prompt through `generate`, assisted or not, as its user would call it."""
    fed: list[Tensor] = []
    clock = _Clock()
    hook = target.model.register_forward_pre_hook(
        lambda _, args, given: fed.append(given["input_ids"]), with_kwargs=True
    )
    torch.manual_seed(how.seed)
    start = time.perf_counter()
    try:
        _call(target.model, assistant and assistant.model, ids, how, clock)
    finally:
        hook.remove()
    _, *blocks = clock.blocks  # the prompt comes first
    ends = [start, *clock.times[1:]]
    seconds = [end - begin for begin, end in pairwise(ends)]
    drafted = [call[0, len(ids) if i == 0 else 1 :].tolist() for i, call in enumerate(fed)]
    gamma = assistant.model.generation_config.num_assistant_tokens if assistant else 0
    return Answer(
        emitted_run(prompt, len(ids), list(zip(seconds, blocks, strict=True))),
        decode_phase(prompt, ids, how, gamma, seconds, drafted, blocks),
    )


def _call(
    model: Any,
    assistant: Any,
    ids: list[int],
    how: Decoding,
    streamer: BaseStreamer | None = None,
    **wanted: Any,
) -> Any:
    sampled: dict[str, Any] = {
        "temperature": how.sampling.temperature,
        "top_k": how.sampling.top_k or 0,  # left out, it is 50
        "top_p": how.sampling.top_p,
    }
    config = GenerationConfig(
        max_new_tokens=how.max_new_tokens,
        do_sample=not how.sampling.greedy,
        eos_token_id=sorted(how.stops) or None,
        pad_token_id=min(how.stops, default=None),
        **({} if how.sampling.greedy else sampled),
        **wanted,
    )
    tokens = torch.tensor([ids], device=model.device)
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=config,
        assistant_model=assistant,
        streamer=streamer,
    )


def decode_phase(
    prompt: Prompt,
    ids: list[int],
    how: Decoding,
    gamma: int,
    seconds: Sequence[float],
    drafted: Sequence[list[int]],
    emitted: Sequence[list[int]],
) -> PromptRun:
    """The log of the target calls after the first one, one entry a call in each sequence.

    A drafted token was accepted where it was emitted: the target's own choice after a rejection is
    another one, also when sampled (its residual is 0 at the rejected token).
    """
    run = empty_run(prompt, ids, emitted[0][-1:], seconds[0])
    done = len(emitted[0])
    for spent, draft, block in zip(seconds[1:], drafted[1:], emitted[1:], strict=True):
        pairs = enumerate(zip(draft, block, strict=False))
        accepted = next((i for i, (a, b) in pairs if a != b), min(len(draft), len(block)))
        room = how.max_new_tokens - done - 1
        done += len(block)
        run.tokens.extend(block)
        run.block_seconds.append(spent)
        run.block_tokens.append(len(block))
        run.drafted.append(len(draft))
        run.accepted.append(accepted)
        run.last_truncated = accepted == len(block) or len(draft) == room < gamma
    return run


def measure_assisted(
    target: StockTarget,
    assistants: Sequence[Assistant],
    timed: PromptSet,
    how: Decoding,
    gamma: int,
    journal: Journal,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """The report of every draft against stock `generate`, on the same prompts.

    journal: keeps the runs, for a process that takes over.
    """
    journal.begin(
        [_said(model, timed.ids[0]) for model in (target.model, *(a.model for a in assistants))],
        [assistant.name for assistant in assistants],
        (timed.ids, [(prompt.id, prompt.category) for prompt in timed.prompts]),
        asdict(how) | {"stops": sorted(how.stops)},
        gamma,
        (device_name(target.model.device), str(target.model.dtype), transformers.__version__),
    )
    baseline, *logs = _interleave(target, assistants, timed, how, journal)
    greedy = replace(how, sampling=Sampling())  # losslessness is always measured greedily
    texts = [baseline, *logs] if how.sampling.greedy else None
    plain, *greedy_logs = texts or _interleave(target, assistants, timed, greedy, journal)
    drafts = {}
    for assistant, log, greedy_log in zip(assistants, logs, greedy_logs, strict=True):
        lossless = _ledger(target, assistant, timed, greedy, plain, greedy_log)
        drafts[assistant.name] = _block(target, assistant, log, baseline, lossless)
    gain = [
        {
            "draft": assistant.name,
            "over": assistants[0].name,
            "alpha": None,
            "tau": metrics.tau_gain(_decodes(log), _decodes(logs[0])),
            "speedup": metrics.speedup_gain(
                _runs(log), _runs(baseline), _runs(logs[0]), _runs(baseline)
            ),
        }
        for assistant, log in zip(assistants[1:], logs[1:], strict=True)
    ]
    stopped = [answer.run.tokens[-1] in how.stops for answer in baseline]
    return finished(
        {
            "schema": SCHEMA,
            "target": target.spec,
            "engine": "transformers",
            "device": device_name(target.model.device),
            "dtype": str(target.model.dtype).removeprefix("torch."),
            "baseline": {
                "tokens_per_s": metrics.tokens_per_s(_runs(baseline)),
                "over_stock_generate": None,  # it is stock generate
            },
            "decoding": {
                "temperature": how.sampling.temperature,
                "top_k": how.sampling.top_k,
                "top_p": how.sampling.top_p,
                "max_new_tokens": how.max_new_tokens,
                "gamma": gamma,
                "gamma_policy": "fixed; a drafted end of text ends a draft",
                "verification": "greedy match" if how.sampling.greedy else "rejection sampling",
                "stop_tokens": len(how.stops),
                "ended_by_stop": sum(stopped) / len(stopped),
            },
            "prompts": {
                "source": timed.source,
                "n": len(timed.prompts),
                "sha256": prompts_sha256(timed.prompts),
                "overlap_with_training": None,
                "bits_per_token": None,
                "random_bits": None,
            },
            "drafts": drafts,
            "gain": gain,
            "provenance": provenance | {"resumed": journal.resumed},
        }
    )


@torch.inference_mode()
def _said(model: Any, ids: list[int]) -> str:
    """What a model is known by: the hash of its logits after a prompt."""
    return tensor_sha256(model(torch.tensor([ids], device=model.device)).logits)


def _runs(log: Sequence[Answer]) -> list[PromptRun]:
    return [answer.run for answer in log]


def _decodes(log: Sequence[Answer]) -> list[PromptRun]:
    return [answer.decode for answer in log]


def _interleave(
    target: StockTarget,
    assistants: Sequence[Assistant],
    timed: PromptSet,
    how: Decoding,
    journal: Journal,
) -> list[list[Answer]]:
    """Every prompt without a draft and with each: [baseline, *drafts]."""
    decoders = [partial(generate, target, assistant, how=how) for assistant in (None, *assistants)]
    rows = list(zip(timed.prompts, timed.ids, strict=True))
    for decode in decoders:  # warm-up, not counted
        decode(*rows[0])
    stage = f"speed at T={how.sampling.temperature:g}"
    return in_turns(decoders, rows, journal, stage, Answer.from_json, "prompt")


def _block(
    target: StockTarget,
    assistant: Assistant,
    log: Sequence[Answer],
    baseline: Sequence[Answer],
    lossless: dict[str, Any],
) -> dict[str, Any]:
    decode, plain = _decodes(log), _decodes(baseline)
    metrics.check_runs(decode)
    block = draft_block(_runs(log), _runs(baseline), lossless)
    weights, draft_weights = model_bytes(target.model), model_bytes(assistant.model)
    for row, run in zip(block["per_prompt"], decode, strict=True):
        row |= {
            "blocks": run.whole_blocks,
            "block_tokens": sum(run.block_tokens[: run.whole_blocks]),
            "drafted": sum(run.drafted[: run.whole_blocks]),
            "accepted": sum(run.accepted[: run.whole_blocks]),
        }
    return block | {
        "path": assistant.spec,
        "form": "full",
        "vocabulary": assistant.vocabulary,
        "tau": metrics.tau(decode),
        "mean_drafted": metrics.mean_drafted(decode),
        "accepted_over_drafted": metrics.accepted_over_drafted(decode),
        "per_position": metrics.per_position(decode),
        "decode_speedup": metrics.decode_speedup(decode, plain),
        "memory": {
            "target_bytes": weights,
            "draft_bytes": draft_weights,
            "kv_bytes_per_token": {
                "target": _kv_bytes(target.model),
                "draft": _kv_bytes(assistant.model),
            },
            "overhead": draft_weights / weights,
            "full_form_bytes": draft_weights,
        },
        "by_category": {
            name: row | {"tau": numbers["tau"]}
            for (name, row), numbers in zip(
                block["by_category"].items(),
                metrics.by_category([], decode, plain).values(),
                strict=True,
            )
        },
        "missing": [{"field": field, "reason": reason} for field, reason in REASONS.items()],
    }


@torch.inference_mode()
def _kv_bytes(model: Any) -> int:
    """Bytes that the cache takes for one token."""
    token = torch.ones((1, 1), dtype=torch.long, device=model.device)
    cache = model(token, use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _ledger(
    target: StockTarget,
    assistant: Assistant,
    timed: PromptSet,
    how: Decoding,
    baseline: Sequence[Answer],
    log: Sequence[Answer],
) -> dict[str, Any]:
    """Greedy texts compared.

    As in our own check, a divergence is a tie when the two tokens' logits lie no further apart
    than both ways' logits at that position, and the texts agree in fp32.
    """
    rows = zip(timed.prompts, timed.ids, _runs(baseline), _runs(log), strict=True)
    other = [row for row in rows if row[2].tokens != row[3].tokens]
    entries = [_divergence(target, assistant, how, *row) for row in other]
    if any(entry["tie"] for entry in entries):
        exact = replace(target, model=copy.deepcopy(target.model).float())
        exact_draft = replace(assistant, model=copy.deepcopy(assistant.model).float())
        for entry, (prompt, ids, _, _) in zip(entries, other, strict=True):
            if entry["tie"]:
                texts = [generate(exact, one, prompt, ids, how) for one in (None, exact_draft)]
                entry["tie"] = texts[0].run.tokens == texts[1].run.tokens
    return metrics.ledger(len(log), entries)


def _divergence(
    target: StockTarget,
    assistant: Assistant,
    how: Decoding,
    prompt: Prompt,
    ids: list[int],
    plain: PromptRun,
    drafted: PromptRun,
) -> dict[str, Any]:
    """Where two texts part; `tie` says whether the gap of the logits there is within the error."""
    texts = (plain.tokens, drafted.tokens)
    at = metrics.first_divergence(*texts)
    sides = [target.tokenizer.decode(text[at : at + 1]) for text in texts]
    about = {"prompt": prompt.id, "position": at, "target": sides[0], "drafted": sides[1]}
    if at == min(map(len, texts)):  # lengths can never differ by a tie
        return about | {"gap": None, "error": None, "tie": False}
    single, wide = (
        _call(target.model, draft, ids, how, output_logits=True, return_dict_in_generate=True)
        .logits[at][0]
        .float()
        for draft in (None, assistant.model)
    )
    return about | tie(single, wide, texts[0][at], texts[1][at])
