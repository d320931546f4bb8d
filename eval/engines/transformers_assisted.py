"""transformers' assisted generation against its stock `generate`, on the same target.

Both are timed as their users call them (huggingface.co/docs/transformers, "Assisted decoding"), at
batch size 1 with a fixed draft length. What each target call drafted and emitted is read from
outside: a streamer sees the tokens emitted, a hook the target's inputs.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
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
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import load_on, model_bytes, stop_tokens, tensor_sha256
from eval.decoding.verification import Sampling
from eval.measuring.environment import environment
from eval.measuring.evaluation import decoding_facts, device_name, prompt_facts
from eval.measuring.journal import Journal
from eval.measuring.losslessness import PARTS_IN_FP32, tie
from eval.measuring.output_check import divergence, ledger
from eval.measuring.runs import REFERENCE_ONLY, Answer, DraftLog, RunLog
from eval.measuring.timing import in_turns
from eval.prompts import Prompt, PromptSet
from eval.reporting.build import build_report
from eval.reporting.fields import Report

GAMMA_POLICY = "fixed; a drafted end of text ends a draft"


class Assisted:
    """`generate` of transformers, assisted by one of the drafts that were added, or by none.

    drafts: what each is in a DraftLog. model: Any, because mypy cannot call the type in which
    transformers wraps `generate`.
    """

    def __init__(
        self, spec: str, model: Any, tokenizer: PreTrainedTokenizerBase, gamma: int
    ) -> None:
        self.target, self.model, self.tokenizer, self.gamma = spec, model, tokenizer, gamma
        self.stops = stop_tokens(model, tokenizer)
        # `generate` fills what a call leaves open from here: a checkpoint's repetition penalty, say
        model.generation_config = GenerationConfig()
        self.assistants: list[Any] = []
        self.drafts: list[dict[str, Any]] = []

    @classmethod
    def load(
        cls, spec: str, drafts: Mapping[str, str], gamma: int, dtype: torch.dtype, device: str
    ) -> Self:
        """The target and the drafts of these specs, device as of `load_on`.

        Raises SourceError for what cannot be read, ValueError for a draft that transformers cannot
        use, or not without loss.
        """
        engine = cls(spec, load_on(spec, dtype, device), load_tokenizer(spec), gamma)
        for name, draft in drafts.items():
            if draft == "prompt-lookup" or (Path(draft) / "compact.json").is_file():
                raise ValueError(
                    f"Draft {name!r}: {draft} is no checkpoint that transformers loads; give the "
                    f"full-vocabulary checkpoint (the folder above compact/), or use --engine "
                    f"torch."
                )
            vocabulary = read_vocabulary(draft)
            verdict = compare(read_vocabulary(spec), vocabulary)
            if verdict.strategy not in ("direct", "padded"):
                raise ValueError(
                    f"Draft {name!r}: its vocabulary is {verdict.relation} to the target's, and "
                    f"transformers changes the output across tokenizers. Distil the draft for this "
                    f"target (distill/train.py), or use --engine torch, which maps vocabularies "
                    f"without loss."
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
        memory = {
            "target_bytes": model_bytes(self.model),
            "draft_bytes": model_bytes(model),
            "kv_bytes_per_token": {"target": _kv_bytes(self.model), "draft": _kv_bytes(model)},
        }
        about = {"name": name, "path": spec, "vocabulary": vocabulary, "memory": memory}
        self.drafts.append(about | {"full_form_bytes": memory["draft_bytes"]})

    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], decoding: Decoding
    ) -> PromptRun:
        """One prompt through `generate`, with the draft of that number or with none."""
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
        gamma = 0 if draft is None else self.gamma
        return log_steps(run, drafted, emitted, gamma, decoding.max_new_tokens)

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

    def divergence(
        self,
        draft: int,
        prompt: Prompt,
        ids: list[int],
        greedy: Decoding,
        plain: PromptRun,
        drafted: PromptRun,
    ) -> dict[str, Any]:
        """The ledger's entry of greedy runs, without the draft and with it, that differ.

        As in the reference decoder's check, the logits explain a tie, and it must vanish in fp32.
        """
        entry = divergence(plain, drafted, lambda tokens: str(self.tokenizer.decode(tokens)))
        at = entry["position"]
        if at == min(len(plain.tokens), len(drafted.tokens)):  # lengths never differ by a tie
            return entry
        outputs = [self._generate(number, ids, greedy, logits=True) for number in (None, draft)]
        single, wide = (output.logits[at][0].float() for output in outputs)
        entry |= tie(single, wide, plain.tokens[at], drafted.tokens[at], self.model.dtype)
        if entry["tie"]:
            alone, assisted = (
                self._in_fp32.decode(number, prompt, ids, greedy) for number in (None, draft)
            )
            if alone.tokens != assisted.tokens:
                entry |= PARTS_IN_FP32
        return entry

    @cached_property
    def _in_fp32(self) -> Assisted:
        exact = copy.copy(self)
        exact.model = copy.deepcopy(self.model).float()
        exact.assistants = [copy.deepcopy(model).float() for model in self.assistants]
        return exact


def measure_assisted(
    engine: Assisted,
    prompts: PromptSet,
    decoding: Decoding,
    journal: Journal,
    provenance: dict[str, Any],
) -> Report:
    """The report of every draft against the target alone, both in transformers, in turns.

    journal: keeps the runs for a process that goes on.
    """
    device, dtype = device_name(engine.model.device), str(engine.model.dtype)[len("torch.") :]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    journal.begin(
        [_fingerprint(model) for model in (engine.model, *engine.assistants)],
        [draft["name"] for draft in engine.drafts],
        (prompts.ids, [(prompt.id, prompt.category, prompt.group) for prompt in prompts.prompts]),
        asdict(decoding) | {"stops": sorted(decoding.stops)},
        engine.gamma,
        (device, dtype, versions),
    )
    machine = environment("transformers", transformers.__version__, engine.model.device)
    rows = list(zip(prompts.prompts, prompts.ids, strict=True))

    def runs_of_all(decoding: Decoding) -> list[list[PromptRun]]:
        """Every prompt without a draft and with each: [baseline, *drafts]."""
        numbers = (None, *range(len(engine.drafts)))
        decoders = [partial(engine.decode, number, decoding=decoding) for number in numbers]
        for decode in decoders:  # warm-up, not counted
            decode(*rows[0])
        stage = f"speed at T={decoding.sampling.temperature:g}"
        return in_turns(decoders, rows, journal, stage)

    baseline, *runs = runs_of_all(decoding)
    greedy = replace(decoding, sampling=Sampling())  # losslessness is always measured greedily
    plain, *drafted = [baseline, *runs] if decoding.sampling.greedy else runs_of_all(greedy)
    logs = []
    for number, draft in enumerate(engine.drafts):
        entries = [
            engine.divergence(number, prompt, ids, greedy, base, run)
            for (prompt, ids), base, run in zip(rows, plain, drafted[number], strict=True)
            if base.tokens != run.tokens
        ]
        log = DraftLog(
            **draft,
            form="full",
            runs=runs[number],
            baseline=baseline,
            lossless=ledger(len(rows), entries),
            gamma=engine.gamma,
            gamma_policy=GAMMA_POLICY,
            missing=REFERENCE_ONLY,
        )
        logs.append(log)
    run = RunLog(
        target=engine.target,
        engine="transformers",
        device=device,
        dtype=dtype,
        decoding=decoding_facts(
            decoding,
            [run.tokens[-1] in decoding.stops for run in baseline],
            gamma=engine.gamma,
            gamma_policy=GAMMA_POLICY,
            verification="greedy match" if decoding.sampling.greedy else "rejection sampling",
        ),
        prompts=prompt_facts(prompts),
        provenance=provenance | versions | {"resumed": journal.resumed},
        environment=machine,
        answers=[
            Answer(prompt.id, ids, run.tokens, [], group=prompt.group)
            for (prompt, ids), run in zip(rows, plain, strict=True)
        ],
    )
    return build_report(run, logs)


def log_steps(
    run: PromptRun,
    drafted: Sequence[list[int]],
    emitted: Sequence[list[int]],
    gamma: int,
    max_new_tokens: int,
) -> PromptRun:
    """The run with what each speculation step drafted, and how much of it was accepted.

    drafted, emitted: tokens of each target call, the prefill first; transformers drafts for it,
    too. A drafted token was accepted where it was emitted: after a rejection the target's own token
    is another one, also when sampled (its residual is 0 at the rejected token). gamma,
    max_new_tokens: fewer than gamma tokens are drafted where the limit would cut the step.
    """
    done = run.prefill_tokens
    for i, (draft, step) in enumerate(zip(drafted[1:], emitted[1:], strict=True)):
        pairs = enumerate(zip(draft, step, strict=False))
        accepted = next((j for j, (a, b) in pairs if a != b), min(len(draft), len(step)))
        # an accepted end of text ends the draft, and no token of the target's own follows it
        run.drafted[i] = len(step) if accepted == len(step) else len(draft)
        run.accepted[i] = accepted
        run.last_truncated = len(draft) == max_new_tokens - done - 1 < gamma
        done += len(step)
    return run


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
