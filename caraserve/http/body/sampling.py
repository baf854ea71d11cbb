"""Reads the sampling fields, which all routes for text share, and those for which an adapter has defaults.

For an absent field the adapter's default decides, then the model's generation_config, then OpenAI's default.
"""

from collections.abc import Mapping
from typing import Any

from caraserve.core.request import MAX_LOGIT_BIAS, MAX_STOPS, SamplingParams
from caraserve.errors import InvalidRequest
from caraserve.http.body import fields as body
from caraserve.http.body.field_types import Fields, shown, token_ids
from caraserve.loop import Engine
from caraserve.lora.settings import RequestDefaults

_LIMIT = body.CHAT_MAX_TOKENS.name


def sampling_params(fields: Fields, engine: Engine) -> SamplingParams:
    """All sampling parameters but `max_tokens`, `logprobs` and `prompt_logprobs`, which differ between the two APIs.

    Raises InvalidRequest, which names the field.
    """
    model = engine.default_sampling
    vocab_size = engine.tokenizer.vocab_size
    return SamplingParams(
        min_tokens=body.MIN_TOKENS.read(fields, high=engine.max_model_len),
        temperature=body.TEMPERATURE.read(fields, default=model.get("temperature")),
        top_p=body.TOP_P.read(fields, default=model.get("top_p")),
        top_k=max(0, body.TOP_K.read(fields, default=model.get("top_k"))),
        min_p=body.MIN_P.read(fields, default=model.get("min_p")),
        seed=body.SEED.read(fields),
        stop=_stop_strings(fields),
        stop_token_ids=token_ids("stop_token_ids", body.STOP_TOKEN_IDS.read(fields), vocab_size),
        include_stop_str_in_output=body.INCLUDE_STOP_STR_IN_OUTPUT.read(fields),
        ignore_eos=body.IGNORE_EOS.read(fields),
        skip_special_tokens=body.SKIP_SPECIAL_TOKENS.read(fields),
        presence_penalty=body.PRESENCE_PENALTY.read(fields),
        frequency_penalty=body.FREQUENCY_PENALTY.read(fields),
        repetition_penalty=body.REPETITION_PENALTY.read(fields, default=model.get("repetition_penalty")),
        logit_bias=_logit_bias(fields, vocab_size),
    )


def nth_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`, never negative: choices differ, and each is the same in every run."""
    return None if seed is None else (seed + index) % body.SEEDS


def _stop_strings(fields: Fields) -> tuple[str, ...]:
    """The strings of `stop`, none if it is absent. Raises InvalidRequest."""
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else fields.array("stop", MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= body.MAX_STOP_CHARACTERS:
            most = body.MAX_STOP_CHARACTERS
            raise InvalidRequest(f"stop must hold strings of 1 to {most} characters, not {shown(stop)}.", param="stop")
    return tuple(stops)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias")
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(biases)} entries; {MAX_LOGIT_BIAS} are allowed.", param="logit_bias")
    for key, bias in biases.items():
        # isdecimal alone would accept digits of other scripts.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: the key {shown(key)} is not a token id from 0 to {vocab_size - 1}.", param="logit_bias"
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias[{key}] must be a number from -100 to 100, not {shown(bias)}.", param="logit_bias"
            )
    return tuple((int(key), float(bias)) for key, bias in biases.items())


# --- what requests of an adapter take where they leave a field out ---


def read_defaults(values: Mapping[str, Any]) -> RequestDefaults:
    """Returns the defaults in what the registry has of an adapter. Raises as `parse_defaults`."""
    return parse_defaults(Fields(values))


def parse_defaults(fields: Fields) -> RequestDefaults:
    """Returns a body's defaults, without compiling the chat template. Raises InvalidRequest with the field."""
    return RequestDefaults(_chat_template(fields), _stop_strings(fields) or None, _default_sampling(fields) or None)


def field_defaults(defaults: RequestDefaults) -> dict[str, Any]:
    """Returns defaults as fields of a request, without the chat template and the limit of tokens."""
    values: dict[str, Any] = {name: value for name, value in (defaults.sampling or {}).items() if name != _LIMIT}
    return values if defaults.stop is None else values | {"stop": list(defaults.stop)}


def default_limit(defaults: RequestDefaults) -> int | None:
    """Returns how many tokens an answer may have without a limit of its own. Where the context has no room for as many,
    there are fewer, since no client has asked for them."""
    limit = (defaults.sampling or {}).get(_LIMIT)
    return None if limit is None else int(limit)


def _chat_template(fields: Fields) -> str | None:
    text = body.CHAT_TEMPLATE.read(fields)
    if text is not None and (size := len(text.encode(errors="replace"))) > body.MAX_CHAT_TEMPLATE_BYTES:
        most = body.MAX_CHAT_TEMPLATE_BYTES
        raise InvalidRequest(f"chat_template has {size} bytes; {most} are allowed.", param="chat_template")
    return text


def _default_sampling(fields: Fields) -> dict[str, float]:
    given = {name: value for name, value in fields.mapping("sampling").items() if value is not None}
    known = [field.name for field in body.DEFAULT_SAMPLING]
    if unknown := given.keys() - known:
        name = min(unknown)
        raise InvalidRequest(
            f"sampling has an unknown field {shown(name)}; it takes {', '.join(known)}.", param=f"sampling.{name[:64]}"
        )
    try:
        values = {one.name: one.read(Fields(given)) for one in body.DEFAULT_SAMPLING if one.name in given}
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling.{error.message}", param=f"sampling.{error.param}") from None
    return {name: value for name, value in values.items() if value is not None}
