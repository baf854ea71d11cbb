"""Versions on their way to the device, and those that wait for room there. For `manager.py`.

What is whole in the host tier is copied from there, in the order of asking. What other instances still send may be
copied as far as it has come, where the device can use that; it has no claim to its room, for a network may stand still
as long as it likes: when others want it, it leaves the device again and comes when it is whole.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from caraserve.core.backend import Backend
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import Adapter, AdapterTier, CacheCounters
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.device_cache import DeviceCache
from caraserve.lora.host_cache import HostCache

MAX_BYPASSES = 64  # admissions that may pass an adapter which waits for device room


class DeviceLoaderOwner(Protocol):
    """`Residency`, as far as copies concern it."""

    def gone_from_host(self, version: Adapter) -> None: ...
    def arrived(self, version: Adapter, image: HostAdapter) -> None: ...
    def copied(self, version: Adapter) -> None: ...
    def not_copied(self, version: Adapter, error: CaraServeError) -> None: ...
    def changed(self) -> None: ...


class DeviceLoader:
    """Not thread-safe: everything, callbacks of the backend included, runs on the event loop."""

    def __init__(
        self,
        backend: Backend,
        room: MemoryBudget,
        host: HostCache,
        device: DeviceCache,
        arrivals: ArrivalEstimates,
        owner: DeviceLoaderOwner,
        counters: CacheCounters,
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self.under_way = 0
        self._backend, self._room, self._host, self._device, self._arrivals = backend, room, host, device, arrivals
        self._owner, self._counters, self._on_loop = owner, counters, on_loop
        self._wanting: deque[Adapter] = deque()  # in the host tier, waiting for device room
        self._bypasses = 0

    # --- who waits ---

    def __contains__(self, version: Adapter) -> bool:
        return version in self._wanting

    @property
    def are_waiting(self) -> bool:
        """Whether some version waits for room."""
        return bool(self._wanting)

    @property
    def admits(self) -> bool:
        """False while an adapter waits for room that later admissions keep taking: let the device drain."""
        return not (self._wanting and self._bypasses >= MAX_BYPASSES)

    @property
    def claims_memory(self) -> bool:
        """Whether an adapter that an admitted request needs waits for memory which KV blocks take."""
        wanted = self._wanting and self._room.is_shared
        return bool(wanted and not self._room.over_cap(self._wanting[0].device_bytes))

    def passed(self, version: Adapter | None) -> None:
        """A request is admitted, which may take room that an adapter waits for; without an adapter, its memory."""
        self._bypasses += self.claims_memory if version is None else self.are_waiting

    def want(self, version: Adapter) -> None:
        """An admitted request needs a version that is in the host tier."""
        self._wanting.append(version)
        self.go_on()

    def forget(self, version: Adapter) -> None:
        """Nobody wants it any more; a copy under way goes on."""
        if version in self._wanting:
            self._wanting.remove(version)

    # --- whole images ---

    def go_on(self) -> None:
        """Starts copies in the order of asking, as far as idle adapters, those that are not here yet and KV blocks that
        nobody holds make room."""
        while self._wanting:
            version = self._wanting[0]
            image = self._host.get(version.digest)
            if image is None or version.uses == 0:
                self._wanting.popleft()
                if version.uses:
                    self._owner.gone_from_host(version)
                continue
            if not self._device.make_room(version.device_bytes, self._evict):
                self._stop_streaming()
                return
            self._wanting.popleft()
            self._bypasses = 0
            version.to(AdapterTier.COPYING)
            self._host.touch(version.digest)
            version.groups = self._arrivals.expect(image.spec)
            self._load(version, image, None)

    def _load(self, version: Adapter, image: HostAdapter, layers: int | None) -> None:
        self._device.add(version)
        self.under_way += 1
        version.spec = image.spec

        def done(error: Exception | None) -> None:
            self._on_loop(lambda: self._copied(version, error))

        group_ends = [group.end for group in version.groups]
        self._backend.load_adapter(image, version.slot, done, group_ends, layers)

    def _copied(self, version: Adapter, error: Exception | None) -> None:
        is_coming = version.tier is AdapterTier.STREAMING and not version.is_leaving
        if error is not None and (version.asides or is_coming):
            version.copy_error = error  # its memory cannot be taken from under the plan, or the read
            return
        version.copy_error = None
        self.under_way -= 1
        if not self._device.is_arriving(beside=version):
            self._arrivals.all_there()
        if version.is_leaving and version.error is None:
            self._set_back(version)
        elif error is not None:
            self._leave(version)
            failure = CaraServeError(f"the adapter could not be copied to the device: {error}")
            self._owner.not_copied(version, version.error or failure)
        else:
            version.to(AdapterTier.DEVICE)
            version.groups = ()
            self._owner.copied(version)

    def end_failed(self, version: Adapter) -> None:
        """A plan aside or a read has ended, for which a copy that failed may have been left as it was."""
        if version.copy_error is not None:
            self._copied(version, version.copy_error)

    # --- what is not all in the host tier ---

    def stream(self, version: Adapter) -> None:
        """Begins to copy what has come so far of a version that is being read, where the device can use it and there is
        room that nobody waits for; otherwise it is copied when it is whole."""
        partial = version.partial
        is_of_use = version.uses and not version.gives_way and self._arrivals.by_layers
        if partial is None or not is_of_use or len(self._device.streaming()) >= self._backend.limits.streamed_plans:
            return
        try:
            version.device_bytes = self._device.measure(partial.image.spec)
        except AdapterRejected:
            return  # which is said when it is whole
        if not self._wanting and self._device.make_room(version.device_bytes, self._evict):
            version.to(AdapterTier.STREAMING)
            version.groups = self._arrivals.expect_streamed(partial)
            self._load(version, partial.image, partial.layers)
            self._owner.changed()

    def grew(self, version: Adapter) -> None:
        """More layers of a streamed version are in the host tier."""
        if not version.gives_way:
            assert version.partial is not None
            version.groups = self._arrivals.expect_streamed(version.partial)
            self._backend.extend_load(version.slot, version.partial.layers)
            self._owner.changed()

    def completed(self, version: Adapter, layers: int) -> None:
        """All layers of a streamed version are. One that gives way leaves the device first all the same."""
        if not version.gives_way:
            version.to(AdapterTier.COPYING)
            version.groups = self._arrivals.expect_rest(version)
            self._backend.extend_load(version.slot, layers)
            self.end_failed(version)
            self._owner.changed()

    def broke(self, version: Adapter, error: CaraServeError) -> None:
        """The other layers of a streamed version will never be. It leaves the device when nobody waits for them."""
        version.error = error
        if not version.gives_way:
            self._break(version, error)

    def _stop_streaming(self) -> None:
        """The last that began gives way; when it has left, `go_on` sees whether that was enough."""
        streaming = self._device.streaming()
        if streaming and not any(version.is_leaving for version in streaming):
            streaming[-1].gives_way = True
            self._break(streaming[-1], CaraServeError("its room is wanted"))

    def _break(self, version: Adapter, cause: Exception) -> None:
        """No more of a streamed version is copied. Its plans aside end void; then it leaves the device."""
        self._backend.break_load(version.slot, cause)
        self.end_failed(version)

    def _set_back(self, version: Adapter) -> None:
        """A version has given way: it is only being read from now on, or whole in the host tier by now."""
        self._leave(version)
        version.to(AdapterTier.READING)
        if (image := self._host.get(version.digest)) is not None:
            self._owner.arrived(version, image)
        self.go_on()
        self._owner.changed()

    # --- who leaves ---

    def grow_kv(self, needed: int, ahead: int) -> None:
        """Asks for KV blocks that requests need now, and for some ahead of need where no adapter waits for memory. Idle
        adapters give way. Nothing happens while blocks are under way."""
        ahead = 0 if self.claims_memory else ahead
        self._device.grow_kv(needed + ahead, self._evict, lambda: self._on_loop(self._kv_grown))

    def _kv_grown(self) -> None:
        self._room.grown()
        self.go_on()
        self._owner.changed()

    def drop(self, version: Adapter) -> None:
        """Takes a version that nobody uses from the device."""
        self._leave(version)
        version.to(AdapterTier.HOST if version.digest in self._host else AdapterTier.DISK)

    def _evict(self, version: Adapter) -> None:
        self.drop(version)
        self._counters.device_evictions += 1

    def _leave(self, version: Adapter) -> None:
        self._backend.unload_adapter(version.slot)
        self._device.remove(version)
