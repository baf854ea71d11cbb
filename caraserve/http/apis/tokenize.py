"""POST /tokenize and /detokenize, by the engine's tokenizer, and its settings for clients that encode like it."""

from aiohttp import web

from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http.access.adapter_choice import adapter_finder, choose_adapter
from caraserve.http.apis.chat import chat_ids
from caraserve.http.apis.chat_format import ChatFormat
from caraserve.http.apis.completions import decode, encode
from caraserve.http.apis.tool_calls import for_template, parse_functions
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import shown, token_ids
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import DETOKENIZE, TOKENIZE
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT
from caraserve.http.responses import json_response, note_ignored, read_object
from caraserve.util.tasks import in_turns


async def tokenize(request: web.Request) -> web.Response:
    """Turns a text or a conversation into token ids."""
    context = request.app[CONTEXT]
    engine = context.engine
    fields = await read_object(request)
    check_fields(fields, TOKENIZE)
    _, adapter = choose_adapter(fields, engine.base_name, adapter_finder(request), request[CLIENT])
    add_special_tokens = body_fields.ADD_SPECIAL_TOKENS.read(fields)
    with_text = body_fields.RETURN_TOKEN_STRS.read(fields)
    most = max(body_fields.MAX_TOKENIZED, engine.max_model_len)
    try:
        if fields.raw("messages") is not None:
            tenant = request[CLIENT].tenant(user="")
            chat_format, tools = await ChatFormat.of_adapter(engine.tokenizer, adapter, tenant), parse_functions(fields)
            ids = await chat_ids(fields, chat_format, most, for_template(tools))
        else:
            prompt = body_fields.TEXT_PROMPT.read(fields)
            if prompt is None:
                raise InvalidRequest("Send prompt, a string, or messages.", param="prompt")
            ids = await encode(engine.tokenizer, prompt, add_special_tokens=add_special_tokens, max_tokens=most)
    except ContextLengthExceeded:
        raise InvalidRequest(f"prompt has more than {most} tokens; send a shorter one.", param="prompt") from None
    note_ignored(request, fields)
    answer = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}
    texts = [engine.tokenizer.token_text(token_id) async for token_id in in_turns(ids)] if with_text else None
    return json_response(answer | {"token_strs": texts})


async def detokenize(request: web.Request) -> web.Response:
    """Turns token ids into text."""
    context = request.app[CONTEXT]
    engine = context.engine
    fields = await read_object(request)
    check_fields(fields, DETOKENIZE)
    choose_adapter(fields, engine.base_name, adapter_finder(request), request[CLIENT])
    tokens = body_fields.TOKENS.read(fields, most=max(body_fields.MAX_TOKENIZED, engine.max_model_len))
    if fields.raw("tokens") is None:
        raise InvalidRequest(f"tokens must be a list of token ids, not {shown(None)}.", param="tokens")
    note_ignored(request, fields)
    ids = token_ids("tokens", tokens, engine.tokenizer.vocab_size)
    return json_response({"prompt": await decode(engine.tokenizer, ids, skip_special_tokens=False)})


async def tokenizer_info(request: web.Request) -> web.Response:
    """Shows the tokenizer's class, special tokens, flags and chat template."""
    engine = request.app[CONTEXT].engine
    return json_response({**engine.tokenizer.info, "model_max_length": engine.max_model_len})
