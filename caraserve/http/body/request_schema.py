"""The fields of request bodies that this server knows, route by route: served, refused, or ignored.

Sources are the request schemas of OpenAI, vLLM, SGLang, llama.cpp, TGI, LoRAX, Ollama, TensorRT-LLM and others. Fields
that only advise, label or tune are ignored, and so are a few that clients send by default and no server of one plain
model can honour (`reasoning`, `web_search_options`). `known_fields.py` says what is refused.
"""

from collections.abc import Mapping

from caraserve.http.body import fields as body
from caraserve.http.body.field_types import BodyField, OtherField
from caraserve.http.body.known_fields import (
    LEAVE_OUT,
    NAME_THE_ADAPTER,
    KnownFields,
    Refused,
    instead,
    refused,
    refused_beside,
    served,
)


def _table(
    types: Mapping[str, BodyField], refused: Mapping[str, Refused], ignored: frozenset[str] = frozenset()
) -> KnownFields:
    """A table whose served fields are left out of those that most routes refuse or ignore."""
    return KnownFields(types, refused_beside(types, refused), ignored - types.keys())


def _parts(outer: OtherField) -> dict[str, BodyField]:
    """Returns the fields of an object that is a field itself."""
    return served(*(OtherField(name, schema) for name, schema in outer.described["properties"].items()))


NO_CONSTRAINTS = "send response_format or structured_outputs to constrain the answer"
_NO_SUCH_SAMPLER = "this way of sampling is not implemented; leave it out"
_NO_REASONING = 'send reasoning_effort, or chat_template_kwargs, such as {"enable_thinking": false}'
_TEXT_ONLY = "only text is served; leave it out"
_AS_IT_IS = "the prompt is used as it is; leave it out and shorten the prompt"
_SEND_PROMPT = "send the text or token ids as prompt, or messages to /v1/chat/completions"
_SEND_SYSTEM = "send a message with the role system to /v1/chat/completions"
_ONE_SERVER = "prompts are not computed on one server and continued on another; leave it out"

_SELECTING = served(body.MODEL, body.LORA_PATH, body.LORA, body.ADAPTER_ID)
_SAMPLING = served(
    *(body.N, body.SEED, body.TEMPERATURE, body.TOP_P, body.TOP_K, body.MIN_P, body.MIN_TOKENS),
    *(body.STOP, body.STOP_TOKEN_IDS, body.INCLUDE_STOP_STR_IN_OUTPUT, body.IGNORE_EOS, body.SKIP_SPECIAL_TOKENS),
    *(body.PRESENCE_PENALTY, body.FREQUENCY_PENALTY, body.REPETITION_PENALTY, body.LOGIT_BIAS),
    *(body.ALLOWED_TOKEN_IDS, body.BAD_WORDS),
)
_STRUCTURE = served(body.RESPONSE_FORMAT, body.STRUCTURED_OUTPUTS, body.GUIDED_CHOICE, *body.SCHEMAS, *body.GRAMMARS)
_DELIVERY = served(
    *(body.STREAM, body.STREAM_OPTIONS, body.RETURN_TOKEN_IDS, body.USER, body.CACHE_SALT, body.PRIORITY)
)
_SCORES = served(body.PROMPT_LOGPROBS, body.RETURN_TOKENS_AS_TOKEN_IDS)
_TRUNCATION = served(body.TRUNCATE_PROMPT_TOKENS, body.TRUNCATION_SIDE)
_GENERATION = _SELECTING | _SAMPLING | _STRUCTURE | _DELIVERY | _SCORES | _TRUNCATION
_TOOLS = served(body.TOOLS, body.TOOL_CHOICE, body.PARALLEL_TOOL_CALLS, body.FUNCTIONS, body.FUNCTION_CALL)
_TEMPLATE = served(body.MESSAGES, body.ADD_GENERATION_PROMPT, body.CONTINUE_FINAL_MESSAGE, body.CHAT_TEMPLATE_KWARGS)

