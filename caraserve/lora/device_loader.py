"""Copies adapters from the host cache to the device, and queues those that wait for room there.

Complete images are copied in the order in which they were wanted. An adapter that is still being downloaded may be
copied layer by layer ("streamed"), where the backend supports that. It has no claim to its memory, because a download
may stall without limit: when another adapter needs the room, the incomplete one is unloaded, and it is copied again
when its download is complete.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError, CopyFailed
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import Adapter, AdapterTier, CacheCounters, too_large
from caraserve.lora.arrival_estimates import ArrivalEstimates
from caraserve.lora.host_cache import HostCache

MAX_BYPASSES = 64  # admissions while the same adapter waits for device room


class DeviceCache:
    """Which adapters are in device memory, in which slots, and which of them are evicted. Not thread-safe: for the
    event loop."""

    def __init__(
        self, backend: Backend, memory: MemoryBudget, value: Callable[[Adapter], float], moved: Callable[[str], None]
    ) -> None:
        """`value`: returns what an idle adapter is worth; the least valuable is evicted first. `moved`: called with
        each digest that has left the device."""
        self._backend, self._memory, self._value, self._moved = backend, memory, value, moved
        self._adapters: dict[str, Adapter] = {}
        self._free_slots = list(range(backend.limits.adapter_slots - 1, BASE_ADAPTER_SLOT, -1))
        self.places = len(self._free_slots)  # for adapters

    def ready(self) -> list[Adapter]:
        """Returns the adapters that are on the device, whole."""
        return [adapter for adapter in self._adapters.values() if adapter.tier is AdapterTier.DEVICE]

    def streaming(self) -> list[Adapter]:
        """Returns the adapters that are copied to the device while they are still being downloaded."""
        return [adapter for adapter in self._adapters.values() if adapter.tier is AdapterTier.STREAMING]

    def arriving(self, beside: Adapter) -> list[Adapter]:
        """Returns the adapters other than `beside` that are being copied from host memory."""
        adapters = self._adapters.values()
        return [other for other in adapters if other.tier is AdapterTier.COPYING and other is not beside]

    def measure(self, spec: AdapterSpec) -> int:
        """Returns the bytes that an adapter takes on the device. Raises AdapterRejected for one that can never fit."""
        num_bytes = self._backend.device_bytes(spec)
        if num_bytes > self._memory.most_adapter_bytes:
            raise too_large(num_bytes, self._memory.most_adapter_bytes, "--lora-pool-bytes")
        return num_bytes

    def make_room(self, num_bytes: int, evict: Callable[[Adapter], None]) -> bool:
        """Makes room and a slot for an adapter by evicting idle ones. False: there is not enough, and none was
        evicted."""
        return self._evict(self._memory.excess(num_bytes), 0 if self._free_slots else 1, evict)

    def add(self, adapter: Adapter) -> None:
        """Assigns a slot and memory to an adapter whose copy begins. `make_room` must have succeeded for it."""
        adapter.slot = self._free_slots.pop()
        self._adapters[adapter.digest] = adapter
        if self._memory.add_adapter(adapter.device_bytes):
            self._backend.resize_kv(self._memory.pool.num_blocks, lambda error: None)  # blocks are only taken away

    def remove(self, adapter: Adapter) -> None:
        """Frees the slot and the memory of an adapter that has left the device."""
        del self._adapters[adapter.digest]
        self._free_slots.append(adapter.slot)
        adapter.slot = BASE_ADAPTER_SLOT
        self._memory.remove_adapter(adapter.device_bytes)
        self._moved(adapter.digest)

    def rename(self, old: str, new: str) -> None:
        """Gives the adapter of digest `old` another digest, if it is on the device."""
        if old in self._adapters:
            self._adapters[new] = self._adapters.pop(old)

    def growable(self) -> int:
        """Returns how many more KV blocks there could be if every idle adapter were evicted, blocks that the backend is
        making room for included."""
        if not self._memory.is_shared:
            return 0
        idle_bytes = sum(self._memory.takes(adapter.device_bytes) for adapter in self._idle())
        return self._memory.blocks_without(idle_bytes) - self._memory.pool.num_blocks

    def grow_kv(self, more: int, evict: Callable[[Adapter], None], done: Callable[[Exception | None], None]) -> None:
        """Asks the backend for `more` KV blocks, or as many of them as there can be, and evicts idle adapters for them.
        Does nothing while the backend is still making room for blocks. `done`: called when it has made room or has
        failed."""
        if self._memory.is_growing or (more := min(more, self.growable())) <= 0:
            return
        blocks = self._memory.pool.num_blocks + more
        self._evict(self._memory.excess_for_blocks(blocks), 0, evict)
        self._memory.grow(blocks)
        self._backend.resize_kv(blocks, done)

    def check(self) -> None:
        """Raises AssertionError if memory or slots do not add up."""
        adapters = list(self._adapters.values())
        assert all(
            adapter.tier in (AdapterTier.STREAMING, AdapterTier.COPYING, AdapterTier.DEVICE) for adapter in adapters
        ), "not resident"
        taken = sum(self._memory.takes(adapter.device_bytes) for adapter in adapters)
        assert self._memory.adapter_bytes == taken, "device bytes differ"
        slots = [adapter.slot for adapter in adapters]
        assert len({*slots, *self._free_slots}) == len(slots) + len(self._free_slots), "a slot has two owners"
        assert len(slots) + len(self._free_slots) == self.places, "a slot is lost"
        self._memory.check()

    def _idle(self) -> list[Adapter]:
        adapters = self._adapters.values()
        return [v for v in adapters if v.tier is AdapterTier.DEVICE and v.users == 0 and v.pinned != "device"]

    def _evict(self, excess_bytes: int, slots_missing: int, evict: Callable[[Adapter], None]) -> bool:
        """Evicts the least valuable idle adapters. Returns False, and evicts none, if they are not enough."""
        if excess_bytes <= 0 and not slots_missing:
            return True
        idle = sorted(self._idle(), key=self._value)
        victims: list[Adapter] = []
        while idle and (excess_bytes > 0 or len(victims) < slots_missing):
            victims.append(idle.pop(0))
            excess_bytes -= self._memory.takes(victims[-1].device_bytes)
        if excess_bytes > 0 or len(victims) < slots_missing:
            return False
        for victim in victims:
            evict(victim)
        return True


class LoadOwner(Protocol):
    """The methods of `AdapterManager` that a `DeviceLoader` calls. The manager owns the loader, so its module imports
    this one."""

    def read_again(self, adapter: Adapter) -> None:
        """Reads an adapter that was evicted from the host cache while it waited for room on the device."""

    def end_load(self, adapter: Adapter, error: CaraServeError | None = None) -> None:
        """Reports a load that has ended: the adapter is on the device, whole, or has failed with `error`."""

    def forget_if_unused(self, adapter: Adapter) -> None:
        """Frees what an adapter has that no name and no request refers to any more."""

    def changed(self) -> None:
        """Reports a change that may let a request start or continue."""


class DeviceLoader:
    """Not thread-safe: everything, callbacks of the backend included, runs on the event loop."""

    def __init__(
        self,
        backend: Backend,
        memory: MemoryBudget,
        host: HostCache,
        device: DeviceCache,
        arrivals: ArrivalEstimates,
        owner: LoadOwner,
        counters: CacheCounters,
        on_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        self.under_way = 0
        self.failure: Exception | None = None  # the error because of which the KV cache cannot grow
        self._backend, self._memory, self._arrivals = backend, memory, arrivals
        self._host_cache, self._device_cache = host, device
        self._owner, self._counters, self._on_loop = owner, counters, on_loop
        self._wanting: deque[Adapter] = deque()  # in the host cache, waiting for device room
        self._bypasses = 0

    # --- adapters that wait for room ---

    def __contains__(self, adapter: Adapter) -> bool:
        return adapter in self._wanting

    @property
    def are_waiting(self) -> bool:
        """Whether an adapter waits for room on the device."""
        return bool(self._wanting)

    @property
    def admits(self) -> bool:
        """False after `MAX_BYPASSES` admissions during which the same adapter waited for room. Admitting no request
        then lets the device drain, so that the adapter gets its room."""
        return not (self._wanting and self._bypasses >= MAX_BYPASSES)

    @property
    def claims_memory(self) -> bool:
        """Whether an adapter that an admitted request needs waits for memory that KV blocks take."""
        wanted = self._wanting and self._memory.is_shared
        return bool(wanted and not self._memory.over_cap(self._wanting[0].device_bytes))

    def count_bypass(self, adapter: Adapter | None) -> None:
        """Counts an admission that may take the room that an adapter waits for. A request for the base model (None)
        counts only if that adapter waits for memory that KV blocks take."""
        self._bypasses += self.claims_memory if adapter is None else self.are_waiting

    def want(self, adapter: Adapter) -> None:
        """Queues an adapter that an admitted request needs and that is in the host cache."""
        self._wanting.append(adapter)
        self.schedule_pending()

    def forget(self, adapter: Adapter) -> None:
        """Removes an adapter that no admitted request needs any more from the queue. A copy under way continues."""
        if adapter in self._wanting:
            self._wanting.remove(adapter)

    # --- whole images ---

    def schedule_pending(self) -> None:
        """Starts copies in the order of the queue, as far as there is room. Room is made by evicting idle adapters, by
        unloading incomplete ones, and by taking unused KV blocks."""
        while self._wanting:
            adapter = self._wanting[0]
            image = self._host_cache.get(adapter.digest)
            if image is None or adapter.users == 0:
                self._wanting.popleft()
                if adapter.users:
                    self._owner.read_again(adapter)
                continue
            if not self._device_cache.make_room(adapter.device_bytes, self._evict):
                self._stop_streaming()
                return
            self._wanting.popleft()
            self._bypasses = 0
            adapter.move_to(AdapterTier.COPYING)
            self._host_cache.touch(adapter.digest)
            plan = self._arrivals.expect(image.spec, adapter.prefill)
            adapter.groups = plan.groups
            self._load(adapter, image, None, plan.first_layer)

    def _load(self, adapter: Adapter, image: HostAdapter, layers: int | None, first_layer: int = 0) -> None:
        self._device_cache.add(adapter)
        self.under_way += 1
        adapter.spec = image.spec

        def done(error: Exception | None) -> None:
            self._on_loop(lambda: self._copied(adapter, error))

        group_ends = [group.end for group in adapter.groups]
        self._backend.load_adapter(image, adapter.slot, done, group_ends, layers, first_layer)

    def _copied(self, adapter: Adapter, error: Exception | None) -> None:
        is_coming = adapter.tier is AdapterTier.STREAMING and not adapter.is_leaving
        if error is not None and (adapter.image_pins or is_coming):
            adapter.copy_error = error  # finished by `end_failed`: the image must stay until then
            return
        adapter.copy_error = None
        self.under_way -= 1
        if others := self._device_cache.arriving(beside=adapter):
            if error is None:
                self._arrivals.arrived(adapter, others)
        else:
            self._arrivals.all_there()
        if adapter.is_leaving and adapter.error is None:
            self._set_back(adapter)
        elif error is not None:
            if adapter.error is None:  # iterations named it: blocks that they were to fill are published already
                self._memory.pool.forget_all()
            self._leave(adapter)
            if adapter.tier is AdapterTier.STREAMING:
                self._host_cache.drop(adapter.digest)
            self._owner.end_load(adapter, adapter.error or CopyFailed(error))
        else:
            adapter.move_to(AdapterTier.DEVICE)
            adapter.groups = ()
            self._owner.end_load(adapter)

    def end_failed(self, adapter: Adapter) -> None:
        """Ends a failed copy that was kept for a side batch or a download, which has ended."""
        if adapter.copy_error is not None:
            self._copied(adapter, adapter.copy_error)

    # --- what the host loader reads ---

    def layers_arrived(self, adapter: Adapter) -> None:
        """Starts or extends the copy of an adapter of which more layers have been downloaded."""
        if adapter.tier is not AdapterTier.STREAMING:
            self.stream(adapter)
        elif not adapter.makes_room:
            assert adapter.partial is not None
            adapter.groups = self._arrivals.expect_streamed(adapter.partial)
            self._backend.extend_load(adapter.slot, adapter.partial.layers)
            self._owner.changed()

    def image_arrived(self, adapter: Adapter, image: HostAdapter) -> None:
        """Queues an adapter whose image is now complete in the host cache for a copy, if an admitted request needs
        it."""
        if adapter.tier is AdapterTier.STREAMING:
            self._complete(adapter, image.spec)
            return
        adapter.move_to(AdapterTier.HOST)
        try:
            adapter.device_bytes = self._device_cache.measure(image.spec)
        except AdapterRejected as refusal:
            self._owner.end_load(adapter, refusal)
        else:
            (self.want if adapter.users else self._owner.forget_if_unused)(adapter)
        self._owner.changed()

    def read_failed(self, adapter: Adapter, error: CaraServeError) -> None:
        """Fails an adapter that could not be read or downloaded to its end. One that is being copied is unloaded when
        no side batch uses it."""
        if adapter.tier is not AdapterTier.STREAMING:
            self._host_cache.drop(adapter.digest)
            self._owner.end_load(adapter, error)
            return
        adapter.error = error
        if not adapter.makes_room:
            self._break(adapter, error)

    # --- adapters that are still being downloaded ---

    def stream(self, adapter: Adapter) -> None:
        """Starts to copy the layers that have arrived of an adapter that is being downloaded. Does nothing if no
        admitted request needs it, the backend cannot stream (or not one more), or other adapters wait for room: it
        is then copied when its download is complete."""
        partial = adapter.partial
        is_of_use = adapter.users and not adapter.makes_room and self._arrivals.by_layers
        if (
            partial is None
            or not is_of_use
            or len(self._device_cache.streaming()) >= self._backend.limits.streamed_batches
        ):
            return
        try:
            adapter.device_bytes = self._device_cache.measure(partial.image.spec)
        except AdapterRejected:
            return  # reported when the download is complete
        if not self._wanting and self._device_cache.make_room(adapter.device_bytes, self._evict):
            adapter.move_to(AdapterTier.STREAMING)
            adapter.groups = self._arrivals.expect_streamed(partial)
            self._load(adapter, partial.image, partial.layers)
            self._owner.changed()

    def _complete(self, adapter: Adapter, spec: AdapterSpec) -> None:
        """Extends the copy of a streamed adapter to all its layers, when its download is complete. An adapter that
        makes room for another one is still unloaded first."""
        if not adapter.makes_room:
            adapter.spec = spec
            adapter.move_to(AdapterTier.COPYING)
            adapter.groups = self._arrivals.expect_rest(adapter)
            self._backend.extend_load(adapter.slot, len(spec.layer_ends))
            self.end_failed(adapter)
            self._owner.changed()

    def _stop_streaming(self) -> None:
        """Unloads the streamed adapter whose copy began last, to make room. `schedule_pending` runs again once it has
        left the device, and unloads the next one if that was not enough."""
        streaming = self._device_cache.streaming()
        if streaming and not any(adapter.is_leaving for adapter in streaming):
            streaming[-1].makes_room = True
            self._break(streaming[-1], CaraServeError("its room is wanted"))

    def _break(self, adapter: Adapter, cause: Exception) -> None:
        """Ends the copy of an adapter that is being downloaded: its side batches need a retry, then it is unloaded."""
        self._backend.break_load(adapter.slot, cause)
        self.end_failed(adapter)

    def _set_back(self, adapter: Adapter) -> None:
        """Unloads an adapter that made room for another one. Its download continues, unless it is complete by now: then
        the adapter is queued for a copy."""
        self._leave(adapter)
        adapter.move_to(AdapterTier.READING)
        if (image := self._host_cache.get(adapter.digest)) is not None:
            self.image_arrived(adapter, image)
        self.schedule_pending()
        self._owner.changed()

    # --- eviction ---

    def grow_kv(self, needed: int, ahead: int) -> None:
        """Asks the backend for `needed` KV blocks, and for `ahead` more if no adapter waits for memory. Evicts idle
        adapters for them. Does nothing while the backend is still making room for blocks."""
        ahead = 0 if self.claims_memory else ahead

        def done(error: Exception | None) -> None:
            self._on_loop(lambda: self._kv_grown(error))

        self._device_cache.grow_kv(needed + ahead, self._evict, done)

    def _kv_grown(self, error: Exception | None) -> None:
        if error is None:
            self._memory.grown()
            self.schedule_pending()
        else:
            self.failure = error
        self._owner.changed()

    def drop(self, adapter: Adapter) -> None:
        """Unloads an adapter that no admitted request needs."""
        self._leave(adapter)
        adapter.move_to(AdapterTier.HOST if adapter.digest in self._host_cache else AdapterTier.DISK)

    def _evict(self, adapter: Adapter) -> None:
        self.drop(adapter)
        self._counters.device_evictions += 1

    def _leave(self, adapter: Adapter) -> None:
        self._backend.unload_adapter(adapter.slot)
        self._device_cache.remove(adapter)
