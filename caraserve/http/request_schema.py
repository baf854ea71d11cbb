"""The fields of request bodies that this server knows, route by route: served, refused, or ignored.

Sources are the request schemas of OpenAI, vLLM, SGLang, llama.cpp, TGI, LoRAX, Ollama, TensorRT-LLM and others. A field
that selects weights, constrains the output, or changes the prompt, the sampling or the response, and is not served, is
refused unless its value asks for nothing. Fields that only advise, label or tune are ignored, and so are a few that
clients send by default and no server of one plain model can honour (`reasoning`, `web_search_options`).
`check_fields` applies a table before any value is read.
"""

import functools
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

from caraserve.errors import InvalidRequest
from caraserve.http import body_fields as body
from caraserve.http.field_types import BodyField, OtherField
from caraserve.http.spelling import Spellings
from caraserve.http.validation import Fields, shown

MAX_UNKNOWN = 64  # fields of one body that no table names; real clients send about a dozen
_LABEL_CHARACTERS = 256  # of a name, that are looked at
_WEIGHT_WORDS = ("lora", "adapter", "peft")  # in names of fields that select weights
_NAME_THE_ADAPTER = "name one adapter as model"


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer but is not served. `advice` ends the error message; `neutral` are values
    that ask for nothing."""

    advice: str
    neutral: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class KnownFields:
    """What one route reads, refuses and ignores. A name in none of the three is unknown, and ignored unless it looks
    like a misspelt one, or like one that selects weights, for which `weights_advice` says what works. `types`: of the
    served fields, by name. `is_closed`: nothing is ignored, also no null, because the body says what to store: one that
    is not understood would look done. Compared by identity, so that functions of a table can be cached."""

    types: Mapping[str, BodyField]
    refused: Mapping[str, Refused]
    ignored: frozenset[str] = frozenset()
    weights_advice: str = _NAME_THE_ADAPTER
    is_closed: bool = False

    @property
    def served(self) -> Set[str]:
        """The names of the served fields."""
        return self.types.keys()


def _served(*fields: BodyField) -> dict[str, BodyField]:
    return {field.name: field for field in fields}


def _table(
    types: Mapping[str, BodyField], refused: Mapping[str, Refused], ignored: frozenset[str] = frozenset()
) -> KnownFields:
    """A table whose served fields are left out of those that most routes refuse or ignore."""
    return KnownFields(types, refused_beside(types, refused), ignored - types.keys())


def refused_beside(types: Mapping[str, BodyField], refused: Mapping[str, Refused]) -> dict[str, Refused]:
    """The refused fields of a route that serves `types`. Where another field would have to be sent instead that this
    route refuses too, the advice is the one for that field."""
    beside = {name: one for name, one in refused.items() if name not in types}
    for name, one in beside.items():
        instead = _INSTEAD.fullmatch(one.advice)
        if instead is not None and instead[1] not in types:
            advice = beside[instead[1]].advice if instead[1] in beside else _LEAVE_OUT
            beside[name] = Refused(advice, one.neutral)
    return beside


def _parts(outer: OtherField) -> dict[str, BodyField]:
    """Returns the fields of an object that is a field itself."""
    return _served(*(OtherField(name, schema) for name, schema in outer.described["properties"].items()))


def _refused(advice: str, *plain: str, **neutral: object) -> dict[str, Refused]:
    """Fields with one advice; a keyword's value asks for nothing, or each of its values if it is a tuple."""
    return {name: Refused(advice) for name in plain} | {
        name: Refused(advice, value if isinstance(value, tuple) else (value,)) for name, value in neutral.items()
    }


def _instead(**fields: tuple[str, object]) -> dict[str, Refused]:
    """Fields that have another name here, each with that name and the values that ask for nothing, as `_refused`."""
    refused: dict[str, Refused] = {}
    for name, (other, neutral) in fields.items():
        refused |= _refused(f"send {other} instead", **{name: neutral})
    return refused


_INSTEAD = re.compile(r"send (\w+) instead")

