"""The adapters on simulated instances: where each is, and when a missing one will have been loaded.

Adapters are copied one after another over each of two links: from another instance's host memory to this one's, and
from host memory to the device. Adapters that a placement assigns to the instance stay in its host cache; others are
evicted, least recently used first. On the device any adapter that no request uses can be evicted. What is on the device
is in the host cache too.

All functions are compiled. An entry is the record of an adapter on an instance.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import numpy as np

from caraserve.bench.simulator.compiled import MS, append, contains, following, kernel, make_lists, unlink
from caraserve.cluster.routing.cost import cold_ms
from caraserve.cluster.state.replicated_map import Tier

_DEVICE, _HOST, _ABSENT = int(Tier.DEVICE), int(Tier.HOST), int(Tier.ABSENT)

ENTRY = np.dtype(
    [
        ("host_at", np.int64),  # when its download is complete
        ("device_at", np.int64),
        ("host_order", np.int64),  # entries of a host cache ascend in the order in which they were added
        ("uses", np.int32),
        ("in_host", np.bool_),
    ]
)


class Caches(NamedTuple):
    """What the caches work on."""

    machines: Any
    instances: Any
    entries: Any  # [adapters, instances]
    num_bytes: Any  # of each adapter
    # Lists of adapters, one for each instance. The least recently used ones are first in those of spare ones, which are
    # in the host cache and may be evicted, and of those on the device.
    spare: Any
    on_device: Any
    changed: Any  # since the last heartbeat


def make_caches(machines: Any, instances: Any, num_bytes: Any) -> Caches:
    """Returns caches without adapters. `num_bytes`: of each adapter."""
    adapters = len(num_bytes)
    lists = (make_lists(len(instances), adapters) for _ in range(3))
    return Caches(machines, instances, np.zeros((adapters, len(instances)), ENTRY), num_bytes, *lists)


@kernel
def tier(caches, number, adapter):
    """Returns where an adapter is; the base model, −1, is on every device."""
    if adapter < 0:
        return _DEVICE
    if contains(caches.on_device, number, adapter):
        return _DEVICE
    return _HOST if caches.entries[adapter, number].in_host else _ABSENT


@kernel
def add(caches, number, adapter, now, keep):
    """Adds an adapter to the host cache. With `keep` it is never evicted for another."""
    entry, one = caches.entries[adapter, number], caches.instances[number]
    if not entry.in_host:
        entry.in_host, entry.host_at = True, now
        one.host_adapters += 1
        one.additions += 1
        entry.host_order = one.additions
        one.host_bytes += caches.num_bytes[adapter]
        append(caches.changed, number, adapter)
        _make_room(caches, number)
        one.most_host_adapters = max(one.most_host_adapters, one.host_adapters)
        append(caches.spare, number, adapter)
    if keep:
        unlink(caches.spare, number, adapter)


@kernel
def acquire(caches, number, adapter, now):
    """Pins an adapter for a request until `release`. Returns the time in ns at which it is on the device."""
    entry = caches.entries[adapter, number]
    entry.uses += 1
    if unlink(caches.on_device, number, adapter):
        append(caches.on_device, number, adapter)
    else:
        entry.device_at = _load(caches, number, adapter, _fetched(caches, number, adapter, now))
    return max(entry.device_at, now)


@kernel
def release(caches, number, adapter):
    """Unpins an adapter for one of its requests."""
    caches.entries[adapter, number].uses -= 1


@kernel
def remove(caches, number, adapter):
    """Removes an adapter, or lets it be evicted later if a request uses it."""
    entry, one = caches.entries[adapter, number], caches.instances[number]
    if not entry.in_host:
        return
    if entry.uses:
        append(caches.spare, number, adapter)
        return
    unlink(caches.spare, number, adapter)
    entry.in_host = False
    one.host_adapters -= 1
    one.host_bytes -= caches.num_bytes[adapter]
    if unlink(caches.on_device, number, adapter):
        one.device_bytes -= caches.num_bytes[adapter]
    append(caches.changed, number, adapter)


@kernel
def _fetched(caches, number, adapter, now):
    """Returns when an adapter will be in the host cache."""
    entry, one, links = caches.entries[adapter, number], caches.instances[number], caches.machines[number].links
    if entry.in_host:
        if unlink(caches.spare, number, adapter):
            append(caches.spare, number, adapter)
        return max(entry.host_at, now)
    size = caches.num_bytes[adapter]
    fetch_ms = cold_ms(links, _ABSENT, size) - cold_ms(links, _HOST, size)
    there = max(now, one.fetch_free) + round(fetch_ms * MS)
    one.fetch_free = there
    one.fetches += 1
    one.fetched_bytes += size
    add(caches, number, adapter, there, False)
    return there


@kernel
def _load(caches, number, adapter, there):
    """Loads an adapter that is in the host cache from the time `there` on. Returns when it will be on the device."""
    one, machine, size = caches.instances[number], caches.machines[number], caches.num_bytes[adapter]
    one.load_free = max(there, one.load_free) + round(cold_ms(machine.links, _HOST, size) * MS)
    one.loads += 1
    one.device_bytes += size
    append(caches.changed, number, adapter)
    idle = following(caches.on_device, number, -1)
    while one.device_bytes > machine.device_adapter_bytes and idle >= 0:
        after = following(caches.on_device, number, idle)
        if not caches.entries[idle, number].uses:
            unlink(caches.on_device, number, idle)
            one.device_bytes -= caches.num_bytes[idle]
            append(caches.changed, number, idle)
        idle = after
    append(caches.on_device, number, adapter)
    return one.load_free


@kernel
def _make_room(caches, number):
    one = caches.instances[number]
    idle = following(caches.spare, number, -1)
    while one.host_bytes > caches.machines[number].host_adapter_bytes and idle >= 0:
        after = following(caches.spare, number, idle)
        if not caches.entries[idle, number].uses:
            remove(caches, number, idle)
            one.evictions += 1
        idle = after
