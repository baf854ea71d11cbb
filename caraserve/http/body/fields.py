"""The fields that the routes for text, tokens and adapters serve, each with its type and bounds.

Names and ranges are OpenAI's and, for the rest, vLLM's. The tables of `request_schema.py` say which route has which.
"""

from caraserve.core.adapter_rules import LABEL_NAME as LABEL_NAME
from caraserve.core.adapter_rules import MAX_CHAT_TEMPLATE_BYTES as MAX_CHAT_TEMPLATE_BYTES
from caraserve.core.adapter_rules import MAX_LABEL_CHARACTERS as MAX_LABEL_CHARACTERS
from caraserve.core.adapter_rules import MAX_LABELS as MAX_LABELS
from caraserve.core.adapter_rules import PINS
from caraserve.core.combined_names import MAX_MEMBERS
from caraserve.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PROMPT_LOGPROBS, MAX_STOPS, SAMPLING_RANGES
from caraserve.http.body.field_types import (
    BOOLEAN,
    INTEGER,
    LARGEST,
    NULL,
    OBJECT,
    STRING,
    ArrayField,
    BooleanField,
    ChoiceField,
    IntegerField,
    NumberField,
    OtherField,
    TextField,
    any_of,
    closed,
    list_of,
    map_of,
    object_of,
    one_of,
    or_null,
    text_of,
)

MAX_N = 128
MAX_STOP_CHARACTERS = 1024
MAX_BAD_WORD_CHARACTERS = 256
SEEDS = 1 << 63
MAX_TOKENIZED = 1 << 16  # tokens, unless the model's context is longer; 5 ms to list or to check
MAX_TEXT_CHARACTERS = 1 << 22

_TOKEN_ID = INTEGER | {"minimum": 0}
_JSON_SCHEMA = any_of(STRING, OBJECT)
_ADAPTER_NAME_CHARACTERS = 1024
_LABEL_CHARACTERS = 256
_PATH_CHARACTERS = 4096


# --- which model answers, for whom, and how the answer is delivered ---

MODEL = TextField("model", _ADAPTER_NAME_CHARACTERS)
LORA_PATH = TextField("lora_path", _ADAPTER_NAME_CHARACTERS)
ADAPTER_ID = TextField("adapter_id", _ADAPTER_NAME_CHARACTERS)
LORA = OtherField(
    "lora",
    list_of(
        closed(object_of(("id",), id=text_of(_ADAPTER_NAME_CHARACTERS), scale={"type": "number"})), maxItems=MAX_MEMBERS
    ),
)
USER = TextField("user", _LABEL_CHARACTERS)
CACHE_SALT = TextField("cache_salt", _LABEL_CHARACTERS)
PRIORITY = IntegerField("priority", -SEEDS, SEEDS - 1, 0)  # as vLLM's: any integer of 64 bits
STREAM = BooleanField("stream", False)
RETURN_TOKEN_IDS = BooleanField("return_token_ids", False)
RETURN_TOKENS_AS_TOKEN_IDS = BooleanField("return_tokens_as_token_ids", False)
PROMPT_LOGPROBS = IntegerField("prompt_logprobs", 0, MAX_PROMPT_LOGPROBS, None)
INCLUDE_USAGE = BooleanField("include_usage", False)
CONTINUOUS_USAGE_STATS = BooleanField("continuous_usage_stats", False)
STREAM_OPTIONS = OtherField(
    "stream_options",
    object_of(include_usage=INCLUDE_USAGE.schema(), continuous_usage_stats=CONTINUOUS_USAGE_STATS.schema()),
)

# --- sampling ---


def _with_range(name: str, default: float) -> NumberField:
    """Returns the field of a sampling parameter, with its range."""
    low, high, above_low = SAMPLING_RANGES[name]
    return NumberField(name, low, high, default, above_low)


