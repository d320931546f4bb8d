"""What is compared of two sides. The number of a check is the code of its findings:

TOK-000  files that are missing or cannot be read (align/side.py)
TOK-001  the same id stands for different tokens
TOK-002  ids against the rows of embedding and head
TOK-003  ids without a token, tokens spelt alike
TOK-004  the pipelines: model, merges, normaliser, pre-tokenizer, decoder
TOK-005  probe texts: encodings, offsets, round trips, coverage
TOK-006  bos, eos, pad and unk ids, and what is put before and after a text
TOK-007  the tokens that end a text, as tokenizer, config and generation config say
TOK-008  the same added token, flagged otherwise on the other side
TOK-009  rendered chat templates, double BOS
TOK-010  special strings inside a user's text
TOK-011  whether a prompt's ids begin the ids of prompt and answer
TOK-012  tied embeddings, head bias, soft cap and scale of the logits
TOK-013  adapters that brought rows of their own
TOK-014  maps and answers made for other tokenizers (the latter: distill/logit_cache.py)
TOK-015  the id tables of a trimmed head
TOK-016  behaviour of the models themselves (align/behaviour.py, with --weights)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from align.side import ADAPTER, SPECIAL_NAMES, Side, is_used, safetensors_header
from align.sources import read_json
from align.token_bytes import Key

Relation = Literal[
    "identical", "padded", "permuted", "subset", "superset", "intersection", "disjoint"
]
Severity = Literal["fatal", "error", "warning", "info"]

VOCAB_MAP = "vocab_map.safetensors"
_SHOWN = 5  # examples in a finding
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
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.code} {self.severity.upper()}: {self.message} Fix: {self.fix}."


def differing_ids(target: Side, draft: Side) -> list[int]:
    """Ids that stand for different bytes; unused or missing, an id stands for none."""
    return [
        i
        for i, (a, b) in enumerate(zip(target.keys, draft.keys, strict=False))
        if a is not None and b is not None and a[1] != b[1] and "unused" not in (a[0], b[0])
    ]


def relation_of(target: Side, draft: Side, differing: list[int]) -> Relation:
    """The draft's vocabulary against the target's (subset: the draft has fewer tokens)."""
    mine, theirs = target.used, draft.used
    if not differing:
        bytes_of = [{key[1] for key in keys} for keys in (mine, theirs)]
        if bytes_of[0] == bytes_of[1]:
            same_size = len(target.keys) == len(draft.keys) and target.head_rows == draft.head_rows
            return "identical" if same_size else "padded"
    if mine == theirs:
        return "permuted"
    if theirs < mine:
        return "subset"
    if theirs > mine:
        return "superset"
    shared = any(kind == "normal" for kind, _ in mine & theirs)
    return "intersection" if shared else "disjoint"


def rows_suffice(side: Side) -> bool:
    """Whether embedding and head have a row for every id in use."""
    rows = [r for r in (side.embedding_rows, side.head_rows) if r is not None]
    return all(r >= side.count for r in rows)


def coverages(target: Side, draft: Side, texts: list[str]) -> dict[str, float]:
    """Share of one side's tokens that the other has: by count, and by frequency in texts."""
    shares = {}
    for name, one, other in (("target", target, draft), ("draft", draft, target)):
        shares[f"{name}_by_count"] = len(one.used & other.used) / max(len(one.used), 1)
        covered = total = 0
        for encoding in one.tokenizer.encode_batch(texts, add_special_tokens=False):
            total += len(encoding.ids)
            covered += sum(one.keys[i] in other.used for i in encoding.ids)
        by_count = shares[f"{name}_by_count"]
        shares[f"{name}_by_frequency"] = covered / total if total else by_count
    return shares