NO_CONSTRAINTS = "send response_format or structured_outputs to constrain the answer"
_NO_SUCH_SAMPLER = "this way of sampling is not implemented; leave it out"
_NO_REASONING = 'send reasoning_effort, or chat_template_kwargs, such as {"enable_thinking": false}'
_TEXT_ONLY = "only text is served; leave it out"
_LEAVE_OUT = "leave it out"

_SELECTING = _served(body.MODEL, body.LORA_PATH, body.LORA, body.ADAPTER_ID)
_SAMPLING = _served(
    *(body.N, body.SEED, body.TEMPERATURE, body.TOP_P, body.TOP_K, body.MIN_P, body.MIN_TOKENS),
    *(body.STOP, body.STOP_TOKEN_IDS, body.INCLUDE_STOP_STR_IN_OUTPUT, body.IGNORE_EOS, body.SKIP_SPECIAL_TOKENS),
    *(body.PRESENCE_PENALTY, body.FREQUENCY_PENALTY, body.REPETITION_PENALTY, body.LOGIT_BIAS),
    *(body.ALLOWED_TOKEN_IDS, body.BAD_WORDS),
)
_STRUCTURE = _served(
    *(body.RESPONSE_FORMAT, body.STRUCTURED_OUTPUTS, body.GUIDED_JSON, body.GUIDED_REGEX, body.GUIDED_CHOICE),
    *(body.GUIDED_GRAMMAR, body.REGEX, body.EBNF, body.GRAMMAR, body.JSON_SCHEMA, body.STRUCTURAL_TAG),
)
_DELIVERY = _served(
    *(body.STREAM, body.STREAM_OPTIONS, body.RETURN_TOKEN_IDS, body.USER, body.CACHE_SALT, body.PRIORITY)
)
_SCORES = _served(body.PROMPT_LOGPROBS, body.RETURN_TOKENS_AS_TOKEN_IDS)
_TRUNCATION = _served(body.TRUNCATE_PROMPT_TOKENS, body.TRUNCATION_SIDE)
_GENERATION = _SELECTING | _SAMPLING | _STRUCTURE | _DELIVERY | _SCORES | _TRUNCATION
_TOOLS = _served(body.TOOLS, body.TOOL_CHOICE, body.PARALLEL_TOOL_CALLS, body.FUNCTIONS, body.FUNCTION_CALL)
_TEMPLATE = _served(body.MESSAGES, body.ADD_GENERATION_PROMPT, body.CONTINUE_FINAL_MESSAGE, body.CHAT_TEMPLATE_KWARGS)

# Other systems' fields that choose weights. If they were ignored, other weights would answer.
_WEIGHTS = _refused(
    _NAME_THE_ADAPTER,
    *("lora_request", "lora_name", "lora_id", "lora_ids", "lora_int_id", "lora_adapters", "lora_modules", "loras"),
    *("lora_config", "lora_weights", "lora_scale", "lora_scales", "lora_task_id", "lora_uid", "adapter", "adapters"),
    *("adapter_name", "adapter_names", "adapter_path", "adapter_ids", "adapter_weight", "merged_adapters", "models"),
    *("control_vectors", "fine_tune", "fine_tuned_model"),
    adapter_source="",
)

_NESTED = _refused("send each field at the top level of the body", parameters={}, options={}, extra_body={})

_CONSTRAINTS = _refused(
    NO_CONSTRAINTS,
    *("guided_decoding", "guided_options_request"),
    *("custom_logit_processor", "grammar_triggers", "output_format", "output_config"),
    format="",
    bad_words_ids=([],),
    banned_tokens=([], ""),
    force_words_ids=([],),
    logits_processors=([],),
    custom_params={},
    repetition_detection={},
)

