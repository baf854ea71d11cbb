"""The reasoning before an answer: what may follow in it, its budget, and the answer's grammar after it."""

from collections.abc import Sequence

import numpy as np
import pytest

from caraserve.core.grammar import mask_words
from caraserve.core.reasoning_grammar import ReasoningGrammar, ReasoningTokens
from caraserve.core.reasoning_progress import ReasoningProgress, ReasoningState
from tests.fake_grammar import FakeGrammar

VOCAB = 40
EVERY = set(range(VOCAB))
BEGIN, END, EOS, BLANK = 7, 35, 1, 5
OPEN, CLOSE, THINK, MORE, MORE_LINE, MORE_TEXT, LETTER_CLOSE = range(10, 17)  # spell the marks
TEXTS = {BEGIN: b"<think>", END: b"</think>", EOS: b"", BLANK: b"\n", OPEN: b"<", CLOSE: b"</", THINK: b"think"}
TEXTS |= {MORE: b">", MORE_LINE: b">\n", MORE_TEXT: b">{", LETTER_CLOSE: b"x</"}
SPELLED = ReasoningTokens(None, (CLOSE, THINK, MORE), {b"</think": [MORE_TEXT]})
ANSWER = FakeGrammar(lambda count: [20 + count])  # tokens 20, 21, 22, … in this order
NOT_BEGUN, UNDER_WAY, ENDED = ReasoningState.NOT_BEGUN, ReasoningState.UNDER_WAY, ReasoningState.ENDED


def text_of(token_id: int) -> bytes:
    return TEXTS.get(token_id, b"x")


def allowed_after(
    output: Sequence[int],
    state: ReasoningState,
    budget: int | None = None,
    grammar: FakeGrammar | None = ANSWER,
    tokens: ReasoningTokens = ReasoningTokens(BEGIN, (END,)),  # noqa: B008
) -> set[int]:
    """Returns the tokens that may follow, also after a preemption: then the matcher begins with the output."""
    made = ReasoningGrammar(tokens, state, budget, grammar, (EOS,), VOCAB, text_of)
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


BEGUN, SPELLED_END = [OPEN, THINK, MORE], [CLOSE, THINK, MORE]


@pytest.mark.parametrize(
    ("output", "state", "allowed"),
    [
        (BEGUN, NOT_BEGUN, EVERY),
        ([*BEGUN, 3, 4], NOT_BEGUN, {CLOSE}),
        ([BLANK, OPEN, THINK, MORE_LINE, 3, 4], NOT_BEGUN, {CLOSE}),
        ([BLANK, 3, *BEGUN, 3, 4], NOT_BEGUN, EVERY),  # an answer that mentions the mark
        ([BEGIN, 3, 4, CLOSE], NOT_BEGUN, {THINK}),
        ([3, 4, CLOSE, THINK], UNDER_WAY, {MORE}),
        ([3, 4, *SPELLED_END], UNDER_WAY, EVERY),
        ([3, CLOSE], UNDER_WAY, {THINK}),  # goes on with the end that the model has begun
        ([LETTER_CLOSE, THINK], UNDER_WAY, {CLOSE}),
        ([LETTER_CLOSE, THINK, *SPELLED_END], UNDER_WAY, EVERY),
        ([LETTER_CLOSE, THINK, MORE_LINE, 5, 6], UNDER_WAY, EVERY),
        ([*SPELLED_END, 5, 6, 7], UNDER_WAY, EVERY),
    ],
)
def test_marks_may_be_spelled_with_several_tokens(output: list[int], state: ReasoningState, allowed: set[int]) -> None:
    assert allowed_after(output, state, budget=2, grammar=None, tokens=SPELLED) == allowed


def test_spelled_marks_count_where_the_model_has_tokens_for_them() -> None:
    assert allowed_after([*BEGUN, 3, 4], NOT_BEGUN, budget=2, grammar=None) == {END}
    assert allowed_after([3, *SPELLED_END, 4, 5], UNDER_WAY, budget=2, grammar=None) == EVERY
    assert allowed_after([3, *SPELLED_END], UNDER_WAY) == {20}
    assert allowed_after([*SPELLED_END[:2], MORE_LINE, 20], UNDER_WAY) == {21}


def test_a_token_does_not_end_the_reasoning_and_begin_a_constrained_answer() -> None:
    assert allowed_after([3, CLOSE], UNDER_WAY, tokens=SPELLED) == EVERY - {EOS}
    assert allowed_after([3, CLOSE, THINK], UNDER_WAY, tokens=SPELLED) == EVERY - {EOS, MORE_TEXT}
    assert allowed_after([3, LETTER_CLOSE, THINK], UNDER_WAY, tokens=SPELLED) == EVERY - {EOS, MORE_TEXT}
    assert allowed_after([3, CLOSE, THINK], UNDER_WAY, grammar=None, tokens=SPELLED) == EVERY


@pytest.mark.parametrize("tokens", [SPELLED, ReasoningTokens(BEGIN, (END,))], ids=["spelled", "single"])
def test_a_grammar_begins_with_the_answer_or_a_single_token(tokens: ReasoningTokens) -> None:
    single = set() if tokens.begin_id is None else {tokens.begin_id}
    assert allowed_after([BLANK], NOT_BEGUN, tokens=tokens) == {21} | single
    assert allowed_after([OPEN], NOT_BEGUN, tokens=tokens) == {21}
    assert allowed_after([*BEGUN, 3, *SPELLED_END], NOT_BEGUN, tokens=tokens) == {20}


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ([3, 4, END, 5], 2),
        ([3, 4, *SPELLED_END, 5], 2),
        ([LETTER_CLOSE, THINK, MORE_TEXT, 5], 1),
        ([3, CLOSE, CLOSE, THINK, MORE], 2),
        ([CLOSE, 3, *SPELLED_END], 2),
        ([3, CLOSE, THINK], 3),
        ([CLOSE, THINK, 3], 3),
        ([EOS, 3, OPEN, END], 3),
        pytest.param([*[3] * 700, *SPELLED_END, 4], 700, id="long"),
    ],
)
def test_the_tokens_of_the_marks_are_not_counted(output: list[int], count: int) -> None:
    one_by_one, at_once = (ReasoningProgress(UNDER_WAY, text_of) for _ in range(2))
    rest = [token for one in output for token in one_by_one.add([one])]
    assert list(at_once.add(output)) == rest
    assert (one_by_one.num_tokens, at_once.num_tokens) == (count, count)
    with_begin = ReasoningProgress(NOT_BEGUN, text_of)
    with_begin.add([*[BLANK] * 300, *BEGUN, *output])
    assert with_begin.num_tokens == count
    assert len(ReasoningProgress(NOT_BEGUN, text_of).add([BLANK] * 300)) == 300
