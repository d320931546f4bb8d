"""Generate the target's outputs and cache its distributions."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from accelerate import PartialState
from torch import Tensor

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import write_json
from align.machine import free_memory, from_first
from distill.teacher.store import (
    TAUGHT,
    Answers,
    AnswerSettings,
    CachedAnswer,
    Record,
    Store,
    in_shards,
    name_of,
    names_of,
)
from eval.decoding.generation import Kept, generate_batched, prefill_groups, tokens_bar
from eval.decoding.loop import seed_of
from eval.decoding.target import Target
from eval.engines.start_vllm import EngineMissing, vllm_python

FIT_MARGIN = 1.5  # the first outputs may be shorter than the mean
USED = "answers.json"  # in a run's folder: the store and the outputs that it is trained on

Answerer = Literal["local", "vllm", "server"]
Made = Generator[tuple[str, Record], None, None]  # outputs by their names


def who_answers(
    answers: Answerer | Literal["auto"], device: str, taught: bool
) -> tuple[Answerer, str]:
    """What generates the target's outputs, and why.

    answers: the recipe's key. device: where the target is loaded. taught: whether the distributions
    within the prompts are also learned.
    """
    if answers != "auto":
        return answers, "the recipe names it"
    if device == "cpu":
        return "local", "the target is on the CPU"
    if taught:
        return "local", "the distributions of train_on_prompts are not requested from vLLM"
    try:
        vllm_python()
    except EngineMissing as error:
        return "local", f"{error}; on a GPU it should be faster (not measured yet)"
    return "vllm", "on a GPU it should be faster than the reference decoder (not measured yet)"


def open_store(settings: AnswerSettings, target: Checkpoint, dtype: str, stores: Path) -> Store:
    """The store of this target's outputs, in the folder `stores`. All processes must call it.

    Raises UserError if the first process's machine has another target.
    """
    key = {}
    if PartialState().is_local_main_process:  # it reads all the target's weights
        key = {"target weights": target.sha256, "target config": target.config_sha256}
        key |= {"dtype": dtype}
    first = from_first(key)
    if key not in ({}, first):
        raise UserError(
            f"The weights of {target.spec!r} on {platform.node()} are not those on the first "
            "process's machine; copy the same checkpoint to all machines."
        )
    return Store.of(first | settings.key, stores)


def to_answer(prompts: list[list[int]], per_prompt: int, most: int | None) -> list[list[int]]:
    """The prompts (token ids) of a run's outputs: each prompt `per_prompt` times, up to `most`."""
    return (prompts * per_prompt)[:most]


@dataclass
class AnsweringTarget:
    """A target that generates outputs, and the store of its outputs; every process has one.

    by: the name under which the store counts its outputs. verb: how it made them.
    """

    store: Store
    settings: AnswerSettings
    by: ClassVar[Answerer]
    verb: ClassVar[str] = "generated"

    def check(self) -> None:
        """Raise an error if the target cannot be used. The first process calls it before a run."""

    def __enter__(self) -> None:
        """Nothing is started before an output is missing."""

    def start(self) -> None:
        """Load or start what generates outputs, if `answers` has not done it yet."""

    def __exit__(self, *error: Any) -> None:
        """End the server that was started for the outputs."""

    def forget(self, layers: tuple[int, ...]) -> None:
        """Store no hidden states of these layers with new outputs."""

    def names(self, prompts: list[list[int]], taught: bool = False) -> list[str]:
        """The names of these prompts' outputs in the store."""
        return names_of(prompts, taught)

    def answers(self, prompts: list[list[int]], taught: bool = False) -> Answers:
        """The outputs for these prompts (token ids), in their order. All processes must call it.

        Only outputs that the store lacks are generated. An output's random numbers depend only on
        the seed and its name in the store. taught: also store the distributions within the prompts.
        Raises UserError if all outputs are empty, and ServerError if a server fails; the outputs
        in the store stay.
        """
        if not prompts:
            return Answers(self.store, [])
        clock, names = time.monotonic(), self.names(prompts, taught)
        missing = self.store.missing(names)
        with closing(self.made({names[i]: prompts[i] for i in missing}, taught)) as made:
            for shard in in_shards(
                made, lambda output: len(output[1]["prompt_ids"]) + len(output[1]["response_ids"])
            ):
                self.keep(dict(shard))
        self.store.wait_for(names)
        answers = Answers(self.store, names)
        lengths = answers.response_lengths
        if taught:  # without the tokens of their prompts
            lengths = [n - len(ids) + 1 for n, ids in zip(lengths, prompts, strict=True)]
        if max(lengths) <= 1:
            raise UserError(
                f"All {len(lengths)} outputs of the target have one token, a stop token unless "
                "answer_max_new_tokens is 1. Raise it, or check the chat template and whether the "
                "prompts should be `messages`."
            )
        if PartialState().is_main_process:
            print(
                f"outputs: {len(missing)} of {len(names)} {self.verb} in "
                f"{time.monotonic() - clock:.0f} s, {sum(lengths)} tokens in {self.store.folder}"
            )
        return answers

    def made(self, missing: Mapping[str, list[int]], taught: bool) -> Made:
        """This process's share of the outputs for these prompts, by their names."""
        raise NotImplementedError

    def keep(self, shard: Mapping[str, Record]) -> None:
        """Store outputs that were made one after the other."""
        self.store.append(shard, self.by)
        free_memory()  # KV caches fragment the memory: 0.5 GB with 135M parameters


