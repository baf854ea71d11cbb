"""The body fields of the APIs that are translated into chat completions: OpenAI's Responses and Anthropic's Messages.

What is common with chat completions is the same entry as there and passes on as it is. Sampling fields that these APIs
do not have themselves are taken as well.
"""

from collections.abc import Mapping

from caraserve.core.request import MAX_STOPS
from caraserve.http.body.field_types import (
    LARGEST,
    OBJECT,
    STRING,
    ArrayField,
    BodyField,
    BooleanField,
    IntegerField,
    OtherField,
    TextField,
    any_of,
    list_of,
    object_of,
    one_of,
    text_of,
)
from caraserve.http.body.fields import MAX_STOP_CHARACTERS, MAX_TEXT_CHARACTERS
from caraserve.http.body.known_fields import KnownFields, Refused, instead, refused, refused_beside, served
from caraserve.http.body.request_schema import CHAT, NO_CONSTRAINTS

MAX_ITEMS = 1 << 14  # of an input
MAX_TOOLS = 128

_OBJECTS = list_of(OBJECT)
_FORMAT = object_of(("type",), type=STRING, schema=OBJECT)

INPUT = OtherField("input", any_of(STRING, _OBJECTS))
INSTRUCTIONS = TextField("instructions", MAX_TEXT_CHARACTERS)
MAX_OUTPUT_TOKENS = IntegerField("max_output_tokens", 1, LARGEST, None)
METADATA = OtherField("metadata", OBJECT | {"maxProperties": 16, "additionalProperties": text_of(512, least=0)})
STORE = BooleanField("store", True)
TEXT = OtherField("text", object_of(format=_FORMAT))
RESPONSE_TOOLS = ArrayField("tools", MAX_TOOLS, object_of(("type",), type=STRING, name=STRING, parameters=OBJECT))
RESPONSE_TOOL_CHOICE = OtherField(
    "tool_choice",
    any_of(one_of("none", "auto", "required"), object_of(("type", "name"), type={"const": "function"}, name=STRING)),
)
REASONING = OtherField("reasoning", object_of(effort=STRING))
RESPONSE_STREAM_OPTIONS = OtherField("stream_options", OBJECT)

MAX_TOKENS = IntegerField("max_tokens", 1, LARGEST, None)
MESSAGES_FIELD = OtherField(
    "messages",
    list_of(
        object_of(("role", "content"), role=one_of("user", "assistant", "system"), content=any_of(STRING, _OBJECTS)),
        minItems=1,
    ),
)
SYSTEM = OtherField("system", any_of(STRING, _OBJECTS))
STOP_SEQUENCES = ArrayField("stop_sequences", MAX_STOPS, text_of(MAX_STOP_CHARACTERS))
MESSAGE_TOOLS = ArrayField(
    "tools", MAX_TOOLS, object_of(("name", "input_schema"), name=STRING, description=STRING, input_schema=OBJECT)
)
MESSAGE_TOOL_CHOICE = OtherField(
    "tool_choice", object_of(("type",), type=one_of("auto", "any", "tool", "none"), name=STRING)
)
MESSAGE_METADATA = OtherField("metadata", object_of(user_id=text_of(256, least=0)))
THINKING = OtherField(
    "thinking",
    object_of(
        type=one_of("enabled", "adaptive", "between_tools", "disabled"),
        budget_tokens={"type": "integer"},
        display=one_of("summarized", "omitted"),
    ),
)
OUTPUT_CONFIG = OtherField("output_config", object_of(format=_FORMAT, effort=STRING))
OUTPUT_FORMAT = OtherField("output_format", _FORMAT)
CONTEXT_MANAGEMENT = OtherField("context_management", object_of(edits=_OBJECTS))

_CONSTRAINTS = (
    "structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf grammar json_schema "
    "structural_tag"
)
_COMMON = (
    "model lora_path lora adapter_id cache_salt priority stream chat_template_kwargs seed temperature top_p top_k "
    "min_p min_tokens stop_token_ids ignore_eos include_stop_str_in_output skip_special_tokens logit_bias "
    "allowed_token_ids bad_words presence_penalty frequency_penalty repetition_penalty"
)


