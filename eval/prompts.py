"""Prompts: read from a data set, a wheel or a user's file, and rendered to the target's token ids.

A spec is a Hub data set (`NAME`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`, split `train` if none is
given, of one commit, branch or tag with `NAME@REVISION`), a `pypi:` file (`align.sources`), or a
local `.jsonl` / `.jsonl.gz` file. A row has `prompt`, completed raw, or `messages`, rendered with
the target's chat template, with `tools` where it brings them; optionally `category`, `group`
(prompts of one document or source share it), and `id` or `task_id`. Its other fields are ignored,
but a row with pictures or sound is refused.
`conversations` (`from` and `value`) and a `prompt` that is a list are messages, too; a last turn of
the assistant is left out, since the target writes its own. `instruction` puts a `prompt` into a
user's message. `chat_template_kwargs` (`{"enable_thinking": false}`) are for the template; a row's
value wins over the recipe's.
"""

from __future__ import annotations

import ast
import codecs
import copy
import gzip
import hashlib
import inspect
import json
import random
import re
import reprlib
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

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
from typing_extensions import TypedDict

from align.files import atomic_file
from align.sources import resolve_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLACE = "{prompt}"  # in an instruction
CODE, DOCSTRING = "{code}", "{docstring}"  # the same for a Python function to write
INSTRUCTING = ("system", "developer")  # roles whose turn alone asks nothing
KNOWN = ("user", "assistant", "tool")  # roles that templates know
SPEAKERS = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
TELLING = 40  # characters of a turn that says what is asked
EXAMPLE = '{"prompt": "…"} or {"messages": [{"role": "…", "content": "…"}]}'
SHOWN = ("image", "images", "image_files", "audio", "audios", "video", "videos")


class PromptError(ValueError):
    """Prompts that cannot be used: says where, why, and what to do."""


@with_config(ConfigDict(extra="allow"))
class _Turn(TypedDict):
    """A message; transformers' templates want a call's arguments as an object, servers as JSON."""

    role: str
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]


