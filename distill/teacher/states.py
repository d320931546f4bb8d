"""The target's hidden states at its outputs, for drafts that read them.

The target in this process stores them while it generates (distill/teacher/answers.py). An output
without them is read in one teacher-forced pass, here or in a vLLM (vllm_states.py). Where the
disk lacks space for them, each training step computes them (`needs.stores_states`). Legend: P
prompt tokens, R response tokens, T all tokens of a text, L layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from distill.drafters.batch import TrainingBatch, text_starts
from distill.drafters.kind import TargetEnds
from distill.teacher.answers import Answerer
from distill.teacher.store import Answers, CachedAnswer, Store, in_shards, name_of
from eval.decoding.forward import Decoder, HiddenStates, in_pieces
from eval.decoding.target import Target

# Returns the states at all tokens of a text but the last [P + R - 1, L, H], in bf16, from disk.
States = Callable[[CachedAnswer], Tensor]


def states_of(answers: Store, layers: Sequence[int]) -> States | None:
    """A function that reads a text's states of these layers; None without layers."""
    if not layers:
        return None
    return partial(_cached_states, answers.of_states(layers))


def _cached_states(store: Store, answer: CachedAnswer) -> Tensor:
    return store[name_of(answer.text)]["states"]


def read_states(decoder: Decoder, ids: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The target's states of each layer [T - 1, H], at all tokens `ids` [T] but the last.

    The layers are numbered as in eval/decoding/forward.py.
    """
    read = ids[None, :-1].to(decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    for _ in in_pieces(decoder, read, 0, decoder.new_cache(*read.shape), states=states):
        pass
    return [state[0] for state in states.values() if state is not None]


@torch.no_grad()
def computed_states(
    decoder: Decoder, layers: Sequence[int], batch: TrainingBatch, sizes: Sequence[int]
) -> Tensor:
    """The states [B, T, L, H] of a batch without stored ones, from the target on its device.

    sizes: tokens of each text of the batch.
    """
    ids = batch.input_ids.flatten()
    starts = text_starts(sizes, batch.input_ids.shape[1], batch.packed)
    places = [
        slice(start, start + size - 1)  # as many as are stored
        for start, size in zip(starts, sizes, strict=True)
    ]
    # padding stands behind a text, whose states do not depend on it
    texts = pad_sequence([ids[place] for place in places], batch_first=True).to(decoder.device)
    read: HiddenStates = dict.fromkeys(layers)
    for _ in in_pieces(decoder, texts, 0, decoder.new_cache(*texts.shape), states=read):
        pass
    columns = [state.to(ids.device, torch.bfloat16) for state in read.values() if state is not None]
    stacked = torch.stack(columns, 2)
    flat = stacked.new_zeros(len(ids), *stacked.shape[2:])
    for place, states in zip(places, stacked, strict=True):
        flat[place] = states[: place.stop - place.start]
    return flat.unflatten(0, batch.input_ids.shape)


class StateReader(Protocol):
    """What computes hidden states. by: the name under which the store counts them."""

    by: ClassVar[Answerer]

    def load(self) -> Target | TargetEnds:
        """What a base draft is made from."""
        ...

    def read(self, texts: Sequence[Tensor], layers: Sequence[int]) -> Iterator[Tensor]:
        """The states [T - 1, L, H] of each text, in bf16 on the CPU."""
        ...


@dataclass
class LocalStates:
    """The target in this process, and in every other one."""

    by: ClassVar[Answerer] = "local"
    load: Callable[[], Target]

    def read(self, texts: Sequence[Tensor], layers: Sequence[int]) -> Iterator[Tensor]:
        decoder = self.load().decoder  # loaded in inference mode it could not be trained from
        for text in texts:
            with torch.inference_mode():
                states = read_states(decoder, text, layers)
                stacked = torch.stack([state.to(torch.bfloat16).cpu() for state in states], 1)
            yield stacked


def cache_states(parts: Mapping[tuple[int, ...], Answers], reader: StateReader) -> None:
    """Compute and store the missing states of outputs by layers, in one pass over each output.

    All processes must call it. Each computes its share, or the first process asks a server for all.
    """
    stores, missing, state = {}, dict[str, tuple[Answers, int]](), PartialState()
    for layers, answers in parts.items():
        if layers:
            store, names = answers.store.of_states(layers), answers.text_names
            missing |= {names[i]: (answers, i) for i in store.missing(names)}
            stores[layers] = store, set(names)
    union, lacking = [layer for layers in stores for layer in layers], list(missing)
    shards = list(in_shards(lacking, lambda name: missing[name][0].tokens(missing[name][1])))
    readers = state.num_processes if reader.by == "local" else 1
    share = shards[state.process_index :: readers] if state.process_index < readers else []
    shown = share if state.is_main_process else ()
    for shard in tqdm(share, "target states", unit="shard", disable=not shown):
        ids = [answers.text(i) for answers, i in map(missing.__getitem__, shard)]
        read = dict(zip(shard, reader.read(ids, union), strict=True))
        for layers, (store, wanted) in stores.items():
            columns = [union.index(layer) for layer in layers]
            store.append(
                {name: {"states": read[name][:, columns]} for name in shard if name in wanted},
                reader.by,
            )
    for layers, (store, wanted) in stores.items():
        store.wait_for(wanted)
        if missing and state.is_main_process:
            size = store.bytes_on_disk() / 2**20
            print(f"hidden states of layers {list(layers)}: {size:.0f} MiB in {store.folder}")
