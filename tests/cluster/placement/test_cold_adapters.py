"""Adapters without demand are placed by the previous plan and their order by hash, together or one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from caraserve.cluster.placement.cold_adapters import AdapterTable, ColdAdapters, ServerLoad
from caraserve.cluster.placement.loraserve import place
from caraserve.cluster.placement.plan import AdapterDemand, Server
from caraserve.cluster.routing.placement_plan import Share, Shares, homes, rendezvous, word

POINTS = {8: 2000.0}  # tokens/s
NAMES = [f"s{index}" for index in range(6)]
KEYS = [f"a{index}" for index in range(12)]
LIMIT = 1.0


def nodes(levels: list[float], capacity_bytes: int = 10**6) -> list[ServerLoad]:
    fleet = zip(NAMES, levels, strict=False)
    return [
        ServerLoad(Server(name, capacity_bytes), place, word(name), 8, level, level)
        for place, (name, level) in enumerate(fleet)
    ]


def table() -> AdapterTable:
    """Returns all adapters, of 10 bytes each."""
    count, names = len(KEYS), sorted(KEYS)
    return AdapterTable(names, np.full(count, 8), np.full(count, 10), np.zeros(count))


def expected(key: str, before: list[str], low: set[str], fleet: list[str]) -> list[str]:
    """Returns one adapter's instances, best first."""
    order = rendezvous(key, fleet)
    stays = [name for name in order if name in before and name in low]
    return stays + [name for name in order if name not in stays]


LEVELS = st.lists(st.sampled_from([0.5, 1.0, 1.1]), min_size=1, max_size=len(NAMES))
BEFORE = st.lists(st.lists(st.sampled_from(NAMES), unique=True, max_size=3), min_size=len(KEYS), max_size=len(KEYS))


@given(LEVELS, LEVELS, BEFORE, st.integers(1, 4))
def test_previous_instances_within_the_limit_come_first_then_the_order_by_hash(
    levels: list[float], later: list[float], before: list[list[str]], count: int
) -> None:
    fleet = nodes(levels)
    names = [node.server.name for node in fleet]
    adapters = table()
    held = Shares.of({key: [Share(name, 1.0) for name in places] for key, places in zip(KEYS, before, strict=True)})
    tail = ColdAdapters(np.arange(len(KEYS)), adapters, fleet, held.among(adapters.names, names))
    tail.take(tail.homes(LIMIT))
    low = {node.server.name for node in fleet if node.level <= LIMIT}
    for node, level in zip(fleet, later, strict=False):  # what is asked for has been spread
        node.level = level
    lower = {node.server.name for node in fleet if node.level <= LIMIT}
    tail.take(tail.copies(LIMIT, count))
    found = {key: [names[at] for at in row] for key, row in zip(adapters.names, tail.instances().tolist(), strict=True)}
    for key, names_before in zip(KEYS, before, strict=True):
        home = expected(key, names_before, low, names)[0]
        others = [name for name in expected(key, names_before, lower, names) if name != home]
        assert found[key] == sorted([home, *others][:count])
    for node in fleet:
        assert node.num_bytes == 10 * sum(node.server.name in places for places in found.values())


def test_places_fit_exactly_up_to_the_capacity() -> None:
    for capacity, fits in ((120, True), (119, False)):
        adapters = table()
        tail = ColdAdapters(
            np.arange(len(KEYS)), adapters, nodes([0.0], capacity), Shares.of({}).among(adapters.names, NAMES[:1])
        )
        assert tail.fit(tail.homes(LIMIT)) is fits


@given(st.lists(st.sampled_from([0.0, 0.0, 300.0]), min_size=len(KEYS), max_size=len(KEYS)), st.booleans())
def test_adapters_get_the_same_places_one_by_one_and_together(rates: list[float], again: bool) -> None:
    adapters = [AdapterDemand(key, 8, 1, rate) for key, rate in zip(KEYS, rates, strict=True)]
    # One that fits only where it would go last makes all of them wait for their turn.
    *_, large = rendezvous("large", NAMES)
    apart = AdapterDemand("large", 8, 5000)
    fleet = [Server(name, 10_000 if name == large else 1000) for name in NAMES]
    previous = place(adapters[1:], fleet, POINTS, 1) if again else None
    alone = place(adapters, fleet, POINTS, 2, previous)
    beside = place([*adapters, apart], fleet, POINTS, 2, previous)
    assert beside.instances("large") == (large,)
    assert {key: shares for key, shares in beside.shares.items() if key != "large"} == alone.shares


def test_first_copies_keep_their_places_if_second_ones_do_not_fit() -> None:
    adapters, fleet = [AdapterDemand(key, 8, 10) for key in KEYS], [Server(name, 60) for name in NAMES[:3]]
    plan = place(adapters, fleet, POINTS, 1)
    assert plan.overfull == ()
    assert sorted({len(shares) for shares in plan.shares.values()}) == [1, 2]
    assert all(rendezvous(key, NAMES[:3])[0] in plan.instances(key) for key in KEYS)


def test_homes_are_the_first_of_each_keys_own_order() -> None:
    found = homes(KEYS, NAMES, 2).tolist()
    assert [[NAMES[at] for at in row] for row in found] == [rendezvous(key, NAMES)[:2] for key in KEYS]
    assert homes(KEYS, NAMES[:1], 2).tolist() == [[0]] * len(KEYS)
    assert homes([], NAMES, 2).tolist() == []
