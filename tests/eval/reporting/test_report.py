"""The report has every field of the contract, refuses broken ones, and can be read by a person."""

import copy
import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from eval.measuring.losslessness import ledger
from eval.reporting.page import render_page
from eval.reporting.report import (
    DraftReport,
    ReportError,
    build_report,
    read_report,
    report_schema,
    rivals,
    write_report,
)
from eval.reporting.tables import (
    DEFINITIONS,
    gamma_curve,
    ledger_table,
    tables,
    verdict_lines,
    waterfall,
)
from eval.reporting.text import print_summary, render_markdown

CONTRACT = {
    "": "schema target engine device dtype baseline decoding prompts drafts gain provenance",
    "baseline": "tokens_per_s over_stock_generate",
    "decoding": "temperature top_k top_p max_new_tokens gamma gamma_policy verification",
    "prompts": "source n sha256 overlap_with_training",
    "drafts.tuned": "path form vocabulary gamma gamma_policy alpha tau accepted_over_drafted "
    "per_position c "
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


@pytest.fixture
def data(sample_report):
    """The sample report as it stands in report.json, to be changed at will."""
    return sample_report.model_dump(mode="json")


@pytest.fixture
def read(tmp_path):
    """Reads a dict as a report.json."""

    def through_a_file(data):
        (tmp_path / "changed.json").write_text(json.dumps(data))
        return read_report(tmp_path / "changed.json")

    return through_a_file


def at(report, path):
    value = report
    for key in filter(None, path.split(".")):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


@pytest.mark.parametrize("path", CONTRACT)
def test_every_field_of_the_contract_is_there(data, path):
    assert set(CONTRACT[path].split()) <= set(at(data, path))


def test_numbers_of_the_made_up_run(sample_report):
    tuned = sample_report.drafts["tuned"]
    assert tuned.alpha.mean == pytest.approx(0.6, abs=0.02)
    assert tuned.alpha.n == 50
    assert tuned.speedup.n == 40
    assert tuned.tau.mean == pytest.approx(1 + 0.6 + 0.36 + 0.216, abs=0.15)
    assert tuned.tau.mean == pytest.approx(
        1 + tuned.mean_drafted * tuned.accepted_over_drafted.mean
    )
    assert tuned.c == pytest.approx(0.1)
    assert tuned.decode_efficiency.mean == pytest.approx(1.0)  # it was made without overhead
    assert tuned.memory.overhead == pytest.approx(0.1)
    assert (tuned.gamma, tuned.gamma_policy) == (3, "fixed")
    assert [place.position for place in tuned.per_position] == [1, 2, 3]
    (gain,) = sample_report.gain
    assert (gain.draft, gain.over) == ("tuned", "untuned")
    assert gain.alpha.ci95[0] > 0.2
    assert sample_report.warnings == [
        "untuned: the interval of the speed-up holds 1x; no effect is shown."
    ]


def test_heat_maps_of_all_drafts_show_the_same_answers(sample_report):
    shown = [
        [text.prompt for text in draft.atlas.heat_map] for draft in sample_report.drafts.values()
    ]
    assert shown[0] == shown[1]
    assert len(shown[1]) == 3
    alphas = [text.alpha for text in sample_report.drafts["tuned"].atlas.heat_map]
    assert alphas == sorted(alphas)


def test_the_waterfall_counts_one_cost_after_the_other(measurement, run_info):
    """3 tokens drafted of 0.1 target steps each, wide calls of 1.1, no overhead."""
    draft = build_report(run_info, [measurement("tuned", 0.6)]).drafts["tuned"]
    speedups = waterfall(draft)
    tau = draft.tau.mean
    assert speedups["all accepted"] == 4
    assert speedups["after draft steps"] == pytest.approx(tau / 1.3)
    assert speedups["predicted"] == pytest.approx(tau / (0.3 + 1.1))
    assert speedups["decode"] == pytest.approx(tau / (0.3 + 1.1))
    assert speedups["wall"] == draft.speedup.mean < speedups["decode"]


def test_the_curve_has_its_best_where_the_payoff_says(sample_report):
    draft = sample_report.drafts["tuned"]
    curve = gamma_curve(draft)
    best, speedup, _ = max(curve, key=lambda point: point[1])
    assert best == draft.payoff.best_gamma
    assert speedup == pytest.approx(draft.payoff.best_gamma_speedup)
    assert max(ceiling for *_, ceiling in curve) == pytest.approx(draft.payoff.ceiling_speedup)


def test_per_prompt_rows_give_the_means_again(data):
    draft = data["drafts"]["tuned"]
    rows = draft["per_prompt"]
    assert len(rows) == 50
    alpha = sum(row["alpha_sum"] for row in rows) / sum(row["positions"] for row in rows)
    assert alpha == pytest.approx(draft["alpha"]["mean"])
    timed = [row for row in rows if "seconds" in row]
    assert len(timed) == 40  # what was not measured is absent
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


def test_absent_and_cut_off_reports_are_refused(data, tmp_path):
    with pytest.raises(ReportError, match="no report at"):
        read_report(tmp_path / "report.json")
    (tmp_path / "report.json").write_text(json.dumps(data)[:-20])
    with pytest.raises(ReportError, match="not whole JSON"):
        read_report(tmp_path / "report.json")


def test_fields_of_a_newer_writer_are_passed_over(data, read, sample_report):
    data["forecast"] = {"alpha": 0.7}
    data["drafts"]["tuned"]["alpha"]["median"] = 0.5
    assert read(data) == sample_report


def required_paths():
    return [f"{path}.{key}".strip(".") for path, keys in CONTRACT.items() for key in keys.split()]


@pytest.mark.parametrize(
    "path", [path for path in required_paths() if "kv_bytes" not in path and "by_cat" not in path]
)
def test_a_report_without_one_of_the_fields_fails(data, read, path):
    parent, _, key = path.rpartition(".")
    del at(data, parent)[key]
    place = re.escape(f"report.{path}".replace("gain.0", "gain[0]"))
    with pytest.raises(ReportError, match=f"{place}: Field required"):
        read(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema", "draftsmith-report/2", "schema: .* should be 'draftsmith-report/1', not"),
        ("drafts.tuned.alpha.mean", float("nan"), "drafts.tuned.alpha.mean: .* a finite number"),
        ("drafts.tuned.itl_ms.baseline.p95", float("inf"), "p95: .* a finite number, not inf"),
        ("drafts.tuned.alpha.mean", 1.2, "alpha.mean: .* less than or equal to 1, not 1.2"),
        ("drafts.tuned.alpha.mean", None, "alpha.mean: .* a valid number, not None"),
        ("drafts.tuned.alpha.mean", "0.5", "alpha.mean: .* a valid number, not '0.5'"),
        ("drafts.tuned.alpha.n", True, "alpha.n: .* a valid integer, not True"),
        ("drafts.tuned.alpha", 0.6, "drafts.tuned.alpha: .* an object, not 0.6"),
        ("drafts.tuned.alpha.ci95", [0.7, 0.5], "drafts.tuned.alpha: ci95 runs backwards"),
        ("drafts.tuned.alpha.ci95", [0.5], r"alpha.ci95\[1\]: Field required"),
        ("drafts.tuned.alpha.n", 0, "alpha.n: .* greater than or equal to 1, not 0"),
        ("drafts.tuned.tau.mean", 0.9, "tau.mean: .* greater than or equal to 1, not 0.9"),
        ("drafts.tuned.per_position", [], "per_position: .* at least 1 item"),
        ("drafts.tuned.speedup.mean", 9.0, "tuned: speedup is 9.0, but its tokens_per_s give"),
        ("drafts.tuned.memory.overhead", 0.05, "memory: overhead is 0.05, but its bytes give"),
        ("drafts.tuned.lossless.identical", 7, "tuned.lossless: .* do not make up 40 prompts"),
        ("drafts.tuned.lossless.prompts", 0, "lossless.prompts: .* greater than or equal to 1"),
        ("drafts.tuned.atlas.classes.0.class", 3, r"classes\[0\].class: .* a valid string, not 3"),
        ("gain.0.tau.mean", 5.0, r"gain\[0\].tau is 5.0, but the drafts' own numbers are .* apart"),
        ("gain.0.over", "other", r"gain\[0\] compares with 'other'"),
        ("drafts", {}, "drafts: .* at least 1 item"),
    ],
)
def test_a_mutated_report_fails(data, read, path, value, message):
    read(data)
    parent, _, key = path.rpartition(".")
    holder = at(data, parent)
    holder[int(key) if isinstance(holder, list) else key] = value
    with pytest.raises(ReportError, match=message):
        read(data)


