"""Guesses the next tokens of an answer: those that followed the same tokens earlier in it, in its prompt, or in a text
that the client expects in it.

A guess costs no model. It is right as long as an answer repeats a text, as edits of code, summaries with quotes and
answers about a document do. How often guesses are right is measured for each request by all tokens of its answer, also
while no guess is used.
"""

from collections.abc import Sequence

import numpy as np

_LEAST_MATCH, _LONGEST_MATCH = 2, 16  # tokens that are compared
# By the length of a match, from so many tokens on: the share of right guesses before any was observed, as measured on
# edits of code, and as certain as after four guesses.
_CLASSES = ((2, 0.35), (4, 0.6), (8, 0.8), (16, 0.9))
_PRIOR_GUESSES = 4.0
_KEPT = 0.95  # of what was observed, at each further guess: the last 20 count most
_MOST_LEARNED = 64  # tokens added at a time: each takes about 10 µs


class PromptLookup:
    """The tokens of one request, and the place among them that its answer repeats now."""

    def __init__(self, before: Sequence[int]) -> None:
        """`before`: the tokens that precede the answer's; negative ones are vectors, which no guess contains."""
        self._tokens = np.empty(max(64, 2 * len(before)), np.int64)
        self._tokens[: len(before)] = before
        self._before = self._count = len(before)
        self._next = 0  # the place of the guess
        self._matched = 0  # how many tokens before that place are the same as the last ones; 0: there is no guess
        self._right = [_PRIOR_GUESSES * share for _, share in _CLASSES]
        self._guesses = [_PRIOR_GUESSES] * len(_CLASSES)

    @property
    def num_added(self) -> int:
        """How many tokens of the answer were added."""
        return self._count - self._before

    @property
    def chance(self) -> float:
        """The share of guesses that were right after matches as long as the present one; 0 if there is none."""
        return 0.0 if (at := self._class()) is None else self._right[at] / self._guesses[at]

    def _class(self) -> int | None:
        return next((at for at in reversed(range(len(_CLASSES))) if self._matched >= _CLASSES[at][0]), None)

    def add(self, token_ids: Sequence[int]) -> None:
        """Adds tokens of the answer, and learns from those whether guesses are right, unless there are many."""
        if len(token_ids) > _MOST_LEARNED:
            self._append(token_ids)
            self._find()
            return
        for token_id in token_ids:
            at, is_right = self._class(), bool(self._matched and self._tokens[self._next] == token_id)
            if at is not None:
                self._right[at] = _KEPT * self._right[at] + is_right
                self._guesses[at] = _KEPT * self._guesses[at] + 1.0
            self._append((token_id,))
            if is_right:
                self._next, self._matched = self._next + 1, self._matched + 1
            else:
                self._find()

    def _append(self, token_ids: Sequence[int]) -> None:
        end = self._count + len(token_ids)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self._count : end] = token_ids
        self._count = end

    def _find(self) -> None:
        """Finds the longest earlier match of the last tokens; of several, the one nearest to the guess before."""
        last = self._count - 1
        tokens = self._tokens
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        length = min(1, len(ends))
        while 0 < length < _LONGEST_MATCH:
            longer = ends[ends >= length]
            longer = longer[tokens[longer - length] == tokens[last - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        self._matched = length if length >= _LEAST_MATCH else 0
        if self._matched:
            self._next = int(ends[np.abs(ends + 1 - self._next).argmin()]) + 1

    def guess(self, count: int) -> tuple[int, ...]:
        """Returns the next `count` tokens as after the match; fewer if a vector is among them."""
        if not self._matched:
            return ()
        period = self._count - self._next  # a text that repeats itself goes on so
        guessed = self._tokens[self._next + np.arange(count) % period]
        vectors = np.flatnonzero(guessed < 0)
        return tuple(guessed[: vectors[0] if len(vectors) else count].tolist())
