"""Request bodies and stream parsing for OpenAI's two endpoints and llama.cpp's own.

Streams are parsed after they have ended, from pieces with arrival times (connection.py). A token's time is that of the
piece that completed its event.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np
import orjson

from caraserve.bench.client.connection import HttpExchange
from caraserve.bench.records import PlannedRequest

# Token ids in every vocabulary: above the special tokens at the start of most, and within the 256 byte tokens.
_FIRST_ID, _LAST_ID = 16, 240
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_WORD_LETTERS = 3  # with the space before them, a token or two of most vocabularies


def token_ids(seed: int, index: int, count: int) -> list[int]:
    """Returns `count` random token ids, the same for equal `seed` and `index`."""
    rng = np.random.default_rng((seed, index))
    return rng.integers(_FIRST_ID, _LAST_ID, count).tolist()  # type: ignore[no-any-return]


def random_text(seed: int, index: int, count: int) -> str:
    """Returns `count` random words of three letters, for endpoints that take only text.

    Each is one or two tokens; the server reports their number.
    """
    letters = np.random.default_rng((seed, index)).choice(_LETTERS, (count, _WORD_LETTERS))
    return " ".join(word.tobytes().decode("ascii") for word in letters)


_PHASES = "x-caraserve-phases"  # a response header; a stream has the phases in a comment near its end
_SHOWN_CHARACTERS = 200  # of an invalid response, in error messages


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The seed of prompts, and options of sending."""

    seed: int
    ignore_eos: bool = True
    max_concurrency: int | None = None  # limit of requests in flight, in a closed loop; None: open loop


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The contents of a stream. Token counts are the server's if it reports them."""

    token_s: tuple[float, ...]  # times of the tokens if events have token ids, otherwise of the events
    output_tokens: int
    prompt_tokens: int | None
    phases: tuple[tuple[str, float], ...] = ()
    error: str | None = None


@dataclass(slots=True)
class StreamEvent:
    """One event of a stream: the number of its tokens, and the server's token counts if the event has them."""

    tokens: int
    output_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class OpenAICompletions:
    """`POST /v1/completions`, with prompts as token ids."""

    base: str
    path: str = "/v1/completions"

    def body(self, request: PlannedRequest, model: str | None, settings: LoadSettings) -> dict[str, Any]:
        """Returns the request as JSON values. `model`: an adapter's name; None: the base model."""
        body = {
            "model": model or self.base,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._prompt(request, settings.seed),
        }
        # Extensions of vLLM, which other servers may refuse. With token ids, tokens without text have an event too.
        return body | ({"ignore_eos": True, "return_token_ids": True} if settings.ignore_eos else {})

    def _prompt(self, request: PlannedRequest, seed: int) -> dict[str, Any]:
        return {"prompt": token_ids(seed, request.index, request.prompt_tokens)}

    def read(self, event: dict[str, Any]) -> StreamEvent:
        usage = event.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        counts = usage.get("completion_tokens"), usage.get("prompt_tokens")
        if not (choices := event.get("choices")):
            return StreamEvent(0, *counts)
        choice = choices[0]
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content") or delta.get("reasoning_content")
        if ids := choice.get("token_ids"):
            return StreamEvent(len(ids), *counts)
        # An event without text still counts as a token (half a character), unless it has a role or ends the answer.
        is_open = choice.get("finish_reason") is None and "role" not in (delta or {})
        return StreamEvent(int(bool(text) or (is_open and (delta is None or "content" in delta))), *counts)


@dataclass(frozen=True, slots=True)
class PromptEmbeds(OpenAICompletions):
    """`POST /v1/completions`, with prompts as random vectors in place of tokens, as a compressor would make them."""

    hidden: int = 0

    def body(self, request: PlannedRequest, model: str | None, settings: LoadSettings) -> dict[str, Any]:
        body = OpenAICompletions.body(self, request, model, settings)
        body.pop("return_token_ids", None)  # a prompt of vectors has no ids
        return body

    def _prompt(self, request: PlannedRequest, seed: int) -> dict[str, Any]:
        rng = np.random.default_rng([seed, request.index])
        vectors = rng.standard_normal((request.prompt_tokens, self.hidden), np.float32).astype(np.float16)
        tensor = {"dtype": "F16", "shape": vectors.shape, "data_offsets": [0, vectors.nbytes]}
        head = orjson.dumps({"embeds": tensor})
        packed = len(head).to_bytes(8, "little") + head + vectors.tobytes()
        return {"prompt_embeds": base64.b64encode(packed).decode("ascii")}