def _says_or_calls(turn: dict[str, Any]) -> dict[str, Any]:
    calls = turn.get("tool_calls") or []
    if not calls:  # templates ask whether there is a list, not whether it is empty
        turn.pop("tool_calls", None)
    if turn.get("content") is None and (turn["role"] != "assistant" or not calls):
        raise ValueError("no `content`; only an assistant's `tool_calls` need none")
    for call in calls:
        function = call.get("function")
        if not isinstance(function, dict) or "name" not in function:
            raise ValueError('`tool_calls` should be [{"function": {"name": …, "arguments": {…}}}]')
        if isinstance(arguments := function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(arguments or "{}") or {}
                json.dumps(function, ensure_ascii=False).encode()  # half a character is no text
            except ValueError as error:
                raise ValueError(f"`arguments` is {arguments!r}: no JSON ({error})") from error
    return turn


if TYPE_CHECKING:  # to a type checker a message is a plain dictionary
    _Message = dict[str, Any]
else:
    _Message = Annotated[_Turn, AfterValidator(_says_or_calls)]
# a number as a name is its text
_Name = Annotated[str, BeforeValidator(lambda name: str(name) if type(name) is int else name)]


@dataclass(frozen=True)
class Prompt:
    """One prompt: `prompt` is completed raw, `messages` go through a chat template.

    chat_template_kwargs: what the template reads beside the messages. tools: as JSON schemas.
    The annotations are what a row of a file is checked against.
    """

    id: _Name
    prompt: Annotated[str, Field(pattern=r"\S")] | None = None
    messages: list[_Message] | None = None
    category: _Name | None = None
    group: _Name | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        """The prompt without any template, as overlap is measured.

        For messages this is the user's last turn, because prompts of one domain may share all
        before it. A short one ("continue.") says little, so the user's turns before it are added.
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


LongPrompts = Literal["error", "drop", "truncate_left"]


@dataclass(frozen=True)
class PromptSet:
    """Prompts with their token ids, and where they came from.

    overlap: training prompts that equal or nearly repeat them; None: not known.
    """

    source: str
    prompts: list[Prompt]
    ids: list[list[int]]
    overlap: int | None = None

    @property
    def sha256(self) -> str:
        return prompts_sha256(self.prompts)

    @property
    def in_chat_form(self) -> float:
        """Share of them that are messages."""
        return sum(prompt.messages is not None for prompt in self.prompts) / len(self.prompts)

    @property
    def chat_template_kwargs(self) -> list[dict[str, Any]]:
        """The different settings of the prompts that are messages."""
        settings: list[dict[str, Any]] = []
        for prompt in self.prompts:
            setting = prompt.chat_template_kwargs or {}
            if prompt.messages is not None and setting not in settings:
                settings.append(setting)
        return settings

    def drawn(self, count: int, seed: int) -> PromptSet:
        """`count` of them as the seed orders them: so the first few are a random draw, too."""
        order = list(range(len(self.prompts)))
        random.Random(seed).shuffle(order)
        return self._of(order[:count])

    def of_ids(self, ids: set[str]) -> PromptSet:
        """The prompts with these ids, in the order of this set."""
        return self._of(i for i, prompt in enumerate(self.prompts) if prompt.id in ids)

    def first(self, count: int) -> PromptSet:
        return self._of(range(min(count, len(self.prompts))))

    def after(self, count: int) -> PromptSet:
        """All but the first `count`."""
        return self._of(range(count, len(self.prompts)))

    def _of(self, numbers: Iterable[int]) -> PromptSet:
        keep = list(numbers)
        prompts, ids = [self.prompts[i] for i in keep], [self.ids[i] for i in keep]
        return replace(self, prompts=prompts, ids=ids)


def load_prompts(spec: str, limit: int | None = None, seed: int = 0) -> list[Prompt]:
    """The prompts that `spec` names, in their order.

    limit: only so many, drawn with the seed. Raises PromptError, which names file and line, and
    SourceError for a file that is missing or cannot be fetched.
    """
    prompts = draw(open_prompts(spec), limit, seed)
    refuse_repeated_ids(prompts, spec)
    return prompts


def open_prompts(spec: str) -> Sequence[Prompt]:
    """The prompts that `spec` names. Raises what `load_prompts` raises.

    All lines of a file are read and checked at once, each row of a data set when it is asked for.
    """
    named = spec.startswith("pypi:") or spec.endswith((".jsonl", ".jsonl.gz"))
    prompts: Sequence[Prompt]
    if named or Path(spec).exists():
        prompts = _lines_of(resolve_file(spec), spec)
    else:
        prompts = _Rows(spec)
    if not prompts:
        raise PromptError(f"{spec!r} holds no prompt; write one JSON object a line, as {EXAMPLE}.")
    return prompts


def draw(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """`limit` of the prompts, drawn with the seed, kept in order; all of them for None."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[i] for i in sorted(random.Random(seed).sample(range(len(prompts)), limit))]


def _lines_of(path: Path, spec: str) -> list[Prompt]:
    try:
        content = path.read_bytes()
        if path.name.endswith(".gz"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(
            f"{spec!r} cannot be read ({error}); give a whole .jsonl or .jsonl.gz file."
        ) from error
    # editors on Windows write a byte order mark first
    lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [_parse(line, spec, number) for number, line in enumerate(lines, 1) if line.strip()]


class _Rows(Sequence[Prompt]):
    """The rows of a data set of the Hub, which `datasets` keeps in memory-mapped files."""

    def __init__(self, spec: str) -> None:
        from datasets import load_dataset

        name, *parts = re.split(r":(?![^\[]*\])", spec)  # train[:10%] is one part
        name, _, revision = name.partition("@")
        config, split = parts if len(parts) == 2 else (None, ":".join(parts) or "train")
        self.spec = spec
        try:
            self.rows = load_dataset(name, config, split=split, revision=revision or None)
        except Exception as error:  # a dozen unrelated types, from ConnectionError to ValueError
            # the configurations that there are stand in the second line
            reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
            raise PromptError(
                f"Prompts {spec!r}: there is no such file here, and as a data set of the Hub it "
                f"cannot be loaded ({reason}). Check the spelling (NAME, NAME:SPLIT or "
                "NAME:CONFIG:SPLIT, with @REVISION after NAME for one version of it) and the "
                "network, or give a .jsonl file."
            ) from error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]
        return _parse(_without_nulls(self.rows[number]), self.spec, number)


def _without_nulls(value: Any) -> Any:
    """Without the keys that a data set gives a row because other rows have them."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _in_usual_form(row: Any, info: ValidationInfo) -> Any:
    """A row as a prompt has it: other names of its fields, and JSON in a text, are replaced.

    Numbered where it has no id. `conversations` and a `prompt` that is a list become `messages`.
    """
    if not isinstance(row, dict):
        return row
    row = {key: value for key, value in row.items() if value is not None}
    if shown := [name for name in SHOWN if row.get(name)]:
        raise ValueError(f"`{shown[0]}` is part of the prompt, and only text is read here")
    row["id"] = row.get("id", row.get("task_id", info.context))
    prompt, turns = row.get("prompt"), row.get("messages")
    if isinstance(prompt, list) and turns is None:
        turns = row.pop("prompt")
    elif isinstance(row.get("conversations"), list) and turns is None and prompt is None:
        turns = [_message(turn) for turn in row["conversations"]]
    if turns is not None:
        row["messages"] = turns
    if isinstance(row.get("tools"), str):
        with suppress(ValueError):  # a text that is no JSON is refused as a text
            row["tools"] = json.loads(row["tools"])
    if not row.get("tools"):
        row.pop("tools", None)
    return row


def _message(turn: Any) -> Any:
    """A turn of `conversations` as a message."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    if turn["from"] not in SPEAKERS:
        raise ValueError(f"`from` is {turn['from']!r}, but should be one of {', '.join(SPEAKERS)}")
    return {"role": SPEAKERS[turn["from"]], "content": turn.get("value")}


def _asks_once(prompt: Prompt) -> Prompt:
    """The prompt without an answer that its row brings: the target gives its own."""
    turns = list(prompt.messages or [])
    first = next((turn.get("content") for turn in turns if turn["role"] == "user"), None)
    if prompt.prompt is not None and prompt.prompt == first:  # as in UltraChat
        prompt = replace(prompt, prompt=None)
    if (prompt.prompt is None) == (prompt.messages is None):
        has = "neither" if prompt.prompt is None else "both"
        raise ValueError(f"{has} of `prompt` and `messages`; give exactly one of them")
    if prompt.messages is None:
        return prompt
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    asking = [turn for turn in turns if turn["role"] not in INSTRUCTING]
    if not any((turn.get("content") or "").strip() for turn in asking):
        raise ValueError("`messages` holds nothing to answer; give a turn of the user's")
    return replace(prompt, messages=turns)


_ROW: TypeAdapter[Prompt] = TypeAdapter(
    Annotated[Prompt, BeforeValidator(_in_usual_form), AfterValidator(_asks_once)]
)


def _parse(row: bytes | dict[str, Any], spec: str, number: int) -> Prompt:
    """The prompt of a line (numbered from 1) or of a data set's row (from 0)."""
    try:
        if isinstance(row, bytes):
            return _ROW.validate_json(row, context=number)
        return _ROW.validate_python(row, context=number)
    except ValidationError as error:
        first = error.errors()[0]
        field = "".join(f" `{name}`" for name in first["loc"])
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] not in ("value_error", "json_invalid", "missing"):
            reason += f", not {reprlib.repr(first['input'])}"
        kind = "line" if isinstance(row, bytes) else "row"
        raise PromptError(
            f"{spec!r}, {kind} {number}{field}: {reason}. Write one JSON object a line, as "
            f"{EXAMPLE}."
        ) from error


