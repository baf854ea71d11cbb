"""A few processes that compute for many clients in fair order, because what clients choose may take as long as allowed.

The next job is one of the client that has had the least time of processes, divided by its weight; see `FairQueue`. Each
adapter of a user has a queue of its own, of which one process takes jobs at a time, so that other users and adapters of
the same client need not wait for it. No client and no adapter takes all processes: the last one is left to the others.
In a queue, jobs go by arrival, large ones later. Where a job ended its process, the place of the job is free when the
process has been started again, so that the others do not wait for that.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from caraserve.core.fair_queue import FairQueue
from caraserve.core.tenant import Tenant
from caraserve.errors import Displaced, Overloaded, ServerBusy
from caraserve.util.tasks import Tasks

log = logging.getLogger(__name__)

_LATER_S_PER_BYTE = 1e-5  # a job of 100 kB goes as if it had come a second later
_GUESSED_JOB_S = 0.05  # before there are any
_NEWEST_WEIGHT = 0.1  # of the newest job in the mean time of jobs
_RETRY_S = 1.0
_MOST_RETRY_S = 60.0

T = TypeVar("T")


class PoolProcess(Protocol):
    """What the pool asks of a `MessageProcess`."""

    @property
    def is_usable(self) -> bool:
        """Whether it waits for a message."""

    async def close(self) -> None:
        """Ends the process."""


P = TypeVar("P", bound=PoolProcess)


@dataclass(frozen=True, slots=True)
class JobOwner:
    """For whom a process works. `adapter`: whose text it works on; empty for none."""

    tenant: Tenant
    adapter: str = ""

    @property
    def queue(self) -> Tenant:
        """The owner's queue: each adapter of a user counts as another user of the client."""
        return self.tenant._replace(user=f"{self.tenant.user}\0{self.adapter}")

    def parties(self) -> Iterator[tuple[str, object]]:
        """Yields those whose jobs are limited together, each with its kind."""
        yield "client", self.tenant.client
        yield "user", self.queue
        if self.adapter:
            yield "adapter", self.adapter


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """`processes`: at most; all but the first end when they were idle for `idle_s`. The others: jobs that may wait."""

    processes: int
    waiting: int
    of_client: int
    of_user: int
    idle_s: float = 60.0

    def waiting_of(self, kind: str) -> float:
        """Returns how many jobs of one party may wait. An adapter has no limit: one client's jobs for it would take the
        places of all others. In a full queue, a client with fewer jobs displaces one instead."""
        return {"client": self.of_client, "user": self.of_user, "adapter": math.inf}[kind]

    def running_of(self, kind: str) -> int:
        return 1 if kind == "user" else max(1, self.processes - 1)


class _Places:
    """How many jobs each party has."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, object], int] = {}

    def count(self, kind: str, name: object) -> int:
        return self._taken.get((kind, name), 0)

    def take(self, owner: JobOwner) -> None:
        for party in owner.parties():
            self._taken[party] = self._taken.get(party, 0) + 1

    def give_back(self, owner: JobOwner) -> None:
        for party in owner.parties():
            if self._taken[party] == 1:
                del self._taken[party]
            else:
                self._taken[party] -= 1


@dataclass(slots=True, eq=False)
class _Job(Generic[P]):
    owner: JobOwner
    priority_ms: int
    work: Callable[[P], Awaitable[Any]]
    result: "asyncio.Future[Any]"
    is_waiting: bool = True


@dataclass(frozen=True, slots=True)
class _Idle(Generic[P]):
    """A process that has had no job since a time of the pool's clock."""

    process: P
    since_s: float