def all_findings(
    target: Side, draft: Side, differing: list[int], relation: Relation, strategy: str | None
) -> list[Finding]:
    """What checks 1 to 15 find, in that order."""
    return [
        *_check_ids(target, draft, differing, strategy),
        *_check_rows(target, draft, relation),
        *_check_holes(target, draft),
        *_check_pipelines(target, draft, relation),
        *_check_probes(target, draft, relation),
        *_check_special_ids(target, draft),
        *_check_stops(target, draft, strategy),
        *_check_flags(target, draft),
        *_check_templates(target, draft),
        *_check_special_strings(target, draft),
        *_check_prefix_stability(target),
        *_check_heads(target, draft),
        *_check_adapters(target, draft),
        *_check_maps(target, draft),
        *_check_trimmed_head(target, draft),
    ]


def _check_ids(
    target: Side, draft: Side, differing: list[int], strategy: str | None
) -> Iterator[Finding]:
    lost = "name a draft whose tokens spell the same characters, or none: the target is pruned then"
    if differing:
        i = differing[0]
        yield Finding(
            "TOK-001",
            "error" if strategy else "fatal",
            f"{len(differing)} of {len(target.keys)} ids differ ({i} is {show(target.keys[i])} "
            f"for the target, {show(draft.keys[i])} for the draft); drafting by id would corrupt.",
            f"strategy {strategy}" if strategy else lost,
            tuple(differing[:_SHOWN]),
        )
    for one, other, name in ((target, draft, "target"), (draft, target, "draft")):
        missing = [
            i
            for i, key in enumerate(one.keys)
            if is_used(key) and (i >= len(other.keys) or not is_used(other.keys[i]))
        ]
        if missing and not differing:
            yield Finding(
                "TOK-001",
                "warning" if strategy else "fatal",
                f"{len(missing)} ids have a token for the {name} only ({missing[0]} is "
                f"{show(one.keys[missing[0]])}).",
                "nothing: they are never drafted" if strategy else lost,
                tuple(missing[:_SHOWN]),
            )


def _check_rows(target: Side, draft: Side, relation: Relation) -> Iterator[Finding]:
    for side in _sides(target, draft):
        if not rows_suffice(side):
            yield Finding(
                "TOK-002",
                "fatal",
                f"The tokenizer of {side.spec} has ids up to {side.count - 1}, but its embedding "
                f"has {side.embedding_rows} rows and its head {side.head_rows}.",
                "restore the tokenizer the model was trained with, or resize its embeddings",
                (side.count - 1,),
            )
        if side.tensors and side.config_rows != side.embedding_rows:
            yield Finding(
                "TOK-002",
                "error",
                f"The config of {side.spec} says vocab_size {side.config_rows}, its embedding has "
                f"{side.embedding_rows} rows.",
                "correct vocab_size in config.json",
            )
    rows = draft.embedding_rows
    if rows is not None and rows < target.count and relation != "disjoint":
        yield Finding(
            "TOK-002",
            "warning",
            f"The draft's embedding has {rows} rows, so it cannot read the target's ids up to "
            f"{target.count - 1} as they are.",
            "nothing: they are spelt in the draft's own tokens",
            (target.count - 1,),
        )
    if relation == "padded":
        yield Finding(
            "TOK-002",
            "info",
            f"Padded only: rows {target.head_rows} (target) and {draft.head_rows} (draft), tokens "
            f"{len(target.keys)} and {len(draft.keys)}.",
            "nothing: rows beyond the shared ids are never drafted",
        )


