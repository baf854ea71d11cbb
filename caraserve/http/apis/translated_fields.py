"""The body fields of the APIs that are translated into chat completions: OpenAI's Responses and Anthropic's Messages.

What is common with chat completions is the same entry as there and passes on as it is. Sampling fields that these APIs
do not have themselves are taken as well.
"""

from collections.abc import Mapping

from caraserve.core.request import MAX_STOPS
from caraserve.http.body_fields import MAX_STOP_CHARACTERS, MAX_TEXT_CHARACTERS
from caraserve.http.field_types import (
    LARGEST,
    ArrayField,
    BodyField,
    BooleanField,
    IntegerField,
    OtherField,
    Schema,
    TextField,
    any_of,
    object_of,
    one_of,
)
from caraserve.http.request_schema import CHAT, NO_CONSTRAINTS, KnownFields, Refused, refused_beside

MAX_ITEMS = 1 << 14  # of an input
MAX_TOOLS = 128

_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_OBJECTS: Schema = {"type": "array", "items": _OBJECT}
_FORMAT = object_of(("type",), type=_TEXT, schema=_OBJECT)

INPUT = OtherField("input", any_of(_TEXT, _OBJECTS))
INSTRUCTIONS = TextField("instructions", MAX_TEXT_CHARACTERS)
MAX_OUTPUT_TOKENS = IntegerField("max_output_tokens", 1, LARGEST, None)
METADATA = OtherField("metadata", _OBJECT | {"maxProperties": 16, "additionalProperties": _TEXT | {"maxLength": 512}})
STORE = BooleanField("store", True)
TEXT = OtherField("text", object_of(format=_FORMAT))
RESPONSE_TOOLS = ArrayField("tools", MAX_TOOLS, object_of(("type",), type=_TEXT, name=_TEXT, parameters=_OBJECT))
RESPONSE_TOOL_CHOICE = OtherField(
    "tool_choice",
    any_of(one_of("none", "auto", "required"), object_of(("type", "name"), type={"const": "function"}, name=_TEXT)),
)
REASONING = OtherField("reasoning", object_of(effort=_TEXT))
RESPONSE_STREAM_OPTIONS = OtherField("stream_options", _OBJECT)

MAX_TOKENS = IntegerField("max_tokens", 1, LARGEST, None)
MESSAGES_FIELD = OtherField(
    "messages",
    {
        "type": "array",
        "minItems": 1,
        "items": object_of(
            ("role", "content"), role=one_of("user", "assistant", "system"), content=any_of(_TEXT, _OBJECTS)
        ),
    },
)
SYSTEM = OtherField("system", any_of(_TEXT, _OBJECTS))
STOP_SEQUENCES = ArrayField("stop_sequences", MAX_STOPS, _TEXT | {"minLength": 1, "maxLength": MAX_STOP_CHARACTERS})
MESSAGE_TOOLS = ArrayField(
    "tools", MAX_TOOLS, object_of(("name", "input_schema"), name=_TEXT, description=_TEXT, input_schema=_OBJECT)
)
MESSAGE_TOOL_CHOICE = OtherField(
    "tool_choice", object_of(("type",), type=one_of("auto", "any", "tool", "none"), name=_TEXT)
)
MESSAGE_METADATA = OtherField("metadata", object_of(user_id=_TEXT | {"maxLength": 256}))
THINKING = OtherField(
    "thinking",
    object_of(
        type=one_of("enabled", "adaptive", "between_tools", "disabled"),
        budget_tokens={"type": "integer"},
        display=one_of("summarized", "omitted"),
    ),
)
OUTPUT_CONFIG = OtherField("output_config", object_of(format=_FORMAT, effort=_TEXT))
OUTPUT_FORMAT = OtherField("output_format", _FORMAT)
CONTEXT_MANAGEMENT = OtherField("context_management", object_of(edits=_OBJECTS))

