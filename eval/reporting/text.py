"""A report as text: report.md, the table at the end of a run, and the words both share.

Everything is rendered from the report's dict alone, so a report can be shown again from its
report.json years later. eval/reporting/page.py makes report.html from the same cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eval.measuring.metrics import Measured

NOT_MEASURED = "not measured"
BATCH_NOTE = (
    "The rows of a batch start together, and one that ends leaves. Without a draft: the same "
    "batches. Tokens/s of all rows together; intervals over batches. In bf16 two forwards of other "
    "shapes differ in the last bits, so texts may part at near-ties, each checked in the tie "
    "ledger; in fp32 they are the same."
)
LEDGER_ROWS = 20
LEDGER_NOTE = (
    "Greedy texts with and without the draft, token by token. A divergence is a tie where the two "
    "logits lie no further apart than two forwards of the target differ, and fp32 agrees."
)
RULES_NOTE = (
    "Mean acceptance of one drafted token, from one teacher-forced log. Rejection sampling: "
    "sum min(p, q). Greedy match: the draft proposes argmax q, accepted where the target samples "
    "it: p(argmax q). Target's p: x drawn from q, accepted with probability p(x): "
    "sum q p. All three leave the output as the target's."
)

# One line each; docs/metrics.md has the long form.
DEFINITIONS = {
    "alpha": "mean over positions of sum_x min(p, q) on text the target generated, teacher-forced; "
    "at temperature 0, how often the two argmaxes agree. Does not depend on gamma.",
    "tau": "tokens emitted per target call in the decode phase: bonus token in; prefill token and "
    "a cut last block out.",
    "accepted/drafted": "share of drafted tokens that verification accepted, over the blocks of "
    "tau. Falls as gamma grows.",
    "speed-up": "wall seconds per emitted token without a draft / with it; prefill in; same "
    "target, engine, dtype and run, interleaved prompt by prompt.",
    "predicted speed-up": "tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)) from "
    "isolated forwards, gamma the mean drafted length.",
    "decode efficiency": "decode-phase speed-up / predicted speed-up; 1 means no overhead beyond "
    "the two models.",
    "c": "seconds of one draft step / of one target step.",
    "verify ratio": "seconds of a target call on gamma + 1 tokens / on one.",
    "memory overhead": "bytes of the draft (what it shares with the target not counted) / bytes "
    "of the target, in the form measured.",
    "TTFT, ITL": "time to the first token; inter-token latency, a block's time spread evenly over "
    "its tokens.",
    "lost speed-up": "what the expected speed-up at the best gamma would gain if the draft agreed "
    "wherever the target's token is of that class.",
    "loop share": "share of emitted tokens in a pattern of at most 64 tokens that repeats at "
    "least 3 times over at least 8 tokens.",
    "gain": "difference to the draft named, on the same prompts.",
    "intervals": "95%, percentile bootstrap over prompts (10,000 resamples, fixed seed); n is the "
    "number of prompts.",
}


def headline(report: dict[str, Any]) -> str:
    """One sentence on the last draft of the report (the tuned one of a training run)."""
    name, draft = list(report["drafts"].items())[-1]
    low, high = draft["speedup"]["ci95"]
    speedup = (
        f"{draft['speedup']['mean']:.2f}x (95% interval {low:.2f} to {high:.2f}, "
        f"{draft['speedup']['n']} prompts)"
    )
    if low > 1:
        effect = f"speeds the target up {speedup}"
    elif high < 1:
        effect = f"SLOWS the target DOWN to {speedup}"
    else:
        effect = f"makes no measurable difference in speed, {speedup}"
    facts = []
    if draft["alpha"]:
        facts.append(f"alpha {short(draft['alpha'])}")
    if draft["memory"]:
        facts.append(f"memory +{draft['memory']['overhead']:.0%}")
    facts.append("OUTPUT CHANGED" if changed_texts(draft) else "output unchanged")
    return f"Draft {name} {effect}: {', '.join(facts)}."


def gamma_text(decoding: dict[str, Any]) -> str:
    """The draft length as a table shows it: `3`, or `≤ 6` where drafts may stop before.

    A server does not tell its own.
    """
    if decoding["gamma"] is None:
        return "not known"
    return f"{'' if decoding['gamma_policy'].startswith('fixed') else '≤ '}{decoding['gamma']}"


def short(value: Measured | None, digits: int = 2) -> str:
    """`0.51 [0.49,0.53]`: a mean with its interval."""
    if value is None:
        return NOT_MEASURED
    low, high = value["ci95"]
    return f"{value['mean']:.{digits}f} [{low:.{digits}f},{high:.{digits}f}]"


def signed(value: Measured) -> str:
    """`short` of a difference, with signs."""
    low, high = value["ci95"]
    return f"{value['mean']:+.2f} [{low:+.2f},{high:+.2f}]"


def size(count: int | None) -> str:
    """Bytes in MiB."""
    return "not saved" if count is None else f"{count / 2**20:,.1f} MiB"


def percent(value: Measured | None) -> str:
    """`short` of a share."""
    if value is None:
        return NOT_MEASURED
    low, high = value["ci95"]
    return f"{value['mean']:.0%} [{low:.0%},{high:.0%}]"


def result_rows(report: dict[str, Any]) -> list[tuple[str, list[str], str | None]]:
    """The main table: (label, one cell a draft, gain of the second draft or None).

    The gain column has something to say only where exactly two drafts are compared. A row that
    nothing was measured for is left out.
    """
    drafts = list(report["drafts"].values())
    gains = report["gain"][0] if len(drafts) == 2 else {}

    def row(label: str, cell: Callable[[Any], str], key: str = "") -> tuple[Any, ...]:
        gained = signed(gains[key]) if gains.get(key) else None
        return label, [cell(draft) for draft in drafts], gained

    rows = [
        row("alpha", lambda d: short(d["alpha"]), "alpha"),
        row("tau", lambda d: short(d["tau"]), "tau"),
        row(
            f"accepted/drafted, γ {gamma_text(report['decoding'])}",
            lambda d: percent(d["accepted_over_drafted"]),
        ),
        row("speed-up", lambda d: short(d["speedup"]), "speedup"),
        row("predicted speed-up", lambda d: short(d["predicted_speedup"])),
        row("decode efficiency", lambda d: short(d["decode_efficiency"])),
        row("tokens/s, no draft", lambda d: f"{d['tokens_per_s']['baseline']['mean']:.1f}"),
        row("tokens/s, drafted", lambda d: f"{d['tokens_per_s']['speculative']['mean']:.1f}"),
        row("c (draft/target)", lambda d: f"{d['c']:.3f}" if d["c"] else NOT_MEASURED),
        row(
            "memory overhead",
            lambda d: f"{d['memory']['overhead']:.1%}" if d["memory"] else NOT_MEASURED,
        ),
        row(
            "n: alpha, speed-up",
            lambda d: f"{d['alpha']['n'] if d['alpha'] else '-'}, {d['speedup']['n']}",
        ),
    ]
    return [one for one in rows if set(one[1]) != {NOT_MEASURED}]


def ledgers(drafts: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Every comparison of drafts' greedy texts with the target's own, by what to call it."""
    found = []
    for name, draft in drafts.items():
        found.append((name, draft["lossless"]))
        found += [
            (f"{name} in batches of {point['batch_size']}", point["lossless"])
            for point in draft["by_batch_size"]
            if point["lossless"]
        ]
    return found