def _check_holes(target: Side, draft: Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        holes = [i for i, key in enumerate(side.keys) if key is None]
        if holes:
            yield Finding(
                "TOK-003",
                "warning",
                f"{len(holes)} ids of {side.spec} below {len(side.keys)} have no token.",
                "nothing, unless one is ever sampled: then the tokenizer is not the model's",
                tuple(holes[:_SHOWN]),
            )
        first: dict[Key | None, int] = {None: -1}
        again = [i for i, key in enumerate(side.keys) if key and first.setdefault(key, i) != i]
        if again:
            key = side.keys[again[0]]
            yield Finding(
                "TOK-003",
                "warning",
                f"{len(again)} tokens of {side.spec} are spelt like an earlier one ({again[0]} and "
                f"{first[key]} are both {show(key)}).",
                "nothing while drafting by id; a map by spelling sums their probabilities",
                tuple(again[:_SHOWN]),
            )


def _check_pipelines(target: Side, draft: Side, relation: Relation) -> Iterator[Finding]:
    """Only where the vocabularies are the same: others encode otherwise in any case."""
    if relation not in ("identical", "padded", "permuted"):
        kinds = [side.backend["model"].get("type") for side in (target, draft)]
        if kinds[0] != kinds[1]:
            yield Finding(
                "TOK-004",
                "info",
                f"The target's tokenizer is of type {kinds[0]}, the draft's {kinds[1]}.",
                "nothing: tokens are compared by their bytes",
            )
        return
    names = ["normalizer", "pre_tokenizer", "decoder"]
    parts = [n for n in names if target.backend.get(n) != draft.backend.get(n)]
    models = [side.backend["model"] for side in (target, draft)]
    names = ["type", "byte_fallback", "unk_token"]
    parts += [n for n in names if (models[0].get(n) or None) != (models[1].get(n) or None)]
    merges = [[_pair(m) for m in model.get("merges", [])] for model in models]
    if merges[0] != merges[1]:
        parts.append(f"merges ({len(merges[0])} and {len(merges[1])})")
    if parts:
        yield Finding(
            "TOK-004",
            "warning",
            f"The vocabularies agree, not how text is cut into them: {', '.join(parts)} differ.",
            "nothing: texts are encoded with the target's tokenizer; a draft trained on other cuts "
            "is accepted less until it is tuned",
        )


def _pair(merge: str | list[str]) -> tuple[str, ...]:
    """A merge, which older files write as one string."""
    return tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)


def _check_probes(target: Side, draft: Side, relation: Relation) -> Iterator[Finding]:
    for side in _sides(target, draft):
        changed = [
            text
            for text in PROBES
            if side.bytes_of(side.plain_tokenizer.encode(text, add_special_tokens=False).ids)
            not in (text.encode(), b" " + text.encode())
        ]
        if changed:
            yield Finding(
                "TOK-005",
                "warning" if side is target else "info",
                f"{len(changed)} of {len(PROBES)} probe texts do not come back from the tokenizer "
                f"of {side.spec} byte by byte (the first: {changed[0]!r}).",
                "nothing for losslessness, which holds token by token; a text with such characters "
                "is not seen by the models as it was written",
            )
    if relation in ("identical", "padded") and target is not draft:
        other = [
            text for text in PROBES if target.encode(text.encode()) != draft.encode(text.encode())
        ]
        if other:
            yield Finding(
                "TOK-005",
                "warning",
                f"{len(other)} of {len(PROBES)} probe texts are encoded otherwise by the draft's "
                f"tokenizer (the first: {other[0]!r}).",
                "nothing: the target's tokenizer encodes for both; acceptance is lower untuned",
            )
        moved = [text for text in PROBES if _offsets_differ(text, target, draft)]
        if moved:
            yield Finding(
                "TOK-005",
                "info",
                f"The tokens of {len(moved)} of {len(PROBES)} probe texts are the same, but begin "
                f"or end elsewhere by the draft's offsets (the first: {moved[0]!r}).",
                "nothing here, where texts are aligned by the bytes of their tokens; a mask cut by "
                "offsets elsewhere would move",
            )


def _offsets_differ(text: str, target: Side, draft: Side) -> bool:
    mine, theirs = (
        side.plain_tokenizer.encode(text, add_special_tokens=False) for side in (target, draft)
    )
    return mine.ids == theirs.ids and mine.offsets != theirs.offsets


