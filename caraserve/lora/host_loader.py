"""Reads adapters into the host cache, and queues those that wait for room there.

An adapter read from disk is usable when it is complete, also before the digest of its bytes is known. One that is
downloaded is usable layer by layer. The extent of a failed read is freed by `DeviceLoader`, once no side batch reads it
any more.
"""

from collections import deque
from collections.abc import Callable

from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import CaraServeError
from caraserve.lora.adapter import (
    Adapter,
    AdapterTier,
    CacheCounters,
    CheckDigest,
    PartialImage,
    ReadAdapter,
    UploadSource,
    files_changed,
)
from caraserve.lora.device_loader import DeviceLoader
from caraserve.lora.host_cache import HostCache

_MOST_PREFETCHES = 2  # reads at a time for requests that are not admitted yet; more of them would only share the disk


class HostLoader:
    """Starts reads, at most as many as there is room for, and passes what they bring to the device loader. Not
    thread-safe: for the event loop."""

    def __init__(
        self,
        host: HostCache,
        read: ReadAdapter,
        device_loader: DeviceLoader,
        find: Callable[[str], Adapter | None],
        counters: CacheCounters,
        now: Callable[[], float],
        check: CheckDigest | None,
        checked: Callable[[Adapter, HostAdapter], None],
    ) -> None:
        """`find`: returns the adapter of a digest, or None if no name and no request has it. `check`: computes the
        digests of images that are read without; None: there are none. `checked`: called with the result."""
        self.under_way = 0
        self._check, self._checked = check, checked
        self._host_cache, self._read, self._device_loader = host, read, device_loader
        self._find, self._counters, self._now = find, counters, now
        self._waiting: deque[Adapter] = deque()  # for room in the arena
        self._ahead: set[str] = set()  # digests that are read for requests not admitted yet

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._waiting

    @property
    def are_waiting(self) -> bool:
        """Whether an adapter waits for room in the host cache."""
        return bool(self._waiting)

    def ask(self, adapter: Adapter) -> None:
        """Queues an adapter that an admitted request needs and that is not in the host cache."""
        if adapter.tier is AdapterTier.FAILED:
            adapter.move_to(AdapterTier.DISK)  # this attempt has not failed yet
        self._waiting.append(adapter)
        self.schedule_pending()

    def ask_ahead(self, adapter: Adapter) -> None:
        """Reads an adapter for a request that is not admitted yet, if there is room without evicting an image that an
        unfinished request will use. At most `_MOST_PREFETCHES` such reads run at a time."""
        if not adapter.may_be_read_ahead(self._now()) or adapter.digest in self._host_cache or self._waiting:
            return
        if len(self._ahead) < _MOST_PREFETCHES and self._begin(adapter, ahead=True):
            self._ahead.add(adapter.digest)

    def forget(self, adapter: Adapter) -> None:
        """Removes an adapter that no admitted request needs any more from the queue. A read under way continues."""
        if adapter in self._waiting:
            self._waiting.remove(adapter)

    def rename(self, old: str, new: str) -> None:
        """Gives the adapter of digest `old` another digest."""
        if old in self._ahead:
            self._ahead.remove(old)
            self._ahead.add(new)

    def schedule_pending(self) -> None:
        """Starts reads in the order of the queue, as far as there is room in the arena. A small adapter does not
        overtake a large one, because the large one might then never get its room."""
        while self._waiting:
            if not self._start(adapter := self._waiting.popleft()):
                self._waiting.appendleft(adapter)
                return

    def _start(self, adapter: Adapter) -> bool:
        """Starts the read of an adapter, unless its image is cached. Returns False if there is no room in the arena."""
        if (image := self._host_cache.get(adapter.digest)) is not None:
            self._counters.host_hits += 1
            self._host_cache.touch(adapter.digest)
            self._device_loader.image_arrived(adapter, image)
            return True
        return self._begin(adapter, ahead=False)

    def _begin(self, adapter: Adapter, *, ahead: bool) -> bool:
        def stays(digest: str) -> bool:
            if (other := self._find(digest)) is None:
                return False
            is_claimed = ahead and other.tier is AdapterTier.HOST and other.pins > 0  # by an unfinished request
            return other.pinned is not None or other.needs_image or is_claimed

        extent = self._host_cache.take(adapter.digest, adapter.num_bytes, stays, self.evict)
        if extent is None:
            return False
        adapter.move_to(AdapterTier.READING)
        adapter.error, adapter.makes_room = None, False
        self.under_way += 1
        self._counters.disk_reads += 1
        began_s = self._now()
        self._read(
            adapter.source,
            extent,
            lambda result: self._ended(adapter, result),
            lambda image, layers: self._layers_arrived(adapter, PartialImage(image, began_s, layers)),
        )
        return True

    def evict(self, digest: str) -> None:
        """Evicts an image from the host cache."""
        self._host_cache.drop(digest)
        self._counters.host_evictions += 1
        if (adapter := self._find(digest)) is not None and adapter.tier is AdapterTier.HOST:
            adapter.move_to(AdapterTier.DISK)

    def _layers_arrived(self, adapter: Adapter, partial: PartialImage) -> None:
        partial.layers = min(partial.layers, len(partial.image.spec.layer_ends) - 1)
        if partial.layers > (adapter.partial.layers if adapter.partial is not None else 0):
            adapter.partial = partial
            self._device_loader.layers_arrived(adapter)

    def _ended(self, adapter: Adapter, result: HostAdapter | CaraServeError) -> None:
        self.under_way -= 1
        self._ahead.discard(adapter.digest)
        is_other = isinstance(result, HostAdapter) and result.spec.digest != adapter.digest
        if is_other and not isinstance(adapter.source, UploadSource):  # an upload may be what another name has already
            result = files_changed()
        if isinstance(result, CaraServeError):
            self._device_loader.read_failed(adapter, result)
        else:
            self._host_cache.keep(adapter.digest, result)
            adapter.spec = result.spec  # complete: while it arrived, its score head had no numbers
            if not result.is_checked:
                assert self._check is not None
                adapter.is_checked = False
                self._check(result, lambda found: self._checked(adapter, found))
            self._device_loader.image_arrived(adapter, result)
        adapter.partial = None
        self.schedule_pending()
