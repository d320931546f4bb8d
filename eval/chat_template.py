"""Renders prompts to token ids with the target's chat template."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from eval.prompts import EXAMPLE, KNOWN, Prompt, PromptError, PromptSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PLACE = "{prompt}"  # replaced by the prompt in an instruction
CODE, DOCSTRING = "{code}", "{docstring}"  # replaced by the parts of a Python function to write

LongPrompts = Literal["error", "drop", "truncate_left"]


def in_chat_form(
    prompts: Iterable[Prompt],
    instruction: str | None,
    chat_template: object,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Prompt]:
    """The prompts for a target with this chat template (None: a base model).

    Each `prompt` becomes a user's message: the instruction with the prompt at PLACE. If the
    instruction has CODE and DOCSTRING, they are replaced by the parts of the prompt (`split_task`).
    `messages` stay unchanged; without an instruction or a template, all prompts do.
    template_kwargs: defaults for `chat_template_kwargs` of messages.
    Raises PromptError for an instruction without a place for the prompt, for a prompt that cannot
    be split, and for template_kwargs if all prompts are completed raw.
    """
    instructed = list(prompts)
    if instruction is not None and chat_template:
        instructed = [_asked(prompt, instruction) for prompt in instructed]
    if not template_kwargs or not instructed:
        return instructed
    if not any(prompt.messages for prompt in instructed):
        raise PromptError(
            f"chat_template_kwargs is {template_kwargs}, but all prompts are completed raw. Give "
            "`messages`, set instruction for a target with a chat template, or omit it."
        )
    for i, prompt in enumerate(instructed):
        if prompt.messages is not None:
            kwargs = template_kwargs | (prompt.chat_template_kwargs or {})
            instructed[i] = replace(prompt, chat_template_kwargs=kwargs)
    return instructed


def _asked(prompt: Prompt, instruction: str) -> Prompt:
    if prompt.prompt is None:
        return prompt
    parts = {PLACE: prompt.prompt}
    if CODE in instruction and DOCSTRING in instruction:
        task = split_task(prompt.prompt)
        if task is None:
            raise PromptError(
                f"Prompt {prompt.id!r} is not a Python function with a docstring, but the "
                f"instruction has {CODE} and {DOCSTRING}; write {PLACE} instead."
            )
        parts = dict(zip((CODE, DOCSTRING), task, strict=True))
    elif PLACE not in instruction:
        raise PromptError(
            f"instruction is {instruction!r}, so the prompt would be missing; write {PLACE} at its "
            f"place, or {CODE} and {DOCSTRING} for Python functions."
        )
    # one pass, so that `{prompt}` within a prompt is not replaced
    content = re.sub("|".join(map(re.escape, parts)), lambda place: parts[place[0]], instruction)
    return replace(prompt, prompt=None, messages=[{"role": "user", "content": content}])


def split_task(prompt: str) -> tuple[str, str] | None:
    """A prompt's code without the docstring of its last function, and this docstring.

    None if the prompt does not end in a function whose body is a docstring, after imports at most.
    """
    try:
        last = ast.parse(prompt).body[-1]
    # not Python, a null byte, only comments, or nested too deeply for the parser
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
    lines = re.split("\r\n?|\n", prompt)[: end.lineno - 1]  # as the parser counts lines
    return "\n".join(lines).strip("\n"), inspect.cleandoc(docstring)


def render(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The token ids of one prompt; no BOS is added to messages, because the template writes it.

    Raises PromptError if the tokenizer's template cannot render the prompt completely.
    """
    if prompt.messages is None:
        if prompt.tools:
            raise PromptError(
                f"Prompt {prompt.id!r} has `tools`, but it is completed raw; give `messages`."
            )
        return list(tokenizer(prompt.prompt)["input_ids"])
    refuse_without_template(prompt, tokenizer.chat_template)
    try:
        template = tokenizer.get_chat_template(tools=prompt.tools)
    except ValueError:
        raise PromptError(
            f"Prompt {prompt.id!r}: the target's tokenizer has chat templates by name "
            f"({', '.join(tokenizer.chat_template or ())}), but none is named default; rename the "
            "one that you serve."
        ) from None
    _refuse_unread(prompt, template)
    turns = prompt.messages
    try:
        text = _rendered(prompt, turns, tokenizer)
    except Exception as error:  # a template raises whatever its expressions do
        raise PromptError(
            f"Prompt {prompt.id!r}: the target's chat template refuses its `messages` ({error}); "
            "use the roles and their order that the template requires."
        ) from error
    for i, turn in enumerate(turns):
        # known roles are not checked: templates may move or change such turns, or need them
        if turn["role"] in KNOWN:
            continue
        # compared with other text, because a turn may say what is the default ("/think")
        other = turn | {"content": EXAMPLE}
        if _rendered(prompt, [*turns[:i], other, *turns[i + 1 :]], tokenizer) == text:
            raise PromptError(
                f"Prompt {prompt.id!r}: the target's chat template drops the turn of role "
                f"{turn['role']!r}; use a role that the template knows, or remove the turn."
            )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def refuse_without_template(prompt: Prompt, chat_template: object) -> None:
    """Raise PromptError for `messages` if the target has no chat template."""
    if prompt.messages is not None and chat_template is None:
        raise PromptError(
            f"Prompt {prompt.id!r} has `messages`, but the target's tokenizer has no chat "
            "template; give `prompt` instead, or a target with a template."
        )


def _rendered(
    prompt: Prompt,
    turns: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    asks: bool = True,
) -> str:
    """The text of these turns with the prompt's tools. asks: whether an output follows them."""
    text: Any = tokenizer.apply_chat_template(
        turns,
        tools=None if prompt.tools is None else [*prompt.tools],
        add_generation_prompt=asks,
        tokenize=False,
        **(prompt.chat_template_kwargs or {}),
    )
    return str(text)