def test_what_was_changed_after_building_is_checked_before_writing(sample_report, tmp_path):
    sample_report.drafts["tuned"].tau.mean = 0.9
    with pytest.raises(ReportError, match=r"drafts.tuned.tau.mean: .* not 0.9"):
        write_report(tmp_path, sample_report)
    assert list(tmp_path.iterdir()) == []


def test_the_schema_is_that_of_the_reports(data):
    jsonschema = pytest.importorskip("jsonschema", reason="of the test extra, not installed here")
    schema = report_schema()
    assert schema["$schema"].endswith("draft/2020-12/schema")
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    assert set(schema["$defs"]["DraftReport"]["properties"]) == set(data["drafts"]["tuned"])
    assert set(schema["properties"]) == set(data)
    for path, value in (
        ("drafts.tuned.alpha.mean", 1.2),
        ("drafts.tuned.tau.mean", 0.9),
        ("drafts.tuned.alpha.ci95", [0.5]),
        ("drafts.tuned.per_position", []),
        ("schema", "draftsmith-report/2"),
        ("drafts", {}),
    ):
        broken = copy.deepcopy(data)
        parent, _, key = path.rpartition(".")
        at(broken, parent)[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)
    del data["drafts"]["tuned"]["alpha"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema)


def test_every_term_of_the_page_is_defined_at_its_field():
    assert all(len(text) > 20 for text in DEFINITIONS.values())
    assert DEFINITIONS["tau"] == DraftReport.model_fields["tau"].description


