"""The results of rows with drafts: the tokens that were drawn after the right ones."""

import numpy as np
import pytest

from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.outputs import NOT_FINITE, SAMPLE, VERIFY, OutputValues, collect, outputs_of

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
