"""Each figure of README and docs/results.md stands in a piece of the page that figures.yaml has.

So a figure that changes, or that moves to another row, column, draft or load, is found.
"""

import functools
import itertools
import json
import re

import pytest
from ruamel.yaml import YAML

from eval.engines.start_vllm import ON_CPU, VLLM
from eval.reporting.fields import Load, read_report
from eval.reporting.page import render_page
from eval.reporting.text import print_summary
from tests.benchmarks.evidence import evidence
from tests.test_docs import HISTORY, OPENING, PAGES, ROOT

EVIDENCE = ROOT / "docs" / "evidence"
PIECES = YAML(typ="safe", pure=True).load(ROOT / "tests" / "figures.yaml")
FIGURE = re.compile(r"(?<![\w.])[+-]?\d+\.\d+(?!B)|\b\d+ of \d+\b")
INTERVAL = re.compile(r"[+-]?\d\.\d\d \[[+-]?\d\.\d\d, [+-]?\d\.\d\d\]")
# code, addresses, papers, versions and sizes of models have numbers that are no figures
NAMES = re.compile(
    r"`[^`]*`|\]\([^)]*\)|arXiv [\d.]+|\d[\d.]*(?:B\b| billion)"
    r"|(?:vLLM|transformers|speculators|Python|PyTorch|Version|Qwen|EAGLE)[ -]?[\d.]+"
    r"|(?:Apache|PSF|CC-BY)-[\d.]+"
)


def figures(text):
    """The matches of all figures of a text."""
    return list(FIGURE.finditer(NAMES.sub(lambda name: "_" * len(name[0]), text)))


def one_line(text):
    return " ".join(text.split())


NOTES = one_line((ROOT / "docs" / "lab-notes.md").read_text(encoding="utf-8"))


@functools.cache
def report_of(name):
    return read_report(EVIDENCE / f"{name}.json")


def shown(value, sign=""):
    """A measured quantity as the pages write it."""
    return "{0:{3}.2f} [{1:{3}.2f}, {2:{3}.2f}]".format(value.mean, *value.ci95, sign)


def measured(name, *words):
    """The figure of a report that the field {name words} of a piece stands for."""
    report = report_of(name)
    match words:
        case ["identical"]:
            checks = [draft.lossless for draft in report.drafts.values()]
            return f"{sum(c.identical for c in checks)} of {sum(c.prompts for c in checks)}"
        case ["gap"]:
            return f"{max(draft.lossless.largest_gap for draft in report.drafts.values()):.2f}"
        case ["before" | "after" as when]:
            (point,) = [p for p in report.held_out.points if p.kept == (when == "after")]
            return f"{point.alpha.mean:.2f}"
        case [draft, "over", other]:
            (gain,) = [gain for gain in report.gain if (gain.draft, gain.over) == (draft, other)]
            return shown(gain.predicted_with_prefill or gain.speedup, "+")
        case [draft, "at", load]:
            return shown(report.speedups(draft)[Load(0, int(load))])
        case [draft, "c"]:
            return f"{report.drafts[draft].c:.2f}"
        case [draft, "mean"]:
            return f"{report.speedups(draft)[Load(0, 1)].mean:.2f}"
        case [draft]:
            return shown(report.speedups(draft)[Load(0, 1)])


def filled(piece):
    """The text of a piece with the figures of its reports."""
    return one_line(re.sub(r"{([^}]*)}", lambda field: measured(*field[1].split()), piece["page"]))


@pytest.fixture(scope="module")
def pieces():
    """The pieces of each page."""
    return {page: [filled(piece) for piece in parts] for page, parts in PIECES.items()}


def untied(text, pieces):
    """The pieces that a page lacks, and its figures that are in no piece."""
    text = one_line(OPENING.sub("", text))
    spans = [(start, start + len(piece)) for piece in pieces if (start := text.find(piece)) >= 0]
    return [piece for piece in pieces if piece not in text] + [
        text[max(figure.start() - 40, 0) : figure.end()]
        for figure in figures(text)
        if not any(start <= figure.start() < end for start, end in spans)
    ]


@pytest.mark.parametrize("page", PIECES)
def test_every_figure_is_in_its_piece(page, pieces):
    assert untied((ROOT / page).read_text(encoding="utf-8"), pieces[page]) == []


