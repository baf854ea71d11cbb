"""Notices that another instance sends nothing, or next to nothing, while this one waits for its answer."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from caraserve.util.least_rate import LeastRate
from caraserve.util.tasks import log_defect

T = TypeVar("T")


class PeerFailedError(Exception):
    """The other instance, or the connection to it, has failed."""


class PeerWatch:
    """Ends one exchange with another instance that has become too slow, by the timeout that encloses the exchange.

    An instance sends nothing of a whole answer before all of it is computed, which may take hours, so that before the
    answer's head `is_answering` is called: False if the instance does not answer any more. After the head, bytes must
    come: a healthy instance sends a comment after 15 s of silence in a stream. The time in which a slow client is
    written to does not count. An exchange costs one timer, not one for each read.
    """

    def __init__(self, scope: asyncio.Timeout, pace: LeastRate, is_answering: Callable[[], Awaitable[bool]]) -> None:
        self.failure = ""  # what it has ended the exchange for
        self._scope, self._pace, self._is_answering = scope, pace, is_answering
        self._loop = asyncio.get_running_loop()
        self._is_waiting = self._has_head = False
        self._asking: asyncio.Task[None] | None = None
        self.restart()
        self._timer = self._loop.call_at(self._deadline_s, self._look)

    def close(self) -> None:
        """Ends the watch, when the exchange has ended."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def restart(self) -> None:
        """Measures from now on: something whole has come, such as an event."""
        self._began_s = self._loop.time()
        self._deadline_s = self._pace.deadline_s(self._began_s)

    async def head(self, work: Awaitable[T]) -> T:
        """Awaits the head of the answer. Raises PeerFailedError where that fails."""
        head = await self._read(work)
        self._has_head = True
        self.restart()
        return head

    async def piece(self, content: aiohttp.StreamReader) -> bytes:
        """Returns the next bytes of the answer, empty at its end. Raises PeerFailedError where reading fails."""
        piece = await self._read(content.readany())
        self._deadline_s = self._pace.deadline_s(self._loop.time(), len(piece), self._deadline_s)
        return piece

    async def _read(self, work: Awaitable[T]) -> T:
        self._is_waiting = True
        try:
            return await work
        except (aiohttp.ClientError, OSError) as error:
            raise PeerFailedError(f"{type(error).__name__}: {error}") from error
        finally:
            self._is_waiting = False

    def _look(self) -> None:
        now = self._loop.time()
        deadline_s = self._deadline_s if self._is_waiting else self._pace.deadline_s(now)
        if deadline_s > now:
            self._timer = self._loop.call_at(deadline_s, self._look)
        elif self._has_head:
            self._end(f"nothing whole has come from it for {now - self._began_s:.3g} s")
        else:
            self._asking = asyncio.create_task(self._ask(), name="question to an instance")
            self._asking.add_done_callback(log_defect)

    async def _ask(self) -> None:
        is_answering = await self._is_answering()
        if is_answering or self._has_head:  # the head may have come meanwhile
            self._timer = self._loop.call_later(self._pace.grace_s, self._look)
        else:
            self._end(
                f"it sent nothing for {self._loop.time() - self._began_s:.3g} s, and no longer answers the request"
            )

    def _end(self, failure: str) -> None:
        if self._is_waiting and not self._scope.expired():
            self.failure = failure
            self._scope.reschedule(0.0)
