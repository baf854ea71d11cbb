"""Who may change or upload something now: so many at a time, of one key and in all. The others wait for their turn, in
the order in which they came; those of a key that has all of its places are passed by others."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from caraserve.errors import CaraServeError

LONGEST_WAIT_S = 30.0


class Turns:
    """Counts those that have a turn. For the event loop."""

    def __init__(
        self,
        refusal: Callable[[str, bool], CaraServeError],
        *,
        of_key: int,
        waiting: int,
        of_all: float = math.inf,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        """`refusal`: returns the error for a key of which `waiting` wait already (True), or whose turn does not come
        within `longest_wait_s`. `of_key`, `of_all`: how many may have a turn at the same time."""
        self._refusal, self._longest_wait_s = refusal, longest_wait_s
        self._of_key, self._of_all, self._most_waiting = of_key, of_all, waiting
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []  # in the order in which they came

    def is_taken(self, key: str) -> bool:
        """Whether one of a key has a turn."""
        return key in self._taken

    @asynccontextmanager
    async def taken(self, key: str) -> AsyncIterator[None]:
        """Waits for a turn, and keeps it. Raises the refusal."""
        if self._is_free(key) and not self._waits(key):
            self._taken[key] += 1
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._give_back(key)

    def _is_free(self, key: str) -> bool:
        return self._taken[key] < self._of_key and self._taken.total() < self._of_all

    def _waits(self, key: str) -> int:
        return [other for other, _ in self._waiting].count(key)

    async def _wait(self, key: str) -> None:
        if self._waits(key) >= self._most_waiting:
            raise self._refusal(key, True)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((key, turn))
        try:
            async with asyncio.timeout(self._longest_wait_s):
                await turn
        except BaseException as error:
            if turn.cancelled():
                self._waiting.remove((key, turn))
            else:  # it has got its turn at the same time
                self._give_back(key)
            if isinstance(error, TimeoutError):
                raise self._refusal(key, False) from None
            raise

    def _give_back(self, key: str) -> None:
        self._taken[key] -= 1
        self._taken += Counter()  # drops keys without any
        for other, turn in list(self._waiting):
            if self._is_free(other) and not turn.done():
                self._waiting.remove((other, turn))
                self._taken[other] += 1
                turn.set_result(None)
