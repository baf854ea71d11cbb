"""A run's records as arrays with one entry for each request, so that 100,000 requests are summarized quickly."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from caraserve.bench.records import RequestRecord

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays `[requests]`. Times in seconds count from the run's start; NaN where a request has no such time."""

    due_s: Floats
    sent_s: Floats
    done_s: Floats
    ok: Bools  # a complete answer
    prompt_tokens: Ints
    output_tokens: Ints
    ttft_ms: Floats
    tpot_ms: Floats  # (e2e - ttft) / (tokens - 1)
    tpt_ms: Floats  # e2e / tokens, as in the papers
    e2e_ms: Floats
    token_s: Floats  # of all requests, one after another
    token_of: Ints  # index of the request of each entry of `token_s`

    @classmethod
    def of(cls, records: Sequence[RequestRecord]) -> "Columns":
        """Builds the arrays. A failed request has the times and tokens that it reached."""
        counts = np.array([len(record.token_s) for record in records], np.int64)
        sent_s, done_s = _floats([record.sent_s for record in records]), _floats([record.done_s for record in records])
        first_s = _floats([record.token_s[0] if record.token_s else np.nan for record in records])
        tokens = np.array([record.output_tokens for record in records], np.int64)
        ttft_ms, e2e_ms = 1e3 * (first_s - sent_s), 1e3 * (done_s - sent_s)
        total = int(counts.sum())
        return cls(
            due_s=_floats([record.due_s for record in records]),
            sent_s=sent_s,
            done_s=done_s,
            ok=np.array([record.error is None for record in records], np.bool_),
            prompt_tokens=np.array([record.prompt_tokens for record in records], np.int64),
            output_tokens=tokens,
            ttft_ms=ttft_ms,
            tpot_ms=np.where(tokens > 1, (e2e_ms - ttft_ms) / np.maximum(tokens - 1, 1), np.nan),
            tpt_ms=np.where(tokens > 0, e2e_ms / np.maximum(tokens, 1), np.nan),
            e2e_ms=e2e_ms,
            token_s=np.fromiter(chain.from_iterable(record.token_s for record in records), np.float64, total),
            token_of=np.repeat(np.arange(len(records)), counts),
        )

    def gaps(self) -> tuple[Floats, Ints]:
        """Returns the gaps in ms between successive output tokens of complete answers, and each gap's request index.

        Tokens of one event have a gap of 0 between them.
        """
        same = (self.token_of[1:] == self.token_of[:-1]) & self.ok[self.token_of[1:]]
        gaps_ms: Floats = 1e3 * np.diff(self.token_s)[same]
        return gaps_ms, self.token_of[1:][same]


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, np.float64)