_SAMPLERS = _refused(
    _NO_SUCH_SAMPLER,
    *("samplers", "sampler_order", "sampler_priority", "sampler_seq", "negative_prompt", "max_time"),
    use_beam_search=False,
    num_beams=1,
    beam_width=1,
    mirostat=0,
    mirostat_mode=0,
    typical_p=1,
    typical=1,
    typ_p=1,
    tfs=1,
    tfs_z=1,
    top_a=0,
    top_n_sigma=(-1, 0),
    nsigma=0,
    xtc_probability=0,
    dry_multiplier=0,
    dynatemp_range=0,
    dynamic_temperature=False,
    adaptive_target=-1,
    smoothing_factor=0,
    epsilon_cutoff=0,
    eta_cutoff=0,
    penalty_alpha=0,
    guidance_scale=1,
    cfg_scale=1,
    watermark=False,
    watermarking=False,
    min_keep=(0, 1),
    n_indent=0,
    no_repeat_ngram_size=0,
    encoder_repetition_penalty=1,
    repetition_penalty_range=0,
    repetition_penalty_decay=0,
    t_max_predict_ms=(-1, 0),
    thinking_token_budget=-1,
    vllm_xargs={},
)

_OTHER_NAMES = _instead(
    max_new_tokens=("max_tokens", ()),
    max_output_tokens=("max_tokens", ()),
    max_tokens_to_sample=("max_tokens", ()),
    max_gen_len=("max_tokens", ()),
    max_length=("max_tokens", ()),
    n_predict=("max_tokens", -1),
    num_predict=("max_tokens", -1),
    min_new_tokens=("min_tokens", 0),
    min_length=("min_tokens", 0),
    n_cmpl=("n", 1),
    num_return_sequences=("n", 1),
    n_probs=("logprobs", 0),
    return_logprob=("logprobs", False),
    top_n_tokens=("logprobs", 0),
    top_logprobs_num=("logprobs", 0),
    return_k_alternatives=("logprobs", 0),
    random_seed=("seed", ()),
    sampling_seed=("seed", ()),
    sampler_seed=("seed", ()),
    temp=("temperature", ()),
    do_sample=("temperature 0", True),
    rep_pen=("repetition_penalty", 1),
    repeat_penalty=("repetition_penalty", 1),
    stop_sequences=("stop", ([],)),
    stop_sequence=("stop", ([], "")),
    stop_strings=("stop", ([],)),
    stop_words=("stop", ([],)),
    stop_regex=("stop", ([], "")),
    eos_token_id=("stop_token_ids", ()),
    end_id=("stop_token_ids", ()),
    ignore_eos_token=("ignore_eos", False),
    ban_eos_token=("ignore_eos", False),
    no_stop_trim=("include_stop_str_in_output", False),
    banned_strings=("bad_words", ([],)),
    thinking_budget=("thinking_token_budget", ()),
    extra_key=("cache_salt", ()),
    return_tokens=("return_token_ids", False),
    return_prompt_token_ids=("return_token_ids", False),
    return_full_text=("echo", False),
)

_PROMPTS = {
    **_refused(
        "send the text or token ids as prompt, or messages to /v1/chat/completions",
        *("input", "inputs", "input_ids", "prompt_token_ids", "contents"),
        *("input_prefix", "input_suffix", "input_embeds", "input_extra"),
        suffix="",
        context=([],),
    ),
    **_refused(
        "send a message with the role system to /v1/chat/completions", "instructions", "system_prompt", system=""
    ),
    **_NESTED,
    **_refused(
        "the prompt is used as it is; leave it out and shorten the prompt",
        *("truncate", "max_prompt_tokens", "prompt_truncate_len", "task", "prompt_mode"),
        truncate_prompt_tokens=-1,
        truncation="disabled",
        context_length_exceeded_behavior="error",
        transforms=([],),
        safe_prompt=False,
    ),
    **_refused("start the server with --chat-template to use another one", "chat_template", "template"),
    **_refused(
        _TEXT_ONLY,
        *("audio", "multi_modal_data"),
        modalities=["text"],
        documents=([],),
        images=([],),
        image_data=([],),
        audio_data=([],),
        video_data=([],),
        mm_processor_kwargs={},
        images_config={},
    ),
    **_refused("the conversation is sent whole with every request; leave it out", session_params={}),
    **_refused(
        "prompts are not computed on one server and continued on another; leave it out",
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
        kv_transfer_params={},
        ec_transfer_params={},
    ),
    **_refused(_NO_REASONING, "enable_thinking", "think", "thinking"),
}