def test_a_long_ledger_shows_the_worst_first_and_says_what_it_leaves_out(run_info, measurement):
    draft = measurement("tuned", 0.6)
    near = draft.lossless["divergences"][0]
    ties = [near | {"prompt": f"t{i}", "gap": i / 100, "error": 0.4} for i in range(30)]
    other = near | {"prompt": "changed", "gap": None, "error": None, "tie": False}
    draft = dataclasses.replace(draft, lossless=ledger(40, [*ties, other]))
    report = build_report(run_info, [draft])
    table = ledger_table(report)
    prompts = [row[table.header.index("prompt")] for row in table.rows]
    assert prompts == ["changed", *(f"t{i}" for i in range(29, 10, -1))]
    for text in (render_markdown(report), render_page(report)):
        assert "The 20 least clear of 31 are shown" in text
    assert len(report.drafts["tuned"].lossless.divergences) == 31
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
    found = build_report(run_info, [dataclasses.replace(draft, costs=costs)]).warnings
    about = [warning for warning in found if "its step costs predict" in warning]
    assert [says in warning for warning in about] == ([True] if says else [])


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
    counts = "40 texts: 36 identical, 1 same up to ties, 3 changed"
    assert report.warnings[0].startswith(f"NOT LOSSLESS, do not serve draft tuned: {counts}")
    assert "NOT LOSSLESS, 40 texts: " in report.headline
    assert all(line.startswith("tuned: NOT LOSSLESS, do not") for line in verdict_lines(report))
    assert "NOT LOSSLESS" in render_markdown(report)
    write_report(tmp_path, report)
    path = tmp_path / "report.json"
    hidden = json.loads(path.read_text()) | {"warnings": [], "headline": "All is well."}
    path.write_text(json.dumps(hidden))
    assert read_report(path).warnings == report.warnings  # they are made from the numbers
    assert read_report(path).headline == report.headline


def numbers_without_interval(value):
    if isinstance(value, dict):
        parts = value.values()
        return value.get("ci95", ()) is None or sum(map(numbers_without_interval, parts))
    return sum(map(numbers_without_interval, value)) if isinstance(value, list) else 0


