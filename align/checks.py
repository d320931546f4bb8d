"""What is compared of two vocabularies: checks 1 to 15.

The number of a check is the code of its findings, TOK-001 to TOK-015 (docs/vocabulary.md). TOK-000
is for files that cannot be read (align/vocabulary.py), TOK-016 for the models (align/behaviour.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from align.sources import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from align.token_bytes import Token, is_used
from align.vocabulary import SPECIAL_NAMES, Vocabulary, open_safetensors

Relation = Literal[
    "identical", "padded", "permuted", "subset", "superset", "intersection", "disjoint"
]
Severity = Literal["fatal", "error", "warning", "info"]

VOCAB_MAP = "vocab_map.safetensors"
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
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "A tool.", "parameters": {"type": "object"}},
    }
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
    ids: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.code} {self.severity.upper()}: {self.message} Fix: {self.fix}."


class Found(NamedTuple):
    """What a check says: a Finding but for its code, with all the ids."""

    severity: Severity
    message: str
    fix: str
    ids: Sequence[int] = ()


fatal, error = partial(Found, "fatal"), partial(Found, "error")
warning, info = partial(Found, "warning"), partial(Found, "info")


def findings(number: int, found: Iterable[Found]) -> list[Finding]:
    """What check `number` found."""
    return [Finding(f"TOK-{number:03}", *one[:3], tuple(one.ids[:5])) for one in found]


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
        both = zip(self.target.tokens, self.draft.tokens, strict=False)
        return [i for i, (a, b) in enumerate(both) if is_used(a) and is_used(b) and a[1] != b[1]]

    @cached_property
    def relation(self) -> Relation:
        """The draft's vocabulary against the target's (subset: the draft has fewer tokens)."""
        target, draft = self.both
        if not self.differing and {raw for _, raw in target.used} == {raw for _, raw in draft.used}:
            rows = [(len(one.tokens), one.head_rows) for one in self.both]
            return "identical" if rows[0] == rows[1] else "padded"
        if target.used == draft.used:
            return "permuted"
        if draft.used < target.used:
            return "subset"
        if draft.used > target.used:
            return "superset"
        shared = any(kind == "normal" for kind, _ in target.used & draft.used)
        return "intersection" if shared else "disjoint"

    def coverages(self, texts: list[str]) -> dict[str, float]:
        """Share of one's tokens that the other has: by count, and by frequency in texts."""
        shares = {}
        pairs = ("target", self.target, self.draft), ("draft", self.draft, self.target)
        for name, one, other in pairs:
            by_count = len(one.used & other.used) / max(len(one.used), 1)
            covered = total = 0
            for encoding in one.tokenizer.encode_batch(texts, add_special_tokens=False):
                total += len(encoding.ids)
                covered += sum(one.tokens[i] in other.used for i in encoding.ids)
            shares[f"{name}_by_count"] = by_count
            shares[f"{name}_by_frequency"] = covered / total if total else by_count
        return shares


def all_findings(pair: Comparison, strategy: str | None) -> list[Finding]:
    """What checks 1 to 15 find, in that order."""
    checks = (
        _ids(pair, strategy),
        _rows(pair),
        _holes(pair),
        _pipelines(pair),
        _probes(pair),
        _special_ids(pair),
        _stops(pair, strategy),
        _flags(pair),
        _templates(pair),
        _special_strings(pair),
        _prefix_stability(pair.target),
        _heads(pair),
        _adapters(pair),
        _maps(pair),
        _trimmed_head(pair),
    )
    return [one for number, check in enumerate(checks, start=1) for one in findings(number, check)]


