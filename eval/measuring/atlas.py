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
from dataclasses import dataclass
from typing import TypeVar

from eval.measuring.cost import best_gamma
from eval.measuring.log import Agreement, StepCosts
from eval.measuring.metrics import share
from eval.reporting.report import (
    Atlas,
    Bucket,
    Confusion,
    HeatMap,
    RuleAcceptance,
    Share,
    TokenClass,
)

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
_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
# A line that prose does not have: one is enough, as docstrings and comments are prose to the eye.
_CODE_LINE = re.compile(
    rb"^[ \t]*(?:(?:async )?def \w+\(|class \w+\b.*:|import \w|from [\w.]+ import |@\w+|return\b"
    rb"|(?:if|elif|for|while|with)\b.*:[ \t]*$|[\w.\[\]]+ [-+*/]?= |[\w.]+\(.*\)[ \t]*$)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Answer:
    """The target's answer that alpha was taken on, token by token; shared by all drafts.

    pieces: bytes of each token. entropy: bits of the target's distribution that each was drawn
    from, at temperature 1. before: the text it continues, empty after a chat template.
    """

    prompt_id: str
    pieces: list[bytes]
    entropy: list[float]
    before: bytes = b""


def scheme_of(answers: Sequence[Answer]) -> str:
    """`code` where over half of the texts, prompts included, hold a Python line, else `prose`."""
    code = sum(bool(_CODE_LINE.search(a.before + b"".join(a.pieces))) for a in answers)
    return "code" if 2 * code > len(answers) else "prose"


def classify(answer: Answer, scheme: str) -> list[str]:
    """The class of each token: that of its first character that is no white space.

    In code, a token of white space only is `indentation`, and text around fenced blocks is `other`.
    """
    before = answer.before.decode("latin-1")
    text = before + b"".join(answer.pieces).decode("latin-1")
    spans = [(0, len(text))]
    if scheme == "code" and "```" in text[len(before) :]:
        spans = [match.span(1) for match in _FENCED.finditer(text)]
    classes = [OTHER] * len(text)
    for start, stop in spans:
        for match in _SCHEMES[scheme].finditer(text, start, stop):
            name = str(match.lastgroup)
            if name == "identifier" and match[0] in _KEYWORDS:
                name = "keyword"
            classes[match.start() : match.end()] = [name.replace("_", " ")] * len(match[0])
    found, at = [], len(before)
    for piece in answer.pieces:
        inked = len(piece) - len(piece.lstrip())
        first = at + (inked if inked < len(piece) else 0)
        found.append(classes[first] if piece else OTHER)
        at += len(piece)
    return found


# One answer with what the draft made of it, and the class of each of its tokens
Logged = tuple[Agreement, Answer, list[str]]
# One prompt's group, sum of values and number of positions
Row = tuple[str | None, float, float]
K = TypeVar("K", int, str)


def build_atlas(
    agreements: Sequence[Agreement],
    answers: Sequence[Answer],
    spell: Callable[[int], bytes],
    costs: StepCosts,
    shown: Sequence[str],
) -> Atlas:
    """The `atlas` block of a draft: classes, output position, entropy, rules, heat map.

    answers: those of the agreements' prompts, every position kept. spell: the bytes of a token id;
    it is not asked about a guess of -1, which is none. shown: the prompts of the heat map.
    """

    def text(guess: int) -> str:
        return text_of(spell(guess) if guess >= 0 else b"")

    by_prompt = {answer.prompt_id: answer for answer in answers}
    answers = [by_prompt[agreement.prompt_id] for agreement in agreements]
    scheme = scheme_of(answers)
    logged = [(a, b, classify(b, scheme)) for a, b in zip(agreements, answers, strict=True)]
    places = {agreement.prompt_id: (agreement, answer) for agreement, answer, _ in logged}
    return Atlas(
        scheme=scheme,
        classes=_by_class(logged, text, costs),
        by_output_position=_by_output_position(agreements),
        by_entropy=_by_entropy(agreements, answers),
        verification_rules=_by_rule(agreements),
        heat_map=[_heat_map(*places[prompt], text) for prompt in shown],
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
    logged: Sequence[Logged], text: Callable[[int], str], costs: StepCosts
) -> list[TokenClass]:
    """One entry a class, the costliest first."""
    agreements = [agreement for agreement, _, _ in logged]
    rows = _rows_by(agreements, [names for _, _, names in logged])
    positions = sum(a.positions for a in agreements)
    accepted = sum(a.alpha_sum for a in agreements)
    reached = best_gamma(min(accepted / positions, 1.0), costs)[1]
    found = []
    for name, sums in rows.items():
        count = int(sum(row[2] for row in sums))
        rejected = max(count - sum(row[1] for row in sums), 0.0)
        healed = min((accepted + rejected) / positions, 1.0)
        found.append(
            TokenClass(
                name=name,
                positions=count,
                alpha=share(f"alpha of {name}", sums),
                rejected=round(rejected, 1),
                lost_speedup=best_gamma(healed, costs)[1] - reached,
                examples=_examples(name, logged, text),
            )
        )
    return sorted(found, key=lambda entry: -entry.rejected)


def _examples(name: str, logged: Sequence[Logged], text: Callable[[int], str]) -> list[Confusion]:
    """The most frequent confusions of a class: the target's token, the draft's, one place."""
    counts: Counter[tuple[bytes, int]] = Counter()
    places: dict[tuple[bytes, int], str] = {}
    for agreement, answer, names in logged:
        for at, piece in enumerate(answer.pieces):
            if names[at] != name or agreement.values[at] >= 0.5:
                continue
            key = piece, agreement.guesses[at]
            counts[key] += 1
            if key not in places:
                context = answer.before[-CONTEXT:] + b"".join(answer.pieces[:at])
                places[key] = text_of(context[-CONTEXT:])
    return [
        Confusion(target=text_of(key[0]), draft=text(key[1]), count=n, before=places[key])
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


def _by_entropy(agreements: Sequence[Agreement], answers: Sequence[Answer]) -> list[Bucket]:
    """alpha by how open the choice was for the target."""
    edges = list(zip(ENTROPY_EDGES, [*ENTROPY_EDGES[1:], None], strict=True))
    keys = [[sum(bits >= low for low in ENTROPY_EDGES) - 1 for bits in a.entropy] for a in answers]
    return _buckets(_rows_by(agreements, keys), edges)


def _by_rule(agreements: Sequence[Agreement]) -> list[RuleAcceptance]:
    """alpha under three exact rules at each temperature of the log."""
    logged = [a for a in agreements if a.rules]

    def measured(rule: str, temperature: float) -> Share:
        rows = [(a.group, a.rules[temperature][rule], float(a.positions)) for a in logged]
        return share(rule, rows)

    return [
        RuleAcceptance(
            temperature=t,
            exact=measured("exact", t),
            greedy_match=measured("greedy_match", t),
            target_probability=measured("target_probability", t),
        )
        for t in sorted({t for a in logged for t in a.rules})
    ]


def telling_prompts(agreements: Sequence[Agreement]) -> list[str]:
    """The prompts whose answers have the lowest, the middle and the highest alpha."""
    long = [a for a in agreements if a.positions >= HEAT_TOKENS]
    order = [a.prompt_id for a in sorted(long, key=lambda a: a.alpha_sum / a.positions)]
    return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]])) if order else []


def _heat_map(agreement: Agreement, answer: Answer, text: Callable[[int], str]) -> HeatMap:
    """One answer, token by token."""
    return HeatMap(
        prompt=agreement.prompt_id,
        alpha=agreement.alpha_sum / agreement.positions,
        tokens=[text_of(piece) for piece in answer.pieces],
        values=[round(value, 3) for value in agreement.values],
        guesses=[text(guess) for guess in agreement.guesses],
    )
