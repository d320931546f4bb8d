"""The comparison of two vocabularies, and what is wrong with a pair.

A finding has a fix. All differences without effect on the output are one finding, TOK-017. Three
codes are raised elsewhere: 000 and 013 (align/checkpoint.py) when files are read, 015 (compact.py
and drafter.py in eval/decoding/drafters) at loading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from tokenizers import Tokenizer

from align.checkpoint import Checkpoint
from align.token_bytes import Token, is_used
from align.vocab_map import Retokenizer, build_map
from align.vocabulary import SPECIAL_NAMES, Vocabulary

Relation = Literal[
    "identical", "padded", "permuted", "subset", "superset", "intersection", "disjoint"
]
Severity = Literal["fatal", "error", "warning", "info"]

# Keys of a tokenizer.json that are not compared: their tokens are compared, or they are not used.
_NOT_COMPARED = {"version", "truncation", "padding", "added_tokens", "model", "vocab"}
_CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Write a function."},
]
_PROBE = "def f(x):\n\t\treturn x  # é\n    if a == b:\r\n        pass\n\n\n"
LEAK = 0.01  # more probability than this on ids without a token gives a warning
LOST = 0.2  # more probability than this on tokens that only the draft has gives a warning


@dataclass(frozen=True)
class Finding:
    """A problem or a difference of a pair, with its fix.

    severity: fatal (no lossless mapping), error (the unchanged draft would be wrong; the mapping or
    the fix avoids it), warning, info. ids: up to five examples.
    """

    code: str
    severity: Severity
    message: str
    fix: str
    ids: Sequence[int] = ()

    def __str__(self) -> str:
        return f"{self.code} {self.severity.upper()}: {self.message} Fix: {self.fix}."


@dataclass(frozen=True)
class Comparison:
    """The comparison of a target's and a draft's vocabulary."""

    target: Vocabulary
    draft: Vocabulary

    @property
    def both(self) -> tuple[Vocabulary, Vocabulary]:
        return self.target, self.draft

    @property
    def each(self) -> tuple[Vocabulary, ...]:
        """Both vocabularies; only one if the draft has the target's."""
        return (self.target,) if self.draft is self.target else self.both

    @cached_property
    def differing(self) -> list[int]:
        """Ids that both vocabularies use for different bytes."""
        tokens = zip(self.target.tokens, self.draft.tokens, strict=False)
        return [i for i, (a, b) in enumerate(tokens) if is_used(a) and is_used(b) and a[1] != b[1]]

    @cached_property
    def relation(self) -> Relation:
        """The relation of the draft's vocabulary to the target's (subset: the draft has fewer)."""
        target, draft = self.both
        placed = [
            {(i, token[1]) for i, token in enumerate(side.tokens) if is_used(token)}
            for side in self.both
        ]
        if placed[0] == placed[1]:
            rows = [(len(side.tokens), side.vocab_size) for side in self.both]
            return "identical" if rows[0] == rows[1] else "padded"
        if target.used == draft.used:
            return "permuted"
        if draft.used < target.used:
            return "subset"
        if draft.used > target.used:
            return "superset"
        shared = any(kind == "normal" for kind, _ in target.used & draft.used)
        return "intersection" if shared else "disjoint"

    def coverage(self, texts: Sequence[str]) -> float:
        """Share of the target's tokens (in the texts, if there are any) that the draft has, too."""
        target, draft = self.both
        # verbose: transformers would warn of texts longer than its model_max_length
        encoded = target.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        tokens = [target.token(i) for ids in encoded["input_ids"] for i in ids] or [*target.used]
        return sum(token in draft.used for token in tokens) / max(len(tokens), 1)