def _ids(pair: Comparison, strategy: str | None) -> Iterator[Found]:
    lost = "name a draft whose tokens write the same characters, or none: the target is pruned then"
    target, draft, differing = pair.target, pair.draft, pair.differing
    if differing:
        i = differing[0]
        yield Found(
            "error" if strategy else "fatal",
            f"{len(differing)} of {len(target.tokens)} ids differ ({i} is {show(target.tokens[i])} "
            f"for the target, {show(draft.tokens[i])} for the draft); drafting by id would "
            "corrupt.",
            f"strategy {strategy}" if strategy else lost,
            differing,
        )
        return
    for one, other, name in ((target, draft, "target"), (draft, target, "draft")):
        used = (i for i, token in enumerate(one.tokens) if is_used(token))
        if missing := [i for i in used if not is_used(other.token(i))]:
            yield Found(
                "warning" if strategy else "fatal",
                f"{len(missing)} ids have a token for the {name} only ({missing[0]} is "
                f"{show(one.tokens[missing[0]])}).",
                "nothing: they are never drafted" if strategy else lost,
                missing,
            )


def _rows(pair: Comparison) -> Iterator[Found]:
    target, draft = pair.both
    for one in pair.each:
        if not one.rows_suffice:
            yield fatal(
                f"The tokenizer of {one.spec} has ids up to {one.count - 1}, but its embedding "
                f"has {one.embedding_rows} rows and its head {one.head_rows}.",
                "restore the tokenizer the model was trained with, or resize its embeddings",
                [one.count - 1],
            )
        if one.tensors and one.config_rows != one.embedding_rows:
            yield error(
                f"The config of {one.spec} says vocab_size {one.config_rows}, its embedding has "
                f"{one.embedding_rows} rows.",
                "correct vocab_size in config.json",
            )
    rows = draft.embedding_rows
    if rows is not None and rows < target.count and pair.relation != "disjoint":
        yield warning(
            f"The draft's embedding has {rows} rows, so it cannot read the target's ids up to "
            f"{target.count - 1} as they are.",
            "nothing: they are retokenized for the draft",
            [target.count - 1],
        )
    if pair.relation == "padded":
        yield info(
            f"Padded only: rows {target.head_rows} (target) and {draft.head_rows} (draft), tokens "
            f"{len(target.tokens)} and {len(draft.tokens)}.",
            "nothing: rows beyond the shared ids are never drafted",
        )


def _holes(pair: Comparison) -> Iterator[Found]:
    for one in pair.each:
        if holes := [i for i, token in enumerate(one.tokens) if token is None]:
            yield warning(
                f"{len(holes)} ids of {one.spec} below {len(one.tokens)} have no token.",
                "nothing, unless one is ever sampled: then the tokenizer is not the model's",
                holes,
            )
        first: dict[Token, int] = {}
        again = [i for i, t in enumerate(one.tokens) if t and first.setdefault(t, i) != i]
        if again:
            token = one.tokens[again[0]]
            assert token is not None
            yield warning(
                f"{len(again)} tokens of {one.spec} have the bytes of an earlier one ({again[0]} "
                f"and {first[token]} are both {show(token)}).",
                "nothing while drafting by id; a map by bytes sums their probabilities",
                again,
            )


def _pipelines(pair: Comparison) -> Iterator[Found]:
    """Only where the vocabularies are the same: others encode otherwise in any case."""
    mine, theirs = pair.target.backend, pair.draft.backend
    models = mine["model"], theirs["model"]
    if pair.relation not in ("identical", "padded", "permuted"):
        kinds = [model.get("type") for model in models]
        if kinds[0] != kinds[1]:
            yield info(
                f"The target's tokenizer is of type {kinds[0]}, the draft's {kinds[1]}.",
                "nothing: tokens are compared by their bytes",
            )
        return
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
        yield warning(
            f"The vocabularies agree, not how text is cut into them: {', '.join(parts)} differ.",
            "nothing: texts are encoded with the target's tokenizer; a draft trained on other cuts "
            "is accepted less until it is tuned",
        )