def test_few_prompts_are_warned_about(run_info, measurement, capsys):
    logs = [measurement("untuned", 0.3, prompts=9), measurement("tuned", 0.6, prompts=9)]
    report = build_report(run_info, logs)
    (warning,) = [line for line in report.warnings if line.startswith("Fewer than 10")]
    data = report.model_dump()
    few = sum(numbers_without_interval(data[part]) for part in ("baseline", "drafts", "gain"))
    assert f"stand behind {few} numbers (" in warning
    assert "10 in by category" in warning
    assert "too few for a 95% interval; parentheses hold the lowest and the highest" in warning
    assert "alpha" not in warning  # taken on more prompts
    assert len(warning) < 200  # however many there are
    assert "too few prompts to say more than" in report.headline
    low, high = report.drafts["tuned"].speedup.range
    assert f"({low:.2f} to {high:.2f})" in render_markdown(report)
    assert f"{low:.2f}× to {high:.2f}× · n 9, too few for an interval" in render_page(report)
    assert all(warning in text for text in (render_markdown(report), render_page(report)))
    print_summary(report)
    summary = " ".join(capsys.readouterr().out.split())
    assert "parentheses, where these are fewer than 10, the lowest and the highest" in summary
    enough = build_report(run_info, [measurement("tuned", 0.6)])
    assert not any(line.startswith("Fewer than 10") for line in enough.warnings)


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
    text = "\n".join(report.warnings)
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
    fair = build_report(run_info, [measurement("tuned", 0.6)]).warnings
    found = build_report(setting(run_info, **changes), [measurement("tuned", 0.6)]).warnings
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
    assert report.drafts["tuned"].per_position[0].drafts == 200
    assert "tuned: acceptance rests on 200 drafts" in "".join(report.warnings)


def test_a_null_field_needs_a_reason(data, read):
    draft = data["drafts"]["tuned"]
    draft["c"] = None
    with pytest.raises(ReportError, match=r"drafts.tuned: c is null, and `missing` does not say"):
        read(data)
    draft["missing"].append({"field": "c", "reason": "a server does not tell"})
    assert "- tuned, c (draft/target): a server does not tell" in render_markdown(read(data))


def test_what_an_engine_could_not_measure_is_null_with_its_reason(run_info, measurement):
    """As from a server: no distributions, no step times, no drafted tokens."""
    of_blocks = "tau mean_drafted accepted_over_drafted per_position decode_speedup".split()
    log = measurement("served", 0.6)
    log = dataclasses.replace(
        log,
        agreement=None,
        costs=None,
        memory=None,
        gamma=None,
        gamma_policy="of the server",
        missing={"tau": "a server does not tell"},
    )
    for run in log.runs:
        run.drafted = run.accepted = [0] * len(run.drafted)
    report = build_report(run_info, [log])
    draft = report.drafts["served"]
    reasons = {one.field: one.reason for one in draft.missing}
    assert all(getattr(draft, field) is None for field in reasons)
    assert {reasons[field] for field in of_blocks} == {"a server does not tell"}
    assert reasons["alpha"] == reasons["atlas"] == "the log holds no teacher-forced distributions"
    assert reasons["c"] == reasons["payoff"] == "the log holds no step costs"
    assert draft.by_category["odd"].speedup is not None
    assert draft.by_category["odd"].tau is None
    assert "blocks" not in draft.per_prompt[0].model_dump()
    assert {"alpha", "tau"}.isdisjoint(row[0] for row in tables(report)[0].rows)
    missing = (
        "served, tau, mean drafted, target calls with a draft, accepted/drafted, "
        "acceptance by position, predicted speed-up, decode speed-up, decode efficiency: "
        "a server does not tell"
    )
    for text in (render_markdown(report), render_page(report)):
        assert missing in text
    second = dataclasses.replace(log, name="again")
    (gain,) = build_report(run_info, [log, second]).gain
    assert gain.alpha is gain.tau is None
    assert gain.speedup.mean == 0


def test_the_counters_of_a_server_are_shown(run_info, measurement):
    rate = {"mean": 0.41, "ci95": [0.38, 0.44], "n": 40}
    counters = {
        "num_drafts": 250,
        "num_draft_tokens": 750,
        "num_accepted_tokens": 308,
        "mean_acceptance_length": rate | {"mean": 2.23, "ci95": [2.1, 2.4]},
        "acceptance_rate": rate,
        "acceptance_per_position": [0.6, 0.4, 0.23],
    }
    missing = {"tau": "see counters", "counters.restarts": "nobody counts them"}
    log = measurement("served", 0.6, counters=counters, missing=missing)
    report = build_report(run_info, [log])
    assert "| num drafts | 250 |" in render_markdown(report)
    assert "| acceptance per position | 0.60, 0.40, 0.23 |" in render_markdown(report)
    page = render_page(report)
    assert "Counters of the server" in page
    assert "by the server&#39;s counters" in page
    assert "served: acceptance rests on 250 drafts" in "".join(report.warnings)


