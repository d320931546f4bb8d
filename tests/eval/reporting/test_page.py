"""report.html is one whole file that needs nothing else and hides nothing of the report."""

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from eval.reporting.build import build_report
from eval.reporting.page import render_page
from eval.reporting.tables import details, result_table
from eval.reporting.text import render_markdown
from eval.reporting.verdict import verdict
from eval.reporting.warnings import find_warnings

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
    html = render_page(sample_report)
    page = Outline(html)
    assert page.tags.count("details") == 1
    assert "Acceptance by position in the draft" in page.text
    for table in [result_table(sample_report), *details(sample_report)]:
        assert table.title in page.text
    assert page.text.count(verdict(sample_report)) == 1
    assert all(warning.text in page.text for warning in find_warnings(sample_report))
    assert sample_report.prompts.sha256 in page.text
    assert re.search(r'<td class="short">25.7 MiB</td>', html)
    assert "None" not in page.text


def test_it_needs_nothing_else(sample_report):
    page = render_page(sample_report)
    outline = Outline(page)
    assert not {"script", "link", "img", "iframe"} & set(outline.tags)
    assert not {"src", "href", "onload", "onclick"} & {name for name, _ in outline.attributes}
    assert not re.search(r"url\(|@import|https?://", page)


def test_text_of_the_report_is_escaped(run_info, measurement):
    evil = "\"><script>alert('x')</script>& `a`|b\n\n![c](d)*"
    about = run_info.about | {"target": evil, "provenance": {"command": evil}}
    info = dataclasses.replace(run_info, about=about)
    report = build_report(info, [measurement(evil, 0.6)])
    page = render_page(report)
    outline = Outline(page)
    assert "script" not in outline.tags
    assert " ".join(evil.split()) in outline.text
    markdown = [line for line in render_markdown(report).splitlines() if line[:4] != "    "]
    assert not re.search(r"(?<!\\)(<script|`a|\]\()", "\n".join(markdown[:-1]))


@pytest.mark.parametrize(
    ("ties", "mismatches", "mark"), [(0, 0, "good"), (2, 0, "tie"), (1, 1, "bad")]
)
def test_the_output_check_is_green_for_exact_matches_alone(
    run_info, measurement, ties, mismatches, mark
):
    near = measurement("a", 0.6).about["lossless"]["divergences"]
    entries = [*near[:ties], *[near[0] | {"tie": False}] * mismatches]
    draft = measurement("a", 0.6, lossless={"prompts": 40, "divergences": entries})
    page = render_page(build_report(run_info, [draft]))
    assert f'<span class="pill {mark}">' in page


def test_the_distilled_draft_has_the_accent(run_info, measurement):
    drafts = [measurement(name, 0.5) for name in ("untuned", "tuned", "tuned+lookup")]
    page = render_page(build_report(run_info, drafts))
    legend = re.search(r'--c:var\((--s\d)\)"></i>distilled draft<', page)
    assert legend[1] == "--s0"


@pytest.mark.parametrize("drafts", [1, 3, 6])
def test_any_number_of_drafts_is_drawn(run_info, measurement, drafts):
    names = [f"draft {i}" for i in range(drafts)]
    page = Outline(render_page(build_report(run_info, [measurement(n, 0.5) for n in names])))
    assert all(name in page.text for name in names)
