"""Outputs of a target behind an OpenAI-compatible server; its weights are never loaded here.

A request has the prompt's token ids. The response has token ids, each with the ids and
log-probabilities of the most likely tokens at its position, as vLLM's /v1/completions returns them
(`return_tokens_as_token_ids`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from accelerate import PartialState
from pydantic import BaseModel, Field, ValidationError
from tqdm import tqdm

from align.checkpoint import Checkpoint
from align.files import read_json
from align.machine import from_first
from distill.teacher.answers import USED, Answerer, AnsweringTarget, Made, with_own
from distill.teacher.store import Answers, AnswerSettings, CachedAnswer, Record, Store
from eval.decoding.loop import seed_of
from eval.engines.server import PATIENT, UNPENALISED, Server, ServerError, token_ids

# Smallest timeout in seconds. A server sends only complete outputs, so a longer output gets one
# second for each of its tokens.
TIMEOUT = 600.0
UNCHANGED = {"top_p": 1.0, "top_k": -1, **UNPENALISED}
ROUNDING = 1e-3  # largest rounding error of a log-probability, and of the mass of all
MASKED = -9000.0  # lower than any softmax: vLLM writes -9999 for minus infinity
WITNESSES = 4
# A larger mean difference of the witnesses' log-probabilities, in nats, means another model.
# SmolLM2-135M in bf16 differs from fp32 by 0.09 at most, and with 2% noise on its weights by 0.23
# at least (40 code prompts, four at a time).
ANOTHER_MODEL = 0.2
TEXT = "Ærø, 東京 🙂\n\tdef f(x):  # 3.14159 × 10⁶\n\n    return x['key'] or ''  "


Array = np.ndarray[Any, Any]


class _Logprobs(BaseModel):
    top_logprobs: list[dict[str, float] | None]  # None at a text's first token


class _Choice(BaseModel):
    finish_reason: Literal["stop", "length"]
    logprobs: _Logprobs
    token_ids: list[int]
    prompt_token_ids: list[int]


class _Completion(BaseModel):
    model: str
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]


@dataclass(frozen=True)
class Request:
    """A request to a server, and the check of its response.

    top: number of log-probabilities per token. vocab_size: of the target.
    """

    model: str
    temperature: float
    max_tokens: int
    top: int
    stops: frozenset[int]
    vocab_size: int

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

    def read(self, sent: Any, prompt: list[int]) -> CachedAnswer:
        """The checked output. Raises ServerError if the response does not fit the request.

        sent: the JSON response of /v1/completions.
        """
        choice = self._choice(sent, prompt)
        for fault in self._faults(choice):
            raise ServerError(fault)
        tokens = choice.token_ids
        ids, values = self._top(choice.logprobs.top_logprobs)
        if self.temperature == 0:
            chosen = np.where(ids == np.array(tokens)[:, None], values, -np.inf).max(1)
            if (wrong := (chosen < values[:, 0] - ROUNDING).nonzero()[0]).size:
                raise ServerError(
                    f"token {tokens[wrong[0]]} was chosen greedily and is not the most likely one; "
                    "switch off what changes the server's distribution (a penalty, a mask)"
                )
        return CachedAnswer(
            prompt_ids=torch.tensor(prompt),
            response_ids=torch.tensor(tokens),
            top_ids=torch.from_numpy(ids),
            top_logprobs=torch.from_numpy(values).float(),
        )

    def body_of_text(self, text: list[int]) -> dict[str, Any]:
        """A request for the log-probabilities within a text, by which nothing is sampled."""
        return self.body(text) | {"echo": True, "max_tokens": 1, "temperature": 1.0}

    def read_text(self, sent: Any, prompt: list[int], output: list[int]) -> CachedAnswer:
        """The checked log-probabilities of a logged output, from the response to `body_of_text`.

        Raises ServerError if the response does not fit the request.
        """
        rows = self._choice(sent, prompt + output).logprobs.top_logprobs
        if len(rows) != (size := len(prompt) + len(output) + 1):
            raise ServerError(f"it has {len(rows)} distributions for {size} tokens; use vLLM")
        distributions = rows[len(prompt) : -1]
        own_logprobs = [
            (row or {}).get(f"token_id:{i}") for row, i in zip(distributions, output, strict=True)
        ]
        if None in own_logprobs:
            raise ServerError("it lacks log-probabilities of the text's own tokens; use vLLM")
        response = torch.tensor(output)
        ids, values = (torch.from_numpy(part) for part in self._top(distributions))
        ids, values = with_own(ids, values.float(), response, torch.tensor(own_logprobs))
        return CachedAnswer(torch.tensor(prompt), response, ids, values)

    def _choice(self, sent: Any, prompt: list[int]) -> _Choice:
        """A response's output. Raises ServerError for another form, model or prompt."""
        try:
            completion = _Completion.model_validate(sent)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerError(
                f"it is not a completion with token ids and log-probabilities ({where}: "
                f"{first['msg']}); use vLLM 0.10.2 or later"
            ) from None
        if completion.model != self.model:
            raise ServerError(
                f"it comes from model {completion.model!r}, not from {self.model!r}; if this is "
                "the target, name it with answer_model"
            )
        choice = completion.choices[0]
        if choice.prompt_token_ids != prompt:
            raise ServerError(
                f"the server reads the prompt as tokens {choice.prompt_token_ids[:8]}… and not "
                f"{prompt[:8]}…; serve the target of this recipe, without a limit on prompts"
            )
        return choice

    def _faults(self, choice: _Choice) -> Iterator[str]:
        """Faults of an output's length or end."""
        tokens = choice.token_ids
        if len(tokens) != (count := len(choice.logprobs.top_logprobs)):
            yield f"it has {len(tokens)} tokens and {count} distributions; use vLLM"
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

    def _top(self, told: Sequence[dict[str, float] | None]) -> tuple[Array, Array]:
        """Ids and log-probabilities [R, top] of the most likely tokens, best first."""
        rows = [row or {} for row in told]
        # a row also has the chosen token if this is not one of the most likely
        counts = np.array([len(row) for row in rows])
        if counts.min() < self.top:
            raise ServerError(
                f"it has {counts.min()} log-probabilities a token, but {self.top} were requested; "
                f"lower cache_top_k, or serve with --max-logprobs {self.top}"
            )
        named = np.arange(counts.max()) < counts[:, None]
        ids = np.full(named.shape, -1)
        ids[named] = token_ids(key for row in rows for key in row)
        logprobs = np.full(named.shape, -np.inf)
        logprobs[named] = [p for row in rows for p in row.values()]
        best = np.argsort(-logprobs, axis=1, kind="stable")[:, : self.top]
        ids, logprobs = (np.take_along_axis(each, best, axis=1) for each in (ids, logprobs))
        mass = np.exp(logprobs).sum(1)
        if not ((logprobs > MASKED).all() and (mass <= 1 + ROUNDING).all()):  # NaN fails, too
            raise ServerError(
                f"its log-probabilities go down to {logprobs.min():g} and their probabilities sum "
                f"to {mass.max():.3g}, so they are not the model's own; serve with "
                "--logprobs-mode raw_logprobs"
            )
        if ids.max() >= self.vocab_size:
            raise ServerError(
                f"token {ids.max()} is beyond the target's vocabulary of {self.vocab_size}; serve "
                "the target of this recipe"
            )
        return ids, np.minimum(logprobs, 0)


