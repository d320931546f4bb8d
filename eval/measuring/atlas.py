"""The rejection atlas: which tokens a draft gets wrong, what that costs, and where.

Everything comes from the teacher-forced log of alpha (`Agreement` with its positions, one `Answer`
a prompt). A token's class is a matter of spelling: Python's lexical rules for code, a lawyer's
reading marks for prose. docs/metrics.md lists the classes.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple, TypeVar

from pydantic import Field

from eval.measuring.cost import best_gamma
from eval.measuring.intervals import Part, Positive, Quantity, Share, share
from eval.measuring.runs import Agreement, Answer, RunLog, StepCosts

OTHER = "other"
EXAMPLES = 4
CONTEXT = 32  # characters before an example
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)  # bits
HEAT_TOKENS = 16  # shorter answers show too little for a heat map

# Texts are read one character a byte (latin-1), so that a token's bytes are its characters. A
# group's name is the class of what it matches, the first group to match wins.
_CODE = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<literal>[rRbBuUfF]{0,2}(?:'''.*?(?:'''|\Z)|\"\"\".*?(?:\"\"\"|\Z)
        |'(?:\\.|[^'\\\n])*'?|"(?:\\.|[^"\\\n])*"?)
        |\b\d[\w.]*|\b(?:True|False|None)\b)
    |(?P<identifier>[A-Za-z_\x80-\xff][\w\x80-\xff]*)
    |(?P<indentation>\s+)
    |(?P<operator>.)""",
    re.VERBOSE | re.DOTALL,
)
_PROSE = re.compile(
    r"""(?P<citation>https?://[^\s)>]+
        |\b\d+\ U\.?S\.?C\.?(?:\ (?:\xc2\xa7)*\ ?\d[\w()-]*)?
        |\b(?:Article|Directive|Regulation|RFC|ISO|Title)\ (?:\([A-Z]+\)\ )?[\dIVXLC][\w/()-]*
        |\b[A-Z]\w+\ v\.\ [A-Z]\w+
        |\b(?:[AL]?GPL|Apache|MIT|BSD|MPL|CC)[ -](?:Licen[sc]e|[Vv]ersion|v|BY)[\w .-]{0,4}\d[\d.]*)
    |(?P<number_or_section_mark>(?:\xc2\xa7)+
        |\b(?:Section|Clause|Paragraph|Exhibit|Schedule)\ [\dA-Z][\w.()]*
        |\((?:[a-z]|[ivx]{1,5}|\d{1,3})\)|\b[IVX]{2,6}\.|\d[\d.,]*%?)
    |(?P<boilerplate>(?i:\b(?:here|there|where)(?:by|in|of|to|under|with|after|unto)\b
        |\b(?:notwithstanding|provided\ that|including,?\ but\ not\ limited\ to|subject\ to
            |(?:including,?\ )?without\ limitation|set\ forth|in\ no\ event|as\ is|pursuant\ to
            |warrant(?:y|ies)|merchantability|fitness\ for\ a\ particular\ purpose|liab(?:le|ility)
            |shall(?:\ not)?\ be)\b)
        |\b[A-Z]{2,}(?:[ ,/-]+[A-Z]+){2,}\b)
    |(?P<defined_term>(?:"|\xe2\x80\x9c)[A-Z][\w -]{1,40}(?:"|\xe2\x80\x9d)
        |(?<=[a-z,;]\ )[A-Z][a-z]+(?:\ [A-Z][a-z]+)*)
    |(?P<other>[\w\x80-\xff]+|\s+)
    |(?P<punctuation>.)""",
    re.VERBOSE | re.DOTALL,
)
_SCHEMES = {"code": _CODE, "prose": _PROSE}
_KEYWORDS = frozenset(keyword.kwlist) - {"True", "False", "None"}
_FENCE = re.compile(r"```(\w*)[^\n`]*\n?")
# A line that prose does not have: one is enough, as docstrings and comments are prose to the eye.
_CODE_LINE = re.compile(
    rb"^[ \t]*(?:(?:async )?def \w+\(|class \w+\b.*:|import \w|from [\w.]+ import |@\w+|return\b"
    rb"|(?:if|elif|for|while|with)\b.*:[ \t]*$|[\w.\[\]]+ [-+*/]?= |[\w.]+\(.*\)[ \t]*$)",
    re.MULTILINE,
)


class Confusion(Part):
    """A token of the target that the draft took for another."""

    target: str
    draft: str
    count: Positive
    before: str = Field(description="the text before one such place")


class TokenClass(Part):
    """The target's tokens of one class."""

    name: Annotated[str, Field(alias="class")]
    positions: Positive
    alpha: Share
    rejected: Quantity = Field(description="sum of 1 - alpha over its tokens")
    lost_speedup: float = Field(
        description="what the expected speed-up at the best gamma would gain if the draft were "
        "right throughout that class."
    )
    examples: list[Confusion]