def mutants(text):
    """(what, text) of a page with one figure raised, a count made whole, or cells exchanged."""
    for figure in figures(text):
        number, _, whole = figure[0].partition(" of ")
        digits = len(number.partition(".")[2])
        other = f"{whole} of {whole}" if whole else f"{float(number) + 1:.{digits}f}"
        if other != figure[0]:
            yield figure[0], text[: figure.start()] + other + text[figure.end() :]
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, line, *rows = [row.strip("|\n").split("|") for row in table.splitlines()]
        for at in range(1, len(head) - 1):
            moved = [[*row[:at], row[at + 1], row[at], *row[at + 2 :]] for row in rows]
            if moved != rows and figures(str(rows)):
                yield head[at], text.replace(table, as_table(head, line, *moved))
        for row, other in itertools.pairwise(rows):
            if figures(f"{row[1:]}{other[1:]}"):
                names = {row[0]: other[0], other[0]: row[0]}
                moved = [[names.get(cells[0], cells[0]), *cells[1:]] for cells in rows]
                yield row[0], text.replace(table, as_table(head, line, *moved))


def as_table(*rows):
    return "".join(f"|{'|'.join(row)}|\n" for row in rows)


@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 30), ("docs/results.md", 150), ("docs/drafters.md", 40)]
)
def test_every_mutant_of_a_page_is_found(page, least, pieces):
    text = OPENING.sub("", (ROOT / page).read_text(encoding="utf-8"))
    changed = list(mutants(text))
    assert len(changed) >= least
    assert [what for what, mutant in changed if not untied(mutant, pieces[page])] == []


@pytest.mark.parametrize("page", PIECES)
def test_figures_of_a_piece_stand_in_its_notes(page):
    for piece in PIECES[page]:
        notes = [one_line(note) for note in piece.get("notes", [])]
        assert [note for note in notes if note not in NOTES] == []
        literal = NAMES.sub("", re.sub(r"{[^}]*}", "", one_line(piece["page"])))
        numbers = re.findall(r"[+-]?\d\.\d\d(?: \[.*?\])?", literal) if notes else []
        rounded = re.findall(r"\d\.\d{3}", str(notes))
        known = f"{notes}{[f'{float(number):.2f}' for number in rounded]}"
        assert [number for number in numbers if number not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_intervals_on_other_pages_stand_in_the_notes_or_a_report(page, pieces):
    text = one_line(OPENING.sub("", page.read_text(encoding="utf-8")))
    known = f"{NOTES} {pieces}"
    assert [figure for figure in INTERVAL.findall(text) if figure not in known] == []


def test_output_on_the_readme_is_what_a_run_of_its_report_prints(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [body for language, body in OPENING.findall(text) if language == "text"]
    lines = [line for line in block.splitlines() if not line.startswith("[")]
    print_summary(report_of("smollm2-reference"))
    printed = capsys.readouterr().out
    assert len(lines) > 5
    assert [line for line in lines if line.removesuffix(" …") not in printed] == []


# What servers on a CPU have today, and a report's servers had not, or not in the report.
OLDER = {
    "qwen-vllm.json": {"VLLM_CPU_KVCACHE_SPACE"},  # set as today, not written down
}


def test_evidence_is_measured_as_today_or_listed():
    for path in (ROOT / "docs" / "evidence").glob("*-vllm.json"):
        machine = read_report(path).environment
        assert machine.server_arguments[:3:2] == ["--dtype", "--max-model-len"]
        assert "--no-enable-prefix-caching" in machine.server_arguments
        assert ON_CPU.keys() - machine.server_variables.keys() == OLDER.get(path.name, set())


def test_pages_install_the_vllm_that_was_measured_or_name_the_other():
    """The GPU figures are of an older vLLM than the one that the pages install."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    measured = re.search(r"NVIDIA H100, vLLM (\d+\.\d+)", results)[1]
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        installed = {
            version for line in text.splitlines() for version in re.findall(r"vllm==([\d.]+)", line)
        }
        if page not in HISTORY and installed:
            assert installed == {VLLM}
            assert VLLM.startswith(measured) or f"{measured}." in text, page
    for path in (ROOT / "docs" / "evidence").glob("*-vllm.json"):
        assert read_report(path).environment.engine_version == VLLM


def test_evidence_is_small_and_names_no_folder_of_a_machine():
    paths = list((ROOT / "docs" / "evidence").glob("*.json"))
    assert paths
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text) < 30_000
        assert not re.search(r"[\"=]/\w", text)
        report = read_report(path)
        assert report.environment.hardware
        assert render_page(report)
        written = evidence(report, json.loads(text)["note"])
        assert json.loads(written).keys() == json.loads(text).keys()