# Other systems' fields that choose weights. If they were ignored, other weights would answer.
_WEIGHTS = refused(
    NAME_THE_ADAPTER,
    "lora_request lora_name lora_id lora_ids lora_int_id lora_adapters lora_modules loras lora_config lora_weights "
    "lora_scale lora_scales lora_task_id lora_uid adapter adapters adapter_name adapter_names adapter_path adapter_ids "
    "adapter_weight merged_adapters models control_vectors fine_tune fine_tuned_model",
) | refused(NAME_THE_ADAPTER, "adapter_source", "")

_NESTED = refused("send each field at the top level of the body", "parameters options extra_body", {})

_CONSTRAINTS = (
    refused(
        NO_CONSTRAINTS,
        "guided_decoding guided_options_request custom_logit_processor grammar_triggers output_format output_config",
    )
    | refused(NO_CONSTRAINTS, "format", "")
    | refused(NO_CONSTRAINTS, "bad_words_ids force_words_ids logits_processors", [])
    | refused(NO_CONSTRAINTS, "banned_tokens", [], "")
    | refused(NO_CONSTRAINTS, "custom_params repetition_detection", {})
)

_SAMPLERS = (
    refused(_NO_SUCH_SAMPLER, "samplers sampler_order sampler_priority sampler_seq negative_prompt max_time")
    | refused(_NO_SUCH_SAMPLER, "use_beam_search dynamic_temperature watermark watermarking", False)
    | refused(_NO_SUCH_SAMPLER, "num_beams beam_width typical_p typical typ_p tfs tfs_z guidance_scale cfg_scale", 1)
    | refused(_NO_SUCH_SAMPLER, "encoder_repetition_penalty", 1)
    | refused(_NO_SUCH_SAMPLER, "mirostat mirostat_mode top_a nsigma xtc_probability dry_multiplier dynatemp_range", 0)
    | refused(_NO_SUCH_SAMPLER, "smoothing_factor epsilon_cutoff eta_cutoff penalty_alpha n_indent", 0)
    | refused(_NO_SUCH_SAMPLER, "no_repeat_ngram_size repetition_penalty_range repetition_penalty_decay", 0)
    | refused(_NO_SUCH_SAMPLER, "min_keep", 0, 1)
    | refused(_NO_SUCH_SAMPLER, "top_n_sigma t_max_predict_ms", -1, 0)
    | refused(_NO_SUCH_SAMPLER, "adaptive_target thinking_token_budget", -1)
    | refused(_NO_SUCH_SAMPLER, "vllm_xargs", {})
)

_OTHER_NAMES = (
    instead("max_tokens", "max_new_tokens max_output_tokens max_tokens_to_sample max_gen_len max_length")
    | instead("max_tokens", "n_predict num_predict", -1)
    | instead("min_tokens", "min_new_tokens min_length", 0)
    | instead("n", "n_cmpl num_return_sequences", 1)
    | instead("logprobs", "n_probs top_n_tokens top_logprobs_num return_k_alternatives", 0)
    | instead("logprobs", "return_logprob", False)
    | instead("seed", "random_seed sampling_seed sampler_seed")
    | instead("temperature", "temp")
    | instead("temperature 0", "do_sample", True)
    | instead("repetition_penalty", "rep_pen repeat_penalty", 1)
    | instead("stop", "stop_sequences stop_strings stop_words", [])
    | instead("stop", "stop_sequence stop_regex", [], "")
    | instead("stop_token_ids", "eos_token_id end_id")
    | instead("ignore_eos", "ignore_eos_token ban_eos_token", False)
    | instead("include_stop_str_in_output", "no_stop_trim", False)
    | instead("bad_words", "banned_strings", [])
    | instead("thinking_token_budget", "thinking_budget")
    | instead("cache_salt", "extra_key")
    | instead("return_token_ids", "return_tokens return_prompt_token_ids", False)
    | instead("echo", "return_full_text", False)
)