def _difference(before: CachedAnswer, now: CachedAnswer) -> float:
    """Mean difference of the first token's log-probabilities, in nats, over the tokens of `before`.

    A token that `now` lacks counts as the lowest one of `now`, or as before if that is lower.
    """
    logprobs = dict(zip(now.top_ids[0].tolist(), now.top_logprobs[0].tolist(), strict=True))
    lowest = min(logprobs.values())
    pairs = zip(before.top_ids[0].tolist(), before.top_logprobs[0].tolist(), strict=True)
    gaps = [abs(p - logprobs.get(token, min(p, lowest))) for token, p in pairs]
    return sum(gaps) / len(gaps)


def open_server(url: str, model: str | None, settings: AnswerSettings) -> Server:
    """The server at this address.

    model: the target's name on the server; None: the server has only one model.
    """
    timeout = max(TIMEOUT, float(settings.decoding.max_new_tokens))
    return Server(url, timeout, model)


def server_store(
    server: Server, settings: AnswerSettings, folder: Path, names: list[str], stores: Path
) -> Store:
    """The store of the served model's outputs, in the folder `stores`. All processes must call it.

    names: of the run's outputs. The first process asks the server for its models, unless the store
    that is noted in the run's folder has all outputs. Raises ServerError if the target is not
    served.
    """
    key: dict[str, Any] = {}
    if PartialState().is_main_process:
        key = read_json(folder / USED)["key"] if (folder / USED).exists() else {}
        if not key or not Store.of(key, stores).has_all(names):
            key = _served_model(server) | settings.key
    return Store.of(from_first(key), stores)


def _served_model(server: Server) -> dict[str, str]:
    """The store's key, from the server's model list. Raises ServerError for another model."""
    models = {model["id"]: model for model in server.models}
    if len(models) > 1 and server.asked_model not in models:
        raise ServerError(
            f"{server.url} serves {', '.join(models)}, and answer_model is "
            f"{server.asked_model!r}; name one of them."
        )
    root = models[listed_name(server)].get("root") or "not told"
    return {
        "target weights": f"served as {server.model}, root {root}",
        "served model": server.model,
        "dtype": "of the server",
    }