def _probes(pair: Comparison) -> Iterator[Found]:
    count = f"of {len(PROBES)} probe texts"
    encoded = {}
    for one in pair.each:
        encoded[one.spec] = [one.encode_plain(text) for text in PROBES]
        changed = [
            text
            for text, encoding in zip(PROBES, encoded[one.spec], strict=True)
            if one.bytes_of(encoding.ids) not in (text.encode(), b" " + text.encode())
        ]
        if changed:
            yield Found(
                "warning" if one is pair.target else "info",
                f"{len(changed)} {count} do not come back from the tokenizer "
                f"of {one.spec} byte by byte (the first: {changed[0]!r}).",
                "nothing for losslessness, which holds token by token; a text with such characters "
                "is not seen by the models as it was written",
            )
    if pair.relation not in ("identical", "padded"):
        return
    if other := [t for t in PROBES if len({(*one.encode(t.encode()),) for one in pair.each}) > 1]:
        yield warning(
            f"{len(other)} {count} are encoded otherwise by the draft's "
            f"tokenizer (the first: {other[0]!r}).",
            "nothing: the target's tokenizer encodes for both; acceptance is lower untuned",
        )
    both = zip(PROBES, encoded[pair.target.spec], encoded[pair.draft.spec], strict=True)
    if moved := [t for t, a, b in both if a.ids == b.ids and a.offsets != b.offsets]:
        yield info(
            f"The tokens of {len(moved)} {count} are the same, but begin "
            f"or end elsewhere by the draft's offsets (the first: {moved[0]!r}).",
            "nothing here, where texts are aligned by the bytes of their tokens; a mask cut by "
            "offsets elsewhere would move",
        )


def _special_ids(pair: Comparison) -> Iterator[Found]:
    for one in pair.each:
        for name in (name for name, i in one.special_ids.items() if i is None):
            yield error(
                f"{one.spec} names a {name} that its vocabulary does not hold.",
                f"correct {name} in tokenizer_config.json",
            )
    for name in SPECIAL_NAMES:
        mine, theirs = (one.special_ids.get(name) for one in pair.both)
        if mine != theirs:
            yield warning(
                f"{name} is {mine} for the target, {theirs} for the draft.",
                "nothing: prompts are rendered with the target's tokenizer",
                [i for i in (mine, theirs) if i is not None],
            )
    added = [one.bytes_of(one.prefix) for one in pair.both]
    if added[0] != added[1]:
        yield info(
            f"Before every text the target's tokenizer puts {added[0].decode(errors='replace')!r}, "
            f"the draft's {added[1].decode(errors='replace')!r}.",
            "nothing: each model reads the one it was trained with where their ids differ, the "
            "target's where they agree",
        )


def _stops(pair: Comparison, strategy: str | None) -> Iterator[Found]:
    target, draft = pair.both
    wanted = target.all_stops
    if not wanted:
        yield error(
            "No token ends a text of the target (no eos in tokenizer, config or generation "
            "config).",
            "set eos_token_id in its generation_config.json",
        )
    for who, ids in target.stops.items():
        if ids and ids != wanted:
            yield info(
                f"The target's {who} lists only {sorted(ids)} of its stops {sorted(wanted)}.",
                "nothing: all of them end a text",
                sorted(wanted - ids),
            )
    stops = {i: target.token(i) for i in sorted(wanted)}
    # by map the draft's end of text stands for the target's (align/vocab_map.py)
    mapped = {target.special_ids.get("eos_token")} if strategy in ("intersection", "string") else {}
    missing = [i for i, token in stops.items() if token not in draft.used and i not in mapped]
    if missing:
        yield error(
            f"The target's stops {missing} cannot be drafted: the draft has no such token.",
            "nothing, and the last token of a text always comes from the target; or use a draft "
            "whose vocabulary holds every stop",
            missing,
        )
    if set(stops.values()) != {draft.token(i) for i in draft.all_stops} - {None}:
        yield warning(
            f"A text ends at {sorted(wanted)} for the target, at {sorted(draft.all_stops)} for the "
            "draft.",
            "nothing: the target's stops are used for both",
            sorted(wanted ^ draft.all_stops),
        )


def _flags(pair: Comparison) -> Iterator[Found]:
    mine, theirs = (
        {token["content"]: token for token in one.backend.get("added_tokens", [])}
        for one in pair.both
    )
    flags = {
        text: [f for f in _FLAGS if bool(mine[text].get(f)) != bool(theirs[text].get(f))]
        for text in mine
        if text in theirs
    }
    if other := [text for text, differ in flags.items() if differ]:
        text = other[0]
        yield warning(
            f"{len(other)} added tokens are flagged otherwise by the draft ({mine[text]['id']}, "
            f"{text!r}: {', '.join(flags[text])}).",
            "nothing: texts are encoded with the target's tokenizer",
            [mine[text]["id"] for text in other],
        )