def in_chat_form(
    prompts: Iterable[Prompt],
    instruction: str | None,
    chat_template: object,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Prompt]:
    """The prompts as a target is asked that has this chat template, None for a base model.

    Each `prompt` becomes a user's message, the instruction with the prompt at PLACE; or, of a
    prompt that ends in a Python function with nothing but a docstring, with its code at CODE and
    its docstring at DOCSTRING. `messages` stay; without an instruction or a template, all stay.
    template_kwargs: `chat_template_kwargs` of messages that bring none of these names.
    Raises PromptError for an instruction that has no place for the prompt, for a prompt that is
    no such function where the instruction asks for one, and for template_kwargs that no template
    reads.
    """
    asked = list(prompts)
    if instruction is not None and chat_template:
        asked = [_asked(prompt, instruction) for prompt in asked]
    if not template_kwargs or not asked:
        return asked
    if not any(prompt.messages for prompt in asked):
        raise PromptError(
            f"chat_template_kwargs is {template_kwargs}, but all prompts are completed raw; give "
            "`messages`, set instruction for a target that has a chat template, or leave it out."
        )
    for i, prompt in enumerate(asked):
        if prompt.messages is not None:
            kwargs = template_kwargs | (prompt.chat_template_kwargs or {})
            asked[i] = replace(prompt, chat_template_kwargs=kwargs)
    return asked


