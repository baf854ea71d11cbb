"""What each route takes and answers, for the document of the API: the table of its body, its answers, its errors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from caraserve import errors
from caraserve.core.adapter_rules import PINS
from caraserve.errors import CaraServeError
from caraserve.http import deadline, request_schema
from caraserve.http.apis import translated_fields
from caraserve.http.field_types import Schema, any_of, object_of, one_of, or_null
from caraserve.http.management.page_stats import LONGEST_FILTER, TIER_FILTERS
from caraserve.http.request_schema import KnownFields

_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"
_NULL: Schema = {"type": "null"}
_STRING: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_IDS: Schema = {"type": "array", "items": _INTEGER}
_OBJECT: Schema = {"type": "object"}


def _whole(**properties: Schema) -> Schema:
    """Returns the schema of an object that has all these properties."""
    return object_of(tuple(properties), **properties)


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "items": item}


ERROR = _whole(error=_whole(message=_STRING, type=_STRING, param=or_null(_STRING), code=or_null(_STRING)))

MESSAGES_ERROR = _whole(type={"const": "error"}, error=object_of(("type", "message"), type=_STRING, message=_STRING))

_USAGE = object_of(
    ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"),
    prompt_tokens=_INTEGER,
    completion_tokens=_INTEGER,
    total_tokens=_INTEGER,
    prompt_tokens_details=_whole(cached_tokens=_INTEGER),
    completion_tokens_details=_whole(reasoning_tokens=_INTEGER),
)
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "failures")
_USED = _whole(client=_STRING, adapter=or_null(_STRING), **dict.fromkeys(_COUNTS, _INTEGER))
_FINISH = {
    "finish_reason": any_of(one_of("stop", "length", "tool_calls"), _NULL),
    "stop_reason": any_of(_STRING, _INTEGER, _NULL),
}
_HEAD = {"id": _STRING, "created": _INTEGER, "model": _STRING, "system_fingerprint": _STRING, "usage": _USAGE}
_TOOL_CALL = _whole(id=_STRING, type={"const": "function"}, function=_whole(name=_STRING, arguments=_STRING))
_COMPLETION = _whole(
    object={"const": "text_completion"},
    choices=_list_of(_whole(index=_INTEGER, text=_STRING, logprobs=or_null(_OBJECT), **_FINISH)),
    **_HEAD,
)
_MESSAGE = object_of(
    ("role", "content"),
    role={"const": "assistant"},
    content=or_null(_STRING),
    reasoning_content=_STRING,
    reasoning=_STRING,
    tool_calls=_list_of(_TOOL_CALL),
)
_CHAT_COMPLETION = _whole(
    object={"const": "chat.completion"},
    choices=_list_of(_whole(index=_INTEGER, message=_MESSAGE, logprobs=or_null(_OBJECT), **_FINISH)),
    **_HEAD,
)
_RESPONSE = _whole(
    id=_STRING,
    object={"const": "response"},
    created_at=_INTEGER,
    status=one_of("completed", "incomplete"),
    model=_STRING,
    output=_list_of(_OBJECT),
    store={"const": False},
    usage=_whole(
        input_tokens=_INTEGER,
        input_tokens_details=_OBJECT,
        output_tokens=_INTEGER,
        output_tokens_details=_OBJECT,
        total_tokens=_INTEGER,
    ),
)
_MESSAGES_MESSAGE = _whole(
    id=_STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=_STRING,
    content=_list_of(_OBJECT),
    stop_reason=one_of("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"),
    stop_sequence=or_null(_STRING),
    usage=_whole(
        input_tokens=_INTEGER,
        cache_creation_input_tokens=_INTEGER,
        cache_read_input_tokens=_INTEGER,
        output_tokens=_INTEGER,
    ),
)
_CARD = _whole(
    id=_STRING,
    object={"const": "model"},
    created=_INTEGER,
    owned_by=_STRING,
    root=_STRING,
    parent=or_null(_STRING),
    rank=or_null(_INTEGER),
    max_model_len=_INTEGER,
    permission=_list_of({}),
)
_ALIAS = _whole(object={"const": "alias"}, name=_STRING, adapter=_STRING, previous=or_null(_STRING))
_ADAPTER = _whole(
    name=_STRING,
    object={"const": "adapter"},
    digest=_STRING,
    rank=_INTEGER,
    bytes=_INTEGER,
    created=_INTEGER,
    tier=one_of("device", "host", "disk", "peer", "upload"),
    requests=_INTEGER,
    pinned=or_null(one_of(*PINS)),
    labels={"type": "object", "additionalProperties": _STRING},
)
_REFUSED = _whole(name=_STRING, object={"const": "refused_adapter"}, reason=_STRING, since=_INTEGER)
_FULL_ADAPTER = _ADAPTER | {
    "required": [*_ADAPTER["required"], "chat_template", "stop", "sampling"],
    "properties": _ADAPTER["properties"]
    | {"chat_template": or_null(_STRING), "stop": or_null(_list_of(_STRING)), "sampling": or_null(_OBJECT)},
}


def _listed(item: Schema, **more: Schema) -> Schema:
    return _whole(object={"const": "list"}, data=_list_of(item), **more)


_PROMPT_USAGE = _whole(prompt_tokens=_INTEGER, completion_tokens={"const": 0}, total_tokens=_INTEGER)
_EMBEDDED_HEAD = {"id": _STRING, "created": _INTEGER, "model": _STRING, "usage": _PROMPT_USAGE}
_EMBEDDING = _whole(
    object={"const": "embedding"}, index=_INTEGER, embedding=any_of(_list_of({"type": "number"}), _STRING)
)
_EMBEDDINGS = _listed(_EMBEDDING, **_EMBEDDED_HEAD)
_SCORES = _listed(_whole(object={"const": "score"}, index=_INTEGER, score={"type": "number"}), **_EMBEDDED_HEAD)
_RANKING = _whole(
    id=_STRING,
    model=_STRING,
    usage=_PROMPT_USAGE,
    meta=_whole(tokens=_whole(input_tokens=_INTEGER, output_tokens=_INTEGER)),
    results=_list_of(
        object_of(
            ("index", "relevance_score"),
            index=_INTEGER,
            relevance_score={"type": "number"},
            document=_whole(text=_STRING),
        )
    ),
)

_MODEL_PARAMETER = {
    "name": "model",
    "in": "path",
    "required": True,
    "description": "A name of GET /v1/models.",
    "schema": {"type": "string", "minLength": 1},
}
_FILE_PARAMETER = _MODEL_PARAMETER | {"name": "file", "description": "The file's name."}
_FILTER_PARAMETERS = (
    {
        "name": "contains",
        "in": "query",
        "description": "A part of the adapters' names.",
        "schema": {"type": "string", "maxLength": LONGEST_FILTER},
    },
    {"name": "tier", "in": "query", "description": "The adapters' tier.", "schema": one_of("", *TIER_FILTERS)},
)
_ADAPTER_PARAMETER = _MODEL_PARAMETER | {"name": "name", "description": "The adapter's name."}
_ALIAS_PARAMETER = _ADAPTER_PARAMETER | {"description": "The alias's name."}
_CONFIG_PARAMETER = {
    "name": "config",
    "in": "query",
    "description": "The text of adapter_config.json, if the body is a safetensors file.",
    "schema": {"type": "string"},
}
_SHA256_PARAMETERS = tuple(
    {"name": name, "in": "header", "description": f"The SHA-256 of the body, as {form}.", "schema": {"type": "string"}}
    for name, form in (("x-content-sha256", "64 hexadecimal digits"), ("Content-Digest", "RFC 9530 has it"))
)
_VERSION_PARAMETER = {
    "name": "If-Match",
    "in": "header",
    "description": "The digests of the adapter's versions that may answer, each in double quotes; * for any.",
    "schema": {"type": "string"},
}
_CHANGED_VERSION_PARAMETERS: tuple[Mapping[str, Any], ...] = tuple(
    {
        "name": name,
        "in": "header",
        "description": f"The digests of the versions that may {what}, each in double quotes; * for any.",
        "schema": {"type": "string"},
    }
    for name, what in (("If-Match", "be changed"), ("If-None-Match", "not be there"))
)
_FORCE_PARAMETER = {
    "name": "force",
    "in": "query",
    "description": "Whether the adapter may be changed although aliases stand for it.",
    "schema": {"type": "string", "enum": ["true", "false"]},
}
_UPLOAD_PARAMETERS: tuple[Mapping[str, Any], ...] = (
    _ADAPTER_PARAMETER,
    _CONFIG_PARAMETER,
    _FORCE_PARAMETER,
    *_SHA256_PARAMETERS,
    *_CHANGED_VERSION_PARAMETERS,
)
_DEADLINE_PARAMETER = {
    "name": deadline.HEADER,
    "in": "header",
    "description": "Milliseconds after which the answer is of no use any more; 0 for no deadline.",
    "schema": {"type": "string", "pattern": "^[0-9]{1,15}$"},
}

_Errors = tuple[type[CaraServeError], ...]
_OF_ANY: _Errors = (errors.Unauthorized, errors.Forbidden, errors.ServerBusy)
_OF_BODIES: _Errors = (errors.InvalidRequest, errors.PayloadTooLarge)
_OF_TOKENS: _Errors = (errors.NotFound, errors.RateLimited, errors.Overloaded)
_OF_ENGINE: _Errors = (
    *(
        errors.NotFound,
        errors.NonFiniteLogits,
        errors.RateLimited,
        errors.Overloaded,
        errors.Draining,
        errors.AdapterBusy,
    ),
    *(errors.Unreachable, errors.InstanceLost, errors.DeadlineExceeded, errors.BackendFailed, errors.VersionDiffers),
)
_OF_TEXT: _Errors = (*_OF_ENGINE, errors.GrammarTooComplex)
_OF_ADAPTERS: _Errors = (
    *(errors.AdapterRejected, errors.NotFound, errors.BackendFailed, errors.AdapterBusy, errors.StorageFull),
)
_OF_VERSIONS: _Errors = (*_OF_ADAPTERS, errors.VersionDiffers, errors.AdapterAliased)


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. `body`: the table of its JSON body, of which `required` must be there. `takes_bytes`:
    its body is a file. `answers`: the schema of a successful answer, by content type; none if it has no body.
    `creates`: the status may be 201. `raises`: what it may answer besides the errors of every route. `is_messages`: its
    errors have the shape of Anthropic's Messages API."""

    summary: str
    answers: Mapping[str, Schema] = field(default_factory=dict)
    body: KnownFields | None = None
    required: tuple[str, ...] = ()
    raises: _Errors = ()
    parameters: tuple[Mapping[str, Any], ...] = ()
    takes_bytes: bool = False
    creates: bool = False
    is_messages: bool = False

    @property
    def has_body(self) -> bool:
        return self.body is not None or self.takes_bytes

    @property
    def errors(self) -> _Errors:
        """All errors that it may answer, those of every route included."""
        return (*_OF_ANY, *(_OF_BODIES if self.has_body else ()), *self.raises)


