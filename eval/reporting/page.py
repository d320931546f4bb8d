"""report.html: one file that needs nothing else, for a browser in the light or dark, and for paper.

No script, no network, no font of its own. The charts are inline SVG drawn by the functions below;
every text of the report is escaped. Rendered from the report's dict alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from eval.measuring.metrics import Measured
from eval.reporting.text import (
    BATCH_NOTE,
    DEFINITIONS,
    RULES_NOTE,
    Rows,
    baseline_line,
    batch_table,
    bucket_text,
    category_table,
    changed_texts,
    cost_table,
    counter_table,
    draft_table,
    gain_table,
    gamma_text,
    headline,
    ledger_note,
    ledger_table,
    ledgers,
    lossless_line,
    missing_rows,
    other_table,
    result_rows,
    rules_table,
    setting_rows,
    short,
    signed,
    size,
    temperature_table,
)

STYLE = Path(__file__).with_name("page.css")
COLOURS = 5  # --s0 … --s4 of page.css; the last draft, which the headline is about, takes the first
WIDTH, HEIGHT = 480, 260  # of a chart, in its own units
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 42  # margins around its plot


# ---------------------------------------------------------------------------------------------
# Elements


def element(name: str, /, *inside: str, **attributes: Any) -> str:
    """One element. `inside` is markup; attributes are escaped, `_` in a name is a hyphen."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(inside)}</{name}>"


def _plain(value: Any) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _paragraph(text: str, class_: str = "note") -> str:
    return element("p", escape(text), class_=class_)


def _section(title: str, *inside: str, note: str = "", wide: bool = True) -> str:
    parts = [element("h2", escape(title)), *([_paragraph(note)] if note else []), *inside]
    return element("section", *parts, class_="card wide" if wide else "card")


def _table(table: tuple[Sequence[str], Rows], first: bool = True) -> str:
    """A table that scrolls on its own where the page is too narrow for it."""
    header, rows = table
    head = element("tr", *(element("th", escape(str(cell)), scope="col") for cell in header))
    body = [
        element("tr", *(_cell(cell, first and i == 0) for i, cell in enumerate(row)))
        for row in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body))
    return element("div", whole, class_="scroll", tabindex=0)


def _cell(value: Any, heading: bool) -> str:
    text = escape(str(value))
    if text.count("`") and text.count("`") % 2 == 0:
        pieces = text.split("`")
        text = "".join(element("code", p) if i % 2 else p for i, p in enumerate(pieces))
    if heading:
        return element("th", text, scope="row")
    if "`" not in str(value):  # an interval stays on one line, below its mean where it must
        text = re.sub(r"\[[^\]]*\]$", lambda m: element("span", m[0], class_="ci"), text)
    # a number and its unit stay together; a hash may begin with a digit and must break
    numeric = re.match(r"[+\-−≤]?\d[\d.,]*(?!\w)|not measured", text)
    return element("td", text, class_="number") if numeric else element("td", text)


def _transposed(table: tuple[list[str], Rows]) -> tuple[list[str], Rows]:
    """One column a draft: many facts on few drafts fit a narrow page that way."""
    header, *rows = (
        [str(cell) for cell in column] for column in zip(table[0], *table[1], strict=True)
    )
    return ["", *header[1:]], [list(row) for row in rows]


def _details(title: str, *inside: str) -> str:
    return element("details", element("summary", escape(title)), *inside)


