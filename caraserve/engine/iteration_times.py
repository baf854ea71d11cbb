"""Predicts how long iterations take and when the next one begins, from their rows and from those that have ended.

A prediction always starts from the real end of an iteration: if it started from an earlier prediction, one iteration
longer than expected would make all later predictions too early. It was a whole iteration too early nearly always.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import log2
from statistics import median
from typing import NamedTuple, TypeAlias

from caraserve.core.batch import ScheduledRow
from caraserve.engine.active_request import ActiveRequest

_RECENT = 7  # iterations of one kind whose median corrects the model: a pause of the process counts in none
_SIZES_PER_DOUBLING = 4  # in which prompt tokens are told apart; the model may be wrong by another factor in each


class IterationWork(NamedTuple):
    """What an iteration computes, as the sums that determine its time. The base model has rank 0."""

    requests: int  # that decode
    rank_sum: int
    rank_max: int
    tokens: int  # of prompts, of answers that are computed again after a preemption, and drafts
    token_ranks: int  # Σ tokens · rank of prompts
    prompt_rank_max: int

    @classmethod
    def of(
        cls, rows: Iterable[tuple[ActiveRequest, ScheduledRow]], rank_of: Callable[[ActiveRequest], int]
    ) -> "IterationWork":
        """Sums the rows of an iteration, in 0.4 µs each."""
        requests = rank_sum = rank_max = tokens = token_ranks = prompt_rank_max = 0
        for active, row in rows:
            rank = rank_of(active)
            more = row.count
            if row.count == 1 + len(row.drafts) and row.start >= active.request.prompt_tokens:
                requests += 1
                rank_sum += rank
                rank_max = max(rank_max, rank)
                more = len(row.drafts)
            if more:
                tokens += more
                token_ranks += more * rank
                prompt_rank_max = max(prompt_rank_max, rank)
        return cls(requests, rank_sum, rank_max, tokens, token_ranks, prompt_rank_max)


# Predicts an iteration's ms from the six sums of its `IterationWork`.
IterationTime: TypeAlias = Callable[[int, int, int, int, int, int], float]


@dataclass(slots=True)
class _UnderWay:
    """A launched iteration. It begins when it has been launched and the one before it has ended."""

    work: IterationWork
    launched_s: float
    expected_s: float  # begin as predicted at the launch
    begins_s: float  # the same, until the iteration before it ends: the real begin from then on
    takes_s: float  # predicted


class IterationTimes:
    """Predicts iterations by the performance model, corrected by the median ratio of observed to modelled times in
    recent iterations of the same kind. Iterations that only decode are one kind. Those with prompts are told apart by
    their number of prompt tokens, because few tokens take a device as long as some more. Times are the engine's
    clock."""

    def __init__(self, model: IterationTime | None) -> None:
        """`model`: None if nothing is known of this machine; an iteration is then taken to cost 1 ms for each prompt
        token until one of its kind has ended."""
        self.decode_s = 0.0  # of a recent iteration without prompts
        self._model = model or _by_tokens
        self._decodes_s: deque[float] = deque(maxlen=_RECENT)
        self._ratios: dict[int | None, deque[float]] = {}  # observed ÷ modelled, by kind
        self._under_way: deque[_UnderWay] = deque()

    def next_begin_s(self, now_s: float) -> float:
        """Returns when an iteration begins that is launched now: when those under way have ended."""
        free_s = now_s
        for index, iteration in enumerate(self._under_way):
            begins_s = iteration.begins_s if index == 0 else max(free_s, iteration.begins_s)
            free_s = max(free_s, begins_s + iteration.takes_s)
        return free_s

    def launch(self, work: IterationWork, now_s: float) -> None:
        """Records that an iteration has been launched."""
        begins_s = self.next_begin_s(now_s)
        self._under_way.append(_UnderWay(work, now_s, begins_s, begins_s, self._takes_s(work)))

    def end(self, done_s: float, began_s: float | None, *, is_typical: bool = True) -> float:
        """Records that the iteration that was launched first has ended. `began_s`: when it began; None if it failed.
        `is_typical`: whether its time is that of its rows alone, without waits for weights or for CPU workers. Returns
        the difference between its real and its expected begin, in seconds."""
        ended = self._under_way.popleft()
        if self._under_way:
            following = self._under_way[0]
            following.begins_s = max(following.launched_s, done_s)
        if began_s is None:
            return 0.0
        if is_typical:
            self._observe(ended.work, done_s - began_s)
        return began_s - ended.expected_s

    def _takes_s(self, work: IterationWork) -> float:
        kind = _kind(work)
        ratios = self._ratios.get(kind)
        if ratios is None and kind is not None:
            sizes = [size for size in self._ratios if size is not None]
            ratios = self._ratios.get(min(sizes, key=lambda size: abs(size - kind), default=None))
        return (median(ratios) if ratios else 1.0) * self._model(*work) / 1000

    def _observe(self, work: IterationWork, seconds: float) -> None:
        kind, modelled_s = _kind(work), self._model(*work) / 1000
        if kind is None:
            self._decodes_s.append(seconds)
            self.decode_s = median(self._decodes_s)
        if modelled_s > 0:
            self._ratios.setdefault(kind, deque(maxlen=_RECENT)).append(seconds / modelled_s)


def _kind(work: IterationWork) -> int | None:
    return None if work.tokens == 0 else round(_SIZES_PER_DOUBLING * log2(work.tokens))


def _by_tokens(requests: int, rank_sum: int, rank_max: int, tokens: int, token_ranks: int, rank: int) -> float:
    return float(max(1, tokens))
