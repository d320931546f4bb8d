"""Logged outputs of the target, read from files and exports of several forms.

The documented form (docs/recipes.md) is a JSON object a line whose `messages` end with a turn of
the assistant. Pairs of a request and its response are converted to it: OpenAI batches, the bodies
of OpenAI's chat API, and the exports of LiteLLM and Langfuse. Rows that cannot be used are counted
and left out, because loggers are killed and gateways write nulls.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json

from align.vocabulary import Vocabulary
from eval.chat_template import render_output
from eval.prompts import Prompt, PromptError, PromptSet, lines_of, parse_row

Row = dict[str, Any]
REQUEST, RESPONSE = ("request", "body", "input"), ("response", "output")
PARAMETERS, TIMES = ("model_parameters", "modelParameters"), ("time", "startTime", "start_time")
OF_OUTPUT = {"temperature", "finish_reason", "stop_reason", "token_ids", "response_format"}
# Keys by which a JSON text is a part of the log; another JSON text is the user's, or an output.
FORMS = {"messages", "choices", "body", "role", "error"}
# Finish reasons of an output that ends with a stop token; all others cut it.
ENDED = {"stop", "tool_calls", "function_call", "tool_use", "end_turn", "eos", "eos_token"}
WITHOUT_HALF = "without the other line of an OpenAI batch"
# What gateways write in place of a long or a secret text: LiteLLM (the first two) and Langfuse
REPLACED = ("(litellm_truncated ", "redacted-by-litellm", "<truncated due to size exceeding limit>")


@dataclass
class LeftOut:
    """Rows that are left out. counts: by reason. first: what is wrong with the first unreadable."""

    counts: Counter[str] = field(default_factory=Counter)
    first: str = ""

    def add_unreadable(self, fault: object) -> None:
        self.counts["not readable"] += 1
        self.first = self.first or f" (the first: {fault})"

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.counts.items() if count)
        return (counts or "none") + self.first


def read_rows(
    spec: str, left_out: LeftOut, halves: dict[str, Row] | None = None
) -> Iterator[tuple[int, Row]]:
    """The rows of a file in the documented form, each with the number of its line.

    The two lines of an OpenAI batch with the same `custom_id` are one row. halves: lines of other
    files whose other half is missing; those of this file are added. None: they are counted. A last
    line that ends within its object is not counted, because its writer may be at work. Raises
    SourceError, and PromptError for a file that cannot be read.
    """
    waiting = {} if halves is None else halves
    lines = lines_of(spec)
    for number, line in lines:
        try:
            row = from_json(line)
            if not isinstance(row, dict):
                raise ValueError("it is not a JSON object")
            whole = _joined(row, waiting)
            rows = [] if whole is None else usual_rows(whole)
        except ValueError as error:
            if not str(error).startswith("EOF") or number != lines[-1][0]:
                left_out.add_unreadable(f"{spec!r}, line {number}: {error}")
            continue
        for each in rows:
            if any(mark in text for text in texts_of(each["messages"]) for mark in REPLACED):
                left_out.counts["cut or redacted by a gateway"] += 1
            else:
                yield number, each
    if halves is None:
        left_out.counts[WITHOUT_HALF] += len(waiting)


def _joined(row: Row, halves: dict[str, Row]) -> Row | None:
    """The row, of an OpenAI batch with its other half; None if that is not there yet."""
    name, parts = row.get("custom_id"), {"body", "response"}
    if not isinstance(name, str) or row.keys() >= parts:
        return row
    other = halves.pop(name, row)
    if parts & row.keys() & other.keys():  # equal lines, or another batch: halves of no known pair
        halves[name] = row if other == row else dict.fromkeys(parts)
        return None
    return other | row


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


def usual_rows(row: Row) -> list[Row]:
    """A row in the documented form, once for each choice of its response.

    `time` becomes seconds since 1970. If the request failed, `messages` end without an output.
    Raises ValueError for a time that is neither a number nor ISO 8601 text.
    """
    request, response = _part(row, REQUEST), _part(row, RESPONSE)
    if not isinstance(request, dict):  # Langfuse may log the messages, or a text, alone
        request = {} if request is None else {"messages": request}
    parameters: Any = next((row[name] for name in PARAMETERS if row.get(name)), {})
    if isinstance(parameters, str):
        parameters = from_json(parameters)
    fields = (parameters if isinstance(parameters, dict) else {}) | row | request
    fields = {k: v for k, v in fields.items() if k not in (*REQUEST, *RESPONSE, *PARAMETERS)}
    messages = _parsed(fields.get("messages")) or []
    if not isinstance(messages, list):
        messages = [{"role": "user", "content": messages}]
    fields["messages"] = messages
    if "custom_id" in row:
        fields["id"] = row["custom_id"]
    time = next((row[name] for name in TIMES if row.get(name) is not None), None)
    choices: Any = []
    if isinstance(response, str):
        choices = [{"message": {"content": response}}]
    elif isinstance(response, dict) and "choices" in response:
        choices = response["choices"]
        fields["model"] = response.get("model") or fields.get("model")
        time = time or response.get("created")
    elif isinstance(response, dict) and "error" not in response:
        choices = [{"message": response}]
    if time is not None:
        fields["time"] = _seconds(time)
    said = {"role": "assistant"}
    outputs = [
        {"messages": [*messages, said | choice["message"] | said]}
        | {k: choice[k] for k in ("finish_reason", "stop_reason", "token_ids") if choice.get(k)}
        for choice in (choices if isinstance(choices, list) else [])
        if isinstance(choice, dict) and isinstance(choice.get("message"), dict)
    ]
    return [fields | output for output in outputs or [{}]]


def _part(row: Row, names: tuple[str, ...]) -> Any:
    """The first of these fields that the row has; of a logged HTTP message its JSON body."""
    part = next((_parsed(row[name]) for name in names if row.get(name) is not None), None)
    if not isinstance(part, dict) or "body" not in part:
        return part
    body = _parsed(part["body"])
    return body if isinstance(body, dict) else {"error": body}


def _parsed(value: Any) -> Any:
    """The value; a JSON text that is a part of the log, parsed: databases export these as text."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            parsed = from_json(value)
        except ValueError:
            return value
        first = parsed[0] if isinstance(parsed, list) and parsed else parsed
        if isinstance(first, dict) and first.keys() & FORMS:
            return parsed
    return value


