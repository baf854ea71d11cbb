"""The routes for clients: what handles each, what it takes and answers, and its errors.

The server's routes are made of this table, and so is the document of the API. The summary of a route is the first
paragraph of its handler's docstring.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from caraserve import errors
from caraserve.core.adapter_rules import PINS
from caraserve.http import deadline, openapi
from caraserve.http.access.rate_limits import rate_limited
from caraserve.http.apis import anthropic_messages, tokenize
from caraserve.http.body import request_schema as body
from caraserve.http.body.field_types import (
    BOOLEAN,
    INTEGER,
    NULL,
    OBJECT,
    STRING,
    Schema,
    any_of,
    list_of,
    object_of,
    one_of,
    or_null,
    text_of,
    whole_object,
)
from caraserve.http.body.known_fields import KnownFields
from caraserve.http.body.translated_schema import MESSAGES, RESPONSES
from caraserve.http.generation_routes import GENERATION_ROUTES
from caraserve.http.management import adapters, aliases, model_list, page, status
from caraserve.http.openapi import Errors, Handler, Operation, Operations
from caraserve.telemetry.usage import Usage

_Answers = dict[str, Schema]
_Parameters = tuple[Mapping[str, Any], ...]

# --- answers ---


def _each(names: str, schema: Schema) -> dict[str, Schema]:
    """Returns properties with one schema, by their `names`, which spaces separate."""
    return dict.fromkeys(names.split(), schema)


def _json(schema: Schema) -> _Answers:
    return {"application/json": schema}


def _listed(item: Schema, **more: Schema) -> _Answers:
    return _json(_list(item, **more))


def _list(item: Schema, **more: Schema) -> Schema:
    return whole_object(object={"const": "list"}, data=list_of(item), **more)


def _deleted(kind: str, **more: Schema) -> Schema:
    return whole_object(name=STRING, object={"const": kind}, deleted={"const": True}, **more)


_TEXT = {"text/plain": STRING}
_HTML = {"text/html": STRING}
_NUMBER: Schema = {"type": "number"}
_USAGE = object_of(
    ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
    **_each("prompt_tokens completion_tokens total_tokens", INTEGER),
    prompt_tokens_details=whole_object(cached_tokens=INTEGER),
    completion_tokens_details=whole_object(reasoning_tokens=INTEGER),
)
_COUNTS = " ".join(field.name for field in dataclasses.fields(Usage))
_USED = whole_object(client=STRING, adapter=or_null(STRING), **_each(_COUNTS, INTEGER))
_FINISH = {
    "finish_reason": any_of(one_of("stop", "length", "tool_calls"), NULL),
    "stop_reason": any_of(STRING, INTEGER, NULL),
}
_HEAD = {**_each("id model system_fingerprint", STRING), "created": INTEGER, "usage": _USAGE}
_FUNCTION = whole_object(**_each("name arguments", STRING))
_TOOL_CALL = whole_object(id=STRING, type={"const": "function"}, function=_FUNCTION)
_COMPLETION = whole_object(
    object={"const": "text_completion"},
    choices=list_of(whole_object(index=INTEGER, text=STRING, logprobs=or_null(OBJECT), **_FINISH)),
    **_HEAD,
)
_MESSAGE = object_of(
    ("role", "content"),
    role={"const": "assistant"},
    content=or_null(STRING),
    **_each("reasoning_content reasoning", STRING),
    tool_calls=list_of(_TOOL_CALL),
)
_CHAT_COMPLETION = whole_object(
    object={"const": "chat.completion"},
    choices=list_of(whole_object(index=INTEGER, message=_MESSAGE, logprobs=or_null(OBJECT), **_FINISH)),
    **_HEAD,
)
_RESPONSE = whole_object(
    **_each("id model", STRING),
    object={"const": "response"},
    created_at=INTEGER,
    status=one_of("completed", "incomplete"),
    output=list_of(OBJECT),
    store={"const": False},
    usage=whole_object(
        **_each("input_tokens output_tokens total_tokens", INTEGER),
        **_each("input_tokens_details output_tokens_details", OBJECT),
    ),
)
_MESSAGES_MESSAGE = whole_object(
    **_each("id model", STRING),
    type={"const": "message"},
    role={"const": "assistant"},
    content=list_of(OBJECT),
    stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
    stop_sequence=or_null(STRING),
    usage=whole_object(
        **_each("input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens", INTEGER)
    ),
)
_FACTS = {
    "trained_on": or_null(STRING),
    **_each("other_base own_chat_template", BOOLEAN),
    **_each("added_tokens num_classes", INTEGER),
}
_BASE_CARD = {
    **_each("id owned_by root", STRING),
    "object": {"const": "model"},
    **_each("created max_model_len", INTEGER),
    "parent": or_null(STRING),
    "rank": or_null(INTEGER),
    "permission": list_of({}),
}
_CARD = object_of(tuple(_BASE_CARD), **_BASE_CARD, **_FACTS)  # the base model's card has no facts
_ALIAS = whole_object(object={"const": "alias"}, **_each("name adapter", STRING), previous=or_null(STRING))
_IN_LIST = {
    "object": {"const": "adapter"},
    **_each("name digest", STRING),
    **_each("rank bytes created requests", INTEGER),
    "tier": one_of("device", "host", "disk", "peer", "upload"),
    "pinned": or_null(one_of(*PINS)),
    "labels": OBJECT | {"additionalProperties": STRING},
    **_FACTS,
}
_DEFAULTS = {
    "target_modules": list_of(STRING),
    **_each("chat_template folder_chat_template", or_null(STRING)),
    "stop": or_null(list_of(STRING)),
    "sampling": or_null(OBJECT),
}
_ADAPTER = _json(whole_object(**_IN_LIST, **_DEFAULTS))
_UPLOADED = _json(whole_object(**_IN_LIST, **_DEFAULTS, skipped_files=list_of(STRING)))
_REFUSED = whole_object(object={"const": "refused_adapter"}, **_each("name reason", STRING), since=INTEGER)
_PROMPT_USAGE = whole_object(**_each("prompt_tokens total_tokens", INTEGER), completion_tokens={"const": 0})
_EMBEDDED_HEAD = {**_each("id model", STRING), "created": INTEGER, "usage": _PROMPT_USAGE}
_EMBEDDING = whole_object(object={"const": "embedding"}, index=INTEGER, embedding=any_of(list_of(_NUMBER), STRING))
_SCORE = whole_object(object={"const": "score"}, index=INTEGER, score=_NUMBER)
_CLASSIFIED = whole_object(**_each("index num_classes", INTEGER), label=STRING, probs=list_of(_NUMBER))
_RANKED = object_of(
    ("index", "relevance_score"), index=INTEGER, relevance_score=_NUMBER, document=whole_object(text=STRING)
)
_RANKING = whole_object(
    **_each("id model", STRING),
    usage=_PROMPT_USAGE,
    meta=whole_object(tokens=whole_object(**_each("input_tokens output_tokens", INTEGER))),
    results=list_of(_RANKED),
)
_TOKENS = whole_object(
    **_each("count max_model_len", INTEGER), tokens=list_of(INTEGER), token_strs=any_of(list_of(STRING), NULL)
)

_MILLISECONDS = whole_object(**_each("p50_ms p95_ms", or_null(_NUMBER)))
_STATS = whole_object(
    **_each("model version", STRING),
    instance=or_null(STRING),
    **_each("draining can_chat can_update", BOOLEAN),
    **_each("max_model_len running waiting kv_used_blocks kv_total_blocks computed_tokens", INTEGER),
    client=whole_object(**_each("admin base_model", BOOLEAN)),
    **_each("first_token token_gap", _MILLISECONDS),
    timeline=OBJECT,
    loads=list_of(OBJECT),
)

# --- parameters ---


def _parameter(place: str, name: str, description: str, schema: Schema = STRING) -> Mapping[str, Any]:
    return {"name": name, "in": place, "description": description, "schema": schema}


def _in_path(name: str, description: str) -> Mapping[str, Any]:
    return {"required": True, **_parameter("path", name, description, STRING | {"minLength": 1})}


def _versions(header: str, what: str) -> Mapping[str, Any]:
    return _parameter("header", header, f"The digests of the {what}, each in double quotes; * for any.")


_ADAPTER_NAME = _in_path("name", "The adapter's name.")
_ALIAS_NAME = _in_path("name", "The alias's name.")
_TO_CHANGE = (
    _versions("If-Match", "versions that may be changed"),
    _versions("If-None-Match", "versions that may not be there"),
)
_MAY_BE_ALIASED = "Whether the adapter may be changed although aliases stand for it."
_FORCE = _parameter("query", "force", _MAY_BE_ALIASED, STRING | one_of("true", "false"))
_UPLOAD: _Parameters = (
    _ADAPTER_NAME,
    _parameter("query", "config", "The text of adapter_config.json, if the body is a safetensors file."),
    _FORCE,
    _parameter("header", "x-content-sha256", "The SHA-256 of the body, as 64 hexadecimal digits."),
    _parameter("header", "Content-Digest", "The SHA-256 of the body, as RFC 9530 has it."),
    *_TO_CHANGE,
)
_FILTERS = (
    _parameter("query", "contains", "A part of the adapters' names.", text_of(page.LONGEST_FILTER, least=0)),
    _parameter("query", "tier", "The adapters' tier.", one_of("", *page.TIER_FILTERS)),
)
_TIME_LEFT = "Milliseconds after which the answer is of no use any more; 0 for no deadline."
_OF_ENGINE: _Parameters = (
    _parameter("header", deadline.HEADER, _TIME_LEFT, STRING | {"pattern": "^[0-9]{1,15}$"}),
    _versions("If-Match", "adapter's versions that may answer"),
)

# --- errors ---

_TOKEN_ERRORS: Errors = (errors.NotFound, errors.RateLimited, errors.Overloaded)
_ENGINE_ERRORS: Errors = (
    *(errors.NotFound, errors.NonFiniteLogits, errors.RateLimited, errors.Overloaded, errors.Draining),
    *(errors.AdapterBusy, errors.Unreachable, errors.InstanceLost, errors.DeadlineExceeded, errors.BackendFailed),
    errors.VersionDiffers,
)
_ADAPTER_ERRORS: Errors = (
    *(errors.AdapterRejected, errors.NotFound, errors.BackendFailed, errors.AdapterBusy, errors.StorageFull),
)
_VERSION_ERRORS: Errors = (*_ADAPTER_ERRORS, errors.VersionDiffers, errors.AdapterAliased)

# --- routes ---


def _text(path: str, summary: str, table: KnownFields, required: str, answer: Schema) -> Operation:
    """A route that generates text, whole or as a stream of events."""
    answers, raises = _json(answer) | {"text/event-stream": {}}, (*_ENGINE_ERRORS, errors.GrammarTooComplex)
    return Operation(
        f"POST {path}",
        GENERATION_ROUTES[path].handler(),
        answers,
        table,
        required,
        raises,
        _OF_ENGINE,
        summary,
        is_messages=table is MESSAGES,
    )


def _embeddings(paths: str, summary: str, table: KnownFields, required: str, answer: Schema) -> Iterator[Operation]:
    """Routes with the same answer, which is made of embeddings."""
    for path in paths.split():
        handler, answers = GENERATION_ROUTES[path].handler(), _json(answer)
        yield Operation(f"POST {path}", handler, answers, table, required, _ENGINE_ERRORS, _OF_ENGINE, summary)


def _alias(route: str, handler: Handler, answer: Schema, **more: Any) -> Operation:
    """A route that changes an alias."""
    return Operation(route, handler, _json(answer), raises=_ADAPTER_ERRORS, parameters=(_ALIAS_NAME,), **more)


def _vllm(prefix: str) -> Iterator[Operation]:
    """vLLM's routes that load and unload adapters; without its prefix, SGLang's of the same meaning."""
    load, unload = adapters.load_lora_adapter, adapters.unload_lora_adapter
    yield Operation(
        f"POST {prefix}/load_lora_adapter", load, _TEXT, body.LOAD_ADAPTER, "lora_name lora_path", _ADAPTER_ERRORS
    )
    yield Operation(
        f"POST {prefix}/unload_lora_adapter", unload, _TEXT, body.UNLOAD_ADAPTER, "lora_name", _ADAPTER_ERRORS
    )


_AS_MESSAGES = "Answers a conversation, in Anthropic's Messages API."
_TABLE = (
    _text("/v1/completions", "Continues prompts.", body.COMPLETIONS, "prompt", _COMPLETION),
    _text("/v1/chat/completions", "Answers a conversation.", body.CHAT, "messages", _CHAT_COMPLETION),
    _text("/v1/responses", "Answers a conversation, in OpenAI's Responses API.", RESPONSES, "input", _RESPONSE),
    _text("/v1/messages", _AS_MESSAGES, MESSAGES, "messages max_tokens", _MESSAGES_MESSAGE),
    Operation(
        "POST /v1/messages/count_tokens",
        rate_limited(anthropic_messages.count_tokens),
        _json(whole_object(input_tokens=INTEGER)),
        MESSAGES,
        "messages",
        _TOKEN_ERRORS,
        is_messages=True,
    ),
    *_embeddings("/v1/embeddings", "Embeds texts.", body.EMBEDDINGS, "input", _list(_EMBEDDING, **_EMBEDDED_HEAD)),
    *_embeddings(
        "/v1/classify /classify", "Classifies texts.", body.CLASSIFY, "input", _list(_CLASSIFIED, **_EMBEDDED_HEAD)
    ),
    *_embeddings("/v1/score /score", "Compares texts.", body.SCORE, "", _list(_SCORE, **_EMBEDDED_HEAD)),
    *_embeddings(
        "/v1/rerank /rerank /v2/rerank", "Sorts documents by a query.", body.RERANK, "query documents", _RANKING
    ),
    Operation("GET /v1/models", model_list.list_models, _listed(_CARD)),
    Operation(
        "GET /v1/models/{model:.+}",
        model_list.show_model,
        _json(_CARD),
        raises=(errors.NotFound,),
        parameters=(_in_path("model", "A name of GET /v1/models."),),
    ),
    Operation("GET /v1/adapters", adapters.list_adapters, _listed(whole_object(**_IN_LIST), refused=list_of(_REFUSED))),
    Operation(
        "GET /v1/adapters/{name}",
        adapters.show_adapter,
        _ADAPTER,
        raises=(errors.NotFound,),
        parameters=(_ADAPTER_NAME,),
    ),
    Operation(
        "PUT /v1/adapters/{name}",
        adapters.put_adapter,
        _UPLOADED,
        raises=_VERSION_ERRORS,
        parameters=_UPLOAD,
        takes_bytes=True,
        creates=True,
    ),
    Operation(
        "PATCH /v1/adapters/{name}",
        adapters.patch_adapter,
        _ADAPTER,
        body.ADAPTER_SETTINGS,
        raises=(*_VERSION_ERRORS, errors.Overloaded),
        parameters=(_ADAPTER_NAME, *_TO_CHANGE),
    ),
    Operation(
        "DELETE /v1/adapters/{name}",
        adapters.delete_adapter,
        _json(_deleted("adapter", files_kept=BOOLEAN, aliases_deleted=list_of(STRING))),
        raises=_VERSION_ERRORS,
        parameters=(_ADAPTER_NAME, *_TO_CHANGE, _FORCE),
    ),
    Operation("GET /v1/aliases", aliases.list_aliases, _listed(_ALIAS)),
    Operation(
        "GET /v1/aliases/{name}",
        aliases.show_alias,
        _json(_ALIAS),
        raises=(errors.NotFound,),
        parameters=(_ALIAS_NAME,),
    ),
    _alias("PUT /v1/aliases/{name}", aliases.put_alias, _ALIAS, body=body.ALIAS, required="adapter", creates=True),
    _alias("POST /v1/aliases/{name}/rollback", aliases.roll_back_alias, _ALIAS),
    _alias("DELETE /v1/aliases/{name}", aliases.delete_alias, _deleted("alias")),
    Operation("GET /v1/cluster", status.cluster_members, _listed(OBJECT, name=or_null(STRING))),
    Operation("GET /v1/cluster/adapters", status.cluster_adapters, _listed(OBJECT)),
    Operation("GET /v1/usage", status.usage, _listed(_USED, since=INTEGER)),
    Operation("POST /tokenize", rate_limited(tokenize.tokenize), _json(_TOKENS), body.TOKENIZE, raises=_TOKEN_ERRORS),
    Operation(
        "POST /detokenize",
        rate_limited(tokenize.detokenize),
        _json(whole_object(prompt=STRING)),
        body.DETOKENIZE,
        "tokens",
        _TOKEN_ERRORS,
    ),
    Operation(
        "GET /tokenizer_info",
        tokenize.tokenizer_info,
        _json(object_of(("tokenizer_class",), **_each("tokenizer_class chat_template", STRING))),
    ),
    *_vllm("/v1"),
    *_vllm(""),
    Operation("GET /health", status.health, raises=(errors.BackendFailed,)),
    Operation("GET /ping", status.health, raises=(errors.BackendFailed,)),
    Operation("POST /ping", status.health, raises=(errors.BackendFailed,)),
    Operation("GET /ready", status.ready, raises=(errors.NotReady, errors.Draining)),
    Operation("GET /version", status.version, _json(whole_object(version=STRING))),
    Operation("GET /load", status.load, _json(whole_object(server_load=INTEGER))),
    Operation("GET /metrics", status.metrics, _TEXT),
    Operation("GET /stats", page.stats, _json(_STATS)),
    Operation(
        "GET /stats/adapters",
        page.adapter_stats,
        _json(whole_object(counts=OBJECT, matching=INTEGER, adapters=list_of(OBJECT))),
        raises=(errors.InvalidRequest,),
        parameters=_FILTERS,
    ),
    Operation("GET /", page.page, _HTML),
    Operation(
        "GET /page/{file}",
        page.page_file,
        _each("text/javascript text/css image/svg+xml", STRING),
        raises=(errors.NotFound,),
        parameters=(_in_path("file", "The file's name."),),
    ),
    Operation("GET /docs", openapi.docs, _HTML),
    Operation("GET /openapi.json", openapi.openapi, _json(OBJECT)),
)

OPERATIONS: Operations = {(one.method, one.path): one for one in _TABLE}
