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
from functools import cached_property
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
from eval.engines.driven import DrivenEngine, LoadedDraft, Parting
from eval.engines.log import log_blocks
from eval.measuring.evaluation import device_name
from eval.measuring.losslessness import tie
from eval.measuring.runs import PromptRun
from eval.prompts import Prompt


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
        PromptRun.of(prompt, len(ids), seconds, emitted),
        drafted,
        emitted,
        gamma,
        how.max_new_tokens,
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


class Assisted(DrivenEngine):
    """`generate` of transformers, assisted by these drafts or by none."""

    name = "transformers"
    gamma_policy = "fixed; a drafted end of text ends a draft"

    def __init__(self, target: StockTarget, assistants: Sequence[Assistant]) -> None:
        self.stock, self.assistants, self.target = target, assistants, target.spec
        self.device, dtype = device_name(target.model.device), str(target.model.dtype)
        self.dtype = dtype.removeprefix("torch.")
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        models = [target.model, *(one.model for one in assistants)]
        self.known_by = [_fingerprint(model) for model in models]
        self.loaded = []
        for one in assistants:
            kv_bytes = {"target": _kv_bytes(target.model), "draft": _kv_bytes(one.model)}
            size = model_bytes(one.model)
            taken = {"target_bytes": model_bytes(target.model), "draft_bytes": size}
            memory = taken | {"kv_bytes_per_token": kv_bytes}
            draft = LoadedDraft(one.name, one.spec, one.vocabulary, memory, size)
            self.loaded.append(draft)

    @cached_property
    def _in_fp32(self) -> list[Any]:
        parts: list[Any] = [self.stock, *self.assistants]
        return [replace(part, model=copy.deepcopy(part.model).float()) for part in parts]

    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], how: Decoding, gamma: int
    ) -> PromptRun:
        """gamma: as of `load_assistant`."""
        assistant = None if draft is None else self.assistants[draft]
        return generate(self.stock, assistant, prompt, ids, how)

    def tie(self, draft: int, at: Parting) -> dict[str, Any]:
        """As in our own check: both ways' logits explain the gap, and the texts agree in fp32."""
        ways = None, self.assistants[draft]
        outputs = [_call(self.stock, way, at.ids, at.how, logits=True) for way in ways]
        single, wide = (output.logits[at.position][0].float() for output in outputs)
        found = tie(single, wide, *at.tokens)
        if found["tie"]:
            exact, *drafts = self._in_fp32
            exactly = [generate(exact, a, at.prompt, at.ids, at.how) for a in (None, drafts[draft])]
            found["tie"] = exactly[0].tokens == exactly[1].tokens
        return found

    def text_of(self, tokens: list[int]) -> str:
        return str(self.stock.tokenizer.decode(tokens))


@torch.inference_mode()
def _fingerprint(model: Any) -> str:
    """What a model is known by: the hash of its logits after a few tokens."""
    return tensor_sha256(model(torch.arange(8, device=model.device)[None]).logits)


@torch.inference_mode()
def _kv_bytes(model: Any) -> int:
    """Bytes that the cache takes for one token."""
    token = torch.ones((1, 1), dtype=torch.long, device=model.device)
    cache = model(token, use_cache=True).past_key_values
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
