"""Prompts for legal text: clauses of licences (the wheel `licensedcode-data`, CC-BY-4.0)."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from align.sources import resolve_folder_in_wheel
from eval.near_duplicates import NEAR_DUPLICATE, NearDuplicates
from eval.prompts import Prompt

LICENCE_FOLDER = (
    "pypi:licensedcode-data==32.1.0/licensedcode/data/licenses/"
    "#sha256=18f60bde6dbabbc0a925d45ed80089cdbb7168156a2a1c118737198f9b743b96"
)
_HELD_OUT = 0.2  # share of the documents
_CLAUSES = 8  # of one document at most, because a few licences are very long
# Keywords in a clause's heading or first words, in the order of the search.
_CLAUSE_TYPES = {
    "definitions": "definition means refers",
    "warranty": "warrant as-is merchantab fitness disclaim",
    "liability": "liab damages indemnif",
    "termination": "terminat expir revoke",
    "grant": "grant permission permitted redistribut may-copy may-use",
}
_WORDS = 150  # longest clause; longer ones are cut


@dataclass(frozen=True)
class _Clause:
    identity: str
    heading: str  # the short line before the clause, "" if there is none
    text: str


def licence_prompts(held_out: bool) -> list[Prompt]:
    """A prompt for each clause; a recipe's `instruction` says what to do. `category` is its type.

    held_out: clauses of the evaluation documents, else of the training documents. No training
    document and no training clause is a near-duplicate of a held-out one.
    """
    training, evaluation = _licence_split()
    if held_out:
        return [_clause_prompt(clause) for clause in evaluation]
    taken = NearDuplicates(clause.text for clause in evaluation)
    return [_clause_prompt(clause) for clause in training if not taken.closest(clause.text)[0]]


@functools.cache
def _licence_split() -> tuple[list[_Clause], list[_Clause]]:
    """Clauses to train on, and held-out ones, from one document of each near-duplicate group."""
    documents = dict(_licence_texts(resolve_folder_in_wheel(LICENCE_FOLDER)))
    names = _representatives(documents)
    random.Random("held-out licences").shuffle(names)
    cut = round(_HELD_OUT * len(names))
    parts = []
    for part in (names[cut:], names[:cut]):
        # boilerplate that is the same in different licences is taken once
        clauses = {
            tuple(clause.text.lower().split()[:8]): clause
            for name in part
            for clause in _clauses(name, documents[name])
        }
        parts.append(list(clauses.values()))
    return parts[0], parts[1]


def _licence_texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every licence in English, neither very short nor very long."""
    for path in sorted(folder.glob("*.LICENSE")):
        # metadata is between two `---` lines
        matter, _, text = path.read_text("utf-8").removeprefix("---\n").partition("\n---\n")
        foreign = re.search(r"^language: (?!en)", matter, flags=re.MULTILINE)
        readable = sum(map(str.isascii, text)) >= 0.98 * len(text)
        if not foreign and readable and 600 <= len(text) <= 60_000:
            yield path.stem, text


def _representatives(documents: dict[str, str]) -> list[str]:
    """One name for every group of near-duplicates (connected by Jaccard >= NEAR_DUPLICATE)."""
    index, names = NearDuplicates(), list(documents)
    parent = {name: name for name in names}

    def first_of_group(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for name, text in tqdm(documents.items(), desc="licences", leave=False):
        for other, jaccard, _ in index.similar(text):
            if jaccard >= NEAR_DUPLICATE:
                ours, theirs = sorted((first_of_group(name), first_of_group(names[other])))
                parent[theirs] = ours
        index.add(text)
    return [name for name in names if parent[name] == name]


def _clauses(name: str, text: str) -> list[_Clause]:
    """Up to _CLAUSES paragraphs of 25 to 400 words, drawn by the document's name."""
    paragraphs = re.split(r"\n\s*\n", text)
    if len(paragraphs) < 3 or max(map(len, paragraphs)) > 3000:
        paragraphs = text.split("\n")  # one paragraph per line
    paragraphs = [" ".join(p.split()) for p in paragraphs if p.strip()]
    found = []
    for number, paragraph in enumerate(paragraphs):
        before = paragraphs[number - 1] if number else ""
        heading = before if len(before.split()) <= 8 and before[-1:] not in ".,;" else ""
        if 25 <= len(paragraph.split()) <= 400:
            found.append(_Clause(f"{name}:{number}", heading, paragraph))
    chosen = random.Random(name).sample(range(len(found)), min(_CLAUSES, len(found)))
    return [found[i] for i in sorted(chosen)]


def _clause_prompt(clause: _Clause) -> Prompt:
    document = clause.identity.partition(":")[0]
    words = clause.text.split(" ")
    beginning = " ".join([clause.heading.lower(), *words[:40]]).lower()
    category = "other"
    for kind, marks in _CLAUSE_TYPES.items():
        if re.search(rf"\b({marks.replace(' ', '|').replace('-', ' ')})", beginning):
            category = kind
            break
    text = "\n\n".join(part for part in (clause.heading, " ".join(words[:_WORDS])) if part)
    return Prompt(clause.identity, text, category=category, group=document)