def listed_name(server: Server) -> str:
    """The model's name in requests. A gateway may give its only model another one in responses."""
    names = [model["id"] for model in server.models]
    return server.model if server.model in names else str(names[0])


@dataclass
class ServerTarget(AnsweringTarget):
    """A target behind a server; the first process prompts it, the others wait.

    prompts: all prompts of the run. witnesses: earlier outputs of this model, to detect a change.
    """

    by: ClassVar[Answerer] = "server"
    patience = PATIENT  # retries of a failed request
    target: Checkpoint
    prompts: list[list[int]]
    running: Server | None = None
    witnesses: list[CachedAnswer] = field(default_factory=list)

    @property
    def server(self) -> Server:
        assert self.running is not None
        return self.running

    def check(self) -> None:
        """Raise ServerError if the server has another target, unless all outputs are stored."""
        if not self.store.has_all(self.names(self.prompts)):
            self._check_server()

    def made(self, missing: Mapping[str, list[int]], taught: bool) -> Made:
        if not missing or not PartialState().is_main_process:
            return
        self.server.retries = self.patience
        request, about = self.request(), f"outputs of {self.server.url}"

        def answer(item: tuple[str, list[int]]) -> tuple[str, Record]:
            name, prompt = item
            return name, self.output(name, prompt, request).packed(request.vocab_size)

        with ThreadPool(min(self.settings.batch_size, len(missing))) as pool:
            answers = pool.imap_unordered(answer, missing.items())
            yield from tqdm(answers, about, len(missing), unit="output")

    def keep(self, shard: Mapping[str, Record]) -> None:
        self._check_witnesses()  # so the outputs before this line are from the same model
        super().keep(shard)

    def output(self, name: str, prompt: list[int], request: Request) -> CachedAnswer:
        """The output with this name in the store. Raises ServerError."""
        return self.ask(prompt, request, seed_of(self.settings.decoding.seed, name))

    def request(self) -> Request:
        decoding = self.settings.decoding
        return Request(
            self.server.model,
            decoding.sampling.temperature,
            decoding.max_new_tokens,
            self.settings.top_k,
            decoding.stops,
            self.target.vocabulary.vocab_size,
        )

    def ask(
        self, prompt: list[int], request: Request, seed: int = 0, text: str | None = None
    ) -> CachedAnswer:
        """The server's output for a prompt. Raises ServerError for an output that must not be used.

        text: sent in place of the prompt's ids; the server must tokenize it to these ids.
        """
        about, body = f" to a prompt of {len(prompt)} tokens", request.body(text or prompt, seed)
        return self.answer(body, about, lambda sent: request.read(sent, prompt))

    def answer(
        self, body: dict[str, Any], about: str, read: Callable[[Any], CachedAnswer]
    ) -> CachedAnswer:
        """What `read` makes of the response to this request; its ServerError names the response."""
        body |= {"model": listed_name(self.server)}
        sent = self.server.ask("/v1/completions", body, about)
        try:
            return read(sent)
        except ServerError as error:
            raise ServerError(
                f"{self.server.url}, response{about}: {error}. This output was not stored."
            ) from None

    # --- what is refused

    def _check_server(self) -> None:
        """Raise ServerError where tokenizer, output or distribution are not the target's."""
        request, longest = self.request(), max(self.prompts, key=len)
        first, tokenizer = replace(request, max_tokens=1), self.target.tokenizer
        for text in [TEXT, *(str(tokenizer.decode(ids)) for ids in self.prompts[:8])]:
            self.ask(tokenizer(text, add_special_tokens=False)["input_ids"], first, text=text)
        self.ask(longest, request)  # only a complete output can show every fault
        # other runs' prompts may be longer than the server was started for
        fit = (n for n in self.store if self.store.length(n, "prompt_ids") <= len(longest))
        cached = Answers(self.store, list(islice(fit, WITNESSES)))
        # at temperature 1 log-probabilities are the same before and after scaling
        raw = replace(first, temperature=1.0)
        self.witnesses = list(cached) or [self.ask(p, raw) for p in self.prompts[:WITNESSES]]
        self._check_witnesses()

    def _check_witnesses(self) -> None:
        """Raise ServerError if the witnesses' log-probabilities have changed.

        Requests have the temperature of the outputs, because it must not change them.
        """
        first = replace(self.request(), max_tokens=1)
        moved = [_difference(w, self.ask(w.prompt_ids.tolist(), first)) for w in self.witnesses]
        if (mean := sum(moved) / len(moved)) > ANOTHER_MODEL:
            raise ServerError(
                f"{self.server.url} gives log-probabilities that differ by {mean:.2f} nats from "
                f"earlier ones of {self.server.model!r} at the same {len(moved)} prompts: it has "
                "another model now, or scales them by temperature. Serve the first model again, or "
                "this one under another --served-model-name; start vLLM with "
                "--logprobs-mode raw_logprobs."
            )
