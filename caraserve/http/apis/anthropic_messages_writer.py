"""Writes the answers of POST /v1/messages: a message, or its events; and the errors of that API."""

from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from caraserve.core.reasoning_progress import ReasoningProgress
from caraserve.errors import CaraServeError, RateLimited, ThreadsUnsupported
from caraserve.http.api_request import ResponseTotals, StreamFormat, TokenCounts
from caraserve.http.apis.answer_blocks import AnswerBlocks, Block, BlockChange, BlockKind, BlocksWriter
from caraserve.util.tasks import in_turns

_OVERLOADED = 529
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# Of each kind of block: the type of its deltas, and their key with the text.
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def error_status(status: int, error: CaraServeError | None = None) -> int:
    """The API's status for one of ours, which may be that of `error`. What may work when it is sent again later is an
    overload, unless the client's key is limited."""
    return _OVERLOADED if status in (429, 503) and not isinstance(error, RateLimited) else status


def error_object(status: int, message: str, code: str | None) -> dict[str, Any]:
    """An error in the shape of the API. `status`: as `error_status` gives it. `code`: OpenAI's, or our own."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code}} if code == ThreadsUnsupported.code else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}


class MessagesStream(StreamFormat):
    """The `StreamFormat` of the Messages API. An error is its last event, so a comment ends all streams alike."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def error_event(self, error: CaraServeError, num_events: int) -> bytes:
        return _event(error_object(error_status(error.status, error), error.message, error.code))


class MessagesWriter(MessagesStream, BlocksWriter):
    """The `AnswerWriter` of the Messages API. `fills_context`: the limit is the context's, below the client's."""

    def __init__(
        self,
        message_id: str,
        model: str,
        blocks: AnswerBlocks,
        reasoning: ReasoningProgress | None,
        *,
        fills_context: bool,
    ) -> None:
        super().__init__(blocks, reasoning)
        self._head = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._fills_context = fills_context
        self._has_calls = False

    def _first_events(self, counts: TokenCounts) -> list[bytes]:
        unknown: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **unknown, "usage": _usage(counts._replace(completion=0))}
        return [_event({"type": "message_start", "message": message})]

    def last_events(self, totals: ResponseTotals) -> bytes:
        message_delta = {"type": "message_delta", "delta": self._stop(), **self._ending(totals)}
        return _event(message_delta) + _event({"type": "message_stop"})

    async def _response(self, blocks: Sequence[Block], totals: ResponseTotals) -> web.Response:
        content = [self._whole_block(block) async for block in in_turns(blocks)]
        body = orjson.dumps({**self._head, "content": content, **self._stop(), **self._ending(totals)})
        return web.Response(body=body, content_type="application/json")

    def _events_of(self, change: BlockChange) -> list[bytes]:
        block = change.block
        kind, more = "content_block_stop", dict[str, Any]()
        if change.kind == "start":
            self._has_calls |= block.kind == "call"
            kind, more = "content_block_start", {"content_block": _empty(block)}
        elif change.kind == "add":
            delta, key = _DELTAS[block.kind]
            kind, more = "content_block_delta", {"delta": {"type": delta, key: change.text}}
        return [_event({"type": kind, "index": block.index, **more})]

    def _whole_block(self, block: Block) -> dict[str, Any]:
        """A block of a whole message. A call whose arguments are cut off is a text, so that no client runs it."""
        if block.kind == "reasoning":
            return _empty(block) | {"thinking": block.text}
        if block.kind == "text" or not _is_object(block.text):
            return {"type": "text", "text": block.text}
        self._has_calls = True
        return _empty(block) | {"input": orjson.Fragment(block.text)}  # orjson has no integers above 64 bits

    def _stop(self) -> dict[str, Any]:
        """The reason for which the answer ended."""
        finish, sequence = self._finish, None
        reason = "tool_use" if self._has_calls else "end_turn"
        if finish is not None and finish.reason == "length":
            reason = "model_context_window_exceeded" if self._fills_context else "max_tokens"
        elif finish is not None and isinstance(finish.stop_reason, str):
            reason, sequence = "stop_sequence", finish.stop_reason
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _ending(self, totals: ResponseTotals) -> dict[str, Any]:
        """The last fields of an answer, the usage at the end: there an instance that forwards reads it."""
        reasoning = self._reasoning
        details = {} if reasoning is None else {"output_tokens_details": {"thinking_tokens": reasoning.num_tokens}}
        return {"system_fingerprint": totals.served_by, "usage": _usage(totals.tokens) | details}


def _empty(block: Block) -> dict[str, Any]:
    """A block without its text."""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _event(value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), orjson.dumps(value))


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _usage(tokens: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.completion,
    }
