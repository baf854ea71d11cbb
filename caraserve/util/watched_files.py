"""Notices that files have changed: keys and certificates are replaced while a server uses them."""

import asyncio
import contextlib
from pathlib import Path

_POLL_S = 1.0

_Stamp = tuple[int, int, int] | None  # time of the change, size and inode of a file; None: there is none


class WatchedFiles:
    """Some files that are read again when one of them has changed, or when that is asked for."""

    def __init__(self, *paths: Path) -> None:
        """Create it before the files are read for the first time."""
        self._paths = paths
        self._stamps = self._look()
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Makes `changed` return now."""
        self._asked.set()

    async def changed(self) -> None:
        """Returns within a second of a change, or when `ask` has been called. A change after it counts again."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._asked.wait()
            before, self._stamps = self._stamps, await asyncio.to_thread(self._look)
            if self._stamps != before or self._asked.is_set():
                self._asked.clear()
                return

    def _look(self) -> list[_Stamp]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
