"""The target's hidden states over the answers, as shards on disk, for drafts that read them.

One teacher-forced pass by the very decoder that gives them while drafting. Of an answer the states
at all tokens but the last are kept, in bf16. Legend: P prompt tokens, R response tokens, L layers,
H hidden size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save
from torch import Tensor
from tqdm import tqdm

from align.atomic import atomic_file
from align.sources import read_json
from distill.answer_cache import CachedAnswer, CacheError, claim, content_hash, opened
from distill.drafters.base import kind_of
from distill.models import Pair, TargetOfRun
from distill.recipe import Recipe
from eval.decoding.forward import Decoder, HiddenStates

ANSWERS_PER_SHARD = 64
CACHES = ("answers", "fixed_text")  # folders of texts that are trained on


class StateCache(Mapping[int, Tensor]):
    """Index of an answer -> the states of `layers` at its tokens but the last [P + R - 1, L, H].

    Read from disk each time they are asked for. Appending is as safe as to an AnswerCache.
    """

    def __init__(self, folder: Path, layers: Sequence[int], answers_key: dict[str, Any]) -> None:
        """answers_key: what the answers depend on; states of others, or of other layers, are
        refused.

        Raises CacheError for that and for a shard whose bits have changed.
        """
        self.folder, self.layers = folder, tuple(layers)
        claim(folder, answers_key | {"layers": list(layers)}, "hidden states")
        # of each answer its shard, and from where to where in it
        self._places: dict[int, tuple[Path, int, int]] = {}
        self._paths: set[Path] = set()
        self.refresh()

    def append(self, states: dict[int, Tensor]) -> None:
        """Write one shard, atomically."""
        tensors = {
            "index": torch.tensor(list(states)),
            "length": torch.tensor([len(one) for one in states.values()]),
            "states": torch.cat(list(states.values())),
        }
        name = f"shard-{next(iter(states)):08d}.safetensors"
        with atomic_file(self.folder / name, "wb") as file:
            file.write(save(tensors, metadata={"sha256": content_hash(tensors)}))
        self.refresh()

    def refresh(self) -> None:
        """Take in the shards written since, by whatever process."""
        for path in set(self.folder.glob("shard-*.safetensors")) - self._paths:
            with opened(path) as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                recorded = (file.metadata() or {}).get("sha256")
            if recorded != content_hash(tensors):
                raise CacheError(
                    f"{path} does not match its checksum: bits changed since it was written; "
                    "delete it and run again, its states are made anew."
                )
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


def states_of(recipe: Recipe, pair: Pair, answers: Iterable[CachedAnswer]) -> StateCache | None:
    """The run's cache of the states that its kind of drafter reads; None where it reads none.

    Raises CacheError where an answer has none, or they are of another target or other layers.
    """
    cache = _open(recipe, pair)
    if cache is None:
        return None
    if lacking := [answer.index for answer in answers if answer.index not in cache]:
        raise CacheError(
            f"{cache.folder} lacks the target's hidden states of {len(lacking)} "
            f"answers, the first of them number {lacking[0]}, and drafter "
            f"{recipe.kind} reads them; run the same command again, which makes them."
        )
    return cache


def cache_states(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Sequence[CachedAnswer]
) -> None:
    """Make what `states_of` reads. A call of all processes: each takes its share of what is left.

    Raises CacheError for states of another target or of other layers.
    """
    cache = _open(recipe, pair)
    if cache is None:
        return
    state = PartialState()
    left = [number for number, one in enumerate(answers) if one.index not in cache]
    shards = [left[i : i + ANSWERS_PER_SHARD] for i in range(0, len(left), ANSWERS_PER_SHARD)]
    state.wait_for_everyone()  # all see the same left before anyone adds to the cache
    for shard in tqdm(
        shards[state.process_index :: state.num_processes],
        desc="target's states",
        unit="shard",
        file=sys.stderr,
        disable=not state.is_main_process,
    ):
        some = [answers[number] for number in shard]
        cache.append({one.index: states_at(target.decoder, one, cache.layers) for one in some})
    state.wait_for_everyone()
    cache.refresh()
    if state.is_main_process:
        size = cache.bytes_on_disk() / 2**20
        print(f"hidden states of layers {list(cache.layers)}: {size:.0f} MiB in {cache.folder}")


@torch.inference_mode()
def states_at(decoder: Decoder, answer: CachedAnswer, layers: Sequence[int]) -> Tensor:
    """The states of `layers` at the tokens of an answer but the last [P + R - 1, L, H], in bf16."""
    ids = torch.cat([answer.prompt_ids, answer.response_ids])[None, :-1].to(decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    decoder.forward(ids, 0, decoder.new_cache(1, ids.shape[1]), True, states)
    found = [state[0] for state in states.values() if state is not None]
    return torch.stack(found, dim=1).to(torch.bfloat16).cpu()


def _open(recipe: Recipe, pair: Pair) -> StateCache | None:
    layers = kind_of(recipe).layers(pair.target.config)
    if not layers:
        return None
    key: dict[str, Any] = {}
    for path in (recipe.folder / name / "key.json" for name in CACHES):
        # all texts are of one target; what differs goes by its cache's name
        for part, value in read_json(path).items() if path.exists() else ():
            if key.setdefault(part, value) != value:
                key[f"{path.parent.name}: {part}"] = value
    return StateCache(recipe.folder / "states", layers, key)
