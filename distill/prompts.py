"""Training prompts of a domain, and splits that do not leak.

A spec is what `eval.prompts.load_prompts` reads, or one of two builders that need no prompts of
anyone's: `embedded:stdlib-functions` (the running interpreter's standard library) and
`embedded:licence-clauses` (the licence texts in the wheel `licensedcode-data`, CC-BY-4.0).
"""

from __future__ import annotations

import ast
import functools
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasketch import MinHash, MinHashLSH

from align.sources import resolve_folder_in_wheel
from eval.prompts import Prompt, PromptError, draw, load_prompts

STDLIB = "embedded:stdlib-functions"
LICENCES = "embedded:licence-clauses"
LICENCE_FOLDER = "pypi:licensedcode-data==32.1.0/licensedcode/data/licenses/"

SHINGLE = 5  # words
NEAR_DUPLICATE = 0.5  # Jaccard similarity from which two texts are near-duplicates
CONTAINED = 0.8  # ... or this share of the shorter one's shingles stands in the other


@dataclass(frozen=True)
class Overlap:
    """What training shares with evaluation.

    exact, near: training prompts left that equal, or nearly duplicate, an evaluation prompt: 0.
    dropped: those that were left out for it. max_jaccard: of the closest pair that is left.
    """

    exact: int
    near: int
    dropped: int
    max_jaccard: float
    threshold: float = NEAR_DUPLICATE
    method: str = (
        f"Jaccard similarity of {SHINGLE}-word shingles, exact; also a prompt that holds "
        f"{CONTAINED:.0%} of another's shingles is a near-duplicate"
    )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def training_prompts(
    spec: str, eval_prompts: list[Prompt], limit: int | None, seed: int
) -> tuple[list[Prompt], Overlap]:
    """Up to `limit` different prompts in an order drawn with the seed; None: all.

    None of them equals or nearly duplicates an evaluation prompt. Raises PromptError when none is
    left, and what `load_prompts` raises.
    """
    if spec == STDLIB:
        prompts = stdlib_prompts()
    elif spec == LICENCES:
        prompts = licence_prompts(held_out=False)
    else:
        _refuse_unknown_builder(spec)
        prompts = load_prompts(spec)
    random.Random(seed).shuffle(prompts)
    kept, overlap = drop_overlap(prompts, eval_prompts, limit)
    if not kept:
        raise PromptError(
            f"All {len(prompts)} prompts of {spec!r} repeat evaluation prompts; train on others."
        )
    return kept, overlap


def evaluation_prompts(spec: str, limit: int | None, seed: int) -> list[Prompt]:
    """Evaluation prompts; of the licence builder, those of documents held out from training."""
    if spec == STDLIB:
        raise PromptError(
            f"eval_prompts is {spec!r}, which is to train on and has no held-out part; evaluate on "
            "HumanEval, another data set or a file."
        )
    if spec == LICENCES:
        return draw(licence_prompts(held_out=True), limit, seed)
    _refuse_unknown_builder(spec)
    return load_prompts(spec, limit, seed)


def tuning_split(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first `count` prompts, set aside for choosing gamma, and the rest to train on."""
    if len(prompts) <= count:
        raise PromptError(
            f"{len(prompts)} training prompts are not enough to set {count} aside for choosing "
            "gamma; give more prompts or lower tuning_prompts."
        )
    return prompts[:count], prompts[count:]


def _refuse_unknown_builder(spec: str) -> None:
    if spec.startswith("embedded:"):
        raise PromptError(f"There are no prompts {spec!r}; there are {STDLIB} and {LICENCES}.")


# --- near-duplicates


def shingles(text: str) -> frozenset[str]:
    """The runs of SHINGLE words of a text, in lower case; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    count = max(len(words) - SHINGLE + 1, 1)
    return frozenset(" ".join(words[i : i + SHINGLE]) for i in range(count))


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b)