class ProcessPool(Generic[P]):
    """The processes, and the jobs that wait for them."""

    def __init__(
        self,
        start: Callable[[], Awaitable[P]],
        limits: PoolLimits,
        waits_for: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`start`: starts a process. `waits_for`: what the jobs bring, for errors, such as "their grammars"."""
        self._start, self._limits, self._waits_for, self._now = start, limits, waits_for, now
        self._queue: FairQueue[_Job[P]] = FairQueue(lambda job: job.priority_ms)
        self._waiting, self._running = _Places(), _Places()
        self._processes: set[P] = set()
        self._idle: list[_Idle[P]] = []  # the one that was used last is at the end
        self._restarting = 0
        self._is_growing = False  # whether a process is being started that was not there before
        self._tasks = Tasks()
        self._mean_s = _GUESSED_JOB_S
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def num_processes(self) -> int:
        """Returns the number of processes, those that are being started included."""
        return len(self._processes) + self._restarting + self._is_growing

    @property
    def num_waiting(self) -> int:
        """Returns the number of jobs that wait for a process."""
        return len(self._queue)

    async def run(self, owner: JobOwner, num_bytes: int, work: Callable[[P], Awaitable[T]]) -> T:
        """Returns what `work` returns for a process, at the owner's turn. `num_bytes`: of what is to be worked on.

        If the caller is cancelled, a job that waits is dropped, and one that runs goes on to its end, since ending it
        would end the process. Raises Overloaded if too many jobs wait, and ServerBusy if no process can be started.
        """
        self.check_room(owner)
        if len(self._queue) >= self._limits.waiting:
            self._displace_for(owner)
        priority_ms = int(1000 * (self._now() + num_bytes * _LATER_S_PER_BYTE))
        job = _Job(owner, priority_ms, work, asyncio.get_running_loop().create_future())
        self._queue.push(owner.queue, job)
        self._waiting.take(owner)
        self._dispatch()
        try:
            result: T = await job.result
            return result
        finally:
            if job.is_waiting:
                self._queue.remove(owner.queue, job)
                self._left_queue(job)
            del job  # an error refers to this frame: they would be a cycle

    def check_room(self, owner: JobOwner) -> None:
        """Raises Overloaded if as many jobs of this client or user wait as may."""
        for kind, name in owner.parties():
            if (count := self._waiting.count(kind, name)) >= self._limits.waiting_of(kind):
                message = f"{count} requests of this {kind} wait for {self._waits_for}"
                raise Overloaded(message, retry_after_s=self._wait_s(count, self._limits.running_of(kind)))

    async def close(self) -> None:
        """Ends all processes, and cancels the jobs that wait. The pool may be used again."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        for job in list(self._queue):
            job.result.cancel()
        await self._tasks.end()
        for process in self._processes:
            await process.close()
        self._processes.clear()
        self._idle.clear()
        self._running = _Places()

    # --- jobs ---

    def _wait_s(self, jobs: int, processes: int) -> float:
        return min(_MOST_RETRY_S, max(_RETRY_S, jobs * self._mean_s / processes))

    def _displace_for(self, owner: JobOwner) -> None:
        """Drops a job of the client with the most. Raises Overloaded if that would be unfair."""
        count = len(self._queue)
        message, retry_s = f"{count} requests wait for {self._waits_for}", self._wait_s(count, self._limits.processes)
        if (displaced := self._queue.newest_of_largest(owner.queue)) is None:
            raise Overloaded(message, retry_after_s=retry_s)
        self._queue.remove(displaced.owner.queue, displaced)
        self._fail(displaced, Displaced(message, retry_after_s=retry_s))

    def _left_queue(self, job: _Job[P]) -> None:
        job.is_waiting = False
        self._waiting.give_back(job.owner)

    def _fail(self, job: _Job[P], error: Exception) -> None:
        """Ends a job that has been taken from the queue."""
        self._left_queue(job)
        if not job.result.done():
            job.result.set_exception(error)

    def _is_ready(self, job: _Job[P]) -> bool:
        return all(
            self._running.count(kind, name) < self._limits.running_of(kind) for kind, name in job.owner.parties()
        )

    def _dispatch(self) -> None:
        """Starts the jobs for which there is a process, and another process if one more could be used."""
        for idle in [idle for idle in self._idle if not idle.process.is_usable]:
            self._drop(idle.process)  # which ended while it was idle: the system may have killed it
        can_grow = not self._is_growing and self.num_processes < self._limits.processes
        while (self._idle or can_grow) and (queue := self._queue.first_of(self._is_ready)) is not None:
            if not self._idle:
                self._is_growing = True
                self._tasks.start(self._grow(), "caraserve-process-start")
                return
            job, process = self._queue.pop(queue), self._idle.pop().process
            self._left_queue(job)
            self._running.take(job.owner)
            self._tasks.start(self._run(job, process), "caraserve-process-job")

    async def _run(self, job: _Job[P], process: P) -> None:
        began_s = self._now()
        try:
            result, error = await _outcome(job.work, process)
        except asyncio.CancelledError:
            job.result.cancel()
            raise
        if error is not None and not job.result.done():
            job.result.set_exception(error)
        elif not job.result.done():
            job.result.set_result(result)
        del error
        usable = process if process.is_usable else await self._restarted(process)
        took_s = self._now() - began_s
        self._mean_s += _NEWEST_WEIGHT * (took_s - self._mean_s)
        self._queue.charge_service(job.owner.queue, took_s)
        self._running.give_back(job.owner)
        self._add(usable)
        self._dispatch()

    # --- processes ---

    async def _grow(self) -> None:
        try:
            process = await self._started()
        finally:
            self._is_growing = False
        self._add(process)
        if process is not None:  # else the next attempt is at the end of a job, or for the next one
            self._dispatch()

    async def _restarted(self, process: P) -> P | None:
        self._processes.discard(process)
        self._restarting += 1
        try:
            await process.close()
            return await self._started()
        finally:
            self._restarting -= 1

    async def _started(self) -> P | None:
        """Returns a new process, or None if it cannot be started."""
        try:
            return await self._start()
        except Exception:
            log.exception("the process of requests that wait for %s cannot be started", self._waits_for)
            return None

    def _add(self, process: P | None) -> None:
        """Lets a process take jobs. None: without any, the jobs that wait fail."""
        if process is not None:
            self._processes.add(process)
            self._idle.append(_Idle(process, self._now()))
            self._end_idle_later()
        elif not self.num_processes:
            error = (
                f"The process for requests that wait for {self._waits_for} cannot be started; the log has the reason."
            )
            for job in list(self._queue):
                self._queue.remove(job.owner.queue, job)
                self._fail(job, ServerBusy(error, retry_after_s=_RETRY_S))

    def _drop(self, process: P) -> None:
        self._idle = [idle for idle in self._idle if idle.process is not process]
        self._processes.discard(process)
        self._tasks.start(process.close(), "caraserve-process-end")

    def _end_idle_later(self) -> None:
        if self._idle_timer is None and self.num_processes > 1:
            self._idle_timer = asyncio.get_running_loop().call_later(self._limits.idle_s, self._end_idle)

    def _end_idle(self) -> None:
        """Ends the processes but one that have been idle for long."""
        self._idle_timer = None
        while self.num_processes > 1 and self._idle and self._now() - self._idle[0].since_s >= self._limits.idle_s:
            self._drop(self._idle[0].process)
        self._end_idle_later()


async def _outcome(work: Callable[[P], Awaitable[T]], process: P) -> tuple[T | None, Exception | None]:
    """Returns the result of a job or its error, whose frames do not refer to the job: they would be a cycle."""
    try:
        return await work(process), None
    except Exception as error:
        return None, error
