"""Uses folders of this instance again whose names other instances have registered for adapters that no instance has.

A name stands for the adapter that was registered last, on every instance. If no instance has its bytes, the name would
answer 503 for good. So an instance that has a folder of that name, such as one in --adapters-dir, registers the folder
again: after 30 s where no instance has ever had the bytes, as the registration was a mistake; after 10 minutes where
one had them, or where the registration is older than this process: that instance may be restarting. A folder that
cannot be registered now, such as while its name is being changed, is tried again after the same time.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.errors import AdapterRejected, CaraServeError, NotFound
from caraserve.lora.catalog import Catalog
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.upload_folders import is_uploaded

log = logging.getLogger(__name__)

_NEVER_HELD_S, _LOST_S = 30.0, 600.0


@dataclass(slots=True)
class _Replaced:
    folder: AdapterInfo
    was_held: bool
    lost_since_s: float | None = None
    refusal: str = ""  # why it was not registered when it was due


class ReplacedFolders:
    """The folders by name. Methods run on the event loop."""

    def __init__(self, catalog: Catalog, is_lost: Callable[[str], bool], now: Callable[[], float]) -> None:
        """`is_lost`: whether no instance has the bytes of the adapter for which a name stands."""
        self._catalog, self._is_lost, self._now = catalog, is_lost, now
        self._replaced: dict[str, _Replaced] = {}

    def adopted(self, adapter: RegisteredAdapter, *, is_new: bool) -> None:
        """Records that a name is about to stand for another instance's adapter here. `is_new`: it was registered while
        this instance ran."""
        here = self._catalog.find_whole(adapter.name)
        if here is not None and here.targets and here.digest != adapter.digest:
            self._replaced[here.name] = _Replaced(here, was_held=not is_new)

    def changed(self, name: str) -> None:
        """Forgets a folder whose name was loaded or unloaded here, or removed on all instances."""
        self._replaced.pop(name, None)

    async def restore(self) -> None:
        """Registers the folders that are due. Uploaded ones stay replaced: what another instance registered is a newer
        upload. To be called every second."""
        now = self._now()
        for name, replaced in list(self._replaced.items()):
            if self._replaced.get(name) is not replaced:
                continue  # it has changed meanwhile
            if not self._is_lost(name):
                replaced.was_held, replaced.lost_since_s = True, None
            elif replaced.lost_since_s is None:
                replaced.lost_since_s = now
            elif now - replaced.lost_since_s >= (_LOST_S if replaced.was_held else _NEVER_HELD_S):
                is_done = await asyncio.to_thread(is_uploaded, Path(replaced.folder.path))
                is_done = is_done or await self._load(replaced, now - replaced.lost_since_s)
                replaced.lost_since_s = now
                if is_done and self._replaced.get(name) is replaced:
                    del self._replaced[name]

    async def _load(self, replaced: _Replaced, lost_s: float) -> bool:
        """Registers a folder. Returns False if a later try may succeed."""
        info = replaced.folder
        try:
            loaded = await self._catalog.load(info.name, info.path, inplace=True, was_served=True)
        except CaraServeError as error:
            if error.message != replaced.refusal:
                replaced.refusal = error.message
                log.warning("no instance has adapter %s, and %s is of no use: %s", info.name, info.path, error.message)
            return isinstance(error, NotFound | AdapterRejected)
        text = "no instance has had adapter %s for %.0f s: it stands for %s again, %s"
        log.warning(text, info.name, lost_s, info.path, loaded.digest)
        return True
