import json

import pytest

from distill.teacher.logged_rows import (
    WITHOUT_HALF,
    LeftOut,
    logged_prompts,
    read_rows,
    turns_of,
    usual_rows,
)
from eval.prompts import PromptError

ASKED = [{"role": "user", "content": "Ten customers?"}]
SAID = {"role": "assistant", "content": "SELECT name"}
BODY = {"model": "sql-7b", "messages": ASKED, "temperature": 0.7, "stream": False}
CHOICE = {"index": 0, "message": SAID, "finish_reason": "length", "token_ids": [4, 5]}
COMPLETION = {"object": "chat.completion", "model": "sql-7b", "created": 5, "choices": [CHOICE]}
HTTP = {"status_code": 200, "body": COMPLETION}
USUAL = {"messages": [*ASKED, SAID], "temperature": 0.7, "model": "sql-7b", "time": 5.0}

DOCUMENTED = USUAL | {"time": "1970-01-01T01:00:05+01:00"}
PAIR = {"request": BODY, "response": COMPLETION}
LOGGED_HTTP = {"request": {"body": json.dumps(BODY)}, "response": HTTP, "time": 5}
BATCH = {"custom_id": "a", "method": "POST", "body": BODY, "response": HTTP, "error": None}
LITELLM = {
    "id": "a",
    "call_type": "acompletion",
    "messages": ASKED,
    "response": COMPLETION,
    "model": "azure/sql-7b",
    "model_parameters": {"temperature": 0.7},
    "startTime": 5.0,
}
LANGFUSE = {
    "id": "a",
    "type": "GENERATION",
    "input": json.dumps(ASKED),
    "output": json.dumps(SAID),
    "model": "sql-7b",
    "modelParameters": {"temperature": 0.7},
    "startTime": "1970-01-01T00:00:05.000Z",
}
TEXT = LANGFUSE | {"input": {"messages": ASKED}, "output": "SELECT name"}
TEXTS = LANGFUSE | {"input": "Ten customers?", "output": "SELECT name"}
NULLS = PAIR | {"response": COMPLETION | {"choices": [None, {"message": None}, CHOICE]}}
NO_ROLE = PAIR | {"response": {"choices": [{"message": SAID | {"role": None}}]}, "time": 5}


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "log.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize(
    "row",
    [DOCUMENTED, PAIR, LOGGED_HTTP, BATCH, LITELLM, LANGFUSE, TEXT, TEXTS, NULLS, NO_ROLE],
    ids="documented pair http batch litellm langfuse text texts nulls no-role".split(),
)
def test_every_form_becomes_the_documented_one(row):
    (usual,) = usual_rows(row)
    assert {name: usual[name] for name in USUAL} == USUAL
    if row in (PAIR, BATCH, LITELLM):
        assert (usual["finish_reason"], usual["token_ids"]) == ("length", [4, 5])


def test_each_choice_is_an_output():
    two = {"choices": [CHOICE, {"message": SAID | {"content": "SELECT 1"}}]}
    assert [row["messages"][-1]["content"] for row in usual_rows(PAIR | {"response": two})] == [
        "SELECT name",
        "SELECT 1",
    ]


@pytest.mark.parametrize("said", ['{"words": ["oak"]}', '["oak", "ash"]', '{"a": 1', "[1]", "{}"])
def test_a_json_text_that_is_no_part_of_the_log_stays_a_text(said):
    """Structured outputs, and prompts that are JSON."""
    (row,) = usual_rows(LANGFUSE | {"input": said, "output": said})
    assert [turn["content"] for turn in row["messages"]] == [said, said]
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize(
    "response",
    [
        None,
        {"choices": None},
        {"choices": 5},
        {"error": {"message": "too long"}},
        '{"error": {"message": "too long"}}',
        {"status_code": 502, "body": "<html>Bad gateway</html>"},
        {"status_code": 400, "body": '{"error": {"message": "too long"}}'},
    ],
)
def test_a_request_that_failed_has_no_output(response):
    (row,) = usual_rows(PAIR | {"response": response})
    assert row["messages"] == ASKED


def rows_of(*files):
    """The ids of the rows in these files, by file, and what is left out."""
    left_out, halves = LeftOut(), {}
    rows = [[row["id"] for _, row in read_rows(str(file), left_out, halves)] for file in files]
    return rows, left_out, halves


def test_the_lines_of_a_batch_are_joined(written):
    asked = [{"custom_id": name, "body": BODY} for name in "ab"]
    given = [{"custom_id": name, "response": HTTP} for name in "ba"]
    rows = {row["id"]: number for number, row in read_rows(written(*asked, *given), LeftOut())}
    assert rows == {"b": 3, "a": 4}


def test_a_batch_in_two_files(written, tmp_path):
    """Names that two batches share are joined only where it is known which lines are a pair."""
    files = {}
    for day in ("monday", "tuesday"):
        turns = [{"role": "user", "content": day}]
        asked = [{"custom_id": name, "body": BODY | {"messages": turns}} for name in "ab"]
        given = [{"custom_id": name, "response": HTTP} for name in "ba"]
        files[day] = [tmp_path / f"{day}-{part}.jsonl" for part in ("input", "output")]
        for path, lines in zip(files[day], (asked, given), strict=True):
            path.write_text("\n".join(map(json.dumps, lines)))
    rows, left_out, halves = rows_of(*files["monday"], *files["tuesday"])
    assert rows == [[], ["b", "a"], [], ["b", "a"]]
    assert not halves
    assert not left_out.counts
    (monday, output), (tuesday, _) = files.values()
    rows, _, halves = rows_of(monday, monday, tuesday, output)
    assert rows == [[], [], [], []]
    assert len(halves) == 2
    with pytest.raises(PromptError, match=f"2 {WITHOUT_HALF}"):
        logged_prompts(str(output), None)


