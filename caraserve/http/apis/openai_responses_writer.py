"""Writes the answers of POST /v1/responses: a response object, or its typed events."""

import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from caraserve.core.reasoning_progress import ReasoningProgress
from caraserve.core.request import Finish
from caraserve.errors import CaraServeError
from caraserve.http.api_request import ResponseTotals, StreamFormat, TokenCounts
from caraserve.http.apis.answer_blocks import AnswerBlocks, Block, BlockChange, BlockKind, BlocksWriter
from caraserve.http.responses import json_response
from caraserve.util.tasks import in_turns

_ID_PREFIXES: dict[BlockKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
_ITEM_TYPES: dict[BlockKind, str] = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
# In the types of the events of texts.
_TEXT_NAMES: dict[BlockKind, str] = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}


class ResponsesStream(StreamFormat):
    """The `StreamFormat` of the Responses API. Its events do not end a stream by themselves, so a comment does."""

    def error_event(self, error: CaraServeError, num_events: int) -> bytes:
        fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return _event("error", {"sequence_number": num_events, **fields})


class ResponsesWriter(ResponsesStream, BlocksWriter):
    """The `AnswerWriter` of the Responses API. `head`: the fields of the response object that are known already."""

    def __init__(self, head: dict[str, Any], blocks: AnswerBlocks, reasoning: ReasoningProgress | None) -> None:
        super().__init__(blocks, reasoning)
        self._head = head
        self._items: list[dict[str, Any]] = []  # of the blocks that have ended
        self._num_events = 0

    def _first_events(self, counts: TokenCounts) -> list[bytes]:
        started = self._object("in_progress")
        return [self._event(f"response.{kind}", response=started) for kind in ("created", "in_progress")]

    def last_events(self, totals: ResponseTotals) -> bytes:
        status = _status(self._finish)
        return self._event(f"response.{status}", response=self._object(status, totals))

    def error_event(self, error: CaraServeError, num_events: int) -> bytes:
        failed = self._object("failed") | {"error": {"code": error.code or error.type, "message": error.message}}
        return self._event("response.failed", response=failed)

    async def _response(self, blocks: Sequence[Block], totals: ResponseTotals) -> web.Response:
        async for block in in_turns(blocks):
            self._end(block)
        return json_response(self._object(_status(self._finish), totals))

    def _usage(self, tokens: TokenCounts) -> dict[str, Any]:
        reasoning_tokens = 0 if self._reasoning is None else self._reasoning.num_tokens
        return {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached, "cache_write_tokens": 0},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": tokens.prompt + tokens.completion,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        written = _event(kind, {"sequence_number": self._num_events, **fields})
        self._num_events += 1
        return written

    def _events_of(self, change: BlockChange) -> list[bytes]:
        block, text_name = change.block, _TEXT_NAMES[change.block.kind]
        at: dict[str, Any] = {"output_index": block.index}
        of_item = at | {"item_id": _item_id(block)} | ({} if block.kind == "call" else {"content_index": 0})
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.kind == "add":
            return [self._event(f"response.{text_name}.delta", delta=change.text, **logprobs, **of_item)]
        if change.kind == "start":
            events = [self._event("response.output_item.added", item=_item(block, "in_progress"), **at)]
            if block.kind != "call":
                events.append(self._event("response.content_part.added", part=_part(block.kind, ""), **of_item))
            return events
        item = self._end(block)
        if block.kind == "call":
            done = {"name": block.name, "arguments": item["arguments"]}
            events = [self._event(f"response.{text_name}.done", **done, **of_item)]
        else:
            part = item["content"][0]
            events = [
                self._event(f"response.{text_name}.done", text=part["text"], **logprobs, **of_item),
                self._event("response.content_part.done", part=part, **of_item),
            ]
        return [*events, self._event("response.output_item.done", item=item, **at)]

    def _end(self, block: Block) -> dict[str, Any]:
        self._items.append(_item(block, _status(self._finish) if block is self._blocks.last else "completed"))
        return self._items[-1]

    def _object(self, status: str, totals: ResponseTotals | None = None) -> dict[str, Any]:
        fingerprint = {} if totals is None else {"system_fingerprint": totals.served_by}
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._items,
            **fingerprint,
            # The last field: there an instance that forwards reads it.
            "usage": None if totals is None else self._usage(totals.tokens),
        }


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _status(finish: Finish | None) -> str:
    return "incomplete" if finish is not None and finish.reason == "length" else "completed"


def _item_id(block: Block) -> str:
    return f"{_ID_PREFIXES[block.kind]}_{block.id}"


def _item(block: Block, status: str) -> dict[str, Any]:
    """A block as an item; one in progress is empty, also if its text is known already."""
    is_empty = status == "in_progress"
    head = {"id": _item_id(block), "type": _ITEM_TYPES[block.kind], "status": status}
    if block.kind == "call":
        return head | {"call_id": block.call_id, "name": block.name, "arguments": "" if is_empty else block.text}
    own: dict[str, Any] = {"role": "assistant"} if block.kind == "text" else {"summary": []}
    return head | own | {"content": [] if is_empty else [_part(block.kind, block.text)]}


def _part(kind: BlockKind, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