class NearDuplicates:
    """Texts that others are compared with, exactly: an index names those that share a shingle."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.held = [shingles(text) for text in texts]
        self.holders: dict[str, list[int]] = {}
        for i, runs in enumerate(self.held):
            for run in runs:
                self.holders.setdefault(run, []).append(i)

    def closest(self, text: str) -> tuple[bool, float]:
        """Whether the text nearly duplicates one of them, and its largest Jaccard similarity."""
        runs = shingles(text)
        rivals = [self.held[i] for i in {i for run in runs for i in self.holders.get(run, ())}]
        similarity = max((jaccard(runs, rival) for rival in rivals), default=0.0)
        contained = any(
            len(runs & rival) >= CONTAINED * min(len(runs), len(rival)) for rival in rivals
        )
        return similarity >= NEAR_DUPLICATE or contained, similarity


def drop_overlap(
    prompts: list[Prompt], eval_prompts: list[Prompt], limit: int | None = None
) -> tuple[list[Prompt], Overlap]:
    """The first `limit` different prompts that nearly duplicate no evaluation prompt."""
    held_out = NearDuplicates(p.text for p in eval_prompts)
    kept: dict[str, Prompt] = {}
    dropped, largest = 0, 0.0
    for prompt in prompts:
        if len(kept) == limit:
            break
        near, similarity = held_out.closest(prompt.text)
        if near:
            dropped += 1
        elif prompt.text not in kept:
            kept[prompt.text] = prompt
            largest = max(largest, similarity)
    exact = len(kept.keys() & {p.text for p in eval_prompts})
    near_left = sum(held_out.closest(text)[0] for text in kept)
    return list(kept.values()), Overlap(exact, near_left - exact, dropped, round(largest, 4))


# --- code: the standard library's own functions

_SELF = ("self", "cls", "klass")
# Characters of a docstring. One sentence says too little to answer like a HumanEval prompt.
_SHORTEST, _USUAL, _LONGEST = 50, 500, 700
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
# What HumanEval's authors would have annotated; the standard library itself has next to none.
_PARAMETER_TYPES = {
    "int": "n i k x y index count size maxsize length width height limit level num start stop",
    "str": "s string text name filename path key msg message url prefix suffix word line title",
    "List[int]": "data numbers values",
    "List[str]": "lines words names args iterable seq sequence items files",
}
_RETURN_TYPES = {
    "bool": r"(Return|Returns) (True|true|whether|if)\b|True if|Check|Test (if|whether)",
    "List[str]": r"Returns? (a|the) (sorted )?list",
    "int": r"Returns? (a|the) (number|length|size|count|index|integer)",
    "str": r"Returns? (a|the) (\w+ )?(string|name|text)",
}
# Answers to instructions have less in common with HumanEval's than completions do: few of them.
_STYLES = {
    "complete": 0.83,
    "in context": 0.05,
    "write": 0.03,
    "finish": 0.03,
    "explain": 0.03,
    "test": 0.03,
}


@dataclass(frozen=True)
class _Function:
    """A documented function of the standard library, a method made to stand alone."""

    identity: str
    name: str
    arguments: ast.arguments
    docstring: str
    before: str  # the source of the function before it in the same module, "" if that is long


def stdlib_prompts() -> list[Prompt]:
    """A prompt for every function of the standard library that has a docstring of some length.

    Most look like those of HumanEval, on which drafts are evaluated: imports, signature and
    docstring, to be completed as they stand. Some stand after another function of their module,
    some are instructions (`category` names the style).
    """
    prompts = []
    for function in _documented_functions():
        # by the function alone, not by how many others this interpreter has
        rng = random.Random(function.identity)
        style = rng.choices([*_STYLES], [*_STYLES.values()])[0]
        if style == "in context" and not function.before:
            style = "complete"
        typed = rng.random() < 0.6
        signature, imports = _signature(function, typed)
        body = _docstring(function.docstring, rng)
        code = f"{imports}{signature}{body}"
        if style == "complete":
            prompts.append(Prompt(function.identity, code, category=style))
            continue
        if style == "in context":
            whole = f"{imports}{function.before}{signature}{body}"
            prompts.append(Prompt(function.identity, whole, category=style))
            continue
        block = f"\n\n```python\n{code.strip()}\n```"
        ask = {
            "write": f"Write a Python function `{function.name}`. {function.docstring}",
            "finish": f"Complete this Python function:{block}",
            "explain": f"Explain what this Python function is for, with an example:{block}",
            "test": f"Write unit tests for this Python function:{block}",
        }[style]
        messages = [{"role": "user", "content": ask}]
        prompts.append(Prompt(function.identity, messages=messages, category=style))
    return prompts


def _documented_functions() -> Iterator[_Function]:
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED.intersection(parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # templates, and examples of bad syntax
            continue
        module = ".".join(parts).removesuffix(".py")
        lines = source.splitlines()
        owners: list[ast.Module | ast.ClassDef] = [tree]
        owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner in owners:
            before = ""
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                    continue
                docstring = _shortened(ast.get_docstring(node) or "")
                name = node.name.lstrip("_")
                if docstring and docstring not in seen:
                    seen.add(docstring)
                    arguments = _standing_alone(node, owner)
                    identity = f"{module}.{node.name}:{node.lineno}"
                    yield _Function(identity, name, arguments, docstring, before)
                whole = lines[node.lineno - 1 : node.end_lineno]
                before = textwrap.dedent("\n".join(whole)) + "\n\n\n" if len(whole) <= 12 else ""


def _standing_alone(node: ast.FunctionDef, owner: ast.Module | ast.ClassDef) -> ast.arguments:
    """The arguments of a function; of a method without `self`, if it has others."""
    arguments = node.args
    if isinstance(owner, ast.ClassDef) and arguments.args and arguments.args[0].arg in _SELF:
        others = arguments.args[1:]
        if not others and not arguments.kwonlyargs and not arguments.vararg:
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner.name.strip("_")).lower()
            others = [ast.arg(name if name.isidentifier() else "value")]
        arguments.args = others
    return arguments


def _signature(function: _Function, typed: bool) -> tuple[str, str]:
    """`def name(arguments):` and the lines before it, in HumanEval's layout."""
    returns = ""
    if typed:
        kinds = {name: kind for kind, names in _PARAMETER_TYPES.items() for name in names.split()}
        for argument in [*function.arguments.args, *function.arguments.kwonlyargs]:
            if kind := kinds.get(argument.arg):
                argument.annotation = ast.Name(kind)
        for kind, opening in _RETURN_TYPES.items():
            if re.match(opening, function.docstring):
                returns = f" -> {kind}"
                break
    signature = f"def {function.name}({ast.unparse(function.arguments)}){returns}:\n"
    imports = "from typing import List\n\n\n" if "List[" in signature else "\n\n"[: 1 + typed]
    return signature, imports


