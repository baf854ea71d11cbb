"""`caraserve chat`: a conversation with a server's adapters in the terminal.

Ctrl-C stops the answer under way, which stays in the conversation as far as it came. Ctrl-D leaves.
"""

import asyncio
import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import aiohttp
from rich.console import Console
from rich.control import Control
from rich.segment import ControlType

from caraserve.errors import CaraServeError

_CONNECT_S = 10.0
_LONGEST_EVENT_BYTES = 8 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a model's text must not control the terminal
_SHOWN_ADAPTERS = 50
_CLEAR_LINE = Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2))
_PREFILL = b": prefill "  # a comment of a stream whose prompt takes long
_HELP = """\
/adapters [TEXT]  list the adapters whose names contain TEXT
/adapter NAME     let another adapter answer; the conversation continues
/clear            forget the conversation
/quit             leave, as does Ctrl-D; Ctrl-C stops an answer"""


@dataclass(slots=True)
class Timing:
    """The times of one answer as its client sees them, on the monotonic clock, and what else the server says of it."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int | None = None  # None: the server has not said
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, computed in earlier turns
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
        self,
        model: str,
        messages: Sequence[Mapping[str, str]],
        timing: Timing,
        on_progress: Callable[[str], None] = lambda progress: None,
    ) -> AsyncGenerator[AnswerPart]:
        """Yields an answer's pieces as they arrive, and notes their times. Closing the iterator ends the answer.
        `on_progress`: called with how much of a long prompt is computed, as `40 of 900 tokens`."""
        body = {"model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        async with self._request("POST", "/v1/chat/completions", json=body) as response:
            timing.instance = response.headers.get("x-caraserve-instance", "")
            async for data in _events(response, on_progress):
                if "error" in data:
                    raise CaraServeError(_message(data) or "the answer ended with an error")
                if (usage := data.get("usage")) is not None:
                    timing.tokens, timing.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
                    timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
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


async def _events(
    response: aiohttp.ClientResponse, on_progress: Callable[[str], None]
) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a stream, decoded, until [DONE]."""
    async for line in response.content:
        if line.startswith(_PREFILL):
            on_progress(line.removeprefix(_PREFILL).decode(errors="replace").strip())
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


class Chat:
    """One conversation. `model`: the adapter that answers, or the base model."""

    def __init__(self, client: ChatClient, console: Console, model: str) -> None:
        self.model = model
        self._client, self._console = client, console
        self._messages: list[dict[str, str]] = []
        self._shows_progress = False
        self._commands = {"/adapter": self._switch, "/adapters": self._list, "/clear": self._clear, "/help": self._help}

    async def handle(self, line: str) -> bool:
        """Answers a line of the user, or runs its command. Returns False if the user leaves."""
        word, _, rest = line.strip().partition(" ")
        if word in ("/quit", "/exit"):
            return False
        try:
            if word.startswith("/") and "/" not in word[1:]:  # a path is a message
                await self._commands.get(word, self._unknown)(rest.strip())
            elif word:
                await self._answer(line.strip())
        except CaraServeError as error:
            self._say(error.message)
        return True

    async def _answer(self, text: str) -> None:
        """Prints the answer to `text` as it arrives, and dimmed the reasoning before it. What has arrived of the answer
        becomes part of the conversation; reasoning does not, as models are trained without that of earlier turns."""
        self._messages.append({"role": "user", "content": text})
        timing = Timing(time.monotonic())
        pieces: list[AnswerPart] = []
        try:
            progress = self._show_progress if self._console.is_terminal else lambda text: None
            async with aclosing(self._client.answer(self.model, self._messages, timing, progress)) as answer:
                async for piece in answer:
                    self._end_progress()
                    if pieces and pieces[-1].is_reasoning and not piece.is_reasoning:
                        self._console.out("")
                    pieces.append(piece)
                    style = "dim" if piece.is_reasoning else None
                    self._console.out(_CONTROL.sub("", piece.text), end="", style=style, highlight=False)
        finally:
            self._end_progress()
            if pieces:
                said = "".join(piece.text for piece in pieces if not piece.is_reasoning)
                self._messages.append({"role": "assistant", "content": said})
                self._console.out("")
            else:
                self._messages.pop()
        self._say(_summary(self.model, timing))

    def _show_progress(self, text: str) -> None:
        """Shows how much of the prompt is computed, on the line where the answer will begin."""
        self._end_progress()
        self._console.out(f"[prompt: {_CONTROL.sub('', text)}]", end="", style="dim", highlight=False)
        self._shows_progress = True

    def _end_progress(self) -> None:
        if self._shows_progress:
            self._console.control(_CLEAR_LINE)
            self._shows_progress = False

    async def _switch(self, name: str) -> None:
        self.model = chosen(await self._client.models(), name)
        self._say(f"{self.model} answers now")

    async def _list(self, part: str) -> None:
        models = await self._client.models()
        names = [name for name in (models.base, *models.adapters) if part.lower() in name.lower()]
        for name in names[:_SHOWN_ADAPTERS]:
            self._console.out(f"{'*' if name == self.model else ' '} {_CONTROL.sub('', name)}", highlight=False)
        if len(names) > _SHOWN_ADAPTERS:
            self._say(f"and {len(names) - _SHOWN_ADAPTERS} more: /adapters TEXT lists those whose names contain TEXT")

    async def _clear(self, _: str) -> None:
        self._messages.clear()
        self._say("the conversation is forgotten")

    async def _help(self, _: str) -> None:
        self._say(_HELP)

    async def _unknown(self, _: str) -> None:
        self._say(f"there is no such command\n{_HELP}")

    def _say(self, text: str) -> None:
        """Prints what is not part of the conversation."""
        self._console.out(_CONTROL.sub("", text), style="dim", highlight=False)


