"""Requests to an OpenAI-compatible server, with retries."""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Retry
from urllib3.exceptions import HTTPError, LocationValueError, MaxRetryError, ReadTimeoutError

from align.errors import UserError

API_KEY = "DRAFTSMITH_API_KEY"  # the environment variable of the key in requests
TIMEOUT = 120.0  # most seconds without a byte from a server
CONNECTIONS = 256  # most that are kept open between requests
# Retries take five minutes together, so that a server can be restarted. Waiting times grow and are
# random, so that requests do not return at the same time. A server's Retry-After has priority.
PATIENT = Retry(
    total=10,
    read=3,  # timeouts and responses that broke off
    backoff_factor=1,
    backoff_max=60,
    backoff_jitter=1,
    status_forcelist=(429, 500, 502, 503, 504),
    allowed_methods=None,  # all methods, because repeating a completion does no harm
    raise_on_status=False,  # because the last response is the better message
    retry_after_max=300,
)
AT_ONCE = PATIENT.new(total=1, backoff_factor=0)  # a server may close an idle connection
# Sent with each request, because a server takes missing options from the generation config.
UNPENALISED = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class ServerError(UserError):
    """A server that cannot be used. status: the HTTP status of its response; None without one.

    passing: whether the server may be usable again soon.
    """

    def __init__(self, text: str, status: int | None = None, passing: bool = False) -> None:
        super().__init__(text)
        self.status, self.passing = status, passing


def passing(status: int | None) -> bool:
    """Whether a server that failed with this HTTP status may be usable again soon."""
    return status in PATIENT.status_forcelist


def check_address(url: str, variable: str = API_KEY) -> SplitResult:
    """The parts of http://HOST:PORT/PATH. Raises UserError for another address.

    variable: the environment variable in which a password is given instead.
    """
    plain = re.split("[?#]", url.rpartition("@")[2])[0]  # without a password
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        valid = False
    if not valid or plain != url:
        raise UserError(
            f"The address of {plain} is not http://HOST:PORT alone; correct it, and set {variable} "
            "if the server needs a key, because no server gets a password or a query."
        )
    return parts


def _pool(host: str, scheme: str) -> PoolManager:
    """Connections to a host, through the environment's proxy unless it is this machine.

    A proxy's user and password are sent in a header, because urllib3 ignores them in the address.
    """
    direct = host in ("localhost", "127.0.0.1", "::1") or proxy_bypass(host)
    proxy = None if direct else getproxies().get(scheme)
    if not proxy:
        return PoolManager(maxsize=CONNECTIONS)
    kind, _, place = proxy.rpartition("://")
    user, _, address = place.rpartition("@")
    basic = f"Basic {b64encode(unquote(user).encode()).decode()}"
    try:
        return ProxyManager(
            f"{kind or 'http'}://{address}",
            maxsize=CONNECTIONS,
            proxy_headers={"Proxy-Authorization": basic} if user else None,
        )
    except LocationValueError:
        raise UserError(
            f"{scheme}_proxy in the environment is not http://HOST:PORT; correct it, or unset it."
        ) from None


