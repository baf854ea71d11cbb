"""Versions on their way into the host tier, and those that wait for room there. For `manager.py`.

What comes from a disk is there when all of it is; what other instances send is there layer by layer, and may be read as
far as it has come. The extent of a read that has failed is given back by its owner, when nobody looks into it any more.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter import Adapter, AdapterTier, CacheCounters, PartialImage, Source
from caraserve.lora.host_cache import HostCache

_MOST_PREFETCHES = 2  # reads at a time for requests that are not admitted yet: more would only share the disk

Done = Callable[[HostAdapter | CaraServeError], None]
Came = Callable[[HostAdapter, int], None]


class ReadAdapter(Protocol):
    """Reads an adapter into an extent of the arena elsewhere and calls `done` on the event loop. What comes from other
    instances is told before, also there: `came(image, layers)` says that the first layers of the image are right and
    will stay as they are; the other bytes are nobody's until then."""

    def __call__(self, source: Source, into: NDArray[np.uint8], done: Done, came: Came) -> None: ...


class HostLoaderOwner(Protocol):
    """`Residency`, as far as reads concern it."""

    def find(self, digest: str) -> Adapter | None: ...
    def evict_from_host(self, digest: str) -> None: ...
    def arrived(self, version: Adapter, image: HostAdapter) -> None: ...
    def grew(self, version: Adapter) -> None: ...
    def not_read(self, version: Adapter, error: CaraServeError) -> None: ...


class HostLoader:
    """The event loop's alone."""

    def __init__(
        self,
        host: HostCache,
        read: ReadAdapter,
        owner: HostLoaderOwner,
        counters: CacheCounters,
        now: Callable[[], float],
    ) -> None:
        self.under_way = 0
        self._host, self._read, self._owner, self._counters, self._now = host, read, owner, counters, now
        self._waiting: deque[Adapter] = deque()  # for room in the arena
        self._ahead: set[str] = set()  # digests that are read for requests which are not admitted yet

    def __contains__(self, version: Adapter) -> bool:
        return version in self._waiting

    @property
    def are_waiting(self) -> bool:
        """Whether some version waits for room."""
        return bool(self._waiting)

    def ask(self, version: Adapter) -> None:
        """An admitted request wants a version that is not in the host tier."""
        if version.tier is AdapterTier.FAILED:
            version.to(AdapterTier.DISK)  # this attempt has not failed yet
        self._waiting.append(version)
        self.go_on()

    def ask_ahead(self, version: Adapter) -> None:
        """A request that is not admitted yet will want it: it is read as far as there is room that no open request has
        a claim to."""
        if not version.may_be_read_ahead(self._now()) or version.digest in self._host or self._waiting:
            return
        if len(self._ahead) < _MOST_PREFETCHES and self._begin(version, _claims_image):
            self._ahead.add(version.digest)

    def forget(self, version: Adapter) -> None:
        """Nobody wants it any more; a read under way goes on."""
        if version in self._waiting:
            self._waiting.remove(version)

    def go_on(self) -> None:
        """Starts reads as far as there is room in the arena. None passes another, or that could wait for ever."""
        while self._waiting:
            if not self._start(version := self._waiting.popleft()):
                self._waiting.appendleft(version)
                return

    def _start(self, version: Adapter) -> bool:
        """False when there is no room for it in the arena."""
        if (image := self._host.get(version.digest)) is not None:
            self._counters.host_hits += 1
            self._host.touch(version.digest)
            self._owner.arrived(version, image)
            return True
        return self._begin(version, _needs_image)

    def _begin(self, version: Adapter, is_needed: Callable[[Adapter], bool]) -> bool:
        def stays(digest: str) -> bool:
            other = self._owner.find(digest)
            return other is not None and is_needed(other)

        extent = self._host.take(version.digest, version.num_bytes, stays, self._owner.evict_from_host)
        if extent is None:
            return False
        version.to(AdapterTier.READING)
        version.error, version.gives_way = None, False
        self.under_way += 1
        self._counters.disk_reads += 1
        began_s = self._now()
        self._read(
            version.source,
            extent,
            lambda result: self._ended(version, result),
            lambda image, layers: self._came(version, PartialImage(image, began_s, layers)),
        )
        return True

    def _came(self, version: Adapter, partial: PartialImage) -> None:
        partial.layers = min(partial.layers, len(partial.image.spec.layer_ends) - 1)
        if partial.layers > (version.partial.layers if version.partial is not None else 0):
            version.partial = partial
            self._owner.grew(version)

    def _ended(self, version: Adapter, result: HostAdapter | CaraServeError) -> None:
        self.under_way -= 1
        self._ahead.discard(version.digest)
        if isinstance(result, HostAdapter) and result.spec.digest != version.digest:
            result = AdapterRejected(f"{version.source.name}: the files have changed since the adapter was loaded")
        if isinstance(result, CaraServeError):
            self._owner.not_read(version, result)
        else:
            self._host.keep(version.digest, result)
            self._owner.arrived(version, result)
        version.partial = None
        self.go_on()


def _needs_image(version: Adapter) -> bool:
    return version.needs_image


def _claims_image(version: Adapter) -> bool:
    """Whether an open request needs an image, or will."""
    return version.needs_image or (version.tier is AdapterTier.HOST and version.pins > 0)
