"""The outputs of a batch and the results of its rows: with drafts, the tokens that were drawn after the right ones."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.outputs import (
    NOT_FINITE,
    SAMPLE,
    VERIFY,
    ColdStartCost,
    Output,
    OutputValues,
    collect,
    outputs_of,
)
from caraserve.errors import GrammarFailed

PROMPT_TOKENS = np.array([4, 4], np.int64)


@pytest.mark.parametrize(
    ("drawn", "tokens"),
    [
        ([11, 12, 13, 14], (11, 12, 13, 14)),
        ([11, 12, 9, 14], (11, 12, 9)),
        ([9, 12, 13, 14], (9,)),
        ([11, NOT_FINITE, 13, 14], (11,)),  # it is computed again, with the same end
        ([9, NOT_FINITE, NOT_FINITE, NOT_FINITE], (9,)),  # after a wrong token
        ([NOT_FINITE, 12, 13, 14], ()),
    ],
)
def test_tokens_count_up_to_the_first_that_differs_from_its_draft(drawn: list[int], tokens: tuple[int, ...]) -> None:
    plain = ScheduledRow(0, 6, 1, 0, samples=True, logprobs=0)
    drafting = ScheduledRow(1, 5, 4, 0, samples=True, logprobs=0, drafts=(11, 12, 13))
    batch = Batch((), (), (drafting, plain))
    outputs = outputs_of(batch.rows, PROMPT_TOKENS)
    assert outputs.token.tolist() == [0, 1, 2, 3, 4]
    assert outputs.kind.tolist() == [VERIFY, VERIFY, VERIFY, VERIFY, SAMPLE]
    none = np.zeros((5, 0), np.int64)
    logprobs = np.arange(5, dtype=np.float32)
    found = OutputValues(np.array([*drawn, 7]), logprobs, np.zeros(5, np.int64), none, none, logprobs[:, None])
    first, second = collect(batch, outputs, found, PROMPT_TOKENS)
    assert (first.token_ids, first.is_finite) == (tokens, bool(tokens))
    assert [(one.token_id, one.logprob) for one in first.scored] == [(token, at) for at, token in enumerate(tokens)]
    assert (second.token_ids, second.scored[0].logprob) == ((7,), 4.0)


ROWS = 6
sampling_rows = st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from([None, None, 0])), max_size=ROWS)


@given(sampling_rows, st.lists(st.sampled_from([3, 5, NOT_FINITE]), min_size=ROWS, max_size=ROWS), st.booleans())
def test_rows_have_the_results_that_they_have_beside_a_row_that_wants_more(
    drawn: list[tuple[int, bool, int | None]], chosen: list[int], is_cold: bool
) -> None:
    """A batch whose rows want nothing but tokens is computed in another way."""
    rows = [
        ScheduledRow(slot, 4, count, slot % 2, samples=samples, logprobs=logprobs)
        for slot, (count, samples, logprobs) in enumerate(drawn)
    ]
    more = [*rows, ScheduledRow(ROWS, 3, 1, 0, samples=False, embeds=True)]
    prompt_tokens = np.full(ROWS + 1, 4, np.int64)
    loads = {1: ColdStartCost(2, 0.5, 3.0)} if is_cold else {}
    failures = {2: GrammarFailed("too long")} if is_cold else {}

    def found(rows: list[ScheduledRow]) -> tuple[Output, object]:
        outputs = outputs_of(tuple(rows), prompt_tokens)
        count, numbers = len(outputs.token), np.arange(ROWS, dtype=np.float32)
        none = np.zeros((count, 0), np.int64)
        values = np.array(chosen[:count], np.int64), numbers[:count], np.zeros(count, np.int64), none, none
        states = np.ones((len(outputs.embedded), 2), np.float32)
        batch = Batch((), (), tuple(rows))
        return outputs, collect(batch, outputs, OutputValues(*values, states), prompt_tokens, loads, failures)

    (outputs, results), (beside, all_results) = found(rows), found(more)
    for name in ("token", "kind", "logprobs"):
        assert np.array_equal(getattr(outputs, name), getattr(beside, name))
    assert isinstance(all_results, tuple)
    assert results == all_results[:-1]
