"""Reads what the server logs during a test."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class LogLines(logging.Handler, Generic[T]):
    """What `read` gives for each record so far, with methods that wait for more."""

    def __init__(self, read: Callable[[logging.LogRecord], T]) -> None:
        super().__init__()
        self.all: list[T] = []
        self._read, self._changed = read, asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(self._read(record))
        self._changed.set()

    async def until(self, count: int) -> list[T]:
        while len(self.all) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.all

    async def next(self) -> T:
        """Removes the first and returns it."""
        return (await self.until(1)).pop(0)


@contextmanager
def logged(name: str, read: Callable[[logging.LogRecord], T]) -> Iterator[LogLines[T]]:
    """Yields the lines of a logger, from level INFO on."""
    log, handler = logging.getLogger(name), LogLines(read)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(before)