_PROMPTS = (
    refused(_SEND_PROMPT, "input inputs input_ids prompt_token_ids contents input_prefix input_suffix input_embeds")
    | refused(_SEND_PROMPT, "input_extra")
    | refused(_SEND_PROMPT, "suffix", "")
    | refused(_SEND_PROMPT, "context", [])
    | refused(_SEND_SYSTEM, "instructions system_prompt")
    | refused(_SEND_SYSTEM, "system", "")
    | _NESTED
    | refused(_AS_IT_IS, "truncate max_prompt_tokens prompt_truncate_len task prompt_mode")
    | refused(_AS_IT_IS, "truncate_prompt_tokens", -1)
    | refused(_AS_IT_IS, "truncation", "disabled")
    | refused(_AS_IT_IS, "context_length_exceeded_behavior", "error")
    | refused(_AS_IT_IS, "transforms", [])
    | refused(_AS_IT_IS, "safe_prompt", False)
    | refused("start the server with --chat-template to use another one", "chat_template template")
    | refused(_TEXT_ONLY, "audio multi_modal_data")
    | refused(_TEXT_ONLY, "modalities", ["text"])
    | refused(_TEXT_ONLY, "documents images image_data audio_data video_data", [])
    | refused(_TEXT_ONLY, "mm_processor_kwargs images_config", {})
    | refused("the conversation is sent whole with every request; leave it out", "session_params", {})
    | refused(_ONE_SERVER, "bootstrap_host bootstrap_port bootstrap_room")
    | refused(_ONE_SERVER, "kv_transfer_params ec_transfer_params", {})
    | refused(_NO_REASONING, "enable_thinking think thinking")
)

# Contents of the response, which a client that asks for them reads.
_ANSWERS = (
    refused(LEAVE_OUT, "prompt_logprobs logprob_token_ids token_ids_logprob")
    | refused(LEAVE_OUT, "return_tokens_as_token_ids return_hidden_states return_routed_experts", False)
    | refused(LEAVE_OUT, "return_prompt_text return_meta_info return_progress post_sampling_probs", False)
    | refused(LEAVE_OUT, "decoder_input_details", False)
    | refused(LEAVE_OUT, "allowed_token_ids bad_words response_fields plugins", [])
)

_REFUSED = {**_WEIGHTS, **_CONSTRAINTS, **_SAMPLERS, **_OTHER_NAMES, **_PROMPTS, **_ANSWERS}

_IGNORED_NAMES = (
    # OpenAI: labels, prices, hints, and what a model without reasoning and search has no use for.
    "metadata store service_tier safety_identifier moderation prediction verbosity prompt_cache_key "
    "prompt_cache_options prompt_cache_retention reasoning_effort reasoning web_search_options include "
    # vLLM and SGLang: names of requests and sessions, routing, and options without effect where the option that they
    # belong to is refused.
    "request_id session_id rid custom_labels length_penalty early_stopping stream_interval "
    "spaces_between_special_tokens truncation_side include_reasoning separate_reasoning stream_reasoning "
    "return_token_offsets return_mm_kwargs return_cached_tokens_details routed_experts_prompt_start "
    "routed_experts_start_len media_io_kwargs guided_decoding_backend guided_whitespace_pattern data_parallel_rank "
    "routed_dp_rank disagg_prefill_dp_rank ngram_corpus_id max_dynamic_patch min_dynamic_patch use_audio_in_video "
    # llama.cpp: caching, timing, and parameters of samplers that are refused.
    "cache_prompt id_slot slot_id n_keep n_discard n_cache_reuse timings_per_token verbose sse_ping_interval "
    "backend_sampling grammar_lazy grammar_type chat_format reasoning_format reasoning_in_content thinking_forced_open "
    "parse_tool_calls mirostat_tau mirostat_eta xtc_threshold dry_base dry_allowed_length dry_penalty_last_n "
    "dry_sequence_breakers dynatemp_exponent dynatemp_low dynatemp_high adaptive_decay repeat_last_n penalize_nl "
    # Ollama, TGI and gateways.
    "keep_alive details raw provider route cache_control mode speed tags type"
)
_IGNORED = frozenset(_IGNORED_NAMES.split())

