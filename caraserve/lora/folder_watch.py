"""Watches --adapters-dir: loads folders that are new or have changed, and unloads those that are gone.

A folder counts once its files have had the same sizes and times in two polls, so one that is still being copied waits.
An adapter that was unloaded over HTTP stays unloaded until its files change. A folder that cannot be served is named
in the log, and its reason is kept for clients (`RefusedFolders`), also if it has no adapter's files. A folder with
the name of an alias is left out while there is that alias: no request could name its adapter.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from caraserve.errors import AdapterBusy, AdapterRejected, CaraServeError, ServerBusy
from caraserve.lora.aliases import Aliases
from caraserve.lora.catalog import Catalog
from caraserve.lora.folder_contents import NO_ADAPTERS, why_alias, why_no_adapter
from caraserve.lora.upload_folders import is_uploaded
from caraserve.util.tasks import Tasks

log = logging.getLogger(__name__)

_POLL_S = 1.0
_LEAST_PAUSE_SHARE = 20  # pauses are at least so many times the processor time of a poll: 0.3 s for 20,000 folders


@dataclass(slots=True)
class _Polled:
    """What one poll has found: stamps of folders with an adapter's files, and of other folders, by name."""

    adapters: dict[str, str] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    cpu_s: float = 0.0


class FolderWatch:
    """The folders of one root. Runs on the event loop; the disk is read on a thread."""

    def __init__(
        self, root: Path, catalog: Catalog, aliases: Aliases, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._root, self._catalog, self._aliases, self._sleep = root.resolve(), catalog, aliases, sleep
        self._polled = _Polled()
        self._unloads = Tasks()
        self._settled: dict[str, str] = {}  # stamps for which nothing is left to do
        self._aliased: set[str] = set()  # names of settled folders that are left out, as they are those of aliases
        self._described: dict[str, str] = {}  # stamps of other folders whose reason is known

    async def run(self) -> None:
        """Polls until cancelled."""
        try:
            while True:
                await self.poll()
                await self._sleep(max(_POLL_S, _LEAST_PAUSE_SHARE * self._polled.cpu_s))
        finally:
            await self._unloads.end()

    async def poll(self) -> None:
        """Looks at all folders once."""
        found = await asyncio.to_thread(_poll, self._root, self._catalog.stamp)
        seen, self._polled = self._polled, found
        for name in [name for name in self._aliased if self._aliases.find(name) is None]:
            self._aliased.discard(name)
            self._settled[name] = ""  # tried again, as the alias for which it was left out is gone
        for name, now in found.adapters.items():
            if now == self._settled.get(name) or self._catalog.is_changing(name):
                continue
            if seen.adapters.get(name) == now or self._is_loaded(name, now):
                self._settled[name] = now
                await self._load(name, now)
        for name, now in found.others.items():
            if now != self._described.get(name) and seen.others.get(name) == now:
                self._described[name] = now
                await self._describe(name)
        self._follow_removals(seen, found)

    def _follow_removals(self, seen: _Polled, found: _Polled) -> None:
        """Unloads the adapters of folders that were missing in two polls, and forgets why folders were refused that are
        gone."""
        for name in [name for name in self._settled if name not in found.adapters and name not in seen.adapters]:
            if not self._catalog.is_changing(name):
                del self._settled[name]
                self._unloads.start(self._unload(name), f"unload of {name}")
                self._forget(name, found)
        for name in [name for name in self._described if name not in found.others]:
            del self._described[name]
            self._forget(name, found)

    def _forget(self, name: str, found: _Polled) -> None:
        if name not in found.adapters and name not in found.others:
            self._catalog.forget_folder(name)

    def _is_loaded(self, name: str, now: str) -> bool:
        """Whether the folder needs no second look: it was uploaded, or loaded over HTTP."""
        info = self._catalog.find_whole(name)
        return info is not None and bool(info.targets) and info.stamp == now

    async def _load(self, name: str, now: str) -> None:
        folder, old = self._root / name, self._catalog.find(name)
        if self._catalog.stays_unloaded(name, now):
            return
        if old is not None and old.targets and (old.stamp == now or Path(old.path) != folder):
            return  # known already, or a name that stands for another folder

        def refuse_alias() -> None:
            if self._aliases.find(name) is not None:
                self._aliased.add(name)
                raise AdapterRejected(why_alias(name))

        try:
            # An upload that another instance has replaced by now does not come back.
            is_outdated = old is not None and not old.targets and is_uploaded(folder)
            info = await self._catalog.load(name, str(folder), inplace=not is_outdated, check=refuse_alias)
        except CaraServeError as error:
            if isinstance(error, AdapterBusy | ServerBusy):
                self._settled[name] = ""  # the next poll tries again
            self._refuse(name, error.message)
        else:
            log.info("adapter %s %s in --adapters-dir: %s", name, "has changed" if old else "is new", info.digest)

    async def _describe(self, name: str) -> None:
        """Says why a folder has no adapter."""
        try:
            reason = await asyncio.to_thread(why_no_adapter, self._root / name)
        except OSError as error:
            reason = f"the folder cannot be read: {error.strerror}"
        if reason is not None:
            self._refuse(name, reason)

    def _refuse(self, name: str, reason: str) -> None:
        if self._catalog.refused.note(name, reason):
            log.warning("%r in --adapters-dir is left out: %s", str(self._root / name), reason)

    async def _unload(self, name: str) -> None:
        info = self._catalog.find_whole(name)
        if info is None or Path(info.path) != self._root / name:
            return
        log.info("adapter %s is gone from --adapters-dir and is unloaded", name)
        try:
            await self._catalog.unload(name, lambda: self._catalog.find_whole(name) is info)
        except CaraServeError as error:
            log.warning("adapter %s cannot be unloaded: %s", name, error.message)


def _poll(root: Path, stamp: Callable[[Path], str]) -> _Polled:
    """Looks at all folders of the root. Raises OSError if it cannot be read."""
    began_s = time.thread_time()
    with os.scandir(root) as entries:
        found = [(entry.name, entry) for entry in entries if not entry.name.startswith(".")]
    polled = _Polled()
    for name, entry in found:
        if now := stamp(root / name):
            polled.adapters[name] = now
        elif entry.is_dir() and name not in NO_ADAPTERS:
            try:
                polled.others[name] = str(entry.stat().st_mtime_ns)
            except OSError:  # it is gone by now
                continue
    polled.cpu_s = time.thread_time() - began_s
    return polled
