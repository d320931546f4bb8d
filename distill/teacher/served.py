"""Outputs of a target behind an OpenAI-compatible server; its weights are never loaded here.

A request has the prompt's token ids. The response has token ids, each with the ids and
log-probabilities of the most likely tokens at its position, as vLLM's /v1/completions returns them
(`return_tokens_as_token_ids`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from pydantic import BaseModel, Field, ValidationError
from tqdm import tqdm

from align.sources import load_tokenizer, read_json
from align.vocabulary import Vocabulary
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.teacher.answers import (
    ANSWERS_PER_SHARD,
    USED,
    describe,
    to_answer,
    what_decides_answers,
)
from distill.teacher.store import Answers, CachedAnswer, Store, bytes_per_token, names_of
from eval.decoding.loop import seed_of
from eval.engines.server import PATIENT, UNPENALISED, Server, ServerError, token_ids

TIMEOUT = 600.0  # seconds for one whole answer, which is sent when it has ended
UNCHANGED = {"top_p": 1.0, "top_k": -1, **UNPENALISED}
ROUNDING = 1e-3  # of log-probabilities and of their mass
MASKED = -9000.0  # no softmax goes so low: vLLM writes -9999 for minus infinity
WITNESSES = 4
# Mean difference of the witnesses' log-probabilities, in nats, from which on it is another model:
# SmolLM2-135M in bf16 is off its fp32 self by 0.09 at most, with noise of 2% on its weights by 0.23
# at least (40 code prompts, four at a time).
ANOTHER_MODEL = 0.2
TEXT = "Ærø, 東京 🙂\n\tdef f(x):  # 3.14159 × 10⁶\n\n    return x['key'] or ''  "


Array = np.ndarray[Any, Any]


class _Logprobs(BaseModel):
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Completion(BaseModel):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


@dataclass(frozen=True)
class Request:
    """A request to a server, and the check of its response.

    top: log-probabilities of each token. rows: of the target's vocabulary.
    """

    model: str
    temperature: float
    max_tokens: int
    top: int
    stops: frozenset[int]
    rows: int

    def body(self, prompt: list[int] | str, seed: int = 0) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "add_special_tokens": False,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "stop_token_ids": sorted(self.stops),
            "logprobs": self.top,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            **UNCHANGED,
        }

    def read(self, sent: Any, index: int, prompt: list[int]) -> CachedAnswer:
        """The answer in the form of our own. Raises ServerError for one that was not asked for.

        sent: the JSON of /v1/completions.
        """
        try:
            completion = _Completion.model_validate(sent)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerError(
                f"it is no completion with log-probabilities ({where}: {first['msg']}); use vLLM"
            ) from None
        logprobs = completion.choices[0].logprobs
        tokens = token_ids(logprobs.tokens)
        for fault in self._faults(completion, tokens, prompt):
            raise ServerError(fault)
        ids, values = self._top(logprobs.top_logprobs)
        if self.temperature == 0:
            chosen = np.where(ids == np.array(tokens)[:, None], values, -np.inf).max(1)
            if (wrong := (chosen < values[:, 0] - ROUNDING).nonzero()[0]).size:
                raise ServerError(
                    f"token {tokens[wrong[0]]} was chosen greedily and is not the most likely one; "
                    "switch off what changes the distribution there (a penalty, a mask)"
                )
        return CachedAnswer(
            index=index,
            prompt_ids=torch.tensor(prompt),
            response_ids=torch.tensor(tokens),
            top_ids=torch.from_numpy(ids),
            top_logprobs=torch.from_numpy(values).float(),
        )

    def _faults(
        self, completion: _Completion, tokens: list[int], prompt: list[int]
    ) -> Iterator[str]:
        """Faults of a response's model, prompt or length."""
        choice = completion.choices[0]
        if completion.model != self.model:
            yield f"it comes from model {completion.model!r}; name the target with answer_model"
        if choice.prompt_token_ids not in (None, prompt):
            yield "the prompt's tokens are others there; serve it without a limit on prompts"
        count = len(choice.logprobs.top_logprobs)
        if len(tokens) != count or choice.token_ids not in (None, tokens):
            cut = f"{len(tokens)} tokens, {count} distributions, or other token ids"
            yield f"it was cut: {cut}; use vLLM"
        if choice.finish_reason == "length" and len(tokens) != self.max_tokens:
            yield (
                f"it ended by length after {len(tokens)} of {self.max_tokens} tokens; raise "
                "--max-model-len"
            )
        ended = [i for i, token in enumerate(tokens) if token in self.stops]
        if ended[:1] not in ([], [len(tokens) - 1]):
            yield f"it goes on after stop token {tokens[ended[0]]}; serve without min_tokens"
        if choice.finish_reason == "stop" and not ended:
            yield (
                f"it ends at none of the target's stop tokens ({sorted(self.stops)}): the server "
                "leaves the stop token out, so that ending would not be learned; use vLLM"
            )

    def _top(self, rows: list[dict[str, float]]) -> tuple[Array, Array]:
        """Ids and log-probabilities [R, top] of the most likely tokens, best first."""
        # a row has the chosen token as well where that is none of the most likely
        counts = np.array([len(row) for row in rows])
        if counts.min() < self.top:
            raise ServerError(
                f"it has {counts.min()} log-probabilities a token, and {self.top} were asked for; "
                f"lower cache_top_k, or serve with --max-logprobs {self.top}"
            )
        named = np.arange(counts.max()) < counts[:, None]
        ids = np.full(named.shape, -1)
        ids[named] = token_ids(key for row in rows for key in row)
        logprobs = np.full(named.shape, -np.inf)
        logprobs[named] = [p for row in rows for p in row.values()]
        if (odd := ~((logprobs > MASKED) & (logprobs <= ROUNDING)) & named).any():
            raise ServerError(
                f"{logprobs[odd][0]} is no log-probability: above 0 is a logit, below {MASKED:g} a "
                "masked token, NaN an overflow; serve with --logprobs-mode raw_logprobs"
            )
        in_order = np.sort(ids, axis=1)
        if ((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)).any():
            raise ServerError("it names an id twice at one token; use another server")
        if ids.max() >= self.rows:
            raise ServerError(
                f"token {ids.max()} is beyond the {self.rows} rows of the target's vocabulary; "
                "serve the target of this recipe"
            )
        best = np.argsort(-logprobs, axis=1, kind="stable")[:, : self.top]
        ids, logprobs = (np.take_along_axis(part, best, axis=1) for part in (ids, logprobs))
        if (mass := float(np.exp(logprobs).sum(1).max())) > 1 + ROUNDING:
            raise ServerError(
                f"probabilities sum to {mass:.3f}; serve with --logprobs-mode raw_logprobs"
            )
        return ids, np.minimum(logprobs, 0)


