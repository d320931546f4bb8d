"""Prompts as a server is asked: requests to OpenAI's chat API, and conversations turn by turn."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from eval.prompts import Prompt, PromptError


def chat_request(prompt: Prompt) -> dict[str, Any]:
    """The fields of a request to OpenAI's chat API; the server renders the messages."""
    request: dict[str, Any] = {"messages": [_as_sent(turn) for turn in prompt.messages or []]}
    if prompt.tools:  # "none": the template shows the tools, and a call in the output stays text
        request |= {"tools": prompt.tools, "tool_choice": "none"}
    for name in ("chat_template_kwargs", "response_format"):
        if value := getattr(prompt, name):
            request[name] = value
    return request


def json_schema(prompt: Prompt) -> dict[str, Any] | None:
    """The schema of the JSON that `response_format` asks for; {}: any JSON; None: any text."""
    form = prompt.response_format or {}
    if form.get("type") not in ("json_schema", "json_object"):
        return None
    return dict(form.get("json_schema", {}).get("schema", {}))


def _as_sent(turn: dict[str, Any]) -> dict[str, Any]:
    if not turn.get("tool_calls"):
        return turn
    turn = copy.deepcopy(turn)
    for call in turn["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"].get("arguments", {}))
    return turn


def refuse_server_only(prompts: Iterable[Prompt]) -> None:
    """Raise PromptError for a prompt that only a server can be asked."""
    for prompt in prompts:
        if prompt.follow_ups or prompt.response_format:
            named = "follow-up turns" if prompt.follow_ups else "a `response_format`"
            raise PromptError(
                f"Prompt {prompt.id!r} has {named}, which only a server is asked; measure it with "
                "--engine vllm, or remove the field."
            )


def turns_of(prompt: Prompt) -> list[Prompt]:
    """A conversation as prompts of one group, whose later ones lack the turns before."""
    texts = prompt.follow_ups or []
    first = replace(prompt, follow_ups=None, group=prompt.group or (prompt.id if texts else None))
    later = [
        replace(
            first, id=f"{prompt.id}, turn {number}", messages=[{"role": "user", "content": text}]
        )
        for number, text in enumerate(texts, 2)
    ]
    return [first, *later]


def after(prompt: Prompt, earlier: Prompt, output: str) -> Prompt:
    """A later turn with the conversation before it: the turn before, and the output for it."""
    said = {"role": "assistant", "content": output}
    return replace(prompt, messages=[*(earlier.messages or []), said, *(prompt.messages or [])])
