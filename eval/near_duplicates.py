"""Finds near-duplicate texts, and drops training prompts that nearly repeat evaluation prompts."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from eval.prompts import Prompt

SHINGLE = 5  # words in a shingle, the unit of comparison
# In scripts without spaces between words, from Thai to Han, each character counts as a word.
UNSPACED = "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff𠀀-\U0003ffff]"
# Vowel signs and joiners, which are no \w: in scripts from Devanagari to Sinhala they are in words.
MARKS = "".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c) in ("Mn", "Mc"))
WORD = re.compile(rf"{UNSPACED}|(?!{UNSPACED})\w(?:(?!{UNSPACED})[\w{MARKS}\u200d])*")
# Combining classes of vowel signs: most scripts, virama, Telugu, Tibetan. Others are accents.
VOWELS = 0, 9, 84, 91, 129, 130, 132
NEAR_DUPLICATE = 0.5  # Jaccard similarity from which two texts are near-duplicates
CONTAINED = 0.8  # share of the shorter text's shingles from which they are near-duplicates, too
HOPELESS = 1000  # training prompts of which all are near-duplicates; then no more are read


def shingles(text: str) -> frozenset[str]:
    """All runs of SHINGLE words of a text, in lower case; a shorter text is one run."""
    if not text.isascii():  # without accents and points, and in one width
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(c for c in decomposed if unicodedata.combining(c) in VOWELS)
    words = WORD.findall(text.lower()) or text.split()  # a text may be emoji only
    count = max(len(words) - SHINGLE + 1, 1)
    return frozenset(" ".join(words[i : i + SHINGLE]) for i in range(count))


class NearDuplicates:
    """Texts that other texts are compared with; an index by shingle finds all candidates."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self.runs: list[frozenset[str]] = []
        self.holders: dict[str, list[int]] = {}
        self.rare: dict[str, list[int]] = {}  # as `holders`, of each text's rarest shingles
        for text in texts:
            self.add(text)

    def add(self, text: str) -> None:
        runs = shingles(text)
        for run in self._rarest(runs):
            self.rare.setdefault(run, []).append(len(self.runs))
        for run in runs:
            self.holders.setdefault(run, []).append(len(self.runs))
        self.runs.append(runs)

    def _rarest(self, runs: frozenset[str]) -> list[str]:
        """A third of a text's shingles and one more: those that the fewest texts have."""
        ranked = sorted(runs, key=lambda run: len(self.holders.get(run, ())))
        return ranked[: len(runs) // 3 + 1]

    def candidates(self, runs: frozenset[str]) -> set[int]:
        """The numbers of texts that may be near-duplicates of a text with these shingles.

        Near-duplicates share two thirds of the shorter text's shingles, so at least one of any
        larger part than a third. The rarest ones have few holders.
        """
        held = (self.holders.get(run, ()) for run in self._rarest(runs))
        return {*chain.from_iterable(held), *chain(*(self.rare.get(run, ()) for run in runs))}

    def repeats(self, text: str) -> bool:
        """Whether the text nearly duplicates one of the texts."""
        runs = shingles(text)
        pairs = ((runs, self.runs[i]) for i in self.candidates(runs))
        return any(
            (shared := len(a & b)) >= NEAR_DUPLICATE * len(a | b)
            or shared >= CONTAINED * min(len(a), len(b))
            for a, b in pairs
        )


@dataclass(frozen=True)
class Overlap:
    """The overlap of training and evaluation prompts.

    dropped: number of training prompts that were dropped because they equal or nearly duplicate an
    evaluation prompt. repeated: number of those that were dropped because they equal an earlier
    one.
    """

    dropped: int
    repeated: int


def drop_overlap(
    prompts: Iterable[Prompt], eval_prompts: list[Prompt], limit: int | None = None
) -> tuple[list[Prompt], Overlap]:
    """The first `limit` different prompts that nearly repeat no evaluation prompt; None: all."""
    held_out = NearDuplicates(p.text for p in eval_prompts)
    kept: dict[str, Prompt] = {}
    dropped, repeated = 0, 0
    for prompt in prompts:
        if len(kept) == limit or (not kept and dropped == HOPELESS):
            break
        if held_out.repeats(prompt.text):
            dropped += 1
        elif prompt.content in kept:
            repeated += 1
        else:
            kept[prompt.content] = prompt
    return list(kept.values()), Overlap(dropped, repeated)
