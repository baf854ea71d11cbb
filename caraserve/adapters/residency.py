"""Where each adapter version is, and who needs it there: disk → host → device. Level 2.

`loop.py` pins a version when a request is submitted and asks for it on the device when the request is admitted; loads
run beside everything else and wake the loop when they end. A version is a content digest: names point to versions, a
name loaded again points to a new one, and the old one lives until its last request ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from caraserve.adapters.arrivals import Arrivals
from caraserve.adapters.device_tier import DeviceTier
from caraserve.adapters.host_tier import HostTier
from caraserve.adapters.loading import Loading
from caraserve.adapters.version import Counters, Pooled, Source, Tier, Version
from caraserve.cpu.arena import Arena
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.kv.room import Room
from caraserve.model.backend import Backend
from caraserve.model.layout import HostAdapter

MAX_BYPASSES = 64  # admissions that may pass an adapter which waits for device room
_MOST_PREFETCHES = 2  # reads at a time for requests that are not admitted yet: more would only share the disk

Read = Callable[[Source, NDArray[np.uint8], Callable[[HostAdapter | CaraServeError], None]], None]


class Residency:
    """Moves versions between tiers. Not thread-safe: everything, callbacks included, runs on the event loop.

    `read(source, into, done)` reads an adapter into an extent of the arena elsewhere and calls `done` on the event
    loop; callbacks of the backend are brought there by `on_loop`.
    """

    def __init__(
        self,
        backend: Backend,
        room: Room,
        arena: Arena,
        read: Read,
        on_loop: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
        loading: Loading,
        observe_load: Callable[[float, bool], None] = lambda seconds, ok: None,  # seconds since asked, success
    ) -> None:
        self._backend, self.room, self._read = backend, room, read
        self._on_loop, self._now, self._observe_load = on_loop, now, observe_load
        self.arrivals = Arrivals(loading, now)
        self._changed: Callable[[], None] = lambda: None
        self._waiting: list[asyncio.Event] = []
        self._versions: dict[str, Version] = {}
        self._names: dict[str, Version] = {}
        self._host = HostTier(arena)
        self._unread: deque[Version] = deque()  # on disk, waiting for room in the arena
        self.device = DeviceTier(backend, room, lambda version: version.device_bytes * version.rate_at(now()))
        self._wanting: deque[Version] = deque()  # in the host tier, waiting for device room
        self._bypasses = 0
        self.loading = 0  # reads and copies under way
        self._prefetching: set[str] = set()  # digests
        self.counters = Counters()

    # --- names and pins ---

    def register(self, name: str, digest: str, source: Source, num_bytes: int) -> None:
        """Points `name` at a version of so many bytes; the version it pointed at before drains."""
        version = self._versions.get(digest)
        if version is None:
            version = self._versions[digest] = Version(digest, source, num_bytes)
        if not isinstance(source, Pooled):
            version.source = source  # the same bytes may have moved
        old, self._names[name] = self._names.get(name), version
        version.names.add(name)
        if old is not None and old is not version:
            old.names.discard(name)
            self._forget_if_unused(old)

    def unregister(self, name: str) -> Version:
        """Takes a name away; its version is forgotten when nothing pins or names it."""
        version = self._names.pop(name)
        version.names.discard(name)
        self._forget_if_unused(version)
        return version

    def pin(self, name: str) -> Version:
        """The version that `name` means now, held until `unpin`. Raises KeyError for an unknown name."""
        version = self._names[name]
        version.pins += 1
        return version

    def unpin(self, version: Version) -> None:
        """A request that pinned `version` has ended."""
        version.pins -= 1
        self._forget_if_unused(version)
        self._notify()

    def on_change(self, changed: Callable[[], None]) -> None:
        """`changed` is called after every change that may let a request go on."""
        self._changed = changed

    async def forgotten(self, version: Version) -> None:
        """Returns when an unregistered version's last request has ended and its memory has been given back."""
        while not (version.names or self.is_forgotten(version)):
            await self.next_change()

    async def settled(self) -> bool:
        """Waits until no load is under way. Returns whether none is wanted either, for which there would be no room."""
        while self.loading:
            await self.next_change()
        return not self._wanting and not self._unread

    async def next_change(self) -> None:
        """Returns when a version has changed its tier or lost a pin."""
        self._waiting.append(event := asyncio.Event())
        await event.wait()

    def find(self, digest: str) -> Version | None:
        """The version of that digest, if a name or a request has it."""
        return self._versions.get(digest)

    def image(self, digest: str) -> HostAdapter | None:
        """What the host tier has of a digest."""
        return self._host.get(digest)

    def error_of(self, name: str) -> CaraServeError | None:
        """Why the last load of a name failed, if it did."""
        return self._names[name].error

    def is_forgotten(self, version: Version) -> bool:
        """Whether an unregistered version's memory has been given back."""
        return self._versions.get(version.digest) is not version

    # --- the device ---

    @property
    def admits(self) -> bool:
        """False while an adapter waits for room that later admissions keep taking: let the device drain."""
        return not (self._wanting and self._bypasses >= MAX_BYPASSES)

    def use(self, version: Version) -> None:
        """A request is admitted: the version is to come to the device and stay there until `unuse`."""
        version.uses += 1
        version.count_admission(self._now())
        self._bypasses += 1 if self._wanting else 0
        if version.tier is Tier.DEVICE:
            self.counters.device_hits += 1
        elif version.tier is Tier.HOST and version not in self._wanting:
            self.counters.host_hits += 1
            version.asked_s = self._now()
            self._want(version)
        elif version.tier is Tier.FAILED and version.uses > 1:
            pass  # those who had it before are still to be told that it failed, and so is this one
        elif version.tier in (Tier.DISK, Tier.FAILED) and version not in self._unread:
            version.asked_s = self._now()
            self._queue_read(version)
        elif version.tier is Tier.READING and version.uses == 1:
            version.asked_s = self._now()

    def passed(self) -> None:
        """A request without adapter is admitted, which may take memory that an adapter waits for."""
        self._bypasses += 1 if self.claims_memory else 0

    def prefetch(self, version: Version) -> None:
        """A request not admitted yet will want the version: it is read as far as no open request claims the room."""
        if not version.may_be_read_ahead(self._now()) or version.digest in self._host or self._unread:
            return
        if len(self._prefetching) < _MOST_PREFETCHES and self._read_into_host(version, self._claims_image):
            self._prefetching.add(version.digest)

    def unuse(self, version: Version) -> None:
        """An admitted request has ended or gone back to the queue."""
        version.uses -= 1
        for queue in (self._wanting, self._unread):
            if version.uses == 0 and version in queue:
                queue.remove(version)
        self._read_waiting()
        self.fill_device()

    def begin_aside(self, version: Version) -> None:
        """A plan goes aside: CPU workers read the version's image until `end_aside`, whatever has arrived by then."""
        version.asides += 1

    def end_aside(self, version: Version) -> None:
        """It has ended."""
        version.asides -= 1
        if version.asides == 0:
            if version.copy_error is not None:
                self._copied(version, version.copy_error)
            self._read_waiting()

    def preload(self, name: str) -> None:
        """Brings a version to the device and keeps it there for ever."""
        self.use(self.pin(name))

    def check(self) -> None:
        """Raises AssertionError when sums differ from their parts."""
        self.device.check()
        self._host.check({digest for digest, version in self._versions.items() if version.tier is Tier.READING})

    def on_device(self) -> list[Version]:
        """Versions that requests can run on now."""
        return self.device.ready()

    def in_host(self) -> list[Version]:
        """Versions whose image is in the host tier, whether or not it is on the device as well."""
        return [self._versions[digest] for digest in self._host if digest in self._versions]

    # --- disk → host ---

    def _queue_read(self, version: Version) -> None:
        if version.tier is Tier.FAILED:
            version.to(Tier.DISK)  # this attempt has not failed yet
        self._unread.append(version)
        self._read_waiting()

    def _start_read(self, version: Version) -> bool:
        """False when there is no room for it in the arena."""
        if (image := self._host.get(version.digest)) is not None:
            self.counters.host_hits += 1
            self._host.touch(version.digest)
            version.to(Tier.HOST)
            self._arrived(version, image)
            return True
        return self._read_into_host(version, self._needs_image)

    def _read_into_host(self, version: Version, is_needed: Callable[[str], bool]) -> bool:
        extent = self._host.take(version.digest, version.num_bytes, is_needed, self._evict_from_host)
        if extent is None:
            return False
        version.to(Tier.READING)
        version.error = None
        self.loading += 1
        self.counters.disk_reads += 1
        self._read(version.source, extent, lambda result: self._read_done(version, result))
        return True

    def _needs_image(self, digest: str) -> bool:
        """Whether an image is about to be copied to the device, or is being copied: kernels may read it meanwhile."""
        version = self._versions.get(digest)
        if version is None:
            return False
        return version.tier is Tier.COPYING or version.asides > 0 or (version.tier is Tier.HOST and version.uses > 0)

    def _claims_image(self, digest: str) -> bool:
        """Whether an open request needs an image, or will."""
        version = self._versions.get(digest)
        return self._needs_image(digest) or (version is not None and version.tier is Tier.HOST and version.pins > 0)

    def _read_done(self, version: Version, result: HostAdapter | CaraServeError) -> None:
        self.loading -= 1
        self._prefetching.discard(version.digest)
        if isinstance(result, HostAdapter) and result.spec.digest != version.digest:
            result = AdapterRejected(f"{version.source.name}: the files have changed since the adapter was loaded")
        if isinstance(result, CaraServeError):
            self._host.drop(version.digest)
            self._fail(version, result)
        else:
            version.to(Tier.HOST)
            self._host.keep(version.digest, result)
            self._arrived(version, result)
        self._read_waiting()

    def _read_waiting(self) -> None:
        """Starts reads as far as there is room in the arena. None passes another, or that could wait for ever."""
        while self._unread:
            if not self._start_read(version := self._unread.popleft()):
                self._unread.appendleft(version)
                return

    def _arrived(self, version: Version, image: HostAdapter) -> None:
        try:
            version.device_bytes = self.device.measure(image.spec)
        except AdapterRejected as refusal:
            self._fail(version, refusal)
        else:
            go_on = self._want if version.uses else self._forget_if_unused
            go_on(version)
        self._notify()

    def _drop_from_host(self, digest: str) -> None:
        self._host.drop(digest)
        version = self._versions.get(digest)
        if version is not None and version.tier is Tier.HOST:
            version.to(Tier.DISK)

    def _evict_from_host(self, digest: str) -> None:
        self._drop_from_host(digest)
        self.counters.host_evictions += 1

    def _fail(self, version: Version, error: CaraServeError) -> None:
        self.counters.failures += 1
        self._observe_load(self._now() - version.asked_s, False)
        version.fail(error, self._now())
        self._forget_if_unused(version)
        self._notify()

    # --- host → device ---

    def _want(self, version: Version) -> None:
        self._wanting.append(version)
        self.fill_device()

    def fill_device(self) -> None:
        """Starts copies in the order of asking, as far as idle adapters and KV blocks that nobody holds make room."""
        while self._wanting:
            version = self._wanting[0]
            image = self._host.get(version.digest)
            if image is None or version.uses == 0:
                self._wanting.popleft()
                if version.uses:
                    self._queue_read(version)
                continue
            if not self.device.make_room(version.device_bytes, self._evict_from_device):
                return
            self._wanting.popleft()
            self._bypasses = 0
            self._copy(version, image)

    @property
    def claims_memory(self) -> bool:
        """Whether an adapter that an admitted request needs waits for memory which KV blocks take."""
        wanted = self._wanting and self.room.is_shared
        return bool(wanted and not self.room.over_cap(self._wanting[0].device_bytes))

    def grow_kv(self, needed: int, ahead: int) -> None:
        """Asks for KV blocks that requests need now, and for some ahead of need where no adapter waits for memory. Idle
        adapters give way. Nothing happens while blocks are under way."""
        ahead = 0 if self.claims_memory else ahead
        self.device.grow_kv(needed + ahead, self._evict_from_device, lambda: self._on_loop(self._kv_grown))

    def _kv_grown(self) -> None:
        self.room.grown()
        self.fill_device()
        self._notify()

    def _copy(self, version: Version, image: HostAdapter) -> None:
        version.to(Tier.COPYING)
        self.device.add(version)
        self._host.touch(version.digest)
        self.loading += 1
        version.spec, version.groups = image.spec, self.arrivals.expect(image.spec)

        def done(error: Exception | None) -> None:
            self._on_loop(lambda: self._copied(version, error))

        self._backend.load_adapter(image, version.slot, done, [group.end for group in version.groups])

    def _copied(self, version: Version, error: Exception | None) -> None:
        if error is not None and version.asides:
            version.copy_error = error  # its memory cannot be taken from under the plan
            return
        version.copy_error = None
        self.loading -= 1
        if not self.device.is_arriving(beside=version):
            self.arrivals.all_there()
        if error is not None:
            self._backend.unload_adapter(version.slot)
            self.device.remove(version)
            self._fail(version, CaraServeError(f"the adapter could not be copied to the device: {error}"))
            self._read_waiting()
            self.fill_device()
            return
        version.to(Tier.DEVICE)
        version.groups = ()
        self._observe_load(self._now() - version.asked_s, True)
        self._forget_if_unused(version)
        self._read_waiting()  # its image may give way now
        self.fill_device()  # whoever asked for it may have left meanwhile: then it can give way at once
        self._notify()

    def _drop_from_device(self, version: Version) -> None:
        self._backend.unload_adapter(version.slot)
        self.device.remove(version)
        version.to(Tier.HOST if version.digest in self._host else Tier.DISK)

    def _evict_from_device(self, version: Version) -> None:
        self._drop_from_device(version)
        self.counters.device_evictions += 1

    def _forget_if_unused(self, version: Version) -> None:
        if version.pins or version.names or self.is_forgotten(version):
            return
        if version.tier in (Tier.READING, Tier.COPYING):
            return  # comes back here when the move is over
        if version.tier is Tier.DEVICE:
            self._drop_from_device(version)
        if version.digest in self._host:
            self._drop_from_host(version.digest)
        del self._versions[version.digest]
        self._read_waiting()
        self._notify()

    def _notify(self) -> None:
        self._changed()
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()