class Bucket(Part):
    """alpha between two bounds; `to` null: no upper one."""

    low: Annotated[float, Field(alias="from")]
    high: Annotated[float | None, Field(alias="to")]
    positions: Positive
    alpha: Share


class HeatMap(Part):
    """One answer of the target, token by token."""

    prompt: str
    alpha: float
    tokens: list[str]
    values: list[float] = Field(description="acceptance of each token")
    guesses: list[str] = Field(description="what the draft has for it")


class Atlas(Part):
    """Which tokens the draft gets wrong, what that costs, and where."""

    scheme: str = Field(description="classes of code or of prose")
    classes: list[TokenClass]
    by_output_position: list[Bucket]
    by_entropy: list[Bucket] = Field(description="bits of the target's distribution")
    heat_map: list[HeatMap]


def scheme_of(texts: Sequence[bytes]) -> str:
    """`code` where over half of the texts, prompts included, hold a Python line, else `prose`."""
    code = sum(bool(_CODE_LINE.search(text)) for text in texts)
    return "code" if 2 * code > len(texts) else "prose"


def classify(before: bytes, pieces: Sequence[bytes], scheme: str) -> list[str]:
    """The class of each token: that of its first character that is no white space.

    In code, a token of white space only is `indentation`, and text around fenced blocks is `other`.
    before: the text that the tokens go on from.
    """
    prompt = before.decode("latin-1")
    text = prompt + b"".join(pieces).decode("latin-1")
    spans = _fenced(prompt, text) if scheme == "code" else [(0, len(text))]
    names = [OTHER] * len(text)
    for start, stop in spans:
        for match in _SCHEMES[scheme].finditer(text, start, stop):
            name = str(match.lastgroup)
            if name == "identifier" and match[0] in _KEYWORDS:
                name = "keyword"
            names[match.start() : match.end()] = [name.replace("_", " ")] * len(match[0])
    classes, at = [], len(prompt)
    for piece in pieces:
        blank = len(piece) - len(piece.lstrip())
        first = at + (blank if blank < len(piece) else 0)
        classes.append(names[first] if piece else OTHER)
        at += len(piece)
    return classes


def _fenced(prompt: str, text: str) -> list[tuple[int, int]]:
    """Where code stands in an answer with fences, else everywhere.

    A bare fence ends the code that a prompt leaves open: behind a fence, or a prompt of code that
    has none. One that names a language begins a block wherever it stands.
    """
    if "```" not in text[len(prompt) :]:
        return [(0, len(text))]
    unfenced = "```" not in prompt and _CODE_LINE.search(prompt.encode("latin-1"))
    opened = 0 if unfenced else None
    spans = []
    for fence in _FENCE.finditer(text):
        if opened is None or fence[1]:
            opened = fence.end()
        else:
            spans.append((opened, fence.start()))
            opened = None
    return spans if opened is None else [*spans, (opened, len(text))]


class _Read(NamedTuple):
    """One answer with what the draft made of it: bytes and class of each token."""

    agreement: Agreement
    answer: Answer
    pieces: list[bytes]
    classes: list[str]


# One prompt's group, sum of values and number of positions
Row = tuple[str | None, float, float]
K = TypeVar("K", int, str)


def build_atlas(
    agreements: Sequence[Agreement], run: RunLog, costs: StepCosts, shown: Sequence[str]
) -> Atlas:
    """The `atlas` block of a draft. shown: the prompts of the heat map."""

    def spelt(guess: int) -> str:
        return text_of(run.spell(guess) if guess >= 0 else b"")

    by_prompt = {answer.prompt_id: answer for answer in run.answers}
    answers = [by_prompt[agreement.prompt_id] for agreement in agreements]
    pieces = [[b"" if t in run.special else run.spell(t) for t in a.tokens] for a in answers]
    scheme = scheme_of([a.before + b"".join(p) for a, p in zip(answers, pieces, strict=True)])
    classes = [classify(a.before, p, scheme) for a, p in zip(answers, pieces, strict=True)]
    read = [_Read(*parts) for parts in zip(agreements, answers, pieces, classes, strict=True)]
    places = {text.answer.prompt_id: text for text in read}
    return Atlas(
        scheme=scheme,
        classes=_by_class(read, spelt, costs),
        by_output_position=_by_output_position(agreements),
        by_entropy=_by_entropy(read),
        heat_map=[_heat_map(places[prompt], spelt) for prompt in shown],
    )


