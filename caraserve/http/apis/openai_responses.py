"""POST /v1/responses, OpenAI's Responses API: reads a body as the fields of a chat, and
writes its answers: a response object, or typed events.

Nothing is stored: clients send the whole conversation with every request.
"""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from caraserve.core.reasoning_progress import ReasoningProgress
from caraserve.core.request import Finish
from caraserve.errors import CaraServeError, InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder
from caraserve.http.api_request import ApiRequest, ResponseTotals, StreamFormat, TokenCounts
from caraserve.http.apis.answer_blocks import AnswerBlocks, Block, BlockChange, BlockKind, BlocksWriter
from caraserve.http.apis.chat import ParsedChat, parse_chat_fields
from caraserve.http.apis.chat_translation import (
    checked_choice,
    checked_object,
    checked_text,
    client_names,
    joined_text,
    read_arguments,
    shared_values,
    skip_unread,
)
from caraserve.http.body import translated_schema as body
from caraserve.http.body.field_types import Fields, shown
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.translated_schema import RESPONSES
from caraserve.http.client import Client
from caraserve.http.responses import json_response
from caraserve.loop import Engine
from caraserve.util.tasks import in_shared_turns, in_turns

_NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "].function.": "].",
}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_REASONING_PARTS = {"reasoning_text": "text"}
_ROLES = ("user", "assistant", "system", "developer")
_LOGPROBS = "message.output_text.logprobs"
_MAX_INCLUDED = 64
_MAX_METADATA = 16  # of OpenAI, as the two lengths
_METADATA_CHARACTERS = (64, 512)
_ID_PREFIXES: dict[BlockKind, str] = {"reasoning": "rs", "text": "msg", "call": "fc"}
_ITEM_TYPES: dict[BlockKind, str] = {"reasoning": "reasoning", "text": "message", "call": "function_call"}
# In the types of the events of texts.
_TEXT_NAMES: dict[BlockKind, str] = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}


async def parse_response(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, RESPONSES)
    values = await _chat_values(fields)
    metadata = _metadata(fields)
    response_id = f"resp_{secrets.token_hex(16)}"
    chat_fields = Fields(values, _NAMES)
    with client_names(chat_fields):
        chat = await parse_chat_fields(chat_fields, engine, find, client, response_id)
    skip_unread(fields, chat_fields)
    head = _response_head(response_id, fields, values, chat, metadata)
    blocks = AnswerBlocks(chat.tools.callable, chat.reasoning)
    writer = ResponsesWriter(head, blocks, chat.progress(engine.tokenizer))
    return ApiRequest(chat.requests, 1, chat.common.delivery.stream, writer)


def _response_head(
    response_id: str, fields: Fields, values: dict[str, Any], chat: ParsedChat, metadata: dict[str, str]
) -> dict[str, Any]:
    """The fields of the response object that are known before the answer."""
    params = chat.requests[0].params
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": fields.raw("instructions"),
        "max_output_tokens": values["max_tokens"],
        "metadata": metadata,
        "model": chat.common.model,
        "parallel_tool_calls": values["parallel_tool_calls"] is not False,
        "previous_response_id": None,
        "reasoning": {"effort": values["reasoning_effort"], "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": fields.mapping("text").get("format") or {"type": "text"}},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": [
            {"type": "function", "strict": None, "parameters": None, **tool["function"]}
            for tool in chat.tools.in_prompt
        ],
        "top_p": params.top_p,
        "truncation": "disabled",
    }


async def _chat_values(fields: Fields) -> dict[str, Any]:
    """The fields of the chat that a body stands for."""
    body.STORE.read(fields)  # the answer says that nothing is stored
    fields.nested("stream_options").raw("include_obfuscation")
    for wanted in fields.array("include", _MAX_INCLUDED):
        if wanted == _LOGPROBS:
            raise InvalidRequest(f"{_LOGPROBS} are in /v1/chat/completions only; leave it out.", param="include")
        fields.skip(f"include.{wanted}")
    instructions = body.INSTRUCTIONS.read(fields)
    system = [{"role": "system", "content": instructions}] if instructions else []
    tools = _functions(fields)
    return shared_values(fields, RESPONSES) | {
        "messages": system + await _messages(fields),
        "max_tokens": body.MAX_OUTPUT_TOKENS.read(fields),
        "reasoning_effort": fields.nested("reasoning").raw("effort"),
        "response_format": _response_format(fields),
        "tools": tools,
        "tool_choice": _tool_choice(fields),
    }


