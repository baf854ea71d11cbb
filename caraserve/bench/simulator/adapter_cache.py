"""The adapters on a simulated instance: where each is, and when a missing one will have been loaded.

Adapters are copied one after another over each of two links: from another instance's host memory to this one's, and
from host memory to the device. Adapters that a placement assigns to the instance stay in its host cache; others are
evicted, least recently used first. On the device any adapter that no request uses can be evicted.
"""

from caraserve.bench.simulator.machines import Machine
from caraserve.cluster.routing.cost import Tier

MS = 1_000_000
_DEVICE, _HOST, _ABSENT = Tier.DEVICE, Tier.HOST, Tier.ABSENT  # looked up at every delivery


class AdapterCache:
    """The host cache and the device cache of one instance. Adapters are numbers; times are in ns."""

    def __init__(self, machine: Machine, adapter_bytes: list[int]) -> None:
        self._machine, self._bytes = machine, adapter_bytes
        self.host: dict[int, int] = {}  # adapter → time at which its download is complete
        self._spare: dict[int, None] = {}  # those in `host` that may be evicted; least recently used first
        self._device: dict[int, int] = {}
        self._uses: dict[int, int] = {}
        self.host_bytes = self._device_bytes = 0
        self._load_free = self._fetch_free = 0
        self.changed: dict[int, Tier] = {}  # changes since the last heartbeat
        self.fetches = self.fetched_bytes = self.loads = self.evictions = 0

    def add(self, adapter: int, now: int, *, keep: bool) -> None:
        """Adds an adapter to the host cache. With `keep` it is never evicted for another."""
        if adapter not in self.host:
            self.host[adapter] = now
            self.host_bytes += self._bytes[adapter]
            self.changed[adapter] = Tier.HOST
            self._make_room()
            self._spare[adapter] = None
        if keep:
            self._spare.pop(adapter, None)

    def tier(self, adapter: int) -> Tier:
        """Returns where an adapter is."""
        if adapter in self._device:
            return _DEVICE
        return _HOST if adapter in self.host else _ABSENT

    def acquire(self, adapter: int, now: int) -> int:
        """Pins an adapter for a request until `release`. Returns the time in ns at which it is on the device."""
        self._uses[adapter] = self._uses.get(adapter, 0) + 1
        there = self._device.pop(adapter, None)
        if there is None:
            there = self._load(adapter, self._fetched(adapter, now))
        self._device[adapter] = there
        return max(there, now)

    def release(self, adapter: int) -> None:
        """Unpins an adapter for one of its requests."""
        left = self._uses[adapter] - 1
        if left:
            self._uses[adapter] = left
        else:
            del self._uses[adapter]

    def remove(self, adapter: int) -> None:
        """Removes an adapter, or lets it be evicted later if a request uses it."""
        if adapter in self.host:
            self._spare.setdefault(adapter)
        if adapter in self.host and adapter not in self._uses:
            del self.host[adapter], self._spare[adapter]
            self.host_bytes -= self._bytes[adapter]
            if self._device.pop(adapter, None) is not None:
                self._device_bytes -= self._bytes[adapter]
            self.changed[adapter] = Tier.ABSENT

    def _fetched(self, adapter: int, now: int) -> int:
        there = self.host.get(adapter)
        if there is not None:
            if adapter in self._spare:
                del self._spare[adapter]
                self._spare[adapter] = None
            return max(there, now)
        links, size = self._machine.links, self._bytes[adapter]
        fetch_ms = links.cold_ms(Tier.ABSENT, size) - links.cold_ms(Tier.HOST, size)
        self._fetch_free = there = max(now, self._fetch_free) + round(fetch_ms * MS)
        self.fetches += 1
        self.fetched_bytes += size
        self.add(adapter, there, keep=False)
        return there

    def _load(self, adapter: int, there: int) -> int:
        size = self._bytes[adapter]
        load_ms = self._machine.links.cold_ms(Tier.HOST, size)
        self._load_free = max(there, self._load_free) + round(load_ms * MS)
        self.loads += 1
        self._device_bytes += size
        self.changed[adapter] = Tier.DEVICE
        while self._device_bytes > self._machine.device_adapter_bytes:
            idle = next((other for other in self._device if other not in self._uses), None)
            if idle is None:
                break
            del self._device[idle]
            self._device_bytes -= self._bytes[idle]
            self.changed[idle] = Tier.HOST if idle in self.host else Tier.ABSENT
        return self._load_free

    def _make_room(self) -> None:
        while self.host_bytes > self._machine.host_adapter_bytes:
            idle = next((adapter for adapter in self._spare if adapter not in self._uses), None)
            if idle is None:
                return
            self.remove(idle)
            self.evictions += 1