def _text(
    summary: str, body: KnownFields, required: tuple[str, ...], answer: Schema, *, is_messages: bool = False
) -> Operation:
    """A route that generates text, whole or as a stream of events."""
    answers = {_JSON: answer, _EVENTS: {}}
    parameters = _DEADLINE_PARAMETER, _VERSION_PARAMETER
    return Operation(summary, answers, body, required, _OF_TEXT, parameters, is_messages=is_messages)


def _embedding(summary: str, body: KnownFields, required: tuple[str, ...], answer: Schema) -> Operation:
    """A route whose answer is made of embeddings."""
    return Operation(summary, {_JSON: answer}, body, required, _OF_ENGINE, (_DEADLINE_PARAMETER, _VERSION_PARAMETER))


_SCORE = _embedding("Compares texts.", request_schema.SCORE, (), _SCORES)
_RERANK = _embedding("Sorts documents by a query.", request_schema.RERANK, ("query", "documents"), _RANKING)
_LOAD = Operation(
    "Loads an adapter from a folder.",
    {_TEXT: _STRING},
    request_schema.LOAD_ADAPTER,
    ("lora_name", "lora_path"),
    _OF_ADAPTERS,
)
_UNLOAD = Operation(
    "Unloads an adapter; answers when its last request has ended.",
    {_TEXT: _STRING},
    request_schema.UNLOAD_ADAPTER,
    ("lora_name",),
    _OF_ADAPTERS,
)
_HEALTH = Operation("200 while the server and its device work.", raises=(errors.BackendFailed,))

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): _text("Continues prompts.", request_schema.COMPLETIONS, ("prompt",), _COMPLETION),
    ("POST", "/v1/chat/completions"): _text(
        "Answers a conversation.", request_schema.CHAT, ("messages",), _CHAT_COMPLETION
    ),
    ("POST", "/v1/responses"): _text(
        "Answers a conversation, in OpenAI's Responses API.", translated_fields.RESPONSES, ("input",), _RESPONSE
    ),
    ("POST", "/v1/messages"): _text(
        "Answers a conversation, in Anthropic's Messages API.",
        translated_fields.MESSAGES,
        ("messages", "max_tokens"),
        _MESSAGES_MESSAGE,
        is_messages=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "Counts the tokens of a conversation.",
        {_JSON: _whole(input_tokens=_INTEGER)},
        translated_fields.MESSAGES,
        ("messages",),
        _OF_TOKENS,
        is_messages=True,
    ),
    ("POST", "/v1/embeddings"): _embedding("Embeds texts.", request_schema.EMBEDDINGS, ("input",), _EMBEDDINGS),
    ("POST", "/v1/score"): _SCORE,
    ("POST", "/score"): _SCORE,
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
    ("GET", "/v1/models"): Operation("Lists the base model and its adapters.", {_JSON: _listed(_CARD)}),
    ("GET", "/v1/models/{model}"): Operation(
        "Shows one model.", {_JSON: _CARD}, raises=(errors.NotFound,), parameters=(_MODEL_PARAMETER,)
    ),
    ("GET", "/v1/adapters"): Operation(
        "Lists the adapters, and the folders that are not served.",
        {_JSON: _listed(_ADAPTER, refused=_list_of(_REFUSED))},
    ),
    ("GET", "/v1/adapters/{name}"): Operation(
        "Shows an adapter.", {_JSON: _FULL_ADAPTER}, raises=(errors.NotFound,), parameters=(_ADAPTER_PARAMETER,)
    ),
    ("PUT", "/v1/adapters/{name}"): Operation(
        "Stores an adapter, as a tar or safetensors file, under a name; 201 if the name is new.",
        {_JSON: _FULL_ADAPTER},
        raises=_OF_VERSIONS,
        parameters=_UPLOAD_PARAMETERS,
        takes_bytes=True,
        creates=True,
    ),
    ("PATCH", "/v1/adapters/{name}"): Operation(
        "Sets an adapter's labels, the cache in which it is kept, and what its requests take where they leave a field "
        "out. A null ends a default.",
        {_JSON: _FULL_ADAPTER},
        request_schema.ADAPTER_SETTINGS,
        raises=(*_OF_VERSIONS, errors.Overloaded),
        parameters=(_ADAPTER_PARAMETER, *_CHANGED_VERSION_PARAMETERS),
    ),
    ("DELETE", "/v1/adapters/{name}"): Operation(
        "Deletes an adapter; answers when its last request has ended.",
        {
            _JSON: _whole(
                name=_STRING,
                object={"const": "adapter"},
                deleted={"const": True},
                files_kept={"type": "boolean"},
                aliases_deleted=_list_of(_STRING),
            )
        },
        raises=_OF_VERSIONS,
        parameters=(_ADAPTER_PARAMETER, *_CHANGED_VERSION_PARAMETERS, _FORCE_PARAMETER),
    ),
    ("GET", "/v1/aliases"): Operation("Lists the aliases.", {_JSON: _listed(_ALIAS)}),
    ("GET", "/v1/aliases/{name}"): Operation(
        "Shows an alias.", {_JSON: _ALIAS}, raises=(errors.NotFound,), parameters=(_ALIAS_PARAMETER,)
    ),
    ("PUT", "/v1/aliases/{name}"): Operation(
        "Points an alias at an adapter; 201 if the alias is new.",
        {_JSON: _ALIAS},
        request_schema.ALIAS,
        ("adapter",),
        raises=_OF_ADAPTERS,
        parameters=(_ALIAS_PARAMETER,),
        creates=True,
    ),
    ("POST", "/v1/aliases/{name}/rollback"): Operation(
        "Points an alias at the adapter that it stood for before.",
        {_JSON: _ALIAS},
        raises=_OF_ADAPTERS,
        parameters=(_ALIAS_PARAMETER,),
    ),
    ("DELETE", "/v1/aliases/{name}"): Operation(
        "Deletes an alias, not its adapter.",
        {_JSON: _whole(name=_STRING, object={"const": "alias"}, deleted={"const": True})},
        raises=_OF_ADAPTERS,
        parameters=(_ALIAS_PARAMETER,),
    ),
    ("GET", "/v1/cluster"): Operation("Lists the instances.", {_JSON: _listed(_OBJECT, name=or_null(_STRING))}),
    ("GET", "/v1/cluster/adapters"): Operation("Lists all instances' adapters.", {_JSON: _listed(_OBJECT)}),
    ("GET", "/v1/usage"): Operation(
        "Counts what each client has used of each adapter; a key without admin's rights sees its own.",
        {_JSON: _whole(object={"const": "list"}, since=_INTEGER, data=_list_of(_USED))},
    ),
    ("POST", "/tokenize"): Operation(
        "Turns a text or a conversation into token ids.",
        {
            _JSON: _whole(
                count=_INTEGER, max_model_len=_INTEGER, tokens=_IDS, token_strs=any_of(_list_of(_STRING), _NULL)
            )
        },
        request_schema.TOKENIZE,
        raises=_OF_TOKENS,
    ),
    ("POST", "/detokenize"): Operation(
        "Turns token ids into text.",
        {_JSON: _whole(prompt=_STRING)},
        request_schema.DETOKENIZE,
        ("tokens",),
        raises=_OF_TOKENS,
    ),
    ("GET", "/tokenizer_info"): Operation(
        "Shows the tokenizer's class, special tokens, flags and chat template.",
        {_JSON: object_of(("tokenizer_class",), tokenizer_class=_STRING, chat_template=_STRING)},
    ),
    ("POST", "/v1/load_lora_adapter"): _LOAD,
    ("POST", "/load_lora_adapter"): _LOAD,
    ("POST", "/v1/unload_lora_adapter"): _UNLOAD,
    ("POST", "/unload_lora_adapter"): _UNLOAD,
    ("GET", "/health"): _HEALTH,
    ("GET", "/ping"): _HEALTH,
    ("POST", "/ping"): _HEALTH,
    ("GET", "/ready"): Operation("200 if new requests should be sent here.", raises=(errors.NotReady, errors.Draining)),
    ("GET", "/version"): Operation("The server's version.", {_JSON: _whole(version=_STRING)}),
    ("GET", "/load"): Operation("The number of requests under way.", {_JSON: _whole(server_load=_INTEGER)}),
    ("GET", "/metrics"): Operation("Metrics for Prometheus.", {_TEXT: _STRING}),
    ("GET", "/stats"): Operation("The numbers of the page at /.", {_JSON: _OBJECT}),
    ("GET", "/stats/adapters"): Operation(
        "The adapters that the page at / lists: at most 100, and how many there are.",
        {_JSON: _whole(counts=_OBJECT, matching=_INTEGER, adapters=_list_of(_OBJECT))},
        raises=(errors.InvalidRequest,),
        parameters=_FILTER_PARAMETERS,
    ),
    ("GET", "/"): Operation("A page to compare adapters, with the state of the server.", {"text/html": _STRING}),
    ("GET", "/page/{file}"): Operation(
        "A file of the page at /.",
        {"text/javascript": _STRING, "text/css": _STRING, "image/svg+xml": _STRING},
        raises=(errors.NotFound,),
        parameters=(_FILE_PARAMETER,),
    ),
    ("GET", "/docs"): Operation("This document as a page.", {"text/html": _STRING}),
    ("GET", "/openapi.json"): Operation("This document.", {_JSON: _OBJECT}),
}
