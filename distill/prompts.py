"""Training prompts of a domain, and splits that do not leak.

A spec is what `eval.prompts.load_prompts` reads, or one of two builders that need no download of
prompts: `embedded:stdlib-functions` (the running interpreter's standard library) and
`embedded:licence-clauses` (licence texts inside the wheel `licensedcode-data`, CC-BY-4.0).
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasketch import MinHash, MinHashLSH
from tqdm import tqdm

from align.sources import resolve_folder_in_wheel
from eval.prompts import Prompt, draw, load_prompts

STDLIB = "embedded:stdlib-functions"
LICENCES = "embedded:licence-clauses"
LICENCE_FOLDER = "pypi:licensedcode-data==32.1.0/licensedcode/data/licenses/"

NEAR_DUPLICATE = 0.5  # Jaccard similarity of word shingles
SHINGLE = 5
PERMUTATIONS = 128
HELD_OUT = 0.15  # share of licence clusters kept for evaluation


@dataclass(frozen=True)
class Overlap:
    """What training shares with evaluation after the split.

    exact, near: training prompts equal to, or near-duplicates of, an evaluation prompt (0 by
    construction). dropped: how many were removed for it. max_jaccard: the closest pair that is
    left, by exact Jaccard similarity of word shingles.
    """

    exact: int
    near: int
    dropped: int
    max_jaccard: float
    threshold: float = NEAR_DUPLICATE
    method: str = f"Jaccard of {SHINGLE}-word shingles, exact"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def training_prompts(
    spec: str, eval_prompts: list[Prompt], limit: int, seed: int
) -> tuple[list[Prompt], Overlap]:
    """Up to `limit` prompts, none of them equal or near to an evaluation prompt."""
    if spec == STDLIB:
        prompts = stdlib_prompts()
    elif spec == LICENCES:
        prompts = licence_prompts(held_out=False)
    else:
        prompts = load_prompts(spec)
    kept, overlap = drop_overlap(prompts, eval_prompts)
    if not kept:
        raise ValueError(
            f"All {len(prompts)} prompts of {spec!r} repeat evaluation prompts; train on others."
        )
    random.Random(seed).shuffle(kept)
    return kept[:limit], overlap


def evaluation_prompts(spec: str, limit: int | None, seed: int) -> list[Prompt]:
    """Evaluation prompts; for the licence builder those of the documents held out from training."""
    if spec == STDLIB:
        raise ValueError(
            f"eval_prompts {spec!r}: the standard library is a training source and has no held-out "
            "part; evaluate on a file, a data set or HumanEval."
        )
    if spec == LICENCES:
        return draw(licence_prompts(held_out=True), limit, seed)
    return load_prompts(spec, limit, seed)


def shingles(text: str) -> frozenset[str]:
    """The runs of SHINGLE words of a text; a shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    count = max(len(words) - SHINGLE + 1, 1)
    return frozenset(" ".join(words[i : i + SHINGLE]) for i in range(count))


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    return len(a & b) / len(a | b)


def drop_overlap(prompts: list[Prompt], eval_prompts: list[Prompt]) -> tuple[list[Prompt], Overlap]:
    """Prompts that share no near-duplicate with evaluation, compared exactly through an index."""
    held = [shingles(p.text) for p in eval_prompts]
    holders: dict[str, list[int]] = {}
    for i, runs in enumerate(held):
        for run in runs:
            holders.setdefault(run, []).append(i)
    kept, closest = [], 0.0
    for prompt in prompts:
        runs = shingles(prompt.text)
        rivals = {i for run in runs for i in holders.get(run, ())}
        similarity = max((jaccard(runs, held[i]) for i in rivals), default=0.0)
        if similarity < NEAR_DUPLICATE:
            kept.append(prompt)
            closest = max(closest, similarity)
    texts = {p.text for p in eval_prompts}
    exact = sum(p.text in texts for p in kept)
    near = int(closest >= NEAR_DUPLICATE)
    return kept, Overlap(exact, near, len(prompts) - len(kept), round(closest, 4))


