"""The target behind an OpenAI-compatible server: it answers there, its weights are never loaded.

What goes over are token ids, rendered here; what comes back are token ids, each with the ids and
log-probabilities of the most likely ones there. vLLM has all that is needed: its /v1/completions
knows `return_tokens_as_token_ids`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from multiprocessing.pool import ThreadPool
from typing import Annotated, Any, Literal

import numpy as np
import torch
from accelerate import PartialState
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor
from tqdm import tqdm

from align.sources import load_tokenizer, read_json
from align.vocabulary import Vocabulary
from distill.prompts import Prompts
from distill.recipe import Recipe
from distill.teacher.answers import (
    ANSWERS_PER_SHARD,
    USED,
    refuse_empty,
    to_answer,
    what_decides_answers,
)
from distill.teacher.store import Answers, CachedAnswer, Store, bytes_per_token, names_of
from eval.decoding.loop import seed_of
from eval.engines.server import PATIENT, Server, ServerError

TIMEOUT = 600.0  # seconds for one whole answer, which is sent when it has ended
# A server takes what is not said from the checkpoint's generation config.
UNCHANGED = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
ROUNDING = 1e-3  # of log-probabilities and of their mass
MASKED = -9000.0  # no softmax goes so low: vLLM writes -9999 for minus infinity
WITNESSES = 4
# Mean difference of the witnesses' log-probabilities, in nats, from which on it is another model:
# SmolLM2-135M in bf16 is off its fp32 self by 0.09 at most, with noise of 2% on its weights by 0.23
# at least (40 code prompts, four at a time).
ANOTHER_MODEL = 0.2
TEXT = "Ærø, 東京 🙂\n\tdef f(x):  # 3.14159 × 10⁶\n\n    return x['key'] or ''  "
NO_ROUTE = (404, 405, 501)


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
    """What a server is asked for, and what its answer must then be.

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
        """The answer, as our own would be. Raises ServerError for one that is not what was asked.

        sent: the JSON of /v1/completions.
        """
        try:
            completion = _Completion.model_validate(sent)
        except ValidationError as error:
            first = error.errors()[0]
            raise ServerError(
                f"it is no completion with log-probabilities ({'.'.join(map(str, first['loc']))}: "
                f"{first['msg']}); use a server that returns them by token id, as vLLM does"
            ) from None
        choice = completion.choices[0]
        tokens = _token_ids(choice.logprobs.tokens)
        if completion.model != self.model:
            raise ServerError(
                f"it comes from model {completion.model!r}, and {self.model!r} was asked; serve "
                "one model under this address, or name it with answer_model"
            )
        if choice.prompt_token_ids not in (None, prompt):
            raise ServerError(
                "the prompt's tokens are others there than here: it was cut or changed; serve the "
                "model as it is, without a limit on prompts"
            )
        self._check_end(tokens, choice)
        ids, logprobs = self._top(choice.logprobs.top_logprobs)
        if self.temperature == 0:
            first = np.where(ids == np.array(tokens)[:, None], logprobs, -np.inf).max(1)
            if (wrong := (first < logprobs[:, 0] - ROUNDING).nonzero()[0]).size:
                raise ServerError(
                    f"token {tokens[wrong[0]]} was chosen greedily and is not the most likely one: "
                    "the server changes the distribution (a penalty, a bias, a mask), or its log-"
                    "probabilities are of another; switch that off"
                )
        return CachedAnswer(
            index=index,
            prompt_ids=torch.tensor(prompt),
            response_ids=torch.tensor(tokens),
            top_ids=torch.from_numpy(ids),
            top_logprobs=torch.from_numpy(logprobs).float(),
        )

    def _check_end(self, tokens: list[int], choice: _Choice) -> None:
        """The tokens are whole: as many as were asked for, or up to a stop."""
        count = len(choice.logprobs.top_logprobs)
        if len(tokens) != count or choice.token_ids not in (None, tokens):
            raise ServerError(
                f"it has {len(tokens)} tokens and the distributions of {count}, or other token "
                "ids beside them: it was cut; ask again"
            )
        ended = [i for i, token in enumerate(tokens) if token in self.stops]
        if choice.finish_reason == "length" and len(tokens) != self.max_tokens:
            raise ServerError(
                f"it ended by length after {len(tokens)} of {self.max_tokens} tokens: the server's "
                "context is too short, or the answer was cut; raise its --max-model-len"
            )
        if ended[:1] not in ([], [len(tokens) - 1]):
            raise ServerError(
                f"it goes on after stop token {tokens[ended[0]]}; serve without ignore_eos or "
                "min_tokens"
            )
        if choice.finish_reason == "stop" and not ended:
            raise ServerError(
                f"it stopped, but not at a stop token of the target ({sorted(self.stops)}): the "
                "server leaves the stop token out or has stops of its own; what the target thinks "
                "of ending would not be learned. Use one that returns it, as vLLM does"
            )

    def _top(self, rows: list[dict[str, float]]) -> tuple[Array, Array]:
        """Ids and log-probabilities [R, top] of the most likely tokens, best first."""
        # a row has the chosen token as well where that is none of the most likely
        counts = np.array([len(row) for row in rows])
        if counts.min() < self.top:
            raise ServerError(
                f"it has {counts.min()} log-probabilities a token, and {self.top} were asked for; "
                f"lower cache_top_k, or start the server with --max-logprobs {self.top}"
            )
        named = np.arange(counts.max()) < counts[:, None]
        ids = np.full(named.shape, -1)
        ids[named] = _token_ids(key for row in rows for key in row)
        logprobs = np.full(named.shape, -np.inf)
        logprobs[named] = [p for row in rows for p in row.values()]
        if (odd := ~((logprobs > MASKED) & (logprobs <= ROUNDING)) & named).any():
            raise ServerError(
                f"{logprobs[odd][0]} is no log-probability of a raw distribution: above 0 is a "
                f"logit, below {MASKED:g} a token that was masked, NaN an overflow; serve with "
                "--logprobs-mode raw_logprobs, in a dtype that holds the model"
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
                f"probabilities sum to {mass:.3f}: these are logits or scores; serve with "
                "--logprobs-mode raw_logprobs"
            )
        return ids, np.minimum(logprobs, 0)