COMPLETIONS = _table(
    _GENERATION
    | served(body.PROMPT, body.PROMPT_EMBEDS, body.SUFFIX, body.ECHO, body.BEST_OF, body.ADD_SPECIAL_TOKENS)
    | served(body.LOGPROBS, body.MAX_TOKENS, body.MAX_COMPLETION_TOKENS),
    _REFUSED
    | refused("send it to /v1/chat/completions", "messages tools functions", [])
    | refused("send it to /v1/chat/completions", "tool_choice function_call", "none", "auto")
    | instead("logprobs, the number of alternatives,", "top_logprobs", 0),
    _IGNORED | _TEMPLATE.keys() - {"messages"} | {"parallel_tool_calls"},
)

CHAT = _table(
    _GENERATION
    | _TEMPLATE
    | _TOOLS
    | served(body.REASONING_EFFORT, body.INCLUDE_REASONING, body.THINKING_TOKEN_BUDGET, body.PREDICTION)
    | served(body.CHAT_LOGPROBS, body.TOP_LOGPROBS, body.CHAT_MAX_TOKENS, body.CHAT_MAX_COMPLETION_TOKENS),
    _REFUSED
    | refused("send it to /v1/completions", "prompt prompt_embeds")
    | refused("send it to /v1/completions", "echo", False)
    | refused("the chat template writes special tokens; leave it out", "add_special_tokens", False)
    | instead("n", "best_of", 1),
    _IGNORED,
)

_EMBEDDED = (
    _SELECTING
    | served(body.USER, body.CACHE_SALT, body.PRIORITY, body.ADD_SPECIAL_TOKENS, body.PROMPT_NAME)
    | _TRUNCATION
)
_NOT_EMBEDDED = (
    _WEIGHTS
    | _NESTED
    | refused("write it into the text", "input_type task task_type instruction instruct")
    | instead("truncate_prompt_tokens", "truncate truncation max_tokens_per_doc max_chunks_per_doc max_length")
    | refused(_TEXT_ONLY, "images image_data", [])
    | refused(_TEXT_ONLY, "mm_processor_kwargs", {})
    | refused(LEAVE_OUT, "pooling_type")
    | refused(LEAVE_OUT, "late_chunking", False)
    | refused(LEAVE_OUT, "rank_fields", ["text"])
)
_AS_INPUT = "send the text or token ids as input"
_NOT_INPUT = refused(_AS_INPUT, "prompt prompts inputs input_ids text texts") | refused(_AS_INPUT, "messages", [])
_A_SCORE = "a score is the cosine similarity, or the probability of a score head; leave it out"
_NOT_SCORED = refused(LEAVE_OUT, "activation softmax") | refused(_A_SCORE, "use_activation")

EMBEDDINGS = _table(
    _EMBEDDED | served(body.INPUT, body.ENCODING_FORMAT, body.DIMENSIONS, body.NORMALIZE),
    _NOT_EMBEDDED
    | _NOT_INPUT
    | refused(LEAVE_OUT, "activation softmax")
    | instead("normalize", "use_activation", True)
    | instead("dimensions", "output_dimension")
    | refused("numbers are float32, in base64 little-endian; leave it out", "embed_dtype", "float32")
    | refused("numbers are float32, in base64 little-endian; leave it out", "endianness", "native", "little")
    | instead("encoding_format", "output_dtype", "float")
    | instead("encoding_format", "embedding_types", ["float"]),
    _IGNORED,
)

CLASSIFY = _table(
    _EMBEDDED | served(body.INPUT, body.USE_ACTIVATION),
    _NOT_EMBEDDED | _NOT_INPUT | instead("use_activation", "activation softmax", True),
    _IGNORED,
)

