"""The memory of answers that clients have not read yet: one budget for all, and what becomes of slow readers.

    behind by more than its share ──► its requests pause ──► half of that is read ──► they go on

A request that pauses gives its slot, its KV blocks and its adapter back, and starts again as after a preemption. The
connections of clients that read next to nothing are cut elsewhere. While all answers together exceed the budget, the
answers of clients that have more than an equal part of it have a share of `FREE_BYTES`: they end with an error if less
than a quarter is read in a minute, and whole ones above `FREE_BYTES` are refused.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol
from weakref import ref

from caraserve.core.request import TokenDelta
from caraserve.errors import ReaderTooSlow, ServerBusy
from caraserve.telemetry.prometheus import family
from caraserve.util.memory import limit_bytes, machine_bytes
from caraserve.util.units import human_bytes

FREE_BYTES = 64 << 10  # of an answer, whatever the others have
_SHARE_BYTES = 4 << 20  # of an answer: some 13,000 tokens, or 2,500 with 20 alternatives
_LOOK_S = 60.0
_LEAST_READ = 1 / 4  # of what waits, in this time, while the budget is exceeded
_RETRY_S = 1.0
_MEMORY_SHARE = 1 / 32
_LEAST_BUDGET_BYTES, _MOST_BUDGET_BYTES = 64 << 20, 4 << 30
_DELTA_BYTES, _TOKEN_BYTES, _SCORE_BYTES, _ALTERNATIVE_BYTES = 250, 50, 150, 70  # of their objects, measured
_KEPT_DELTA_BYTES, _KEPT_TOKEN_BYTES = 60, 36  # a string of text; an integer and its place in a list


def default_budget_bytes() -> int:
    """The budget that is right for this machine."""
    memory = min(machine_bytes(), limit_bytes() or machine_bytes())
    return min(_MOST_BUDGET_BYTES, max(_LEAST_BUDGET_BYTES, int(memory * _MEMORY_SHARE)))


def size_of(delta: TokenDelta) -> int:
    """About the memory that a delta takes."""
    size = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + len(delta.text)
    if delta.logprobs or delta.prompt_logprobs:
        last = delta.logprobs[-1] if delta.logprobs else delta.prompt_logprobs[-1]
        alternatives = 0 if last is None else len(last.top_ids)
        size += (len(delta.logprobs) + len(delta.prompt_logprobs)) * (_SCORE_BYTES + _ALTERNATIVE_BYTES * alternatives)
    return size if delta.embedding is None else size + len(delta.embedding)


def kept_size_of(delta: TokenDelta) -> int:
    """About the memory that a whole answer takes for a delta, without its logprobs."""
    embedding_bytes = 0 if delta.embedding is None else len(delta.embedding)
    return _KEPT_DELTA_BYTES + _KEPT_TOKEN_BYTES * len(delta.token_ids) + len(delta.text) + embedding_bytes


class Endable(Protocol):
    """A part of an answer: a stream of tokens, or the body of a response."""

    def end_unread(self, error: ReaderTooSlow) -> None:
        """Ends it, because its client reads too slowly."""


class UnreadAnswer:
    """What a client has not read yet of the answer to one API request, in all its parts."""

    __slots__ = (
        "_budget",
        "_marked_bytes",
        "_read_bytes",
        "_resume_bytes",
        "client",
        "is_paused",
        "kept_bytes",
        "marked_s",
        "parts",
        "unread_bytes",
    )

    def __init__(self, budget: "UnreadBudget", client: str) -> None:
        self.client = client
        self.unread_bytes = 0
        self.kept_bytes = 0  # of a whole answer that is not complete
        self.is_paused = False
        self.parts: list[ref[Endable]] = []  # weak, as they refer to this
        self.marked_s = 0.0  # when the client's reading was looked at last
        self._budget = budget
        self._marked_bytes = self._read_bytes = self._resume_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts what the client has to read."""
        self.unread_bytes += num_bytes
        self._budget.hold(self.client, num_bytes)
        if self.unread_bytes > FREE_BYTES:
            self._budget.note_behind(self)

    def read(self, num_bytes: int) -> None:
        """Counts what the client has read."""
        self.unread_bytes -= num_bytes
        self._read_bytes += num_bytes
        self._budget.hold(self.client, -num_bytes)
        if self.is_paused and self.unread_bytes <= self._resume_bytes:
            self._budget.resume(self)

    def keep(self, num_bytes: int) -> None:
        """Counts what is kept of a whole answer until it is complete. Raises ServerBusy beyond the budget."""
        self.kept_bytes += num_bytes
        self._budget.hold(self.client, num_bytes)
        if self.kept_bytes > FREE_BYTES and self._budget.is_exceeded_by(self.client):
            raise self._budget.exceeded()

    def complete(self, num_bytes: int) -> None:
        """Counts the body of a whole answer, which can now be read, instead of what was kept of it."""
        self.drop_kept()
        self.unread_bytes += num_bytes
        self._budget.hold(self.client, num_bytes)
        self._budget.watch(self)

    def drop_kept(self) -> None:
        """Forgets what is kept of a whole answer."""
        self._budget.hold(self.client, -self.kept_bytes)
        self.kept_bytes = 0

    # --- for the budget ---

    def pause(self) -> None:
        """Lets the requests of this answer rest until half of what is unread now is read."""
        self.is_paused = True
        self._resume_bytes = self.unread_bytes // 2

    def mark(self, now_s: float) -> None:
        """Begins to watch how much the client reads."""
        self.marked_s, self._marked_bytes, self._read_bytes = now_s, self.unread_bytes, 0

    @property
    def is_read(self) -> bool:
        """Whether the client has read enough since the last mark for a time without memory."""
        return self._read_bytes >= _LEAST_READ * self._marked_bytes