# ---------------------------------------------------------------------------------------------
# Charts


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 to `top`, four or five of them."""
    raw = top / 4
    step = 10 ** math.floor(math.log10(raw))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw * 0.999)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


class Plot:
    """The plane of one chart: x in slots or numbers from `low` to `high`, y from 0 to `top`."""

    def __init__(self, low: float, high: float, top: float, percent: bool) -> None:
        self.low, self.high, self.top = low, high, top
        self.marks: list[str] = []
        for tick in _ticks(top):
            label = f"{tick:.0%}" if percent else f"{tick:g}×"
            self.line(low, tick, high, tick, class_="grid")
            self.text(LEFT - 6, self.y(tick) + 4, label, text_anchor="end")

    def x(self, value: float) -> float:
        return LEFT + (value - self.low) / (self.high - self.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - TOP - BOTTOM)

    def line(self, x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> None:
        ends = {"x1": self.x(x1), "y1": self.y(y1), "x2": self.x(x2), "y2": self.y(y2)}
        self.marks.append(element("line", **ends, **attributes))

    def text(self, x: float, y: float, text: str, **attributes: Any) -> None:
        """Text at a place of the drawing, not of the plane."""
        self.marks.append(element("text", escape(text), x=x, y=y, **attributes))

    def interval(self, x: float, value: Measured) -> None:
        low, high = value["ci95"]
        self.line(x, low, x, min(high, self.top), class_="interval")

    def dot(self, x: float, value: Measured, colour: str, title: str) -> None:
        self.interval(x, value)
        self.marks.append(
            element(
                "circle",
                element("title", escape(title)),
                cx=self.x(x),
                cy=self.y(min(value["mean"], self.top)),
                r=4.5,
                class_="dot",
                style=f"fill:{colour}",
            )
        )

    def drawn(self, label: str, x_label: str) -> str:
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, x_label, text_anchor="middle")
        return element(
            "svg",
            element("title", escape(label)),
            *self.marks,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            class_="chart",
        )


def _legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """entries: (class of the swatch, colour, name)."""
    return element(
        "p",
        *(
            element("span", element("i", class_=kind, style=f"--c:{colour}"), escape(name))
            for kind, colour, name in entries
        ),
        class_="legend",
    )


def grouped_bars(
    labels: Sequence[str],
    series: Sequence[tuple[str, str, Sequence[Measured | None]]],
    x_label: str,
    dots: Sequence[Sequence[Measured | None]] = (),
) -> str:
    """Shares as bars with their intervals; series: (name, colour, one value a label).

    dots: for each series, values of a second kind, as dots over its bars.
    """
    plot = Plot(0, len(labels), 1.0, percent=True)
    width = 0.76 / len(series)
    for i, label in enumerate(labels):
        plot.text(plot.x(i + 0.5), HEIGHT - BOTTOM + 14, label, text_anchor="middle")
        for j, (name, colour, values) in enumerate(series):
            value, left = values[i], i + 0.12 + j * width
            middle = left + width / 2
            if value is not None:
                top = plot.y(value["mean"])
                title = element("title", escape(f"{name}, {label}: {short(value)}"))
                plot.marks.append(
                    element(
                        "rect",
                        title,
                        x=plot.x(left) + 1,
                        y=top,
                        width=plot.x(left + width) - plot.x(left) - 2,
                        height=max(plot.y(0) - top, 0.5),
                        rx=2,
                        style=f"fill:{colour}",
                    )
                )
                plot.interval(middle, value)
            over = dots[j][i] if dots else None
            if over is not None:
                plot.dot(middle + width * 0.22, over, colour, f"{name}, {label}: {short(over)}")
    return plot.drawn(x_label, x_label)


def gamma_chart(drafts: dict[str, Any], colours: dict[str, str]) -> str:
    """Expected speed-up by gamma as lines, measured speed-ups as dots."""
    curves = {name: d["gamma_curve"] for name, d in drafts.items() if d["gamma_curve"]}
    last = list(curves)[-1]
    measured = [
        (name, point["gamma"], point["speedup"], f"{name}, gamma {point['gamma']}, sweep")
        for name in curves
        for point in drafts[name]["gamma_sweep"]
    ]
    measured += [
        (name, drafts[name]["mean_drafted"], drafts[name]["speedup"], f"{name}, the run itself")
        for name in curves
    ]
    longest = max(point["gamma"] for curve in curves.values() for point in curve)
    highest = [point["ceiling"] for point in curves[last]]
    highest += [value["ci95"][1] for _, _, value, _ in measured]
    plot = Plot(0.5, longest + 0.5, 1.08 * max(1.0, *highest), percent=False)
    for gamma in range(1, longest + 1):
        plot.text(plot.x(gamma), HEIGHT - BOTTOM + 14, str(gamma), text_anchor="middle")
    plot.line(0.5, 1, longest + 0.5, 1, class_="unit")
    lines = [(curves[last], "ceiling", "var(--muted)", "ceiling")]
    for name, curve in curves.items():
        replayed = curve[0]["replayed"] is not None
        lines.append((curve, "predicted", colours[name], "thin" if replayed else "curve"))
        if replayed:
            whole = [point for point in curve if point["replayed"] is not None]
            lines.append((whole, "replayed", colours[name], "curve"))
    for curve, key, colour, kind in lines:
        points = " ".join(f"{plot.x(p['gamma']):.1f},{plot.y(p[key]):.1f}" for p in curve)
        plot.marks.append(element("polyline", points=points, class_=kind, style=f"stroke:{colour}"))
    for name, gamma, value, title in measured:
        plot.dot(gamma, value, colours[name], f"{title}: {short(value)}")
    legend = [("swatch line", colours[name], name) for name in curves]
    legend += [("swatch line dashed", "var(--muted)", f"{last} at alpha 1")]
    legend += [("swatch round", "var(--ink)", "measured, 95% interval")]
    return plot.drawn("Speed-up by gamma", "gamma: drafted tokens a call") + _legend(legend)


def waterfall_chart(draft: dict[str, Any]) -> str:
    """Rows of bars from the longest possible block down to the wall clock."""
    w = draft["waterfall"]
    gamma = draft["mean_drafted"]
    rows: list[tuple[str, float | None, float]] = [
        (f"All of {gamma:.2f} drafted tokens accepted", None, w["all_accepted"]),
        ("Rejected tokens", w["all_accepted"], w["tau"]),
        ("τ: drafting and verification free", None, w["tau"]),
        (f"Draft steps, c = {draft['c']:.3f}", w["tau"], w["after_draft_steps"]),
        (
            f"Wider target calls, ×{draft['verify_ratio']:.2f}",
            w["after_draft_steps"],
            w["predicted"],
        ),
        ("Predicted", None, w["predicted"]),
        ("Overhead of the loop", w["predicted"], w["decode"]),
        ("Prefill, cut blocks", w["decode"], w["wall"]),
        ("Wall clock", None, w["wall"]),
    ]
    widest = 1.02 * max(max(start or 0, end) for _, start, end in rows)

    def share(value: float) -> str:
        return f"{100 * value / widest:.2f}%"

    cells = []
    for label, start, end in rows:
        if start is None:
            bar, shown, kind = (0.0, end), f"{end:.2f}×", "total"
        else:
            bar, shown = (min(start, end), max(start, end)), f"{end - start:+.2f}"
            kind = "loss" if end < start else "win"
        rect = element("rect", x=share(bar[0]), width=share(bar[1] - bar[0]), y=3, height=14, rx=2)
        unit = element("line", x1=share(1), x2=share(1), y1=0, y2=20, class_="unit")
        cells += [
            element("span", escape(label), class_=f"label {kind}"),
            element("svg", rect, unit, class_=f"bar {kind}", aria_hidden="true"),
            element("span", shown, class_=f"value {kind}"),
        ]
    return element("div", *cells, class_="waterfall")


def _split_bar(accepted: float, rejected: float, widest: float) -> str:
    """One bar whose length is a count, the rejected part of it at its end."""
    one, two = (100 * part / widest for part in (accepted, rejected))
    return element(
        "svg",
        element("rect", x="0", width=f"{one:.2f}%", y=3, height=14, class_="accepted"),
        element("rect", x=f"{one:.2f}%", width=f"{two:.2f}%", y=3, height=14, class_="rejected"),
        class_="bar",
        aria_hidden="true",
    )


def atlas_chart(draft: dict[str, Any]) -> str:
    """The classes as bars, each with its commonest confusions."""
    classes = draft["atlas"]["classes"]
    widest = max(c["positions"] for c in classes)
    head = ["class", "tokens: accepted, rejected", "alpha", "lost speed-up"]
    rows = [element("div", *(element("span", text) for text in head), class_="row head")]
    for c in classes:
        examples = [
            element(
                "span",
                element("code", escape(_visible(e["target"]))),
                " ← ",
                element("code", escape(_visible(e["draft"])), class_="wrong"),
                f" ×{e['count']}",
                title=f"after: {e['before']}",
            )
            for e in c["examples"]
        ]
        bar = _split_bar(c["positions"] - c["rejected"], c["rejected"], widest)
        count = element("small", f"{c['positions']:,} · {c['rejected']:,.0f} rejected")
        rows.append(
            element(
                "div",
                element("b", escape(c["class"])),
                element("span", bar, count),
                element("span", escape(short(c["alpha"])), class_="number"),
                element("span", f"+{c['lost_speedup']:.2f}×", class_="number"),
                element("p", *examples, class_="examples"),
                class_="row",
            )
        )
    return element("div", *rows, class_="atlas")


def _visible(token: str) -> str:
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def heat_map(draft: dict[str, Any]) -> str:
    """Answers of the target, the tokens that the draft would not have got marked."""
    blocks = []
    for text in draft["atlas"]["heat_map"]:
        spans = []
        for token, value, guess in zip(
            text["tokens"], text["values"], text["guesses"], strict=True
        ):
            level = min(int(value * 5), 4)
            if level == 4:
                spans.append(escape(token))
                continue
            title = f"{value:.0%} accepted; drafted: {_visible(guess)}"
            # a line break has no width to colour: show it as a mark before it
            shown = token.replace("\n", "⏎\n")
            spans.append(element("span", escape(shown), class_=f"h{level}", title=title))
        caption = (
            f"Prompt {text['prompt']}: alpha {text['alpha']:.2f}, {len(text['tokens'])} tokens"
        )
        blocks.append(
            element("figure", element("figcaption", escape(caption)), element("pre", *spans))
        )
    return element("div", *blocks, class_="heat")


def memory_chart(drafts: dict[str, Any], colours: dict[str, str]) -> str:
    """Bytes of the target and of each draft, and what a token of context takes."""
    last = next(d for d in reversed(drafts.values()) if d["memory"])
    target = last["memory"]["target_bytes"]
    kv = last["memory"]["kv_bytes_per_token"]["target"]
    rows = [("target", target, "", kv, "var(--muted)")]
    for name, d in drafts.items():
        if not (m := d["memory"]):
            continue
        form, token = f"{d['form']}, {m['overhead']:.1%}", m["kv_bytes_per_token"]["draft"]
        rows.append((name, m["draft_bytes"], form, token, colours[name]))
        if m["full_form_bytes"] and m["full_form_bytes"] != m["draft_bytes"]:
            share = f"full form, {m['full_form_bytes'] / target:.1%}"
            rows.append((name, m["full_form_bytes"], share, token, colours[name]))
    widest = max(row[1] for row in rows)
    cells = []
    for name, count, form, token, colour in rows:
        width = f"{100 * count / widest:.2f}%"
        rect = element("rect", x="0", width=width, y=3, height=14, rx=2, style=f"fill:{colour}")
        cells += [
            element("span", escape(name), element("small", escape(form)), class_="label"),
            element("svg", rect, class_="bar", aria_hidden="true"),
            element(
                "span", size(count), element("small", f"{token:,} B KV a token"), class_="value"
            ),
        ]
    return element("div", *cells, class_="waterfall memory")


# ---------------------------------------------------------------------------------------------
# The page


def _card(label: str, value: str, interval: str, extra: str) -> str:
    return element(
        "div",
        element("h3", escape(label)),
        element("strong", escape(value)),
        element("span", escape(interval)),
        element("small", escape(extra)),
        class_="figure",
    )


def _interval(value: Measured, shown: Callable[[float], str]) -> str:
    low, high = value["ci95"]
    return f"{shown(low)} to {shown(high)} · n {value['n']}"


def _figures(report: dict[str, Any]) -> str:
    """The headline numbers of the last draft, what they were for the first beside them."""
    name, draft = list(report["drafts"].items())[-1]
    gains: dict[str, Any] = next((e for e in report["gain"] if e["draft"] == name), {})

    def gained(key: str) -> str:
        return f"{signed(gains[key])} over {gains['over']}" if gains.get(key) else ""

    def two(x: float) -> str:
        return f"{x:.2f}"

    speeds = draft["tokens_per_s"]
    cards = [
        _card(
            "Speed-up",
            f"{draft['speedup']['mean']:.2f}×",
            _interval(draft["speedup"], two),
            gained("speedup"),
        )
    ]
    for label, key in (("α", "alpha"), ("τ, tokens a call", "tau")):
        if value := draft[key]:
            cards.append(_card(label, two(value["mean"]), _interval(value, two), gained(key)))
    if counters := draft["counters"]:
        length = counters["mean_acceptance_length"]
        cards.append(
            _card(
                "Mean acceptance length",
                two(length["mean"]),
                _interval(length, two),
                "by the server's counters",
            )
        )
    cards.append(
        _card(
            "Tokens a second",
            f"{speeds['speculative']['mean']:.1f}",
            _interval(speeds["speculative"], lambda x: f"{x:.1f}"),
            f"without a draft {short(speeds['baseline'], 1)}",
        )
    )
    if memory := draft["memory"]:
        cards.append(
            _card(
                "Draft memory",
                f"+{memory['overhead']:.1%}",
                f"{size(memory['draft_bytes'])}",
                f"{draft['form']} form; target {size(memory['target_bytes'])}",
            )
        )
    if efficiency := draft["decode_efficiency"]:
        cards.append(
            _card(
                "Decode efficiency",
                two(efficiency["mean"]),
                _interval(efficiency, two),
                "of what the step costs predict",
            )
        )
    return element("div", *cards, class_="figures")


def _result(report: dict[str, Any]) -> str:
    rows = result_rows(report)
    with_gain = any(gained for _, _, gained in rows)
    header = ["", *report["drafts"], *(["gain"] if with_gain else [])]
    cells: Rows = [
        [label, *cells, *([gained or ""] if with_gain else [])] for label, cells, gained in rows
    ]
    parts = [_table((header, cells))]
    if len(report["drafts"]) > 2:
        parts.append(_table(gain_table(report)))
    return _section(
        "Result",
        *parts,
        note=f"Brackets hold 95% intervals over prompts. {baseline_line(report)}.",
    )


def _lossless(report: dict[str, Any]) -> str:
    drafts = report["drafts"]
    lines = [
        element(
            "li",
            escape(lossless_line(which, ledger)),
            class_="bad" if ledger["unexplained"] else "good",
        )
        for which, ledger in ledgers(drafts)
    ]
    table = ledger_table(drafts)
    return _section(
        "Lossless: the tie ledger",
        element("ul", *lines, class_="verdicts"),
        *([_table(table)] if table[1] else []),
        note=ledger_note(drafts),
    )


def _acceptance(drafts: dict[str, Any], colours: dict[str, str]) -> list[str]:
    """Charts of acceptance: by place in the draft, by place in the answer, by entropy."""
    cards = []
    with_places = {name: d for name, d in drafts.items() if d["per_position"]}
    if with_places:
        longest = max(len(d["per_position"]) for d in with_places.values())

        def values(name: str, key: str) -> list[Measured | None]:
            places = [place[key] for place in with_places[name]["per_position"]]
            return places + [None] * (longest - len(places))

        chart = grouped_bars(
            [str(i + 1) for i in range(longest)],
            [(name, colours[name], values(name, "marginal")) for name in with_places],
            "position in the draft",
            [values(name, "conditional") for name in with_places],
        )
        legend = [("swatch", colours[name], name) for name in with_places]
        legend += [("swatch round", "var(--ink)", "given that all before were accepted")]
        note = "Bars: all tokens up to this one accepted, of the drafts that got this far."
        cards.append(
            _section("By position in the draft", chart, _legend(legend), note=note, wide=False)
        )
    with_atlas = {name: d for name, d in drafts.items() if d["atlas"]}
    for key, title, x_label in (
        ("by_output_position", "By position in the answer", "token of the answer"),
        ("by_entropy", "By the target's entropy", "bits at temperature 1"),
    ):
        if not with_atlas:
            continue
        # all drafts are measured on the same texts, so their buckets are the same
        buckets = next(iter(with_atlas.values()))["atlas"][key]
        chart = grouped_bars(
            [bucket_text(bucket, key) for bucket in buckets],
            [
                (name, colours[name], [bucket["alpha"] for bucket in d["atlas"][key]])
                for name, d in with_atlas.items()
            ],
            x_label,
        )
        legend = [("swatch", colours[name], name) for name in with_atlas]
        counted = ", ".join(f"{b['positions']:,}" for b in buckets)
        cards.append(
            _section(title, chart, _legend(legend), note=f"alpha. Tokens: {counted}.", wide=False)
        )
    return cards


def _atlas(drafts: dict[str, Any]) -> list[str]:
    """The atlas and the heat map of the last draft; those of the others folded below it."""
    shown = [(name, d) for name, d in reversed(drafts.items()) if d["atlas"]]
    if not shown:
        return []
    (name, draft), *others = shown
    scheme = draft["atlas"]["scheme"]
    atlas = _section(
        f"Rejection atlas of {name}",
        atlas_chart(draft),
        *(_details(f"The atlas of {other}", atlas_chart(d)) for other, d in others),
        note=f"Tokens of the target's own text by class ({scheme}). Lost speed-up: what the "
        "expected speed-up at the best gamma would gain if the draft were right throughout the "
        "class. Below: the target's token ← what the draft said.",
    )
    heat = _section(
        f"What {name} gets wrong, in the text",
        heat_map(draft),
        *(_details(f"The same answers, {other}", heat_map(d)) for other, d in others),
        note="The answers with the lowest, the middle and the highest alpha. Marked: tokens the "
        "draft would not have got, the darker the surer; hover for what it drafted.",
    )
    return [atlas, heat]


def render_page(report: dict[str, Any]) -> str:
    """report.html, from the dict alone."""
    drafts = report["drafts"]
    order = list(reversed(drafts))
    colours = {name: f"var(--s{order.index(name) % COLOURS})" for name in drafts}
    name, draft = list(drafts.items())[-1]
    pill = (
        element("span", f"{changed} outputs changed", class_="pill bad")
        if (changed := changed_texts(draft))
        else element("span", "output unchanged", class_="pill good")
    )
    setting = (
        f"γ {gamma_text(report['decoding'])} · temperature {report['decoding']['temperature']:g} · "
        f"{report['prompts']['n']} prompts · {report['device']} · {report['dtype']} · engine "
        f"{report['engine']} · batch size 1"
    )
    body = [
        element(
            "header",
            element("p", "draftsmith · speculative decoding report", class_="brand"),
            element("h1", escape(headline(report))),
            element("p", pill, element("span", escape(setting)), class_="setting"),
        ),
        _figures(report),
    ]
    notices = [
        (title, kind, lines)
        for title, kind, lines in (
            ("Read these first", "warnings", report["warnings"]),
            ("Not measured", "missing", missing_rows(drafts)),
        )
        if lines
    ]
    for title, kind, lines in notices:
        items = element("ul", *(element("li", escape(line)) for line in lines))
        body.append(element("section", element("h2", title), items, class_=f"card wide {kind}"))
    body.append(_result(report))
    if counters := counter_table(drafts)[1]:
        note = "By the server's own definitions (docs/metrics.md)."
        table = _table(_transposed((counter_table(drafts)[0], counters)))
        body.append(_section("Counters of the server", table, note=note))
    if draft["waterfall"]:
        verdicts = [
            _paragraph(f"{n}: {d['payoff']['verdict']}") for n, d in drafts.items() if d["payoff"]
        ]
        body.append(
            _section(
                f"Where the speed-up of {name} goes",
                waterfall_chart(draft),
                element("div", *verdicts, class_="below"),
                note="Times the plain target's speed; the line stands at 1×.",
                wide=False,
            )
        )
    if any(d["gamma_curve"] for d in drafts.values()):
        note = (
            "Expected from the step costs: solid with the tau that greedy decoding has by the log "
            "of alpha, thin with positions taken as independent (all there is when sampling)."
        )
        chart = gamma_chart(drafts, colours)
        body.append(_section("Speed-up by gamma", chart, note=note, wide=False))
    body += _acceptance(drafts, colours)
    if any(d["memory"] for d in drafts.values()):
        body.append(_section("Memory", memory_chart(drafts, colours), wide=False))
    body += _atlas(drafts)
    if rules_table(drafts)[1]:
        body.append(
            _section(
                "Verification rules and temperatures", _table(rules_table(drafts)), note=RULES_NOTE
            )
        )
    if temperature_table(drafts)[1]:
        body.append(_section("Decoded at other temperatures", _table(temperature_table(drafts))))
    if batch_table(drafts)[1]:
        body.append(_section("By batch size", _table(batch_table(drafts)), note=BATCH_NOTE))
    body.append(_lossless(report))
    for heading, rows in (
        ("By category", category_table(drafts)),
        ("Other prompts", other_table(drafts)),
        ("Cost and latency", _transposed(cost_table(drafts))),
        ("Drafts", _transposed(draft_table(drafts))),
    ):
        if rows[1]:
            body.append(_section(heading, _table(rows)))
    definitions = [
        part
        for term, text in DEFINITIONS.items()
        for part in (element("dt", escape(term)), element("dd", escape(text)))
    ]
    provenance = json.dumps(report["provenance"], indent=2, ensure_ascii=False)
    body.append(
        _section(
            "Setting and provenance",
            _table((["", ""], setting_rows(report))),
            _details("What the numbers mean", element("dl", *definitions)),
            _details("Provenance", element("pre", escape(provenance), class_="json")),
        )
    )
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        element("title", escape(f"Speculative decoding report: {name}")),
        element("style", STYLE.read_text(encoding="utf-8")),
    ]
    page = element(
        "html", element("head", *head), element("body", element("main", *body)), lang="en"
    )
    return f"<!DOCTYPE html>\n{page}\n"
