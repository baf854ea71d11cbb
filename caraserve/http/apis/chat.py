"""POST /v1/chat/completions: makes a prompt of messages by the model's template, writes deltas in OpenAI's shape."""

import dataclasses
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from caraserve.core.reasoning_progress import ReasoningProgress
from caraserve.core.request import Finish, GenerateRequest, TokenDelta, with_params
from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http.access.adapter_choice import AdapterFinder
from caraserve.http.api_request import ApiRequest
from caraserve.http.apis.answer_blocks import AnswerBlocks, Block, BlockChange, BlockKind
from caraserve.http.apis.chat_format import ChatFormat
from caraserve.http.apis.chat_translation import joined_text, read_arguments
from caraserve.http.apis.choices import (
    Choice,
    ChoicesWriter,
    ResponseHeads,
    TokenNames,
    finish_fields,
    finite,
)
from caraserve.http.apis.completions import (
    DEFAULT_MAX_TOKENS,
    CommonFields,
    encode,
    fan_out,
    parse_common,
    parse_prompt_logprobs,
    response_head,
)
from caraserve.http.apis.reasoning import Reasoning, add_tokens, parse_reasoning, template_arguments
from caraserve.http.apis.structured_output import parse_grammar
from caraserve.http.apis.tool_calls import ChatTools, parse_tools
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.limits import AnswerLimits, check_logprobs, most_scored_tokens, parse_truncation
from caraserve.http.body.request_schema import CHAT
from caraserve.http.body.sampling import default_limit, sampling_params
from caraserve.http.client import Client
from caraserve.loop import Engine
from caraserve.tokenizer.tokenizer import Tokenizer
from caraserve.util.tasks import in_shared_turns, in_turns

_ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_MESSAGES = 4096
_TEXT_PARTS = {"text": "text"}  # of a content that is a list: the key of the text by the type of the part
_OWN_PARTS = {**_TEXT_PARTS, "refusal": "refusal"}  # in messages of the assistant
# Keys of a message and of a delta. Templates know the first; vLLM writes the second, which newer clients read.
_REASONING = ("reasoning_content", "reasoning")
MAX_NUMBERS = 1 << 16  # in lists of a body, of which a chat has few; a template takes 5 ms to write them as JSON


async def parse_chat(fields: Fields, engine: Engine, find: AdapterFinder, client: Client) -> ApiRequest:
    """Reads a body. Raises InvalidRequest, ContextLengthExceeded or NotFound, which name the field."""
    check_fields(fields, CHAT)
    response_id = f"chatcmpl-{secrets.token_hex(16)}"
    chat = await parse_chat_fields(fields, engine, find, client, response_id)
    delivery, model = chat.common.delivery, chat.common.model
    names = TokenNames(engine.tokenizer, by_id=delivery.tokens_as_ids)
    choices = []
    for index, request in enumerate(chat.requests):
        blocks = AnswerBlocks(chat.tools.callable, chat.reasoning, keeps_text=not delivery.stream)
        scored, progress = request.params.prompt_logprobs, chat.progress(engine.tokenizer)
        choices.append(ChatChoice(index, request, names, scored, delivery.token_ids, blocks, progress))
    shown_prompt = {"prompt_token_ids": chat.requests[0].prompt_ids} if delivery.token_ids else {}
    heads = ResponseHeads(
        response_head(response_id, "chat.completion", model) | shown_prompt,
        response_head(response_id, "chat.completion.chunk", model),
        shown_prompt,
        has_prompt_logprobs=chat.requests[0].params.prompt_logprobs is not None,
    )
    return ApiRequest(chat.requests, chat.common.n, delivery.stream, ChoicesWriter(choices, heads, delivery))


@dataclasses.dataclass(frozen=True, slots=True)
class ParsedChat:
    """The engine requests of a chat, and what the writer of its answer needs."""

    common: CommonFields
    tools: ChatTools
    reasoning: Reasoning | None
    requests: tuple[GenerateRequest, ...]

    def progress(self, tokenizer: Tokenizer) -> ReasoningProgress | None:
        """Returns what counts the tokens of one answer's reasoning; None for a model that does not reason."""
        return None if self.reasoning is None else self.reasoning.progress(self.requests[0].params, tokenizer)


