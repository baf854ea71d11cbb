"""Chooses which requests' guessed next tokens are verified in an iteration, as drafts of their rows, and how many.

Drafts change no token: each position's token is drawn from the logits after the right tokens, or is thrown away. They
cost time, because an iteration takes longer with more tokens, and the more so the more requests it has. So drafts are
chosen that are expected to yield more tokens in that time than the iteration yields without them. Both times are
measured, and how often guesses are right is for each request (`prompt_lookup.py`).

A request with drafts has to wait for its tokens before the next iteration is planned, which is otherwise launched
while the one before still runs. All requests wait then, for the 0.2 to 0.5 ms that the event loop takes: if only the
drafting ones did, they would miss every other iteration.
"""

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from caraserve.core.backend import Limits
from caraserve.core.batch import RowResult, ScheduledRow, StepResult
from caraserve.core.request import Phase, Request
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.prompt_lookup import PromptLookup
from caraserve.engine.scheduler import has_work, total_tokens
from caraserve.lora.adapter import AdapterTier

_RECENT = 5  # iterations without drafts whose median time counts
_FIRST_COST = 0.25  # of an iteration's time that a draft adds, before any was measured
_LEAST_COST = 0.02
_LEARNED = 0.2  # weight of the last measured cost of a draft
_KEPT = 0.995  # of that cost, at each iteration without drafts, so that drafts found too slow are tried again
_MOST_DELAY = 0.25  # of an iteration's time that drafts may add where other requests have none

Rows = Sequence[tuple[ActiveRequest, ScheduledRow]]


class Speculation:
    """Chooses drafts by what they cost and yield. Runs on the event loop."""

    def __init__(self, limits: Limits, most_drafts: int, observe_drafts: Callable[[int, int], None]) -> None:
        """`most_drafts`: in an iteration, if the backend can have so many; 0: none. `observe_drafts`: gets the number
        of a row's drafts, and of the right ones."""
        self._limits, self._observe_drafts = limits, observe_drafts
        self._most = 0 if limits.state_bytes else min(most_drafts, limits.draft_tokens)  # states cannot be reset
        self._plain_ms: dict[int, deque[float]] = {}  # times without drafts, by rows
        self._draft_ms: float | None = None  # what a draft adds
        self._ended_s = 0.0

    def needs_results(self, rows: Rows) -> bool:
        """Returns whether the iteration after one under way, with `rows`, is to be planned when its tokens are known:
        it has drafts, or the next one should have some."""
        if self._most == 0:
            return False
        if any(row.drafts for _, row in rows):
            return True
        able = [active for active, row in rows if row.samples and _may_draft(active)]
        return any(self._lengths(able, sum(row.samples for _, row in rows)))

    def drafts(self, active: Sequence[ActiveRequest]) -> dict[Request, tuple[int, ...]]:
        """Returns the drafts of requests for the next iteration, which decodes a token for each of `active` that has
        one left to decode."""
        if self._most == 0:
            return {}
        able = [one for one in active if _may_draft(one) and _is_known(one.request)]
        if not able:
            return {}
        rows = sum(one.request.phase is Phase.DECODE and has_work(one.request, self._limits) for one in active)
        lengths = self._lengths(able, rows)
        return {
            one.request: guessed
            for one, length in zip(able, lengths, strict=True)
            if length and (guessed := _lookup(one).guess(length))
        }

    def _lengths(self, able: Sequence[ActiveRequest], rows: int) -> list[int]:
        """Returns how many drafts each of `able` should have in an iteration that decodes `rows` tokens without."""
        if not able or not (times := self._plain_ms.get(rows)):
            return [0] * len(able)
        plain_ms = median(times)
        draft_ms = max(_LEAST_COST * plain_ms, _FIRST_COST * plain_ms if self._draft_ms is None else self._draft_ms)
        if draft_ms * rows >= plain_ms:  # not even a right guess pays
            return [0] * len(able)
        chances = [_lookup(active).chance for active in able]
        most = min(self._most, self._limits.max_step_tokens - rows)
        if sum(chance > 0.0 for chance in chances) < rows:
            most = min(most, int(_MOST_DELAY * plain_ms / draft_ms))
        return draft_lengths(chances, rows, draft_ms / plain_ms, most)

    def settle(self, active: ActiveRequest, row: ScheduledRow, result: RowResult) -> None:
        """Corrects the counts of a request by the result of its row with drafts."""
        active.reject_drafts(row, result)
        self._observe_drafts(len(row.drafts), len(result.token_ids) - 1)

    def observe(self, rows: Rows, outcome: StepResult) -> None:
        """Measures an iteration. With drafts it counts from the end of the one before, for which it had to wait."""
        ended_s, self._ended_s = self._ended_s, outcome.done_s
        drafts = sum(len(row.drafts) for _, row in rows)
        has_prompts = sum(row.count for _, row in rows) != len(rows) + drafts
        if self._most == 0 or has_prompts or not outcome.is_typical:
            return
        if drafts == 0:
            took_ms = 1000 * (outcome.done_s - outcome.started_s)
            self._plain_ms.setdefault(len(rows), deque(maxlen=_RECENT)).append(took_ms)
            self._draft_ms = None if self._draft_ms is None else _KEPT * self._draft_ms
        elif times := self._plain_ms.get(len(rows)):
            added_ms = (1000 * (outcome.done_s - ended_s) - median(times)) / drafts
            added_ms = min(max(0.0, added_ms), 2 * median(times))  # where more, the machine has paused
            before_ms = added_ms if self._draft_ms is None else self._draft_ms
            self._draft_ms = before_ms + _LEARNED * (added_ms - before_ms)


def draft_lengths(chances: Sequence[float], rows: int, cost: float, most: int) -> list[int]:
    """Returns how many drafts each request should have, at most `most` together, so that an iteration yields the most
    tokens for its time: as long as one more is expected to yield more than the mean.

    `chances`: that a draft is right if those before it are; `rows`: tokens without drafts; `cost`: of a draft, in
    times of an iteration without drafts.
    """
    lengths, gains = [0] * len(chances), list(chances)
    tokens, time = float(rows), 1.0
    for _ in range(most):
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] * time <= cost * tokens:
            break
        lengths[best] += 1
        tokens, time = tokens + gains[best], time + cost
        gains[best] *= chances[best]
    return lengths


def _may_draft(active: ActiveRequest) -> bool:
    """Returns whether a request decodes without a grammar, by weights that are all there."""
    has_weights = active.adapter is None or active.adapter.tier is AdapterTier.DEVICE
    return active.request.phase is Phase.DECODE and active.matcher is None and has_weights


def _is_known(request: Request) -> bool:
    """Returns whether all tokens of a request are known, and the last one alone is to be computed."""
    return request.launched_outputs == len(request.output_ids) and request.computed == total_tokens(request) - 1


def _lookup(active: ActiveRequest) -> PromptLookup:
    """Returns the lookup of a request's tokens, with those that are known by now."""
    if active.lookup is None:
        inputs = active.request.inputs
        active.lookup = PromptLookup((*inputs.predicted_ids, *inputs.prompt_ids))
    active.lookup.add(active.request.output_ids[active.lookup.num_added :])
    return active.lookup
