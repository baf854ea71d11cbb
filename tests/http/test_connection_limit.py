"""Tests of which connection is closed for another one when there are as many as allowed."""

from collections.abc import Hashable, Sequence

import pytest

from caraserve.http import connection_limit
from caraserve.http.connection_limit import ConnectionLimit

SPARE = 2


@pytest.fixture(autouse=True)
def few_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limit, "_SPARE", SPARE)


class FakeConnection:
    """A connection whose body arrives when the test says so."""

    def __init__(self, limit: "ConnectionLimit[FakeConnection]", client: Hashable = "a") -> None:
        self.client = client
        self.is_idle, self.body_is_whole, self.is_closed = True, True, False
        self._limit = limit
        self.has_room = limit.add(self)

    def give_up(self) -> None:
        self.is_closed = True

    def request(self, *, whole: bool = True) -> bool:
        """Begins a request. Returns whether it has a place."""
        self.is_idle, self.body_is_whole = False, whole
        self._limit.request_began(self)
        return self._limit.give_place(self)

    def answer(self) -> None:
        self._limit.request_ended(self)
        self.is_idle = self.body_is_whole


def connections(
    limit: "ConnectionLimit[FakeConnection]", count: int, client: Hashable = "a", *, whole: bool = True
) -> list[FakeConnection]:
    """Returns connections with a request under way."""
    opened = [FakeConnection(limit, client) for _ in range(count)]
    assert all(one.request(whole=whole) for one in opened)
    return opened


def closed(opened: Sequence[FakeConnection]) -> list[int]:
    return [position for position, one in enumerate(opened) if one.is_closed]


def test_the_connection_that_is_idle_for_longest_gives_up_its_place() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(3)
    opened = connections(limit, 3)
    for one in (opened[1], opened[0]):
        one.answer()
    assert FakeConnection(limit).request()
    assert closed(opened) == [1]
    assert FakeConnection(limit).request()
    assert closed(opened) == [0, 1]


def test_idle_connections_are_closed_of_the_client_that_has_the_most() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(8)
    few, many = connections(limit, 2, "few"), []
    for one in few:
        one.answer()
    for _ in range(20):
        many += connections(limit, 1, "many")
        many[-1].answer()
    assert (closed(few), closed(many)) == ([], [*range(14)])
    assert all(one.request() for one in many[14:])
    connections(limit, 1, "many")  # while the connections of "few" alone are idle
    assert closed(few) == [0]


def test_of_clients_with_one_idle_connection_each_the_oldest_is_closed() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(3)
    opened = [one for client in "abc" for one in connections(limit, 1, client)]
    for position in (2, 0, 1):
        opened[position].answer()
    for expected in ([2], [0, 2], [0, 1, 2]):
        assert FakeConnection(limit, "d").request()
        assert closed(opened) == expected


def test_a_connection_that_has_its_next_request_is_not_closed() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(2)
    opened = connections(limit, 2)
    for one in opened:
        one.answer()
    opened[0].is_idle = False  # its request has arrived, and begins in the next turn of the event loop
    assert FakeConnection(limit).request()
    assert closed(opened) == [1]


def test_while_all_are_being_answered_further_requests_are_refused_and_none_is_closed() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(3)
    opened = connections(limit, 3)
    late = FakeConnection(limit)
    assert late.has_room
    assert not late.request()
    assert not closed([*opened, late])
    opened[2].answer()
    assert late.request()


def test_the_client_with_the_most_bodies_gives_up_the_one_that_has_been_arriving_for_longest() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(5)
    few = connections(limit, 2, "few", whole=False)
    many = connections(limit, 3, "many", whole=False)
    assert FakeConnection(limit, "other").request()
    assert (closed(few), closed(many)) == ([], [0])
    many[1].body_is_whole = True  # and is being answered
    assert FakeConnection(limit, "other").request()
    assert (closed(few), closed(many)) == ([0], [0])


def test_a_flood_of_half_requests_closes_its_own_connections() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(10)
    flood = connections(limit, 10, "flood", whole=False)
    others = []
    for _ in range(5):
        flood += connections(limit, 10, "flood", whole=False)
        others += connections(limit, 1, "other")
    assert len(flood) - len(closed(flood)) <= 10 - len(others)
    assert not closed(others)


def test_a_refused_request_holds_no_place_while_its_body_arrives() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(2)
    refused = connections(limit, 2, whole=False)
    for one in refused:
        one.answer()
    opened = connections(limit, 2)
    assert not closed(refused)
    assert FakeConnection(limit).has_room
    assert closed(refused) == [0]  # for which there is no place among the spare ones
    assert not closed(opened)


def test_silent_connections_close_one_another_when_there_is_no_room() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(3)
    busy = connections(limit, 3)
    silent = [FakeConnection(limit) for _ in range(5)]
    assert all(one.has_room for one in silent)
    assert (closed(busy), closed(silent)) == ([], [0, 1, 2])


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_flood_of_connections_without_a_place_closes_its_own(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    monkeypatch.setattr(connection_limit, "_SPARE", 2 * SPARE)
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(3)
    busy = connections(limit, 3)
    opened = [FakeConnection(limit, client) for client in ("other", *["flood"] * 10)]
    if is_refused:
        for one in opened:
            if not one.is_closed:
                assert not one.request(whole=False)
                one.answer()
        opened += [FakeConnection(limit, "flood") for _ in range(2)]
    assert not closed(busy)
    assert closed(opened) == [*range(1, 10 if is_refused else 8)]


def test_without_room_a_new_connection_is_refused_while_all_others_are_being_answered() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(3)
    busy = connections(limit, 3)
    probes = [FakeConnection(limit) for _ in range(SPARE)]
    for one in probes:
        one.is_idle = False
        limit.request_began(one)
    assert not FakeConnection(limit).has_room
    assert not closed([*busy, *probes])


def test_a_connection_that_is_lost_gives_back_all_that_it_held() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(2)
    for whole in (True, False):
        for one in connections(limit, 2, whole=whole):
            limit.remove(one)
    assert not closed(connections(limit, 2))


def test_one_client_leaves_places_for_others() -> None:
    limit: ConnectionLimit[FakeConnection] = ConnectionLimit(32)
    greedy = connections(limit, 30, "greedy")
    assert not FakeConnection(limit, "greedy").request()
    assert connections(limit, 2, "other")  # which have a place each
    assert not FakeConnection(limit, "third").request()
    assert not closed(greedy)
    greedy[7].answer()
    assert FakeConnection(limit, "greedy").request()
    assert closed(greedy) == [7]  # its own
    limit.remove(greedy[0])
    assert FakeConnection(limit, "third").request()