def find(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    """The findings from the tokenizer and config files of a pair."""
    yield from _ids(pair, strategy)
    for side in pair.each:
        yield from _entries(side)
        yield from _splitting(side)
    yield from _ends(pair.target)
    yield from _template(pair.target)
    if not pair.draft.head_is_plain:
        addition = "a bias" if pair.draft.head_bias else str(pair.draft.logit_changes)
        yield Finding(
            "TOK-012",
            "warning",
            f"The head of {pair.draft.spec} has {addition}. Training, new entries and trimmed "
            "entries do not support it.",
            "measure the unchanged draft (eval.run), or name another draft to train",
        )
    lengths = [side.config.get("max_position_embeddings") or 0 for side in pair.both]
    if 0 < lengths[1] < lengths[0]:
        yield Finding(
            "TOK-019",
            "warning",
            f"The draft reads up to {lengths[1]} tokens, the target {lengths[0]}. vLLM 0.33 cuts "
            "the context of its server to the draft's.",
            "raise max_position_embeddings in the draft's config.json, or serve with that context",
        )
    if names := [*differences(pair)]:
        yield Finding(
            "TOK-017",
            "info",
            f"Differences without effect on the output: {', '.join(names)}.",
            "none is needed, because the target's tokenizer, stops and template serve both",
        )


def _ids(pair: Comparison, strategy: str | None) -> Iterator[Finding]:
    target, draft, differing = pair.target, pair.draft, pair.differing
    if pair.relation == "disjoint":
        yield Finding(
            "TOK-001",
            "fatal",
            f"{len(target.used)} and {len(draft.used)} tokens have no text token in common.",
            "name a draft with tokens for the same characters, or omit draft to prune the target",
        )
    elif differing:
        i = differing[0]
        yield Finding(
            "TOK-001",
            "error",
            f"{len(differing)} of {len(target.tokens)} ids differ ({i} is {show(target.tokens[i])} "
            f"for the target, {show(draft.tokens[i])} for the draft).",
            f"strategy {strategy}" if strategy else "restore the missing entries first (TOK-002)",
            differing[:5],
        )


def _entries(side: Vocabulary) -> Iterator[Finding]:
    """Ids without an entry in embedding or head, and special names without a token."""
    if side.vocab_size < side.count:
        yield Finding(
            "TOK-002",
            "fatal",
            f"{side.spec} has ids up to {side.count - 1}, but vocab_size {side.vocab_size} in its "
            "config.json.",
            "restore the tokenizer the model was trained with, or resize its embeddings",
            [side.count - 1],
        )
    for name, i in side.special_ids.items():
        if i is None and getattr(side.tokenizer, name) is not None:
            yield Finding(
                "TOK-006",
                "error",
                f"{side.spec} names a {name} that its vocabulary does not have.",
                f"correct {name} in tokenizer_config.json",
            )


def _splitting(side: Vocabulary) -> Iterator[Finding]:
    """transformers may replace the rules of tokenizer.json by those of the tokenizer class."""
    path = side.folder / "tokenizer.json"
    if not path.is_file():
        return
    of_file = Tokenizer.from_file(str(path))
    of_file.no_padding()
    content = json.loads(of_file.to_str())
    replaced = [k for k in ("normalizer", "pre_tokenizer") if content[k] != side.backend[k]]
    if not replaced and of_file.encode("a").ids != side.tokenizer.encode("a"):
        replaced = ["post_processor"]
    if replaced:
        yield Finding(
            "TOK-003",
            "warning",
            f"The tokenizer class {type(side.tokenizer).__name__} of {side.spec} reads texts by "
            f"other rules than its tokenizer.json ({', '.join(replaced)}).",
            "set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json if the model "
            "was trained with the rules of the file",
        )


def _ends(target: Vocabulary) -> Iterator[Finding]:
    if target.suffix:
        yield Finding(
            "TOK-006",
            "error",
            f"The target's tokenizer ends every text, a prompt too, with "
            f"{show(target.token(target.suffix[0]))}.",
            "set add_eos_token to false in tokenizer_config.json and correct tokenizer.json",
            target.suffix,
        )
    if not target.all_stops:
        yield Finding(
            "TOK-007",
            "error",
            "No token ends a text of the target: neither tokenizer nor configs name one.",
            "set eos_token_id in its generation_config.json",
        )


def _template(target: Vocabulary) -> Iterator[Finding]:
    if target.chat_template is None:
        names = ", ".join(sorted(target.tokenizer.chat_template or ()))
        none = "The target has no chat template to render messages with."
        named = f"The target has chat templates by name ({names}), but none is named default."
        yield Finding(
            "TOK-009",
            "warning",
            named if names else none,
            "use prompts given as text, or add a chat_template.jinja to the target",
        )
        return
    try:
        target.tokenizer.apply_chat_template(_CHAT, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template raises whatever its expressions do
        yield Finding(
            "TOK-009",
            "warning",
            f"The target's chat template cannot render a system and a user message ({error}).",
            "leave system messages out of the prompts, or correct the template",
        )


def differences(pair: Comparison) -> Iterator[str]:
    """Names of differences without effect on the output; they may lower acceptance."""
    target, draft = pair.both
    for name in SPECIAL_NAMES:
        if target.special_ids[name] != draft.special_ids[name]:
            yield name
    if target.bytes_of(target.prefix) != draft.bytes_of(draft.prefix):
        yield "tokens before a text"
    if {*map(target.token, target.all_stops)} != {*map(draft.token, draft.all_stops)}:
        yield "stop tokens"
    if target.chat_template != draft.chat_template:
        yield "chat template"
    if pair.relation in ("identical", "padded", "permuted"):  # others split texts differently
        parts = [side.backend | side.backend["model"] for side in pair.both]
        names = sorted((parts[0].keys() | parts[1].keys()) - _NOT_COMPARED)
        yield from (name for name in names if parts[0].get(name) != parts[1].get(name))


def find_by_weights(target: Checkpoint, draft: Checkpoint, strategy: str) -> Iterator[Finding]:
    """TOK-016: faults of the models' probabilities on a probe text; TOK-018: a head of its own
    beside a flag of tied weights. Loads one model at a time.
    """
    retokenizer = None
    if strategy not in ("direct", "padded"):
        both = target.vocabulary, draft.vocabulary
        retokenizer = Retokenizer(build_map(*both), *both)
    text = target.tokenizer.encode(_PROBE)
    for side in (target, draft):
        ids = retokenizer.from_start(text) if retokenizer and side is draft else text
        model = side.load(torch.float32)
        configs = side.text_config, model.config.get_text_config()
        if [config.to_dict().get("tie_word_embeddings") for config in configs] == [True, False]:
            yield Finding(
                "TOK-018",
                "warning",
                f"{side.spec} has a head of its own, but tie_word_embeddings is true, and some "
                "engines would drop the head.",
                "set tie_word_embeddings to false in its config.json",
            )
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        p = logits.softmax(-1).mean(0).numpy()
        if not np.isfinite(p).all():
            yield Finding(
                "TOK-016",
                "fatal",
                f"The logits of {side.spec} on a probe text are not finite.",
                "its weights are damaged: fetch or copy them again",
            )
        unused = [i for i in range(len(p)) if not is_used(side.vocabulary.token(i))]
        if (mass := p[unused].sum()) > LEAK:
            yield Finding(
                "TOK-016",
                "warning",
                f"{side.spec} gives {mass:.1%} of its probability to ids without a token.",
                "set their rows in the head, often zeros, to a row that is never likely",
                sorted(unused, key=lambda i: -p[i])[:5],
            )
        if retokenizer and side is draft:
            lost = 1 - p[retokenizer.vocab_map.mapped.numpy()].sum()
            if lost > LOST:
                yield Finding(
                    "TOK-016",
                    "warning",
                    f"The draft gives {lost:.1%} of its probability to tokens the target lacks.",
                    "train it: strategy auto transplants it onto the target's vocabulary",
                )


def show(token: Token | None) -> str:
    """A token as a finding names it."""
    return "none" if token is None else repr(token[1].decode("utf-8", "backslashreplace"))
