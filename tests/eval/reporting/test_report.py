"""The report has every field of the contract, refuses broken ones, and can be read by a person."""

import copy
import dataclasses
import io
import json

import pytest
from rich.console import Console

from eval.measuring.metrics import ledger
from eval.reporting.page import render_page
from eval.reporting.report import (
    ReportError,
    build_report,
    check_report,
    read_report,
    write_report,
)
from eval.reporting.text import (
    DEFINITIONS,
    headline,
    ledger_table,
    print_summary,
    render_markdown,
)

CONTRACT = {
    "": "schema target engine device dtype baseline decoding prompts drafts gain provenance",
    "baseline": "tokens_per_s over_stock_generate",
    "decoding": "temperature top_k top_p max_new_tokens gamma gamma_policy verification",
    "prompts": "source n sha256 overlap_with_training",
    "drafts.tuned": "path form vocabulary alpha tau accepted_over_drafted per_position c "
    "verify_ratio predicted_speedup speedup decode_efficiency tokens_per_s ttft_ms itl_ms memory "
    "payoff lossless by_category",
    "drafts.tuned.vocabulary": "relation strategy coverage",
    "drafts.tuned.tokens_per_s": "baseline speculative",
    "drafts.tuned.alpha": "mean ci95 n",
    "drafts.tuned.speedup": "mean ci95 n",
    "drafts.tuned.memory": "target_bytes draft_bytes kv_bytes_per_token overhead",
    "drafts.tuned.memory.kv_bytes_per_token": "target draft",
    "drafts.tuned.payoff": "ceiling_speedup break_even_alpha best_gamma best_gamma_speedup verdict",
    "drafts.tuned.lossless": "prompts identical tie_divergences unexplained",
    "drafts.tuned.by_category.odd": "alpha tau speedup",
    "gain.0": "draft over alpha tau speedup",
}


def at(report, path):
    value = report
    for key in filter(None, path.split(".")):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@pytest.mark.parametrize("path", CONTRACT)
def test_every_field_of_the_contract_is_there(sample_report, path):
    assert set(CONTRACT[path].split()) <= set(at(sample_report, path))


def test_numbers_of_the_made_up_run(sample_report):
    tuned = sample_report["drafts"]["tuned"]
    assert tuned["alpha"]["mean"] == pytest.approx(0.6, abs=0.02)
    assert tuned["alpha"]["n"] == 50
    assert tuned["speedup"]["n"] == 40
    assert tuned["tau"]["mean"] == pytest.approx(1 + 0.6 + 0.36 + 0.216, abs=0.15)
    assert tuned["tau"]["mean"] == pytest.approx(
        1 + tuned["mean_drafted"] * tuned["accepted_over_drafted"]["mean"]
    )
    assert tuned["c"] == pytest.approx(0.1)
    assert tuned["decode_efficiency"]["mean"] == pytest.approx(1.0)  # it was made without overhead
    assert tuned["memory"]["overhead"] == pytest.approx(0.1)
    assert [place["position"] for place in tuned["per_position"]] == [1, 2, 3]
    assert sample_report["gain"][0]["draft"] == "tuned"
    assert sample_report["gain"][0]["over"] == "untuned"
    assert sample_report["gain"][0]["alpha"]["ci95"][0] > 0.2
    assert sample_report["warnings"] == [
        "untuned: the interval of the speed-up holds 1x; no effect is shown."
    ]


def test_heat_maps_of_all_drafts_show_the_same_answers(sample_report):
    shown = [
        [text["prompt"] for text in draft["atlas"]["heat_map"]]
        for draft in sample_report["drafts"].values()
    ]
    assert shown[0] == shown[1]
    assert len(shown[1]) == 3
    alphas = [text["alpha"] for text in sample_report["drafts"]["tuned"]["atlas"]["heat_map"]]
    assert alphas == sorted(alphas)


