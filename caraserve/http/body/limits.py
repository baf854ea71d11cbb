"""How many tokens a prompt and its answers may have, and how many logprobs a response."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http.body import fields as body
from caraserve.http.body.field_types import LARGEST, Fields

_MAX_LOGPROBS = 1 << 21  # in one response, alternatives counted: 60 MB as completions have them, 130 MB in chats

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Truncation:
    """Which tokens of a prompt are used: the last `most_tokens` or, unless `keeps_end`, the first. `most_encoded`: a
    prompt with more tokens than that is refused."""

    most_tokens: int
    keeps_end: bool
    most_encoded: int

    @property
    def is_on(self) -> bool:
        return self.most_tokens < LARGEST

    def cut(self, ids: Sequence[_T]) -> Sequence[_T]:
        """Returns the tokens that are used."""
        if len(ids) <= self.most_tokens:
            return ids
        return ids[-self.most_tokens :] if self.keeps_end else ids[: self.most_tokens]

    @contextmanager
    def refusing(self, source: str) -> Iterator[None]:
        """Refuses a prompt above `most_encoded` tokens, of `source`, by that number if it is not the context's."""
        try:
            yield
        except ContextLengthExceeded:
            if not self.is_on:
                raise
            raise InvalidRequest(
                f"{source} has more than {self.most_encoded} tokens, too many even to be truncated.", param=source
            ) from None


def parse_truncation(fields: Fields, context_tokens: int, answer_tokens: int) -> Truncation:
    """Reads `truncate_prompt_tokens` and `truncation_side`. Without them, a prompt beyond the context is refused. With
    -1, as much of a prompt is used as the context has room for beside `answer_tokens`. Raises InvalidRequest."""
    side = body.TRUNCATION_SIDE.read(fields)
    most = body.TRUNCATE_PROMPT_TOKENS.read(fields, high=context_tokens)
    if most is None:
        return Truncation(LARGEST, keeps_end=True, most_encoded=context_tokens)
    if most == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as the context has room for.",
            param="truncate_prompt_tokens",
        )
    if most < 0:
        most = max(1, context_tokens - answer_tokens)
    return Truncation(most, side == "left", max(body.MAX_TOKENIZED, context_tokens))


@dataclass(slots=True)
class AnswerLimits:
    """Limits the tokens of each answer to a body, and the logprobs of all answers together.

    `wanted_tokens`: as the client asks for them; None: `default_tokens`, or fewer where the context has no room for as
    many; None there, too: all that the context has room for. `logprobs`: alternatives to each token of the answers, and
    of the prompts if they are `echoed`; `prompt_logprobs`: alternatives to each token of the prompts; None: none.
    `source` and `logprobs_field`: the fields that errors name.
    """

    context_tokens: int
    wanted_tokens: int | None
    default_tokens: int | None
    min_tokens: int
    n: int
    logprobs: int | None
    prompt_logprobs: int | None = None
    echoed: bool = False
    source: str = "prompt"
    logprobs_field: str = "logprobs"
    _num_answers: int = 0
    _answer_tokens: int = 0
    _prompt_tokens: int = 0

    def most_tokens(self, prompt_tokens: int) -> int:
        """Returns the most tokens of each answer to the next prompt. Raises ContextLengthExceeded or InvalidRequest."""
        most = self._within_context(prompt_tokens)
        if self.min_tokens > most:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, above max_tokens, which is {most}.", param="min_tokens"
            )
        self._num_answers += self.n
        self._answer_tokens += self.n * most
        self._prompt_tokens += self.n * prompt_tokens
        scored_tokens = self._answer_tokens + (self._prompt_tokens if self.echoed else 0)
        check_logprobs(self._num_answers, scored_tokens, self.logprobs, self.logprobs_field)
        check_logprobs(self._num_answers, self._prompt_tokens, self.prompt_logprobs, "prompt_logprobs")
        return most

    def _within_context(self, prompt_tokens: int) -> int:
        """Raises ContextLengthExceeded with OpenAI's wording, which clients recognise."""
        wanted, source, room = self.wanted_tokens, self.source, self.context_tokens - prompt_tokens
        if room < (1 if wanted is None else 0):
            raise _too_long(prompt_tokens, self.context_tokens, source)
        if wanted is None:
            return room if self.default_tokens is None else min(self.default_tokens, room)
        if wanted > room:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {self.context_tokens} tokens. However, you requested "
                f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {source}, {wanted} in the completion). "
                f"Shorten the {source} or lower max_tokens.",
                param="max_tokens",
            )
        return wanted


def check_context(prompt_tokens: int, context_tokens: int) -> None:
    """Raises ContextLengthExceeded for a prompt above the context; call it before looking at each token."""
    if prompt_tokens > context_tokens:
        raise _too_long(prompt_tokens, context_tokens, "prompt")


def _too_long(prompt_tokens: int, context_tokens: int, source: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"This model's maximum context length is {context_tokens} tokens. However, the {source} alone "
        f"{'have' if source == 'messages' else 'has'} {prompt_tokens} tokens.",
        param=source,
    )


def most_scored_tokens(choices: int, logprobs: int | None) -> int | None:
    """The most tokens of each choice for which logprobs are allowed; None without logprobs."""
    return None if logprobs is None else _MAX_LOGPROBS // (choices * (1 + logprobs))


def check_logprobs(choices: int, tokens: int, logprobs: int | None, param: str) -> None:
    """Raises InvalidRequest for a response with too many logprobs; `tokens`: of all choices together."""
    if logprobs is not None and tokens * (1 + logprobs) > _MAX_LOGPROBS:
        raise InvalidRequest(
            f"{choices} answers with up to {tokens} tokens together and {logprobs} alternatives to each are "
            f"{tokens * (1 + logprobs)} logprobs; {_MAX_LOGPROBS} are allowed. Ask for fewer answers, tokens or "
            f"{param}.",
            param=param,
        )
