"""Predicts how long iterations take, when the next one begins and when to plan it, from those that have ended.

A prediction always starts from the real end of an iteration: if it started from an earlier prediction, one iteration
longer than expected would make all later predictions too early. It was a whole iteration too early nearly always.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeAlias

from caraserve.core.batch import ScheduledRow, StepResult
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.launch_times import LaunchTimes, size_class

_RECENT = 7  # iterations of one kind whose median corrects the model: a pause of the process counts in none
_MOST_LEAD = 1 / 2  # of an iteration's time before its end
_SIZES_PER_DOUBLING = 4  # in which requests and prompt tokens are told apart


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
# Iterations for which the model is wrong by the same factor: whether they have prompts, and the size class of their
# prompt tokens or, without, of their requests.
Kind: TypeAlias = tuple[bool, int]


@dataclass(slots=True)
class _UnderWay:
    """A launched iteration. It begins when it has been launched and the one before it has ended."""

    kind: Kind
    modelled_s: float
    rows: int
    planned_s: float
    launched_s: float
    expected_s: float  # begin as predicted at the launch
    begins_s: float  # the same, until the iteration before it ends: the real begin from then on
    takes_s: float  # predicted
    free_s: float | None = None  # when the one before it ended, if that was under way at its launch

    @property
    def has_prompts(self) -> bool:
        return self.kind[0]


class Begin(NamedTuple):
    """When an iteration began: in seconds after it was expected, and after the end of the one before it that was under
    way when it was planned, if the device had to wait for its launch."""

    error_s: float
    late_s: float


class IterationTimes:
    """Predicts iterations by the performance model, corrected by the median ratio of observed to modelled times in
    recent iterations of the same kind. Iterations that only decode are told apart by their number of requests, those
    with prompts by their number of prompt tokens, because few tokens take a device as long as some more. Times are the
    engine's clock."""

    def __init__(self, model: IterationTime | None) -> None:
        """`model`: None if nothing is known of this machine; an iteration is then taken to cost 1 ms for each prompt
        token until one of its kind has ended."""
        self.decode_s = 0.0  # of a recent iteration without prompts
        self._model = model or _by_tokens
        self._decodes_s: deque[float] = deque(maxlen=_RECENT)
        self._ratios: dict[Kind, deque[float]] = {}  # observed ÷ modelled
        self._under_way: deque[_UnderWay] = deque()
        self._launches = LaunchTimes()

    def next_begin_s(self, now_s: float) -> float:
        """Returns when an iteration begins that is launched now: when those under way have ended."""
        free_s = now_s
        for index, iteration in enumerate(self._under_way):
            begins_s = iteration.begins_s if index == 0 else max(free_s, iteration.begins_s)
            free_s = max(free_s, begins_s + iteration.takes_s)
        return free_s

    def plan_at_s(self, rows: int, *, has_prompts: bool) -> float | None:
        """Returns when to plan the iteration after the one under way, so that it is launched before that ends. None: at
        once, because too little is known, or planning and launching take more than half of that iteration. `rows`,
        `has_prompts`: expected of the iteration to plan."""
        if len(self._under_way) != 1:
            return None
        current = self._under_way[0]
        lead_s = self._launches.lead_s(rows, has_prompts=has_prompts, after_prompts=current.has_prompts)
        if lead_s is None or lead_s > _MOST_LEAD * current.takes_s or current.kind not in self._ratios:
            self._launches.observe_wake(0.0)
            return None
        return current.begins_s + current.takes_s - lead_s

    def woke(self, late_s: float) -> None:
        """Records by how much the planning of an iteration begins later than `plan_at_s` has returned."""
        self._launches.observe_wake(late_s)

    def launch(self, work: IterationWork, rows: int, planned_s: float, now_s: float) -> None:
        """Records that an iteration has been launched. `planned_s`: when its planning began."""
        begins_s, kind, modelled_s = self.next_begin_s(now_s), _kind(work), self._model(*work) / 1000
        takes_s = modelled_s * self._ratio(kind)
        self._under_way.append(_UnderWay(kind, modelled_s, rows, planned_s, now_s, begins_s, begins_s, takes_s))

    def end(self, outcome: StepResult) -> Begin:
        """Records that the iteration that was launched first has ended."""
        ended, done_s, launched_s = self._end_first(outcome.done_s), outcome.done_s, outcome.launched_s
        if outcome.is_typical:
            early_s = ended.begins_s + ended.takes_s - done_s
            self._launches.observe_end(early_s, has_prompts=ended.has_prompts)
            self._observe(ended, done_s - outcome.started_s)
        late_s = 0.0
        if launched_s is not None:
            self._launches.observe_launch(ended.rows, launched_s - ended.planned_s, has_prompts=ended.has_prompts)
            if ended.free_s is not None and launched_s > ended.free_s:
                late_s = outcome.started_s - ended.free_s
            self._launches.observe_wait(late_s, late_s + done_s - outcome.started_s)
        return Begin(outcome.started_s - ended.expected_s, late_s)

    def fail(self, now_s: float) -> None:
        """Records that the iteration that was launched first has failed."""
        self._end_first(now_s)

    def _end_first(self, done_s: float) -> _UnderWay:
        ended = self._under_way.popleft()
        if self._under_way:
            following = self._under_way[0]
            following.begins_s, following.free_s = max(following.launched_s, done_s), done_s
        return ended

    def _ratio(self, kind: Kind) -> float:
        ratios = self._ratios.get(kind)
        if ratios is None:
            alike = (known for known in self._ratios if known[0] == kind[0])
            nearest = min(alike, key=lambda known: abs(known[1] - kind[1]), default=None)
            ratios = None if nearest is None else self._ratios[nearest]
        return median(ratios) if ratios else 1.0

    def _observe(self, ended: _UnderWay, seconds: float) -> None:
        if not ended.has_prompts:
            self._decodes_s.append(seconds)
            self.decode_s = median(self._decodes_s)
        if ended.modelled_s > 0:
            self._ratios.setdefault(ended.kind, deque(maxlen=_RECENT)).append(seconds / ended.modelled_s)


def _kind(work: IterationWork) -> Kind:
    return work.tokens > 0, size_class(work.tokens or work.requests, _SIZES_PER_DOUBLING)


def _by_tokens(requests: int, rank_sum: int, rank_max: int, tokens: int, token_ranks: int, rank: int) -> float:
    return float(max(1, tokens))
