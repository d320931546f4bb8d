"""Fixed text of the domain, in rows that the target reads and the draft is taught on.

It is written already, by whomever: the target only reads it, which is cheap beside answering. What
nearly duplicates an evaluation prompt is cut out of it.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from itertools import islice

from transformers import PreTrainedTokenizerBase

from align.sources import load_tokenizer, resolve_file
from distill.near_duplicates import NearDuplicates, without_near_duplicates
from distill.prompt_sets import LICENCES, STDLIB, Prompts
from distill.recipe import Recipe
from eval.prompts import PromptError
from recipes.code.stdlib_functions import stdlib_sources
from recipes.legal.licence_clauses import licence_sources

SHORTEST = 16  # tokens of a row; what is left of a text is not worth a row of its own


def fixed_rows(recipe: Recipe, prompts: Prompts) -> list[list[int]]:
    """Rows of ids for the recipe's share of fixed text, in an order drawn with the seed.

    As long as a prompt with its answer is at most, in the mean. All there are where `minutes` has
    not decided yet how many it takes. Raises PromptError for text that cannot be read, and where
    there is less of it than the share asks for.
    """
    count = recipe.rows(len(prompts.training.ids))["fixed"]
    if not count:
        return []
    spec = recipe.fixed_text or recipe.train_prompts
    length = sum(map(len, prompts.training.ids)) // len(prompts.training.ids)
    length += recipe.answer_max_new_tokens
    texts, not_trained = _texts(spec)
    for part in (prompts.evaluation, prompts.tuning, prompts.held_out):
        not_trained += [prompt.text for prompt in part.prompts]
    random.Random(recipe.seed).shuffle(texts)
    planned = recipe.minutes is not None and recipe.max_answers is None
    rows = _cut(texts, NearDuplicates(not_trained), load_tokenizer(recipe.target), length)
    found = list(islice(rows, None if planned else count))
    if len(found) < (1 if planned else count):
        raise PromptError(
            f"The fixed text {spec!r} has {len(found)} rows of up to {length} tokens that do not "
            f"repeat evaluation, tuning or held-out prompts, and data asks for {count}; lower its "
            "share or max_train_prompts, or name more text with --fixed_text."
        )
    return found


def _cut(
    texts: Iterable[str], held_out: NearDuplicates, tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[list[int]]:
    for text in texts:
        for piece in without_near_duplicates(text, held_out):
            ids = list(tokenizer(piece, verbose=False)["input_ids"])
            for at in range(0, len(ids) - SHORTEST + 1, length):
                row = ids[at : at + length]
                if len(row) >= SHORTEST:
                    yield row


def _texts(spec: str) -> tuple[list[str], list[str]]:
    """The texts that a spec names, and what its builder holds out from training."""
    if spec == STDLIB:
        return stdlib_sources(), []
    if spec == LICENCES:
        return licence_sources()
    return _of_file(spec), []


def _of_file(spec: str) -> list[str]:
    """A .txt file is one text; a .jsonl file has one a line, in the field `text`."""
    name = spec.partition("#")[0]  # of a pypi: file without its hash
    if not name.endswith((".txt", ".jsonl", ".jsonl.gz")):
        raise PromptError(
            f"fixed_text is {spec!r}, which is no .txt, .jsonl or .jsonl.gz file, and neither "
            f"{STDLIB} nor {LICENCES}; give one of these."
        )
    path = resolve_file(spec)
    try:
        with gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb") as file:
            whole = file.read().decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PromptError(f"{spec!r} cannot be read ({error}); save it as UTF-8.") from error
    if name.endswith(".txt"):
        return [whole]
    texts = []
    for number, line in enumerate(whole.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PromptError(f"{spec!r}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise PromptError(f'{spec!r}, line {number}: write {{"text": …}} on every line.')
        texts.append(row["text"])
    return texts