def _seconds(time: Any) -> float:
    """Seconds since 1970. A text without a time zone is UTC. Raises ValueError."""
    if isinstance(time, str):
        read = datetime.fromisoformat(time)
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    if not isinstance(time, int | float) or not math.isfinite(time):
        raise ValueError(f"its time is {time!r}")
    return float(time)


def turns_of(row: Row) -> Iterator[Row]:
    """Each turn of the assistant in a row of the documented form, as a prompt with its output.

    The prompt has the turns before the output. A turn before the first of the user, and a turn that
    continues another of the assistant, are no outputs.
    """
    turns = [turn for turn in row["messages"] if isinstance(turn, dict)]
    roles = [turn.get("role") for turn in turns]
    request = {name: value for name, value in row.items() if name not in OF_OUTPUT}
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
            # vLLM names the user's stop text, behind which there is no stop token
            reasons = (row.get("finish_reason"), row.get("stop_reason"))
            if any(isinstance(it, str) and it.lower() not in ENDED for it in reasons):
                output["cut"] = True
        yield request | {"messages": turns[:i], "logged_output": output}


def logged_prompts(spec: str, model: str | None) -> list[Prompt]:
    """The prompts of a file of logged outputs, each with its output. Prints what is left out.

    The outputs of one line are a group. An output that occurs again, as the earlier turns of a
    conversation do that is logged after each turn, is read once.
    model: rows that name another model are left out; None: all rows are read. Raises SourceError,
    and PromptError if no output can be read.
    """
    prompts: dict[str, Prompt] = {}
    left_out = LeftOut()
    counts = left_out.counts
    for number, row in read_rows(spec, left_out):
        if model is not None and row.get("model") not in (None, model):
            counts["of another model"] += 1
            continue
        turns = list(turns_of(row))
        counts["without an output"] += not turns
        line = {"group": f"line {number}"} if len(turns) > 1 else {}
        for turn in turns:
            try:
                name = f"line {number}, output {len(prompts) + counts['repeated']}"
                prompt = parse_row(line | turn | {"id": name}, spec, number)
            except PromptError as error:
                left_out.add_unreadable(error)
                continue
            output = prompt.logged_output
            assert output is not None
            said = replace(prompt, logged_output={"message": output["message"]}).content
            repeated = said in prompts
            counts["repeated"] += repeated
            if not repeated or "token_ids" in output:
                prompts[said] = prompt
    if not prompts:
        raise PromptError(
            f"{spec!r} has no logged output of the target; left out: {left_out}. "
            "docs/recipes.md describes the rows of answers: logged."
        )
    print(f"{spec}: {len(prompts)} logged outputs; left out: {left_out}")
    return list(prompts.values())


def with_output_ids(prompts: PromptSet, target: Vocabulary, longest: int) -> PromptSet:
    """The prompts with the token ids of their logged outputs. Prints what is left out.

    longest: tokens of an output; later tokens are not read. Outputs that the target's template does
    not render are left out. Raises PromptError if all are.
    """
    kept: list[Prompt] = []
    rendered: list[list[int]] = []
    logged = other = endless = 0
    for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
        assert prompt.logged_output is not None
        output = render_output(prompt, target.tokenizer, target.all_stops)
        emitted = prompt.logged_output.get("token_ids")
        if emitted:
            logged, other = logged + 1, other + (output != emitted)
            output = emitted
        if output and max(output) < target.vocab_size:
            ended = output[-1] in target.all_stops or prompt.logged_output.get("cut")
            endless += not ended
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
    if endless:
        print(
            f"logged outputs: {endless} end with no stop token of the target, so no end is taught"
        )
    if logged:
        print(f"logged outputs: the texts of {other} of {logged} have other tokens than logged")
    return replace(prompts, prompts=kept, ids=rendered)
