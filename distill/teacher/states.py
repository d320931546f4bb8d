"""The target's hidden states over the answers, for drafts that read them.

They are stored while the target answers (distill/teacher/answers.py). A text without them, such as
a held-out one, is read in one teacher-forced pass by the decoder that gives them while drafting.
The states at all tokens but the last are stored, in bf16. Legend: P prompt tokens, R response
tokens, L layers, H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from align.machine import from_first
from distill.teacher.answers import ANSWERS_PER_SHARD, states_store
from distill.teacher.store import Answers, CachedAnswer, CacheError, Store, name_of
from eval.decoding.forward import Decoder, HiddenStates
from eval.decoding.target import Target


class States(Mapping[int, Tensor]):
    """Index of an answer -> the states of `layers` at its tokens but the last [P + R - 1, L, H].

    Read from disk each time they are asked for.
    """

    def __init__(self, store: Store, layers: Sequence[int], names: dict[int, str]) -> None:
        """names: index of an answer -> the name of its text."""
        self.store, self.layers, self.names = store, tuple(layers), names

    def __getitem__(self, index: int) -> Tensor:
        return self.store[self.names[index]]["states"]

    def __iter__(self) -> Iterator[int]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def states_of(
    layers: Sequence[int], answers: Answers, held_out: Sequence[CachedAnswer] = ()
) -> States | None:
    """The states of these layers over answers and held-out answers; None where no layer is read.

    Raises CacheError when an answer has none.
    """
    if not layers:
        return None
    store = states_store(answers.store, layers)
    names = {answer.index: name_of(answer.text) for answer in chain(answers, held_out)}
    if lacking := [index for index, name in names.items() if name not in store]:
        raise CacheError(
            f"{store.folder} lacks the target's hidden states of {len(lacking)} answers, the first "
            f"of them number {lacking[0]}, and the draft reads them; run the same command again, "
            "which makes them."
        )
    return States(store, layers, names)


def cache_states(
    layers: Sequence[int],
    load: Callable[[], Target],
    answers: Answers,
    held_out: Sequence[CachedAnswer] = (),
) -> None:
    """Make what `states_of` reads, where it is not there yet. load: gives the target.

    A call of all processes: each takes its share.
    """
    if not layers:
        return
    store, state = states_store(answers.store, layers), PartialState()
    names = [name_of(answer.text) for answer in chain(answers, held_out)]
    # one process decides: another run may append meanwhile, and all must share out the same texts
    missing = from_first([i for i, name in enumerate(names) if name not in store])
    shards = [
        missing[at : at + ANSWERS_PER_SHARD] for at in range(0, len(missing), ANSWERS_PER_SHARD)
    ]
    for shard in tqdm(
        shards[state.process_index :: state.num_processes],
        desc="target's states",
        unit="shard",
        file=sys.stderr,
        disable=not state.is_main_process,
    ):
        kept = {i: answers[i] if i < len(answers) else held_out[i - len(answers)] for i in shard}
        store.append(
            {names[i]: {"states": states_at(load().decoder, a, layers)} for i, a in kept.items()},
            "local",
        )
    state.wait_for_everyone()
    store.refresh()
    if state.is_main_process:
        size = store.bytes_on_disk() / 2**20
        print(f"hidden states of layers {list(layers)}: {size:.0f} MiB in {store.folder}")


@torch.inference_mode()
def states_at(decoder: Decoder, answer: CachedAnswer, layers: Sequence[int]) -> Tensor:
    """The states of `layers` at the tokens of an answer but the last [P + R - 1, L, H], in bf16."""
    ids = answer.text[None, :-1].to(decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    decoder.forward(ids, 0, decoder.new_cache(1, ids.shape[1]), True, states)
    kept = [state[0] for state in states.values() if state is not None]
    return torch.stack(kept, dim=1).to(torch.bfloat16).cpu()