def changed_texts(draft: dict[str, Any]) -> int:
    """How many texts came out other than the target's own, with no tie to explain it."""
    return sum(ledger["unexplained"] for _, ledger in ledgers({"": draft}))


def lossless_line(name: str, lossless: dict[str, int]) -> str:
    return (
        f"Lossless, {name}: {lossless['identical']} of {lossless['prompts']} prompts identical, "
        f"{lossless['tie_divergences']} part at a tie, {lossless['unexplained']} unexplained"
    )


def baseline_line(report: dict[str, Any]) -> str:
    baseline = report["baseline"]
    stock = baseline["over_stock_generate"]
    compared = f", {short(stock)} of stock generate" if stock else ""
    return f"Baseline: {short(baseline['tokens_per_s'], 1)} tokens/s{compared}"


# ---------------------------------------------------------------------------------------------
# Tables: (header, rows of cells), empty where the report holds nothing for them

Rows = list[list[Any]]


def setting_rows(report: dict[str, Any]) -> Rows:
    """What was run, on what, with which prompts."""
    decoding, prompts = report["decoding"], report["prompts"]
    rows: Rows = [
        ["target", report["target"]],
        ["engine, device, dtype", f"{report['engine']}, {report['device']}, {report['dtype']}"],
        ["batch size", 1],
    ]
    rows += [[key.replace("_", " "), _or_none(value)] for key, value in decoding.items()]
    rows += [
        ["prompts", f"{prompts['source']}, {prompts['n']}"],
        ["prompts sha256", prompts["sha256"]],
        ["overlap with training", _or_none(prompts["overlap_with_training"])],
        ["bits per prompt token", _or_none(prompts["bits_per_token"])],
        ["bits of a random token", _or_none(prompts["random_bits"])],
    ]
    return rows