def _token_ids(texts: Iterable[str]) -> list[int]:
    """The ids that texts `token_id:N` stand for."""
    found = list(texts)
    if strange := [t for t in found if not (t[:9] == "token_id:" and t[9:].isdecimal())]:
        raise ServerError(
            f"its tokens are texts ({strange[0]!r}), of which several ids can have the same; use a "
            "server that knows return_tokens_as_token_ids, as vLLM does"
        )
    return [int(text[9:]) for text in found]


@dataclass(frozen=True)
class Witness:
    """What the model said after some prompt, by which it is known again: [C] tokens and log p."""

    prompt: list[int]
    top_ids: Tensor
    top_logprobs: Tensor

    def difference(self, ids: Tensor, logprobs: Tensor) -> float:
        """Of what a model says after the same prompt, in nats, a mean over the tokens here.

        A token that it does not name is taken to be as likely as the last that it does.
        """
        said = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
        lowest = min(said.values())
        pairs = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        gaps = [abs(p - said.get(token, min(p, lowest))) for token, p in pairs]
        return sum(gaps) / len(gaps)


class ServedTarget:
    """The target of a recipe behind `answer_url`."""

    def __init__(self, recipe: Recipe, target: Vocabulary, prompts: Prompts) -> None:
        assert recipe.answer_url is not None
        self.recipe, self.target = recipe, target
        self.texts = [prompt.text for prompt in prompts.training.prompts]
        self.prompts = to_answer(recipe, prompts.training.ids)
        self.names = names_of(self.prompts)
        self.server = Server(
            recipe.answer_url,
            TIMEOUT,
            recipe.answer_model,
            connections=recipe.answer_batch_size + 1,  # and the witnesses'
        )
        self.witnesses: list[Witness] = []

    def check(self) -> None:
        """Refuse a server that does not fit, before anything is made.

        Nothing is asked where all answers are there. Raises ServerError with value, reason and
        remedy.
        """
        if not self._left():
            return
        self._check_tokenizer()
        request = self._request()
        # all that an answer can lack is found on a whole one to the longest prompt
        longest = max(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        self._ask(longest, request)
        self._check_stop(self.prompts[longest])
        one = replace(request, max_tokens=1)
        if request.temperature not in (0, 1):
            self._check_raw(one)
        self.witnesses = self._cached_witnesses() or [
            Witness(prompt, *self._first(prompt, one)) for prompt in self.prompts[:WITNESSES]
        ]
        self._check_witnesses()

    def describe(self) -> int:
        """Print what is left to answer and what it will weigh; exit status 0.

        How long the server takes, and what a draft costs beside it, cannot be told from here.
        """
        tokens = len(self._left()) * self.recipe.answer_max_new_tokens
        each = bytes_per_token(self.recipe.cache_top_k, self.target.rows)
        print(f"{self.server.url} serves {self.server.model!r} and fits this recipe")
        print(
            f"answers: {tokens} tokens at most, {tokens * each / 2**20:.0f} MiB on disk; how long "
            "they take is the server's affair"
        )
        return 0

    def answers(self) -> Answers:
        """The server's answers to the training prompts, in their order; those at hand are kept.

        The main process asks, the others wait. Raises ServerError where the server fails for longer
        than is waited, sends what it must not, or is another model midway; what was kept by then
        stays.
        """
        if PartialState().is_main_process and (left := self._left()):
            self._answer(left)
        PartialState().wait_for_everyone()
        self.store.refresh()
        answers = Answers(self.store, self.names)
        refuse_empty(answers.response_lengths)
        return answers

    def _answer(self, left: list[int]) -> None:
        clock, tokens = time.time(), 0
        self.server.retries = PATIENT
        request = self._request()
        bar = tqdm(
            total=len(self.names),
            initial=len(self.names) - len(left),
            desc="answers of the server",
            unit="answer",
            file=sys.stderr,
        )
        with bar, ThreadPool(min(self.recipe.answer_batch_size, len(left))) as pool:
            found = pool.imap_unordered(lambda i: self._ask(i, request), left)
            while shard := list(islice(found, ANSWERS_PER_SHARD)):
                self._check_witnesses()  # what came before them is the same model's
                packed = {self.names[a.index]: a.packed(self.target.rows) for a in shard}
                self.store.append(packed)
                tokens += sum(len(answer.response_ids) for answer in shard)
                bar.update(len(shard))
        seconds = time.time() - clock
        print(f"answers: {tokens} tokens in {seconds:.0f} s from {self.server.url}")

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
        prompt = self.prompts[index]
        body = request.body(prompt, seed_of(self.recipe.seed, self.names[index]))
        return self._completed(prompt, body, request, index)

    def _completed(
        self, prompt: list[int], body: dict[str, Any], request: Request, index: int = 0
    ) -> CachedAnswer:
        sent = self.server.ask("/v1/completions", body, f" to prompt {index}")
        try:
            return request.read(sent, index, prompt)
        except ServerError as error:
            raise ServerError(
                f"{self.server.url}, answer to prompt {index} ({len(prompt)} tokens): {error}. "
                "Nothing of it was kept."
            ) from None

    def _first(self, prompt: list[int], one: Request) -> tuple[Tensor, Tensor]:
        """The most likely tokens [C] after a prompt, and their log-probabilities."""
        answer = self._completed(prompt, one.body(prompt), one)
        return answer.top_ids[0], answer.top_logprobs[0]

    # --- what is there already

    @cached_property
    def store(self) -> Store:
        """Of what is served there. Raises ServerError for another model than is asked for."""
        if (used := self.recipe.folder / USED).exists():
            store = Store.of(read_json(used)["key"])
            if all(name in store for name in self.names):
                return store  # whether the server still runs or not
        self._check_model()
        card = next(c for c in self.server.models if c["id"] == self.server.model)
        served = {
            "target weights": f"served as {card['id']}, root {card.get('root') or 'not told'}",
            "served model": card["id"],
            "dtype": "of the server",
        }
        return Store.of(served | what_decides_answers(self.recipe, self.target))

    def _left(self) -> list[int]:
        """The prompts without an answer."""
        return [i for i, name in enumerate(self.names) if name not in self.store]

    def _cached_witnesses(self) -> list[Witness]:
        some = Answers(self.store, list(islice(self.store, WITNESSES)))
        return [Witness(a.prompt_ids.tolist(), a.top_ids[0], a.top_logprobs[0]) for a in some]

    # --- what is refused

    def _check_model(self) -> None:
        server, names = self.server, [card["id"] for card in self.server.models]
        if server.asked_model is None and len(names) > 1:
            raise ServerError(
                f"{server.url} serves {', '.join(names)}; name the target with answer_model."
            )
        if server.model not in names:
            raise ServerError(
                f"{server.url} serves {', '.join(names)}, not {server.model!r}; correct "
                "answer_model or answer_url, or leave answer_model null."
            )
        length = next(c for c in server.models if c["id"] == server.model).get("max_model_len")
        needed = max(map(len, self.prompts)) + self.recipe.answer_max_new_tokens
        if length is not None and length < needed:
            raise ServerError(
                f"{server.url} has a context of {length} tokens, and the longest prompt with its "
                f"answer takes {needed}; raise its --max-model-len, or lower "
                "answer_max_new_tokens."
            )

    def _check_tokenizer(self) -> None:
        """Ids mean the same there: a few texts are cut into the same ones."""
        ours = load_tokenizer(self.target.spec)
        for text in [TEXT, *self.texts[:8]]:
            here, there = ours(text, add_special_tokens=False)["input_ids"], self._tokenized(text)
            if here != there:
                raise ServerError(
                    f"{self.server.url} cuts {text[:40]!r}… into tokens {there[:8]}…, the "
                    f"tokenizer of {self.target.spec!r} into {here[:8]}…: its ids mean other "
                    "tokens. Serve the target of this recipe, or name as target what is served."
                )

    def _tokenized(self, text: str) -> list[int]:
        server = self.server
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        try:
            found = server.ask("/tokenize", body)
            tokens = found.get("tokens") if isinstance(found, dict) else None
        except ServerError as error:
            if error.status not in NO_ROUTE:
                raise
            one = replace(self._request(), max_tokens=1)
            found = server.ask("/v1/completions", one.body(text), " to a text")
            tokens = found["choices"][0].get("prompt_token_ids")
        if not isinstance(tokens, list):
            raise ServerError(
                f"{server.url} does not tell how it cuts a text into tokens (neither /tokenize nor "
                "return_token_ids), so that its ids may mean anything; use a server that does, as "
                "vLLM."
            )
        return tokens

    def _check_stop(self, prompt: list[int]) -> None:
        """An answer ends with its stop token: tried with a token that comes at once."""
        first = self._first(prompt, replace(self._request(), max_tokens=1, temperature=0.0))[0]
        stopping = replace(self._request(), temperature=0.0, stops=frozenset(first[:1].tolist()))
        self._completed(prompt, stopping.body(prompt), stopping)

    def _check_raw(self, one: Request) -> None:
        """Log-probabilities do not change with the temperature: they are taken before it."""
        spreads = []
        for temperature in (1.0, one.temperature):
            found = [
                self._first(prompt, replace(one, temperature=temperature))[1]
                for prompt in self.prompts[:WITNESSES]
            ]
            spreads.append(sum(float(row[0] - row[-1]) for row in found))
        stretch = spreads[1] / spreads[0] if spreads[0] else 1.0
        if abs(stretch - 1) > abs(1 / one.temperature - 1) / 2:
            raise ServerError(
                f"{self.server.url}: between the most likely tokens lie {stretch:.2f} times the "
                f"nats at temperature {one.temperature} that lie there at 1, so its log-"
                "probabilities are those after the temperature, not the target's; serve with "
                "--logprobs-mode raw_logprobs, or set answer_temperature to 1 or 0."
            )

    def _check_witnesses(self) -> None:
        """The model is still the one whose answers are kept."""
        one = replace(self._request(), max_tokens=1)
        moved = [w.difference(*self._first(w.prompt, one)) for w in self.witnesses]
        if (mean := sum(moved) / len(moved)) > ANOTHER_MODEL:
            raise ServerError(
                f"{self.server.url} gives log-probabilities that differ by {mean:.2f} nats from "
                f"those it gave to the same {len(moved)} prompts before: there is another model "
                f"behind {self.server.model!r} now. Nothing of it was kept. Serve the first one "
                f"again, or delete {self.store.folder} to begin anew."
            )
