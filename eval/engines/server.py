"""Requests to an OpenAI-compatible server, with retries and errors that name a remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Retry
from urllib3.exceptions import HTTPError, MaxRetryError, ReadTimeoutError

API_KEY = "DRAFTSMITH_API_KEY"  # the environment variable of the key that requests carry
TIMEOUT = 120.0  # seconds without a byte from a server
# Five minutes in all, so that a server can be restarted. Later tries wait longer, each for a random
# time, so that not all requests come back at once. A server's Retry-After has priority.
PATIENT = Retry(
    total=10,
    read=3,  # timeouts, or responses that broke off
    backoff_factor=1,
    backoff_max=60,
    backoff_jitter=1,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,  # all: a repeated completion is the same completion
    raise_on_status=False,  # the last response is the better message
    retry_after_max=300,
)
# A server takes options that a request omits from the checkpoint's generation config.
UNPENALISED = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class ServerError(ValueError):
    """A server that cannot be used: which, why, and the remedy.

    status: the HTTP status of its response; None without a response.
    """

    status: int | None = None


class Server:
    """One OpenAI-compatible server; `url` with or without its /v1. Threads may share it."""

    retries = Retry(total=0, raise_on_status=False)

    def __init__(
        self,
        url: str,
        timeout: float = TIMEOUT,
        model: str | None = None,
        connections: int = 1,
    ) -> None:
        """timeout: seconds without a byte. model: a name of a served model; None: the first one.

        connections: how many are kept open.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is not the address of a server; write http://HOST:PORT.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.host, self.address = parts.hostname, parts.netloc.rpartition("@")[2]
        self.timeout = timeout
        self.asked_model = model
        self._key = os.environ.get(API_KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):  # urllib3's error would show it
            raise ServerError(f"{API_KEY} has characters that a request cannot carry; correct it.")
        direct = self.host in ("localhost", "127.0.0.1", "::1") or proxy_bypass(self.host)
        proxy = None if direct else getproxies().get(parts.scheme)
        self._pool = (
            ProxyManager(proxy, maxsize=connections) if proxy else PoolManager(maxsize=connections)
        )

    @contextmanager
    def _request(
        self, path: str, body: dict[str, Any] | None, about: str, whole: bool
    ) -> Iterator[BaseHTTPResponse]:
        """The response, to be read within the block; errors there become a ServerError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            response = self._pool.request(
                "GET" if data is None else "POST",
                self.url + path,
                body=data,
                headers=headers,
                timeout=self.timeout,
                retries=self.retries,
                redirect=False,
                preload_content=whole,
            )
            if response.status != 200:
                said = response.data.decode("utf-8", "replace")
                said = said.replace(self._key or API_KEY, API_KEY)[:300]
                if response.status in (401, 403):
                    said += f"; set {API_KEY} to a valid key"
                error = ServerError(f"{self.url}{path} answered {response.status}{about}: {said}")
                error.status = response.status
                raise error
            try:
                yield response
            finally:
                response.close()  # no effect after a whole response: its connection is in the pool
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ServerError(
                f"{self.url}{path} sent no JSON ({error}); is this an OpenAI-compatible server?"
            ) from None
        except HTTPError as error:
            reason = error.reason if isinstance(error, MaxRetryError) else error
            silent = (
                f"sent nothing for {self.timeout:g} s: it is overloaded, or still loading; wait, "
                "or ask for fewer tokens"
            )
            broken = f"cannot be reached or broke off ({reason}): start it, or check the address"
            why = silent if isinstance(reason, ReadTimeoutError) else broken
            raise ServerError(f"{self.url} {why}.") from None

    def ask(self, path: str, body: dict[str, Any] | None = None, about: str = "") -> Any:
        """The JSON response to a GET, or to a POST of `body`.

        about: the request in an error, as " to prompt 3". Raises ServerError after the last retry,
        and for an object that has a key twice.
        """
        with self._request(path, body, about, whole=True) as response:
            return json.loads(response.data, object_pairs_hook=_unique)

    def stream(self, path: str, body: dict[str, Any], about: str = "") -> Iterator[Any]:
        """The messages of a streamed response as they arrive."""
        with self._request(path, body, about, whole=False) as response:
            unfinished = b""
            while piece := response.read1():
                *lines, unfinished = (unfinished + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                        yield json.loads(line.removeprefix(b"data: "))

    def text(self, path: str) -> str:
        """The response to a GET."""
        with self._request(path, None, "", whole=True) as response:
            return response.data.decode("utf-8", "replace")

    @cached_property
    def models(self) -> list[dict[str, Any]]:
        """The served models, as /v1/models lists them: `id` of each, and with vLLM `root`, …"""
        listed = self.ask("/v1/models")
        try:
            models = [card | {"id": str(card["id"])} for card in listed["data"]]
            return [models[0], *models[1:]]
        except (LookupError, TypeError):
            raise ServerError(
                f"{self.url}/v1/models does not list a model; is this an OpenAI-compatible server?"
            ) from None

    @property
    def model(self) -> str:
        """The name of the model in requests."""
        return str(self.asked_model or self.models[0]["id"])


def token_ids(texts: Iterable[str]) -> list[int]:
    """The N of each text `token_id:N`. Raises ServerError for any other text."""
    named = list(texts)
    if strange := [t for t in named if not (t[:9] == "token_id:" and t[9:].isdecimal())]:
        raise ServerError(
            f"its tokens are texts ({strange[0]!r}), and several ids can have the same; use a "
            "server that knows return_tokens_as_token_ids, as vLLM does"
        )
    return [int(text[9:]) for text in named]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object. Raises ServerError if it has a key twice, because a value would be lost."""
    if len(dict(pairs)) < len(pairs):
        raise ServerError(
            f"The server sent an object that has a key twice ({pairs!s:.80}…); does a "
            f"proxy rewrite its responses?"
        )
    return dict(pairs)