def tuning_split(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first `count` prompts, set aside for choosing gamma, and the rest to train on."""
    if len(prompts) <= count:
        raise ValueError(
            f"{len(prompts)} training prompts are not enough to set {count} aside for choosing "
            "gamma; give more prompts or lower tuning_prompts."
        )
    return prompts[:count], prompts[count:]


# --- code: the standard library's own functions


def stdlib_prompts() -> list[Prompt]:
    """A prompt for every documented function of the standard library, in several styles.

    Seven of ten are completions of signature and docstring, the others instructions.
    """
    prompts = []
    for module, function, docstring in _documented_functions():
        signature = f"def {function.name}({ast.unparse(function.args)})"
        signature += f" -> {ast.unparse(function.returns)}:" if function.returns else ":"
        name = f"{module}.{function.name}:{function.lineno}"
        # the style depends on the function alone, not on how many others this interpreter has
        rng = random.Random(name)
        style = rng.random()
        if style < 0.7:
            imports = rng.choice(["", "", "from typing import List\n\n", "import math\n\n"])
            prompts.append(
                Prompt(
                    name,
                    prompt=_completion(imports, signature, docstring, rng),
                    category="complete",
                )
            )
            continue
        code = f"{signature}\n    {_quoted(docstring)}\n"
        if style < 0.8:
            ask = f"Complete this Python function:\n\n```python\n{code}```"
        elif style < 0.9:
            ask = f"Write a Python function `{function.name}`. {docstring}"
        else:
            ask = f"Write unit tests for this Python function:\n\n```python\n{code}```"
        prompts.append(
            Prompt(name, messages=[{"role": "user", "content": ask}], category="instruct")
        )
    return prompts


def _completion(imports: str, signature: str, docstring: str, rng: random.Random) -> str:
    # HumanEval's own look varies: a space after the quotes, quotes on their own line, one line
    if "\n" not in docstring and rng.random() < 0.3:
        body = f'    """{docstring}"""\n'
    else:
        indented = docstring.replace("\n", "\n    ").replace("\n    \n", "\n\n")
        opening = rng.choice(['"""', '""" ', '"""\n    '])
        body = f'    {opening}{indented}\n    """\n'
    return f"{imports}\n{signature}\n{body}"


def _quoted(docstring: str) -> str:
    return '"""' + docstring.replace("\n", "\n    ") + '"""'


def _documented_functions() -> Iterator[tuple[str, ast.FunctionDef, str]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo", "__pycache__"}
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skipped.intersection(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):  # a few files are templates or test bad syntax
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                continue
            docstring = _shortened(ast.get_docstring(node) or "")
            if len(docstring) < 20 or '"""' in docstring or docstring in seen:
                continue
            seen.add(docstring)
            yield ".".join(parts).removesuffix(".py"), node, docstring


def _shortened(docstring: str, most: int = 600) -> str:
    """Whole paragraphs up to `most` characters, as long as HumanEval's longer docstrings."""
    kept: list[str] = []
    for paragraph in docstring.strip().split("\n\n"):
        if kept and sum(map(len, kept)) + len(paragraph) > most:
            break
        kept.append(paragraph)
    text = "\n\n".join(kept)
    return text if len(text) <= most else ""


# --- legal: licence texts cut into clauses

CLAUSE_TYPES = {
    "warranty": ("warrant", "as is", "merchantab", "fitness for"),
    "liability": ("liab", "damages", "indemnif"),
    "termination": ("terminat", "expire", "revoke"),
    "definitions": ("means", "definition", "shall mean", "refers to"),
    "grant": ("grant", "permission", "may copy", "redistribut", "licensor", "royalty"),
}


def licence_prompts(held_out: bool) -> list[Prompt]:
    """Clauses of the documents held out for evaluation, or of those to train on.

    Near-duplicate documents are clustered first and whole clusters are split, so that no evaluation
    document has a near-duplicate in training.
    """
    folder = resolve_folder_in_wheel(LICENCE_FOLDER)
    documents = dict(_licence_texts(folder))
    prompts: list[Prompt] = []
    for name in _split(documents, held_out):
        prompts.extend(_clause_prompts(name, documents[name]))
    return prompts


def _licence_texts(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.LICENSE")):
        text = path.read_text(encoding="utf-8")
        # front matter between two `---` lines describes the document and is not part of it
        if text.startswith("---"):
            text = text.split("\n---", 1)[-1].split("\n", 1)[-1]
        if 600 <= len(text) <= 60_000 and text.isascii():
            yield path.stem, text


def _split(documents: dict[str, str], held_out: bool) -> list[str]:
    """Names of one side. Clusters are the connected components of near-duplication."""
    index = MinHashLSH(threshold=NEAR_DUPLICATE, num_perm=PERMUTATIONS)
    leader: dict[str, str] = {}
    for name, text in tqdm(documents.items(), desc="near-duplicates", unit="document"):
        sketch = MinHash(num_perm=PERMUTATIONS)
        sketch.update_batch([run.encode() for run in shingles(text)])
        roots = {_root(leader, other) for other in index.query(sketch)}
        leader[name] = name
        for root in roots:
            leader[root] = name
        index.insert(name, sketch)
    side = []
    for name in documents:
        # by the cluster's first name, so that a cluster's side does not depend on the others
        share = random.Random(f"split {_root(leader, name)}").random()
        if (share < HELD_OUT) == held_out:
            side.append(name)
    return side


def _root(leader: dict[str, str], name: str) -> str:
    while leader[name] != name:
        name = leader[name]
    return name


def _clause_prompts(name: str, text: str) -> Iterable[Prompt]:
    title = name.replace("-", " ")
    clauses = [re.sub(r"[ \t]*\n[ \t]*", " ", c).strip() for c in re.split(r"\n\s*\n", text)]
    for number, clause in enumerate(clauses):
        words = clause.split(" ")
        if not 40 <= len(words) <= 400:
            continue
        rng = random.Random(f"{name} {number}")
        category = next(
            (
                kind
                for kind, marks in CLAUSE_TYPES.items()
                if any(m in clause.lower() for m in marks)
            ),
            "other",
        )
        # the model goes on within the clause: between 15 and 40 words are given
        start = " ".join(words[: rng.randint(15, 40)])
        identity = f"{name}:{number}"
        if rng.random() < 0.8:
            before = clauses[number - 1][-200:] + "\n\n" if number else ""
            yield Prompt(identity, prompt=before + start, category=category)
        else:
            ask = rng.choice(
                ["Explain this clause of a licence", "Redraft this clause in plain English"]
            )
            shown = " ".join(words[:120])
            content = f"{ask} ({title}):\n\n{shown}"
            yield Prompt(
                identity, messages=[{"role": "user", "content": content}], category=category
            )