@dataclass(frozen=True, slots=True)
class OpenAIChat(OpenAICompletions):
    """`POST /v1/chat/completions`, with prompts as random words."""

    path: str = "/v1/chat/completions"

    def _prompt(self, request: PlannedRequest, seed: int) -> dict[str, Any]:
        content = random_text(seed, request.index, request.prompt_tokens)
        return {"messages": [{"role": "user", "content": content}]}


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp's `POST /completion`: a request names its adapter by number, with a scale of 1.

    Adapters that a list leaves out have a scale of 0; an empty list applies all of them with the server's scales.
    """

    ids: Mapping[str, int]
    path: str = "/completion"

    def body(self, request: PlannedRequest, model: str | None, settings: LoadSettings) -> dict[str, Any]:
        none = [{"id": number, "scale": 0.0} for number in self.ids.values()]
        return {
            "prompt": token_ids(settings.seed, request.index, request.prompt_tokens),
            "n_predict": request.output_tokens,
            "temperature": 0.0,
            "ignore_eos": settings.ignore_eos,
            "cache_prompt": False,
            "stream": True,
            "lora": none if model is None else [{"id": self.ids[model], "scale": 1.0}],
        }

    def read(self, event: dict[str, Any]) -> StreamEvent:
        named = len(event.get("tokens") or ())
        if event.get("stop"):
            tokens = named or int(bool(event.get("content")))
            return StreamEvent(tokens, event.get("tokens_predicted"), event.get("tokens_evaluated"))
        return StreamEvent(named or int("content" in event))


Dialect: TypeAlias = OpenAICompletions | LlamaCpp  # the body of a request and the events of an answer


def request_head(dialect: Dialect, root: str, headers: Mapping[str, str]) -> str:
    """Returns the HTTP head that all requests of a run share, up to the value of Content-Length."""
    parts = urlsplit(root)
    own = {"Host": parts.netloc, "Content-Type": "application/json", "Accept": "text/event-stream"}
    lines = (f"{name}: {value}" for name, value in {**own, **headers}.items())
    return "\r\n".join([f"POST {parts.path}{dialect.path} HTTP/1.1", *lines, "Content-Length: "])


def decode(dialect: Dialect, exchange: HttpExchange) -> ParsedAnswer:
    """Parses a response. Errors of the connection, of HTTP and in the stream are returned in it, not raised."""
    if exchange.error is not None:
        return ParsedAnswer((), 0, None, error=exchange.error)
    if exchange.status != 200:
        return ParsedAnswer((), 0, None, error=f"HTTP {exchange.status}: {_message(exchange.body)}")
    token_s: list[float] = []
    output_tokens = prompt_tokens = error = None
    phases = _phases(exchange.headers.get(_PHASES, ""))
    for at_s, line in _lines(exchange.pieces):
        if line.startswith(b": phases "):
            phases = _phases(line[9:].decode("latin-1"))
        if not line.startswith(b"data:") or line == b"data: [DONE]":
            continue
        try:
            event = orjson.loads(line[5:])
            if isinstance(event, dict) and event.get("error"):
                error = _message(orjson.dumps(event))
                break
            said = dialect.read(event)
        except orjson.JSONDecodeError:
            error = f"not JSON: {_shown(line)}"
            break
        except (AttributeError, KeyError, TypeError):
            error = f"not an event: {_shown(line)}"
            break
        token_s.extend([at_s] * said.tokens)
        output_tokens = said.output_tokens if said.output_tokens is not None else output_tokens
        prompt_tokens = said.prompt_tokens if said.prompt_tokens is not None else prompt_tokens
    if not token_s:
        error = error or "the answer has no tokens"
    count = output_tokens if output_tokens is not None and error is None else len(token_s)
    return ParsedAnswer(tuple(token_s), count, prompt_tokens, phases, error)


def _lines(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yields the lines of a stream, each with the time of the piece that completed it."""
    rest = b""
    for at_s, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line := line.rstrip(b"\r"):
                yield at_s, line
    if rest:
        yield pieces[-1][0], rest


def _phases(text: str) -> tuple[tuple[str, float], ...]:
    """Parses `queued=1.5;load=0` into pairs; values that are not numbers are left out."""
    pairs = []
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        try:
            pairs.append((name, float(value)))
        except ValueError:
            continue
    return tuple(pairs)


def _message(body: bytes) -> str:
    """Returns the message of an error body in OpenAI's or FastAPI's form, otherwise the start of the body."""
    try:
        content = orjson.loads(body)
        error = content.get("error", content)
        message = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (orjson.JSONDecodeError, AttributeError):
        message = None
    return str(message) if message else _shown(body)


def _shown(body: bytes) -> str:
    return body[:_SHOWN_CHARACTERS].decode("utf-8", "replace").strip() or "an empty answer"