class Server:
    """An OpenAI-compatible server; `url` may end in /v1. Threads may share the object."""

    retries = Retry(total=0, raise_on_status=False)
    variable = API_KEY  # of the environment, with what only the server may see

    def __init__(self, url: str, timeout: float = TIMEOUT, model: str | None = None) -> None:
        """timeout: most seconds without a byte. model: its name; None: the first served."""
        parts = check_address(url, self.variable)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.host, self.address = str(parts.hostname), parts.netloc
        self.timeout = timeout
        self.asked_model = model
        value = os.environ.get(self.variable, "").strip()
        self._secret = self.secret_headers(value) if value else {}
        text = "".join(name + header for name, header in self._secret.items())
        if not (text.isascii() and text.isprintable()):  # urllib3's error would show it
            raise UserError(
                f"{self.variable} has characters that a header cannot have; correct it."
            )
        self._pool = _pool(self.host, parts.scheme)

    def secret_headers(self, value: str) -> dict[str, str]:
        """The headers that identify the client, from the value of `variable`."""
        return {"Authorization": f"Bearer {value}"}

    @contextmanager
    def _request(
        self, path: str, body: dict[str, Any] | None, about: str, retries: Retry, whole: bool = True
    ) -> Iterator[BaseHTTPResponse]:
        """The response, to be read in the block. Errors in the block become a ServerError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | self._secret
        try:
            response = self._pool.request(
                "GET" if data is None else "POST",
                self.url + path,
                body=data,
                headers=headers,
                timeout=self.timeout,
                retries=retries,
                redirect=False,
                preload_content=whole,
            )
            if response.status != 200:
                said = response.data.decode("utf-8", "replace")
                for header in self._secret.values():
                    said = said.replace(header.partition(" ")[2] or header, self.variable)
                said = said[:300]
                if response.status in (401, 403):
                    said += f"; set {self.variable} as it requires (docs/serving.md)"
                raise ServerError(
                    f"{self.url}{path} answered {response.status}{about}: {said}",
                    status=response.status,
                    passing=passing(response.status),
                )
            try:
                yield response
            finally:
                response.close()  # no effect after a whole response, as its connection is free
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ServerError(
                f"{self.url}{path} sent no JSON ({error}); give the address of an "
                "OpenAI-compatible server."
            ) from None
        except HTTPError as error:
            reason = error.reason if isinstance(error, MaxRetryError) else error
            silent = (
                f"sent nothing for {self.timeout:g} s: it is overloaded, or still loading; wait, "
                "or ask for fewer tokens"
            )
            broken = f"cannot be reached or broke off ({reason}): start it, or check the address"
            timed_out = isinstance(reason, ReadTimeoutError)
            raise ServerError(
                f"{self.url} {silent if timed_out else broken}.", passing=not timed_out
            ) from None

    def ask(self, path: str, body: dict[str, Any] | None = None, about: str = "") -> Any:
        """The JSON response to a GET, or to a POST of `body`.

        about: text about the request for errors, like " to prompt 3". Raises ServerError after the
        last retry.
        """
        with self._request(path, body, about, self.retries) as response:
            return json.loads(response.data)

    def stream(self, path: str, body: dict[str, Any], about: str = "") -> Iterator[Any]:
        """Yields the JSON messages of a streamed response when they arrive; without retries."""
        with self._request(path, body, about, Server.retries, whole=False) as response:
            unfinished, streams = b"", False
            while piece := response.read1():
                *lines, unfinished = (unfinished + piece).split(b"\n")
                for field, _, value in (line.partition(b":") for line in lines):
                    if field == b"data" and value.strip() != b"[DONE]":
                        streams = True
                        yield json.loads(value)
            if not streams:
                raise ServerError(
                    f"{self.url}{path} sent no stream{about}; give the address of an "
                    "OpenAI-compatible server."
                )

    def text(self, path: str, retries: Retry | None = None) -> str:
        """The text of the response to a GET."""
        with self._request(path, None, "", retries or self.retries) as response:
            return response.data.decode("utf-8", "replace")

    @cached_property
    def models(self) -> list[dict[str, Any]]:
        """The served models from /v1/models: at least one, each with its `id`."""
        listed = self.ask("/v1/models")
        try:
            models = [card | {"id": str(card["id"])} for card in listed["data"]]
            return [models[0], *models[1:]]
        except (LookupError, TypeError):
            raise ServerError(
                f"{self.url}/v1/models does not list a model; give the address of an "
                "OpenAI-compatible server."
            ) from None

    @property
    def model(self) -> str:
        """The name of the model in requests."""
        return str(self.asked_model or self.models[0]["id"])


def token_ids(texts: Iterable[str]) -> list[int]:
    """The ids N of texts `token_id:N`. Raises ServerError for any other text."""
    named = list(texts)
    if strange := [t for t in named if not (t[:9] == "token_id:" and t[9:].isdecimal())]:
        raise ServerError(
            f"it returned tokens as texts ({strange[0]!r}), which do not identify token ids; use a "
            "server that supports return_tokens_as_token_ids, like vLLM"
        )
    return [int(text[9:]) for text in named]