def _rows_by(agreements: Sequence[Agreement], keys: Sequence[Sequence[K]]) -> dict[K, list[Row]]:
    """keys: of each position. For each key, one row a prompt that has some."""
    rows: dict[K, list[Row]] = defaultdict(list)
    for agreement, names in zip(agreements, keys, strict=True):
        sums: dict[K, float] = defaultdict(float)
        for value, name in zip(agreement.values, names, strict=True):
            sums[name] += value
        counts = Counter(names)
        for name, total in sums.items():
            rows[name].append((agreement.group, total, float(counts[name])))
    return rows


def _by_class(
    read: Sequence[_Read], spelt: Callable[[int], str], costs: StepCosts
) -> list[TokenClass]:
    """One entry a class, the costliest first."""
    agreements = [text.agreement for text in read]
    positions = sum(a.positions for a in agreements)
    accepted = sum(a.alpha_sum for a in agreements)
    reached = best_gamma(min(accepted / positions, 1.0), costs)[1]
    entries = []
    for name, sums in _rows_by(agreements, [text.classes for text in read]).items():
        count = int(sum(row[2] for row in sums))
        rejected = max(count - sum(row[1] for row in sums), 0.0)
        healed = min((accepted + rejected) / positions, 1.0)
        entries.append(
            TokenClass(
                name=name,
                positions=count,
                alpha=share(f"alpha of {name}", sums),
                rejected=round(rejected, 1),
                lost_speedup=best_gamma(healed, costs)[1] - reached,
                examples=_examples(name, read, spelt),
            )
        )
    return sorted(entries, key=lambda entry: -entry.rejected)


def _examples(name: str, read: Sequence[_Read], spelt: Callable[[int], str]) -> list[Confusion]:
    """The most frequent confusions of a class: the target's token, the draft's, one place."""
    counts: Counter[tuple[bytes, int]] = Counter()
    places: dict[tuple[bytes, int], str] = {}
    for agreement, answer, pieces, classes in read:
        for at, piece in enumerate(pieces):
            if classes[at] != name or agreement.values[at] >= 0.5:
                continue
            key = piece, agreement.guesses[at]
            counts[key] += 1
            if key not in places:
                context = answer.before[-CONTEXT:] + b"".join(pieces[:at])
                places[key] = text_of(context[-CONTEXT:])
    return [
        Confusion(target=text_of(key[0]), draft=spelt(key[1]), count=n, before=places[key])
        for key, n in counts.most_common(EXAMPLES)
    ]


def text_of(piece: bytes) -> str:
    """A token's bytes as text; parts of a character show as U+FFFD."""
    return piece.decode("utf-8", "replace")


def _buckets(
    rows: dict[int, list[Row]], edges: Sequence[tuple[float, float | None]]
) -> list[Bucket]:
    return [
        Bucket(
            low=low,
            high=high,
            positions=int(sum(row[2] for row in rows[i])),
            alpha=share("alpha of a bucket", rows[i]),
        )
        for i, (low, high) in enumerate(edges)
        if rows.get(i)
    ]


def _by_output_position(agreements: Sequence[Agreement]) -> list[Bucket]:
    """alpha at answer tokens 1-8, 9-16, 17-32, and so on by doubling."""
    longest = max(len(a.values) for a in agreements)
    edges = [(1, 8)]
    while edges[-1][1] < longest:
        edges.append((edges[-1][1] + 1, 2 * edges[-1][1]))
    bucket = [i for i, (low, high) in enumerate(edges) for _ in range(low, high + 1)]
    return _buckets(_rows_by(agreements, [bucket[: len(a.values)] for a in agreements]), edges)


def _by_entropy(read: Sequence[_Read]) -> list[Bucket]:
    """alpha by how open the choice was for the target."""
    edges = list(zip(ENTROPY_EDGES, [*ENTROPY_EDGES[1:], None], strict=True))
    keys = [
        [sum(bits >= low for low in ENTROPY_EDGES) - 1 for bits in text.answer.entropy]
        for text in read
    ]
    return _buckets(_rows_by([text.agreement for text in read], keys), edges)


def telling_prompts(agreements: Sequence[Agreement]) -> list[str]:
    """The prompts whose answers have the lowest, the middle and the highest alpha."""
    long = [a for a in agreements if a.positions >= HEAT_TOKENS]
    order = [a.prompt_id for a in sorted(long, key=lambda a: a.alpha_sum / a.positions)]
    return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]])) if order else []


def _heat_map(read: _Read, spelt: Callable[[int], str]) -> HeatMap:
    """One answer, token by token."""
    agreement = read.agreement
    return HeatMap(
        prompt=agreement.prompt_id,
        alpha=agreement.alpha_sum / agreement.positions,
        tokens=[text_of(piece) for piece in read.pieces],
        values=[round(value, 3) for value in agreement.values],
        guesses=[spelt(guess) for guess in agreement.guesses],
    )
