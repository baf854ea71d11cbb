"""POST /v1/messages, Anthropic's Messages API, and its count of tokens: reads a body as the fields of a chat,
and writes its answers: a message, or its events; and the errors of that API."""

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from aiohttp import web

from caraserve.core.reasoning_progress import ReasoningProgress
from caraserve.errors import CaraServeError, ContextLengthExceeded, InvalidRequest, RateLimited, ThreadsUnsupported
from caraserve.http.access.adapter_choice import AdapterFinder, adapter_finder, choose_adapter
from caraserve.http.api_request import ApiRequest, ResponseTotals, StreamFormat, TokenCounts
from caraserve.http.apis.answer_blocks import AnswerBlocks, Block, BlockChange, BlockKind, BlocksWriter
from caraserve.http.apis.chat import MAX_NUMBERS, chat_ids, parse_chat_fields
from caraserve.http.apis.chat_format import ChatFormat
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
from caraserve.http.apis.tool_calls import parse_tools
from caraserve.http.body import fields as body_fields
from caraserve.http.body import translated_schema as body
from caraserve.http.body.field_types import LARGEST, Fields, shown
from caraserve.http.body.json_reader import parse_object
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.translated_schema import MESSAGES
from caraserve.http.client import CLIENT, Client
from caraserve.http.context import CONTEXT
from caraserve.http.responses import json_response, note_ignored, read_body
from caraserve.loop import Engine
from caraserve.tokenizer.reasoning import SWITCHES, ReasoningFormat
from caraserve.util.tasks import in_shared_turns, in_turns

_NAMES = {
    "].function.parameters": "].input_schema",
    "].function.": "].",
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "stop must": "stop_sequences must",
}
_TEXT = {"text": "text"}
_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": None, "any": "required", "none": "none"}
_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
_MAX_EDITS = 64
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


