"""Where each adapter version is, and who needs it there: disk → host → device.

`loop.py` pins a version when a request is submitted and asks for it on the device when the request is admitted; loads
run beside everything else and wake the loop when they end. A version is a content digest: names point to versions, a
name loaded again points to a new one, and the old one lives until its last request ends.
"""

import asyncio
from collections.abc import Callable

from caraserve.core.backend import Backend
from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.arena import Arena
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import Adapter, AdapterTier, CacheCounters, RemoteSource, Source
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.device_cache import DeviceCache
from caraserve.lora.device_loader import DeviceLoader
from caraserve.lora.host_cache import HostCache
from caraserve.lora.host_loader import HostLoader, ReadAdapter
from caraserve.lora.start_policy import StartPolicy


class AdapterManager:
    """Moves versions between tiers. Not thread-safe: everything, callbacks included, runs on the event loop.

    Callbacks of the backend are brought there by `on_loop`.
    """

    def __init__(
        self,
        backend: Backend,
        room: MemoryBudget,
        arena: Arena,
        read: ReadAdapter,
        on_loop: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
        loading: StartPolicy,
        observe_load: Callable[[float, bool], None] = lambda seconds, ok: None,  # seconds since asked, success
    ) -> None:
        self.room, self._now, self._observe_load = room, now, observe_load
        self.arrivals = ArrivalEstimates(loading, now)
        self._changed: Callable[[], None] = lambda: None
        self._waiting: list[asyncio.Event] = []
        self._versions: dict[str, Adapter] = {}
        self._names: dict[str, Adapter] = {}
        self._host = HostCache(arena)
        self.counters = CacheCounters()
        self._reads = HostLoader(self._host, read, self, self.counters, now)
        self.device = DeviceCache(backend, room, lambda version: version.device_bytes * version.rate_at(now()))
        self.copies = DeviceLoader(backend, room, self._host, self.device, self.arrivals, self, self.counters, on_loop)

    # --- names and pins ---

    def register(self, name: str, digest: str, source: Source, num_bytes: int) -> None:
        """Points `name` at a version of so many bytes; the version it pointed at before drains."""
        version = self._versions.get(digest)
        if version is None:
            version = self._versions[digest] = Adapter(digest, source, num_bytes)
        if not isinstance(source, RemoteSource):
            version.source = source  # the same bytes may have moved
        old, self._names[name] = self._names.get(name), version
        version.names.add(name)
        if old is not None and old is not version:
            old.names.discard(name)
            self._forget_if_unused(old)

    def unregister(self, name: str) -> Adapter:
        """Takes a name away; its version is forgotten when nothing pins or names it."""
        version = self._names.pop(name)
        version.names.discard(name)
        self._forget_if_unused(version)
        return version

    def pin(self, name: str) -> Adapter:
        """The version that `name` means now, held until `unpin`. Raises KeyError for an unknown name."""
        return self.hold(self._names[name])

    def hold(self, version: Adapter) -> Adapter:
        """Pins one that is pinned already, whatever its name means by now."""
        version.pins += 1
        return version

    def unpin(self, version: Adapter) -> None:
        """A request that pinned `version` has ended."""
        version.pins -= 1
        self._forget_if_unused(version)
        self.changed()

    def on_change(self, changed: Callable[[], None]) -> None:
        """`changed` is called after every change that may let a request go on."""
        self._changed = changed

    async def forgotten(self, version: Adapter) -> None:
        """Returns when an unregistered version's last request has ended and its memory has been given back."""
        while not (version.names or self.is_forgotten(version)):
            await self.next_change()

    @property
    def loading(self) -> int:
        """Reads and copies under way."""
        return self._reads.under_way + self.copies.under_way

    async def settled(self) -> bool:
        """Waits until no load is under way. Returns whether none is wanted either, for which there would be no room."""
        while self.loading:
            await self.next_change()
        return not self.copies.are_waiting and not self._reads.are_waiting

    async def next_change(self) -> None:
        """Returns when a version has changed its tier or lost a pin."""
        self._waiting.append(event := asyncio.Event())
        await event.wait()

    def find(self, digest: str) -> Adapter | None:
        """The version of that digest, if a name or a request has it."""
        return self._versions.get(digest)

    def image(self, digest: str) -> HostAdapter | None:
        """What the host tier has of a digest."""
        return self._host.get(digest)

    def error_of(self, name: str) -> CaraServeError | None:
        """Why the last load of a name failed, if it did."""
        return self._names[name].error

    def is_forgotten(self, version: Adapter) -> bool:
        """Whether an unregistered version's memory has been given back."""
        return self._versions.get(version.digest) is not version

    # --- the device ---

    def use(self, version: Adapter) -> None:
        """A request is admitted: the version is to come to the device and stay there until `unuse`."""
        version.uses += 1
        version.count_admission(self._now())
        self.copies.passed(version)
        if version.tier is AdapterTier.DEVICE:
            self.counters.device_hits += 1
        elif version.tier is AdapterTier.HOST and version not in self.copies:
            self.counters.host_hits += 1
            version.asked_s = self._now()
            self.copies.want(version)
        elif version.tier is AdapterTier.FAILED and version.uses > 1:
            pass  # those who had it before are still to be told that it failed, and so is this one
        elif version.tier in (AdapterTier.DISK, AdapterTier.FAILED) and version not in self._reads:
            version.asked_s = self._now()
            self._reads.ask(version)
        elif version.tier is AdapterTier.READING and version.uses == 1:
            version.asked_s = self._now()
            self.copies.stream(version)

    def prefetch(self, version: Adapter) -> None:
        """A request that is not admitted yet will want the version."""
        self._reads.ask_ahead(version)

    def unuse(self, version: Adapter) -> None:
        """An admitted request has ended or gone back to the queue."""
        version.uses -= 1
        if version.uses == 0:
            self._reads.forget(version)
            self.copies.forget(version)
        self._reads.go_on()
        self.copies.go_on()

    def begin_aside(self, version: Adapter) -> None:
        """A plan goes aside: it may read the version's image until `end_aside`, whatever has arrived by then."""
        version.asides += 1

    def end_aside(self, version: Adapter) -> None:
        """It has ended."""
        version.asides -= 1
        if version.asides == 0:
            self.copies.end_failed(version)
            self._reads.go_on()

    def preload(self, name: str) -> None:
        """Brings a version to the device and keeps it there for ever."""
        self.use(self.pin(name))

    def check(self) -> None:
        """Raises AssertionError when sums differ from their parts."""
        self.device.check()
        coming = (AdapterTier.READING, AdapterTier.STREAMING)
        self._host.check({digest for digest, version in self._versions.items() if version.tier in coming})

    def on_device(self) -> list[Adapter]:
        """Versions that requests can run on now."""
        return self.device.ready()

    def in_host(self) -> list[Adapter]:
        """Versions whose image is in the host tier, whether or not it is on the device as well."""
        return [self._versions[digest] for digest in self._host if digest in self._versions]

    # --- what reads tell and ask ---

    def evict_from_host(self, digest: str) -> None:
        """An image gives way."""
        self._host.drop(digest)
        self.counters.host_evictions += 1
        if (version := self.find(digest)) is not None and version.tier is AdapterTier.HOST:
            version.to(AdapterTier.DISK)

    def grew(self, version: Adapter) -> None:
        """More layers of a version that is being read are in the host tier."""
        (self.copies.grew if version.tier is AdapterTier.STREAMING else self.copies.stream)(version)

    def arrived(self, version: Adapter, image: HostAdapter) -> None:
        """A version is in the host tier, whole."""
        if version.tier is AdapterTier.STREAMING:
            self.copies.completed(version, len(image.spec.layer_ends))
            return
        version.to(AdapterTier.HOST)
        try:
            version.device_bytes = self.device.measure(image.spec)
        except AdapterRejected as refusal:
            self._fail(version, refusal)
        else:
            (self.copies.want if version.uses else self._forget_if_unused)(version)
        self.changed()

    def not_read(self, version: Adapter, error: CaraServeError) -> None:
        """A version could not be read to its end."""
        if version.tier is AdapterTier.STREAMING:
            self.copies.broke(version, error)
        else:
            self._host.drop(version.digest)
            self._fail(version, error)

    # --- what copies tell and ask ---

    def gone_from_host(self, version: Adapter) -> None:
        """A version that is wanted on the device gave way in the host tier meanwhile."""
        self._reads.ask(version)

    def copied(self, version: Adapter) -> None:
        """A version is on the device, whole."""
        self._observe_load(self._now() - version.asked_s, True)
        self._forget_if_unused(version)
        self._reads.go_on()  # its image may give way now
        self.copies.go_on()  # whoever asked for it may have left meanwhile: then it can give way at once
        self.changed()

    def not_copied(self, version: Adapter, error: CaraServeError) -> None:
        """A version has left the device again: its copy has failed, or what was to be copied has not come."""
        if version.tier is AdapterTier.STREAMING:
            self._host.drop(version.digest)
        self._fail(version, error)
        self._reads.go_on()
        self.copies.go_on()

    def changed(self) -> None:
        """Something has changed that may let a request go on."""
        self._changed()
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()

    def _fail(self, version: Adapter, error: CaraServeError) -> None:
        self.counters.failures += 1
        self._observe_load(self._now() - version.asked_s, False)
        version.fail(error, self._now())
        self._forget_if_unused(version)
        self.changed()

    def _forget_if_unused(self, version: Adapter) -> None:
        if version.pins or version.names or self.is_forgotten(version):
            return
        if version.tier in (AdapterTier.READING, AdapterTier.STREAMING, AdapterTier.COPYING):
            return  # comes back here when the move is over
        if version.tier is AdapterTier.DEVICE:
            self.copies.drop(version)
        if version.digest in self._host:
            self._host.drop(version.digest)
        del self._versions[version.digest]
        self._reads.go_on()
        self.changed()
