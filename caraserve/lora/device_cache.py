"""The device cache: which adapters are in device memory, in which slots, and which are evicted."""

from collections.abc import Callable

from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT
from caraserve.core.lora_layout import AdapterSpec
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import Adapter, AdapterTier, too_large


class DeviceCache:
    """Adapters by digest, and the free slots of the device's adapter table. Not thread-safe: for the event loop."""

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

    def is_arriving(self, beside: Adapter) -> bool:
        """Returns whether an adapter other than `beside` is being copied from host memory."""
        return any(other.tier is AdapterTier.COPYING and other is not beside for other in self._adapters.values())

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
