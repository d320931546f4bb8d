"""The comparison of two vocabularies, and its findings.

Codes: TOK-001 to 012 and 015 are found here, in that order (docs/vocabulary.md); 000 and 013 when
files are read (align/vocabulary.py), 014 when a map is (align/vocab_map.py), 016 on the models
(align/behaviour.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from align.token_bytes import Token, is_used
from align.vocabulary import SPECIAL_NAMES, Vocabulary, open_safetensors

Relation = Literal[
    "identical", "padded", "permuted", "subset", "superset", "intersection", "disjoint"
]
Severity = Literal["fatal", "error", "warning", "info"]

_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")

# Texts on which tokenizers part: spaces, lines, case, composition, digits, scripts.
PROBES = (
    "def f(x):\n\t\treturn x  # é\n",
    "    if a == b:\r\n        pass\n\n\n",
    "x , y",
    " " * 17 + "end",
    "caf\u00e9 cafe\u0301 \ufb01 \u00a0|\u200b|\ufeff",
    "1,234,567.89 § 12(b)(ii) “quoted”",
    "The Parties agree; THE PARTIES AGREE.",
    "日本語のテキスト עברית العربية",
    "👩\u200d👩\u200d👧 ok",
    "▁ Ġ <0x0A>",
)
_CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Write a function."},
]


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    severity: fatal (no lossless strategy), error (drafting as it is would go wrong: the strategy or
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
        """Once, where a target drafts for itself."""
        return (self.target,) if self.draft is self.target else self.both

    @cached_property
    def differing(self) -> list[int]:
        """Ids that stand for different bytes; unused or missing, an id stands for none."""
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
        """Share of the target's tokens in the texts that the draft has too; by count if empty."""
        target, draft = self.both
        encodings = target.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        ids = [i for encoding in encodings for i in encoding.ids]
        tokens = [target.tokens[i] for i in ids] or [*target.used]
        return sum(token in draft.used for token in tokens) / max(len(tokens), 1)