def _difference(before: CachedAnswer, now: CachedAnswer) -> float:
    """Mean difference of the first token's log-probabilities, in nats, over the tokens of `before`.

    A token that `now` does not name counts as likely as the last token that it names.
    """
    logprobs = dict(zip(now.top_ids[0].tolist(), now.top_logprobs[0].tolist(), strict=True))
    lowest = min(logprobs.values())
    pairs = zip(before.top_ids[0].tolist(), before.top_logprobs[0].tolist(), strict=True)
    gaps = [abs(p - logprobs.get(token, min(p, lowest))) for token, p in pairs]
    return sum(gaps) / len(gaps)


class ServedTarget:
    """The target of a recipe behind `answer_url`.

    prompts: those that are held out, then the training prompts. names: of their responses in the
    store. held_out: names of the held-out prompts' responses.
    """

    by = "server"
    patience = PATIENT  # with a request that failed

    def __init__(self, recipe: Recipe, target: Vocabulary, prompts: Prompts) -> None:
        self.recipe, self.target = recipe, target
        self.texts = [prompt.text for prompt in prompts.training.prompts]
        training = to_answer(recipe, prompts.training.ids)
        self.prompts = [*prompts.held_out.ids, *training]
        self.held_out = names_of(prompts.held_out.ids)
        self.names = [*self.held_out, *names_of(training)]
        self.witnesses: list[CachedAnswer] = []  # their first tokens show another model

    @cached_property
    def server(self) -> Server:
        assert self.recipe.answer_url is not None
        return self._server(self.recipe.answer_url, self.recipe.answer_model)

    def _server(self, url: str, model: str | None = None) -> Server:
        connections = self.recipe.answer_batch_size + 1  # and the witnesses'
        return Server(url, TIMEOUT, model, connections)

    def close(self) -> None:
        """Nothing: the server is not this run's."""

    def check(self) -> None:
        """Refuse a server that does not fit, before anything is made.

        Nothing is asked where all answers are there. Raises ServerError with value, reason and
        remedy.
        """
        if self._unanswered():
            self._check_server()

    def _check_server(self) -> None:
        self._check_tokenizer()
        request = self._request()
        # a whole answer to the longest prompt shows everything that an answer can lack
        longest = max(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        self._ask(longest, request)
        self._check_stop(self.prompts[longest])
        # other runs' prompts may be longer than the server was started for
        room = len(self.prompts[longest])
        fit = (name for name in self.store if self.store.rows(name, "prompt_ids") <= room)
        cached = Answers(self.store, list(islice(fit, WITNESSES)))
        # at temperature 1 they are raw however the server takes them
        first = replace(request, max_tokens=1, temperature=1.0)
        self.witnesses = list(cached) or [
            self._completed(prompt, first) for prompt in self.prompts[:WITNESSES]
        ]
        self._check_witnesses()

    def describe(self) -> int:
        """Print what is left to answer and what it will weigh; exit status 0.

        How long the server takes, and what a draft costs beside it, cannot be told from here.
        """
        tokens = len(self._unanswered()) * self.recipe.answer_max_new_tokens
        each = bytes_per_token(self.recipe.cache_top_k, self.target.rows)
        print(f"{self.server.url} serves {self.server.model!r} and fits this recipe")
        print(
            f"answers: {tokens} tokens at most, {tokens * each / 2**20:.0f} MiB on disk; how long "
            "they take is the server's affair"
        )
        return 0

    def answers(self, count: int | None = None) -> Answers:
        """Responses to the first `count` training prompts, in their order.

        The held-out prompts are answered as well. Responses in the store are not asked for again.
        The main process asks, the others wait. Raises ServerError when the server fails for too
        long, sends what it must not, or serves another model midway; what was kept by then stays.
        """
        clock = time.monotonic()
        first = len(self.held_out)
        names = self.names[first:][:count]
        missing = self._unanswered(first + len(names))
        if PartialState().is_main_process and missing:
            self._answer(missing)
        PartialState().wait_for_everyone()
        self.store.refresh()
        answers = Answers(self.store, names)
        describe(answers, answers.response_lengths)
        if PartialState().is_main_process:
            print(
                f"{len(missing)} of {first + len(names)} answers made in "
                f"{time.monotonic() - clock:.0f} s"
            )
        return answers

    def _answer(self, unanswered: list[int]) -> None:
        self.server.retries = self.patience
        request = self._request()
        bar = tqdm(
            total=len(unanswered),
            desc=f"answers of {self.server.url}",
            unit="answer",
            file=sys.stderr,
        )
        with bar, ThreadPool(min(self.recipe.answer_batch_size, len(unanswered))) as pool:
            answers = pool.imap_unordered(lambda i: self._ask(i, request), unanswered)
            while shard := list(islice(answers, ANSWERS_PER_SHARD)):
                self._check_witnesses()  # so the answers before it are the same model's
                packed = {self.names[a.index]: a.packed(self.target.rows) for a in shard}
                self.store.append(packed, self.by)
                bar.update(len(shard))

    def _request(self) -> Request:
        return Request(
            self.server.model,
            self.recipe.answer_temperature,
            self.recipe.answer_max_new_tokens,
            self.recipe.cache_top_k,
            frozenset(self.target.all_stops),
            self.target.rows,
        )

    def _ask(self, index: int, request: Request) -> CachedAnswer:
        """The answer to prompt `index`; its random numbers depend on its name and the seed."""
        seed = seed_of(self.recipe.seed, self.names[index])
        return self._completed(self.prompts[index], request, index, seed)

    def _completed(
        self, prompt: list[int], request: Request, index: int = 0, seed: int = 0
    ) -> CachedAnswer:
        sent = self.server.ask("/v1/completions", request.body(prompt, seed), f" to prompt {index}")
        try:
            return request.read(sent, index, prompt)
        except ServerError as error:
            raise ServerError(
                f"{self.server.url}, answer to prompt {index} ({len(prompt)} tokens): {error}. "
                "Nothing of it was kept."
            ) from None

    # --- what is there already

    @cached_property
    def store(self) -> Store:
        """The store of the served model. Raises ServerError for another model than is asked for."""
        if (used := self.recipe.folder / USED).exists():
            store = Store.of(read_json(used)["key"])
            if all(name in store for name in self.names):
                return store  # whether the server still runs or not
        name, root = self.server.model, self._entry().get("root") or "not told"
        served = {
            "target weights": f"served as {name}, root {root}",
            "served model": name,
            "dtype": "of the server",
        }
        return Store.of(served | what_decides_answers(self.recipe, self.target))

    def _unanswered(self, count: int | None = None) -> list[int]:
        """Those of the first prompts that have no cached output."""
        return [i for i, name in enumerate(self.names[:count]) if name not in self.store]

    # --- what is refused

    def _entry(self) -> dict[str, Any]:
        """The target as the server lists it. Raises ServerError where it is not there."""
        server, entries = self.server, {entry["id"]: entry for entry in self.server.models}
        if server.asked_model is None and len(entries) > 1:
            raise ServerError(
                f"{server.url} serves {', '.join(entries)}; name the target with answer_model."
            )
        if server.model not in entries:
            raise ServerError(
                f"{server.url} serves {', '.join(entries)}, not {server.model!r}; correct "
                "answer_model or answer_url, or leave answer_model null."
            )
        return entries[server.model]

    def _check_tokenizer(self) -> None:
        """Refuse a server that cuts a few texts into other token ids."""
        tokenizer = load_tokenizer(self.target.spec)
        for text in [TEXT, *self.texts[:8]]:
            own_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            body = replace(self._request(), max_tokens=1).body(text)
            sent = self.server.ask("/v1/completions", body, " to a text")
            server_ids = sent["choices"][0].get("prompt_token_ids")
            if not isinstance(server_ids, list):
                raise ServerError(
                    f"{self.server.url} does not tell how it cuts a text into tokens "
                    "(return_token_ids), so that its ids may mean anything; use vLLM 0.10.2 or "
                    "later."
                )
            if own_ids != server_ids:
                raise ServerError(
                    f"{self.server.url} cuts {text[:40]!r}… into {server_ids[:8]}…, the tokenizer "
                    f"of {self.target.spec!r} into {own_ids[:8]}…: its ids mean other tokens. "
                    "Serve the target of this recipe."
                )

    def _check_stop(self, prompt: list[int]) -> None:
        """Refuse a server that leaves the stop token out: the first token is made a stop token."""
        first = replace(self._request(), max_tokens=1, temperature=0.0)
        stops = frozenset(self._completed(prompt, first).top_ids[0, :1].tolist())
        self._completed(prompt, replace(self._request(), temperature=0.0, stops=stops))

    def _check_witnesses(self) -> None:
        """The model is the one whose answers are kept, and gives raw log-probabilities.

        They are asked for at the temperature of the answers, which must not change them.
        """
        first = replace(self._request(), max_tokens=1)
        moved = [
            _difference(w, self._completed(w.prompt_ids.tolist(), first)) for w in self.witnesses
        ]
        if (mean := sum(moved) / len(moved)) > ANOTHER_MODEL:
            raise ServerError(
                f"{self.server.url} gives log-probabilities that differ by {mean:.2f} nats from "
                f"earlier ones of {self.server.model!r} at the same {len(moved)} prompts: it is "
                "another model now, or they come after the temperature. Serve the first model "
                "again, or this one under another --served-model-name; in vLLM with "
                "--logprobs-mode raw_logprobs."
            )
