"""report.html is one whole file that needs nothing else and hides nothing of the report."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from eval.measuring.losslessness import ledger
from eval.reporting.page import Plot, is_numeric, render_page
from eval.reporting.report import build_report
from eval.reporting.tables import tables

VOID = {"meta"}


class Outline(HTMLParser):
    """Checks that tags nest, and keeps the words, the tags and the attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.words, self.tags, self.attributes = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def test_every_part_is_there(sample_report):
    page = Outline(render_page(sample_report))
    for title in (
        "Read these first",
        "Result",
        "Where the speed-up of tuned goes",
        "Speed-up by gamma",
        "By position in the draft",
        "By position in the answer",
        "By the target's entropy",
        "Memory",
        "Rejection atlas of tuned",
        "What tuned gets wrong, in the text",
        "Greedy text: the tie ledger",
        "By category",
        "Cost and latency",
        "Setting and provenance",
    ):
        assert title in page.text, title
    assert sample_report.headline in page.text
    assert all(warning in page.text for warning in sample_report.warnings)
    assert sample_report.prompts.sha256 in page.text
    assert "None" not in page.text.replace("None, literal", "")


def test_cells_say_their_column_where_a_narrow_page_stacks_them(sample_report):
    page = render_page(sample_report)
    attributes = Outline(page).attributes
    for table in tables(sample_report):
        if not table.charted:
            assert ("style", f"--columns:{len(table.header) - 1}") in attributes
            assert {("data-column", column) for column in table.header[1:]} <= set(attributes)
    narrow = page.partition("@media screen and (max-width: 760px)")[2]
    assert "var(--columns)" in narrow
    assert "attr(data-column)" in narrow


def test_it_needs_nothing_else(sample_report):
    page = render_page(sample_report)
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe"} & set(outline.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in outline.attributes}
    assert not re.search(r"url\(|@import|https?://", page)


def test_text_of_the_report_is_escaped(run_info, measurement):
    evil = "<script>alert('x')</script>&\""
    info = dataclasses.replace(run_info, target=evil, provenance={"command": evil})
    draft = measurement(evil, 0.6)
    page = render_page(build_report(info, [draft]))
    outline = Outline(page)
    assert "script" not in outline.tags
    assert evil in outline.text
    assert ("style", "fill:var(--s0)") in outline.attributes


def test_tokens_are_escaped_in_text_and_in_tooltips(run_info, measurement):
    evil = '"><script>alert(1)</script>'
    info = dataclasses.replace(run_info, spell=lambda token: evil.encode())
    page = render_page(build_report(info, [measurement("a", 0.6)]))
    assert "script" not in Outline(page).tags
    assert "drafted: &#34;&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in page.replace("·", " ")


def test_a_draft_that_changes_the_output_is_marked(run_info, measurement):
    broken = {
        "prompts": 40,
        "identical": 37,
        "tie_divergences": 0,
        "unexplained": 3,
        "divergences": [],
    }
    draft = measurement("a", 0.6, lossless=broken)
    page = render_page(build_report(run_info, [draft]))
    assert '<span class="pill bad">40 texts: 37 identical, 0 same up to ties, 3 changed<' in page
    assert 'class="good"' not in page


@pytest.mark.parametrize(("ties", "mark"), [(0, "good"), (2, "tie")])
def test_only_identical_texts_are_green(run_info, measurement, ties, mark):
    draft = measurement("a", 0.6)
    entries = draft.lossless["divergences"][:ties]
    draft = dataclasses.replace(draft, lossless=ledger(40, entries))
    page = render_page(build_report(run_info, [draft]))
    counts = f"40 texts: {40 - ties} identical, {ties} same up to ties, 0 changed"
    assert f'<span class="pill {mark}">{counts}<' in page
    assert f'<li class="{mark}">With draft a, {counts}' in page


def test_the_waterfall_starts_and_ends_where_the_report_does(sample_report):
    page = Outline(render_page(sample_report)).text
    draft = sample_report.drafts["tuned"]
    shown = re.search(r"All of .*?([\d.]+)× Rejected .* Wall clock ([\d.]+)×", page)
    assert float(shown[1]) == pytest.approx(draft.mean_drafted + 1, abs=0.005)
    assert float(shown[2]) == pytest.approx(draft.speedup.mean, abs=0.005)


def test_the_heat_map_marks_exactly_the_rejected_tokens(sample_report):
    page = render_page(sample_report)
    shown = [
        value
        for draft in sample_report.drafts.values()
        for text in draft.atlas.heat_map
        for value in text.values
    ]
    assert page.count('<span class="h0" title="0% accepted') == sum(v == 0 for v in shown) > 0


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_any_number_of_drafts_is_drawn(run_info, measurement, drafts):
    names = [f"draft {i}" for i in range(drafts)]
    page = Outline(render_page(build_report(run_info, [measurement(n, 0.5) for n in names])))
    assert all(name in page.text for name in names)


@pytest.mark.parametrize(
    ("value", "whole"),
    [
        ("0.25 [0.24,0.27]", True),
        ("+0.29", True),
        ("−1.32", True),
        ("2,304 B", True),
        ("34% [29%,40%]", True),
        ("1.34×", True),
        ("not measured", True),
        ("22703ebb9ab8e5e4710568ac218feb2e", False),  # a hash that did widen the page
        ("4710568921812" * 5 + "a", False),
        ("pypi:dist==0.1/model.gguf", False),
        ("", False),
    ],
)
def test_numbers_stay_on_a_line_and_hashes_do_not(value, whole):
    assert is_numeric(value) == whole


def test_what_lies_beyond_a_plot_is_drawn_at_its_edge():
    plot = Plot(0.5, 4.5, 2.0)
    assert plot.x(0.0) == plot.x(0.5) < plot.x(1) < plot.x(4.5) == plot.x(9)
    assert plot.y(3.0) == plot.y(2.0) < plot.y(1.0) < plot.y(0)


@pytest.mark.parametrize("top", [0.011, 0.4, 1.0, 1.08, 2.9, 7.3, 1234.0])
def test_ticks_are_round_and_cover_the_plot(top):
    ticks = Plot(0, 1, top).ticks
    assert ticks[0] == 0
    assert 0.5 * top < ticks[-1] <= top * (1 + 1e-9)
    assert 3 <= len(ticks) <= 6
