"""A client of a server's OpenAI API: lists its models, and streams answers of its chat completions."""

import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import aiohttp

from caraserve.errors import CaraServeError

_CONNECT_S = 10.0
_LONGEST_EVENT_BYTES = 8 << 20


@dataclass(slots=True)
class Timing:
    """The times of one answer as its client sees them, on the monotonic clock, and what else the server says of it."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int | None = None  # None: the server has not said
    is_cut: bool = False  # whether the answer has reached the most tokens that it may have
    instance: str = ""  # that computes the answer, in a cluster

    @property
    def ttft_ms(self) -> float | None:
        """The time to the first token; None before it."""
        return None if self.first_s is None else 1000 * (self.first_s - self.sent_s)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token; None for fewer than two tokens."""
        if self.tokens is None or self.tokens < 2 or self.first_s is None or self.last_s is None:
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s) if self.last_s > self.first_s else None


class AnswerPart(NamedTuple):
    """Some text of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool


@dataclass(frozen=True, slots=True)
class Models:
    """What a server lists: the base model's name, and the adapters' names in the server's order."""

    base: str
    adapters: tuple[str, ...]


class ChatClient:
    """A connection to one server. Raises CaraServeError, in one line, for whatever fails."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, api_key: str | None) -> AsyncIterator[Self]:
        """Yields a client of the server at `url`, which may end in /v1; nothing is sent yet."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, read_bufsize=_LONGEST_EVENT_BYTES
        ) as session:
            yield cls(session, url.rstrip("/").removesuffix("/v1"))

    async def models(self) -> Models:
        """Returns what the server lists."""
        async with self._request("GET", "/v1/models") as response:
            document = await _json(response)
        try:
            cards = [(str(card["id"]), card.get("parent")) for card in document["data"]]
        except (KeyError, TypeError, AttributeError):
            raise CaraServeError(f"{self._url} does not list models as an OpenAI server does") from None
        bases = [name for name, parent in cards if parent is None]
        adapters = tuple(name for name, parent in cards if parent is not None)
        if not cards:
            raise CaraServeError(f"{self._url} lists no model that may be used")
        return Models(bases[0] if bases else adapters[0], adapters)

    async def answer(
        self, model: str, messages: Sequence[Mapping[str, str]], timing: Timing
    ) -> AsyncGenerator[AnswerPart]:
        """Yields an answer's pieces as they arrive, and notes their times. Closing the iterator ends the answer."""
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            timing.instance = response.headers.get("x-caraserve-instance", "")
            async for data in _events(response):
                if "error" in data:
                    raise CaraServeError(_message(data) or "the answer ended with an error")
                if (usage := data.get("usage")) is not None:
                    timing.tokens = usage["completion_tokens"]
                for choice in data.get("choices", ()):
                    timing.is_cut = choice.get("finish_reason") == "length"
                    delta = choice["delta"]
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning")  # servers send one, or both
                    for text, is_reasoning in ((reasoning, True), (delta.get("content"), False)):
                        if text:
                            timing.last_s = time.monotonic()
                            timing.first_s = timing.first_s or timing.last_s
                            yield AnswerPart(text, is_reasoning)

    @asynccontextmanager
    async def _request(self, method: str, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with self._session.request(method, self._url + path, **options) as response:
                if response.status >= 400:
                    raise CaraServeError(await self._refusal(response))
                yield response
        except aiohttp.ClientConnectorError as error:
            number = error.os_error.errno
            reason = os.strerror(number) if number and number > 0 else "its name is unknown"
            raise CaraServeError(
                f"no server answers at {self._url} ({reason}); start one with `caraserve serve`, or name its address "
                "with --url"
            ) from None
        except aiohttp.InvalidURL:
            raise CaraServeError(f"{self._url!r} is not an address; write for example http://127.0.0.1:8000") from None
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CaraServeError(f"the connection to {self._url} has broken: {str(error) or 'no answer'}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CaraServeError(f"{self._url} does not answer as an OpenAI server does") from None

    async def _refusal(self, response: aiohttp.ClientResponse) -> str:
        if response.status == 401:
            return f"{self._url} needs an API key: give --api-key, or set CARASERVE_API_KEY"
        return _message(await _json(response)) or f"{self._url} answered with status {response.status}"


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream, decoded, until [DONE]."""
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(data)


async def _json(response: aiohttp.ClientResponse) -> Any:
    try:
        return json.loads(await response.read())
    except ValueError:
        return None


def _message(document: Any) -> str:
    """Returns the message of an error in OpenAI's shape, on one line; empty if it has none."""
    error = document.get("error") if isinstance(document, dict) else None
    text = error.get("message") if isinstance(error, dict) else None
    return " ".join(text.split()) if isinstance(text, str) else ""