_CONSTRAINTS = (
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf", "grammar", "json_schema", "structural_tag"),
)
_COMMON = {
    name: CHAT.types[name]
    for name in (
        *("model", "lora_path", "lora", "adapter_id", "cache_salt", "priority", "stream", "chat_template_kwargs"),
        *("seed", "temperature", "top_p", "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("include_stop_str_in_output", "skip_special_tokens", "logit_bias", "allowed_token_ids", "bad_words"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
}


def _translated(
    served: Mapping[str, BodyField],
    refused: Mapping[str, Refused],
    ignored: frozenset[str],
    advice: Mapping[str, str],
) -> KnownFields:
    """The table of an API. What chat completions refuse is refused here too, and so is what they serve and this API
    does not have. `advice`: what replaces the advice of chat completions."""
    of_chat = {
        **{name: Refused("this API does not have it; leave it out") for name in CHAT.types},
        **{name: Refused(NO_CONSTRAINTS) for name in _CONSTRAINTS},
        **CHAT.refused,
    }
    known = served.keys() | refused.keys() | ignored
    more = {name: one for name, one in of_chat.items() if name not in known}
    for name, one in more.items():
        more[name] = Refused(advice.get(one.advice, one.advice), one.neutral)
    return KnownFields(
        served, refused_beside(served, {**more, **refused}), (CHAT.ignored | ignored) - served.keys() - refused.keys()
    )


_STATELESS = Refused("nothing is stored here; send the whole conversation as input")

RESPONSES = _translated(
    _COMMON
    | {name: CHAT.types[name] for name in ("stop", "user", "parallel_tool_calls", "thinking_token_budget")}
    | {
        field.name: field
        for field in (
            *(INPUT, INSTRUCTIONS, MAX_OUTPUT_TOKENS, METADATA, STORE, TEXT),
            *(RESPONSE_TOOLS, RESPONSE_TOOL_CHOICE, RESPONSE_STREAM_OPTIONS, REASONING),
        )
    },
    {
        "previous_response_id": _STATELESS,
        "conversation": _STATELESS,
        "background": Refused("an answer is made while its client waits; leave it out", (False,)),
        "prompt": Refused("no prompts are kept here; send the text as input"),
        "messages": Refused("send it as input, or to /v1/chat/completions"),
        "max_tokens": Refused("send max_output_tokens instead"),
        "max_completion_tokens": Refused("send max_output_tokens instead"),
        "response_format": Refused("send text.format instead"),
        "reasoning_effort": Refused("send reasoning.effort instead"),
        "top_logprobs": Refused("logprobs are in /v1/chat/completions only; leave it out", (0,)),
        "n": Refused("send several requests", (1,)),
        "context_management": Refused("the input is used as it is; leave it out", ([],)),
        "truncation": Refused("the input is used as it is; leave it out and shorten the input", ("disabled",)),
    },
    # Built-in tools have no calls here, the others are labels and hints.
    frozenset(("max_tool_calls", "image", "access_programs", "background_options", "service_tier", "include")),
    {
        "send max_tokens instead": "send max_output_tokens instead",
        NO_CONSTRAINTS: "send text.format to constrain the answer",
    },
)

MESSAGES = _translated(
    _COMMON
    | {
        field.name: field
        for field in (
            *(MAX_TOKENS, MESSAGES_FIELD, SYSTEM, STOP_SEQUENCES, MESSAGE_TOOLS, MESSAGE_TOOL_CHOICE),
            *(MESSAGE_METADATA, THINKING, OUTPUT_CONFIG, OUTPUT_FORMAT, CONTEXT_MANAGEMENT),
        )
    },
    {
        "stop": Refused("send stop_sequences instead", ([],)),
        "user": Refused("send metadata.user_id instead"),
        "max_completion_tokens": Refused("send max_tokens instead"),
        "response_format": Refused("send output_config.format instead"),
        "reasoning_effort": Refused("send thinking and output_config.effort instead"),
        "thinking_token_budget": Refused("send thinking.budget_tokens instead"),
        "parallel_tool_calls": Refused("send tool_choice.disable_parallel_tool_use instead", (True,)),
        "n": Refused("send several requests", (1,)),
        "mcp_servers": Refused("tools are called by the client; send them as tools", ([],)),
        "container": Refused("there is no code execution; leave it out"),
        "compaction": Refused("the messages are used as they are; leave it out"),
        "thread": Refused("nothing is stored here; send all messages"),
        "fallbacks": Refused("one model answers; name it as model", ([],)),
    },
    frozenset(
        (
            *("inference_geo", "service_tier", "diagnostics", "billing_policy", "fallback_credit_token"),
            *("user_profile_id", "workspace_id", "betas", "anthropic_version"),
        )
    ),
    {
        "send stop instead": "send stop_sequences instead",
        NO_CONSTRAINTS: "send output_config.format to constrain the answer",
    },
)