def test_per_prompt_rows_give_the_means_again(sample_report):
    draft = sample_report["drafts"]["tuned"]
    rows = draft["per_prompt"]
    assert len(rows) == 50
    alpha = sum(row["alpha_sum"] for row in rows) / sum(row["positions"] for row in rows)
    assert alpha == pytest.approx(draft["alpha"]["mean"])
    timed = [row for row in rows if "seconds" in row]
    total = {
        key: sum(row[key] for row in timed) for key in timed[0] if key not in ("id", "category")
    }
    assert total["block_tokens"] / total["blocks"] == pytest.approx(draft["tau"]["mean"])
    speedup = (total["baseline_seconds"] / total["baseline_tokens"]) / (
        total["seconds"] / total["tokens"]
    )
    assert speedup == pytest.approx(draft["speedup"]["mean"])


def test_written_and_read_again(sample_report, tmp_path):
    write_report(tmp_path / "report", sample_report)
    assert read_report(tmp_path / "report" / "report.json") == sample_report
    names = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert names == ["report.html", "report.json", "report.md"]


def test_absent_and_cut_off_reports_are_refused(sample_report, tmp_path):
    with pytest.raises(ReportError, match="no report at"):
        read_report(tmp_path / "report.json")
    (tmp_path / "report.json").write_text(json.dumps(sample_report)[:-20])
    with pytest.raises(ReportError, match="not whole JSON"):
        read_report(tmp_path / "report.json")


def required_paths():
    return [f"{path}.{key}".strip(".") for path, keys in CONTRACT.items() for key in keys.split()]


@pytest.mark.parametrize(
    "path", [path for path in required_paths() if "kv_bytes" not in path and "by_cat" not in path]
)
def test_a_report_without_one_of_the_fields_fails(sample_report, path):
    parent, _, key = path.rpartition(".")
    del at(sample_report, parent)[key]
    with pytest.raises(ReportError, match=key):
        check_report(sample_report)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "draftsmith-report/2", "this version reads"),
        ("drafts.tuned.alpha.mean", float("nan"), "drafts.tuned.alpha.mean is nan"),
        ("drafts.tuned.itl_ms.baseline.p95", float("inf"), "p95 is inf"),
        ("drafts.tuned.alpha.mean", 1.2, "within 0 and 1"),
        ("drafts.tuned.alpha.mean", None, "mean should be a number"),
        ("drafts.tuned.alpha", 0.6, "should be an object"),
        ("drafts.tuned.alpha.ci95", [0.7, 0.5], "runs backwards"),
        ("drafts.tuned.alpha.ci95", [0.5], "two numbers"),
        ("drafts.tuned.alpha.n", 0, "n is 0, but should be at least 1"),
        ("drafts.tuned.tau.mean", 0.9, "should be at least 1"),
        ("drafts.tuned.per_position", [], "nothing was drafted"),
        ("drafts.tuned.speedup.mean", 9.0, "its tokens_per_s give"),
        ("drafts.tuned.memory.overhead", 0.05, "its bytes give"),
        ("drafts.tuned.lossless.identical", 7, "do not make up 40 prompts"),
        ("drafts.tuned.lossless.prompts", 0, "do not make up 0 prompts"),
        ("gain.0.tau.mean", 5.0, "apart"),
        ("drafts", {}, "at least one draft"),
    ],
)
def test_a_mutated_report_fails(sample_report, path, value, message):
    check_report(sample_report)
    parent, _, key = path.rpartition(".")
    holder = at(sample_report, parent)
    holder[int(key) if isinstance(holder, list) else key] = value
    with pytest.raises(ReportError, match=message):
        check_report(sample_report)


def test_a_long_ledger_shows_the_worst_first_and_says_what_it_leaves_out(run_info, measurement):
    draft = measurement("tuned", 0.6)
    near = draft.lossless["divergences"][0]
    ties = [near | {"prompt": f"t{i}", "gap": i / 100, "error": 0.4} for i in range(30)]
    other = near | {"prompt": "changed", "gap": None, "error": None, "tie": False}
    draft = dataclasses.replace(draft, lossless=ledger(40, [*ties, other]), by_batch_size=[])
    report = build_report(run_info, [draft])
    header, rows = ledger_table(report["drafts"])
    prompts = [row[header.index("prompt")] for row in rows]
    assert prompts == ["changed", *(f"t{i}" for i in range(29, 10, -1))]
    for text in (render_markdown(report), render_page(report)):
        assert "The 20 least clear of 31 are shown" in text
    assert len(report["drafts"]["tuned"]["lossless"]["divergences"]) == 31
    short = build_report(run_info, [measurement("tuned", 0.6)])
    assert "least clear" not in render_markdown(short)