async def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.raw("input")
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        what = "nothing" if given is None else shown(given)
        raise InvalidRequest(f"input must be a string or a list of items, not {what}.", param="input")
    messages: list[dict[str, Any]] = []
    async for at, item in in_shared_turns(enumerate(fields.array("input", body.MAX_ITEMS))):
        await _add_item(messages, checked_object(item, f"input[{at}]", "input"), f"input[{at}]", fields)
    return messages


async def _add_item(messages: list[dict[str, Any]], item: dict[str, Any], name: str, fields: Fields) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role = checked_choice(item.get("role"), _ROLES, f"{name}.role", "input")
        is_answer = role == "assistant"
        content = await joined_text(item.get("content"), f"{name}.content", _PARTS, "input", may_be_absent=is_answer)
        begun = _assistant(messages) if is_answer else None
        if begun is not None and begun["content"] is None and "tool_calls" not in begun:
            begun["content"] = content  # after its reasoning
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        function = {
            "name": checked_text(item, "name", name, "input"),
            "arguments": await read_arguments(item.get("arguments"), f"{name}.arguments", "input"),
        }
        call = {"id": checked_text(item, "call_id", name, "input"), "type": "function", "function": function}
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id = checked_text(item, "call_id", name, "input")
        content = await joined_text(item.get("output"), f"{name}.output", _PARTS, "input", may_be_absent=True)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        if item.get("content"):
            text = await joined_text(item["content"], f"{name}.content", _REASONING_PARTS, "input")
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        else:
            fields.skip("input.reasoning")  # of another server, encrypted
    elif kind == "item_reference":
        raise InvalidRequest(
            f"{name} refers to a stored item, and nothing is stored here; send the item itself, as clients do when "
            "store is false.",
            param="input",
        )
    else:
        raise InvalidRequest(
            f"{name}.type must be message, function_call, function_call_output or reasoning, not {shown(kind)}.",
            param="input",
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that the next item belongs to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _functions(fields: Fields) -> list[dict[str, Any]]:
    """The tools that the client calls itself. No others exist here, so the model never calls those."""
    functions = []
    for at, given in enumerate(body.RESPONSE_TOOLS.read(fields)):
        tool = checked_object(given, f"tools[{at}]", "tools")
        kind = checked_text(tool, "type", f"tools[{at}]", "tools")
        if kind == "function":
            function = {key: tool.get(key) for key in ("name", "description", "parameters", "strict")}
            functions.append({"type": "function", "function": function})
        else:
            fields.skip(f"tools.{kind}")
    return functions


def _tool_choice(fields: Fields) -> Any:
    choice = fields.raw("tool_choice")
    if choice in (None, "auto"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice in ("none", "required"):
        return choice
    raise InvalidRequest(
        f'tool_choice must be none, auto, required or {{"type": "function", "name": …}}, not {shown(choice)}.',
        param="tool_choice",
    )


def _response_format(fields: Fields) -> dict[str, Any] | None:
    given = fields.nested("text").mapping("format")
    kind = given.get("type", "text" if not given else None)
    if kind == "json_schema":
        return {"type": kind, "json_schema": {"schema": given.get("schema")}}
    if kind not in ("text", "json_object"):
        raise InvalidRequest(
            f"text.format.type must be text, json_object or json_schema, not {shown(kind)}.", param="text.format"
        )
    return {"type": kind}


def _metadata(fields: Fields) -> dict[str, str]:
    metadata = fields.mapping("metadata")
    longest_key, longest_value = _METADATA_CHARACTERS
    if len(metadata) > _MAX_METADATA or not all(
        len(key) <= longest_key and isinstance(value, str) and len(value) <= longest_value
        for key, value in metadata.items()
    ):
        raise InvalidRequest(
            f"metadata must hold at most {_MAX_METADATA} strings of up to {longest_value} characters, with keys of up "
            f"to {longest_key}.",
            param="metadata",
        )
    return metadata


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