N = IntegerField("n", 1, MAX_N, 1)
SEED = IntegerField("seed", -SEEDS, SEEDS - 1, None)
TEMPERATURE = _with_range("temperature", 1.0)
TOP_P = _with_range("top_p", 1.0)
TOP_K = IntegerField("top_k", SAMPLING_RANGES["top_k"].low, SAMPLING_RANGES["top_k"].high, 0)
MIN_P = _with_range("min_p", 0.0)
MIN_TOKENS = IntegerField("min_tokens", 0, LARGEST, 0)
_STOP = text_of(MAX_STOP_CHARACTERS)
STOP = OtherField("stop", any_of(_STOP, list_of(_STOP, maxItems=MAX_STOPS)))
STOP_TOKEN_IDS = ArrayField("stop_token_ids", 1024, _TOKEN_ID)
INCLUDE_STOP_STR_IN_OUTPUT = BooleanField("include_stop_str_in_output", False)
IGNORE_EOS = BooleanField("ignore_eos", False)
SKIP_SPECIAL_TOKENS = BooleanField("skip_special_tokens", True)
PRESENCE_PENALTY = NumberField("presence_penalty", -2, 2, 0.0)
FREQUENCY_PENALTY = NumberField("frequency_penalty", -2, 2, 0.0)
REPETITION_PENALTY = _with_range("repetition_penalty", 1.0)
LOGIT_BIAS = OtherField(
    "logit_bias", map_of({"type": "number", "minimum": -100, "maximum": 100}, "^[0-9]{1,9}$", MAX_LOGIT_BIAS)
)

# --- what answers may not have, and structured output ---

ALLOWED_TOKEN_IDS = ArrayField("allowed_token_ids", MAX_TOKENIZED, _TOKEN_ID)
BAD_WORDS = ArrayField("bad_words", 1024, text_of(MAX_BAD_WORD_CHARACTERS) | {"pattern": "\\S"})

RESPONSE_FORMAT = OtherField(
    "response_format",
    object_of(
        ("type",),
        type=one_of("text", "json_object", "json_schema", "structural_tag"),
        json_schema=object_of(("schema",), schema=OBJECT),
        schema=OBJECT,
        structures=list_of(OBJECT),
        triggers=list_of(STRING),
    ),
)
STRUCTURED_OUTPUTS = OtherField(
    "structured_outputs",
    object_of(
        json=_JSON_SCHEMA,
        regex=STRING,
        choice=list_of(STRING),
        grammar=STRING,
        json_object=BOOLEAN,
        structural_tag=_JSON_SCHEMA,
    ),
)
GUIDED_CHOICE = OtherField("guided_choice", list_of(STRING))
SCHEMAS = tuple(OtherField(name, _JSON_SCHEMA) for name in ("guided_json", "json_schema", "structural_tag"))
GRAMMARS = tuple(OtherField(name, STRING) for name in ("guided_regex", "guided_grammar", "regex", "ebnf", "grammar"))

# --- the prompt ---

TRUNCATE_PROMPT_TOKENS = IntegerField("truncate_prompt_tokens", -1, LARGEST, None)
TRUNCATION_SIDE = ChoiceField("truncation_side", ("left", "right"), "left")

# --- completions ---

_EMBEDS = STRING | {"contentEncoding": "base64"}  # a safetensors file
_PIECE = any_of(_TOKEN_ID, object_of(("prompt_embeds",), prompt_embeds=_EMBEDS))
PROMPT = OtherField("prompt", any_of(STRING, list_of(any_of(STRING, _PIECE, list_of(_PIECE)))))
PROMPT_EMBEDS = OtherField("prompt_embeds", any_of(_EMBEDS, list_of(_EMBEDS)))
SUFFIX = TextField("suffix", MAX_TEXT_CHARACTERS)
ECHO = BooleanField("echo", False)
BEST_OF = IntegerField("best_of", 1, MAX_N, None)
LOGPROBS = IntegerField("logprobs", 0, MAX_LOGPROBS, None)
MAX_TOKENS = IntegerField("max_tokens", 0, LARGEST, None)
MAX_COMPLETION_TOKENS = IntegerField("max_completion_tokens", 0, LARGEST, None)
ADD_SPECIAL_TOKENS = BooleanField("add_special_tokens", True)

# --- chat completions ---