def _or_none(value: Any) -> Any:
    return "none" if value is None else value


def gain_table(report: dict[str, Any]) -> tuple[list[str], Rows]:
    """Every draft against the first."""
    keys = ("alpha", "tau", "speedup")
    rows = [
        [e["draft"], e["over"], *(signed(e[key]) if e[key] else NOT_MEASURED for key in keys)]
        for e in report["gain"]
    ]
    return ["draft", "over", "alpha", "tau", "speed-up"], rows


def position_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """Acceptance at each place of the draft."""
    rows = [
        [
            name,
            place["position"],
            place["drafts"],
            short(place["marginal"]),
            short(place["conditional"]) if place["conditional"] else "",
        ]
        for name, d in drafts.items()
        for place in d["per_position"] or []
    ]
    return ["draft", "position", "drafts", "marginal", "conditional"], rows


def curve_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """Expected speed-up by draft length, and what a sweep measured."""
    rows = []
    for name, d in drafts.items():
        swept = {point["gamma"]: point for point in d["gamma_sweep"]}
        for point in d["gamma_curve"] or []:
            measured = swept.get(point["gamma"])
            rows.append(
                [
                    name,
                    point["gamma"],
                    f"{point['predicted']:.2f}",
                    "" if point["replayed"] is None else f"{point['replayed']:.2f}",
                    f"{point['ceiling']:.2f}",
                    short(measured["speedup"]) if measured else "",
                    short(measured["tau"]) if measured else "",
                ]
            )
    header = "draft|gamma|from alpha|replayed|at alpha 1|measured speed-up|measured tau"
    return header.split("|"), rows


def waterfall_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """From the longest possible block to the wall clock, in times the plain target's speed."""
    rows = [
        [name, *(f"{value:.2f}" for value in d["waterfall"].values())]
        for name, d in drafts.items()
        if d["waterfall"]
    ]
    header = "every token accepted|tau|after draft steps|after verify width|decode phase|wall"
    return ["draft", *header.split("|")], rows


def cost_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """Step costs where they were timed, latency."""
    rows = [
        [
            name,
            *(
                [
                    f"{d['costs']['draft_step_ms']:.2f} ms",
                    f"{d['costs']['target_step_ms']:.2f} ms",
                    f"{d['costs']['target_step_ms'] * d['verify_ratio']:.2f} ms",
                    f"{d['verify_ratio']:.2f}",
                ]
                if d["costs"]
                else [NOT_MEASURED] * 4
            ),
            _with_without(d["ttft_ms"], "mean"),
            _with_without(d["itl_ms"], "p50"),
            _with_without(d["itl_ms"], "p95"),
        ]
        for name, d in drafts.items()
    ]
    header = (
        "draft|draft step|target step|target on gamma + 1|verify ratio|"
        "TTFT with / without|ITL p50 with / without|ITL p95 with / without"
    )
    return header.split("|"), rows


def _with_without(both: dict[str, Any], key: str) -> str:
    return f"{both['speculative'][key]:.1f} / {both['baseline'][key]:.1f} ms"