def test_a_row_that_is_being_written_is_left_out(written):
    torn, left_out = json.dumps(DOCUMENTED)[:-9], LeftOut()
    assert len([*read_rows(written(DOCUMENTED, torn), left_out)]) == 1
    assert not +left_out.counts


@pytest.mark.parametrize(
    "bad", ['{"messages": ', "[1]", "\x00\xff", '{"time": "now"}', '{"time": {}}']
)
def test_a_line_that_is_no_row_is_counted(written, bad):
    left_out = LeftOut()
    assert len([*read_rows(written(DOCUMENTED, bad, DOCUMENTED), left_out)]) == 2
    assert +left_out.counts == {"not readable": 1}
    assert "line 2" in str(left_out)


@pytest.mark.parametrize("character", "\x85\u2028\u2029\x0b\x0c\x1c\x1d\x1e\r")
def test_a_separator_of_lines_is_text_within_a_row(written, character):
    """Only a line feed ends a row; control characters below a space are escaped in JSON."""
    said = f"one{character}two"
    row = json.dumps(
        DOCUMENTED | {"messages": [*ASKED, SAID | {"content": said}]}, ensure_ascii=False
    )
    left_out = LeftOut()
    (first, second) = read_rows(written(row + "\r", row), left_out)
    assert first[1]["messages"][-1]["content"] == second[1]["messages"][-1]["content"] == said
    assert not +left_out.counts


CUT = "Summarise this: on the… (litellm_truncated skipped 1874 chars. A safeguard) …in winter."


@pytest.mark.parametrize(
    "text", [CUT, "redacted-by-litellm", "<truncated due to size exceeding limit>"]
)
def test_texts_that_a_gateway_has_replaced_are_left_out(written, text):
    """In the conversation; what it has cut elsewhere does no harm."""
    asked = LITELLM | {"messages": json.dumps([{"role": "user", "content": text}])}
    said = PAIR | {"response": {"choices": [{"message": SAID | {"content": text}}]}}
    whole = LITELLM | {"proxy_server_request": CUT}
    left_out = LeftOut()
    assert [number for number, _ in read_rows(written(asked, said, whole), left_out)] == [3]
    assert left_out.counts.total() == 2


@pytest.mark.parametrize(
    ("end", "cut"),
    [
        ({}, None),
        ({"finish_reason": "stop"}, None),
        ({"finish_reason": "tool_calls"}, None),
        ({"finish_reason": "stop", "stop_reason": 2}, None),  # vLLM: a token's id
        ({"finish_reason": "stop", "stop_reason": "\n\n"}, True),  # and the user's stop text
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "max_tokens"}, True),
        ({"finish_reason": "MAX_TOKENS"}, True),
        ({"finish_reason": "content_filter"}, True),
        ({"finish_reason": "abort"}, True),
        ({"finish_reason": "repetition"}, True),
    ],
)
def test_only_an_output_that_ended_by_itself_has_its_stop_token(end, cut):
    (row,) = usual_rows(PAIR | {"response": {"choices": [{"message": SAID, **end}]}})
    (turn,) = turns_of(row)
    assert turn["logged_output"].get("cut") == cut


def test_every_turn_of_the_assistant_is_an_output_after_the_turns_before_it():
    system, call = {"role": "system", "content": "s"}, {"role": "assistant", "content": "c"}
    tool = {"role": "tool", "content": "t"}
    messages = [system, SAID, *ASKED, call, tool, call | {"reasoning": "r"}, call, *ASKED, SAID]
    row = USUAL | {"messages": messages, "token_ids": [4], "finish_reason": "length"}
    turns = list(turns_of(row))
    assert [len(turn["messages"]) for turn in turns] == [3, 5, 8]
    outputs = [turn["logged_output"] for turn in turns]
    assert all(output["temperature"] == 0.7 for output in outputs)
    assert outputs[1]["message"]["reasoning_content"] == "r"
    assert [output.get("token_ids") for output in outputs] == [None, None, [4]]
    assert [output.get("cut") for output in outputs] == [None, None, True]


def test_rows_that_cannot_be_taught_are_counted(written, capsys):
    failed = {"request": BODY, "response": None}
    picture = DOCUMENTED | {"images": ["cat.png"]}
    other = DOCUMENTED | {"model": "sql-1b"}
    unnamed = {"messages": [*ASKED * 3, SAID]}
    path = written(DOCUMENTED, failed, picture, other, LITELLM | {"messages": ASKED * 2}, unnamed)
    prompts = logged_prompts(path, "sql-7b")
    assert [prompt.messages for prompt in prompts] == [ASKED, ASKED * 2, ASKED * 3]
    told = capsys.readouterr().out
    assert "3 logged outputs" in told
    for count in ("1 of another model", "1 without an output", "1 not readable", "images"):
        assert count in told


def test_a_conversation_that_is_logged_after_each_turn_is_taught_once(written):
    longer = PAIR | {"request": BODY | {"messages": [*ASKED, SAID, *ASKED]}}
    prompts = logged_prompts(written(longer, PAIR, DOCUMENTED), None)
    assert sorted(len(prompt.messages) for prompt in prompts) == [1, 3]
    assert all(prompt.logged_output["token_ids"] == [4, 5] for prompt in prompts)
    assert len({prompt.id for prompt in prompts}) == 2


@pytest.mark.parametrize(
    "rows", [["{"], ["[1]"], [DOCUMENTED | {"time": "yesterday"}], [{"request": BODY}]]
)
def test_a_file_without_rows_is_refused(written, rows):
    with pytest.raises(PromptError, match=r"log\.jsonl"):
        logged_prompts(written(*rows), None)
