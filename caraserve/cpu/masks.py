"""Writes the masks of structured output, for both backends."""

import logging
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from caraserve.core.batch import ScheduledRow
from caraserve.errors import GrammarFailed

log = logging.getLogger(__name__)

_ALL_TOKENS = ~np.uint32(0)


def masked_rows(rows: Sequence[ScheduledRow]) -> list[ScheduledRow]:
    """Returns the rows whose tokens a grammar limits."""
    return [row for row in rows if row.matcher is not None]


def write_masks(rows: Sequence[ScheduledRow], masks: Iterable[NDArray[np.uint32]]) -> dict[int, GrammarFailed]:
    """Writes the mask of each row with a matcher. Returns the failures by request slot; any token may follow there,
    and none is used."""
    failures: dict[int, GrammarFailed] = {}
    for row, mask in zip(rows, masks, strict=True):
        assert row.matcher is not None
        try:
            row.matcher.write_mask(mask)
        except GrammarFailed as failure:
            failures[row.slot] = failure
        except Exception:
            log.exception("a mask cannot be written")
            failures[row.slot] = GrammarFailed("the grammar cannot be followed")
        if row.slot in failures:
            mask[:] = _ALL_TOKENS
    return failures
