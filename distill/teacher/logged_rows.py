"""Logged outputs of the target, read from files and exports of several forms.

The documented form (docs/recipes.md) is a JSON object a line whose `messages` end with a turn of
the assistant. Pairs of a request and its response are converted to it: OpenAI batches, the bodies
of OpenAI's chat API, and the exports of LiteLLM and Langfuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json

from align.vocabulary import Vocabulary
from eval.prompts import Prompt, PromptError, PromptSet, lines_of, parse_row, render_output

Row = dict[str, Any]
REQUEST, RESPONSE = ("request", "body", "input"), ("response", "output")
PARAMETERS, TIMES = ("model_parameters", "modelParameters"), ("time", "startTime", "start_time")
OF_OUTPUT = {"temperature", "finish_reason", "token_ids", "response_format"}


def read_rows(spec: str) -> Iterator[tuple[int, Row]]:
    """The rows of a file in the documented form, each with the number of its line.

    The two lines of an OpenAI batch with the same `custom_id` are one row. A last line that ends
    within its object is left out, because its writer may be at work. Raises SourceError, and
    PromptError for a line that is no JSON object or has an invalid time.
    """
    batch: dict[str, Row] = {}
    lines = lines_of(spec)
    for number, line in lines:
        try:
            row = from_json(line)
            if not isinstance(row, dict):
                raise ValueError("it is not a JSON object")
            if "custom_id" in row:
                row = batch.setdefault(row["custom_id"], {}) | row
                batch[row["custom_id"]] = row
                if not row.keys() >= {"body", "response"}:
                    continue
            rows = usual_rows(row)
        except ValueError as error:
            if str(error).startswith("EOF") and number == lines[-1][0]:
                return
            raise PromptError(
                f"{spec!r}, line {number}: {error}. Write one JSON object per line, in UTF-8."
            ) from error
        yield from ((number, each) for each in rows)


def usual_rows(row: Row) -> list[Row]:
    """A row in the documented form, once for each choice of its response.

    `time` becomes seconds since 1970. If the request failed, `messages` end without an output.
    Raises ValueError for a time that is neither a number nor ISO 8601 text.
    """
    request, response = _part(row, REQUEST), _part(row, RESPONSE)
    if isinstance(request, list):  # Langfuse may log the messages alone
        request = {"messages": request}
    fields = (_part(row, PARAMETERS) or {}) | row | (request or {})
    fields = {k: v for k, v in fields.items() if k not in (*REQUEST, *RESPONSE, *PARAMETERS)}
    fields["messages"] = messages = _parsed(fields.get("messages")) or []
    if "custom_id" in row:
        fields["id"] = row["custom_id"]
    time = next((row[name] for name in TIMES if row.get(name) is not None), None)
    choices: list[Any] = []
    if isinstance(response, str):
        choices = [{"message": {"content": response}}]
    elif isinstance(response, dict) and "choices" in response:
        choices = response["choices"]
        fields["model"] = response.get("model") or fields.get("model")
        time = time or response.get("created")
    elif isinstance(response, dict):
        choices = [{"message": response}]
    if time is not None:
        fields["time"] = _seconds(time)
    outputs = [
        {"messages": [*messages, {"role": "assistant"} | choice["message"]]}
        | {name: choice[name] for name in ("finish_reason", "token_ids") if choice.get(name)}
        for choice in choices
        if isinstance(choice.get("message"), dict)
    ]
    return [fields | output for output in outputs or [{}]]


def _part(row: Row, names: tuple[str, ...]) -> Any:
    """The first of these fields that the row has; of a logged HTTP message its body."""
    part = next((_parsed(row[name]) for name in names if row.get(name) is not None), None)
    return _parsed(part["body"]) if isinstance(part, dict) and "body" in part else part


def _parsed(value: Any) -> Any:
    """The value; a text that is a JSON object or list, parsed: databases export these as text."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return from_json(value)
        except ValueError:
            return value
    return value


def _seconds(time: Any) -> float:
    """Seconds since 1970. A text without a time zone is UTC. Raises ValueError."""
    if isinstance(time, str):
        read = datetime.fromisoformat(time)
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    return float(time)


