"""Where each adapter version is, and who needs it there: disk → host → device. Level 2.

`loop.py` pins a version when a request is submitted and asks for it on the device when the request is admitted; loads
run beside everything else and wake the loop when they end. A version is a content digest: names point to versions, a
name loaded again points to a new one, and the old one lives until its last request ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from caraserve.adapters.arrivals import Arrivals
from caraserve.adapters.device_tier import DeviceTier
from caraserve.adapters.host_tier import HostTier
from caraserve.adapters.loading import Loading
from caraserve.adapters.reads import Read, Reads
from caraserve.adapters.version import Counters, Pooled, Source, Tier, Version
from caraserve.cpu.arena import Arena
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.kv.room import Room
from caraserve.model.backend import Backend
from caraserve.model.layout import HostAdapter

MAX_BYPASSES = 64  # admissions that may pass an adapter which waits for device room


class Residency:
    """Moves versions between tiers. Not thread-safe: everything, callbacks included, runs on the event loop.

    Callbacks of the backend are brought there by `on_loop`.
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
        self._backend, self.room = backend, room
        self._on_loop, self._now, self._observe_load = on_loop, now, observe_load
        self.arrivals = Arrivals(loading, now)
        self._changed: Callable[[], None] = lambda: None
        self._waiting: list[asyncio.Event] = []
        self._versions: dict[str, Version] = {}
        self._names: dict[str, Version] = {}
        self._host = HostTier(arena)
        self.counters = Counters()
        self._reads = Reads(self._host, read, self, self.counters, now)
        self.device = DeviceTier(backend, room, lambda version: version.device_bytes * version.rate_at(now()))
        self._wanting: deque[Version] = deque()  # in the host tier, waiting for device room
        self._bypasses = 0
        self._copies = 0  # under way

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

    @property
    def loading(self) -> int:
        """Reads and copies under way."""
        return self._reads.under_way + self._copies

    async def settled(self) -> bool:
        """Waits until no load is under way. Returns whether none is wanted either, for which there would be no room."""
        while self.loading:
            await self.next_change()
        return not self._wanting and not self._reads.are_waiting

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
        elif version.tier in (Tier.DISK, Tier.FAILED) and version not in self._reads:
            version.asked_s = self._now()
            self._reads.ask(version)
        elif version.tier is Tier.READING and version.uses == 1:
            version.asked_s = self._now()
            self._stream(version)

    def passed(self) -> None:
        """A request without adapter is admitted, which may take memory that an adapter waits for."""
        self._bypasses += 1 if self.claims_memory else 0

    def prefetch(self, version: Version) -> None:
        """A request that is not admitted yet will want the version."""
        self._reads.ask_ahead(version)

    def unuse(self, version: Version) -> None:
        """An admitted request has ended or gone back to the queue."""
        version.uses -= 1
        if version.uses == 0:
            self._reads.forget(version)
            if version in self._wanting:
                self._wanting.remove(version)
        self._reads.go_on()
        self.fill_device()

    def begin_aside(self, version: Version) -> None:
        """A plan goes aside: CPU workers read the version's image until `end_aside`, whatever has arrived by then."""
        version.asides += 1

    def end_aside(self, version: Version) -> None:
        """It has ended."""
        version.asides -= 1
        if version.asides == 0:
            self._end_failed_copy(version)
            self._reads.go_on()

    def preload(self, name: str) -> None:
        """Brings a version to the device and keeps it there for ever."""
        self.use(self.pin(name))

    def check(self) -> None:
        """Raises AssertionError when sums differ from their parts."""
        self.device.check()
        coming = (Tier.READING, Tier.STREAMING)
        self._host.check({digest for digest, version in self._versions.items() if version.tier in coming})

    def on_device(self) -> list[Version]:
        """Versions that requests can run on now."""
        return self.device.ready()

    def in_host(self) -> list[Version]:
        """Versions whose image is in the host tier, whether or not it is on the device as well."""
        return [self._versions[digest] for digest in self._host if digest in self._versions]

    # --- what reads tell and ask ---

    def evict_from_host(self, digest: str) -> None:
        """An image gives way."""
        self._host.drop(digest)
        self.counters.host_evictions += 1
        if (version := self.find(digest)) is not None and version.tier is Tier.HOST:
            version.to(Tier.DISK)

    def grew(self, version: Version) -> None:
        """More layers of a version that is being read are in the host tier."""
        assert version.partial is not None
        if version.tier is Tier.STREAMING and not version.gives_way:
            version.groups = self.arrivals.expect_streamed(version.partial)
            self._backend.extend_load(version.slot, version.partial.layers)
            self._notify()
        elif version.tier is Tier.READING:
            self._stream(version)

    def arrived(self, version: Version, image: HostAdapter) -> None:
        """A version is in the host tier, whole."""
        if version.tier is Tier.STREAMING and version.gives_way:
            return  # comes back here when it has left the device
        if version.tier is Tier.STREAMING:
            version.to(Tier.COPYING)
            version.groups = self.arrivals.expect_rest(version)
            self._backend.extend_load(version.slot, len(image.spec.layer_ends))
            self._end_failed_copy(version)
            self._notify()
            return
        version.to(Tier.HOST)
        try:
            version.device_bytes = self.device.measure(image.spec)
        except AdapterRejected as refusal:
            self._fail(version, refusal)
        else:
            (self._want if version.uses else self._forget_if_unused)(version)
        self._notify()

    def not_read(self, version: Version, error: CaraServeError) -> None:
        """A version could not be read to its end. What was copied of it goes when nobody waits for the rest."""
        if version.tier is Tier.STREAMING:
            version.error = error
            if not version.gives_way:
                self._break_load(version, error)
        else:
            self._host.drop(version.digest)
            self._fail(version, error)

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
                    self._reads.ask(version)
                continue
            if not self.device.make_room(version.device_bytes, self._evict_from_device):
                self._stop_streaming()
                return
            self._wanting.popleft()
            self._bypasses = 0
            self._copy(version, image)

    def _stop_streaming(self) -> None:
        """What waits for the network gives its room to an adapter that is here, and comes when it is whole: a network
        may stand still for as long as it likes."""
        for version in self.device.streaming():
            if version.error is None and not version.gives_way:
                version.gives_way = True
                self._break_load(version, CaraServeError("its room is wanted"))

    def _break_load(self, version: Version, cause: Exception) -> None:
        """No more of a streamed version is copied. Its plans aside end void; then it leaves the device."""
        self._backend.break_load(version.slot, cause)
        self._end_failed_copy(version)

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
        self._host.touch(version.digest)
        version.groups = self.arrivals.expect(image.spec)
        self._load(version, image, None)

    def _stream(self, version: Version) -> None:
        """Begins to copy what has come so far of a version that is being read, where the device can use it and there is
        room that nobody waits for; otherwise it is copied when it is whole."""
        partial = version.partial
        is_of_use = version.uses and not version.gives_way and self.arrivals.by_layers
        if partial is None or not is_of_use or len(self.device.streaming()) >= self._backend.limits.streamed_plans:
            return
        try:
            version.device_bytes = self.device.measure(partial.image.spec)
        except AdapterRejected:
            return  # which is said when it is whole
        if not self._wanting and self.device.make_room(version.device_bytes, self._evict_from_device):
            version.to(Tier.STREAMING)
            version.groups = self.arrivals.expect_streamed(partial)
            self._load(version, partial.image, partial.layers)
            self._notify()

    def _load(self, version: Version, image: HostAdapter, layers: int | None) -> None:
        self.device.add(version)
        self._copies += 1
        version.spec = image.spec

        def done(error: Exception | None) -> None:
            self._on_loop(lambda: self._copied(version, error))

        group_ends = [group.end for group in version.groups]
        self._backend.load_adapter(image, version.slot, done, group_ends, layers)

    def _copied(self, version: Version, error: Exception | None) -> None:
        is_coming = version.tier is Tier.STREAMING and version.error is None and not version.gives_way
        if error is not None and (version.asides or is_coming):
            version.copy_error = error  # its memory cannot be taken from under the plan, or the read
            return
        version.copy_error = None
        self._copies -= 1
        if not self.device.is_arriving(beside=version):
            self.arrivals.all_there()
        if version.tier is Tier.STREAMING and version.gives_way and version.error is None:
            self._set_back(version)
            return
        if error is not None:
            failure = CaraServeError(f"the adapter could not be copied to the device: {error}")
            self._lose(version, version.error or failure)
            return
        version.to(Tier.DEVICE)
        version.groups = ()
        self._observe_load(self._now() - version.asked_s, True)
        self._forget_if_unused(version)
        self._reads.go_on()  # its image may give way now
        self.fill_device()  # whoever asked for it may have left meanwhile: then it can give way at once
        self._notify()

    def _end_failed_copy(self, version: Version) -> None:
        """A plan aside or a read has ended, for which a copy that failed may have been left as it was."""
        if version.copy_error is not None:
            self._copied(version, version.copy_error)

    def _lose(self, version: Version, error: CaraServeError) -> None:
        """A copy has failed, or what was to be copied has not come; nobody reads any of it."""
        self._leave_device(version)
        if version.tier is Tier.STREAMING:
            self._host.drop(version.digest)
        self._fail(version, error)
        self._reads.go_on()
        self.fill_device()

    def _set_back(self, version: Version) -> None:
        """A streamed version has given way: it is only being read from now on, or whole in the host tier by now."""
        self._leave_device(version)
        version.to(Tier.READING)
        if (image := self._host.get(version.digest)) is not None:
            self.arrived(version, image)
        self.fill_device()
        self._notify()

    def _drop_from_device(self, version: Version) -> None:
        self._leave_device(version)
        version.to(Tier.HOST if version.digest in self._host else Tier.DISK)

    def _leave_device(self, version: Version) -> None:
        self._backend.unload_adapter(version.slot)
        self.device.remove(version)

    def _evict_from_device(self, version: Version) -> None:
        self._drop_from_device(version)
        self.counters.device_evictions += 1

    def _forget_if_unused(self, version: Version) -> None:
        if version.pins or version.names or self.is_forgotten(version):
            return
        if version.tier in (Tier.READING, Tier.STREAMING, Tier.COPYING):
            return  # comes back here when the move is over
        if version.tier is Tier.DEVICE:
            self._drop_from_device(version)
        if version.digest in self._host:
            self._host.drop(version.digest)
        del self._versions[version.digest]
        self._reads.go_on()
        self._notify()

    def _notify(self) -> None:
        self._changed()
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()