def _check_special_ids(target: Side, draft: Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        for name, i in side.special_ids.items():
            if i is None:
                yield Finding(
                    "TOK-006",
                    "error",
                    f"{side.spec} names a {name} that its vocabulary does not hold.",
                    f"correct {name} in tokenizer_config.json",
                )
    for name in SPECIAL_NAMES:
        mine, theirs = target.special_ids.get(name), draft.special_ids.get(name)
        if mine != theirs:
            yield Finding(
                "TOK-006",
                "warning",
                f"{name} is {mine} for the target, {theirs} for the draft.",
                "nothing: prompts are rendered with the target's tokenizer",
                tuple(i for i in (mine, theirs) if i is not None),
            )
    added = [side.bytes_of(side.prefix) for side in (target, draft)]
    if added[0] != added[1]:
        yield Finding(
            "TOK-006",
            "info",
            f"Before every text the target's tokenizer puts {added[0].decode(errors='replace')!r}, "
            f"the draft's {added[1].decode(errors='replace')!r}.",
            "nothing: each model reads the one it was trained with where their ids differ, the "
            "target's where they agree",
        )


def _check_stops(target: Side, draft: Side, strategy: str | None) -> Iterator[Finding]:
    wanted = target.all_stops
    if not wanted:
        yield Finding(
            "TOK-007",
            "error",
            "No token ends a text of the target (no eos in tokenizer, config or generation "
            "config).",
            "set eos_token_id in its generation_config.json",
        )
    for who, ids in target.stops.items():
        if ids and ids != wanted:
            yield Finding(
                "TOK-007",
                "info",
                f"The target's {who} lists only {sorted(ids)} of its stops {sorted(wanted)}.",
                "nothing: all of them end a text",
                tuple(sorted(wanted - ids)[:_SHOWN]),
            )
    spelt = {i: target.keys[i] if i < len(target.keys) else None for i in sorted(wanted)}
    # by map the draft's end of text stands for the target's (align/vocab_map.py)
    mapped = {target.special_ids.get("eos_token")} if strategy in ("intersection", "string") else {}
    unreachable = [
        i for i, key in spelt.items() if (key is None or key not in draft.used) and i not in mapped
    ]
    if unreachable:
        yield Finding(
            "TOK-007",
            "error",
            f"The target's stops {unreachable} cannot be drafted: the draft has no such token.",
            "nothing, and the last token of a text always comes from the target; or use a draft "
            "whose vocabulary holds every stop",
            tuple(unreachable[:_SHOWN]),
        )
    theirs = {draft.keys[i] for i in draft.all_stops if i < len(draft.keys)}
    if set(spelt.values()) != theirs:
        yield Finding(
            "TOK-007",
            "warning",
            f"A text ends at {sorted(wanted)} for the target, at {sorted(draft.all_stops)} for the "
            "draft.",
            "nothing: the target's stops are used for both",
            tuple(sorted(wanted ^ draft.all_stops)[:_SHOWN]),
        )


def _check_flags(target: Side, draft: Side) -> Iterator[Finding]:
    mine, theirs = (
        {t["content"]: t for t in s.backend.get("added_tokens", [])} for s in (target, draft)
    )
    other = [
        (
            token["id"],
            text,
            [flag for flag in _FLAGS if bool(token.get(flag)) != bool(theirs[text].get(flag))],
        )
        for text, token in mine.items()
        if text in theirs
    ]
    other = [row for row in other if row[2]]
    if other:
        i, text, flags = other[0]
        yield Finding(
            "TOK-008",
            "warning",
            f"{len(other)} added tokens are flagged otherwise by the draft ({i}, {text!r}: "
            f"{', '.join(flags)}).",
            "nothing: texts are encoded with the target's tokenizer",
            tuple(row[0] for row in other[:_SHOWN]),
        )


def _rendered(side: Side, tools: bool = False) -> str:
    """The probe conversation in a side's chat template, as transformers renders it.

    Raises jinja2.TemplateError where the template does not take it.
    """
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, ensure_ascii=False, **how
    )
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: "1 January 2026"
    assert side.chat_template is not None
    return environment.from_string(side.chat_template).render(
        messages=_CHAT,
        tools=_TOOLS if tools else None,
        add_generation_prompt=True,
        **side.special_texts,
    )


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _check_templates(target: Side, draft: Side) -> Iterator[Finding]:
    from jinja2 import TemplateError

    if target.chat_template is None:
        yield Finding(
            "TOK-009",
            "warning",
            "The target has no chat template: prompts given as messages cannot be rendered.",
            "use prompts given as text, or add a chat_template.jinja to the target",
        )
        return
    texts = {}
    for side in _sides(target, draft):
        if side.chat_template is None:
            continue
        for tools in (False, True):
            try:
                texts[side.spec, tools] = _rendered(side, tools)
            except TemplateError as error:
                yield Finding(
                    "TOK-009",
                    "warning" if side is target else "info",
                    f"The chat template of {side.spec} does not take a system message"
                    f"{' and tools' if tools else ''} ({error}).",
                    "leave such messages out of the prompts" if side is target else "nothing",
                )
                break
    if (target.spec, False) in texts and target.prefix:
        ids = target.tokenizer.encode(texts[target.spec, False]).ids
        size = len(target.prefix)
        if ids[:size] == ids[size : 2 * size] == target.prefix:
            yield Finding(
                "TOK-009",
                "warning",
                "The target's template writes what its tokenizer puts before a text as well "
                f"({show(target.keys[ids[0]])} twice).",
                "encode rendered prompts with add_special_tokens=False, as is done here",
                tuple(target.prefix),
            )
    if target.chat_template != draft.chat_template:
        how = "has none" if draft.chat_template is None else "has another"
        if draft.chat_template is not None:
            same = [
                texts.get((target.spec, tools)) == texts.get((draft.spec, tools))
                for tools in (False, True)
            ]
            how += " that renders the same" if all(same) else ""
        yield Finding(
            "TOK-009",
            "info",
            f"The target has a chat template, the draft {how}.",
            "nothing: the target's renders for both; a draft trained on another accepts less "
            "untuned",
        )


