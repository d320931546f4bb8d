"""transformers' assisted generation against its stock `generate`, on the same target.

Both are timed as their users call them (huggingface.co/docs/transformers, "Assisted decoding"), at
batch size 1 with a fixed gamma. What each target call drafted and emitted is read off from outside:
a streamer sees the tokens emitted, a hook the target's inputs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from align.check import compare
from align.sources import load_tokenizer
from align.vocabulary import read_vocabulary
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.target import load_on, model_bytes, stop_tokens, tensor_sha256
from eval.decoding.verification import Sampling
from eval.engines.log import decoding, log_blocks, missing, prompt_run, prompts_used
from eval.measuring.build import build_report
from eval.measuring.evaluation import device_name
from eval.measuring.journal import Journal
from eval.measuring.log import DraftLog, PromptRun, RunLog
from eval.measuring.losslessness import divergence, ledger, tie
from eval.measuring.timing import in_turns
from eval.prompts import Prompt, PromptSet
from eval.reporting.report import Report

GAMMA_POLICY = "fixed; a drafted end of text ends a draft"


@dataclass
class StockTarget:
    """The target as transformers runs it."""

    spec: str
    model: Any  # transformers wraps `generate` in a type that mypy cannot call
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]


@dataclass
class Assistant:
    """A draft with the target's token ids, as transformers runs it."""

    name: str
    spec: str
    model: Any
    vocabulary: dict[str, Any]


def load_stock(spec: str, dtype: torch.dtype, device: str) -> StockTarget:
    """The target of a spec, device as of `load_on`. Raises SourceError when it cannot be read."""
    model, tokenizer = load_on(spec, dtype, device), load_tokenizer(spec)
    stops = stop_tokens(model, tokenizer)
    # `generate` fills what a call leaves open from here: a checkpoint's repetition penalty, say
    model.generation_config = GenerationConfig()
    return StockTarget(spec, model, tokenizer, stops)


def load_assistant(name: str, spec: str, target: StockTarget, gamma: int) -> Assistant:
    """A draft for assisted generation, gamma tokens a time.

    Raises ValueError for what transformers cannot draft with, or not without loss.
    """
    if spec == "prompt-lookup":
        raise ValueError(f"Draft {name!r}: {spec} has no model to assist; use --engine torch.")
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
    model = load_on(spec, target.model.dtype, str(target.model.device))
    rows, target_rows = (m.config.get_text_config().vocab_size for m in (model, target.model))
    if rows != target_rows:
        raise ValueError(
            f"Draft {name!r}: its head has {rows} rows, the target's {target_rows}, and "
            f"transformers takes equal ones only; pad the draft's (resize_token_embeddings), or "
            f"use --engine torch."
        )
    # arguments of `generate` are not asked for these; the defaults draft 20, and fewer when unsure
    model.generation_config = GenerationConfig(
        num_assistant_tokens=gamma,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    vocabulary = {key: getattr(verdict, key) for key in ("relation", "strategy", "coverage")}
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


def generate(
    target: StockTarget, assistant: Assistant | None, prompt: Prompt, ids: list[int], how: Decoding
) -> PromptRun:
    """One prompt through `generate`, assisted or not, as its user would call it."""
    inputs: list[Tensor] = []
    clock = _Clock()
    hook = target.model.register_forward_pre_hook(
        lambda _, args, given: inputs.append(given["input_ids"]), with_kwargs=True
    )
    torch.manual_seed(seed_of(how.seed, prompt.id))
    start = time.perf_counter()
    try:
        _call(target, assistant, ids, how, streamer=clock)
    finally:
        hook.remove()
    _, *emitted = clock.blocks  # the prompt comes first
    seconds = [end - begin for begin, end in pairwise([start, *clock.times[1:]])]
    drafted = [call[0, len(ids) if i == 0 else 1 :].tolist() for i, call in enumerate(inputs)]
    gamma = assistant.model.generation_config.num_assistant_tokens if assistant else 0
    return log_blocks(
        prompt_run(prompt, len(ids), seconds, emitted), drafted, emitted, gamma, how.max_new_tokens
    )


def _call(
    target: StockTarget,
    assistant: Assistant | None,
    ids: list[int],
    how: Decoding,
    streamer: BaseStreamer | None = None,
    logits: bool = False,
) -> Any:
    sampled: dict[str, Any] = asdict(how.sampling) | {"top_k": how.sampling.top_k or 0}  # None: 50
    config = GenerationConfig(
        max_new_tokens=how.max_new_tokens,
        do_sample=not how.sampling.greedy,
        eos_token_id=sorted(how.stops) or None,
        pad_token_id=min(how.stops, default=None),
        output_logits=logits,
        return_dict_in_generate=logits,
        **({} if how.sampling.greedy else sampled),
    )
    tokens = torch.tensor([ids], device=target.model.device)
    return target.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=config,
        assistant_model=assistant and assistant.model,
        streamer=streamer,
    )