def _asked(prompt: Prompt, instruction: str) -> Prompt:
    if prompt.prompt is None:
        return prompt
    parts = {PLACE: prompt.prompt}
    if CODE in instruction and DOCSTRING in instruction:
        task = split_task(prompt.prompt)
        if task is None:
            raise PromptError(
                f"Prompt {prompt.id!r} is no Python function with a docstring, but the instruction "
                f"has {CODE} and {DOCSTRING}; write {PLACE} there."
            )
        parts = dict(zip((CODE, DOCSTRING), task, strict=True))
    elif PLACE not in instruction:
        raise PromptError(
            f"instruction is {instruction!r} and has no place for a prompt; write {PLACE} where "
            f"it belongs, or {CODE} and {DOCSTRING} for Python functions."
        )
    # one pass: what a prompt says is never taken for a place
    content = re.sub("|".join(map(re.escape, parts)), lambda place: parts[place[0]], instruction)
    return replace(prompt, prompt=None, messages=[{"role": "user", "content": content}])


def split_task(prompt: str) -> tuple[str, str] | None:
    """The code of a prompt without its last function's docstring, and that docstring.

    None where the prompt does not end in a function that has nothing but a docstring; there may be
    imports before it.
    """
    try:
        last = ast.parse(prompt).body[-1]
    # no Python, a null byte, nothing but comments, nested too deeply for the parser
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return None
    if not isinstance(last, ast.FunctionDef):
        return None
    *imports, end = last.body
    if not (isinstance(end, ast.Expr) and isinstance(end.value, ast.Constant)):
        return None
    docstring = end.value.value
    if not isinstance(docstring, str):
        return None
    if not all(isinstance(node, ast.Import | ast.ImportFrom) for node in imports):
        return None
    lines = prompt.splitlines()[: end.lineno - 1]
    return "\n".join(lines).strip("\n"), inspect.cleandoc(docstring)


def refuse_repeated_ids(prompts: Iterable[Prompt], spec: str) -> None:
    """Raise PromptError where two prompts have one id: results of two drafts are paired by it."""
    ids: set[str] = set()
    for prompt in prompts:
        if prompt.id in ids:
            raise PromptError(
                f"{spec!r}: the id {prompt.id!r} stands twice; make the ids unique, or leave them "
                "out to have the prompts numbered."
            )
        ids.add(prompt.id)


def write_prompts(path: str | Path, prompts: Iterable[Prompt]) -> None:
    """One object a line, as `load_prompts` reads them."""
    with atomic_file(path) as file:
        file.writelines(json.dumps(_row_of(prompt)) + "\n" for prompt in prompts)