class UnreadBudget:
    """The unread bytes of all answers. Runs on the event loop."""

    def __init__(self, max_bytes: int, changed: Callable[[], None]) -> None:
        """`changed`: called when requests are to pause or may go on."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self.has_changed = False  # since the engine looked last
        self.paused, self.ended = 0, 0  # answers, in all
        self._changed = changed
        self._held_by: dict[str, int] = {}  # by client
        self._behind: dict[UnreadAnswer, None] = {}  # the one that was marked first is the first
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, client: str, num_bytes: int) -> None:
        """Counts bytes of a client's answers; a negative number, those that are read or dropped."""
        self.held_bytes += num_bytes
        held_bytes = self._held_by.get(client, 0) + num_bytes
        if held_bytes:
            self._held_by[client] = held_bytes
        else:
            self._held_by.pop(client, None)

    def is_exceeded_by(self, client: str) -> bool:
        """Whether the budget is exceeded, and the client has more than an equal part of it."""
        return self.held_bytes > self.max_bytes and self._held_by.get(client, 0) * len(self._held_by) > self.max_bytes

    def exceeded(self) -> ServerBusy:
        """The error for an answer for which there is no memory now."""
        return ServerBusy(
            f"The answers that clients have not read yet take {human_bytes(self.max_bytes)}, the most that they may; "
            "send the request again, with stream set to true if it asks for much.",
            retry_after_s=_RETRY_S,
        )

    def note_behind(self, answer: UnreadAnswer) -> None:
        """Notes that an answer is behind by more than `FREE_BYTES`."""
        self.watch(answer)
        if answer.is_paused:  # this comes of an iteration that was under way, or of a request that has just started
            self._tell()
        elif answer.unread_bytes > _SHARE_BYTES or self.is_exceeded_by(answer.client):
            answer.pause()
            self.paused += 1
            self._tell()

    def resume(self, answer: UnreadAnswer) -> None:
        """Lets the requests of an answer go on."""
        answer.is_paused = False
        self._tell()

    def _tell(self) -> None:
        self.has_changed = True
        self._changed()

    def watch(self, answer: UnreadAnswer) -> None:
        """Looks from now on how much of an answer its client reads."""
        if answer not in self._behind:
            self._mark(answer)

    def _mark(self, answer: UnreadAnswer) -> None:
        answer.mark(self._loop.time())
        self._behind[answer] = None
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        """Ends the answers that were not read enough since they were marked, if there is no memory for more."""
        now_s = self._loop.time()
        while self._behind:
            answer = next(iter(self._behind))
            if (left_s := answer.marked_s + _LOOK_S - now_s) > 0:
                self._timer = self._loop.call_later(left_s, self._look)
                return
            del self._behind[answer]
            if answer.unread_bytes <= FREE_BYTES:
                continue
            if answer.is_read or not self.is_exceeded_by(answer.client):
                self._mark(answer)
                continue
            self.ended += 1
            for part in filter(None, [part() for part in answer.parts]):
                part.end_unread(ReaderTooSlow("The answer was read too slowly; its rest was dropped."))
        self._timer = None

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families of unread answers for GET /metrics."""
        for name, kind, text, value in (
            ("unread_answer_bytes", "gauge", "Memory of answers that clients have not read yet.", self.held_bytes),
            ("max_unread_answer_bytes", "gauge", "The most that these may take.", self.max_bytes),
            ("answers_paused_total", "counter", "Answers that paused because they were read too slowly.", self.paused),
            (
                "slow_readers_ended_total",
                "counter",
                "Answers that ended because they were read too slowly.",
                self.ended,
            ),
        ):
            yield family(f"caraserve:{name}", kind, text, [(labels, value)])
