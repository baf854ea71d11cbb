"""Reads the values of a JSON object as typed fields, strictly; then the sampling fields, which all routes share.

Every mistake raises InvalidRequest, which names the field and what would be right. For an absent sampling field the
model's generation_config decides, then OpenAI's default.
"""

from collections.abc import ItemsView, Mapping, Sequence
from typing import Any, TypeVar

from caraserve.core.request import MAX_LOGIT_BIAS, MAX_STOPS, SamplingParams
from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http import body_fields
from caraserve.loop import Engine

_MAX_SCORES = 1 << 21  # logprobs in one response, alternatives counted: 60 MB as completions have them, 130 MB in chats
_MOST_SKIPPED = 16  # different parts of a body that are noted

_T = TypeVar("_T")


def shown(value: object) -> str:
    """A value for an error message: on one line and short."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(value[:60] if isinstance(value, str) else value)[:80]


class Fields:
    """The fields of one object; null is the same as absent. Remembers which names have been read. `client_names`: what
    the client calls them, of fields that were translated from those of another API."""

    def __init__(self, values: Mapping[str, Any], client_names: Mapping[str, str] | None = None) -> None:
        self.client_names = client_names or {}
        self._values = values
        self._defaults: Mapping[str, Any] = {}
        self._read: set[str] = set()
        self._nested: dict[str, Fields] = {}
        self._skipped: list[str] = []

    def items(self) -> ItemsView[str, Any]:
        """All names and values, as the client sent them."""
        return self._values.items()

    def take_defaults(self, values: Mapping[str, Any]) -> None:
        """Reads fields that are absent as those of `values` from now on."""
        self._defaults = values

    def unread(self) -> list[str]:
        """Names that have a value and have not been read, those of `nested` objects as `outer.inner`, and skipped
        parts."""
        own = [name for name, value in self._values.items() if value is not None and name not in self._read]
        nested = [f"{name}.{inner}" for name, value in self._nested.items() for inner in value.unread()]
        return own + nested + self._skipped

    def skip(self, part: str) -> None:
        """Notes a part of a value, as `name.part`, that is not used."""
        if part not in self._skipped and len(self._skipped) < _MOST_SKIPPED:
            self._skipped.append(part)

    def raw(self, name: str) -> Any:
        """The value as JSON gave it, else its default, None if absent."""
        self._read.add(name)
        value = self._values.get(name)
        return self._defaults.get(name) if value is None else value

    def maybe_integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise InvalidRequest(f"{name} must be an integer from {low} to {high}, not {shown(value)}.", param=name)
        return value

    def integer(self, name: str, low: int, high: int, default: int) -> int:
        return _or(self.maybe_integer(name, low, high), default)

    def number(self, name: str, low: float, high: float, default: float, *, above_low: bool = False) -> float:
        """A float in [low, high], or in (low, high] where `above_low`."""
        value = self.raw(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not low <= value <= high or (above_low and value == low):
            span = f"above {low:g} and at most {high:g}" if above_low else f"from {low:g} to {high:g}"
            raise InvalidRequest(f"{name} must be a number {span}, not {shown(value)}.", param=name)
        return float(value)

    def maybe_boolean(self, name: str) -> bool | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"{name} must be true or false, not {shown(value)}.", param=name)
        return value

    def boolean(self, name: str, default: bool) -> bool:
        return _or(self.maybe_boolean(name), default)

    def maybe_text(self, name: str, longest: int) -> str | None:
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"{name} must be a string, not {shown(value)}.", param=name)
        if value is not None and len(value) > longest:
            raise InvalidRequest(f"{name} has {len(value)} characters; {longest} are allowed.", param=name)
        return value

    def one_of(self, name: str, values: Sequence[str], default: str) -> str:
        value = self.raw(name)
        if value is None:
            return default
        if value not in values:
            raise InvalidRequest(f"{name} must be one of {', '.join(values)}, not {shown(value)}.", param=name)
        return str(value)

    def mapping(self, name: str) -> dict[str, Any]:
        """An object, empty if absent."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise InvalidRequest(f"{name} must be an object, not {shown(value)}.", param=name)
        return value

    def nested(self, name: str) -> "Fields":
        """The fields of an object, none if absent."""
        if name not in self._nested:
            self._nested[name] = Fields(self.mapping(name))
        return self._nested[name]

    def array(self, name: str, most: int) -> list[Any]:
        """A list of at most `most` values, empty if absent."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise InvalidRequest(f"{name} must be a list, not {shown(value)}.", param=name)
        if len(value) > most:
            raise InvalidRequest(f"{name} has {len(value)} entries; {most} are allowed.", param=name)
        return value


def token_ids(name: str, values: list[Any], vocab_size: int) -> tuple[int, ...]:
    """The entries as a tuple; raises InvalidRequest if one is no token id. `name` is the list in error messages, as
    in `prompt[2]`."""
    # Three passes in C instead of one in Python: a prompt of 100,000 ids costs 3 ms, not 10.
    if values and set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocab_size:
        return tuple(values)
    for position, value in enumerate(values):
        if type(value) is not int or not 0 <= value < vocab_size:
            raise InvalidRequest(
                f"{name}[{position}] must be a token id from 0 to {vocab_size - 1}, not {shown(value)}.",
                param=name.partition("[")[0],
            )
    return ()


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def sampling_params(fields: Fields, engine: Engine) -> SamplingParams:
    """All sampling parameters but `max_tokens`, `logprobs` and `prompt_logprobs`, which differ between the two APIs.

    Raises InvalidRequest, which names the field.
    """
    model = engine.default_sampling
    vocab_size = engine.tokenizer.vocab_size
    stop_ids = body_fields.STOP_TOKEN_IDS.read(fields)
    return SamplingParams(
        min_tokens=body_fields.MIN_TOKENS.read(fields, high=engine.max_model_len),
        temperature=body_fields.TEMPERATURE.read(fields, default=model.get("temperature")),
        top_p=body_fields.TOP_P.read(fields, default=model.get("top_p")),
        top_k=max(0, body_fields.TOP_K.read(fields, default=model.get("top_k"))),
        min_p=body_fields.MIN_P.read(fields, default=model.get("min_p")),
        seed=body_fields.SEED.read(fields),
        stop=stop_strings(fields),
        stop_token_ids=token_ids("stop_token_ids", stop_ids, vocab_size),
        include_stop_str_in_output=body_fields.INCLUDE_STOP_STR_IN_OUTPUT.read(fields),
        ignore_eos=body_fields.IGNORE_EOS.read(fields),
        skip_special_tokens=body_fields.SKIP_SPECIAL_TOKENS.read(fields),
        presence_penalty=body_fields.PRESENCE_PENALTY.read(fields),
        frequency_penalty=body_fields.FREQUENCY_PENALTY.read(fields),
        repetition_penalty=body_fields.REPETITION_PENALTY.read(fields, default=model.get("repetition_penalty")),
        logit_bias=_logit_bias(fields, vocab_size),
    )


def nth_seed(seed: int | None, index: int) -> int | None:
    """The seed of choice `index`, never negative: choices differ, and each is the same in every run."""
    return None if seed is None else (seed + index) % body_fields.SEEDS


def fit_max_tokens(
    wanted: int | None, default: int | None, prompt_tokens: int, engine: Engine, *, source: str = "prompt"
) -> int:
    """The most tokens to generate after a prompt: `wanted`, else `default` (None: no limit) within the context.

    Raises ContextLengthExceeded with OpenAI's wording, which clients recognise. `source`: the field that gave the
    prompt, `prompt` or `messages`.
    """
    limit = engine.max_model_len
    room = limit - prompt_tokens
    if room < (1 if wanted is None else 0):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, the {source} alone "
            f"{'have' if source == 'messages' else 'has'} {prompt_tokens} tokens.",
            param=source,
        )
    if wanted is None:
        return room if default is None else min(default, room)
    if wanted > room:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt_tokens + wanted} "
            f"tokens ({prompt_tokens} in the {source}, {wanted} in the completion). Shorten the {source} or "
            "lower max_tokens.",
            param="max_tokens",
        )
    return wanted


def most_scored_tokens(choices: int, logprobs: int | None) -> int | None:
    """The most tokens of each choice for which logprobs are allowed; None without logprobs."""
    return None if logprobs is None else _MAX_SCORES // (choices * (1 + logprobs))


def check_scores(choices: int, tokens: int, logprobs: int | None, param: str) -> None:
    """Raises InvalidRequest for a response with too many logprobs; `tokens`: of all choices together."""
    if logprobs is not None and tokens * (1 + logprobs) > _MAX_SCORES:
        raise InvalidRequest(
            f"{choices} answers with up to {tokens} tokens together and {logprobs} alternatives to each are "
            f"{tokens * (1 + logprobs)} logprobs; {_MAX_SCORES} are allowed. Ask for fewer answers, tokens or {param}.",
            param=param,
        )


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    """Raises InvalidRequest if the least number of tokens is above the largest."""
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {min_tokens}, above max_tokens, which is {max_tokens}.", param="min_tokens"
        )


def stop_strings(fields: Fields) -> tuple[str, ...]:
    """The strings of `stop`, none if it is absent. Raises InvalidRequest."""
    value = fields.raw("stop")
    stops = [value] if isinstance(value, str) else fields.array("stop", MAX_STOPS)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= body_fields.MAX_STOP_CHARACTERS:
            most = body_fields.MAX_STOP_CHARACTERS
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