# Contents of the response, which a client that asks for them reads.
_ANSWERS = _refused(
    _LEAVE_OUT,
    *("prompt_logprobs", "logprob_token_ids", "token_ids_logprob"),
    return_tokens_as_token_ids=False,
    allowed_token_ids=([],),
    bad_words=([],),
    return_hidden_states=False,
    return_routed_experts=False,
    return_prompt_text=False,
    return_meta_info=False,
    return_progress=False,
    post_sampling_probs=False,
    decoder_input_details=False,
    response_fields=([],),
    plugins=([],),
)

_REFUSED = {**_WEIGHTS, **_CONSTRAINTS, **_SAMPLERS, **_OTHER_NAMES, **_PROMPTS, **_ANSWERS}

_IGNORED = frozenset(
    (
        # OpenAI: labels, prices, hints, and what a model without reasoning and search has no use for.
        *("metadata", "store", "service_tier", "safety_identifier", "moderation", "prediction", "verbosity"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
        *("reasoning_effort", "reasoning", "web_search_options", "include"),
        # vLLM and SGLang: names of requests and sessions, routing, and options without effect where the option that
        # they belong to is refused.
        *("request_id", "session_id", "rid", "custom_labels", "length_penalty", "early_stopping", "stream_interval"),
        *("spaces_between_special_tokens", "truncation_side", "include_reasoning", "separate_reasoning"),
        *("stream_reasoning", "return_token_offsets", "return_mm_kwargs", "return_cached_tokens_details"),
        *("routed_experts_prompt_start", "routed_experts_start_len", "media_io_kwargs", "guided_decoding_backend"),
        *("guided_whitespace_pattern", "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank"),
        *("ngram_corpus_id", "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video"),
        # llama.cpp: caching, timing, and parameters of samplers that are refused.
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "timings_per_token", "verbose"),
        *("sse_ping_interval", "backend_sampling", "grammar_lazy", "grammar_type", "chat_format", "reasoning_format"),
        *("reasoning_in_content", "thinking_forced_open", "parse_tool_calls", "mirostat_tau", "mirostat_eta"),
        *("xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "dynatemp_low", "dynatemp_high", "adaptive_decay", "repeat_last_n", "penalize_nl"),
        # Ollama, TGI and gateways.
        *("keep_alive", "details", "raw", "provider", "route", "cache_control", "mode", "speed", "tags", "type"),
    )
)

COMPLETIONS = _table(
    _GENERATION
    | _served(body.PROMPT, body.PROMPT_EMBEDS, body.SUFFIX, body.ECHO, body.BEST_OF, body.ADD_SPECIAL_TOKENS)
    | _served(body.LOGPROBS, body.MAX_TOKENS, body.MAX_COMPLETION_TOKENS),
    _REFUSED
    | _refused("send it to /v1/chat/completions", messages=([],), tools=([],), functions=([],))
    | _refused("send it to /v1/chat/completions", tool_choice=("none", "auto"), function_call=("none", "auto"))
    | _instead(top_logprobs=("logprobs, the number of alternatives,", 0)),
    _IGNORED | _TEMPLATE.keys() - {"messages"} | {"parallel_tool_calls"},
)

CHAT = _table(
    _GENERATION
    | _TEMPLATE
    | _TOOLS
    | _served(body.REASONING_EFFORT, body.INCLUDE_REASONING, body.THINKING_TOKEN_BUDGET)
    | _served(body.CHAT_LOGPROBS, body.TOP_LOGPROBS, body.CHAT_MAX_TOKENS, body.CHAT_MAX_COMPLETION_TOKENS),
    _REFUSED
    | _refused("send it to /v1/completions", "prompt", "prompt_embeds", echo=False)
    | _refused("the chat template writes special tokens; leave it out", add_special_tokens=False)
    | _instead(best_of=("n", 1)),
    _IGNORED,
)

_EMBEDDED = _SELECTING | _served(body.USER, body.CACHE_SALT, body.PRIORITY, body.ADD_SPECIAL_TOKENS) | _TRUNCATION
_NOT_EMBEDDED = (
    _WEIGHTS
    | _NESTED
    | _refused("write it into the text", "input_type", "task", "task_type", "prompt_name", "instruction", "instruct")
    | _refused("send truncate_prompt_tokens instead", "truncate", "truncation", "max_tokens_per_doc")
    | _refused("send truncate_prompt_tokens instead", "max_chunks_per_doc", "max_length")
    | _refused(_TEXT_ONLY, images=([],), image_data=([],), mm_processor_kwargs={})
    | _refused(_LEAVE_OUT, "activation", "softmax", "pooling_type", late_chunking=False, rank_fields=(["text"],))
)

EMBEDDINGS = _table(
    _EMBEDDED | _served(body.INPUT, body.ENCODING_FORMAT, body.DIMENSIONS, body.NORMALIZE),
    _NOT_EMBEDDED
    | _refused("send the text or token ids as input", "prompt", "prompts", "inputs", "input_ids", "text", "texts")
    | _refused("send the text or token ids as input", messages=([],))
    | _instead(use_activation=("normalize", True), output_dimension=("dimensions", ()))
    | _refused("numbers are float32, in base64 little-endian; leave it out", embed_dtype="float32")
    | _refused("numbers are float32, in base64 little-endian; leave it out", endianness=("native", "little"))
    | _refused("send encoding_format instead", output_dtype="float", embedding_types=(["float"],)),
    _IGNORED,
)

SCORE = _table(
    _EMBEDDED | _served(body.TEXT_1, body.TEXT_2, body.QUERIES, body.DOCUMENTS),
    _NOT_EMBEDDED
    | _instead(data_1=("text_1", ()), data_2=("text_2", ()), query=("queries", ()), items=("documents", ()))
    | _refused("a score is the cosine similarity; leave it out", "use_activation"),
    _IGNORED,
)

RERANK = _table(
    _EMBEDDED | _served(body.QUERY, body.DOCUMENTS, body.TOP_N, body.RETURN_DOCUMENTS),
    _NOT_EMBEDDED
    | _instead(texts=("documents", ()), passages=("documents", ()), top_k=("top_n", ()))
    | _refused("a score is the cosine similarity; leave it out", "use_activation"),
    _IGNORED,
)

TOKENIZE = KnownFields(
    _SELECTING | _TEMPLATE | _served(body.TEXT_PROMPT, body.ADD_SPECIAL_TOKENS, body.RETURN_TOKEN_STRS, body.TOOLS),
    _WEIGHTS
    | _NESTED
    | _instead(content=("prompt", ()), text=("prompt", ()), add_special=("add_special_tokens", ()))
    | _instead(with_pieces=("return_token_strs", False), return_tokens=("return_token_strs", False))
    | {name: _REFUSED[name] for name in ("chat_template", "documents", "mm_processor_kwargs", "inputs", "suffix")},
    _IGNORED,
)

DETOKENIZE = KnownFields(
    _SELECTING | _served(body.TOKENS),
    _WEIGHTS
    | _NESTED
    | _instead(ids=("tokens", ()), token_ids=("tokens", ()))
    | _refused("the text shows special tokens; leave it out", skip_special_tokens=False),
    _IGNORED,
)

LOAD_ADAPTER = KnownFields(
    _served(body.LORA_NAME, body.LORA_FOLDER, body.LOAD_INPLACE),
    _instead(inplace=("load_inplace", False), name=("lora_name", ()), path=("lora_path", ()))
    | _refused("an adapter is loaded as its folder says; leave it out", scale=1, lora_scale=1)
    | _refused("an adapter is read from a folder; send lora_path", "tensors", "serialized_named_tensors")
    | _refused(_LEAVE_OUT, is_3d_lora_weight=False, pinned=False),
    frozenset(("lora_int_id", "base_model_name")),  # numbers of vLLM's own, and what the adapter's own file says
    "send lora_name and lora_path",
)

UNLOAD_ADAPTER = KnownFields(
    _served(body.LORA_NAME),
    _instead(name=("lora_name", ())),
    frozenset(("lora_int_id",)),
    "send lora_name",
)

ADAPTER_SAMPLING = KnownFields(_served(*body.DEFAULT_SAMPLING), {})

ADAPTER_SETTINGS = KnownFields(
    _served(body.LABELS, body.PINNED, body.CHAT_TEMPLATE, body.STOP, body.SAMPLING),
    _instead(pin=("pinned", ()), tags=("labels", ()), template=("chat_template", ()), stop_sequences=("stop", ()))
    | _refused("send it in sampling", *ADAPTER_SAMPLING.served)
    | _refused("an adapter has no default for it; leave it out", *(CHAT.served - {"stop"} - ADAPTER_SAMPLING.served)),
    is_closed=True,
)

ALIAS = KnownFields(
    _served(body.ALIASED_ADAPTER),
    _instead(name=("adapter", ()), lora_name=("adapter", ())),
    is_closed=True,
)

STREAM_OPTIONS = KnownFields(
    _served(body.INCLUDE_USAGE, body.CONTINUOUS_USAGE_STATS), {}, frozenset(("include_obfuscation",))
)

RESPONSE_FORMAT = KnownFields(_parts(body.RESPONSE_FORMAT), {})

STRUCTURED_OUTPUTS = KnownFields(
    _parts(body.STRUCTURED_OUTPUTS),
    _refused("write the spaces into the schema or grammar; leave it out", disable_any_whitespace=False)
    | _refused("objects have the properties that the schema allows", disable_additional_properties=False)
    | _refused(_LEAVE_OUT, whitespace_pattern=""),
    frozenset(("backend", "disable_fallback")),
)


def check_fields(fields: Fields, known: KnownFields) -> None:
    """Raises InvalidRequest for a field that is not served and would change the answer, for one that looks misspelt,
    and for too many unknown ones; in a closed table for any other than the served. Null is the same as absent, but not
    in a closed table."""
    unknown = {}
    for name, value in fields.items():
        if (refused := known.refused.get(name)) is not None:
            fields.raw(name)  # read: a neutral value is not listed as ignored
            if known.is_closed or (value is not None and value not in refused.neutral):
                raise InvalidRequest(f"{name} is not supported by this server; {refused.advice}.", param=name)
        elif name not in known.served and name not in known.ignored:
            unknown[name] = value
            if len(unknown) > MAX_UNKNOWN:  # checked before any comparison: a body may have thousands
                raise InvalidRequest(f"The body has more than {MAX_UNKNOWN} fields that this server does not know.")
    for name, value in unknown.items():
        if (value is not None or known.is_closed) and (advice := _advice(name, known)) is not None:
            raise InvalidRequest(f"Unknown field {shown(name)}; {advice}", param=name[:64])


def _advice(name: str, known: KnownFields) -> str | None:
    """What to do about a field that no table names; None if it may be ignored."""
    meant = _spellings(known).likely(name)
    if meant in known.served:
        return f"did you mean {meant!r}?"
    if known.is_closed:
        return f"{known.refused[meant].advice}." if meant else f"this route takes {', '.join(known.served)}."
    if any(word in name[:_LABEL_CHARACTERS].lower() for word in _WEIGHT_WORDS):
        return f"{known.weights_advice}."
    return None if meant is None else f"{known.refused[meant].advice}."


@functools.cache
def _spellings(known: KnownFields) -> Spellings:
    return Spellings((*sorted(known.served), *sorted(known.refused)))