def render_output(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase, stops: Container[int]
) -> list[int] | None:
    """The token ids of a prompt's logged message, with its stop token unless it is cut.

    The template renders the message after the prompt's turns, with its tool calls and reasoning.
    None if the template does not render the prompt's text before it.
    """
    assert prompt.messages is not None
    assert prompt.logged_output is not None
    message, cut = prompt.logged_output["message"], prompt.logged_output.get("cut")
    ids = _added(prompt, prompt.messages, message, tokenizer, asks=True)
    if ids is None:
        return None
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    if not cut and end == len(ids):
        # GLM ends an output with the token of the next role. Another text stands for this one,
        # because templates drop the reasoning of earlier turns.
        turn = {key: message[key] for key in ("role", "tool_calls") if message.get(key)}
        turns = [*prompt.messages, turn | {"content": EXAMPLE}]
        following = {"role": "tool" if "tool_calls" in turn else "user", "content": EXAMPLE}
        after = _added(prompt, turns, following, tokenizer, asks=False) or []
        ids += [token for token in after[:1] if token in stops]
    return ids[: end + (not cut)]


def _added(
    prompt: Prompt,
    turns: list[dict[str, Any]],
    turn: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    asks: bool,
) -> list[int] | None:
    """The token ids by which a further turn makes the text longer; None if it changes the text."""
    try:
        before = _rendered(prompt, turns, tokenizer, asks)
        text = _rendered(prompt, [*turns, turn], tokenizer, asks=False)
    except Exception:  # a template raises whatever its expressions do
        return None
    if not text.startswith(before):
        return None
    read, whole, alone = (
        list(tokenizer(part, add_special_tokens=False)["input_ids"])
        for part in (before, text, text.removeprefix(before))
    )
    # alone, SentencePiece puts a space before the text
    return whole[len(read) :] if whole[: len(read)] == read else alone


def _refuse_unread(prompt: Prompt, template: str) -> None:
    """Raise PromptError for parts of the prompt that the template would silently ignore."""
    kwargs, turns = prompt.chat_template_kwargs or {}, prompt.messages or []
    calls = any(turn.get("tool_calls") for turn in turns)
    for name in [*kwargs, *["tools"] * bool(prompt.tools), *["tool_calls"] * calls]:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise PromptError(
                f"Prompt {prompt.id!r} has {name!r}, but the target's chat template does not use "
                "it; correct the name, or remove it."
            )


def render_set(
    source: str,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    max_new_tokens: int,
    max_prompt_length: int | None = None,
    long_prompts: LongPrompts = "error",
    vocab_size: float = math.inf,
) -> PromptSet:
    """The prompts with their token ids. Prints how many prompts were dropped or cut.

    A prompt that begins with the BOS loses it if the tokenizer writes one.
    max_prompt_length: in tokens; None: context_length - max_new_tokens. long_prompts: the treatment
    of longer prompts. vocab_size: entries of the target's embedding. Raises PromptError for a
    longer prompt if long_prompts is "error", for a prompt without tokens or with one that has no
    entry, if all prompts would be dropped, and for a max_prompt_length that leaves no room for
    `max_new_tokens` in the context.
    """
    fits = context_length - max_new_tokens
    limit = fits if max_prompt_length is None else max_prompt_length
    if limit > fits:
        raise PromptError(
            f"max_prompt_length is {limit}, but the context of {context_length} has room for "
            f"{fits} besides {max_new_tokens} new tokens; lower one of the two numbers."
        )
    kept: list[Prompt] = []
    rendered: list[list[int]] = []
    longer = 0
    for prompt in prompts:
        ids = render(prompt, tokenizer)
        if prompt.prompt and ids[:2] == [tokenizer.bos_token_id] * 2:  # it was rendered before
            ids = ids[1:]  # servers get the text, and write a BOS, too
            prompt = replace(prompt, prompt=prompt.prompt.removeprefix(str(tokenizer.bos_token)))
        if not ids:
            raise PromptError(f"Prompt {prompt.id!r} renders to no tokens; remove it.")
        if max(ids) >= vocab_size:
            raise PromptError(
                f"Prompt {prompt.id!r} has the token {tokenizer.decode(max(ids))!r}, for which the "
                "target's embedding has no entry; remove it from the prompt."
            )
        if len(ids) > limit:
            longer += 1
            if long_prompts == "error":
                raise PromptError(
                    f"Prompt {prompt.id!r} has {len(ids)} tokens, but {limit} are allowed "
                    f"(max_prompt_length {max_prompt_length}, context {context_length}, "
                    f"max_new_tokens {max_new_tokens}). Raise max_prompt_length, lower "
                    "max_new_tokens, or set long_prompts to drop or truncate_left."
                )
            if long_prompts == "drop":
                continue
            # many models generate nonsense without BOS, so it is kept
            opening = ids[:1] if ids[0] == tokenizer.bos_token_id else []
            ids = opening + ids[len(ids) - limit + len(opening) :]
        kept.append(prompt)
        rendered.append(ids)
    if prompts and not kept:
        raise PromptError(
            f"All {len(prompts)} prompts of {source!r} are longer than {limit} tokens; raise "
            "max_prompt_length, or give shorter prompts."
        )
    if longer:
        done = "dropped" if long_prompts == "drop" else "cut at their beginning"
        print(f"{source}: {longer} of {len(prompts)} prompts longer than {limit} tokens, {done}")
    return PromptSet(source, kept, rendered, chat_template=bool(tokenizer.chat_template))