@pytest.mark.parametrize(
    ("factor", "says"),
    [(0.5, "look for overhead in the loop"), (1, None), (2, "timed in a slower moment")],
)
def test_an_unusual_efficiency_names_its_likely_cause(run_info, measurement, factor, says):
    draft = measurement("tuned", 0.6)
    costs = draft.costs
    costs = dataclasses.replace(
        costs,
        draft_step=costs.draft_step * factor,
        target_verify={w: s if w == 1 else s * factor for w, s in costs.target_verify.items()},
    )
    found = build_report(run_info, [dataclasses.replace(draft, costs=costs)])["warnings"]
    about = [warning for warning in found if "its step costs predict" in warning]
    assert [says in warning for warning in about] == ([True] if says else [])


def test_a_word_changed_in_batches_only_is_said_as_loudly(run_info, measurement):
    draft = measurement("tuned", 0.6)
    (point,) = draft.by_batch_size
    broken = point["lossless"] | {"identical": 38, "unexplained": 1}
    draft = dataclasses.replace(draft, by_batch_size=[point | {"lossless": broken}])
    report = build_report(run_info, [draft])
    assert report["warnings"][0].startswith(
        "NOT LOSSLESS: with draft tuned in batches of 4, 1 of 40"
    )
    assert "OUTPUT CHANGED" in headline(report)
    assert "Lossless, tuned in batches of 4: 38 of 40 prompts identical, 1 part" in (
        render_markdown(report)
    )
    report["warnings"] = []
    with pytest.raises(ReportError, match="not lossless"):
        check_report(report)


def test_a_draft_that_is_not_lossless_is_said_loudly_and_cannot_be_hidden(
    run_info, measurement, tmp_path
):
    broken = {
        "prompts": 40,
        "identical": 36,
        "tie_divergences": 1,
        "unexplained": 3,
        "divergences": [],
    }
    report = build_report(run_info, [measurement("tuned", 0.6, lossless=broken)])
    assert report["warnings"][0].startswith("NOT LOSSLESS: with draft tuned, 3 of 40")
    assert "OUTPUT CHANGED" in headline(report)
    assert "NOT LOSSLESS" in render_markdown(report)
    write_report(tmp_path, report)
    hidden = copy.deepcopy(report)
    hidden["warnings"] = []
    with pytest.raises(ReportError, match="not lossless"):
        write_report(tmp_path, hidden)


def test_few_prompts_are_warned_about(run_info, measurement):
    report = build_report(run_info, [measurement("tuned", 0.6, prompts=10)])
    assert any("rests on 10 prompts" in line for line in report["warnings"])


def test_warnings_about_loops_overhead_baseline_overlap_and_no_gain(run_info, measurement):
    draft = measurement("tuned", 0.6)
    for run in draft.runs:
        run.tokens = [7] * len(run.tokens)
        run.block_seconds = [0.018] * len(run.block_seconds)
    info = dataclasses.replace(
        run_info,
        over_stock_generate={"mean": 0.8, "ci95": [0.7, 0.9], "n": 40},
        prompts=run_info.prompts | {"overlap_with_training": 0.25},
    )
    report = build_report(info, [draft, dataclasses.replace(draft, name="again")])
    text = "\n".join(report["warnings"])
    assert "100% of the emitted tokens stand in repeated loops" in text
    assert "of what its step costs predict" in text
    assert "only 0.80 of stock generate" in text
    assert "overlap with the training data: 0.25" in text
    assert "gain (again over tuned) holds 0" in text


def setting(run_info, **changes):
    decoding = run_info.decoding | {k: v for k, v in changes.items() if k in run_info.decoding}
    prompts = run_info.prompts | {k: v for k, v in changes.items() if k in run_info.prompts}
    return dataclasses.replace(run_info, decoding=decoding, prompts=prompts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_tokens": 0, "ended_by_stop": 0.0}, "No token ends a text, as with ignore_eos"),
        ({"ended_by_stop": 0.0}, "Not one answer ended by itself within 64 tokens"),
        ({"bits_per_token": 15.5}, "The prompts look random"),
        ({"verification": "typical acceptance"}, "LOSSY: verification by 'typical acceptance'"),
        ({"overlap_with_training": None}, "not known whether evaluation prompts were trained on"),
    ],
)
def test_settings_that_flatter_are_warned_about(run_info, measurement, changes, message):
    fair = build_report(run_info, [measurement("tuned", 0.6)])["warnings"]
    found = build_report(setting(run_info, **changes), [measurement("tuned", 0.6)])["warnings"]
    assert fair == []
    assert len(found) == 1
    assert message in found[0]


