"""Tenants share by service received; within a tenant, first come first served."""

from caraserve.fairness import FairQueue


def served_order(queue: FairQueue[str], count: int, output_tokens: dict[str, int]) -> list[str]:
    order = []
    for _ in range(count):
        tenant, _ = queue.in_order()[0]
        order.append(queue.pop(tenant))
        queue.charge(tenant, 0, output_tokens[tenant])
    return order


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abc":
        queue.push("t", item)
    assert served_order(queue, 3, {"t": 5}) == ["a", "b", "c"]
    assert len(queue) == 0


def test_of_one_tenants_items_those_of_lower_priority_go_first() -> None:
    queue: FairQueue[str] = FairQueue(lambda item: int(item[1:]))
    for item in ("a0", "b0", "c5", "d-3", "e5", "f0"):
        queue.push("t", item)
    assert served_order(queue, 6, {"t": 5}) == ["d-3", "a0", "b0", "f0", "c5", "e5"]


def test_no_priority_takes_another_tenants_turn() -> None:
    queue: FairQueue[str] = FairQueue(lambda item: -1000 if item.startswith("pushy") else 0)
    for index in range(3):
        queue.push("modest", f"m{index}")
    for index in range(3):
        queue.push("pushy", f"pushy{index}")
    order = served_order(queue, 4, {"modest": 10, "pushy": 10})
    assert sorted(order) == ["m0", "m1", "pushy0", "pushy1"]


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(10):
        queue.push("flood", f"f{index}")
    queue.push("quiet", "q0")
    queue.push("quiet", "q1")
    assert set(served_order(queue, 4, {"flood": 10, "quiet": 10})) == {"f0", "f1", "q0", "q1"}


def test_service_and_not_requests_is_shared() -> None:
    queue: FairQueue[str] = FairQueue()
    for index in range(9):
        queue.push("long", f"l{index}")
        queue.push("short", f"s{index}")
    order = served_order(queue, 8, {"long": 30, "short": 10})
    assert sum(item.startswith("s") for item in order) == 6


def test_time_away_is_not_saved_up() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("busy", "b0")
    queue.charge("busy", 0, 1000)
    queue.push("busy", "b1")
    queue.push("back", "k0")
    queue.push("back", "k1")
    order = served_order(queue, 3, {"busy": 1, "back": 600})
    assert order[0] in ("b0", "k0")
    assert "b0" in order[:2]


def test_an_item_can_be_taken_out_of_the_middle() -> None:
    queue: FairQueue[str] = FairQueue()
    for item in "abc":
        queue.push("t", item)
    queue.remove("t", "b")
    assert list(queue) == ["a", "c"]


def test_the_next_to_come_are_every_tenants_first_then_every_tenants_second() -> None:
    queue: FairQueue[str] = FairQueue()
    for tenant, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("c", "c2")):
        queue.push(tenant, item)
    queue.charge("a", 100, 0)
    assert queue.upcoming(5) == ["b1", "c1", "a1", "c2", "a2"]
    assert queue.upcoming(99) == ["b1", "c1", "a1", "c2", "a2", "a3"]
    assert len(queue) == 6
