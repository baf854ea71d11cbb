"""Clients get equal service, and so do the users of each client; a user's requests are served in order of arrival."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.core import fair_queue
from caraserve.core.fair_queue import FairQueue
from caraserve.core.tenant import Tenant


def queue_of(*items: tuple[Tenant | str, str], priority: Callable[[str], int] = lambda item: 0) -> FairQueue[str]:
    """Returns a queue into which (tenant, item) were put in this order; a text is a client without users."""
    queue = FairQueue(priority)
    for tenant, item in items:
        queue.push(Tenant(tenant) if isinstance(tenant, str) else tenant, item)
    return queue


def take(queue: FairQueue[str], output_tokens: int) -> str:
    """Serves the next tenant, and charges it for the tokens."""
    tenant = queue.first()
    assert tenant is not None
    item = queue.pop(tenant)
    queue.charge(tenant, 0, output_tokens)
    return item


def served_order(queue: FairQueue[str], count: int, output_tokens: dict[str, int]) -> list[str]:
    order = []
    for _ in range(count):
        tenant = queue.first()
        assert tenant is not None
        order.append(take(queue, output_tokens[tenant.client]))
    return order


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    queue = queue_of(*(("t", item) for item in "abc"))
    assert served_order(queue, 3, {"t": 5}) == ["a", "b", "c"]
    assert (len(queue), queue.first()) == (0, None)


def test_a_tenants_items_of_lower_priority_are_served_first() -> None:
    items = ("a0", "b0", "c5", "d-3", "e5", "f0")
    queue = queue_of(*(("t", item) for item in items), priority=lambda item: int(item[1:]))
    assert served_order(queue, 6, {"t": 5}) == ["d-3", "a0", "b0", "f0", "c5", "e5"]


def test_priority_does_not_count_between_tenants() -> None:
    items = [(client, f"{client}{index}") for client in ("modest", "pushy") for index in range(3)]
    queue = queue_of(*items, priority=lambda item: -1000 if item.startswith("pushy") else 0)
    order = served_order(queue, 4, {"modest": 10, "pushy": 10})
    assert sorted(order) == ["modest0", "modest1", "pushy0", "pushy1"]


def test_a_client_has_one_share_however_many_users_it_names() -> None:
    flood = [(Tenant("flood", f"user {index}"), "flood") for index in range(1000)]
    queue = queue_of(*flood, *[("quiet", "quiet")] * 20)
    assert Counter(take(queue, 10) for _ in range(40)) == {"flood": 20, "quiet": 20}


def test_idle_time_earns_no_credit() -> None:
    queue = queue_of(("busy", "b0"))
    queue.charge(Tenant("busy"), 0, 1000)
    for client, item in (("busy", "b1"), ("back", "k0"), ("back", "k1")):
        queue.push(Tenant(client), item)
    order = served_order(queue, 3, {"busy": 1, "back": 600})
    assert order[0] in ("b0", "k0")
    assert "b0" in order[:2]


@pytest.mark.parametrize(("old", "new"), [(Tenant("old"), Tenant("new")), (Tenant("one", "old"), Tenant("one", "new"))])
def test_service_received_while_no_other_client_waited_is_not_charged(old: Tenant, new: Tenant) -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(100):  # each item is served as soon as it comes
        queue.push(old, "old")
        take(queue, 1000)
    for _ in range(20):
        queue.push(new, "new")
    queue.push(old, "old")
    queue.push(old, "old")
    assert Counter(take(queue, 1000) for _ in range(5)) == {"new": 3, "old": 2}


def test_items_that_are_not_ready_are_passed_over_with_all_behind_them() -> None:
    x, y = Tenant("a", "x"), Tenant("a", "y")
    queue = queue_of((x, "a1"), (x, "a2"), (y, "a3"), ("b", "b1"))
    queue.charge_service(Tenant("b"), 1.0)
    assert queue.first_of(lambda item: True) == queue.first() == x
    assert queue.first_of(lambda item: item != "a1") == y
    assert queue.first_of(lambda item: item in ("a2", "b1")) == Tenant("b")
    assert queue.first_of(lambda item: False) is None


def test_an_item_can_be_removed_from_the_middle() -> None:
    queue = queue_of(*(("t", item) for item in "abc"))
    queue.remove(Tenant("t"), "b")
    with pytest.raises(ValueError, match="not in"):
        queue.remove(Tenant("t"), "b")
    assert (list(queue), len(queue)) == (["a", "c"], 2)


def test_an_item_that_is_put_back_is_the_next_one_again() -> None:
    queue = queue_of(*(("t", item) for item in "ab"))
    queue.put_back(Tenant("t"), queue.pop(Tenant("t")))
    assert (list(queue), len(queue)) == (["a", "b"], 2)


def test_upcoming_items_are_the_first_of_every_client_then_the_second_of_every_client() -> None:
    items = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("c", "c2")]
    queue = queue_of(*items, (Tenant("a", "z"), "z1"))
    queue.charge(Tenant("a"), 100, 0)
    whole = ["b1", "c1", "z1", "c2", "a1", "a2", "a3"]
    assert [queue.upcoming(count) for count in range(9)] == [whole[:count] for count in range(9)]
    assert len(queue) == 7


def test_the_newest_item_of_the_largest_client_is_dropped_for_a_client_with_fewer() -> None:
    flood = [(Tenant("flood", f"u{index % 2}"), f"f{index}") for index in range(4)]
    queue = queue_of(*flood, ("quiet", "q0"))
    assert queue.newest_of_largest(Tenant("quiet")) in ("f2", "f3")
    assert queue.newest_of_largest(Tenant("flood")) is None
    queue.push(Tenant("quiet"), "q1")
    queue.push(Tenant("quiet"), "q2")
    assert queue.newest_of_largest(Tenant("quiet")) is None
    assert queue.newest_of_largest(Tenant("new")) in ("f2", "f3")


def test_a_client_of_twice_the_weight_gets_twice_the_service_while_both_wait() -> None:
    heavy, light = Tenant("heavy", weight=2.0), Tenant("light", weight=1.0)
    queue = queue_of(*[(heavy, "heavy"), (light, "light")] * 60)
    assert Counter(take(queue, 10) for _ in range(60)) == {"heavy": 40, "light": 20}


def test_a_client_of_twice_the_weight_may_have_twice_as_many_items_in_a_full_queue() -> None:
    heavy, light = Tenant("heavy", weight=2.0), Tenant("light", weight=1.0)
    queue = queue_of(*[(heavy, "heavy")] * 8, *[(light, "light")] * 3)
    assert queue.newest_of_largest(light) is None  # 7 of weight 2 are fewer than 4 of weight 1
    queue.push(heavy, "heavy")
    assert queue.newest_of_largest(light) == "heavy"
    assert queue.newest_of_largest(heavy) is None


TENANTS = st.builds(Tenant, st.sampled_from("abc"), st.sampled_from("xyz"))


@given(st.lists(st.tuples(TENANTS, st.integers(1, 50)), max_size=200), st.integers(0, 5))
def test_clients_that_always_wait_get_equal_service_within_one_request(
    charged: list[tuple[Tenant, int]], most: int
) -> None:
    """This holds for any requests of their users, and also when counters of idle users are removed."""
    before, fair_queue._MAX_COUNTERS = fair_queue._MAX_COUNTERS, most
    try:
        queue = queue_of(*[(Tenant(client, user), client) for client in "abc" for user in "xyz"] * 200)
        clients: Counter[str] = Counter()
        users: Counter[Tenant] = Counter()
        for _, tokens in charged:
            tenant = queue.first()
            assert tenant is not None
            clients[take(queue, tokens)] += tokens
            users[tenant] += tokens
            assert max(clients.values()) - min(clients[client] for client in "abc") <= 50
            for client in "abc":
                of_client = [users[Tenant(client, user)] for user in "xyz"]
                assert max(of_client) - min(of_client) <= 50
    finally:
        fair_queue._MAX_COUNTERS = before


@settings(max_examples=100)
@given(st.lists(st.sampled_from(["a", "a", "b", 25, 50, 50]), min_size=100, max_size=200), st.sampled_from(["", "one"]))
def test_two_names_that_wait_get_equal_service_within_two_requests(steps: list[str | int], client: str) -> None:
    """`steps`: a name pushes a request of that client, or of that user of one client; a number serves the next request
    with so many tokens. Service while only one of the two waited makes no difference."""
    queue: FairQueue[str] = FairQueue()
    waiting: Counter[str] = Counter()
    a_before_b = 0  # tokens, since both wait
    for step in steps:
        if isinstance(step, str):
            queue.push(Tenant(client, step) if client else Tenant(step), step)
            waiting[step] += 1
        elif queue:
            name = take(queue, step)
            waiting[name] -= 1
            a_before_b += step if name == "a" else -step
        if not (waiting["a"] and waiting["b"]):
            a_before_b = 0
        assert abs(a_before_b) <= 2 * 50


def test_the_first_of_other_clients() -> None:
    queue = queue_of(("a", "a1"), ("b", "b1"))
    assert queue.first() == Tenant("a")
    assert queue.first({"a"}) == Tenant("b")
    assert queue.first({"a", "b"}) is None


def test_what_is_put_back_is_the_next_of_its_tenant() -> None:
    queue = queue_of(("a", "a1"), ("a", "a2"))
    assert queue.pop(Tenant("a")) == "a1"
    queue.put_back(Tenant("a"), "a1")
    assert [queue.pop(Tenant("a")) for _ in range(2)] == ["a1", "a2"]
    queue.put_back(Tenant("a"), "a2")  # which has no others
    assert queue.first() == Tenant("a")
