"""The target's hidden states at its outputs, for drafts that read them.

They are stored while outputs are generated (distill/teacher/answers.py). An output that was stored
without them is read in one teacher-forced pass. Legend: P prompt tokens, R response tokens, L
layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from distill.teacher.answers import ANSWERS_PER_SHARD
from distill.teacher.store import Answers, CachedAnswer, Store, name_of
from eval.decoding.forward import Decoder, HiddenStates, in_pieces
from eval.decoding.target import Target

# Returns the states at all tokens of a text but the last [P + R - 1, L, H], in bf16, from disk.
States = Callable[[CachedAnswer], Tensor]


def states_of(answers: Store, layers: Sequence[int]) -> States | None:
    """A function that reads a text's states of these layers; None without layers."""
    if not layers:
        return None
    store = answers.of_states(layers)
    return lambda answer: store[name_of(answer.text)]["states"]


def read_states(decoder: Decoder, ids: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The target's states of each layer [T - 1, H], at all tokens `ids` [T] but the last.

    The layers are numbered as in eval/decoding/forward.py.
    """
    read = ids[None, :-1].to(decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    for _ in in_pieces(decoder, read, 0, decoder.new_cache(*read.shape), states=states):
        pass
    return [state[0] for state in states.values() if state is not None]


@torch.inference_mode()
def cache_states(answers: Answers, layers: Sequence[int], load: Callable[[], Target]) -> None:
    """Compute and store the missing states of these outputs.

    All processes must call it; each computes its share. load: returns the target.
    """
    if not layers:
        return
    store, state = answers.store.of_states(layers), PartialState()
    names = [name_of(answer.text) for answer in answers]
    missing = store.missing(names)
    shards = [
        missing[at : at + ANSWERS_PER_SHARD] for at in range(0, len(missing), ANSWERS_PER_SHARD)
    ]
    share = shards[state.process_index :: state.num_processes]
    for shard in tqdm(share, "target states", unit="shard", disable=not state.is_main_process):
        records = {}
        for i in shard:
            states = read_states(load().decoder, answers[i].text, layers)
            stored = [state.to(torch.bfloat16).cpu() for state in states]
            records[names[i]] = {"states": torch.stack(stored, 1)}
        store.append(records, "local")
    store.wait_for(names)
    if state.is_main_process:
        size = store.bytes_on_disk() / 2**20
        print(f"hidden states of layers {list(layers)}: {size:.0f} MiB in {store.folder}")