def turns_of(row: Row) -> Iterator[Row]:
    """Each turn of the assistant in a row of the documented form, as a prompt with its output.

    The prompt has the turns before the output. A turn before the first of the user, and a turn that
    continues another of the assistant, are no outputs.
    """
    turns = [turn for turn in row["messages"] if isinstance(turn, dict)]
    roles = [turn.get("role") for turn in turns]
    asked = {name: value for name, value in row.items() if name not in OF_OUTPUT}
    for i, turn in enumerate(turns):
        if roles[i] != "assistant" or "user" not in roles[:i] or roles[i - 1] == "assistant":
            continue
        message = dict(turn)
        if message.get("reasoning"):  # vLLM's name; templates use the other one
            message.setdefault("reasoning_content", message.pop("reasoning"))
        output: Row = {"message": message}
        if row.get("temperature") is not None:
            output["temperature"] = row["temperature"]
        if i == len(turns) - 1:
            if row.get("token_ids"):
                output["token_ids"] = row["token_ids"]
            if row.get("finish_reason") == "length":
                output["cut"] = True
        yield asked | {"messages": turns[:i], "logged_output": output}


def logged_prompts(spec: str, model: str | None) -> list[Prompt]:
    """The prompts of a file of logged outputs, each with its output. Prints what is left out.

    The outputs of one line are a group. An output that occurs again, as the earlier turns of a
    conversation do that is logged after each turn, is read once.
    model: rows that name another model are left out; None: all rows are read. Raises SourceError,
    and PromptError if no output can be read.
    """
    prompts: dict[str, Prompt] = {}
    left_out: Counter[str] = Counter()
    first = ""
    for number, row in read_rows(spec):
        if model is not None and row.get("model") not in (None, model):
            left_out["of another model"] += 1
            continue
        turns = list(turns_of(row))
        left_out["without an output"] += not turns
        line = {"group": f"line {number}"} if len(turns) > 1 else {}
        for turn in turns:
            try:
                name = f"line {number}, output {len(prompts) + left_out['repeated']}"
                prompt = parse_row(line | turn | {"id": name}, spec, number)
            except PromptError as error:
                left_out["not readable"] += 1
                first = first or f" (the first: {error})"
                continue
            output = prompt.logged_output
            assert output is not None
            said = replace(prompt, logged_output={"message": output["message"]}).content
            repeated = said in prompts
            left_out["repeated"] += repeated
            if not repeated or "token_ids" in output:
                prompts[said] = prompt
    counts = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    if not prompts:
        raise PromptError(
            f"{spec!r} has no logged output of the target ({counts or 'it is empty'}){first}; "
            "docs/recipes.md describes the rows of answers: logged."
        )
    print(f"{spec}: {len(prompts)} logged outputs; left out: {counts or 'none'}{first}")
    return list(prompts.values())


def with_output_ids(prompts: PromptSet, target: Vocabulary, longest: int) -> PromptSet:
    """The prompts with the token ids of their logged outputs. Prints what is left out.

    longest: tokens of an output; later tokens are not read. Outputs that the target's template does
    not render are left out. Raises PromptError if all are.
    """
    kept: list[Prompt] = []
    rendered: list[list[int]] = []
    logged = other = 0
    for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
        assert prompt.logged_output is not None
        output = render_output(prompt, target.tokenizer, target.all_stops)
        emitted = prompt.logged_output.get("token_ids")
        if emitted:
            logged, other = logged + 1, other + (output != emitted)
            output = emitted
        if output and max(output) < target.vocab_size:
            said = prompt.logged_output | {"token_ids": output[:longest]}
            said.pop("message", None)
            kept.append(replace(prompt, logged_output=said))
            rendered.append(ids)
    if not kept:
        raise PromptError(
            f"None of the {len(prompts.ids)} logged outputs of {prompts.source!r} is rendered by "
            "the target's chat template, or has only its tokens; name the target that gave them."
        )
    if lost := len(prompts.ids) - len(kept):
        print(f"logged outputs: {lost} left out, because the target's template or tokens differ")
    if logged:
        print(f"logged outputs: the texts of {other} of {logged} have other tokens than logged")
    return replace(prompts, prompts=kept, ids=rendered)