def prompts_sha256(prompts: Iterable[Prompt]) -> str:
    """One hash over all their fields; it does not depend on their order."""
    digest = hashlib.sha256()
    for prompt in sorted(prompts, key=lambda prompt: prompt.id):
        digest.update(json.dumps(_row_of(prompt), sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


def _row_of(prompt: Prompt) -> dict[str, Any]:
    return {key: value for key, value in asdict(prompt).items() if value is not None}


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of one prompt. The template writes its own BOS, so none is added before it."""
    if prompt.messages is None:
        if prompt.tools:
            raise PromptError(
                f"Prompt {prompt.id!r} has `tools`, but is completed raw; give `messages`."
            )
        return list(tokenizer(prompt.prompt)["input_ids"])
    if tokenizer.chat_template is None:
        raise PromptError(
            f"Prompt {prompt.id!r} has `messages`, but the target's tokenizer has no chat "
            "template; give `prompt` instead, or a target with a template."
        )
    from jinja2 import TemplateError

    _refuse_unread(prompt, tokenizer.get_chat_template(tools=prompt.tools))

    def rendered(turns: list[dict[str, Any]]) -> str:
        text: Any = tokenizer.apply_chat_template(
            turns,
            tools=None if prompt.tools is None else [*prompt.tools],
            add_generation_prompt=True,
            tokenize=False,
            **(prompt.chat_template_kwargs or {}),
        )
        return str(text)

    turns = prompt.messages
    try:
        text = rendered(turns)
    except (TemplateError, TypeError) as error:  # TypeError: null content where a text is added
        raise PromptError(
            f"Prompt {prompt.id!r}: the target's chat template refuses its `messages` ({error}); "
            "use roles in the order that the template wants."
        ) from error
    for i, turn in enumerate(turns):
        # a template may write a known role's text in another way, and refuse to leave it out
        if turn["role"] in KNOWN:
            continue
        with suppress(TemplateError):
            if rendered(turns[:i] + turns[i + 1 :]) == text:
                raise PromptError(
                    f"Prompt {prompt.id!r}: the target's chat template leaves out the turn of role "
                    f"{turn['role']!r}; use a role that it knows, or remove the turn."
                )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def chat_request(prompt: Prompt) -> dict[str, Any]:
    """The request to a server that renders the messages itself, in OpenAI's chat API."""
    request: dict[str, Any] = {"messages": [_as_sent(turn) for turn in prompt.messages or []]}
    if prompt.tools:  # for the template to show; a call in the answer stays text
        request |= {"tools": prompt.tools, "tool_choice": "none"}
    if prompt.chat_template_kwargs:
        request["chat_template_kwargs"] = prompt.chat_template_kwargs
    return request


def _as_sent(turn: dict[str, Any]) -> dict[str, Any]:
    if not turn.get("tool_calls"):
        return turn
    turn = copy.deepcopy(turn)
    for call in turn["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"].get("arguments", {}))
    return turn


def _refuse_unread(prompt: Prompt, template: str) -> None:
    """Raise PromptError for what the template would leave out without a word."""
    kwargs, turns = prompt.chat_template_kwargs or {}, prompt.messages or []
    calls = any(turn.get("tool_calls") for turn in turns)
    for name in [*kwargs, *["tools"] * bool(prompt.tools), *["tool_calls"] * calls]:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise PromptError(
                f"Prompt {prompt.id!r} has {name!r}, but the target's chat template does not read "
                "it; correct its spelling, or remove it."
            )


def render_set(
    source: str,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    max_new_tokens: int,
    max_prompt_length: int | None = None,
    long_prompts: LongPrompts = "error",
) -> PromptSet:
    """The prompts with their token ids. Prints how many were dropped or cut.

    max_prompt_length: tokens of a prompt; None: what the context leaves. long_prompts: what becomes
    of longer ones. Raises PromptError for a longer one if that is an error, for one without a
    token, if all would be dropped, and for a max_prompt_length that leaves no room for
    `max_new_tokens` in the context.
    """
    fits = context_length - max_new_tokens
    limit = fits if max_prompt_length is None else max_prompt_length
    if limit > fits:
        raise PromptError(
            f"max_prompt_length is {limit}, but with {max_new_tokens} tokens to generate the "
            f"context of {context_length} has room for {fits}; lower it, or generate fewer tokens."
        )
    kept: list[Prompt] = []
    rendered: list[list[int]] = []
    longer = 0
    for prompt in prompts:
        ids = render(prompt, tokenizer)
        if not ids:
            raise PromptError(f"Prompt {prompt.id!r} renders to no token; remove it.")
        if len(ids) > limit:
            longer += 1
            if long_prompts == "error":
                raise PromptError(
                    f"Prompt {prompt.id!r} has {len(ids)} tokens, and {limit} are allowed "
                    f"(max_prompt_length {max_prompt_length}, context {context_length}, "
                    f"{max_new_tokens} to generate); raise max_prompt_length, generate fewer "
                    "tokens, or set long_prompts to drop or truncate_left."
                )
            if long_prompts == "drop":
                continue
            # without its first token many a model writes nonsense
            opening = ids[:1] if ids[0] == tokenizer.bos_token_id else []
            ids = opening + ids[len(ids) - limit + len(opening) :]
        kept.append(prompt)
        rendered.append(ids)
    if prompts and not kept:
        raise PromptError(
            f"All {len(prompts)} prompts of {source!r} are longer than {limit} tokens; raise "
            "max_prompt_length, or give shorter ones."
        )
    if longer:
        done = "dropped" if long_prompts == "drop" else "cut at their beginning"
        print(f"{source}: {longer} of {len(prompts)} prompts longer than {limit} tokens, {done}")
    return PromptSet(source, kept, rendered)