async def parse_chat_fields(
    fields: Fields,
    engine: Engine,
    find: AdapterFinder,
    client: Client,
    response_id: str,
    default_max_tokens: int | None = None,
) -> ParsedChat:
    """Reads the checked fields of a chat. `default_max_tokens`: a limit, lowered to what the context has room for, if
    the fields have none; it comes before the adapter's. Raises as `parse_chat`."""
    common = parse_common(fields, engine, find, client)
    chat_format = await ChatFormat.of_adapter(engine.tokenizer, common.adapter, common.tenant)
    tools = parse_tools(fields, chat_format)
    limit = body_fields.CHAT_MAX_COMPLETION_TOKENS.read(fields)
    older_limit = body_fields.CHAT_MAX_TOKENS.read(fields)
    params = sampling_params(fields, engine)
    asked_tokens = older_limit if limit is None else limit
    own_default = default_limit(common.adapter.defaults)
    reserved_tokens = (own_default or DEFAULT_MAX_TOKENS) if asked_tokens is None else asked_tokens
    truncation = parse_truncation(fields, engine.max_model_len, reserved_tokens)
    with truncation.refusing("messages"):
        ids = tuple(truncation.cut(await chat_ids(fields, chat_format, truncation.most_encoded, tools.in_prompt)))
    reasoning = parse_reasoning(fields, chat_format, ids)
    kept = [part.kept_special_ids for part in (tools.callable, reasoning) if part is not None]
    params = with_params(params, logprobs=_logprobs(fields), kept_special_ids=frozenset[int]().union(*kept))
    constraint = None if tools.callable is None else tools.callable.constraint
    params = with_params(params, grammar=await parse_grammar(fields, engine, params, constraint, reasoning))
    defaults = most_scored_tokens(common.n, params.logprobs), default_max_tokens or own_default
    default = min([one for one in defaults if one is not None], default=None)
    lengths = engine.max_model_len, asked_tokens, default, params.min_tokens
    limits = AnswerLimits(*lengths, common.n, params.logprobs, source="messages", logprobs_field="top_logprobs")
    params = with_params(params, max_tokens=limits.most_tokens(len(ids)))
    predicted = await _predicted_ids(fields, engine)
    requests = fan_out(f"{response_id}-", 0, ids, common, params, predicted_ids=predicted)
    if (scored := parse_prompt_logprobs(fields, common.delivery)) is not None:  # of the prompt that all of them have
        check_logprobs(1, len(ids), scored, "prompt_logprobs")
        first = with_params(requests[0].params, prompt_logprobs=scored)
        requests[0] = dataclasses.replace(requests[0], params=first)
    return ParsedChat(common, tools, reasoning, tuple(requests))


async def _predicted_ids(fields: Fields, engine: Engine) -> tuple[int, ...]:
    """The tokens of `prediction`; none without it, or if the context has no room for them. Raises InvalidRequest."""
    if (predicted := fields.raw("prediction")) is None:
        return ()
    if not isinstance(predicted, dict) or predicted.get("type") != "content":
        raise InvalidRequest(
            f'prediction must be {{"type": "content", "content": TEXT}}, not {shown(predicted)}.', param="prediction"
        )
    text = await joined_text(predicted.get("content"), "prediction.content", _TEXT_PARTS, "prediction")
    with suppress(ContextLengthExceeded):
        return tuple(await encode(engine.tokenizer, text, add_special_tokens=False, max_tokens=engine.max_model_len))
    return ()


async def chat_ids(
    fields: Fields, chat_format: ChatFormat, max_tokens: int, tools: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """The prompt of `messages` and the template's arguments, as token ids. `tools`: as the template gets them. Raises
    InvalidRequest, and ContextLengthExceeded when it has more than `max_tokens`."""
    messages = await parse_messages(fields)
    continued = body_fields.CONTINUE_FINAL_MESSAGE.read(fields)
    generation_prompt = body_fields.ADD_GENERATION_PROMPT.read(fields, default=not continued)
    if continued and generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other.", param="continue_final_message"
        )
    ids = await chat_format.prompt_ids(
        messages,
        add_generation_prompt=generation_prompt,
        continue_final_message=continued,
        kwargs=template_arguments(fields, chat_format.reasoning_format),
        tools=tools or None,
        max_tokens=max_tokens,
    )
    if not ids:
        raise InvalidRequest("The chat template makes an empty prompt of these messages.", param="messages")
    return ids


async def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages, checked, each with `content` as one string; other keys are left for the template."""
    messages = fields.array("messages", _MAX_MESSAGES)
    if not messages:
        raise InvalidRequest("messages must hold at least one message.", param="messages")
    numbered = in_shared_turns(enumerate(messages))
    return [await _message(message, f"messages[{position}]") async for position, message in numbered]


async def _message(message: object, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{name} must be an object, not {shown(message)}.", param="messages")
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise InvalidRequest(f"{name}.role must be one of {', '.join(_ROLES)}, not {shown(role)}.", param="messages")
    calls = await _tool_calls(message, name)
    if content is None and role == "assistant":
        content = message.get("refusal")
    kinds = _OWN_PARTS if role == "assistant" else _TEXT_PARTS
    # What follows a prompt may have none: an answer that was cut off in its reasoning, a tool that returns nothing.
    may_be_absent = role in ("assistant", "tool")
    content = await joined_text(content, f"{name}.content", kinds, "messages", may_be_absent=may_be_absent)
    reasoning = _reasoning(message, name)
    kept = {key: value for key, value in message.items() if key not in ("tool_calls", *_REASONING)}
    more = {"tool_calls": calls, _REASONING[0]: reasoning}
    return kept | {"content": content} | {key: value for key, value in more.items() if value}


def _reasoning(message: dict[str, Any], name: str) -> str:
    """The reasoning of an assistant's message, which the template shows or leaves out; empty without it."""
    for key in _REASONING:
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{name}.{key} must be a string, not {shown(value)}.", param="messages")
        if value and message["role"] == "assistant":
            return value
    return ""


