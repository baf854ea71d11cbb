"""Whole answers: gathers a request's deltas and writes them as JSON, some tokens at a time.

Logprobs of thousands of tokens are tens of megabytes. They are written as the tokens come, in parts of a millisecond
with turns of the event loop in between, and the answer is handed to the socket in blocks; it is never one object.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Protocol

import orjson
from aiohttp import web

from caraserve.core.request import Finish, TokenDelta
from caraserve.http.interfaces import StreamApi
from caraserve.util.tasks import TurnBudget, in_turns

_PART_SCORES = 256  # written at once, at 2 to 4 µs each
TURN_SCORES = 512  # written by all requests in one turn of the event loop
_DELTA_COST = 32  # scores that are written in the time that an event takes without any
_BLOCK_BYTES = 256 << 10  # handed to the socket at once


class WholeChoiceWriter(Protocol):
    """An answer in the shape of its API, in three parts: what stands before its logprobs, these, and what follows."""

    def scores(self, delta: TokenDelta) -> dict[str, list[Any]] | None:
        """The logprobs of a delta, by the field of `logprobs` that they are added to; None where none are wanted."""

    def around(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        """The fields before and after `logprobs`; `answer` has the text and tokens of all deltas."""


async def paced(delta: TokenDelta, turns: TurnBudget) -> AsyncIterator[TokenDelta]:
    """The delta in parts that are each written in a millisecond or two, each when the event loop's turn has time for
    it. The text is in the first part that has tokens, the finish in the last. A delta without logprobs is one part,
    at once."""
    scores = _num_scores(delta)
    if not scores:
        yield delta
        return
    for part in _parts(delta) if scores > _PART_SCORES else (delta,):
        await turns.spend(_DELTA_COST + min(scores, _PART_SCORES))
        yield part


def _num_scores(delta: TokenDelta) -> int:
    if not delta.logprobs and not delta.prompt_logprobs:
        return 0
    last = delta.logprobs[-1] if delta.logprobs else delta.prompt_logprobs[-1]
    alternatives = 0 if last is None else len(last.top)
    return (len(delta.logprobs) + len(delta.prompt_logprobs)) * (1 + alternatives)


def _parts(delta: TokenDelta) -> Iterator[TokenDelta]:
    tokens = len(delta.logprobs) + len(delta.prompt_logprobs)
    step = max(1, _PART_SCORES * tokens // _num_scores(delta))
    for start in range(0, len(delta.prompt_logprobs), step):
        yield TokenDelta("", (), prompt_logprobs=delta.prompt_logprobs[start : start + step])
    first, rest = delta.logprobs[:step], delta.logprobs[step:]
    if delta.token_ids or delta.text or delta.finish:
        yield TokenDelta(delta.text, delta.token_ids, first, finish=None if rest else delta.finish)
    for start in range(0, len(rest), step):
        is_last = start + step >= len(rest)
        yield TokenDelta("", (), rest[start : start + step], finish=delta.finish if is_last else None)


class WholeAnswer:
    """One choice's answer as it grows. `choice.around` is called once, when the last delta is there."""

    def __init__(self, choice: WholeChoiceWriter) -> None:
        self.finish: Finish | None = None
        self._choice = choice
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._scores: dict[str, list[bytes]] = {}  # of each field, entries with their commas

    async def gather(self, stream: StreamApi, turns: TurnBudget) -> None:
        """Takes all deltas of a stream."""
        async for delta in stream:
            self._text.append(delta.text)
            self._token_ids += delta.token_ids
            self.finish = delta.finish or self.finish
            async for part in paced(delta, turns):
                self._add_scores(self._choice.scores(part))

    def _add_scores(self, scores: dict[str, list[Any]] | None) -> None:
        if scores is None:
            return
        for name, entries in scores.items():
            written = self._scores.setdefault(name, [])
            if entries:
                comma = b"," if written else b""
                written.append(comma + orjson.dumps(entries)[1:-1])

    def pieces(self) -> Iterator[bytes]:
        """The entry of `choices`."""
        before, after = self._choice.around(TokenDelta("".join(self._text), tuple(self._token_ids), finish=self.finish))
        yield orjson.dumps(before)[:-1] + b',"logprobs":'
        brace = b"{"
        for name, written in self._scores.items():
            yield b'%b"%b":[' % (brace, name.encode())
            yield from written
            written.clear()  # a part at a time: 100,000 parts take 5 ms to free
            yield b"]"
            brace = b","
        yield b"}," if self._scores else b"null,"
        yield orjson.dumps(after)[1:]


async def whole_response(
    head: dict[str, Any], answers: Sequence[WholeAnswer], tail: dict[str, Any], headers: dict[str, str]
) -> web.Response:
    """The response with the fields of `head`, all choices, and the fields of `tail`."""
    blocks, block = [], [orjson.dumps(head)[:-1] + b',"choices":[']
    size = 0
    async for piece in in_turns(_all_pieces(answers)):
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK_BYTES:
            blocks.append(b"".join(block))
            block, size = [], 0
    block.append(b"]," + orjson.dumps(tail)[1:])
    blocks.append(b"".join(block))
    if len(blocks) == 1:
        return web.Response(body=blocks[0], headers=headers, content_type="application/json")
    length = {"Content-Length": str(sum(map(len, blocks)))}
    return web.Response(body=_each(blocks), headers=headers | length, content_type="application/json")


def _all_pieces(answers: Sequence[WholeAnswer]) -> Iterator[bytes]:
    for position, answer in enumerate(answers):
        if position:
            yield b","
        yield from answer.pieces()


async def _each(blocks: Sequence[bytes]) -> AsyncIterator[bytes]:
    async for block in in_turns(blocks):  # a fast reader's socket takes them all without a wait
        yield block