def _rendered(vocabulary: Vocabulary, tools: bool) -> str:
    """The probe conversation in a chat template, as transformers renders it.

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
        messages=_CHAT,
        tools=_TOOLS if tools else None,
        add_generation_prompt=True,
        **vocabulary.special_texts,
    )


def _templates(pair: Comparison) -> Iterator[Found]:
    from jinja2 import TemplateError

    target, draft = pair.both
    if target.chat_template is None:
        yield warning(
            "The target has no chat template: prompts given as messages cannot be rendered.",
            "use prompts given as text, or add a chat_template.jinja to the target",
        )
        return
    texts: dict[str, list[str]] = {one.spec: [] for one in pair.each}  # without tools, and with
    for one in (one for one in pair.each if one.chat_template is not None):
        try:
            for tools in (False, True):
                texts[one.spec].append(_rendered(one, tools))
        except TemplateError as refused:
            yield Found(
                "warning" if one is target else "info",
                f"The chat template of {one.spec} does not take a system message"
                f"{' and tools' if tools else ''} ({refused}).",
                "leave such messages out of the prompts" if one is target else "nothing",
            )
    if texts[target.spec] and target.prefix:
        ids, size = target.tokenizer.encode(texts[target.spec][0]).ids, len(target.prefix)
        if ids[:size] == ids[size : 2 * size] == target.prefix:
            yield warning(
                "The target's template writes what its tokenizer puts before a text as well "
                f"({show(target.tokens[ids[0]])} twice).",
                "encode rendered prompts with add_special_tokens=False, as is done here",
                target.prefix,
            )
    if target.chat_template != draft.chat_template:
        same = " that renders the same" if texts[target.spec] == texts[draft.spec] else ""
        how = "has none" if draft.chat_template is None else f"has another{same}"
        yield info(
            f"The target has a chat template, the draft {how}.",
            "nothing: the target's renders for both; a draft trained on another accepts less "
            "untuned",
        )


def _special_strings(pair: Comparison) -> Iterator[Found]:
    """A user who writes a stop into a message should not end the turn."""
    target, draft = pair.both
    for i in sorted(target.all_stops):
        token = target.token(i)
        if token is None:
            continue
        text = f"print('{token[1].decode(errors='replace')}')"
        cut = [i in target.tokenizer.encode(text).ids]
        if token in draft.tokens:
            cut.append(draft.tokens.index(token) in draft.tokenizer.encode(text).ids)
        if len(set(cut)) > 1:
            yield warning(
                f"In a user's text {show(token)} is a special token for the "
                f"{'target' if cut[0] else 'draft'} only.",
                "nothing: the target's tokenizer encodes for both",
                [i],
            )
        elif cut[0] and target.chat_template is not None:
            yield info(
                f"A user's text that holds {show(token)} becomes the stop itself.",
                "encode users' texts with split_special_tokens=True where they are not trusted",
                [i],
            )


def _prefix_stability(target: Vocabulary) -> Iterator[Found]:
    """Answers are read as ids and never encoded again; others' logits caches rest on this."""
    pairs = [(text[: len(text) // 2], text) for text in PROBES]
    pairs += [("def add(a, b):\n", "def add(a, b):\n    return a + b\n"), ("The ", "The Licensee")]
    moved = []
    for pair in pairs:
        prompt, whole = target.tokenizer.encode_batch([*pair], add_special_tokens=False)
        if whole.ids[: len(prompt.ids)] != prompt.ids:
            moved.append(pair[0])
    if moved:
        yield info(
            f"{len(moved)} of {len(pairs)} prompts are encoded otherwise once an answer follows "
            f"(the first: {moved[0]!r}).",
            "nothing: answers are kept as ids; end prompts at a line's end where text is exchanged",
        )


def _heads(pair: Comparison) -> Iterator[Found]:
    for one in pair.each:
        if one.head_bias:
            yield warning(
                f"The head of {one.spec} has a bias, which no transplant or trimmed head carries "
                "along.",
                "keep the whole head (draft_vocab_size: null), and draft by map instead of a "
                "transplant",
            )
        if one.logit_changes:
            yield info(
                f"{one.spec} changes its logits after the head ({one.logit_changes}).",
                "nothing while its own forward computes them; a trimmed or transplanted head, and "
                "the loss, lack it",
            )
    mine, theirs = pair.target.tied, pair.draft.tied
    if mine != theirs:
        words = {True: "tied to", False: "separate from", None: "of unknown relation to"}
        yield info(
            f"The head is {words[mine]} the embedding in the target, {words[theirs]} it in the "
            "draft.",
            "nothing: memory is counted accordingly",
        )


def _adapters(pair: Comparison) -> Iterator[Found]:
    for one in pair.each:
        path = one.folder / ADAPTER_CONFIG
        config = read_json(path) if path.is_file() else {}
        names = config.get("modules_to_save") or []
        touched = [name for name in names if "embed" in name or "lm_head" in name]
        if touched or config.get("trainable_token_indices"):
            yield error(
                f"{one.spec} holds an adapter that trains {touched or 'single token rows'} beside "
                f"its model ({ADAPTER_WEIGHTS} is not read here).",
                "merge it with peft's merge_and_unload and name the merged folder",
            )


def _maps(pair: Comparison) -> Iterator[Found]:
    for path in (one.folder / VOCAB_MAP for one in pair.each):
        if not path.is_file():
            continue
        with open_safetensors(path) as file:
            made_for = file.metadata() or {}
        hashes = {one.sha256 for one in pair.each}
        other = [k for k in ("target_sha256", "draft_sha256") if made_for.get(k) not in hashes]
        if other:
            yield error(
                f"{path} was made for other tokenizers ({', '.join(other)} "
                f"{str(made_for.get(other[0]))[:12]}… is neither tokenizer's).",
                "delete the map; it is made again from the tokenizers",
            )


def _trimmed_head(pair: Comparison) -> Iterator[Found]:
    """d2t holds for each row the target's id less the row's number, t2d which ids have a row."""
    stops = sorted(pair.target.all_stops)
    for folder in (pair.draft.folder / "compact", pair.draft.folder):
        path = folder / "model.safetensors"
        tables = _tables(path) if path.is_file() else {}
        if not tables:
            continue
        if problem := _table_problem(tables, pair.target):
            yield fatal(f"{path}: {problem}.", "make the draft again")
        elif lost := [i for i in stops if i < len(tables["t2d"]) and not tables["t2d"][i]]:
            yield error(
                f"The trimmed head in {path} lacks {len(lost)} stops of the target.",
                "trim again; stops are always kept",
                lost,
            )
        return


def _tables(path: Path) -> dict[str, Any]:
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in {"d2t", "t2d"} & {*file.keys()}}


def _table_problem(tables: dict[str, Any], target: Vocabulary) -> str | None:
    """What is wrong with the id tables of a trimmed head, None if nothing."""
    import numpy as np

    if len(tables) < 2:
        return f"{({'d2t', 't2d'} - tables.keys()).pop()} is missing beside the other table"
    d2t, t2d = tables["d2t"], tables["t2d"]
    ids = np.arange(len(d2t)) + d2t
    rows = target.head_rows or len(target.tokens)
    if len(t2d) != rows:
        return f"t2d has {len(t2d)} entries, the target's head {rows} rows"
    if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
        return f"d2t leads to id {int(ids.max())}, beyond the target's {rows} rows"
    if len(set(ids.tolist())) != len(ids):
        return "d2t sends two rows to one id"
    if sorted(ids.tolist()) != np.flatnonzero(t2d).tolist():
        return "d2t and t2d name different ids"
    return None


def show(token: Token | None) -> str:
    """A token as a finding names it."""
    return "none" if token is None else repr(token[1].decode("utf-8", "backslashreplace"))
