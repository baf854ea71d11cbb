"""Responses that are not streamed: gathers a request's deltas and writes them as JSON, some tokens at a time.

Logprobs of thousands of tokens are tens of megabytes. They are encoded as the tokens come, in parts of a millisecond
with turns of the event loop in between, and written to the socket in blocks; the response is never one object.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import orjson
from aiohttp import web

from caraserve.core.request import Finish, TokenDelta
from caraserve.engine.token_stream import TokenStream
from caraserve.engine.unread import FREE_BYTES, UnreadAnswer, kept_size_of
from caraserve.errors import ReaderTooSlow
from caraserve.util.tasks import TurnBudget, in_turns

_PART_LOGPROBS = 256  # encoded at once, at 2 to 4 µs each
TURN_LOGPROBS = 512  # encoded by all requests in one turn of the event loop
_DELTA_COST = 32  # an event without logprobs takes as long as this many logprobs
_BLOCK_BYTES = 256 << 10  # written to the socket at once
# Of the fields that a writer's `logprobs` returns, the one that is not a part of `logprobs`.
PROMPT_LOGPROBS = "prompt_logprobs"


def paced(delta: TokenDelta, turns: TurnBudget) -> AsyncIterator[TokenDelta]:
    """The delta in parts that each take one or two milliseconds to encode, each when the event loop's turn has time
    for it. The text is in the first part that has tokens, the finish in the last. A delta without logprobs is one part
    and does not wait."""
    count = _num_logprobs(delta)
    return _paced_parts(delta, count, turns) if count else in_turns((delta,))


async def _paced_parts(delta: TokenDelta, count: int, turns: TurnBudget) -> AsyncIterator[TokenDelta]:
    for part in _parts(delta) if count > _PART_LOGPROBS else (delta,):
        await turns.spend(_DELTA_COST + min(count, _PART_LOGPROBS))
        yield part


def _num_logprobs(delta: TokenDelta) -> int:
    if not delta.logprobs and not delta.prompt_logprobs:
        return 0
    last = delta.logprobs[-1] if delta.logprobs else delta.prompt_logprobs[-1]
    alternatives = 0 if last is None else len(last.top_ids)
    return (len(delta.logprobs) + len(delta.prompt_logprobs)) * (1 + alternatives)


def _parts(delta: TokenDelta) -> Iterator[TokenDelta]:
    tokens = len(delta.logprobs) + len(delta.prompt_logprobs)
    step = max(1, _PART_LOGPROBS * tokens // _num_logprobs(delta))
    for start in range(0, len(delta.prompt_logprobs), step):
        yield TokenDelta("", (), prompt_logprobs=delta.prompt_logprobs[start : start + step])
    first, rest = delta.logprobs[:step], delta.logprobs[step:]
    if delta.token_ids or delta.text or delta.finish:
        yield TokenDelta(delta.text, delta.token_ids, first, finish=None if rest else delta.finish)
    for start in range(0, len(rest), step):
        is_last = start + step >= len(rest)
        yield TokenDelta("", (), rest[start : start + step], finish=delta.finish if is_last else None)


class WholeAnswer:
    """Collects the deltas of one engine request. `logprobs_of`: the logprobs of a delta, by field."""

    def __init__(self, logprobs_of: Callable[[TokenDelta], dict[str, list[Any]] | None]) -> None:
        self.finish: Finish | None = None
        self.embedding: bytes | None = None
        self._logprobs_of = logprobs_of
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[str, list[bytes]] = {}  # of each field, encoded entries with their commas

    @property
    def num_tokens(self) -> int:
        """The tokens gathered so far."""
        return len(self._token_ids)

    async def gather(self, stream: TokenStream, turns: TurnBudget) -> None:
        """Collects all deltas of a stream. Raises ServerBusy if there is no memory for them."""
        async for delta in stream:
            self._text.append(delta.text)
            self._token_ids += delta.token_ids
            self.finish = delta.finish or self.finish
            self.embedding = delta.embedding
            stream.unread.keep(kept_size_of(delta))
            async for part in paced(delta, turns):
                stream.unread.keep(self._add_logprobs(self._logprobs_of(part)))

    def _add_logprobs(self, logprobs: dict[str, list[Any]] | None) -> int:
        """Encodes logprobs. Returns their bytes."""
        if logprobs is None:
            return 0
        num_bytes = 0
        for name, entries in logprobs.items():
            written = self._logprobs.setdefault(name, [])
            if entries:
                comma = b"," if written else b""
                written.append(comma + orjson.dumps(entries)[1:-1])
                num_bytes += len(written[-1])
        return num_bytes

    def joined(self) -> TokenDelta:
        """The text and the tokens of all deltas, and the finish."""
        return TokenDelta("".join(self._text), tuple(self._token_ids), finish=self.finish)

    def encoded_prompt_logprobs(self) -> Iterator[bytes]:
        """The encoded `prompt_logprobs` with a comma, or nothing. Call it once, and before `encoded_logprobs`."""
        written = self._logprobs.pop(PROMPT_LOGPROBS, None)
        if written is not None:
            yield b'"%b":[' % PROMPT_LOGPROBS.encode()
            yield from written
            yield b"],"

    def encoded_logprobs(self) -> Iterator[bytes]:
        """The encoded value of `logprobs`. Call it once."""
        brace = b"{"
        for name, written in self._logprobs.items():
            yield b'%b"%b":[' % (brace, name.encode())
            yield from written
            written.clear()  # freed one field at a time: freeing 100,000 entries takes 5 ms
            yield b"]"
            brace = b","
        yield b"}" if self._logprobs else b"null"


class AnswerBody:
    """The body of a whole answer, in blocks. Each is freed when it has been written."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = deque(blocks)
        self.num_bytes = sum(map(len, self._blocks))
        self._unread: UnreadAnswer | None = None
        self._cut: Callable[[], None] | None = None

    def count(self, unread: UnreadAnswer, cut: Callable[[], None]) -> None:
        """Counts as unread what has not been written. `cut`: ends the connection."""
        self._unread, self._cut = unread, cut
        unread.complete(self.num_bytes)
        unread.parts.append(ref(self))

    def end_unread(self, error: ReaderTooSlow) -> None:
        """Cuts the connection: an error cannot follow the half of a JSON document."""
        if self._cut is not None:
            self._cut()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for block in in_turns(self._taken()):  # writing to a fast reader never waits, so it needs these rests
            yield block
            self._note_written(len(block))

    def _taken(self) -> Iterator[bytes]:
        while self._blocks:
            yield self._blocks.popleft()

    def _note_written(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        if self._unread is not None:
            self._unread.read(num_bytes)

    def __del__(self) -> None:
        self._note_written(self.num_bytes)  # the client has left


ANSWER_BODY = web.ResponseKey("ANSWER_BODY", AnswerBody)  # of a response with a large one


async def response_of(pieces: Iterable[bytes]) -> web.Response:
    """The response whose body is these pieces of JSON."""
    blocks, block, size = [], list[bytes](), 0
    async for piece in in_turns(pieces):
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK_BYTES:
            blocks.append(b"".join(block))
            block, size = [], 0
    blocks.append(b"".join(block))
    if len(blocks) == 1 and len(blocks[0]) <= FREE_BYTES:
        return web.Response(body=blocks[0], content_type="application/json")
    body = AnswerBody(blocks)
    length = {"Content-Length": str(body.num_bytes)}
    response = web.Response(body=body, headers=length, content_type="application/json")
    response[ANSWER_BODY] = body
    return response