def _docstring(text: str, rng: random.Random) -> str:
    """Indented, opened and closed in the ways that HumanEval does it."""
    opening = rng.choices(['"""', '""" ', '"""\n'], [0.6, 0.2, 0.2])[0]
    return textwrap.indent(f'{opening}{text}\n"""\n', "    ")


def _shortened(docstring: str) -> str:
    """The first paragraphs and the first examples, about as long as in HumanEval; "" to skip."""
    if not docstring.isascii() or '"""' in docstring or "\\" in docstring:
        return ""
    paragraphs = docstring.strip().split("\n\n")
    kept = paragraphs[:1]
    for paragraph in paragraphs[1:]:
        example = paragraph.lstrip().startswith(">>>")
        if example or sum(map(len, kept)) + len(paragraph) <= _USUAL:
            kept.append(paragraph)
        if example:
            break
    text = "\n\n".join(kept)
    return text if _SHORTEST <= len(text) <= _LONGEST else ""


# --- legal: licence texts cut into clauses

_HELD_OUT = 0.2  # share of the documents
_CLAUSES = 8  # of one document at most: a few licences are books
# Keywords of a clause's heading and first words, in the order they are looked for.
_CLAUSE_TYPES = {
    "definitions": "definition means refers",
    "warranty": "warrant as-is merchantab fitness disclaim",
    "liability": "liab damages indemnif",
    "termination": "terminat expir revoke",
    "grant": "grant permission permitted redistribut may-copy may-use",
}
_INSTRUCTIONS = (
    "Summarise this clause of a licence",
    "Explain in plain English what this clause allows and forbids",
    "Redraft this clause so that it is shorter and clearer",
)


@dataclass(frozen=True)
class _Clause:
    identity: str
    title: str  # of the licence
    heading: str  # the short line before the clause, "" if there is none
    text: str


def licence_prompts(held_out: bool) -> list[Prompt]:
    """Beginnings of clauses to be continued, and some instructions; `category` is the type.

    From the documents held out for evaluation, or from those to train on: no near-duplicate of a
    held-out document, and no clause that nearly duplicates one of a held-out document.
    """
    training, evaluation = _licence_split()
    if held_out:
        return [_clause_prompt(clause) for clause in evaluation]
    taken = NearDuplicates(clause.text for clause in evaluation)
    return [_clause_prompt(clause) for clause in training if not taken.closest(clause.text)[0]]


