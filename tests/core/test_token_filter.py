"""Masks of tokens that an answer may not have."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.core.grammar import Grammar, TokenMatcher, mask_words
from caraserve.core.token_filter import TokenFilter
from caraserve.errors import GrammarDeadEnd

VOCAB = 70  # three words, the last of them not full
EVERY = set(range(VOCAB))


class Only:
    """A grammar, and its matcher, that allow the same tokens everywhere, and those that were appended."""

    def __init__(self, *token_ids: int) -> None:
        self._token_ids = token_ids

    async def prepare(self) -> None:
        """There is nothing to compile."""

    def matcher(self, output_ids: Sequence[int] = ()) -> TokenMatcher:
        return self

    def append(self, token_id: int) -> None:
        self._token_ids = (*self._token_ids, token_id)

    def write_mask(self, mask: NDArray[np.uint32]) -> None:
        mask[:] = 0
        for token_id in self._token_ids:
            mask[token_id // 32] |= np.uint32(1 << token_id % 32)


def allowed_after(
    output: Sequence[int],
    allowed: Sequence[int] | None = None,
    banned: Sequence[Sequence[int]] = (),
    end_ids: Sequence[int] = (),
    min_tokens: int = 0,
    grammar: Grammar | None = None,
) -> set[int]:
    """Returns the tokens that may follow, also after a preemption: then the matcher begins with the output."""
    made = TokenFilter.of(VOCAB, allowed, banned, end_ids=end_ids, min_tokens=min_tokens, grammar=grammar)
    mask, again = np.full((2, mask_words(VOCAB)), 0xAAAAAAAA, np.uint32)
    matcher = made.matcher()
    for token_id in output:
        matcher.append(token_id)
    matcher.write_mask(mask)
    made.matcher(output).write_mask(again)
    assert (mask == again).all()
    return {token_id for token_id in range(32 * len(mask)) if mask[token_id // 32] >> np.uint32(token_id % 32) & 1}


def test_only_allowed_tokens_may_follow() -> None:
    assert allowed_after([], [0, 31, 32, 69]) == {0, 31, 32, 69}
    assert allowed_after([5, 6], [0, 31, 32, 69]) == {0, 31, 32, 69}


@pytest.mark.parametrize(
    ("output", "missing"),
    [([], {9}), ([1], {9, 2}), ([1, 2], {9, 3, 4}), ([2], {9}), ([1, 2, 7], {9}), ([7, 7, 1, 2], {9, 3, 4})],
)
def test_the_last_token_of_a_banned_sequence_may_not_follow_the_others(output: list[int], missing: set[int]) -> None:
    banned = [[9], [1, 2], [1, 2, 3], [1, 2, 4], [68, 67]]
    assert allowed_after(output, None, banned) == EVERY - missing


def test_ends_may_not_come_before_the_least_number_of_tokens() -> None:
    assert allowed_after([4, 4], [4, 5], end_ids=[5], min_tokens=3) == {4}
    assert allowed_after([4, 4, 4], [4, 5], end_ids=[5], min_tokens=3) == {4, 5}


def test_another_grammar_loses_the_banned_tokens() -> None:
    assert allowed_after([], [1, 2, 3], [[3]], grammar=Only(2, 3, 4)) == {2}
    assert allowed_after([1], [1, 2, 3], [[3]], grammar=Only(2, 3, 4)) == {1, 2}


@pytest.mark.parametrize(
    ("allowed", "banned", "end_ids", "grammar"),
    [([1], [[1]], [], None), ([1], [], [1], None), (None, [[2]], [], Only(2))],
    ids=["banned", "end", "grammar"],
)
def test_an_answer_without_any_token_left_fails_instead_of_taking_one(
    allowed: list[int] | None, banned: list[list[int]], end_ids: list[int], grammar: Grammar | None
) -> None:
    with pytest.raises(GrammarDeadEnd, match="ban all tokens"):
        allowed_after([], allowed, banned, end_ids, 1, grammar)
