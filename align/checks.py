"""The comparison of two vocabularies, and what is wrong with a pair.

A finding has a fix. Differences without effect on the output are one line, TOK-017.
Codes (docs/vocabulary.md): 001 to 017 are found here; 000 and 013 when files are read
(align/vocabulary.py), 014 when a saved map is (align/vocab_map.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from align.sources import load_model
from align.token_bytes import Token, is_used
from align.vocab_map import Retokenizer, build_map
from align.vocabulary import SPECIAL_NAMES, Vocabulary, open_safetensors

Relation = Literal[
    "identical", "padded", "permuted", "subset", "superset", "intersection", "disjoint"
]
Severity = Literal["fatal", "error", "warning", "info"]

_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
# Keys of a tokenizer.json that are compared elsewhere, or that the tokenizers here do not use.
_NOT_COMPARED = ("version", "truncation", "padding", "added_tokens", "model")
_CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Write a function."},
]
_PROBE = "def f(x):\n\t\treturn x  # é\n    if a == b:\r\n        pass\n\n\n"
LEAK = 0.01  # probability on ids without a token: worth a warning
LOST = 0.2  # probability on tokens that only the draft has


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    severity: fatal (no lossless mapping), error (the unchanged draft would be wrong; the mapping or
    the fix avoids it), warning, info. ids: up to five examples.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    ids: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.code} {self.severity.upper()}: {self.message} Fix: {self.fix}."


@dataclass(frozen=True)
class Comparison:
    """The vocabularies of a target and a draft, compared."""

    target: Vocabulary
    draft: Vocabulary

    @property
    def both(self) -> tuple[Vocabulary, Vocabulary]:
        return self.target, self.draft

    @property
    def each(self) -> tuple[Vocabulary, ...]:
        """Both vocabularies, or one where a target drafts for itself."""
        return (self.target,) if self.draft is self.target else self.both

    @cached_property
    def differing(self) -> list[int]:
        """Ids with different bytes; an unused or missing id has none."""
        tokens = zip(self.target.tokens, self.draft.tokens, strict=False)
        return [i for i, (a, b) in enumerate(tokens) if is_used(a) and is_used(b) and a[1] != b[1]]

    @cached_property
    def relation(self) -> Relation:
        """The draft's vocabulary against the target's (subset: the draft has fewer tokens)."""
        target, draft = self.both
        if not self.differing and {raw for _, raw in target.used} == {raw for _, raw in draft.used}:
            rows = [(len(side.tokens), side.head_rows) for side in self.both]
            return "identical" if rows[0] == rows[1] else "padded"
        if target.used == draft.used:
            return "permuted"
        if draft.used < target.used:
            return "subset"
        if draft.used > target.used:
            return "superset"
        shared = any(kind == "normal" for kind, _ in target.used & draft.used)
        return "intersection" if shared else "disjoint"

    def coverage(self, texts: Sequence[str]) -> float:
        """Share of the target's tokens in the texts that the draft has; by count if empty."""
        target, draft = self.both
        encodings = target.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [i for encoding in encodings for i in encoding.ids]
        tokens = [target.token(i) for i in ids] or [*target.used]
        return sum(token in draft.used for token in tokens) / max(len(tokens), 1)


