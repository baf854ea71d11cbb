"""Brings adapters to the device and back: disk → host cache → device cache.

The engine pins an adapter when a request is submitted, and acquires it when the request is admitted; then it is loaded,
beside everything else. Adapters are identified by digest. A name that is loaded again points to another adapter; the
old one stays until its last request ends.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterator

from caraserve.core.adapter_rules import PINNED_SHARE, PINS
from caraserve.core.backend import Backend
from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.shared_memory import Arena
from caraserve.errors import CaraServeError
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import (
    Adapter,
    AdapterTier,
    CacheCounters,
    CheckDigest,
    EndedLoad,
    ReadAdapter,
    RemoteSource,
    Source,
    other_bytes,
)
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.device_loader import DeviceCache, DeviceLoader
from caraserve.lora.host_cache import HostCache
from caraserve.lora.host_loader import HostLoader
from caraserve.lora.start_policy import NO_PREFILL, AwaitedPrefill, StartPolicy

log = logging.getLogger(__name__)

_KEPT_LOADS = 100  # that have ended, for the web page


class AdapterManager:
    """Moves adapters between disk, host cache and device cache. Not thread-safe: everything runs on the event loop, to
    which `on_loop` brings the backend's callbacks.
    """

    def __init__(
        self,
        backend: Backend,
        memory: MemoryBudget,
        arena: Arena,
        read: ReadAdapter,
        on_loop: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
        loading: StartPolicy,
        observe_load: Callable[[float, bool], None] = lambda seconds, ok: None,  # seconds since it was wanted, success
        check: CheckDigest | None = None,  # None: `read` computes the digest of every image
    ) -> None:
        self.memory, self._now, self._observe_load = memory, now, observe_load
        self.arrivals = ArrivalEstimates(loading, now)
        self._changed: Callable[[], None] = lambda: None
        self._moved: Callable[[str], None] = lambda digest: None
        self._checked: Callable[[Adapter, CaraServeError | None], None] = lambda adapter, error: None
        self._waiting: list[asyncio.Event] = []
        self._adapters: dict[str, Adapter] = {}
        self._names: dict[str, Adapter] = {}
        self._pinned_names: dict[str, str] = {}  # one of `PINS` by name, also of names that are not registered
        self._host_cache = HostCache(arena, self._note_move)
        self.counters = CacheCounters()
        self.ended_loads: deque[EndedLoad] = deque(maxlen=_KEPT_LOADS)  # the newest last
        self.device_cache = DeviceCache(
            backend, memory, lambda adapter: adapter.device_bytes * adapter.rate_at(now()), self._note_move
        )
        self.device_loader = DeviceLoader(
            backend, memory, self._host_cache, self.device_cache, self.arrivals, self, self.counters, on_loop
        )
        self._host_loader = HostLoader(
            *(self._host_cache, read, self.device_loader, self.find, self.counters, now, check, self._image_checked)
        )

    # --- names and pins ---

    def register(self, name: str, digest: str, source: Source, num_bytes: int) -> None:
        """Points `name` at an adapter of so many bytes. The adapter that it pointed at before stays until its last
        request ends."""
        adapter = self._adapters.get(digest)
        if adapter is None:
            adapter = self._adapters[digest] = Adapter(digest, source, num_bytes)
            if isinstance(source, AdapterFolder):
                source.add_user()
        elif not isinstance(source, RemoteSource):
            adapter.read_from(source)  # the same adapter may be in another folder now
        old, self._names[name] = self._names.get(name), adapter
        adapter.names[name] = source
        self._update_pin(adapter)
        if old is not None and old is not adapter:
            self._leave(old, name)
        else:
            self._follow_names(adapter)

    def _leave(self, adapter: Adapter, name: str) -> None:
        """Removes a name from an adapter."""
        del adapter.names[name]
        self._follow_names(adapter)
        self._update_pin(adapter)
        self.forget_if_unused(adapter)

    def _follow_names(self, adapter: Adapter) -> None:
        """Chooses the folder from which an adapter is read: one of a name that stands for it, if there is one, as that
        of a former name may be removed next, or hold other files already."""
        folders = [source for source in adapter.names.values() if isinstance(source, AdapterFolder)]
        if folders and adapter.source not in folders:
            adapter.read_from(folders[0])

    def identify(self, random_digest: str, digest: str) -> None:
        """Gives an adapter whose upload is complete its digest, unless another one has it: the name is then registered
        again, and the requests under way keep their own."""
        if digest not in self._adapters and random_digest in self._adapters:
            self._rename(random_digest, digest)
            self._note_move(digest)

    def _rename(self, old: str, new: str) -> None:
        adapter = self._adapters[new] = self._adapters.pop(old)
        self._host_cache.rename(old, new)
        self.device_cache.rename(old, new)
        self._host_loader.rename(old, new)
        adapter.digest = new

    def unregister(self, name: str) -> Adapter:
        """Removes a name and returns its adapter, which is forgotten when no request pins it and no other name has
        it."""
        adapter = self._names.pop(name)
        self._leave(adapter, name)
        return adapter

    def set_pin(self, name: str, pinned: str | None) -> None:
        """Keeps the adapter of a name in a cache, one of `PINS`, or no longer (None). It is read to the host cache now,
        if there is room, unless other instances alone have it."""
        if pinned is None:
            self._pinned_names.pop(name, None)
        else:
            self._pinned_names[name] = pinned
        if (adapter := self._names.get(name)) is not None:
            self._update_pin(adapter)

    def _update_pin(self, adapter: Adapter) -> None:
        pins = [PINS.index(self._pinned_names[name]) for name in adapter.names if name in self._pinned_names]
        wanted = PINS[: max(pins) + 1] if pins else ()
        adapter.pinned = next((pin for pin in reversed(wanted) if self._has_room_for_pin(adapter, pin)), None)
        if adapter.pinned is not None and not isinstance(adapter.source, RemoteSource):
            self.prefetch(adapter)

    def _has_room_for_pin(self, adapter: Adapter, pin: str) -> bool:
        """Whether all adapters pinned in a cache take at most half of it. Pins of another instance, whose caches may be
        larger, are checked only here."""
        size = {"host": self._host_cache.num_bytes, "device": self.memory.most_adapter_bytes}[pin]
        found = {self._names[name] for name in self._pinned_names if name in self._names} - {adapter}
        num_bytes = [other.num_bytes for other in found if other.pinned in (pin, PINS[-1])]
        return adapter.num_bytes + sum(num_bytes) <= size // PINNED_SHARE

    def pin(self, name: str) -> Adapter:
        """Returns the adapter that `name` points at now, pinned until `unpin`. Raises KeyError for an unknown name."""
        return self.pin_again(self._names[name])

    def pin_again(self, adapter: Adapter) -> Adapter:
        """Adds a pin to an adapter that is pinned already, even if its name points at another one by now."""
        adapter.pins += 1
        return adapter

    def unpin(self, adapter: Adapter) -> None:
        """Takes back one `pin`, when the request that pinned `adapter` has ended."""
        adapter.pins -= 1
        self.forget_if_unused(adapter)
        self.changed()

    def on_change(self, changed: Callable[[], None]) -> None:
        """Sets the callback for every change that may let a request start or continue."""
        self._changed = changed

    def on_move(self, moved: Callable[[str], None]) -> None:
        """Sets the callback for every digest that has come to one of the caches, whole, or has left it."""
        self._moved = moved

    def on_check(self, checked: Callable[[Adapter, CaraServeError | None], None]) -> None:
        """Sets the callback for every adapter whose digest was computed beside its use: it is right, or all its
        requests must end with the error."""
        self._checked = checked

    def _note_move(self, digest: str) -> None:
        self._moved(digest)

    async def forgotten(self, adapter: Adapter) -> None:
        """Returns when the last request of an unregistered adapter has ended and its memory has been freed."""
        while not (adapter.names or self.is_forgotten(adapter)):
            await self.next_change()

    @property
    def loading(self) -> int:
        """The number of reads and copies under way."""
        return self._host_loader.under_way + self.device_loader.under_way

    async def settled(self) -> bool:
        """Waits until no load is under way. Returns False if adapters are left that wait, as there is no room for
        them."""
        while self.loading:
            await self.next_change()
        return not self.device_loader.are_waiting and not self._host_loader.are_waiting

    async def next_change(self) -> None:
        """Returns when any adapter has changed its tier or lost a pin."""
        self._waiting.append(event := asyncio.Event())
        await event.wait()

    def find(self, digest: str) -> Adapter | None:
        """Returns the adapter of that digest, or None if no name and no request has it."""
        return self._adapters.get(digest)

    def image(self, digest: str) -> HostAdapter | None:
        """Returns the image of a digest; None if it is not in the host cache, or its digest is being computed."""
        image = self._host_cache.get(digest)
        return image if image is not None and image.is_checked else None

    def error_of(self, name: str) -> CaraServeError | None:
        """Returns why the last load of the name's adapter failed, or None if it did not."""
        return self._names[name].error

    def is_forgotten(self, adapter: Adapter) -> bool:
        """Returns whether an unregistered adapter's memory has been freed."""
        return self._adapters.get(adapter.digest) is not adapter

    # --- the device ---

    def acquire(self, adapter: Adapter, prefill: AwaitedPrefill = NO_PREFILL) -> None:
        """Loads an adapter to the device for an admitted request; it stays there until `release`. `prefill`: what the
        request will begin with."""
        adapter.users += 1
        adapter.prefill = prefill
        adapter.count_admission(self._now())
        self.device_loader.count_bypass(adapter)
        if adapter.tier is AdapterTier.DEVICE:
            self.counters.device_hits += 1
            return
        self.counters.device_misses += 1
        if adapter.tier is AdapterTier.HOST and adapter not in self.device_loader:
            self.counters.host_hits += 1
            adapter.asked_s = self._now()
            self.device_loader.want(adapter)
        elif adapter.tier is AdapterTier.FAILED and adapter.users > 1:
            pass  # the engine ends its other requests with the error before it retries, and this one with them
        elif adapter.tier in (AdapterTier.DISK, AdapterTier.FAILED) and adapter not in self._host_loader:
            adapter.asked_s = self._now()
            self._host_loader.ask(adapter)
        elif adapter.tier is AdapterTier.READING and adapter.users == 1:
            adapter.asked_s = self._now()
            self.device_loader.stream(adapter)

    def prefetch(self, adapter: Adapter) -> None:
        """Reads an adapter into the host cache for a request that is not admitted yet, if there is room."""
        self._host_loader.ask_ahead(adapter)

    def release(self, adapter: Adapter) -> None:
        """Takes back one `acquire`. An adapter that no admitted request needs may be evicted."""
        adapter.users -= 1
        if adapter.users == 0:
            self._host_loader.forget(adapter)
            self.device_loader.forget(adapter)
        self._host_loader.schedule_pending()
        self.device_loader.schedule_pending()

    def pin_image(self, adapter: Adapter) -> None:
        """Keeps an adapter's image in the host cache until `unpin_image`, for a side batch or an upload."""
        adapter.image_pins += 1

    def unpin_image(self, adapter: Adapter) -> None:
        """Takes back one `pin_image`."""
        adapter.image_pins -= 1
        if adapter.image_pins == 0:
            self.device_loader.end_failed(adapter)
            self._host_loader.schedule_pending()

    def check(self) -> None:
        """Raises AssertionError if the memory or slots of a cache do not add up."""
        self.device_cache.check()
        coming = (AdapterTier.READING, AdapterTier.STREAMING)
        self._host_cache.check({digest for digest, adapter in self._adapters.items() if adapter.tier in coming})

    def on_device(self) -> list[Adapter]:
        """Returns the adapters that are on the device, whole."""
        return self.device_cache.ready()

    def in_host(self) -> Iterator[Adapter]:
        """Yields the adapters whose image is in the host cache, whether or not they are on the device too, the most
        recently used first."""
        return (self._adapters[digest] for digest in reversed(self._host_cache) if digest in self._adapters)

    @property
    def num_in_host(self) -> int:
        """The number of images in the host cache."""
        return len(self._host_cache)

    # --- digests that are computed beside the first use ---

    def _image_checked(self, adapter: Adapter, found: HostAdapter) -> None:
        adapter.is_checked = True
        if found.spec.digest == adapter.digest:
            self._host_cache.keep(adapter.digest, found)
            self._checked(adapter, None)
        else:
            error = self._disown(adapter)
            self._checked(adapter, error)
        self.forget_if_unused(adapter)
        self._host_loader.schedule_pending()
        self.device_loader.schedule_pending()
        self.changed()

    def _disown(self, adapter: Adapter) -> CaraServeError:
        """Takes the digest and the names from an adapter whose image has other bytes: it is dropped with the last of
        its requests, and new ones have the files read again. Returns the error for those."""
        digest, error = adapter.digest, other_bytes(adapter.digest)
        log.error("adapter %s: %s", min(adapter.names, default=digest[:12]), error.message)
        self._rename(digest, secrets.token_hex(32))
        self.memory.pool.forget_all()  # KV blocks that were computed with it
        for name, source in [*adapter.names.items()]:
            self.register(name, digest, source, adapter.num_bytes)
        self._note_move(digest)
        return error

    # --- callbacks of the device loader ---

    def read_again(self, adapter: Adapter) -> None:
        """Reads an adapter that was evicted from the host cache while it waited for room on the device."""
        self._host_loader.ask(adapter)

    def end_load(self, adapter: Adapter, error: CaraServeError | None = None) -> None:
        """Reports a load that has ended: the adapter is on the device, whole, or has failed with `error`. Its image may
        be evicted now, and if its requests have ended meanwhile, the adapter too."""
        now_s, succeeded = self._now(), error is None
        if error is None:
            self._note_move(adapter.digest)
        else:
            adapter.fail(error, now_s)
        self._observe_load(now_s - adapter.asked_s, succeeded)
        self.ended_loads.append(EndedLoad(min(adapter.names, default=""), adapter.asked_s, now_s, succeeded))
        self.forget_if_unused(adapter)
        self._host_loader.schedule_pending()
        self.device_loader.schedule_pending()
        self.changed()

    def changed(self) -> None:
        """Calls the callback of `on_change`, and ends the waits of `next_change`."""
        self._changed()
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()

    def forget_if_unused(self, adapter: Adapter) -> None:
        """Frees what an adapter has that no name and no request refers to any more."""
        if adapter.pins or adapter.names or self.is_forgotten(adapter):
            return
        if adapter.tier in (AdapterTier.READING, AdapterTier.STREAMING, AdapterTier.COPYING) or not adapter.is_checked:
            return  # called again when the load or the check has ended
        if adapter.tier is AdapterTier.DEVICE:
            self.device_loader.drop(adapter)
        if adapter.digest in self._host_cache:
            self._host_cache.drop(adapter.digest)
        del self._adapters[adapter.digest]
        adapter.read_from(None)
        self._host_loader.schedule_pending()
        self.changed()