_NAMED = object_of(("name",), name=STRING)
MESSAGES = OtherField(
    "messages",
    list_of(
        object_of(
            ("role",),
            role=one_of("system", "developer", "user", "assistant", "tool"),
            content=any_of(STRING, list_of(object_of(("type",), type=one_of("text", "refusal"), text=STRING)), NULL),
            reasoning_content=or_null(STRING),
            reasoning=or_null(STRING),
            tool_calls=list_of(object_of(("function",), function=_NAMED)),
        ),
        minItems=1,
    ),
)
ADD_GENERATION_PROMPT = BooleanField("add_generation_prompt", True)
CONTINUE_FINAL_MESSAGE = BooleanField("continue_final_message", False)
CHAT_TEMPLATE_KWARGS = OtherField("chat_template_kwargs", OBJECT)
_TEXT_PARTS = list_of(object_of(("type", "text"), type=one_of("text"), text=STRING))
PREDICTION = OtherField(
    "prediction", object_of(("type", "content"), type=one_of("content"), content=any_of(STRING, _TEXT_PARTS))
)
REASONING_EFFORT = TextField("reasoning_effort", _LABEL_CHARACTERS)
INCLUDE_REASONING = BooleanField("include_reasoning", True)
THINKING_TOKEN_BUDGET = IntegerField("thinking_token_budget", -1, LARGEST, None)
CHAT_LOGPROBS = BooleanField("logprobs", False)
TOP_LOGPROBS = IntegerField("top_logprobs", 0, MAX_LOGPROBS, 0)
CHAT_MAX_TOKENS = IntegerField("max_tokens", 1, LARGEST, None)
CHAT_MAX_COMPLETION_TOKENS = IntegerField("max_completion_tokens", 1, LARGEST, None)
TOOLS = ArrayField(
    "tools",
    128,
    object_of(
        ("type", "function"),
        type={"const": "function"},
        function=object_of(
            ("name",),
            name=STRING | {"pattern": "^[A-Za-z0-9_.-]{1,64}$"},
            description=STRING,
            parameters=OBJECT,
            strict=BOOLEAN,
        ),
    ),
)
TOOL_CHOICE = OtherField(
    "tool_choice",
    any_of(
        one_of("none", "auto", "required"), object_of(("type", "function"), type={"const": "function"}, function=_NAMED)
    ),
)
PARALLEL_TOOL_CALLS = BooleanField("parallel_tool_calls", True)
FUNCTIONS = OtherField("functions", {"type": "array", "maxItems": 0})  # the older form of tools is refused
FUNCTION_CALL = OtherField("function_call", one_of("none", "auto"))

# --- embeddings, scores and rankings ---

INPUT = OtherField("input", any_of(STRING, list_of(any_of(STRING, _TOKEN_ID, list_of(_TOKEN_ID)))))
ENCODING_FORMAT = ChoiceField("encoding_format", ("float", "base64"), "float")
DIMENSIONS = IntegerField("dimensions", 1, LARGEST, None)
NORMALIZE = BooleanField("normalize", True)
PROMPT_NAME = TextField("prompt_name", 256)
_TEXT_OR_OBJECT = any_of(STRING, closed(object_of(("text",), text=STRING)))
_TEXTS = any_of(_TEXT_OR_OBJECT, list_of(_TEXT_OR_OBJECT, minItems=1))
TEXT_1 = OtherField("text_1", _TEXTS)
TEXT_2 = OtherField("text_2", _TEXTS)
QUERIES = OtherField("queries", _TEXTS)
DOCUMENTS = OtherField("documents", _TEXTS)
QUERY = TextField("query", MAX_TEXT_CHARACTERS)
TOP_N = IntegerField("top_n", 0, LARGEST, 0)
RETURN_DOCUMENTS = BooleanField("return_documents", True)

USE_ACTIVATION = BooleanField("use_activation", True)

# --- tokens and adapters ---

TEXT_PROMPT = TextField("prompt", MAX_TEXT_CHARACTERS)
RETURN_TOKEN_STRS = BooleanField("return_token_strs", False)
TOKENS = ArrayField("tokens", MAX_TOKENIZED, _TOKEN_ID)
LORA_NAME = TextField("lora_name", _PATH_CHARACTERS)
LORA_FOLDER = TextField("lora_path", _PATH_CHARACTERS)
LOAD_INPLACE = BooleanField("load_inplace", False)
LABELS = OtherField("labels", map_of(text_of(MAX_LABEL_CHARACTERS, least=0), LABEL_NAME, MAX_LABELS))
PINNED = OtherField("pinned", one_of("no", *PINS))
CHAT_TEMPLATE = TextField("chat_template", MAX_CHAT_TEMPLATE_BYTES)
DEFAULT_SAMPLING = (  # the fields of requests for which an adapter may have defaults
    *(TEMPERATURE, TOP_P, TOP_K, MIN_P, PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY),
    CHAT_MAX_TOKENS,
)
SAMPLING = OtherField(
    "sampling", closed(object_of((), **{field.name: or_null(field.schema()) for field in DEFAULT_SAMPLING}))
)
ALIASED_ADAPTER = TextField("adapter", _ADAPTER_NAME_CHARACTERS)