def find(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    """The findings in the files of a pair."""
    yield from _ids(pair, strategy)
    yield from _rows(pair)
    yield from _special_ids(pair)
    yield from _stops(pair.target)
    yield from _template(pair.target)
    yield from _special_strings(pair.target)
    yield from _head(pair.draft)
    yield from _trimmed_head(pair)
    if names := [*differences(pair)]:
        yield Finding(
            "TOK-017",
            "info",
            f"Differences without effect on the output: {', '.join(names)}.",
            "none is needed, because the target's tokenizer, stops and template serve both",
        )


def _ids(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    target, draft, differing = pair.target, pair.draft, pair.differing
    if pair.relation == "disjoint":
        yield Finding(
            "TOK-001",
            "fatal",
            f"{len(target.used)} and {len(draft.used)} tokens share none that stands for text.",
            "name a draft that writes the same characters, or none: the target is pruned then",
        )
    elif differing:
        i = differing[0]
        yield Finding(
            "TOK-001",
            "error",
            f"{len(differing)} of {len(target.tokens)} ids differ ({i} is {show(target.tokens[i])} "
            f"for the target, {show(draft.tokens[i])} for the draft).",
            f"strategy {strategy}" if strategy else "restore the missing rows first (TOK-002)",
            differing[:5],
        )


def _rows(pair: Comparison) -> Iterator[Finding]:
    for side in pair.each:
        if not side.rows_suffice:
            yield Finding(
                "TOK-002",
                "fatal",
                f"{side.spec} has ids up to {side.count - 1}, but its embedding has "
                f"{side.embedding_rows} rows and its head {side.head_rows}.",
                "restore the tokenizer the model was trained with, or resize its embeddings",
                [side.count - 1],
            )
        if side.tensors and side.config_rows != side.embedding_rows:
            yield Finding(
                "TOK-002",
                "error",
                f"{side.spec} has {side.embedding_rows} rows in its embedding.",
                f"correct vocab_size {side.config_rows} in its config.json",
            )


def _special_ids(pair: Comparison) -> Iterator[Finding]:
    for side in pair.each:
        for name in (name for name, i in side.special_ids.items() if i is None):
            yield Finding(
                "TOK-006",
                "error",
                f"{side.spec} names a {name} that its vocabulary does not hold.",
                f"correct {name} in tokenizer_config.json",
            )
    if suffix := pair.target.suffix:
        yield Finding(
            "TOK-006",
            "error",
            f"The target's tokenizer ends every text, a prompt too, with "
            f"{show(pair.target.token(suffix[0]))}.",
            "set add_eos_token to false in tokenizer_config.json and correct tokenizer.json",
            suffix,
        )


def _stops(target: Vocabulary) -> Iterator[Finding]:
    if not target.all_stops:
        yield Finding(
            "TOK-007",
            "error",
            "No token ends a text of the target: neither tokenizer nor configs name one.",
            "set eos_token_id in its generation_config.json",
        )


def _template(target: Vocabulary) -> Iterator[Finding]:
    if target.chat_template is None:
        yield Finding(
            "TOK-009",
            "warning",
            "The target has no chat template to render messages with.",
            "use prompts given as text, or add a chat_template.jinja to the target",
        )
        return
    render: Any = render_jinja_template  # its annotation does not know the list it returns
    try:
        (text,), _ = render(
            [_CHAT],
            chat_template=target.chat_template,
            add_generation_prompt=True,
            **target.special_texts,
        )
    except Exception as error:  # a template raises whatever its expressions do
        yield Finding(
            "TOK-009",
            "warning",
            f"The target's chat template cannot render a system and a user message ({error}).",
            "leave system messages out of the prompts, or correct the template",
        )
        return
    ids, size = target.tokenizer.encode(text).ids, len(target.prefix)
    if size and ids[:size] == ids[size : 2 * size] == target.prefix:
        yield Finding(
            "TOK-009",
            "warning",
            f"Template and tokenizer both put {show(target.tokens[ids[0]])} before a text.",
            "encode rendered prompts with add_special_tokens=False, as is done here",
            target.prefix,
        )


def _special_strings(target: Vocabulary) -> Iterator[Finding]:
    """A user who writes a stop into a message should not end the turn."""
    for i in sorted(target.all_stops) if target.chat_template is not None else ():
        text = target.bytes_of([i]).decode(errors="replace")
        if i in target.tokenizer.encode(f"print('{text}')").ids:
            yield Finding(
                "TOK-010",
                "info",
                f"A user's text that holds {text!r} becomes the stop itself.",
                "encode texts that are not trusted with split_special_tokens=True",
                [i],
            )


def _head(draft: Vocabulary) -> Iterator[Finding]:
    if not draft.head_is_plain:
        addition = "a bias" if draft.head_bias else str(draft.logit_changes)
        yield Finding(
            "TOK-012",
            "warning",
            f"The head of {draft.spec} has {addition}, which neither the loss nor new or trimmed "
            "rows take over.",
            "measure the draft as it is (eval.run), or name another draft to train",
        )


def _trimmed_head(pair: Comparison) -> Iterator[Finding]:
    """d2t holds for each row the target's id less the row's number, t2d which ids have a row."""
    target, draft = pair.both
    for path in (draft.folder / name / "model.safetensors" for name in ("compact", "")):
        if not path.is_file():
            continue
        with open_safetensors(path) as file:
            tables = {name: file.get_tensor(name) for name in {"d2t", "t2d"} & {*file.keys()}}
        if not tables:
            continue
        d2t, t2d = (tables.get(name, np.zeros(0, int)) for name in ("d2t", "t2d"))
        ids = np.sort(np.arange(len(d2t)) + d2t)
        rows = target.head_rows or len(target.tokens)
        lost = [i for i in sorted(target.all_stops) if i not in ids]
        if len(t2d) != rows or not np.array_equal(ids, np.flatnonzero(t2d)):
            yield Finding(
                "TOK-015",
                "fatal",
                f"d2t ({len(d2t)}) and t2d ({len(t2d)}) of {path} do not name the same ids, each "
                f"once, of the target's {rows}.",
                "make the draft again",
            )
        elif lost:
            yield Finding(
                "TOK-015",
                "error",
                f"The trimmed head in {path} lacks {len(lost)} stops of the target.",
                "trim again; stops are always kept",
                lost[:5],
            )
        return


def differences(pair: Comparison) -> Iterator[str]:
    """Names of differences without effect on the output; they may lower acceptance."""
    target, draft = pair.both
    for side, other, name in ((target, draft, "target"), (draft, target, "draft")):
        count = len(side.used - other.used)
        if count and not pair.differing:
            yield f"tokens of the {name} only ({count})"
    for name in SPECIAL_NAMES:
        if target.special_ids.get(name) != draft.special_ids.get(name):
            yield name
    if target.bytes_of(target.prefix) != draft.bytes_of(draft.prefix):
        yield "what is put before a text"
    if {*map(target.token, target.all_stops)} != {*map(draft.token, draft.all_stops)}:
        yield "stops"
    flags = [
        {token["content"]: [bool(token.get(f)) for f in _FLAGS] for token in added}
        for added in (side.backend.get("added_tokens", []) for side in pair.both)
    ]
    if any(flags[0][text] != flags[1][text] for text in flags[0].keys() & flags[1].keys()):
        yield "flags of added tokens"
    if target.chat_template != draft.chat_template:
        yield "chat template"
    if pair.relation in (
        "identical",
        "padded",
        "permuted",
    ):  # others split texts differently anyway
        parts = [_parts(side.backend) for side in pair.both]
        yield from sorted(k for k in {**parts[0], **parts[1]} if parts[0].get(k) != parts[1].get(k))


def _parts(backend: dict[str, Any]) -> dict[str, Any]:
    """The keys of a tokenizer.json that decide how a text is split into tokens."""
    parts = {k: v for k, v in backend.items() if k not in _NOT_COMPARED}
    parts |= {k: v or None for k, v in backend["model"].items() if k != "vocab"}
    merges = backend["model"].get("merges", [])  # older files write a merge as one string
    parts["merges"] = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
    return parts


def find_by_weights(target: Vocabulary, draft: Vocabulary, strategy: str) -> Iterator[Finding]:
    """TOK-016: what the models give to a probe text; loads one after the other in fp32."""
    retokenizer = None
    if strategy not in ("direct", "padded"):
        retokenizer = Retokenizer(build_map(target, draft), target, draft)
    text = target.tokenizer.encode(_PROBE).ids
    for side in (target, draft):
        ids = retokenizer.from_start(text) if retokenizer and side is draft else text
        with torch.inference_mode():
            logits = load_model(side.spec, torch.float32)(torch.tensor([ids])).logits[0]
        p = logits.softmax(-1).mean(0).numpy()
        if not np.isfinite(p).all():
            yield Finding(
                "TOK-016",
                "fatal",
                f"The logits of {side.spec} on a probe text are not finite.",
                "its weights are damaged: fetch or copy them again",
            )
        unused = [i for i in range(len(p)) if not is_used(side.token(i))]
        if (mass := p[unused].sum()) > LEAK:
            yield Finding(
                "TOK-016",
                "warning",
                f"{side.spec} gives {mass:.1%} of its probability to ids without a token.",
                "zero rows do that: set them to a row that is never likely",
                sorted(unused, key=lambda i: -p[i])[:5],
            )
        if retokenizer and side is draft:
            lost = 1 - p[retokenizer.vocab_map.mapped.numpy()].sum()
            if lost > LOST:
                yield Finding(
                    "TOK-016",
                    "warning",
                    f"The draft gives {lost:.1%} of its probability to tokens the target lacks.",
                    "train it: strategy auto transplants it onto the target's vocabulary",
                )


def show(token: Token | None) -> str:
    """A token as a finding names it."""
    return "none" if token is None else repr(token[1].decode("utf-8", "backslashreplace"))
