"""The numbers under other tools' names, recomputed from the log by their definitions."""

import json

import pytest

from eval.convert import main, to_sglang, to_spec_bench, to_vllm
from eval.reporting.report import build_report, report_schema, write_report


@pytest.fixture
def measured(measurement):
    return measurement("tuned", 0.6)


@pytest.fixture
def draft(run_info, measured):
    return build_report(run_info, [measured]).drafts["tuned"]


def total(runs, key):
    return sum(sum(getattr(run, key)) for run in runs)


def test_vllm(draft, measured):
    found = to_vllm(draft)
    drafts = sum(len(run.drafted) for run in measured.runs)
    accepted, drafted = total(measured.runs, "accepted"), total(measured.runs, "drafted")
    assert found["vllm:spec_decode_num_drafts_total"] == drafts
    assert found["vllm:spec_decode_num_draft_tokens_total"] == drafted
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == accepted
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    assert found["draft_acceptance_rate"] == pytest.approx(accepted / drafted)
    per_position = [sum(a >= i for run in measured.runs for a in run.accepted) for i in (1, 2, 3)]
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] == per_position
    # their shares add up to the mean accepted length
    assert 1 + sum(found["acceptance_per_position"]) == pytest.approx(
        found["mean_acceptance_length"]
    )


def test_sglang(draft, measured):
    found = to_sglang(draft)
    tokens, calls = (
        sum(len(run.tokens) for run in measured.runs),
        sum(len(run.block_tokens) for run in measured.runs),
    )
    assert found["spec_accept_length"] == pytest.approx(tokens / calls)
    first = measured.runs[0]
    assert found["requests"][0] == {
        "id": first.prompt_id,
        "completion_tokens": len(first.tokens),
        "spec_verify_ct": 10,
        "spec_accept_length": len(first.tokens) / 10,
        "spec_accept_rate": sum(first.accepted) / 30,
        "spec_accept_token_num": sum(first.accepted),
        "spec_draft_token_num": 30,
    }


def test_spec_bench(draft, measured):
    found = to_spec_bench(draft)
    assert found["#Mean accepted tokens"] == pytest.approx(draft.tau.mean)
    mine = [len(run.tokens) / run.seconds for run in measured.runs]
    base = [len(run.tokens) / run.seconds for run in measured.baseline]
    assert found["Speedup ratio"] == pytest.approx(sum(mine) / sum(base))
    assert len(found["answers"]) == 40
    choice = found["answers"][3]["choices"][0]
    assert choice["new_tokens"] == [len(measured.runs[3].tokens)]


def test_command(sample_report, tmp_path, capsys):
    write_report(tmp_path, sample_report)
    path = str(tmp_path / "report.json")
    assert main([path, "--to", "vllm"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == "tuned"
    assert main([path, "--to", "sglang", "--draft", "untuned"]) == 0
    assert json.loads(capsys.readouterr().out)["draft"] == "untuned"
    assert main([path, "--to", "vllm", "--draft", "x"]) == 2
    assert "no draft 'x' in this report; it has untuned, tuned" in capsys.readouterr().err
    assert main([str(tmp_path / "none.json"), "--to", "vllm"]) == 2
    assert "no report at" in capsys.readouterr().err


def test_the_schema_is_printed(capsys):
    assert main(["--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == report_schema()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "vllm"], "--to needs the report.json"),
        (["report.json"], "one of the arguments --to --schema is required"),
        (["--to", "vllm", "--schema"], "not allowed with argument --to"),
    ],
)
def test_half_a_command_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