def draft_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """What each draft is, and its bytes."""
    rows = []
    for name, d in drafts.items():
        memory = d["memory"]
        sizes = [NOT_MEASURED] * 5
        if memory:
            sizes = [
                size(memory["draft_bytes"]),
                size(memory["full_form_bytes"]),
                size(memory["target_bytes"]),
                f"{memory['overhead']:.1%}",
                "{draft:,}, {target:,}".format(**memory["kv_bytes_per_token"]),
            ]
        loops = d["loop_share"]
        rows.append(
            [
                name,
                f"`{d['path']}`",
                d["form"],
                d["vocabulary"]["relation"],
                d["vocabulary"]["strategy"],
                *sizes,
                f"{loops['speculative']['mean']:.1%}" if loops else NOT_MEASURED,
            ]
        )
    header = (
        "draft|path|form measured|vocabulary|strategy|draft|full form|target|overhead|"
        "KV bytes a token: draft, target|loop share"
    )
    return header.split("|"), rows


def category_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """The numbers of each category of prompts."""
    rows = [
        [
            category,
            name,
            *(short(n[key]) if n[key] else "" for key in ("alpha", "tau", "speedup")),
            (n["alpha"] or n["speedup"] or {"n": 0})["n"],
        ]
        for name, d in drafts.items()
        for category, n in d["by_category"].items()
    ]
    return ["category", "draft", "alpha", "tau", "speed-up", "n"], rows


def atlas_table(draft: dict[str, Any]) -> tuple[list[str], Rows]:
    """The rejection atlas of one draft, the costliest class first."""
    rows = [
        [
            c["class"],
            c["positions"],
            short(c["alpha"]),
            c["rejected"],
            f"+{c['lost_speedup']:.2f}",
            ", ".join(
                f"{_code(e['target'])} drafted as {_code(e['draft'])} ×{e['count']}"
                for e in c["examples"]
            ),
        ]
        for c in draft["atlas"]["classes"]
    ]
    return ["class", "tokens", "alpha", "rejected", "lost speed-up", "most often"], rows


def _code(text: str) -> str:
    """A token in backquotes, its line breaks and bars made harmless in a table."""
    shown = text.replace("\n", "⏎").replace("`", "ˋ").replace("|", "¦").replace("\t", "⇥")
    return f"`{shown}`" if shown.strip() else f"`{shown.replace(' ', '␣')}`"


def depth_table(draft: dict[str, Any], key: str) -> tuple[list[str], Rows]:
    """alpha by output position (`by_output_position`) or by the target's entropy (`by_entropy`)."""
    unit = "output position" if key == "by_output_position" else "target's entropy, bits"
    rows = [[bucket_text(b, key), b["positions"], short(b["alpha"])] for b in draft["atlas"][key]]
    return [unit, "tokens", "alpha"], rows


def bucket_text(bucket: dict[str, Any], key: str) -> str:
    """`9-16` for positions (both ends in), `0.5-1` or `≥ 4` for bits (upper end out)."""
    low, high = bucket["from"], bucket["to"]
    if high is None:
        return f"≥ {low:g}"
    return f"{low}-{high}" if key == "by_output_position" else f"{low:g}-{high:g}"


def rules_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """alpha under three verification rules, all of them exact."""
    rows = [
        [
            name,
            f"{row['temperature']:g}",
            *(short(row[rule]) for rule in ("exact", "greedy_match", "target_probability")),
            row["exact"]["n"],
        ]
        for name, d in drafts.items()
        if d["atlas"]
        for row in d["atlas"]["verification_rules"]
    ]
    header = "draft|temp.|rejection sampling|greedy match|target's p|prompts"
    return header.split("|"), rows


def temperature_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """tau and speed-up as decoded at other temperatures."""
    rows = [
        [
            name,
            f"{point['temperature']:g}",
            short(point["tau"]),
            short(point["speedup"]),
            point["speedup"]["n"],
        ]
        for name, d in drafts.items()
        for point in d["by_temperature"]
    ]
    return ["draft", "temperature", "tau", "speed-up", "prompts"], rows


