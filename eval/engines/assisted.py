"""transformers' assisted generation against its stock `generate`, on the same target.

Both are timed as their users call them (huggingface.co/docs/transformers, "Assisted decoding"), at
batch size 1 with a fixed gamma. What each target call drafted and emitted is read off from outside:
a streamer sees the tokens emitted, a hook the target's inputs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from align.check import compare
from align.sources import load_tokenizer
from align.transplant import resized
from align.vocabulary import read_vocabulary
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.target import load_on, model_bytes, stop_tokens, tensor_sha256
from eval.engines.driven import DrivenEngine, LoadedDraft, log_blocks
from eval.measuring.evaluation import device_name
from eval.measuring.losslessness import PARTS_IN_FP32, tie
from eval.measuring.runs import PromptRun
from eval.prompts import Prompt


class Assisted(DrivenEngine):
    """`generate` of transformers, assisted by drafts that were added or by none.

    model: Any, as transformers wraps `generate` in a type that mypy cannot call.
    """

    name = "transformers"
    gamma_policy = "fixed; a drafted end of text ends a draft"

    def __init__(
        self, spec: str, model: Any, tokenizer: PreTrainedTokenizerBase, gamma: int
    ) -> None:
        self.target, self.model, self.tokenizer, self.gamma = spec, model, tokenizer, gamma
        self.stops = stop_tokens(model, tokenizer)
        # `generate` fills what a call leaves open from here: a checkpoint's repetition penalty, say
        model.generation_config = GenerationConfig()
        self.device, self.dtype = device_name(model.device), str(model.dtype)[len("torch.") :]
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self.known_by = [_fingerprint(model)]
        self.assistants: list[Any] = []
        self.loaded = []

    @classmethod
    def load(
        cls, spec: str, drafts: Mapping[str, str], gamma: int, dtype: torch.dtype, device: str
    ) -> Self:
        """The target and drafts of these specs, device as of `load_on`.

        Raises SourceError for what cannot be read, ValueError for what transformers cannot draft
        with, or not without loss.
        """
        engine = cls(spec, load_on(spec, dtype, device), load_tokenizer(spec), gamma)
        for name, draft in drafts.items():
            if draft == "prompt-lookup" or (Path(draft) / "compact.json").is_file():
                raise ValueError(
                    f"Draft {name!r}: {draft} is no checkpoint that transformers loads; give a "
                    f"draft's full form (the folder above compact/), or use --engine torch."
                )
            vocabulary = read_vocabulary(draft)
            verdict = compare(read_vocabulary(spec), vocabulary)
            if verdict.strategy not in ("direct", "padded"):
                raise ValueError(
                    f"Draft {name!r}: its vocabulary is {verdict.relation} to the target's, and "
                    f"what transformers does across tokenizers changes the text; tune the draft "
                    f"for this target (distill/train.py), or use --engine torch, which bridges "
                    f"them without loss."
                )
            # transformers takes equal sizes only
            rows = engine.model.config.get_text_config().vocab_size
            model = resized(load_on(draft, dtype, str(engine.model.device)), vocabulary, rows)
            about = {key: getattr(verdict, key) for key in ("relation", "strategy", "coverage")}
            engine.add(name, draft, model, about)
        return engine

    def add(self, name: str, spec: str, model: Any, vocabulary: dict[str, Any]) -> None:
        """A draft with the target's token ids."""
        # arguments of `generate` are not asked for these; the defaults draft 20, fewer when unsure
        model.generation_config = GenerationConfig(
            num_assistant_tokens=self.gamma,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
        )
        self.assistants.append(model)
        self.known_by.append(_fingerprint(model))
        kv_bytes = {"target": _kv_bytes(self.model), "draft": _kv_bytes(model)}
        taken = {"target_bytes": model_bytes(self.model), "draft_bytes": model_bytes(model)}
        memory = taken | {"kv_bytes_per_token": kv_bytes}
        self.loaded.append(LoadedDraft(name, spec, vocabulary, memory, model_bytes(model)))

    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], decoding: Decoding
    ) -> PromptRun:
        """One prompt through `generate`, assisted or not, as its user would call it."""
        inputs: list[Tensor] = []
        clock = _Clock()
        hook = self.model.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(kwargs["input_ids"]), with_kwargs=True
        )
        torch.manual_seed(seed_of(decoding.seed, prompt.id))
        start = time.perf_counter()
        try:
            self._generate(draft, ids, decoding, streamer=clock)
        finally:
            hook.remove()
        _, *emitted = clock.blocks  # the prompt comes first
        seconds = [end - begin for begin, end in pairwise([start, *clock.times[1:]])]
        drafted = [call[0, len(ids) if i == 0 else 1 :].tolist() for i, call in enumerate(inputs)]
        run = PromptRun.of(prompt, len(ids), seconds, emitted)
        return log_blocks(
            run, drafted, emitted, 0 if draft is None else self.gamma, decoding.max_new_tokens
        )

    def _generate(
        self,
        draft: int | None,
        ids: list[int],
        decoding: Decoding,
        streamer: BaseStreamer | None = None,
        logits: bool = False,
    ) -> Any:
        sampled: dict[str, Any] = asdict(decoding.sampling)
        sampled["top_k"] = decoding.sampling.top_k or 0  # None would be 50
        config = GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=not decoding.sampling.greedy,
            eos_token_id=sorted(decoding.stops) or None,
            pad_token_id=min(decoding.stops, default=None),
            output_logits=logits,
            return_dict_in_generate=logits,
            **({} if decoding.sampling.greedy else sampled),
        )
        tokens = torch.tensor([ids], device=self.model.device)
        return self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=config,
            assistant_model=None if draft is None else self.assistants[draft],
            streamer=streamer,
        )

    def tie(
        self,
        draft: int,
        prompt: Prompt,
        ids: list[int],
        decoding: Decoding,
        texts: tuple[list[int], list[int]],
        position: int,
    ) -> dict[str, Any]:
        """As in our own check: both ways' logits explain the gap, and the texts agree in fp32."""
        ways = None, draft
        outputs = [self._generate(way, ids, decoding, logits=True) for way in ways]
        single, wide = (output.logits[position][0].float() for output in outputs)
        explained = tie(single, wide, texts[0][position], texts[1][position])
        if explained["tie"]:
            exact = [self._in_fp32.decode(way, prompt, ids, decoding).tokens for way in ways]
            if exact[0] != exact[1]:
                explained |= PARTS_IN_FP32
        return explained

    @cached_property
    def _in_fp32(self) -> Assisted:
        exact = copy.copy(self)
        exact.model = copy.deepcopy(self.model).float()
        exact.assistants = [copy.deepcopy(model).float() for model in self.assistants]
        return exact

    def text_of(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


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