def chosen(models: Models, name: str | None) -> str:
    """Returns the model or adapter of that name; the base model for None. Raises CaraServeError."""
    names = (models.base, *models.adapters)
    if name is None:
        return models.base
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, 3) or names[:3]
    raise CaraServeError(f"the server has no adapter {name!r}; it has for example {', '.join(near)}")


def chat(url: str, api_key: str | None, adapter: str | None) -> None:
    """Converses until the user leaves. Raises CaraServeError if there is no such server or adapter."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # importing it gives input() line editing and a history
    console = Console(soft_wrap=True)
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        try:
            client = runner.run(stack.enter_async_context(ChatClient.open(url, api_key)))
            conversation = Chat(client, console, chosen(runner.run(client.models()), adapter))
            if is_terminal:
                console.out(f"{conversation.model} at {url}; /help lists the commands", style="dim", highlight=False)
            _converse(runner, conversation, console, lambda: input(f"{conversation.model}> " if is_terminal else ""))
        finally:
            runner.run(stack.aclose())


def _converse(runner: asyncio.Runner, conversation: Chat, console: Console, read: Callable[[], str]) -> None:
    """Handles lines until the user leaves. Ctrl-C, also while a line is edited, leads to the next line."""
    goes_on = True
    while goes_on:
        try:
            line = read()
            goes_on = runner.run(conversation.handle(line))
        except EOFError:
            console.out("")
            return
        except KeyboardInterrupt:
            console.out("stopped; /quit or Ctrl-D leaves", style="dim", highlight=False)


def _summary(model: str, timing: Timing) -> str:
    """`pirate: 42 tokens, first after 120 ms, then 55.0 tokens/s`."""
    parts = [] if timing.tokens is None else [f"{timing.tokens} token{'s' * (timing.tokens != 1)}"]
    if timing.cached_tokens:
        parts.append(f"{timing.cached_tokens} of {timing.prompt_tokens} prompt tokens reused")
    if timing.ttft_ms is not None:
        parts.append(f"TTFT {timing.ttft_ms:.0f} ms")
    if timing.tokens_per_s is not None:
        parts.append(f"{timing.tokens_per_s:.1f} tokens/s")
    if timing.instance:
        parts.append(f"answered by {timing.instance}")
    if timing.is_cut:
        parts.append("cut off at the most tokens that it may have")
    return f"[{model}: {', '.join(parts) or 'an empty answer'}]"
