"""Sampling fields, the same for completions and chat completions: JSON → `SamplingParams`. Pure.

Where a field is absent, the model's own generation_config decides, then OpenAI's
default. Names and ranges are OpenAI's and, for the rest, vLLM's.
"""

from typing import Any

from caraserve.core.request import MAX_LOGIT_BIAS, MAX_STOPS, SamplingParams
from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http.interfaces import EngineApi
from caraserve.http.validation import Fields, shown, token_ids

MAX_N = 128
_MAX_STOP_CHARACTERS = 1024
_MAX_STOP_TOKEN_IDS = 1024
_SEEDS = 1 << 63
_MAX_SCORES = 1 << 21  # logprobs in one response, alternatives counted: 60 MB as completions have them, 130 MB in chats


def sampling_params(fields: Fields, engine: EngineApi) -> SamplingParams:
    """Everything but `max_tokens`, `logprobs` and `prompt_logprobs`, which the two APIs ask for differently.

    Raises InvalidRequest naming the field.
    """
    model: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    model.update(engine.default_sampling)
    vocab_size = engine.tokenizer.vocab_size
    stop_ids = fields.array("stop_token_ids", _MAX_STOP_TOKEN_IDS)
    return SamplingParams(
        min_tokens=fields.integer("min_tokens", 0, engine.max_model_len, 0),
        temperature=fields.number("temperature", 0, 100, model["temperature"]),
        top_p=fields.number("top_p", 0, 1, model["top_p"], above_low=True),
        top_k=max(0, fields.integer("top_k", -1, 1 << 31, model["top_k"])),
        min_p=fields.number("min_p", 0, 1, model["min_p"]),
        seed=fields.maybe_integer("seed", -_SEEDS, _SEEDS - 1),
        stop=_stop(fields),
        stop_token_ids=token_ids("stop_token_ids", stop_ids, vocab_size),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
        ignore_eos=fields.boolean("ignore_eos", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0, 100, model["repetition_penalty"], above_low=True),
        logit_bias=_logit_bias(fields, vocab_size),
    )


def nth_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`, never negative: each choice draws differently, and the same each time."""
    return None if seed is None else (seed + index) % _SEEDS


def fit_max_tokens(
    asked: int | None, default: int | None, prompt_tokens: int, engine: EngineApi, *, source: str = "prompt"
) -> int:
    """The tokens that a prompt may gain: as asked, else `default` (None: all of the room) as far as there is room.

    Raises ContextLengthExceeded in the words by which clients of OpenAI's know this error. `source`: the field that the
    prompt was made of, `prompt` or `messages`.
    """
    limit = engine.max_model_len
    room = limit - prompt_tokens
    if room < (1 if asked is None else 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, the {source} alone "
            f"{'have' if source == 'messages' else 'has'} {prompt_tokens} tokens.",
            param=source,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + asked} "
            f"tokens ({prompt_tokens} in the {source}, {asked} in the completion). Shorten the {source} or "
            "lower max_tokens.",
            param="max_tokens",
        )
    return asked


def most_scored_tokens(choices: int, logprobs: int | None) -> int | None:
    """How many tokens each choice may have for its logprobs to be allowed; None where it has none."""
    return None if logprobs is None else _MAX_SCORES // (choices * (1 + logprobs))


def check_scores(choices: int, tokens: int, logprobs: int | None, param: str) -> None:
    """Raises InvalidRequest when a response would have too many logprobs; `tokens`: of all choices together."""
    if logprobs is not None and tokens * (1 + logprobs) > _MAX_SCORES:
        raise InvalidRequest(
            f"{choices} answers with up to {tokens} tokens together and {logprobs} alternatives to each are "
            f"{tokens * (1 + logprobs)} logprobs; {_MAX_SCORES} are allowed. Ask for fewer answers, tokens or {param}.",
            param=param,
        )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises InvalidRequest when fewer tokens are allowed than demanded."""
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, above max_tokens, which is {max_tokens}.", param="min_tokens"
        )


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else fields.array("stop", MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= _MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop must hold strings of 1 to {_MAX_STOP_CHARACTERS} characters, not {shown(stop)}.", param="stop"
            )
    return tuple(stops)


def _logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = fields.mapping("logit_bias")
    if len(biases) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias has {len(biases)} entries; {MAX_LOGIT_BIAS} are allowed.", param="logit_bias")
    for key, bias in biases.items():
        # isdecimal alone would take other scripts' digits.
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: the key {shown(key)} is not a token id from 0 to {vocab_size - 1}.", param="logit_bias"
            )
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias[{key}] must be a number from -100 to 100, not {shown(bias)}.", param="logit_bias"
            )
    return tuple((int(key), float(bias)) for key, bias in biases.items())
