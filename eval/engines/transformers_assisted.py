"""Compares transformers' assisted generation with its plain `generate`, on the same target.

Both are timed as users call them (huggingface.co/docs/transformers, "Assisted decoding"), at batch
size 1 with a fixed draft length. A streamer records the emitted tokens of each target call, and a
hook records its inputs, which are the drafted tokens.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.generation import BaseStreamer

from align.check import compare
from align.checkpoint import Checkpoint
from align.errors import UserError
from align.transplant import resized
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import device_count, model_bytes
from eval.engines.comparison import Comparison
from eval.engines.contender import Contender, Output, PromptOutputs, Task, runs_already
from eval.engines.visits import take_turns
from eval.measuring.environment import environment
from eval.measuring.evaluation import device_name
from eval.measuring.losslessness import DIVERGES_IN_FP32, tie
from eval.measuring.runs import REFERENCE_ONLY
from eval.prompts import Prompt
from eval.reporting.fields import Report

GAMMA_POLICY = "fixed; a drafted end of text ends a draft"


class Draft(NamedTuple):
    """A draft with the target's token ids. vocabulary: relation, strategy, coverage."""

    path: str
    model: Any
    vocabulary: dict[str, Any]


@dataclass(eq=False)
class Assisted:
    """`generate` of transformers as an `Engine`, with or without a draft (`assistant`).

    model, assistant: Any, because mypy cannot call the type in which transformers wraps `generate`.
    ids: token ids by prompt id.
    """

    model: Any
    ids: dict[str, list[int]]
    assistant: Any = None
    draft_length: int = 0

    def __post_init__(self) -> None:
        # `generate` takes missing options, such as a repetition penalty, from the checkpoint
        self.model.generation_config = GenerationConfig()
        if self.assistant is not None:
            # a call cannot set these; by default, up to 20 tokens are drafted, fewer if unsure
            self.assistant.generation_config = GenerationConfig(
                num_assistant_tokens=self.draft_length,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )

    def decode(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output, with the drafted tokens of each speculation step."""
        ids = self.ids[prompt.id]
        inputs: list[Tensor] = []
        clock = _Clock()
        hook = self.model.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(kwargs["input_ids"]), with_kwargs=True
        )
        torch.manual_seed(seed_of(decoding.seed, prompt.id))
        start = time.perf_counter()
        try:
            self._generate(ids, decoding, streamer=clock)
        finally:
            hook.remove()
        _, *emitted = clock.blocks  # the first block is the prompt
        seconds = [end - begin for begin, end in pairwise([start, *clock.times[1:]])]
        drafted = [call[0, len(ids) if i == 0 else 1 :].tolist() for i, call in enumerate(inputs)]
        run = PromptRun.of(prompt, len(ids), seconds, emitted)
        run = log_steps(run, drafted, emitted, self.draft_length, decoding.max_new_tokens)
        return Output(run, ids, run.tokens[-1] in decoding.stops)

    def _generate(self, ids: list[int], decoding: Decoding, **options: Any) -> Any:
        sampled: dict[str, Any] = asdict(decoding.sampling)
        sampled["top_k"] = decoding.sampling.top_k or 0  # None would mean the default, 50
        config = GenerationConfig(
            max_new_tokens=decoding.max_new_tokens,
            do_sample=not decoding.sampling.greedy,
            eos_token_id=sorted(decoding.stops) or None,
            pad_token_id=min(decoding.stops, default=None),
            **({} if decoding.sampling.greedy else sampled),
        )
        tokens = torch.tensor([ids], device=self.model.device)
        return self.model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=config,
            assistant_model=self.assistant,
            **options,
        )

    def is_up(self) -> bool:
        return True

    def read(self, greedy: Output) -> Assisted:
        """This engine, so that `explain` can compute logits with its draft again."""
        return self

    def explain(
        self, plain: Output, with_draft: PromptOutputs, position: int, greedy: Decoding
    ) -> dict[str, Any]:
        """As in `Engine`: a near-tie by the logits, if both outputs are also equal in fp32."""
        ids = plain.prompt_ids
        drafting: Any = with_draft.reading
        single, wide = (
            engine._generate(ids, greedy, output_logits=True, return_dict_in_generate=True)
            .logits[position][0]
            .float()
            for engine in (self, drafting)
        )
        tokens = plain.run.tokens[position], with_draft.greedy.run.tokens[position]
        entry = tie(single, wide, *tokens, self.model.dtype)
        if entry["tie"]:
            assistant = copy.deepcopy(drafting.assistant).float()
            exact = replace(drafting, model=self._model_in_fp32, assistant=assistant)
            outputs = [
                engine._generate(ids, greedy) for engine in (replace(exact, assistant=None), exact)
            ]
            if not torch.equal(*outputs):
                entry |= DIVERGES_IN_FP32
        return entry

    @torch.inference_mode()
    def logprob(self, output: Output) -> float:
        """As in `Engine`, from one forward, at temperature 1."""
        ids = torch.tensor([[*output.prompt_ids, *output.run.tokens]], device=self.model.device)
        first = len(output.prompt_ids)
        logprobs = self.model(ids).logits[0, first - 1 : -1].float().log_softmax(-1)
        return float(logprobs.gather(1, ids[0, first:, None]).mean())

    @cached_property
    def _model_in_fp32(self) -> Any:
        return copy.deepcopy(self.model).float()


def load_drafts(
    target: Checkpoint, model: Any, drafts: Mapping[str, str], dtype: torch.dtype
) -> dict[str, Draft]:
    """The drafts of these specs, by name. model: of the target.

    Raises SourceError for a draft that cannot be read, UserError for a draft that transformers
    cannot use without loss.
    """
    if model._is_stateful:
        raise UserError(
            f"transformers decodes {target.spec} without drafts only, because its cache cannot go "
            "back; measure it with --engine torch or vllm."
        )
    loaded = {}
    rows = model.config.get_text_config().vocab_size  # transformers needs equal sizes
    for name, draft in drafts.items():
        if draft == "prompt-lookup" or (Path(draft) / "compact.json").is_file():
            raise UserError(
                f"Draft {name!r}: transformers cannot load {draft}; use --engine torch."
            )
        opened = Checkpoint.open(draft)
        verdict = compare(target, opened)
        if verdict.strategy not in ("direct", "padded"):
            raise UserError(
                f"Draft {name!r}: its vocabulary is {verdict.relation} to the target's, so "
                f"transformers would change the output. Distil the draft for this target "
                f"(distill/train.py), or use --engine torch, which maps vocabularies without loss."
            )
        keys = ("relation", "strategy", "coverage")
        loaded[name] = Draft(
            draft,
            resized(opened.load(dtype, str(model.device)), opened.vocabulary, rows),
            {key: getattr(verdict, key) for key in keys},
        )
    return loaded


def measure_assisted(
    target: str,
    model: Any,
    drafts: Mapping[str, Draft],
    draft_length: int,
    task: Task,
    text_of: Callable[[list[int]], str],
) -> Report:
    """The report of every draft, compared with the target alone in transformers.

    model: of the target. text_of: returns the text of token ids.
    """
    version, gpus = transformers.__version__, device_count(model)
    machine = environment("transformers", version, model.device, gpus)
    prompts = task.prompts.prompts
    ids = dict(zip((prompt.id for prompt in prompts), task.prompts.ids, strict=True))
    engines = {"": Assisted(model, ids)}
    engines |= {
        name: Assisted(model, ids, draft.model, draft_length) for name, draft in drafts.items()
    }
    contenders = []
    for name, engine in engines.items():
        engine.decode(prompts[0], task.decoding)  # warm-up, not counted
        facts = _facts(model, drafts[name], draft_length) if name else {}
        contenders.append(Contender(runs_already(engine), name, facts))
    comparison = Comparison(contenders, task, text_of)
    comparison.run(take_turns)
    return comparison.report(
        [comparison.log(draft) for draft in comparison.drafting],
        "rejection sampling",
        len(task.decoding.stops),
        target=target,
        engine="transformers",
        device=device_name(model),
        dtype=str(model.dtype).removeprefix("torch."),
        environment=machine,
    )


def _facts(model: Any, draft: Draft, draft_length: int) -> dict[str, Any]:
    return {
        "path": draft.path,
        "form": "full",
        "vocabulary": draft.vocabulary,
        "gamma": draft_length,
        "gamma_policy": GAMMA_POLICY,
        "memory": {
            "target_bytes": model_bytes(model),
            "draft_bytes": model_bytes(draft.model),
            "kv_bytes_per_token": {"target": kv_bytes(model), "draft": kv_bytes(draft.model)},
        },
        "missing": REFERENCE_ONLY,
    }


def log_steps(
    run: PromptRun,
    drafted: Sequence[list[int]],
    emitted: Sequence[list[int]],
    draft_length: int,
    max_new_tokens: int,
) -> PromptRun:
    """Set the drafted and accepted tokens of each speculation step of the run; returns the run.

    drafted, emitted: tokens of each target call. The prefill is first; transformers drafts for it,
    too. A drafted token was accepted if it was emitted, because the token after a rejection is
    never the rejected one (in sampling, its residual is 0). draft_length: near the limit of
    max_new_tokens, fewer tokens are drafted.
    """
    done = run.prefill_tokens
    for i, (draft, step) in enumerate(zip(drafted[1:], emitted[1:], strict=True)):
        pairs = enumerate(zip(draft, step, strict=False))
        accepted = next((j for j, (a, b) in pairs if a != b), min(len(draft), len(step)))
        # an accepted stop token ends the draft, and no token of the target follows
        run.drafted[i] = len(step) if accepted == len(step) else len(draft)
        run.accepted[i] = accepted
        run.late += max_new_tokens - done - 1 < draft_length
        done += len(step)
    return run


class _Clock(BaseStreamer):
    """Records the tokens of each target call, and the time at which they were emitted."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        self.blocks.append(value.flatten().tolist())

    def end(self) -> None:
        self.times[-1] = time.perf_counter()


@torch.inference_mode()
def kv_bytes(model: Any) -> int:
    """Bytes of one token in the cache of keys and values."""
    token = torch.ones((1, 1), dtype=torch.long, device=model.device)
    cache = model(token, use_cache=True).past_key_values
    layers = [layer for layer in cache.layers if isinstance(layer, CacheLayerMixin)]
    pairs = [(layer.keys, layer.values) for layer in layers]
    return sum(state.nbytes for pair in pairs for state in pair if state is not None)
