"""Guesses of a test's own in place of those from a request's text, verified whatever they cost."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from caraserve.engine import speculation
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.speculation import Speculation


@dataclass(frozen=True)
class _Guesser:
    """Guesses the next tokens of a request, each wrong with a probability."""

    right: Sequence[int]  # the tokens that follow
    rng: random.Random
    wrong: float

    @property
    def chance(self) -> float:
        return 1.0 - self.wrong if self.right else 0.0

    def guess(self, count: int) -> tuple[int, ...]:
        return tuple(
            self.rng.randrange(97) if self.rng.random() < self.wrong else token for token in self.right[:count]
        )


Answers = Callable[[ActiveRequest], Sequence[int]]  # returns the whole answer to a request


@contextmanager
def guessing(answers: Answers, rng: random.Random, *, wrong: float = 0.2) -> Iterator[None]:
    """Guesses the tokens of `answers`, each wrong with the probability `wrong`."""

    def lookup(active: ActiveRequest) -> _Guesser:
        return _Guesser(answers(active)[len(active.request.output_ids) :], rng, wrong)

    with patch.object(speculation, "_lookup", lookup):
        yield


@contextmanager
def drafting(answers: Answers, rng: random.Random, *, wrong: float = 0.2, most: int = 6) -> Iterator[None]:
    """Guesses likewise, and verifies up to `most` guesses of each request at random, whatever they cost."""

    def lengths(self: Speculation, able: Sequence[ActiveRequest], rows: int) -> list[int]:
        return [rng.randrange(most + 1) for _ in able]

    with guessing(answers, rng, wrong=wrong), patch.object(Speculation, "_lengths", lengths):
        yield
