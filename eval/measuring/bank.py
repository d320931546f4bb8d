"""What a bank of adapters is worth, from the sums by prompt of a report on all domains' prompts.

A prompt's category is its domain, which is the name of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.measuring.metrics import Rows, difference, measure_rows, share, speedup_of
from eval.reporting.report import (
    Bank,
    BankAdapter,
    BankCell,
    Gain,
    Measured,
    PromptSums,
    Report,
    RoutingFound,
)

RIGHT = "the right adapter"  # for each prompt its own domain's

Sums = Sequence[PromptSums]


def measured_bank(
    report: Report,
    base: tuple[str, int],
    adapters: Sequence[Mapping[str, Any]],
    chosen: Mapping[str, str],
    route_ms: float,
) -> Bank:
    """The bank of a report whose drafts are the base first, then the adapters by name, then others.

    base: its path and bytes. adapters: {name, bytes, swap_ms}. chosen: prompt id -> the name that
    the router took; empty where there is none. route_ms: of one request.
    """
    by_draft = {name: draft.per_prompt for name, draft in report.drafts.items()}
    plain = next(iter(by_draft.values()))
    domains = [str(adapter["name"]) for adapter in adapters]
    cells = [
        _cell(name, domain, _of(sums, domain), None if sums is plain else _of(plain, domain))
        for name, sums in by_draft.items()
        for domain in domains
    ]
    about = []
    for adapter in adapters:
        elsewhere = [domain for domain in domains if domain != adapter["name"]]
        lost = difference(
            "forgetting",
            _alpha_rows(_of(plain, *elsewhere)),
            _alpha_rows(_of(by_draft[adapter["name"]], *elsewhere)),
        )
        of_base = adapter["bytes"] / base[1]
        about.append(BankAdapter(**adapter, of_base=of_base, forgetting=lost))
    routing = None
    if chosen:
        right = [(row.group, float(chosen[row.id] == row.category), 1.0) for row in plain]
        own = [row for domain in domains for row in _of(by_draft[domain], domain)]
        gains = [
            _gain(by_draft["routed"], name, sums)
            for name, sums in [*by_draft.items(), (RIGHT, own)]
            if name != "routed"
        ]
        routing = RoutingFound(
            accuracy=share("accuracy", right), route_ms=route_ms, gain=[g for g in gains if g]
        )
    return Bank(
        base=base[0],
        base_bytes=base[1],
        domains=domains,
        cells=cells,
        adapters=about,
        routing=routing,
    )


def _of(sums: Sums, *domains: str) -> Sums:
    return [row for row in sums if row.category in domains]


def _alpha_rows(sums: Sums) -> Rows:
    return {
        row.id: (row.group, (min(max(row.alpha_sum, 0.0), row.positions), row.positions))
        for row in sums
        if row.positions and row.alpha_sum is not None
    }


def _tau_rows(sums: Sums) -> Rows:
    return {
        row.id: (row.group, (row.block_tokens, row.blocks))
        for row in sums
        if row.blocks and row.block_tokens is not None
    }


def _speed_rows(sums: Sums) -> Rows:
    """Seconds and tokens without a draft, and with it."""
    rows: Rows = {}
    for row in sums:
        if row.seconds is not None and row.tokens is not None:
            assert row.baseline_seconds is not None
            assert row.baseline_tokens is not None
            parts = (row.baseline_seconds, row.baseline_tokens, row.seconds, row.tokens)
            rows[row.id] = row.group, parts
    return rows


def _cell(draft: str, domain: str, sums: Sums, plain: Sums | None) -> BankCell:
    alpha, speed = _alpha_rows(sums), _speed_rows(sums)
    over: dict[str, Measured | None] = {"alpha_over_base": None, "speedup_over_base": None}
    if plain is not None:
        over = {
            "alpha_over_base": difference("alpha", alpha, _alpha_rows(plain)),
            "speedup_over_base": difference("speedup", speed, _speed_rows(plain), speedup_of),
        }
    return BankCell(
        draft=draft,
        domain=domain,
        alpha=share("alpha", [(group, total, n) for group, (total, n) in alpha.values()]),
        speedup=measure_rows("speedup", speed, speedup_of) if speed else None,
        **over,
    )


def _gain(routed: Sums, over: str, sums: Sums) -> Gain | None:
    speedup = difference("speedup", _speed_rows(routed), _speed_rows(sums), speedup_of)
    if speedup is None:
        return None
    return Gain(
        draft="routed",
        over=over,
        alpha=difference("alpha", _alpha_rows(routed), _alpha_rows(sums)),
        tau=difference("tau", _tau_rows(routed), _tau_rows(sums)),
        speedup=speedup,
    )