def test_a_draft_that_proposed_nothing_is_reported(run_info, measurement):
    log = measurement("lookup", 0.6)
    log = dataclasses.replace(log, runs=copy.deepcopy(log.baseline))
    report = build_report(run_info, [log])
    draft = report.drafts["lookup"]
    assert draft.tau.mean == 1
    assert draft.drafted_calls.mean == 0
    assert draft.accepted_over_drafted is draft.per_position is None
    assert {one.reason for one in draft.missing if one.field == "per_position"} == {
        "nothing was drafted"
    }
    assert "nothing was drafted" in render_page(report)


def test_one_draft_has_no_gain_and_three_are_compared_with_the_first(run_info, measurement):
    one = build_report(run_info, [measurement("tuned", 0.6)])
    assert one.gain == []
    three = build_report(run_info, [measurement(name, 0.5) for name in ("a", "b", "c")])
    assert [(entry.draft, entry.over) for entry in three.gain] == [("b", "a"), ("c", "a")]
    assert "| c | a |" in render_markdown(three)


def test_documents_that_clauses_share_are_what_varies(run_info, measurement):
    """Interval and n of a draft, and of a gain, whose prompts come from twelve documents."""

    def grouped(log):
        for one in [*log.agreement, *log.runs, *log.baseline]:
            one.group = f"document {int(one.prompt_id) % 12}"
        return log

    logs = [measurement("a", 0.35), measurement("b", 0.6)]
    alone = build_report(run_info, logs)
    together = build_report(run_info, [grouped(log) for log in logs])
    for one, other in zip(
        (alone.drafts["b"], *alone.gain), (together.drafts["b"], *together.gain), strict=True
    ):
        for key in ("alpha", "tau", "speedup"):
            assert getattr(one, key).mean == pytest.approx(getattr(other, key).mean)
            assert getattr(one, key).ci95 != getattr(other, key).ci95
            assert getattr(one, key).n == getattr(other, key).n
    assert {row.group for row in together.drafts["b"].per_prompt} == {
        f"document {i}" for i in range(12)
    }
    assert together.drafts["b"].speedup.clusters == 12
    assert "| 40 in 12 groups |" in render_markdown(together)


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
    assert "| gamma | 3 | 3 |" in text
    assert "With draft tuned, 40 texts: 38 identical, 2 same up to ties, 0 changed (at a " in text
    assert "NOT LOSSLESS" not in text
    for block in text.split("\n\n"):  # each row of a table has as many cells as its header
        if block.startswith("|"):
            assert len({line.count("|") for line in block.splitlines()}) == 1, block


def test_terminal_summary_is_legible_in_80_columns(sample_report):
    stream = io.StringIO()
    print_summary(sample_report, Console(file=stream, width=80))
    text = stream.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not re.search(r" $", text, re.MULTILINE)
    for part in ("untuned", "tuned", "gain", "alpha", "speed-up", "predicted", "efficiency"):
        assert part in text
    assert "memory overhead" in text
    rows = [line for line in text.splitlines() if line.strip().startswith(("alpha", "speed-up"))]
    assert [row.count("]") for row in rows[:2]] == [3, 3]  # interval and all, on one line
    assert "With draft tuned, 40 texts: 38 identical, 2 same up to ties, 0 changed" in text
    assert [row.split() for row in text.splitlines() if row.startswith("gamma")] == [
        ["gamma", "3", "3"]
    ]


def test_a_log_has_lines_of_100_columns(sample_report, capsys):
    print_summary(sample_report)
    lines = capsys.readouterr().out.splitlines()
    assert 80 < max(map(len, lines)) <= 100
    assert all(line == line.rstrip() for line in lines)


def test_page_and_summary_name_the_target_before_the_machine(run_info, measurement, capsys):
    info = dataclasses.replace(run_info, engine="vllm", device="127.0.0.1", target="org/target-7b")
    report = build_report(info, [measurement("tuned", 0.6)])
    print_summary(report)
    said = "Target org/target-7b on 127.0.0.1, bfloat16, engine vllm, temperature 0, batch size 1"
    assert said in capsys.readouterr().out
    assert f"<span>{said} · γ 3 · 50 prompts</span>" in render_page(report)


