"""Prompts that are longer than the client wants to pay for: only their last tokens are used, or their first."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from caraserve.errors import ContextLengthExceeded, InvalidRequest
from caraserve.http import body_fields
from caraserve.http.field_types import LARGEST
from caraserve.http.validation import Fields
from caraserve.loop import Engine

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
        """Refuses a prompt with more than `most_encoded` tokens, of the field `source`, by that number if it is not the
        context's."""
        try:
            yield
        except ContextLengthExceeded:
            if not self.is_on:
                raise
            raise InvalidRequest(
                f"{source} has more than {self.most_encoded} tokens, too many even to be truncated.", param=source
            ) from None


def parse_truncation(fields: Fields, engine: Engine, answer_tokens: int) -> Truncation:
    """Reads `truncate_prompt_tokens` and `truncation_side`. Without them, a prompt beyond the context is refused. With
    -1, as much of a prompt is used as the context has room for beside `answer_tokens`. Raises InvalidRequest."""
    context = engine.max_model_len
    side = body_fields.TRUNCATION_SIDE.read(fields)
    most = body_fields.TRUNCATE_PROMPT_TOKENS.read(fields, high=context)
    if most is None:
        return Truncation(LARGEST, keeps_end=True, most_encoded=context)
    if most == 0:
        raise InvalidRequest(
            "truncate_prompt_tokens must be at least 1, or -1 for as many as the context has room for.",
            param="truncate_prompt_tokens",
        )
    if most < 0:
        most = max(1, context - answer_tokens)
    return Truncation(most, side == "left", max(body_fields.MAX_TOKENIZED, context))
