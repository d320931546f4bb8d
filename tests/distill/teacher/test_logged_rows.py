import json

import pytest

from distill.teacher.logged_rows import logged_prompts, read_rows, turns_of, usual_rows
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


@pytest.fixture
def written(tmp_path):
    def write(*rows):
        path = tmp_path / "log.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(path)

    return write


@pytest.mark.parametrize(
    "row",
    [DOCUMENTED, PAIR, LOGGED_HTTP, BATCH, LITELLM, LANGFUSE, TEXT],
    ids="documented pair http batch litellm langfuse text".split(),
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


def test_the_lines_of_a_batch_are_joined(written):
    asked = [{"custom_id": name, "body": BODY} for name in "ab"]
    given = [{"custom_id": name, "response": HTTP} for name in "ba"]
    rows = {row["id"]: number for number, row in read_rows(written(*asked, *given))}
    assert rows == {"b": 3, "a": 4}


def test_a_row_that_is_being_written_is_left_out(written):
    torn = json.dumps(DOCUMENTED)[:-9]
    assert len([*read_rows(written(DOCUMENTED, torn))]) == 1
    with pytest.raises(PromptError, match="line 1"):
        [*read_rows(written(torn, DOCUMENTED))]


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
    for count in ("1 of another model", "1 without an output", "1 not readable"):
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