SCORE = _table(
    _EMBEDDED | served(body.TEXT_1, body.TEXT_2, body.QUERIES, body.DOCUMENTS),
    _NOT_EMBEDDED
    | instead("text_1", "data_1")
    | instead("text_2", "data_2")
    | instead("queries", "query")
    | instead("documents", "items")
    | _NOT_SCORED,
    _IGNORED,
)

RERANK = _table(
    _EMBEDDED | served(body.QUERY, body.DOCUMENTS, body.TOP_N, body.RETURN_DOCUMENTS),
    _NOT_EMBEDDED | instead("documents", "texts passages") | instead("top_n", "top_k") | _NOT_SCORED,
    _IGNORED,
)

TOKENIZE = KnownFields(
    _SELECTING | _TEMPLATE | served(body.TEXT_PROMPT, body.ADD_SPECIAL_TOKENS, body.RETURN_TOKEN_STRS, body.TOOLS),
    _WEIGHTS
    | _NESTED
    | instead("prompt", "content text")
    | instead("add_special_tokens", "add_special")
    | instead("return_token_strs", "with_pieces return_tokens", False)
    | {name: _REFUSED[name] for name in ("chat_template", "documents", "mm_processor_kwargs", "inputs", "suffix")},
    _IGNORED,
)

DETOKENIZE = KnownFields(
    _SELECTING | served(body.TOKENS),
    _WEIGHTS
    | _NESTED
    | instead("tokens", "ids token_ids")
    | refused("the text shows special tokens; leave it out", "skip_special_tokens", False),
    _IGNORED,
)

LOAD_ADAPTER = KnownFields(
    served(body.LORA_NAME, body.LORA_FOLDER, body.LOAD_INPLACE),
    instead("load_inplace", "inplace", False)
    | instead("lora_name", "name")
    | instead("lora_path", "path")
    | refused("an adapter is loaded as its folder says; leave it out", "scale lora_scale", 1)
    | refused("an adapter is read from a folder; send lora_path", "tensors serialized_named_tensors")
    | refused(LEAVE_OUT, "is_3d_lora_weight pinned", False),
    frozenset(("lora_int_id", "base_model_name")),  # numbers of vLLM's own, and what the adapter's own file says
    "send lora_name and lora_path",
)

UNLOAD_ADAPTER = KnownFields(
    served(body.LORA_NAME), instead("lora_name", "name"), frozenset(("lora_int_id",)), "send lora_name"
)

ADAPTER_SETTINGS = KnownFields(
    served(body.LABELS, body.PINNED, body.CHAT_TEMPLATE, body.STOP, body.SAMPLING),
    instead("pinned", "pin")
    | instead("labels", "tags")
    | instead("chat_template", "template")
    | instead("stop", "stop_sequences")
    | refused("an adapter has no default for it; leave it out", " ".join(CHAT.served - {"stop"}))
    | refused("send it in sampling", " ".join(field.name for field in body.DEFAULT_SAMPLING)),
    is_closed=True,
)

ALIAS = KnownFields(served(body.ALIASED_ADAPTER), instead("adapter", "name lora_name"), is_closed=True)

STREAM_OPTIONS = KnownFields(
    served(body.INCLUDE_USAGE, body.CONTINUOUS_USAGE_STATS), {}, frozenset(("include_obfuscation",))
)

RESPONSE_FORMAT = KnownFields(_parts(body.RESPONSE_FORMAT), {})

STRUCTURED_OUTPUTS = KnownFields(
    _parts(body.STRUCTURED_OUTPUTS),
    refused("write the spaces into the schema or grammar; leave it out", "disable_any_whitespace", False)
    | refused("objects have the properties that the schema allows", "disable_additional_properties", False)
    | refused(LEAVE_OUT, "whitespace_pattern", ""),
    frozenset(("backend", "disable_fallback")),
)