def test_each_draft_is_shown_with_its_own_draft_length(run_info, measurement):
    stops = "stops below 0.3, fastest on 40 other prompts"
    drafts = [measurement("a", 0.3), measurement("b", 0.6, gamma=6, gamma_policy=stops)]
    report = build_report(run_info, drafts)
    assert "| gamma | 3 | ≤ 6 |" in render_markdown(report)
    assert "γ ≤ 6 ·" in render_page(report)
    assert stops in render_page(report)


def test_headline_states_what_the_interval_allows(sample_report):
    assert "speeds the target up 1." in sample_report.headline
    speedup = sample_report.drafts["tuned"].speedup
    speedup.ci95 = (0.9, 1.1)
    assert "no measurable difference" in sample_report.headline
    speedup.ci95 = (0.7, 0.9)
    assert "SLOWS the target DOWN to" in sample_report.headline


def test_what_training_adds_is_set_against_lookup_alone(run_info, measurement):
    drafts = [
        measurement("untuned", 0.3),
        measurement("lookup", 0.4, path="prompt-lookup"),
        measurement("tuned", 0.55),
        measurement("tuned+lookup", 0.75, path="lookup-first:outputs/code/tuned"),
    ]
    report = build_report(run_info, drafts)
    pairs = [(gain.draft, gain.over) for gain in report.gain]
    assert pairs == [("tuned", "untuned"), ("tuned+lookup", "lookup")]
    adds, alone = report.gain[1].speedup, report.drafts["lookup"].speedup.mean
    assert f"prompt lookup alone {alone:.2f}x, the draft adds {adds:+.2f}" in report.headline
    assert not [warning for warning in report.warnings if "than prompt lookup" in warning]
    drafts[3] = measurement("tuned+lookup", 0.4, path="lookup-first:outputs/code/tuned")
    weak = build_report(run_info, drafts)
    assert "the draft adds nothing that shows" in weak.headline or "loses" in weak.headline
    assert any("than prompt lookup alone" in line for line in weak.warnings)


def test_lookups_are_not_priced_as_if_a_draft_wrote_them(run_info, measurement):
    drafts = [
        measurement("lookup", 0.4, path="prompt-lookup"),
        measurement("tuned", 0.55),
        measurement("tuned+lookup", 0.75, path="lookup-first:outputs/code/tuned"),
    ]
    report = build_report(run_info, drafts)
    priced = [name for name, draft in report.drafts.items() if draft.payoff]
    assert priced == [name for name, draft in report.drafts.items() if gamma_curve(draft)]
    assert priced == ["tuned"]
    assert all(draft.predicted_speedup and draft.costs for draft in report.drafts.values())
    assert [line.split(":")[0] for line in verdict_lines(report)] == priced
    assert "lookup, payoff: tokens that are looked up cost nothing" in render_markdown(report)


@pytest.mark.parametrize(
    ("paths", "pairs"),
    [
        (["a", "b", "c"], [("b", "a"), ("c", "a")]),
        (["prompt-lookup", "a"], [("a", "prompt-lookup")]),
        (["a", "prompt-lookup"], [("a", "prompt-lookup")]),
        (["a", "lookup-first:a"], [("lookup-first:a", "a")]),
        (["prompt-lookup", "lookup-first:a"], [("lookup-first:a", "prompt-lookup")]),
        (["lookup-first:a", "lookup-first:b"], [("lookup-first:b", "lookup-first:a")]),
        (["prompt-lookup"], []),
    ],
)
def test_each_draft_is_compared_with_what_shows_its_worth(measurement, paths, pairs):
    drafts = [measurement(path, 0.5, path=path) for path in paths]
    assert [(draft.name, over.name) for draft, over in rivals(drafts)] == pairs


def test_prompts_that_an_instruct_target_completes_are_warned_about(run_info, measurement):
    def warned(**about):
        info = dataclasses.replace(run_info, prompts=run_info.prompts | about)
        warnings = build_report(info, [measurement("tuned", 0.6)]).warnings
        return [warning for warning in warnings if "chat template" in warning]

    assert warned(in_chat_form=0.25, chat_template=True)[0].startswith("75% of the prompts")
    assert not warned(in_chat_form=1.0, chat_template=True)
    assert not warned(in_chat_form=0.0, chat_template=False)
    assert not warned(in_chat_form=0.0)


