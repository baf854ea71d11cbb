"""Where each adapter version is, and who needs it there: disk → host → device. Level 2.

`loop.py` pins a version when a request is submitted and asks for it on the device when the request is admitted; loads
run beside everything else and wake the loop when they end. A version is a content digest: names point to versions, a
name loaded again points to a new one, and the old one lives until its last request ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.adapters.host_tier import HostTier
from caraserve.adapters.loading import LAYERWISE_MODES, Group, Loading, Start
from caraserve.adapters.version import Counters, Tier, Version
from caraserve.cpu.arena import Arena
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.model.backend import Backend
from caraserve.model.layout import AdapterSpec, HostAdapter
from caraserve.plan import BASE_ADAPTER_SLOT

_HALF_LIFE_S = 60.0  # of the request rate that eviction goes by
MAX_BYPASSES = 64  # admissions that may pass an adapter which waits for device room

Read = Callable[[Path, NDArray[np.uint8], Callable[[HostAdapter | CaraServeError], None]], None]


class Residency:
    """Moves versions between tiers. Not thread-safe: everything, callbacks included, runs on the event loop.

    `read(folder, into, done)` reads an adapter into an extent of the arena elsewhere and calls `done` on the event
    loop; callbacks of the backend are brought there by `on_loop`.
    """

    def __init__(
        self,
        backend: Backend,
        device_bytes: int,
        arena: Arena,
        read: Read,
        on_loop: Callable[[Callable[[], None]], None],
        now: Callable[[], float],
        loading: Loading,
        observe_load: Callable[[float, bool], None] = lambda seconds, ok: None,  # seconds since asked, success
    ) -> None:
        self._backend, self._device_budget, self._read = backend, device_bytes, read
        self._on_loop, self._now, self._loading = on_loop, now, loading
        self._link_free_s = 0.0  # when the link is expected to have done all that it was asked
        self._changed: Callable[[], None] = lambda: None
        self._observe_load = observe_load
        self._settling: list[asyncio.Event] = []
        self._draining: list[tuple[Version, asyncio.Event]] = []
        self._versions: dict[str, Version] = {}
        self._names: dict[str, Version] = {}
        self._host = HostTier(arena)
        self._unread: deque[Version] = deque()  # on disk, waiting for room in the arena
        self._device_bytes = 0
        self._resident: dict[str, Version] = {}  # COPYING or DEVICE
        self._free_slots = list(range(backend.limits.adapter_slots - 1, BASE_ADAPTER_SLOT, -1))
        self._wanting: deque[Version] = deque()  # in the host tier, waiting for device room
        self._bypasses = 0
        self.loading = 0  # reads and copies under way
        self.counters = Counters()

    # --- names and pins ---

    def register(self, name: str, digest: str, folder: Path, num_bytes: int) -> None:
        """Points `name` at a version of so many bytes; the version it pointed at before drains."""
        version = self._versions.get(digest)
        if version is None:
            version = self._versions[digest] = Version(digest, folder, num_bytes)
        version.folder = folder  # the same bytes may have moved
        old = self._names.get(name)
        self._names[name] = version
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
        if version.names or self.is_forgotten(version):
            return
        event = asyncio.Event()
        self._draining.append((version, event))
        await event.wait()

    async def settled(self) -> None:
        """Returns when no load is under way or wanted."""
        while self.loading or self._wanting or self._unread:
            event = asyncio.Event()
            self._settling.append(event)
            await event.wait()

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
        self._rate(version)
        self._bypasses += 1 if self._wanting else 0
        if version.tier is Tier.DEVICE:
            self.counters.device_hits += 1
        elif version.tier is Tier.HOST and version not in self._wanting:
            self.counters.host_hits += 1
            version.asked_s = self._now()
            self._want(version)
        elif version.tier in (Tier.DISK, Tier.FAILED) and version not in self._unread:
            version.asked_s = self._now()
            self._queue_read(version)

    def unuse(self, version: Version) -> None:
        """An admitted request has ended or gone back to the queue."""
        version.uses -= 1
        for queue in (self._wanting, self._unread):
            if version.uses == 0 and version in queue:
                queue.remove(version)
        self._read_waiting()
        self._fill_device()

    def preload(self, name: str) -> None:
        """Brings a version to the device and keeps it there for ever."""
        self.use(self.pin(name))

    def check(self) -> None:
        """Raises AssertionError when sums differ from their parts."""
        on_device = list(self._resident.values())
        assert all(version.tier in (Tier.COPYING, Tier.DEVICE) for version in on_device), "not resident"
        assert self._device_bytes == sum(version.device_bytes for version in on_device), "device bytes differ"
        slots = [version.slot for version in on_device]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots), "a slot has two owners"
        assert len(slots) + len(self._free_slots) == self._backend.limits.adapter_slots - 1, "a slot is lost"
        self._host.check({digest for digest, version in self._versions.items() if version.tier is Tier.READING})
        assert self._device_bytes <= self._device_budget, "the device tier is over its budget"

    def on_device(self) -> list[Version]:
        """Versions that requests can run on now."""
        return [version for version in self._resident.values() if version.tier is Tier.DEVICE]

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
        extent = self._host.take(version.digest, version.num_bytes, self._needs_image, self._evict_from_host)
        if extent is None:
            return False
        version.to(Tier.READING)
        version.error = None
        self.loading += 1
        self.counters.disk_reads += 1
        self._read(version.folder, extent, lambda result: self._read_done(version, result))
        return True

    def _needs_image(self, digest: str) -> bool:
        """Whether an image is about to be copied to the device, or is being copied: kernels may read it meanwhile."""
        version = self._versions.get(digest)
        return version is not None and (
            version.tier is Tier.COPYING or (version.tier is Tier.HOST and version.uses > 0)
        )

    def _read_done(self, version: Version, result: HostAdapter | CaraServeError) -> None:
        self.loading -= 1
        if isinstance(result, HostAdapter) and result.spec.digest != version.digest:
            result = AdapterRejected(f"{version.folder.name}: the files have changed since the adapter was loaded")
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
        version.device_bytes = image.spec.num_bytes
        if version.device_bytes > self._device_budget:
            self._fail(version, too_large(version.device_bytes, self._device_budget, "--max-device-adapters-bytes"))
        elif version.uses:
            self._want(version)
        else:
            self._forget_if_unused(version)
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
        version.error = error
        version.to(Tier.FAILED)
        self._forget_if_unused(version)
        self._notify()

    # --- host → device ---

    def _want(self, version: Version) -> None:
        self._wanting.append(version)
        self._fill_device()

    def _fill_device(self) -> None:
        """Starts copies in the order of asking, as far as idle adapters make room."""
        while self._wanting:
            version = self._wanting[0]
            image = self._host.get(version.digest)
            if image is None or version.uses == 0:
                self._wanting.popleft()
                if version.uses:
                    self._queue_read(version)
                continue
            if not self._make_room(version.device_bytes):
                return
            self._wanting.popleft()
            self._bypasses = 0
            self._copy(version, image)

    def _make_room(self, num_bytes: int) -> bool:
        """Evicts idle adapters, least (reload time × recent rate) first; all or nothing."""
        idle = sorted(
            (v for v in self._resident.values() if v.tier is Tier.DEVICE and v.uses == 0),
            key=lambda version: version.device_bytes * self._decayed(version),
        )
        excess = self._device_bytes + num_bytes - self._device_budget
        slots_missing = 0 if self._free_slots else 1
        victims: list[Version] = []
        while idle and (excess > 0 or len(victims) < slots_missing):
            victims.append(idle.pop(0))
            excess -= victims[-1].device_bytes
        if excess > 0 or len(victims) < slots_missing:
            return False
        for victim in victims:
            self._drop_from_device(victim)
            self.counters.device_evictions += 1
        return True

    def _copy(self, version: Version, image: HostAdapter) -> None:
        version.to(Tier.COPYING)
        version.slot = self._free_slots.pop()
        self._device_bytes += version.device_bytes
        self._resident[version.digest] = version
        self._host.touch(version.digest)
        self.loading += 1
        ends = self._loading.group_ends(image.spec)
        version.spec, version.groups = image.spec, self._expect(image.spec, ends)

        def done(error: Exception | None) -> None:
            self._on_loop(lambda: self._copied(version, error))

        self._backend.load_adapter(image, version.slot, done, ends)

    def _expect(self, spec: AdapterSpec, ends: Sequence[int]) -> tuple[Group, ...]:
        """When groups of layers are expected on the device, behind all loads before."""
        starts_s = max(self._now(), self._link_free_s)
        speed = self._loading.link_bytes_per_s
        self._link_free_s = starts_s + spec.num_bytes / speed
        return tuple(Group(end, starts_s + spec.layer_ends[end - 1] / speed) for end in ends)

    def start_of(self, version: Version, tokens: int, begins_s: float) -> Start | None:
        """When a request whose first chunk has so many tokens may run on a version, `begins_s` at the earliest; None:
        not yet known."""
        if version.tier is Tier.DEVICE:
            return Start(begins_s, assist=False)
        if version.tier is Tier.COPYING and self._loading.mode in LAYERWISE_MODES:
            assert version.spec is not None
            return self._loading.start(begins_s, version.groups, version.spec, tokens)
        return None

    def _copied(self, version: Version, error: Exception | None) -> None:
        self.loading -= 1
        if not any(other.tier is Tier.COPYING and other is not version for other in self._resident.values()):
            self._link_free_s = self._now()  # whatever was expected
        if error is not None:
            self._backend.unload_adapter(version.slot)
            self._release_device(version)
            self._fail(version, CaraServeError(f"the adapter could not be copied to the device: {error}"))
            self._read_waiting()
            self._fill_device()
            return
        version.to(Tier.DEVICE)
        version.groups = ()
        self._observe_load(self._now() - version.asked_s, True)
        self._forget_if_unused(version)
        self._read_waiting()  # its image may give way now
        self._fill_device()  # whoever asked for it may have left meanwhile: then it can give way at once
        self._notify()

    def _drop_from_device(self, version: Version) -> None:
        self._backend.unload_adapter(version.slot)
        self._release_device(version)
        version.to(Tier.HOST if version.digest in self._host else Tier.DISK)

    def _release_device(self, version: Version) -> None:
        del self._resident[version.digest]
        self._free_slots.append(version.slot)
        version.slot = BASE_ADAPTER_SLOT
        self._device_bytes -= version.device_bytes

    # --- forgetting and rates ---

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
        for entry in [entry for entry in self._draining if entry[0] is version]:
            entry[1].set()
            self._draining.remove(entry)
        self._notify()

    def _notify(self) -> None:
        self._changed()
        waiting, self._settling = self._settling, []
        for event in waiting:
            event.set()

    def _decayed(self, version: Version) -> float:
        return float(version.rate * 0.5 ** ((self._now() - version.rated_s) / _HALF_LIFE_S))

    def _rate(self, version: Version) -> None:
        version.rate, version.rated_s = self._decayed(version) + 1.0, self._now()


def too_large(num_bytes: int, budget_bytes: int, flag: str) -> AdapterRejected:
    """The refusal of an adapter that can never be in a tier."""
    return AdapterRejected(f"the adapter takes {num_bytes} bytes, more than {flag} {budget_bytes}")