def test_few_drafts_are_warned_about(run_info, measurement):
    draft = measurement("tuned", 0.6)
    few = [
        dataclasses.replace(
            run,
            tokens=run.tokens[: 1 + sum(run.block_tokens[:5])],
            block_seconds=run.block_seconds[:5],
            block_tokens=run.block_tokens[:5],
            drafted=run.drafted[:5],
            accepted=run.accepted[:5],
        )
        for run in draft.runs
    ]
    report = build_report(run_info, [dataclasses.replace(draft, runs=few)])
    assert report["drafts"]["tuned"]["per_position"][0]["drafts"] == 200
    assert "tuned: acceptance rests on 200 drafts" in "".join(report["warnings"])


def test_a_null_field_needs_a_reason(sample_report):
    draft = sample_report["drafts"]["tuned"]
    draft["c"] = None
    with pytest.raises(
        ReportError, match=r"drafts.tuned.c is null, and .*missing does not say why"
    ):
        check_report(sample_report)
    draft["missing"].append({"field": "c", "reason": "a server does not tell"})
    check_report(sample_report)
    assert "- tuned, c: a server does not tell" in render_markdown(sample_report)


def test_one_draft_has_no_gain_and_three_are_compared_with_the_first(run_info, measurement):
    one = build_report(run_info, [measurement("tuned", 0.6)])
    assert one["gain"] == []
    three = build_report(run_info, [measurement(name, 0.5) for name in ("a", "b", "c")])
    assert [(entry["draft"], entry["over"]) for entry in three["gain"]] == [("b", "a"), ("c", "a")]
    assert "| c | a |" in render_markdown(three)


def test_no_drafts_or_twice_the_same_name_is_an_error(run_info, measurement):
    with pytest.raises(ReportError, match="at least one draft"):
        build_report(run_info, [])
    with pytest.raises(ReportError, match="same name"):
        build_report(run_info, [measurement("a", 0.5), measurement("a", 0.6)])


def test_drafts_measured_on_other_prompts_are_not_compared(run_info, measurement):
    with pytest.raises(ValueError, match="same prompts"):
        build_report(run_info, [measurement("a", 0.5), measurement("b", 0.5, prompts=39)])


def test_markdown_names_every_definition_and_warning(sample_report):
    text = render_markdown(sample_report)
    assert all(f"**{term}**" in text for term in DEFINITIONS)
    assert text.startswith("# Speculative decoding report\n\n**Draft tuned speeds the target up ")
    assert "| accepted/drafted, γ 3 |" in text
    assert "38 of 40 prompts identical, 2 part at a tie, 0 unexplained" in text
    for block in text.split("\n\n"):  # each row of a table has as many cells as its header
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_terminal_summary_is_legible_in_80_columns(sample_report):
    stream = io.StringIO()
    print_summary(sample_report, Console(file=stream, width=80))
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in ("untuned", "tuned", "gain", "alpha", "speed-up", "predicted", "efficiency"):
        assert part in text
    assert "memory overhead" in text
    rows = [line for line in text.splitlines() if line.strip().startswith(("alpha", "speed-up"))]
    assert [row.count("]") for row in rows[:2]] == [3, 3]  # interval and all, on one line
    assert "Lossless, tuned: 38 of 40 prompts identical" in text
    assert "accepted/drafted, γ 3" in text


def test_headline_states_what_the_interval_allows(sample_report):
    assert "speeds the target up 1." in headline(sample_report)
    speedup = sample_report["drafts"]["tuned"]["speedup"]
    speedup["ci95"] = [0.9, 1.1]
    assert "no measurable difference" in headline(sample_report)
    speedup["ci95"] = [0.7, 0.9]
    assert "SLOWS the target DOWN to" in headline(sample_report)