@functools.cache
def _licence_split() -> tuple[list[_Clause], list[_Clause]]:
    """Clauses to train on and held-out clauses; one document stands for all its near-duplicates."""
    documents = dict(_licence_texts(resolve_folder_in_wheel(LICENCE_FOLDER)))
    names = _representatives({name: text for name, (_, text) in documents.items()})
    random.Random("held-out licences").shuffle(names)
    cut = round(_HELD_OUT * len(names))
    sides = []
    for side in (names[cut:], names[:cut]):
        # the same boilerplate in licences that are otherwise different is taken once
        clauses = {
            tuple(clause.text.lower().split()[:8]): clause
            for name in side
            for clause in _clauses(name, *documents[name])
        }
        sides.append(list(clauses.values()))
    return sides[0], sides[1]


def _licence_texts(folder: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name -> title and text of every licence in English of ordinary length."""
    for path in sorted(folder.glob("*.LICENSE")):
        # what stands between two `---` lines describes the document
        matter, _, text = path.read_text("utf-8").removeprefix("---\n").partition("\n---\n")
        title = re.search(r"^name: (.+)$", matter, flags=re.MULTILINE)
        foreign = re.search(r"^language: (?!en)", matter, flags=re.MULTILINE)
        readable = sum(map(str.isascii, text)) >= 0.98 * len(text)
        if title and not foreign and readable and 600 <= len(text) <= 60_000:
            yield path.stem, (title[1].strip("'\""), text)


def _representatives(documents: dict[str, str]) -> list[str]:
    """One name for every group of near-duplicates (connected by Jaccard >= NEAR_DUPLICATE)."""
    # 42 bands of 3 rows: a pair at the threshold escapes with probability 0.4%. The candidates are
    # then compared exactly.
    index = MinHashLSH(num_perm=128, params=(42, 3))
    sets = {name: shingles(text) for name, text in documents.items()}
    parent = {name: name for name in documents}

    def first_of_group(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for name, runs in sets.items():
        sketch = MinHash(num_perm=128)
        sketch.update_batch([run.encode() for run in runs])
        for other in index.query(sketch):
            if jaccard(runs, sets[other]) >= NEAR_DUPLICATE:
                ours, theirs = sorted((first_of_group(name), first_of_group(other)))
                parent[theirs] = ours
        index.insert(name, sketch)
    return [name for name in documents if parent[name] == name]


def _clauses(name: str, title: str, text: str) -> list[_Clause]:
    """Up to _CLAUSES paragraphs of 25 to 400 words, drawn by the document's name."""
    paragraphs = re.split(r"\n\s*\n", text)
    if len(paragraphs) < 3 or max(map(len, paragraphs)) > 3000:
        paragraphs = text.split("\n")  # a paragraph a line
    paragraphs = [" ".join(p.split()) for p in paragraphs if p.strip()]
    found = []
    for number, paragraph in enumerate(paragraphs):
        before = paragraphs[number - 1] if number else ""
        heading = before if len(before.split()) <= 8 and before[-1:] not in ".,;" else ""
        if 25 <= len(paragraph.split()) <= 400:
            found.append(_Clause(f"{name}:{number}", title, heading, paragraph))
    chosen = random.Random(name).sample(range(len(found)), min(_CLAUSES, len(found)))
    return [found[i] for i in sorted(chosen)]


def _clause_prompt(clause: _Clause) -> Prompt:
    rng = random.Random(clause.identity)
    words = clause.text.split(" ")
    beginning = " ".join([clause.heading.lower(), *words[:40]]).lower()
    category = "other"
    for kind, marks in _CLAUSE_TYPES.items():
        if any(mark.replace("-", " ") in beginning for mark in marks.split()):
            category = kind
            break
    if rng.random() < 0.15:
        content = f"{rng.choice(_INSTRUCTIONS)}:\n\n{' '.join(words[:150])}"
        messages = [{"role": "user", "content": content}]
        return Prompt(clause.identity, messages=messages, category=category)
    # the first sentence, or as many words as one has: in both cases the clause goes on
    first = re.match(r".{60,300}?[a-z)][.;:](?= )", clause.text)
    opening = first[0] if first and rng.random() < 0.5 else " ".join(words[: rng.randint(12, 24)])
    parts = [part for part in (clause.title, clause.heading, opening) if part]
    return Prompt(clause.identity, "\n\n".join(parts), category=category)