def batch_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """Speed by batch size."""
    rows = [
        [
            name,
            point["batch_size"],
            short(point["tokens_per_s"]["baseline"], 1),
            short(point["tokens_per_s"]["speculative"], 1),
            short(point["speedup"]),
            short(point["tau"]),
            point["speedup"]["n"],
            _counted(point["lossless"]) if point["lossless"] else NOT_MEASURED,
        ]
        for name, d in drafts.items()
        for point in d["by_batch_size"]
    ]
    header = (
        "draft|batch size|tokens/s, no draft|tokens/s, drafted|speed-up|tau|batches|"
        "texts as without a draft"
    )
    return header.split("|"), rows


def _counted(ledger: dict[str, Any]) -> str:
    counts = [f"{ledger['identical']} of {ledger['prompts']}"]
    for key, name in (("tie_divergences", "at a tie"), ("unexplained", "UNEXPLAINED")):
        if ledger[key]:
            counts.append(f"{ledger[key]} {name}")
    return ", ".join(counts)


def ledger_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """Greedy texts that parted from the target's own: the worst first, LEDGER_ROWS at most."""
    entries = [
        (which, entry) for which, ledger in ledgers(drafts) for entry in ledger["divergences"]
    ]
    rows = [
        [
            which,
            entry["prompt"],
            entry["position"],
            _code(entry["target"]),
            _code(entry["drafted"]),
            "" if entry["gap"] is None else f"{entry['gap']:.4f}",
            "" if entry["error"] is None else f"{entry['error']:.4f}",
            "tie" if entry["tie"] else "UNEXPLAINED",
        ]
        for which, entry in sorted(entries, key=_doubt, reverse=True)[:LEDGER_ROWS]
    ]
    header = "draft|prompt|token|without a draft|with it|gap of logits|error of forwards|verdict"
    return header.split("|"), rows


def _doubt(row: tuple[str, dict[str, Any]]) -> tuple[bool, float]:
    """Unexplained texts stand above ties, and those whose gap nearly is the error above others."""
    _, entry = row
    return not entry["tie"], entry["gap"] / entry["error"] if entry["error"] else 0.0


def ledger_note(drafts: dict[str, Any]) -> str:
    """What the ledger's table says, and how many rows it leaves out."""
    found = sum(len(ledger["divergences"]) for _, ledger in ledgers(drafts))
    more = f" The {LEDGER_ROWS} least clear of {found} are shown; report.json has all."
    return LEDGER_NOTE + (more if found > LEDGER_ROWS else "")


def other_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """alpha on the domain's prompts and on others."""
    rows = [
        [name, short(d["alpha"]), short(o["alpha"]), o["source"], o["alpha"]["n"]]
        for name, d in drafts.items()
        if (o := d["other_prompts"])
    ]
    return ["draft", "alpha here", "alpha on other prompts", "other prompts", "n"], rows


def counter_table(drafts: dict[str, Any]) -> tuple[list[str], Rows]:
    """A server's own counters, by its own definitions."""
    rows = [
        [
            name,
            c["num_drafts"],
            c["num_draft_tokens"],
            c["num_accepted_tokens"],
            short(c["mean_acceptance_length"]),
            percent(c["acceptance_rate"]),
            ", ".join(f"{share:.2f}" for share in c["acceptance_per_position"]),
        ]
        for name, d in drafts.items()
        if (c := d["counters"])
    ]
    header = (
        "draft|drafts|draft tokens|accepted tokens|mean acceptance length|acceptance rate|"
        "acceptance per position"
    )
    return header.split("|"), rows


def missing_rows(drafts: dict[str, Any]) -> list[str]:
    """One line for each reason why something could not be measured, with the fields it left out."""
    lines = []
    for name, draft in drafts.items():
        reasons: dict[str, list[str]] = {}
        for entry in draft["missing"]:
            reasons.setdefault(entry["reason"], []).append(entry["field"])
        lines += [f"{name}, {', '.join(fields)}: {why}" for why, fields in reasons.items()]
    return lines


# ---------------------------------------------------------------------------------------------
# Terminal and markdown