def measure_assisted(
    target: StockTarget,
    assistants: Sequence[Assistant],
    timed: PromptSet,
    how: Decoding,
    gamma: int,
    journal: Journal,
    provenance: dict[str, Any],
) -> Report:
    """The report of every draft against stock `generate`, on the same prompts.

    journal: keeps the runs, for a process that takes over.
    """
    device, dtype = device_name(target.model.device), str(target.model.dtype)
    journal.begin(
        [_fingerprint(m, timed.ids[0]) for m in (target.model, *(a.model for a in assistants))],
        [assistant.name for assistant in assistants],
        (timed.ids, [(prompt.id, prompt.category, prompt.group) for prompt in timed.prompts]),
        asdict(how) | {"stops": sorted(how.stops)},
        gamma,
        (device, dtype, transformers.__version__),
    )
    rows = list(zip(timed.prompts, timed.ids, strict=True))

    def in_all_ways(how: Decoding) -> list[list[PromptRun]]:
        """Every prompt without a draft and with each: [baseline, *drafts]."""
        ways = [partial(generate, target, one, how=how) for one in (None, *assistants)]
        for way in ways:  # warm-up, not counted
            way(*rows[0])
        stage = f"speed at T={how.sampling.temperature:g}"
        return in_turns(ways, rows, journal, stage, PromptRun.from_json)

    baseline, *runs = in_all_ways(how)
    greedy = replace(how, sampling=Sampling())  # losslessness is always measured greedily
    plain, *greedy_runs = [baseline, *runs] if how.sampling.greedy else in_all_ways(greedy)
    drafts = [
        DraftLog(
            name=assistant.name,
            path=assistant.spec,
            form="full",
            vocabulary=assistant.vocabulary,
            runs=drafted,
            baseline=baseline,
            lossless=_compare(target, assistant, timed, greedy, plain, compared),
            gamma=gamma,
            gamma_policy=GAMMA_POLICY,
            memory={
                "target_bytes": model_bytes(target.model),
                "draft_bytes": model_bytes(assistant.model),
                "kv_bytes_per_token": {
                    "target": _kv_bytes(target.model),
                    "draft": _kv_bytes(assistant.model),
                },
            },
            full_form_bytes=model_bytes(assistant.model),
            missing=missing("transformers"),
        )
        for assistant, drafted, compared in zip(assistants, runs, greedy_runs, strict=True)
    ]
    log = RunLog(
        target=target.spec,
        engine="transformers",
        device=device,
        dtype=dtype.removeprefix("torch."),
        decoding=decoding(
            how,
            [run.tokens[-1] in how.stops for run in baseline],
            gamma=gamma,
            gamma_policy=GAMMA_POLICY,
        ),
        prompts=prompts_used(timed),
        provenance=provenance | {"resumed": journal.resumed},
    )
    return build_report(log, drafts)


@torch.inference_mode()
def _fingerprint(model: Any, ids: list[int]) -> str:
    """What a model is known by: the hash of its logits after a prompt."""
    return tensor_sha256(model(torch.tensor([ids], device=model.device)).logits)


@torch.inference_mode()
def _kv_bytes(model: Any) -> int:
    """Bytes that the cache takes for one token."""
    token = torch.ones((1, 1), dtype=torch.long, device=model.device)
    cache = model(token, use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _compare(
    target: StockTarget,
    assistant: Assistant,
    timed: PromptSet,
    how: Decoding,
    baseline: Sequence[PromptRun],
    runs: Sequence[PromptRun],
) -> dict[str, Any]:
    """The ledger of greedy texts.

    As in our own check, a divergence is a tie where the two ways' logits at that position explain
    the gap between the two tokens, and the texts agree in fp32.
    """

    @cache
    def in_fp32() -> list[Any]:
        parts = (target, assistant)
        return [replace(part, model=copy.deepcopy(part.model).float()) for part in parts]

    entries = []
    for prompt, ids, base, run in zip(timed.prompts, timed.ids, baseline, runs, strict=True):
        if base.tokens == run.tokens:
            continue
        entry = divergence(base, run, lambda token: str(target.tokenizer.decode(token)))
        at = entry["position"]
        if at < min(len(base.tokens), len(run.tokens)):  # lengths can never differ by a tie
            single, wide = (
                _call(target, draft, ids, how, logits=True).logits[at][0].float()
                for draft in (None, assistant)
            )
            entry |= tie(single, wide, base.tokens[at], run.tokens[at])
        if entry["tie"]:
            exact, exact_draft = in_fp32()
            one, other = (generate(exact, a, prompt, ids, how) for a in (None, exact_draft))
            entry["tie"] = one.tokens == other.tokens
        entries.append(entry)
    return ledger(len(runs), entries)