def _check_special_strings(target: Side, draft: Side) -> Iterator[Finding]:
    """A user who writes a stop into a message should not end the turn."""
    for i in sorted(target.all_stops):
        key = target.keys[i] if i < len(target.keys) else None
        if key is None:
            continue
        text = f"print('{key[1].decode(errors='replace')}')"
        cut = [i in target.tokenizer.encode(text).ids]
        other = next((j for j, k in enumerate(draft.keys) if k == key), None)
        if other is not None:
            cut.append(other in draft.tokenizer.encode(text).ids)
        if len(set(cut)) > 1:
            yield Finding(
                "TOK-010",
                "warning",
                f"In a user's text {show(key)} is a special token for the "
                f"{'target' if cut[0] else 'draft'} only.",
                "nothing: the target's tokenizer encodes for both",
                (i,),
            )
        elif cut[0] and target.chat_template is not None:
            yield Finding(
                "TOK-010",
                "info",
                f"A user's text that holds {show(key)} becomes the stop itself.",
                "encode users' texts with split_special_tokens=True where they are not trusted",
                (i,),
            )


def _check_prefix_stability(target: Side) -> Iterator[Finding]:
    """Answers are fed as ids and never encoded again; others' logits caches rest on this."""
    pairs = [(text[:at], text) for text in PROBES for at in (len(text) // 2,)]
    pairs += [("def add(a, b):\n", "def add(a, b):\n    return a + b\n"), ("The ", "The Licensee")]
    moved = []
    for prompt, whole in pairs:
        ids = target.tokenizer.encode(prompt, add_special_tokens=False).ids
        if target.tokenizer.encode(whole, add_special_tokens=False).ids[: len(ids)] != ids:
            moved.append(prompt)
    if moved:
        yield Finding(
            "TOK-011",
            "info",
            f"{len(moved)} of {len(pairs)} prompts are encoded otherwise once an answer follows "
            f"(the first: {moved[0]!r}).",
            "nothing: answers are kept as ids; end prompts at a line's end where text is exchanged",
        )


def _check_heads(target: Side, draft: Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        if side.head_bias:
            yield Finding(
                "TOK-012",
                "warning",
                f"The head of {side.spec} has a bias, which no transplant or trimmed head carries "
                "along.",
                "keep the whole head (draft_vocab_size: null), and draft by map instead of a "
                "transplant",
            )
        if side.logit_changes:
            yield Finding(
                "TOK-012",
                "info",
                f"{side.spec} changes its logits after the head ({side.logit_changes}).",
                "nothing while its own forward computes them; a trimmed or transplanted head, and "
                "the loss, lack it",
            )
    if target.tied != draft.tied:
        words = {True: "tied to", False: "separate from", None: "of unknown relation to"}
        yield Finding(
            "TOK-012",
            "info",
            f"The head is {words[target.tied]} the embedding in the target, {words[draft.tied]} it "
            "in the draft.",
            "nothing: memory is counted accordingly",
        )


def _check_adapters(target: Side, draft: Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        path = side.folder / "adapter_config.json"
        if not path.is_file():
            continue
        config = read_json(path)
        names = [*(config.get("modules_to_save") or [])]
        touched = [n for n in names if "embed" in n or "lm_head" in n]
        if touched or config.get("trainable_token_indices"):
            yield Finding(
                "TOK-013",
                "error",
                f"{side.spec} holds an adapter that trains {touched or 'single token rows'} beside "
                f"its model ({ADAPTER} is not read here).",
                "merge it with peft's merge_and_unload and name the merged folder",
            )


def _check_maps(target: Side, draft: Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        path = side.folder / VOCAB_MAP
        if not path.is_file():
            continue
        made_for = safetensors_header(path).get("__metadata__", {})
        pair = {target.sha256, draft.sha256}
        other = [k for k in ("target_sha256", "draft_sha256") if made_for.get(k) not in pair]
        if other:
            yield Finding(
                "TOK-014",
                "error",
                f"{path} was made for other tokenizers ({', '.join(other)} "
                f"{str(made_for.get(other[0]))[:12]}… is neither side's).",
                "delete the map; it is made again from the tokenizers",
            )


def _check_trimmed_head(target: Side, draft: Side) -> Iterator[Finding]:
    """d2t holds for each row the target's id less the row's number, t2d which ids have a row."""
    for path in (
        draft.folder / "compact" / "model.safetensors",
        draft.folder / "model.safetensors",
    ):
        if path.is_file() and {"d2t", "t2d"} & safetensors_header(path).keys():
            problem = table_problem(path, target)
            if problem:
                yield Finding("TOK-015", "fatal", f"{path}: {problem}.", "make the draft again")
            lost = _lost_specials(path, target) if not problem else []
            if lost:
                yield Finding(
                    "TOK-015",
                    "error",
                    f"The trimmed head in {path} lacks {len(lost)} stops of the target.",
                    "trim again; stops are always kept",
                    tuple(lost[:_SHOWN]),
                )
            return


def _tables(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as weights:
        return {n: weights.get_tensor(n) for n in ("d2t", "t2d") if n in weights.keys()}  # noqa: SIM118


def table_problem(path: Path, target: Side) -> str | None:
    """What is wrong with the id tables of a trimmed head, None if nothing."""
    import numpy as np

    tables = _tables(path)
    if set(tables) != {"d2t", "t2d"}:
        return f"{({'d2t', 't2d'} - set(tables)).pop()} is missing beside the other table"
    d2t, t2d = tables["d2t"], tables["t2d"]
    ids = np.arange(len(d2t)) + d2t
    rows = target.head_rows or len(target.keys)
    if len(t2d) != rows:
        return f"t2d has {len(t2d)} entries, the target's head {rows} rows"
    if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
        return f"d2t leads to id {int(ids.max())}, beyond the target's {rows} rows"
    if len(set(ids.tolist())) != len(ids):
        return "d2t sends two rows to one id"
    if sorted(ids.tolist()) != np.flatnonzero(t2d).tolist():
        return "d2t and t2d name different ids"
    return None


def _lost_specials(path: Path, target: Side) -> list[int]:
    t2d = _tables(path)["t2d"]
    return [i for i in sorted(target.all_stops) if i < len(t2d) and not t2d[i]]


def _sides(target: Side, draft: Side) -> tuple[Side, ...]:
    return (target,) if draft is target else (target, draft)


def show(key: Key | None) -> str:
    """A token as a finding names it."""
    return "none" if key is None else repr(key[1].decode("utf-8", "backslashreplace"))