def find(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    """What the checks find."""
    yield from _ids(pair, strategy)
    yield from _rows(pair)
    yield from _holes(pair)
    yield from _pipelines(pair)
    yield from _probes(pair)
    yield from _special_ids(pair)
    yield from _stops(pair, strategy)
    yield from _flags(pair)
    yield from _templates(pair)
    yield from _special_strings(pair.target)
    yield from _prefix_stability(pair.target)
    yield from _heads(pair)
    yield from _trimmed_head(pair)


def _ids(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    lost = "name a draft that writes the same characters, or none: the target is pruned then"
    target, draft, differing = pair.target, pair.draft, pair.differing
    if differing:
        i = differing[0]
        yield Finding(
            "TOK-001",
            "error" if strategy else "fatal",
            f"{len(differing)} of {len(target.tokens)} ids differ ({i} is {show(target.tokens[i])} "
            f"for the target, {show(draft.tokens[i])} for the draft).",
            f"strategy {strategy}" if strategy else lost,
            differing[:5],
        )
        return
    for side, other, name in ((target, draft, "target"), (draft, target, "draft")):
        used = (i for i, token in enumerate(side.tokens) if is_used(token))
        if missing := [i for i in used if not is_used(other.token(i))]:
            yield Finding(
                "TOK-001",
                "warning" if strategy else "fatal",
                f"{len(missing)} ids have a token for the {name} only, {missing[0]} the first.",
                "nothing: they are never drafted" if strategy else lost,
                missing[:5],
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
    rows = pair.draft.embedding_rows
    if rows is not None and rows < pair.target.count and pair.relation != "disjoint":
        yield Finding(
            "TOK-002",
            "warning",
            f"The draft's embedding has {rows} rows, the target ids up to {pair.target.count - 1}.",
            "nothing: they are retokenized for the draft",
            [pair.target.count - 1],
        )


def _holes(pair: Comparison) -> Iterator[Finding]:
    for side in pair.each:
        if holes := [i for i, token in enumerate(side.tokens) if token is None]:
            yield Finding(
                "TOK-003",
                "warning",
                f"{len(holes)} ids of {side.spec} below {len(side.tokens)} have no token.",
                "nothing, unless one is sampled: then the tokenizer is not the model's",
                holes[:5],
            )
        first: dict[Token, int] = {}
        duplicates = {
            i: first[t] for i, t in enumerate(side.tokens) if t and first.setdefault(t, i) < i
        }
        if duplicates:
            i, earlier = next(iter(duplicates.items()))
            yield Finding(
                "TOK-003",
                "warning",
                f"{len(duplicates)} tokens of {side.spec} equal an earlier one ({i} and {earlier} "
                f"are both {show(side.tokens[i])}).",
                "nothing while drafting by id; a map by bytes sums their probabilities",
                [*duplicates][:5],
            )


def _pipelines(pair: Comparison) -> Iterator[Finding]:
    """Only where the vocabularies are the same: others encode otherwise in any case."""
    if pair.relation not in ("identical", "padded", "permuted"):
        return
    mine, theirs = pair.target.backend, pair.draft.backend
    models = mine["model"], theirs["model"]
    names = ("normalizer", "pre_tokenizer", "decoder")
    parts = [name for name in names if mine.get(name) != theirs.get(name)]
    names = ("type", "byte_fallback", "unk_token")
    parts += [n for n in names if (models[0].get(n) or None) != (models[1].get(n) or None)]
    # older files write a merge as one string
    merges = [
        [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges", [])]
        for model in models
    ]
    if merges[0] != merges[1]:
        parts.append(f"merges ({len(merges[0])} and {len(merges[1])})")
    if parts:
        yield Finding(
            "TOK-004",
            "warning",
            f"The vocabularies agree, not how text is cut into them: {', '.join(parts)} differ.",
            "nothing: the target's tokenizer encodes; acceptance is lower untuned",
        )


def _probes(pair: Comparison) -> Iterator[Finding]:
    count = f"of {len(PROBES)} probe texts"
    for side in pair.each:
        written = [side.bytes_of(side.encode_plain(text)) for text in PROBES]
        pairs = zip(PROBES, written, strict=True)
        if changed := [t for t, raw in pairs if raw not in (t.encode(), b" " + t.encode())]:
            yield Finding(
                "TOK-005",
                "warning" if side is pair.target else "info",
                f"{len(changed)} {count} do not come back from the tokenizer of {side.spec} byte "
                f"by byte (the first: {changed[0]!r}).",
                "nothing: losslessness holds token by token",
            )
    if pair.relation not in ("identical", "padded"):
        return
    target, draft = pair.both
    if differ := [t for t in PROBES if target.encode(t.encode()) != draft.encode(t.encode())]:
        yield Finding(
            "TOK-005",
            "warning",
            f"{len(differ)} {count} are encoded otherwise by the draft's tokenizer (the first: "
            f"{differ[0]!r}).",
            "nothing: the target's tokenizer encodes; acceptance is lower untuned",
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
    for name in SPECIAL_NAMES:
        mine, theirs = (side.special_ids.get(name) for side in pair.both)
        if mine != theirs:
            yield Finding(
                "TOK-006",
                "warning",
                f"{name} is {mine} for the target, {theirs} for the draft.",
                "nothing: prompts are rendered with the target's tokenizer",
                [i for i in (mine, theirs) if i is not None],
            )
    first = [side.bytes_of(side.prefix).decode(errors="replace") for side in pair.both]
    if first[0] != first[1]:
        yield Finding(
            "TOK-006",
            "info",
            f"Before a text the target's tokenizer puts {first[0]!r}, the draft's {first[1]!r}.",
            "nothing: where ids differ each model reads its own, else the target's",
        )


def _stops(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    target, draft = pair.both
    if not target.all_stops:
        yield Finding(
            "TOK-007",
            "error",
            "No token ends a text of the target: neither tokenizer nor configs name one.",
            "set eos_token_id in its generation_config.json",
        )
    stops = {i: target.token(i) for i in sorted(target.all_stops)}
    # by map the draft's end of text stands for the target's (align/vocab_map.py)
    mapped = {target.special_ids.get("eos_token")} if strategy in ("intersection", "string") else {}
    missing = [i for i, token in stops.items() if token not in draft.used and i not in mapped]
    if missing:
        yield Finding(
            "TOK-007",
            "error",
            f"The target's stops {missing} cannot be drafted: the draft has no such token.",
            "nothing: the last token comes from the target; or use a draft that has every stop",
            missing[:5],
        )
    if set(stops.values()) != {draft.token(i) for i in draft.all_stops} - {None}:
        yield Finding(
            "TOK-007",
            "warning",
            f"A text ends at {[*stops]} for the target, {sorted(draft.all_stops)} for the draft.",
            "nothing: the target's stops are used for both",
            sorted(target.all_stops ^ draft.all_stops)[:5],
        )


def _flags(pair: Comparison) -> Iterator[Finding]:
    mine, theirs = (
        {token["content"]: token for token in side.backend.get("added_tokens", [])}
        for side in pair.both
    )
    other = {
        text: differ
        for text in mine
        if text in theirs
        and (differ := [f for f in _FLAGS if bool(mine[text].get(f)) != bool(theirs[text].get(f))])
    }
    if other:
        text, differ = next(iter(other.items()))
        yield Finding(
            "TOK-008",
            "warning",
            f"{len(other)} added tokens are flagged otherwise by the draft ({mine[text]['id']}, "
            f"{text!r}: {', '.join(differ)}).",
            "nothing: texts are encoded with the target's tokenizer",
            [mine[text]["id"] for text in other][:5],
        )


def _templates(pair: Comparison) -> Iterator[Finding]:
    from jinja2 import TemplateError

    target, draft = pair.both
    if target.chat_template is None:
        yield Finding(
            "TOK-009",
            "warning",
            "The target has no chat template to render messages with.",
            "use prompts given as text, or add a chat_template.jinja to the target",
        )
        return
    try:
        ids = target.tokenizer.encode(_rendered(target)).ids
    except TemplateError as refused:
        yield Finding(
            "TOK-009",
            "warning",
            f"The target's chat template does not take a system message ({refused}).",
            "leave such messages out of the prompts",
        )
    else:
        size = len(target.prefix)
        if size and ids[:size] == ids[size : 2 * size] == target.prefix:
            yield Finding(
                "TOK-009",
                "warning",
                f"Template and tokenizer both put {show(target.tokens[ids[0]])} before a text.",
                "encode rendered prompts with add_special_tokens=False, as is done here",
                target.prefix,
            )
    if target.chat_template != draft.chat_template:
        yield Finding(
            "TOK-009",
            "info",
            f"The draft has {'no' if draft.chat_template is None else 'another'} chat template.",
            "nothing: the target's renders for both; acceptance is lower untuned",
        )


def _rendered(vocabulary: Vocabulary) -> str:
    """The probe conversation in a chat template, as transformers renders it, which is slow to load.

    Raises jinja2.TemplateError where the template does not take it.
    """
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: "1 January 2026"
    assert vocabulary.chat_template is not None
    return environment.from_string(vocabulary.chat_template).render(
        messages=_CHAT, add_generation_prompt=True, **vocabulary.special_texts
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


def _prefix_stability(target: Vocabulary) -> Iterator[Finding]:
    """Answers are read as ids and never encoded again; other tools' logits caches rely on this."""
    pairs = [(text[: len(text) // 2], text) for text in PROBES]
    pairs += [("def add(a, b):\n", "def add(a, b):\n    return a + b\n"), ("The ", "The Licensee")]

    def ids(text: str) -> list[int]:
        return target.tokenizer.encode(text, add_special_tokens=False).ids

    moved = [prompt for prompt, text in pairs if ids(text)[: len(ids(prompt))] != ids(prompt)]
    if moved:
        yield Finding(
            "TOK-011",
            "info",
            f"{len(moved)} of {len(pairs)} prompts are encoded otherwise once an answer follows "
            f"(the first: {moved[0]!r}).",
            "nothing: answers are kept as ids; end prompts at a line's end where text is exchanged",
        )


def _heads(pair: Comparison) -> Iterator[Finding]:
    for side in pair.each:
        if side.head_bias:
            yield Finding(
                "TOK-012",
                "warning",
                f"The head of {side.spec} has a bias, which no new or trimmed head carries along.",
                "keep the whole head (draft_vocab_size: null), or draft by map",
            )
        if side.logit_changes:
            yield Finding(
                "TOK-012",
                "info",
                f"{side.spec} changes its logits after the head ({side.logit_changes}).",
                "nothing in its own forward; new or trimmed heads and the loss lack it",
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


def show(token: Token | None) -> str:
    """A token as a finding names it."""
    return "none" if token is None else repr(token[1].decode("utf-8", "backslashreplace"))