def _translated(
    types: Mapping[str, BodyField], own: Mapping[str, Refused], ignored: str, advice: Mapping[str, str]
) -> KnownFields:
    """The table of an API. What chat completions refuse is refused here too, and so is what they serve and this API
    does not have. `own`: what this API refuses in words of its own. `advice`: what replaces the advice of chat
    completions."""
    own_ignored = frozenset(ignored.split())
    of_chat = {
        **refused("this API does not have it; leave it out", " ".join(CHAT.types)),
        **refused(NO_CONSTRAINTS, _CONSTRAINTS),
        **CHAT.refused,
    }
    more = {
        name: Refused(advice.get(one.advice, one.advice), one.neutral)
        for name, one in of_chat.items()
        if name not in types.keys() | own.keys() | own_ignored
    }
    all_ignored = (CHAT.ignored | own_ignored) - types.keys() - own.keys()
    return KnownFields(types, refused_beside(types, {**more, **own}), all_ignored)


def _of_chat(names: str) -> dict[str, BodyField]:
    return {name: CHAT.types[name] for name in names.split()}


_STATELESS = "nothing is stored here; send the whole conversation as input"

RESPONSES = _translated(
    _of_chat(f"{_COMMON} stop user parallel_tool_calls thinking_token_budget")
    | served(INPUT, INSTRUCTIONS, MAX_OUTPUT_TOKENS, METADATA, STORE, TEXT)
    | served(RESPONSE_TOOLS, RESPONSE_TOOL_CHOICE, RESPONSE_STREAM_OPTIONS, REASONING),
    refused(_STATELESS, "previous_response_id conversation")
    | refused("an answer is made while its client waits; leave it out", "background", False)
    | refused("no prompts are kept here; send the text as input", "prompt")
    | refused("send it as input, or to /v1/chat/completions", "messages")
    | instead("max_output_tokens", "max_tokens max_completion_tokens")
    | instead("text.format", "response_format")
    | instead("reasoning.effort", "reasoning_effort")
    | refused("logprobs are in /v1/chat/completions only; leave it out", "top_logprobs", 0)
    | refused("send several requests", "n", 1)
    | refused("the input is used as it is; leave it out", "context_management", [])
    | refused("the input is used as it is; leave it out and shorten the input", "truncation", "disabled"),
    # Built-in tools have no calls here, the others are labels and hints.
    "max_tool_calls image access_programs background_options service_tier include",
    {
        "send max_tokens instead": "send max_output_tokens instead",
        NO_CONSTRAINTS: "send text.format to constrain the answer",
    },
)

MESSAGES = _translated(
    _of_chat(_COMMON)
    | served(MAX_TOKENS, MESSAGES_FIELD, SYSTEM, STOP_SEQUENCES, MESSAGE_TOOLS, MESSAGE_TOOL_CHOICE)
    | served(MESSAGE_METADATA, THINKING, OUTPUT_CONFIG, OUTPUT_FORMAT, CONTEXT_MANAGEMENT),
    instead("stop_sequences", "stop", [])
    | instead("metadata.user_id", "user")
    | instead("max_tokens", "max_completion_tokens")
    | instead("output_config.format", "response_format")
    | instead("thinking and output_config.effort", "reasoning_effort")
    | instead("thinking.budget_tokens", "thinking_token_budget")
    | instead("tool_choice.disable_parallel_tool_use", "parallel_tool_calls", True)
    | refused("send several requests", "n", 1)
    | refused("tools are called by the client; send them as tools", "mcp_servers", [])
    | refused("there is no code execution; leave it out", "container")
    | refused("the messages are used as they are; leave it out", "compaction")
    | refused("nothing is stored here; send all messages", "thread")
    | refused("one model answers; name it as model", "fallbacks", []),
    "inference_geo service_tier diagnostics billing_policy fallback_credit_token user_profile_id workspace_id betas "
    "anthropic_version",
    {
        "send stop instead": "send stop_sequences instead",
        NO_CONSTRAINTS: "send output_config.format to constrain the answer",
    },
)
