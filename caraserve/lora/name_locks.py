"""One change of an adapter's name at a time: others wait for their turn, in the order in which they came."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from caraserve.errors import AdapterBusy

_MOST_WAITING = 256  # changes of one name
_LONGEST_WAIT_S = 30.0
_RETRY_S = 1.0


class NameLocks:
    """A lock for each name that is being changed. For the event loop."""

    def __init__(self, longest_wait_s: float = _LONGEST_WAIT_S) -> None:
        self._longest_wait_s = longest_wait_s
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}  # by name: the change under way, and those that wait

    def is_held(self, name: str) -> bool:
        """Whether a name is being changed."""
        return name in self._locks

    @asynccontextmanager
    async def held(self, name: str) -> AsyncIterator[None]:
        """Waits for the name's turn. Raises AdapterBusy if too many wait, or for too long."""
        if self._users.get(name, 0) > _MOST_WAITING:
            raise AdapterBusy(f"{_MOST_WAITING} changes of {name!r} are waiting; try again", retry_after_s=_RETRY_S)
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            try:
                async with asyncio.timeout(self._longest_wait_s):
                    await lock.acquire()
            except TimeoutError:
                raise AdapterBusy(
                    f"{name!r} is being changed, for more than {self._longest_wait_s:g} s; try again",
                    retry_after_s=_RETRY_S,
                ) from None
            try:
                yield
            finally:
                lock.release()
        finally:
            self._users[name] -= 1
            if self._users[name] == 0:
                del self._users[name], self._locks[name]
