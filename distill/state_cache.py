"""The target's hidden states over the answers, as shards on disk, for drafts that read them.

Kept while the target answers (distill/answers.py); a text that has none yet, as a held-out answer,
is read in one teacher-forced pass by the very decoder that gives them while drafting. Of an answer
the states at all tokens but the last are kept, in bf16. Legend: P prompt tokens, R response tokens,
L layers, H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from align.sources import read_json
from distill.answer_cache import (
    CachedAnswer,
    CacheError,
    claim,
    opened,
    read_shard,
    write_shard,
)
from distill.held_out import HELD_OUT, held_out_answers
from distill.models import Pair, TargetOfRun
from distill.recipe import Recipe
from eval.decoding.forward import Decoder, HiddenStates

ANSWERS_PER_SHARD = 64
ANSWERS = "answers"  # folder of the texts that are trained on


class StateCache(Mapping[int, Tensor]):
    """Index of an answer -> the states of `layers` at its tokens but the last [P + R - 1, L, H].

    Read from disk each time they are asked for. Appending is as safe as to an AnswerCache.
    """

    def __init__(self, run: Path, layers: Sequence[int]) -> None:
        """run: the run's folder, which holds the texts; states of others than these, or of other
        layers, are refused.

        Raises CacheError for that and for a shard whose bits have changed.
        """
        self.folder, self.layers = run / "states", tuple(layers)
        for name in (ANSWERS, HELD_OUT):
            if (key := run / name / "key.json").exists():
                parts = read_json(key) | {"layers": list(layers)}
                claim(self.folder / name, parts, "hidden states")
        # of each answer its shard, and from where to where in it
        self._places: dict[int, tuple[Path, int, int]] = {}
        self._paths: set[Path] = set()
        self.refresh()

    def append(self, states: dict[int, Tensor], name: str = ANSWERS) -> None:
        """Write one shard, atomically. name: the folder of the texts."""
        tensors = {
            "index": torch.tensor(list(states)),
            "length": torch.tensor([len(one) for one in states.values()]),
            "states": torch.cat(list(states.values())),
        }
        write_shard(self.folder / name, next(iter(states)), tensors)
        self.refresh()

    def refresh(self) -> None:
        """Take in the shards written since, by whatever process."""
        for path in set(self.folder.glob("*/shard-*.safetensors")) - self._paths:
            tensors = read_shard(path, "states")
            self._paths.add(path)
            ends = tensors["length"].cumsum(0)
            columns = (tensors["index"], ends - tensors["length"], ends)
            for index, begin, end in zip(*(c.tolist() for c in columns), strict=True):
                self._places[index] = path, begin, end

    def __getitem__(self, index: int) -> Tensor:
        path, begin, end = self._places[index]
        with opened(path) as file:
            states: Tensor = file.get_slice("states")[begin:end].clone()
        return states

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self._paths)


def layers_read(recipe: Recipe, pair: Pair) -> tuple[int, ...]:
    """The target's hidden states that the recipe's kind of drafter reads; none for most kinds."""
    return recipe.kind.layers(pair.target.config)


def states_of(recipe: Recipe, pair: Pair, answers: Iterable[CachedAnswer]) -> StateCache | None:
    """The run's cache of the states that its kind of drafter reads; None where it reads none.

    Raises CacheError where an answer has none, or they are of another target or other layers.
    """
    if not (layers := layers_read(recipe, pair)):
        return None
    cache = StateCache(recipe.folder, layers)
    if lacking := [answer.index for answer in answers if answer.index not in cache]:
        raise CacheError(
            f"{cache.folder} lacks the target's hidden states of {len(lacking)} "
            f"answers, the first of them number {lacking[0]}, and drafter "
            f"{recipe.kind_name} reads them; run the same command again, which makes them."
        )
    return cache


def cache_states(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Sequence[CachedAnswer]
) -> None:
    """Make what `states_of` reads, and what alpha is followed on, where it is not there yet. A call
    of all processes: each takes its share.

    Raises CacheError for states of another target or of other layers.
    """
    if not (layers := layers_read(recipe, pair)):
        return
    cache = StateCache(recipe.folder, layers)
    state = PartialState()
    texts = {ANSWERS: answers, HELD_OUT: held_out_answers(recipe.folder, pair.vocab_size)}
    shards = []
    for name, some in texts.items():
        left = [number for number, answer in enumerate(some) if answer.index not in cache]
        shards += [
            (name, left[i : i + ANSWERS_PER_SHARD]) for i in range(0, len(left), ANSWERS_PER_SHARD)
        ]
    state.wait_for_everyone()  # all see the same left before anyone adds to the cache
    for name, numbers in tqdm(
        shards[state.process_index :: state.num_processes],
        desc="target's states",
        unit="shard",
        file=sys.stderr,
        disable=not state.is_main_process,
    ):
        shard = [texts[name][number] for number in numbers]
        states = {answer.index: states_at(target.decoder, answer, layers) for answer in shard}
        cache.append(states, name)
    state.wait_for_everyone()
    cache.refresh()
    if state.is_main_process:
        size = cache.bytes_on_disk() / 2**20
        print(f"hidden states of layers {list(layers)}: {size:.0f} MiB in {cache.folder}")


@torch.inference_mode()
def states_at(decoder: Decoder, answer: CachedAnswer, layers: Sequence[int]) -> Tensor:
    """The states of `layers` at the tokens of an answer but the last [P + R - 1, L, H], in bf16."""
    ids = torch.cat([answer.prompt_ids, answer.response_ids])[None, :-1].to(decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    decoder.forward(ids, 0, decoder.new_cache(1, ids.shape[1]), True, states)
    found = [state[0] for state in states.values() if state is not None]
    return torch.stack(found, dim=1).to(torch.bfloat16).cpu()
