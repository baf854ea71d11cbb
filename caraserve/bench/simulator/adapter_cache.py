"""The adapters on simulated instances: where each is, and when a missing one will have been loaded.

Adapters are copied one after another over each of two links: from another instance's host memory to this one's, and
from host memory to the device. Adapters that a placement assigns to the instance stay in its host cache; others are
evicted, least recently used first. On the device any adapter that no request uses can be evicted. What is on the device
is in the host cache too.

All functions are compiled. An entry is the record of an adapter on an instance; lists link entries by adapter.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import numpy as np

from caraserve.bench.simulator.compiled import MS, kernel
from caraserve.cluster.routing.cost import Tier, cold_ms

_DEVICE, _HOST, _ABSENT = int(Tier.DEVICE), int(Tier.HOST), int(Tier.ABSENT)

ENTRY = np.dtype(
    [
        ("host_at", np.int64),  # when its download is complete
        ("device_at", np.int64),
        ("host_order", np.int64),  # entries of a host cache ascend in the order in which they were added
        ("uses", np.int32),
        ("in_host", np.bool_),
        ("in_device", np.bool_),
        ("spare", np.bool_),  # in the host cache, and may be evicted
        ("changed", np.bool_),  # since the last heartbeat
        # The neighbours in the lists of spare entries and of those on the device, least recently used first, and the
        # next one in the list of changed entries.
        *((name, np.int32) for name in ("spare_before", "spare_after", "device_before", "device_after")),
        ("changed_after", np.int32),
    ]
)


class Caches(NamedTuple):
    """What the caches work on."""

    machines: Any
    instances: Any
    entries: Any  # [adapters, instances]
    num_bytes: Any  # of each adapter


@kernel
def tier(caches, number, adapter):
    """Returns where an adapter is; the base model, −1, is on every device."""
    if adapter < 0:
        return _DEVICE
    entry = caches.entries[adapter, number]
    return _DEVICE if entry.in_device else (_HOST if entry.in_host else _ABSENT)


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
        _change(caches, number, adapter)
        _make_room(caches, number)
        one.most_host_adapters = max(one.most_host_adapters, one.host_adapters)
        _add_spare(caches, number, adapter)
    if keep and entry.spare:
        _remove_spare(caches, number, adapter)


@kernel
def acquire(caches, number, adapter, now):
    """Pins an adapter for a request until `release`. Returns the time in ns at which it is on the device."""
    entry = caches.entries[adapter, number]
    entry.uses += 1
    if entry.in_device:
        _remove_from_device(caches, number, adapter)
        _add_to_device(caches, number, adapter)
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
        if not entry.spare:
            _add_spare(caches, number, adapter)
        return
    if entry.spare:
        _remove_spare(caches, number, adapter)
    entry.in_host = False
    one.host_adapters -= 1
    one.host_bytes -= caches.num_bytes[adapter]
    if entry.in_device:
        _remove_from_device(caches, number, adapter)
        one.device_bytes -= caches.num_bytes[adapter]
    _change(caches, number, adapter)


@kernel
def _fetched(caches, number, adapter, now):
    """Returns when an adapter will be in the host cache."""
    entry, one, links = caches.entries[adapter, number], caches.instances[number], caches.machines[number].links
    if entry.in_host:
        if entry.spare:
            _remove_spare(caches, number, adapter)
            _add_spare(caches, number, adapter)
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
    _change(caches, number, adapter)
    idle = one.device_first
    while one.device_bytes > machine.device_adapter_bytes and idle >= 0:
        after = caches.entries[idle, number].device_after
        if not caches.entries[idle, number].uses:
            _remove_from_device(caches, number, idle)
            one.device_bytes -= caches.num_bytes[idle]
            _change(caches, number, idle)
        idle = after
    _add_to_device(caches, number, adapter)
    return one.load_free


@kernel
def _make_room(caches, number):
    one = caches.instances[number]
    idle = one.spare_first
    while one.host_bytes > caches.machines[number].host_adapter_bytes and idle >= 0:
        after = caches.entries[idle, number].spare_after
        if not caches.entries[idle, number].uses:
            remove(caches, number, idle)
            one.evictions += 1
        idle = after


# --- lists ---


@kernel
def _change(caches, number, adapter):
    entry, one = caches.entries[adapter, number], caches.instances[number]
    if not entry.changed:
        entry.changed, entry.changed_after = True, one.changed_first
        one.changed_first = adapter
        one.num_changed += 1


@kernel
def _add_spare(caches, number, adapter):
    entry, one = caches.entries[adapter, number], caches.instances[number]
    entry.spare, entry.spare_before, entry.spare_after = True, one.spare_last, -1
    if one.spare_last < 0:
        one.spare_first = adapter
    else:
        caches.entries[one.spare_last, number].spare_after = adapter
    one.spare_last = adapter


@kernel
def _remove_spare(caches, number, adapter):
    entry, one = caches.entries[adapter, number], caches.instances[number]
    entry.spare = False
    if entry.spare_before < 0:
        one.spare_first = entry.spare_after
    else:
        caches.entries[entry.spare_before, number].spare_after = entry.spare_after
    if entry.spare_after < 0:
        one.spare_last = entry.spare_before
    else:
        caches.entries[entry.spare_after, number].spare_before = entry.spare_before


@kernel
def _add_to_device(caches, number, adapter):
    entry, one = caches.entries[adapter, number], caches.instances[number]
    entry.in_device, entry.device_before, entry.device_after = True, one.device_last, -1
    if one.device_last < 0:
        one.device_first = adapter
    else:
        caches.entries[one.device_last, number].device_after = adapter
    one.device_last = adapter


@kernel
def _remove_from_device(caches, number, adapter):
    entry, one = caches.entries[adapter, number], caches.instances[number]
    entry.in_device = False
    if entry.device_before < 0:
        one.device_first = entry.device_after
    else:
        caches.entries[entry.device_before, number].device_after = entry.device_after
    if entry.device_after < 0:
        one.device_last = entry.device_before
    else:
        caches.entries[entry.device_after, number].device_before = entry.device_before