def print_summary(report: dict[str, Any], console: Console | None = None) -> None:
    """The report at a glance, for the terminal at the end of a run."""
    console = console or Console()
    table = Table(
        title="Speculative decoding report",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in report["drafts"]:
        table.add_column(Text(name), justify="right")
    rows = result_rows(report)
    with_gain = any(gained for _, _, gained in rows)
    if with_gain:
        table.add_column("gain", justify="right")
    for label, cells, gained in rows:
        strong = "bold" if label in ("alpha", "speed-up") else ""
        table.add_row(label, *cells, *([gained or ""] if with_gain else []), style=strong)
    console.print()
    console.print(table)
    console.print()
    # Text, not markup: a path or a range in brackets must not be read as a style.
    console.print(
        Text(
            f"Target {report['target']} on {report['device']}, {report['dtype']}, engine "
            f"{report['engine']}, temperature {report['decoding']['temperature']}, batch size 1"
        )
    )
    console.print(Text(baseline_line(report) + ". Brackets: 95% interval over prompts."))
    for which, ledger in ledgers(report["drafts"]):
        style = "red bold" if ledger["unexplained"] else "green"
        console.print(Text(lossless_line(which, ledger), style=style))
    for warning in report["warnings"]:
        console.print(Text(f"Warning: {warning}", style="yellow"))
    name, draft = list(report["drafts"].items())[-1]
    if draft["payoff"]:
        console.print(Text(f"{name}: {draft['payoff']['verdict']}"))
    console.print(Text(headline(report), style="bold"))


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _section(title: str, table: tuple[list[str], Rows], note: str = "") -> list[str]:
    """A heading with its table; nothing where the table is empty."""
    header, rows = table
    return [f"## {title}", _table(header, rows), *([note] if note else [])] if rows else []


def render_markdown(report: dict[str, Any]) -> str:
    """report.md, from the dict alone."""
    drafts = report["drafts"]
    rows = result_rows(report)
    with_gain = any(gained for _, _, gained in rows)
    parts = ["# Speculative decoding report", f"**{headline(report)}**"]
    if report["warnings"]:
        parts += ["## Warnings", "\n".join(f"- {warning}" for warning in report["warnings"])]
    if missing := missing_rows(drafts):
        parts += ["## Not measured", "\n".join(f"- {line}" for line in missing)]
    parts += [
        "## Result",
        _table(
            ["", *drafts, *(["gain"] if with_gain else [])],
            [
                [label, *cells, *([gained or ""] if with_gain else [])]
                for label, cells, gained in rows
            ],
        ),
        "Brackets hold 95% intervals over prompts. " + baseline_line(report) + ".",
        "\n".join(f"- {lossless_line(*one)}" for one in ledgers(drafts)),
    ]
    if len(drafts) > 2:
        parts += _section("Gain", gain_table(report))
    parts += _section("Counters of the server", counter_table(drafts))
    verdicts = [f"- {n}: {d['payoff']['verdict']}" for n, d in drafts.items() if d["payoff"]]
    if verdicts:
        parts += ["## Does it pay?", "\n".join(verdicts)]
    parts += _section("Where the speed-up goes", waterfall_table(drafts))
    parts += _section("Speed-up by gamma", curve_table(drafts))
    parts += ["## Setting", _table(["", ""], setting_rows(report))]
    parts += _section("Acceptance by position", position_table(drafts))
    for name, draft in drafts.items():
        if draft["atlas"]:
            parts += _section(f"Rejection atlas, {name}", atlas_table(draft))
            for key in ("by_output_position", "by_entropy"):
                parts.append(_table(*depth_table(draft, key)))
    parts += _section("Verification rules and temperatures", rules_table(drafts), RULES_NOTE)
    parts += _section("Decoded at other temperatures", temperature_table(drafts))
    parts += _section("By batch size", batch_table(drafts), BATCH_NOTE)
    parts += _section("Other prompts", other_table(drafts))
    parts += _section("Cost and latency", cost_table(drafts))
    parts += _section("Tie ledger", ledger_table(drafts), ledger_note(drafts))
    parts += _section("Drafts", draft_table(drafts))
    parts += _section("By category", category_table(drafts))
    parts += [
        "## What the numbers mean",
        "\n".join(f"- **{term}**: {text}" for term, text in DEFINITIONS.items()),
        "## Provenance",
        "```json\n" + json.dumps(report["provenance"], indent=2) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"