@dataclass
class LocalTarget(AnsweringTarget):
    """A target in this process.

    load: returns the target; called only if an output is missing. layers: hidden states that are
    stored with new outputs. fit_layers: those that are stored with the first of `fit_names`, which
    have about `fit_tokens` tokens or more.
    """

    by = "local"
    load: Callable[[], Target]
    layers: tuple[int, ...] = ()
    fit_layers: tuple[int, ...] = ()
    fit_names: Sequence[str] = ()
    fit_tokens: int = 0

    def __post_init__(self) -> None:
        # by layers: the store, and the states of outputs that are not stored yet
        self.states: dict[tuple[int, ...], tuple[Store, dict[str, Record]]] = {
            layers: (self.store.of_states(layers), {})
            for layers in (self.layers, self.fit_layers)
            if layers
        }
        self.fit_order = {name: number for number, name in enumerate(self.fit_names)}
        self.outputs, self.tokens = 0, 0  # generated until now, and their response tokens

    def start(self) -> None:
        self.load()

    def forget(self, layers: tuple[int, ...]) -> None:
        self.states.pop(layers, None)

    def may_fit(self, name: str) -> bool:
        """Whether this output may be one of the first ones, by the mean length until now."""
        mean = self.tokens / self.outputs
        return self.fit_order.get(name, math.inf) * mean < FIT_MARGIN * self.fit_tokens

    def made(self, missing: Mapping[str, list[int]], taught: bool) -> Made:
        state, settings = PartialState(), self.settings
        names, prompts = list(missing), list(missing.values())
        groups = prefill_groups(prompts)[state.process_index :: state.num_processes]
        share = [i for group in groups for i in group]
        if not share:
            return
        # of all shares: equal batches for any number of processes
        rows = min(settings.batch_size, len(missing))
        names, prompts = [names[i] for i in share], [prompts[i] for i in share]
        target = self.load()  # before the progress bar begins
        layers = [layer for layers in self.states for layer in layers]
        bar = tokens_bar(len(share), settings.decoding, not state.is_main_process)
        generated = generate_batched(
            target.decoder,
            prompts,
            settings.decoding,
            rows,
            # `taught` must not change the output
            [seed_of(settings.decoding.seed, name.removesuffix(TAUGHT)) for name in names],
            Kept(lambda logits: top_logprobs(logits, settings.top_k), taught, layers),
            bar,
        )
        with bar:
            for answer in generated:
                captured = zip(*answer.captured, strict=True)
                ids, logprobs = (torch.stack(part).cpu() for part in captured)
                text = torch.tensor(prompts[answer.index] + answer.tokens)
                start = len(text) - len(ids)
                name = names[answer.index]
                self.outputs, self.tokens = self.outputs + 1, self.tokens + len(ids)
                for part, (_, kept) in self.states.items():
                    if part == self.layers or self.may_fit(name):
                        columns = [layers.index(layer) for layer in part]
                        states = torch.cat(answer.states)[:, columns]
                        kept[name_of(text)] = {"states": states}
                output = CachedAnswer(text[:start], text[start:], ids, logprobs)
                yield name, output.packed(target.vocab_size)

    def keep(self, shard: Mapping[str, Record]) -> None:
        # states first: an output stored without states needs a second pass for them
        for store, states in self.states.values():
            if states:
                store.append(states, self.by)
                states.clear()
        super().keep(shard)


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and natural-log probabilities [B, C] of the C most likely tokens of logits [B, V]."""
    ids = logits.topk(count, dim=-1).indices.sort(dim=-1).values
    # of equal bf16 logits the lowest id comes first, because greedy decoding takes this id
    top, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    # normalised in fp32 over all V, so the mass that is missing to 1 is that of other tokens
    return ids, top.float() - logits.float().logsumexp(-1, keepdim=True)


def with_own(
    ids: Tensor, logprobs: Tensor, own: Tensor, own_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """The likeliest tokens [R, C], the last replaced by the text's own token [R] if it is missing.

    So the log-probability of every token of the text is known.
    """
    missing = (ids != own[:, None]).all(1)
    ids, logprobs = ids.clone(), logprobs.clone()
    ids[missing, -1], logprobs[missing, -1] = own[missing], own_logprobs[missing]
    return ids, logprobs


def note_used(folder: Path, answers: Answers, states_stored: bool = True) -> None:
    """Write USED: which store and which outputs the run is trained on.

    states_stored: False if each training step computes the hidden states.
    """
    store = answers.store
    used = {
        "store": str(store.folder),
        "key": store.key,
        "count": answers.asked,
        "left out": answers.left_out,
        "by": store.made_by(answers.names),
        "answers": store.sha256_of(answers.names),
        "states stored": states_stored,
    }
    write_json(folder / USED, used)