async def parse_message(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    if fields.raw("thread") is not None:
        raise ThreadsUnsupported("thread is not supported: nothing is stored here; send all messages.", param="thread")
    check_fields(fields, MESSAGES)
    limit = body.MAX_TOKENS.read(fields)
    if limit is None:
        raise InvalidRequest("max_tokens is required.", param="max_tokens")
    values = await _chat_values(fields)
    values |= _thinking(fields, (await _chat_format(values, engine, find, client)).reasoning_format)
    message_id, chat_fields = f"msg_{secrets.token_hex(16)}", Fields(values, _names(fields))
    try:
        with client_names(chat_fields):
            # A limit beyond the context is lowered: clients, who must send one, choose it for models with a larger one.
            chat = await parse_chat_fields(chat_fields, engine, find, client, message_id, default_max_tokens=limit)
    except ContextLengthExceeded as error:  # the first words are Anthropic's, by which clients know what to do
        raise ContextLengthExceeded(f"prompt is too long: {error.message}", param=error.param) from None
    skip_unread(fields, chat_fields)
    blocks = AnswerBlocks(chat.tools.callable, chat.reasoning)
    fills_context = chat.requests[0].params.max_tokens < limit
    progress = chat.progress(engine.tokenizer)
    writer = MessagesWriter(message_id, chat.common.model, blocks, progress, fills_context=fills_context)
    return ApiRequest(chat.requests, 1, chat.common.delivery.stream, writer)


async def count_tokens(request: web.Request) -> web.Response:
    """Counts the tokens of a conversation."""
    engine = request.app[CONTEXT].engine
    fields = Fields(await parse_object(await read_body(request), MAX_NUMBERS))
    check_fields(fields, MESSAGES)
    body.MAX_TOKENS.read(fields)
    values = await _chat_values(fields)
    chat_format = await _chat_format(values, engine, adapter_finder(request), request[CLIENT])
    values |= _thinking(fields, chat_format.reasoning_format)
    most = max(body_fields.MAX_TOKENIZED, engine.max_model_len)
    chat = Fields(values, _names(fields))
    with client_names(chat):
        try:
            ids = await chat_ids(chat, chat_format, most, parse_tools(chat, chat_format).in_prompt)
        except ContextLengthExceeded:
            raise InvalidRequest(f"messages have more than {most} tokens; send fewer.", param="messages") from None
    note_ignored(request, fields)
    return json_response({"input_tokens": len(ids)})


async def _chat_format(values: dict[str, Any], engine: Engine, find: AdapterFinder, client: Client) -> ChatFormat:
    """The format of the adapter that a chat names."""
    _, adapter = choose_adapter(Fields(values), engine.base_name, find, client)
    return await ChatFormat.of_adapter(engine.tokenizer, adapter, client.tenant(values["user"] or ""))


async def _chat_values(fields: Fields) -> dict[str, Any]:
    """The fields of the chat that a body stands for, without its reasoning."""
    given = fields.raw("messages")
    if not isinstance(given, list) or not given:
        what = "nothing" if given is None else shown(given)
        raise InvalidRequest(f"messages must be a list of at least one message, not {what}.", param="messages")
    messages: list[dict[str, Any]] = []
    if system := await joined_text(fields.raw("system") or "", "system", _TEXT, "system"):
        messages.append({"role": "system", "content": system})
    async for at, message in in_shared_turns(enumerate(given)):
        await _add_message(messages, checked_object(message, f"messages[{at}]", "messages"), f"messages[{at}]", fields)
    choice = fields.nested("tool_choice")
    values = shared_values(fields, MESSAGES) | {
        "messages": messages,
        "stop": body.STOP_SEQUENCES.read(fields) if fields.raw("stop_sequences") is not None else None,
        "user": fields.nested("metadata").text("user_id", 256),
        "response_format": _response_format(fields),
        "tools": _functions(fields),
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not choice.boolean("disable_parallel_tool_use", False),
    }
    _check_context_management(fields)
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise InvalidRequest("the last message has tool_use blocks; send their tool_result.", param="messages")
        values["continue_final_message"] = True
    return values


async def _add_message(messages: list[dict[str, Any]], message: dict[str, Any], name: str, fields: Fields) -> None:
    """Adds the messages of a chat that a message with blocks stands for."""
    role = checked_choice(message.get("role"), _ROLES, f"{name}.role", "messages")
    content = message.get("content")
    if not isinstance(content, list):
        messages.append({"role": role, "content": await joined_text(content, f"{name}.content", _TEXT, "messages")})
        return
    if not content:
        raise InvalidRequest(f"{name}.content must have at least one block.", param="messages")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    async for at, given in in_shared_turns(enumerate(content)):
        where = f"{name}.content[{at}]"
        block = checked_object(given, where, "messages")
        kind = block.get("type")
        if kind == "text":
            texts.append(checked_text(block, "text", where, "messages"))
        elif kind == "tool_use" and role == "assistant":
            calls.append(await _call(block, where))
        elif kind == "tool_result" and role == "user":
            messages += _user_message(texts)
            texts = []
            messages.append(await _tool_message(block, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(checked_text(block, "thinking", where, "messages"))
        elif kind == "redacted_thinking" and role == "assistant":
            fields.skip("messages.redacted_thinking")  # of another server, encrypted
        else:
            raise InvalidRequest(
                f"{where}.type {shown(kind)} is not served in messages of the {role}; text is, tool_use by the "
                "assistant and tool_result by the user.",
                param="messages",
            )
    if role == "user":
        messages += _user_message(texts)
    else:
        more = {"tool_calls": calls, "reasoning_content": "\n".join(thoughts)}
        kept = {key: value for key, value in more.items() if value}
        messages.append({"role": role, "content": "\n".join(texts), **kept})


def _user_message(texts: list[str]) -> Iterator[dict[str, Any]]:
    if texts:
        yield {"role": "user", "content": "\n".join(texts)}


async def _call(block: dict[str, Any], name: str) -> dict[str, Any]:
    arguments = await read_arguments(block.get("input"), f"{name}.input", "messages")
    function = {"name": checked_text(block, "name", name, "messages"), "arguments": arguments}
    return {"id": checked_text(block, "id", name, "messages"), "type": "function", "function": function}


async def _tool_message(block: dict[str, Any], name: str) -> dict[str, Any]:
    """The message with a tool's result. `is_error` is left for the template."""
    content = block.get("content")
    text = await joined_text(content, f"{name}.content", _TEXT, "messages", may_be_absent=True)
    message = {"role": "tool", "tool_call_id": checked_text(block, "tool_use_id", name, "messages"), "content": text}
    return message | ({"is_error": True} if block.get("is_error") is True else {})


def _functions(fields: Fields) -> list[dict[str, Any]]:
    functions = []
    for at, given in enumerate(body.MESSAGE_TOOLS.read(fields)):
        tool = checked_object(given, f"tools[{at}]", "tools")
        if tool.get("type") not in (None, "custom"):
            raise InvalidRequest(
                f"tools[{at}].type {shown(tool['type'])} is not served; tools with an input_schema are, which the "
                "client calls itself.",
                param="tools",
            )
        schema = checked_object(tool.get("input_schema"), f"tools[{at}].input_schema", "tools")
        function = {key: tool.get(key) for key in ("name", "description", "strict")} | {"parameters": schema}
        functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(choice: Fields) -> Any:
    kind = choice.raw("type")
    if kind is None:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.raw("name")}}
    return _CHOICES[checked_choice(kind, (*_CHOICES, "tool"), "tool_choice.type", "tool_choice")]


def _response_format(fields: Fields) -> dict[str, Any] | None:
    name, given = _format(fields)
    if not given:
        return None
    if given.get("type") != "json_schema":
        raise InvalidRequest(f"{name}.type must be json_schema, not {shown(given.get('type'))}.", param=name)
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


def _format(fields: Fields) -> tuple[str, dict[str, Any]]:
    """The format of the answer, and the field that has it: the newer one, or the older one."""
    if newer := fields.nested("output_config").mapping("format"):
        return "output_config.format", newer
    older = fields.mapping("output_format")
    return "output_format" if older else "output_config.format", older


def _names(fields: Fields) -> dict[str, str]:
    """What the client calls the fields of the chat that a body stands for."""
    name, _ = _format(fields)
    return {"response_format.json_schema": name, "response_format": name, **_NAMES}


def _thinking(fields: Fields, reasoning_format: ReasoningFormat | None) -> dict[str, Any]:
    """The fields of a chat that `thinking` and the effort stand for. Without `thinking` the template decides whether
    the model thinks, and the client does not expect to see it. `reasoning_format`: None for a model that never does."""
    thinking = fields.nested("thinking")
    kind = thinking.raw("type")
    is_on = kind is not None and checked_choice(kind, _THINKING, "thinking.type", "thinking") != "disabled"
    values: dict[str, Any] = {}
    if kind is not None:
        given = fields.mapping("chat_template_kwargs")
        values["chat_template_kwargs"] = dict.fromkeys(SWITCHES, is_on) | given
    if reasoning_format is None:
        return values
    values["include_reasoning"] = is_on and thinking.raw("display") != "omitted"
    if is_on:
        values["reasoning_effort"] = fields.nested("output_config").raw("effort")
    if kind == "disabled" and reasoning_format.switch is None:
        values["thinking_token_budget"] = 0
    else:
        values["thinking_token_budget"] = thinking.integer("budget_tokens", 0, LARGEST)
    return values


def _check_context_management(fields: Fields) -> None:
    """Raises InvalidRequest for what would change the messages. Clearing thoughts does not: templates do so anyway."""
    for edit in fields.nested("context_management").array("edits", _MAX_EDITS):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith("clear_thinking"):
            raise InvalidRequest(
                f"context_management: {shown(kind)} is not served; the messages are used as they are.",
                param="context_management",
            )


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
