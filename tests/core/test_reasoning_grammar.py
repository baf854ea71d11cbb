"""The reasoning before an answer: what may follow in it, its budget, and the answer's grammar after it."""

from collections.abc import Sequence

import numpy as np
import pytest

from caraserve.core.grammar import mask_words
from caraserve.core.reasoning_grammar import ReasoningGrammar, ReasoningState, ReasoningTokens
from tests.fake_grammar import FakeGrammar

VOCAB = 40
EVERY = set(range(VOCAB))
BEGIN, END, EOS, BLANK = 7, 35, 1, 5
ANSWER = FakeGrammar(lambda count: [20 + count])  # tokens 20, 21, 22, … in this order
NOT_BEGUN, UNDER_WAY, ENDED = ReasoningState.NOT_BEGUN, ReasoningState.UNDER_WAY, ReasoningState.ENDED


def allowed_after(
    output: Sequence[int], state: ReasoningState, budget: int | None = None, grammar: FakeGrammar | None = ANSWER
) -> set[int]:
    """Returns the tokens that may follow, also after a preemption: then the matcher begins with the output."""
    made = ReasoningGrammar(ReasoningTokens(BEGIN, END), state, budget, grammar, (EOS,), VOCAB, (BLANK,).__contains__)
    mask, again = np.full((2, mask_words(VOCAB)), 0xAAAAAAAA, np.uint32)
    matcher = made.matcher()
    for token_id in output:
        matcher.write_mask(again)
        matcher.append(token_id)
    matcher.write_mask(mask)
    made.matcher(output).write_mask(again)
    assert (mask == again).all()
    return {token_id for token_id in range(32 * len(mask)) if mask[token_id // 32] >> np.uint32(token_id % 32) & 1}


@pytest.mark.parametrize(
    ("output", "state", "allowed"),
    [
        ([], NOT_BEGUN, {20, BEGIN}),
        ([20], NOT_BEGUN, {21}),
        ([BEGIN], NOT_BEGUN, EVERY - {EOS}),
        ([BEGIN, 3, BEGIN], NOT_BEGUN, EVERY - {EOS}),
        ([BEGIN, 3, 3, END], NOT_BEGUN, {20}),
        ([BEGIN, 3, 3, END, 20], NOT_BEGUN, {21}),
        ([], UNDER_WAY, EVERY - {EOS}),
        ([3, 20], UNDER_WAY, EVERY - {EOS}),
        ([3, END, 20, 21], UNDER_WAY, {22}),
        ([], ENDED, {20}),
        ([20], ENDED, {21}),
    ],
)
def test_a_grammar_applies_after_the_reasoning(output: list[int], state: ReasoningState, allowed: set[int]) -> None:
    assert allowed_after(output, state) == allowed


@pytest.mark.parametrize(
    ("output", "state", "allowed"),
    [
        ([], NOT_BEGUN, EVERY),
        ([9, 9, 9], NOT_BEGUN, EVERY),
        ([BEGIN], NOT_BEGUN, EVERY),
        ([BEGIN, 3], NOT_BEGUN, EVERY),
        ([BEGIN, 3, 4], NOT_BEGUN, {END}),
        ([3, 4], UNDER_WAY, {END}),
        ([3, END], UNDER_WAY, EVERY),
        ([3, 4, END, 5, 6, 7], UNDER_WAY, EVERY),
    ],
)
def test_the_reasoning_ends_when_its_budget_is_used_up(
    output: list[int], state: ReasoningState, allowed: set[int]
) -> None:
    assert allowed_after(output, state, budget=2, grammar=None) == allowed


def test_the_reasoning_may_begin_after_white_space() -> None:
    assert allowed_after([BLANK, BLANK, BEGIN, 3, 4], NOT_BEGUN, budget=2, grammar=None) == {END}
    assert allowed_after([BLANK, 3, BEGIN, 3, 4], NOT_BEGUN, budget=2, grammar=None) == EVERY
    starting_blank = FakeGrammar(lambda count: [BLANK, 20 + count])
    assert allowed_after([BLANK], NOT_BEGUN, grammar=starting_blank) == {BLANK, 21, BEGIN}
    assert allowed_after([BLANK, 21], NOT_BEGUN, grammar=starting_blank) == {BLANK, 22}
    assert allowed_after([BLANK, BEGIN, 3, END], NOT_BEGUN, grammar=starting_blank) == {BLANK, 20}


def test_a_budget_of_0_ends_the_reasoning_at_once() -> None:
    assert allowed_after([], UNDER_WAY, budget=0) == {END}
    assert allowed_after([BEGIN], NOT_BEGUN, budget=0) == {END}
    assert allowed_after([END], UNDER_WAY, budget=0) == {20}