async def _tool_calls(message: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The tool calls of an assistant's message, with arguments as objects: templates write these as JSON."""
    if message.get("function_call") is not None:
        raise InvalidRequest(f"{name}.function_call is not supported; send tool_calls.", param="messages")
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    if calls and message["role"] != "assistant":
        raise InvalidRequest(f"{name}.tool_calls belong to messages of the assistant.", param="messages")
    if not isinstance(calls, list):
        raise InvalidRequest(f"{name}.tool_calls must be a list, not {shown(calls)}.", param="messages")
    numbered = in_turns(enumerate(calls))
    return [await _tool_call(call, f"{name}.tool_calls[{index}]") async for index, call in numbered]


async def _tool_call(call: object, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            f'{name} must be {{"id": …, "type": "function", "function": {{"name": …, "arguments": …}}}}.',
            param="messages",
        )
    arguments = await read_arguments(function.get("arguments"), f"{name}.function.arguments", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _logprobs(fields: Fields) -> int | None:
    wanted = body_fields.CHAT_LOGPROBS.read(fields)
    top = body_fields.TOP_LOGPROBS.read(fields)
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return top if wanted else None


@dataclasses.dataclass
class ChatChoice(Choice):
    """Writes one entry of `choices`: a message, or its deltas: first the role, then text, last the finish reason."""

    blocks: AnswerBlocks
    progress: ReasoningProgress | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int | None:
        return None if self.progress is None else self.progress.num_tokens

    @property
    def has_text_alone(self) -> bool:
        is_over = self.progress is None or self.progress.is_over
        return super().has_text_alone and is_over and self.blocks.is_in_text

    def stream_chunks(self, delta: TokenDelta) -> list[dict[str, Any]]:
        chunks = []
        if self._is_first:
            self._is_first = False
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        if self.progress is not None:
            self.progress.add(delta.token_ids)
        changes = self.blocks.push(delta.text, is_last=delta.finish is not None)
        parts = [part for change in changes if (part := self._part(change)) is not None]
        if not parts and (delta.logprobs or (self.return_token_ids and delta.token_ids)):
            parts = [{"content": ""}]
        new = [self._chunk(part) for part in parts]
        if new:
            new[0]["logprobs"] = self.logprobs(delta)
            if self.return_token_ids:
                new[0]["token_ids"] = delta.token_ids
        if delta.finish is not None:
            new.append(self._chunk({}) | self._finish_fields(delta.finish))
        return chunks + new

    def _part(self, change: BlockChange) -> dict[str, Any] | None:
        """The `delta` object that a change of a block becomes; None for none."""
        what, block, text = change
        if what == "add" and block.kind == "text":
            return {"content": text}
        if what == "add" and block.kind == "reasoning":
            return dict.fromkeys(_REASONING, text)
        if block.kind != "call" or what == "end":
            return None
        self._num_calls += what == "start"
        call = _call(block, "") if what == "start" else {"function": {"arguments": text}}
        return {"tool_calls": [{"index": self._num_calls - 1, **call}]}

    def _finish_fields(self, finish: Finish | None) -> dict[str, Any]:
        """With calls, also of a named function, the reason is `tool_calls`, unless the answer was cut off."""
        fields = finish_fields(finish)
        if self._num_calls and fields["finish_reason"] == "stop":
            fields["finish_reason"] = "tool_calls"
        return fields

    async def fields_around_logprobs(self, answer: TokenDelta) -> tuple[dict[str, Any], dict[str, Any]]:
        await add_tokens(self.progress, answer)
        texts: dict[BlockKind, str] = {"reasoning": "", "text": ""}
        calls = []
        async for block in in_turns(await self.blocks.read(answer.text)):
            if block.kind == "call":
                calls.append(_call(block, block.text))
            else:
                texts[block.kind] += block.text
        self._num_calls = len(calls)
        content = texts["text"] if not calls and not texts["reasoning"] else texts["text"] or None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        if texts["reasoning"]:
            message |= dict.fromkeys(_REASONING, texts["reasoning"])
        before = {"index": self.index, "message": message}
        after = self._finish_fields(answer.finish)
        if self.return_token_ids:
            after["token_ids"] = answer.token_ids
        return before, after

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _scored(self, delta: TokenDelta) -> dict[str, list[Any]]:
        content = [
            self._token(scored.token_id, scored.logprob)
            | {"top_logprobs": list(map(self._token, scored.top_ids, scored.top_logprobs))}
            for scored in delta.logprobs
        ]
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.names.of(token_id),
            "logprob": finite(logprob),
            "bytes": list(self.names.tokenizer.token_bytes(token_id)),
        }


def _call(block: Block, arguments: str) -> dict[str, Any]:
    return {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
