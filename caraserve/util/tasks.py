"""Helpers for asyncio: tasks whose failures are logged, and long loops that yield to the event loop."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

T = TypeVar("T")

_TURN_S = 0.001
# Yielding alone would keep the interpreter lock on the event loop's thread: the compute thread needs it some hundred
# times for a token and waited each time, which stopped other clients' streams for 0.5 s.
_REST_S = 0.001
TURN_OWNER: ContextVar[str] = ContextVar("TURN_OWNER", default="")  # the client for which the current task works
_STARTS_PER_TURN = 16  # tasks started in one turn of the event loop; the first step of each may take 0.1 ms


def in_turns(
    items: Iterable[T],
    now: Callable[[], float] = time.perf_counter,
    rest: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(_REST_S),
) -> AsyncIterator[T]:
    """Yields the items in order and sleeps 1 ms after each millisecond of work on them, so that the event loop and
    other threads can run. `rest`: what it awaits instead of that sleep."""
    return _Turns(iter(items), now, rest)


class _Turns(AsyncIterator[T]):
    """The iterator of `in_turns`. No asynchronous generator: asyncio keeps a weak reference to each of those, and a
    request has seven such loops, most over one item."""

    __slots__ = ("_began_s", "_items", "_now", "_rest")

    def __init__(self, items: Iterator[T], now: Callable[[], float], rest: Callable[[], Awaitable[None]]) -> None:
        self._items, self._now, self._rest = items, now, rest
        self._began_s = now()

    def __aiter__(self) -> "_Turns[T]":
        return self

    async def __anext__(self) -> T:
        if self._now() - self._began_s >= _TURN_S:
            await self._rest()
            self._began_s = self._now()
        for item in self._items:
            return item
        raise StopAsyncIteration


def in_shared_turns(items: Iterable[T], now: Callable[[], float] = time.perf_counter) -> AsyncIterator[T]:
    """Yields as `in_turns`, but of all such loops only one goes on at a time, every 2 ms: those of each `TURN_OWNER` in
    its turn. For loops over what a client sends, which await nothing long: those of 60 requests with 4,096 messages
    each kept the event loop busy for 60 ms in each of its turns, and the interpreter lock for seconds."""
    return in_turns(items, now, _shared_turn)


async def _shared_turn() -> None:
    await asyncio.sleep(_REST_S)
    await _shared_turns.setdefault(asyncio.get_running_loop(), _SharedTurns()).next()


class _SharedTurns:
    """Turns of the event loop, 2 ms apart, by turns for each owner: 400 loops of one client, of 40 ms each, delayed a
    loop of another client by 6 s."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner; the one whose turn is next is the first
        self._is_taken = False

    async def next(self) -> None:
        """Returns when the current owner has a turn."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            turn = loop.create_future()
            self._waiting.setdefault(TURN_OWNER.get(), deque()).append(turn)
            await turn
        else:
            self._take(loop)

    def _take(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_taken = True
        loop.call_later(_TURN_S + _REST_S, self._end, loop)

    def _end(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns
            if not turn.done():  # its task may have been cancelled
                self._take(loop)
                turn.set_result(None)


_shared_turns: "WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedTurns]" = WeakKeyDictionary()


def slices(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Yields the items in lists of `count`, for loops whose single items cost less than a look at the clock."""
    iterator = iter(items)
    while some := list(islice(iterator, count)):
        yield some


class TurnBudget:
    """Limits the work of many tasks in one turn of the event loop: above `limit` units, tasks wait in order of arrival.

    While tasks wait, turns are 1 ms apart, so that other threads can run.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._resets = False

    async def spend(self, units: int) -> None:
        """Returns when the current turn has units left; the last task of a turn may spend more than is left."""
        if self._left > 0 and not self._waiting:
            self._left -= units
            self._reset_next_turn()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        self._reset_next_turn()
        await turn

    def _reset_next_turn(self) -> None:
        if not self._resets:
            self._resets = True
            asyncio.get_running_loop().call_soon(self._reset)

    def _reset(self) -> None:
        self._resets = False
        self._left = self._limit
        while self._waiting and self._left > 0:
            units, turn = self._waiting.popleft()
            if not turn.done():  # its task may have been cancelled
                self._left -= units
                turn.set_result(None)
        if self._waiting or self._left < self._limit:
            self._resets = True
            asyncio.get_running_loop().call_later(_REST_S, self._reset)


async def run_together(parts: Iterator[Coroutine[Any, Any, T]], count: int) -> Sequence[T]:
    """Runs `count` parts at once and returns their results in order; the first failure cancels the others and is raised
    as it is. Each part is taken when it starts and freed when it ends: freeing 2,048 tasks together takes 8 ms.

    An `asyncio.TaskGroup` would keep the failure, its frames and its tasks in a cycle.
    """
    if count == 1:  # nearly always: no task of its own
        return [await next(parts)]
    results: dict[int, T] = {}
    failures: list[BaseException] = []  # the first one
    running: set[asyncio.Task[T]] = set()
    is_over = asyncio.Event()

    def start(position: int) -> None:
        task = asyncio.ensure_future(next(parts))
        running.add(task)
        task.add_done_callback(partial(note, position))

    def note(position: int, task: "asyncio.Task[T]") -> None:
        running.discard(task)
        failure = asyncio.CancelledError() if task.cancelled() else task.exception()
        if failure is None:
            results[position] = task.result()
        elif not failures:
            failures.append(failure)
        else:
            forget_frames(failure)  # which often refer to it
        if failures or len(results) == count:
            is_over.set()

    try:
        starts = TurnBudget(_STARTS_PER_TURN)
        for position in range(count):
            await starts.spend(1)
            if failures:
                break
            start(position)
        await is_over.wait()
    finally:
        await _end(running)
    if failures:
        raise failures.pop()
    return [results[position] for position in range(count)]


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an exception and of all exceptions that led to it.

    A traceback refers to frames, whose variables often refer, by way of a request or a task, to the exception: a cycle
    of 5 to 15 kB, which only a full garbage collection frees.
    """
    kept = [error]
    while kept:
        one = kept.pop()
        kept += [origin for origin in (one.__cause__, one.__context__) if origin is not None]
        if isinstance(one, BaseExceptionGroup):
            kept += one.exceptions
        one.__traceback__ = one.__cause__ = one.__context__ = None


async def _end(tasks: set[asyncio.Task[T]]) -> None:
    """Cancels tasks and waits for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tuple(tasks))


def log_defect(task: "asyncio.Task[Any]") -> None:
    """Logs the exception of a task, which would be silent otherwise. For `Task.add_done_callback`."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the task %s has stopped", task.get_name(), exc_info=error)


class Tasks:
    """The running tasks of one owner. Exceptions are logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator["asyncio.Task[None]"]:
        return iter(tuple(self._running))

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, T], name: str) -> "asyncio.Task[T]":
        """Starts a task; `name` is for the log."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(log_defect)
        return task

    async def end(self) -> None:
        """Cancels all tasks and waits for their end."""
        for task in self:
            task.cancel()
        await asyncio.gather(*self, return_exceptions=True)