def test_numbers_by_how_much_is_copied(run_info, measurement):
    sevens = {0: 9, 1: 30, 2: 0, 3: 30}  # by the prompt's number: 8, 30 or none of 30 copied
    answers = [
        dataclasses.replace(answer, tokens=[7] * count + answer.tokens[count:])
        for answer in run_info.answers
        for count in [sevens[int(answer.prompt_id) % 4]]
    ]
    draft = measurement("tuned", 0.6)
    report = build_report(dataclasses.replace(run_info, answers=answers), [draft])
    numbers = report.drafts["tuned"].by_copy_share
    assert list(numbers) == ["below 10% copied", "10% to 30% copied", "above 30% copied"]
    categories = report.drafts["tuned"].by_category
    assert numbers["above 30% copied"].speedup == categories["odd"].speedup
    assert report.answers.copy_share.of_answer.mean > 0.3
    (table,) = [table for table in tables(report) if table.title == "By copy share"]
    assert [row[0] for row in table.rows] == [f"{name}, tuned" for name in numbers]


def test_numbers_by_how_long_the_prompt_is(run_info, measurement, read):
    def longer(rows):
        tokens = {0: 20, 1: 9_000, 2: 512}
        return [
            dataclasses.replace(row, prompt_tokens=tokens[int(row.prompt_id) % 3]) for row in rows
        ]

    log = measurement("tuned", 0.6)
    report = build_report(
        run_info,
        [dataclasses.replace(log, agreement=longer(log.agreement), runs=longer(log.runs))],
    )
    draft = report.drafts["tuned"]
    names = ["below 512 tokens", "512 to 2,048 tokens", "above 8,192 tokens"]
    assert [draft.by_context[name].alpha.n for name in names] == [17, 16, 17]
    assert [draft.by_context[name].speedup.n for name in names] == [14, 13, 13]
    assert {row.prompt_tokens for row in draft.per_prompt} == {20, 512, 9_000}  # of alpha's too
    (table,) = [table for table in tables(report) if table.title == "By context length"]
    assert [row[0] for row in table.rows] == [f"{name}, tuned" for name in names]
    for shown in (render_markdown(report), render_page(report)):
        assert shown.index(names[0]) < shown.index(names[1]) < shown.index(names[2])
    older = report.model_dump(mode="json")
    del older["drafts"]["tuned"]["by_context"]
    for row in older["drafts"]["tuned"]["per_prompt"]:
        del row["prompt_tokens"]
    assert read(older).drafts["tuned"].by_context == {}


def test_what_to_serve_is_said_in_a_sentence(run_info, measurement):
    drafts = [measurement("a", 0.5), measurement("b", 0.7)]
    report = build_report(run_info, drafts)
    speedup = report.drafts["b"].speedup
    expected = f"{speedup.mean:.2f}x, {speedup.ci95[0]:.2f} to {speedup.ci95[1]:.2f}"
    said = f"Serve b in draftsmith, gamma 3: expect {expected} on such prompts."
    assert report.recommendation == said
    assert said in render_markdown(report)
    own = report.model_copy(update={"engine": "torch"}).recommendation
    assert own.startswith("Best: b in draftsmith's own decoder, gamma 3: expect")
    assert "no server: measure the draft in your engine" in own
    both = [drafts[0], dataclasses.replace(drafts[1], path="lookup-first:b")]
    own = build_report(run_info, both).model_copy(update={"engine": "torch"})
    alone = f"(here a {own.drafts['a'].speedup.mean:.2f}x)"
    assert f"no server; engines look up or draft, not both {alone}: measure" in own.recommendation
    broken = dataclasses.replace(
        drafts[1], lossless=drafts[1].lossless | {"identical": 37, "unexplained": 1}
    )
    other = build_report(run_info, [drafts[0], broken])
    assert other.recommendation.startswith("Serve a in")  # b changes a text
    few = build_report(run_info, [measurement("b", 0.7, prompts=8)])
    assert few.recommendation.startswith("Serve without a draft")
