"""Watches --adapters-dir: loads folders that are new or have changed, and unloads those that are gone.

A folder counts once its files have had the same sizes and times in two polls, so one that is still being copied waits.
An adapter that was unloaded over HTTP stays unloaded until its files change. A folder with the name of an alias is left
out: no request could name its adapter.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from caraserve.errors import CaraServeError
from caraserve.lora.aliases import Aliases
from caraserve.lora.catalog import Catalog, stamp
from caraserve.lora.uploads import is_uploaded
from caraserve.util.tasks import Tasks

log = logging.getLogger(__name__)

_POLL_S = 1.0
_LEAST_PAUSE_SHARE = 20  # pauses are at least so many times the processor time of a poll: 0.3 s for 20,000 folders


class FolderWatch:
    """The folders of one root. Runs on the event loop; the disk is read on a thread."""

    def __init__(
        self,
        root: Path,
        catalog: Catalog,
        aliases: Aliases,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._root, self._catalog, self._aliases, self._sleep = root.resolve(), catalog, aliases, sleep
        self._seen: dict[str, str] = {}  # stamps of the last poll, by name
        self._unloads = Tasks()
        self._cpu_s = 0.0  # of the last poll
        self._settled: dict[str, str] = {}  # stamps for which nothing is left to do

    async def run(self) -> None:
        """Polls until cancelled."""
        try:
            while True:
                await self.poll()
                await self._sleep(max(_POLL_S, _LEAST_PAUSE_SHARE * self._cpu_s))
        finally:
            await self._unloads.end()

    async def poll(self) -> None:
        """Looks at all folders once."""
        found, self._cpu_s = await asyncio.to_thread(_stamps, self._root)
        seen, self._seen = self._seen, found
        for name, now in found.items():
            if now == self._settled.get(name) or self._catalog.is_changing(name):
                continue
            if seen.get(name) == now or self._is_loaded(name, now):
                self._settled[name] = now
                await self._load(name, now)
        for name in [name for name in self._settled if name not in found and name not in seen]:
            if not self._catalog.is_changing(name):
                del self._settled[name]
                self._unloads.start(self._unload(name), f"unload of {name}")

    def _is_loaded(self, name: str, now: str) -> bool:
        """Whether the folder needs no second look: after an upload it could have been unloaded again by then."""
        info = self._catalog.find_whole(name)
        return info is not None and bool(info.targets) and info.stamp == now

    async def _load(self, name: str, now: str) -> None:
        folder, old = self._root / name, self._catalog.find(name)
        if old is not None and old.targets and (old.stamp == now or Path(old.path) != folder):
            return  # known already, or a name that stands for another folder
        if self._aliases.find(name) is not None:
            log.warning("%r in --adapters-dir is left out: %r is an alias; rename the folder", str(folder), name)
            return
        try:
            # An upload that another instance has replaced by now does not come back.
            is_outdated = old is not None and not old.targets and is_uploaded(folder)
            info = await self._catalog.load(name, str(folder), inplace=not is_outdated)
        except CaraServeError as error:
            log.warning("%r in --adapters-dir is left out: %s", str(folder), error.message)
        else:
            log.info("adapter %s %s in --adapters-dir: %s", name, "has changed" if old else "is new", info.digest)

    async def _unload(self, name: str) -> None:
        info = self._catalog.find_whole(name)
        if info is None or Path(info.path) != self._root / name:
            return
        log.info("adapter %s is gone from --adapters-dir and is unloaded", name)
        try:
            await self._catalog.unload(name)
        except CaraServeError as error:
            log.warning("adapter %s cannot be unloaded: %s", name, error.message)


def _stamps(root: Path) -> tuple[dict[str, str], float]:
    """Returns the stamps of all folders with an adapter's files, by name, and the processor time that this took. Raises
    OSError if the root cannot be read."""
    began_s = time.thread_time()
    with os.scandir(root) as entries:
        names = [entry.name for entry in entries if not entry.name.startswith(".")]
    return {name: found for name in names if (found := stamp(root / name))}, time.thread_time() - began_s
