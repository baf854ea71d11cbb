"""The choice among several connections with a peer, frame by frame: both ends choose the same one."""

from random import Random

import pytest

from caraserve.cluster.membership.auth import HELLO_FRAME, sign_frame
from caraserve.cluster.membership.events import (
    CLUSTER_FULL,
    CloseConnection,
    Dial,
    ProtocolSettings,
    QueryReceived,
    RefusedByPeer,
)
from caraserve.cluster.membership.messages import Entries, Hello, PeerQuery, Refuse, decode, encode
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.membership.swim import MemberChanged, MemberState
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from tests.cluster.fleet import KEYS, WALL_MS, closed, protocol_of, taken

_HEAD = 25  # bytes of a frame before its message


def carry(
    one: ClusterProtocol, other: ClusterProtocol, connections: tuple[int, ...], now: float, *, lose: type | None = None
) -> None:
    """Delivers all waiting frames of these connections until there are none. `lose`: a kind of message that is lost."""
    quiet = False
    while not quiet:
        quiet = True
        for here, there in ((one, other), (other, one)):
            for connection in connections:
                while (frame := here.pull(connection, now)) is not None:
                    quiet = False
                    if lose is None or not isinstance(decode(frame[_HEAD:]), lose):
                        there.received(connection, frame, now)


def connect(dialler: ClusterProtocol, other: ClusterProtocol, connection: int, now: float, *others: int) -> None:
    """Opens one more connection and delivers all frames; `others` are open already."""
    dialler.connected(connection, now, dialled=f"{other.members.me.name}:1")
    other.connected(connection, now)
    carry(dialler, other, (connection, *others), now)


def used(here: ClusterProtocol, peer: str, connections: tuple[int, ...], now: float) -> list[int]:
    """Returns the connections over which a message to the peer is sent. Waiting frames are dropped first."""
    for connection in connections:
        while here.pull(connection, now) is not None:
            pass
    here.send_query(peer, PeerQuery(1, False, ()))
    return [connection for connection in connections if here.pull(connection, now) is not None]


@pytest.mark.parametrize("dialler", ["a", "b"])
def test_of_two_connections_dialled_by_one_side_the_newer_is_used(dialler: str) -> None:
    a, b = protocol_of("a"), protocol_of("b")
    there = {"a": (a, b), "b": (b, a)}[dialler]
    connect(*there, 1, 0.0)
    connect(*there, 2, 0.2, 1)  # the first broke, and only the dialling side has noticed
    assert used(a, "b", (1, 2), 0.3) == used(b, "a", (1, 2), 0.3) == [2]


@pytest.mark.parametrize("first", ["a", "b"])
def test_of_two_connections_dialled_by_both_sides_the_lesser_names_is_used(first: str) -> None:
    a, b = protocol_of("a"), protocol_of("b")
    number = {"a": 1, "b": 2}  # of the connection that it dials
    second = "b" if first == "a" else "a"
    ends = {"a": (a, b), "b": (b, a)}
    connect(*ends[first], number[first], 0.0)
    connect(*ends[second], number[second], 0.1, number[first])
    assert used(a, "b", (1, 2), 0.2) == used(b, "a", (1, 2), 0.2) == [1]


@pytest.mark.parametrize("dialler", ["survivor", "restarted"])
@pytest.mark.parametrize("name", ["a", "c"])
def test_a_restarted_instance_is_reached_over_its_new_connection(name: str, dialler: str) -> None:
    survivor, before = protocol_of("b"), protocol_of(name)
    connect(*((before, survivor) if dialler == "survivor" else (survivor, before)), 1, 0.0)
    restarted = protocol_of(name, 3.0)  # its machine said nothing of the end of connection 1
    connect(*((survivor, restarted) if dialler == "survivor" else (restarted, survivor)), 2, 3.1)
    assert used(survivor, name, (1, 2), 3.2) == [2]
    survivor.lost(1, 3.3)
    assert used(survivor, name, (2,), 3.4) == [2]
    record = survivor.members.get(name)
    assert record is not None
    assert record.state == MemberState.ALIVE


def test_the_spare_connection_is_closed_after_2_s_without_a_suspicion() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    connect(a, b, 1, 0.0)
    connect(b, a, 2, 0.1, 1)
    closed: list[CloseConnection] = []
    now = 0.1
    while now < 3.0 and not closed:
        now += 0.1
        for one in (a, b):
            one.tick(now)
        carry(a, b, (1, 2), now)
        closed = taken(a, CloseConnection)
    assert [(one.connection_id, one.dialled) for one in closed] == [(2, None)]
    assert now == pytest.approx(2.2, abs=0.15)
    for one in (a, b):
        one.lost(2, now)
    assert used(a, "b", (1, 2), now) == used(b, "a", (1, 2), now) == [1]
    assert {record.state for record in (*a.members.records(), *b.members.records())} == {MemberState.ALIVE}


def test_nothing_is_sent_over_a_connection_that_is_to_be_closed() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    connect(a, b, 1, 0.0)
    a.leave(0.5)
    carry(a, b, (1,), 0.5)
    assert closed(b) == [1]
    assert list(b.peers()) == []
    assert not b.send_query("a", PeerQuery(1, False, ()))


def test_what_arrives_over_a_connection_that_is_to_be_closed_is_not_read() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    connect(a, b, 1, 0.0)
    a.send_query("b", PeerQuery(7, False, ()))
    late = a.pull(1, 0.4)
    assert late is not None
    a.leave(0.5)
    carry(a, b, (1,), 0.5)
    b.received(1, late, 0.6)
    assert taken(b, QueryReceived) == []


def test_a_compare_over_a_broken_connection_is_repeated_over_the_next_one() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    a.register(RegisteredAdapter("poet", "d" * 64, 8, 1), 0.0)
    a.tick(0.0)  # the push reaches no peer
    for number, lose in ((1, Entries), (2, None)):
        a.connected(number, 0.1, dialled="b:1")
        b.connected(number, 0.1)
        carry(a, b, (number,), 0.1, lose=lose)
        assert (b.state.adapter("poet") is None) is (lose is not None)
        a.lost(number, 0.2)
        b.lost(number, 0.2)


def test_a_leaving_instance_suspects_no_peer_and_accepts_no_connection() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    connect(a, b, 1, 0.0)
    a.take_outputs()
    a.leave(0.5)
    a.lost(1, 0.6)
    assert taken(a, MemberChanged) == []
    a.connected(2, 0.7)
    assert closed(a) == [2]


def test_a_spare_connection_that_was_lost_is_not_used_later() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    connect(a, b, 1, 0.0)
    connect(b, a, 2, 0.1, 1)
    a.lost(2, 0.2)  # the spare
    a.lost(1, 0.3)
    record = a.members.get("b")
    assert record is not None
    assert record.state == MemberState.SUSPECT
    assert list(a.peers()) == []
    connect(a, b, 2, 0.4)  # the number comes again
    for now in (1.0, 2.0, 3.0):
        a.tick(now)
    assert taken(a, CloseConnection) == []


@pytest.mark.parametrize("later", ["a", "b"])
def test_on_a_conflict_of_configuration_the_later_started_instance_must_exit(later: str) -> None:
    a = protocol_of("a", 1.0 if later == "a" else 0.0, model="m")
    b = protocol_of("b", 1.0 if later == "b" else 0.0, model="other")
    connect(a, b, 1, 1.0)
    told = {name: [output.must_exit for output in taken(one, RefusedByPeer)] for name, one in (("a", a), ("b", b))}
    assert told == {later: [True], "b" if later == "a" else "a": [False]}


def test_a_second_instance_of_a_name_is_refused_until_the_first_is_silent() -> None:
    first, third = protocol_of("a"), protocol_of("b")
    connect(first, third, 1, 0.0)
    second = protocol_of("a", 0.5, address="elsewhere:1")
    connect(second, third, 2, 0.5)
    (refused,) = taken(second, RefusedByPeer)
    assert refused.reason == "an instance at a:1 is called a, too; give each a --name of its own"
    assert refused.must_exit
    assert third.members.get("a") == first.members.me
    connect(second, third, 3, 2.0)
    assert used(third, "a", (1, 3), 2.1) == [3]


def test_a_corrected_clock_is_used_without_a_restart() -> None:
    a = ClusterProtocol(ProtocolSettings("c", "m", "a", "a:1"), KEYS, Random("a"), 0.0, 1000)  # just after 1970
    b = protocol_of("b")
    connect(a, b, 1, 0.0)
    b.register(RegisteredAdapter("poet", "d" * 64, 8, 1), 0.0)
    b.tick(0.1)
    carry(a, b, (1,), 0.1)
    assert a.state.adapter("poet") is None
    assert a.state.refused > 0
    for step in range(350):
        now = 0.2 + step / 10
        a.tick(now, WALL_MS + int(now * 1000))
        b.tick(now)
        carry(a, b, (1,), now)
    assert a.state.adapter("poet") is not None


def refuse(one: ClusterProtocol, connection: int, reason: str, now: float) -> list[bool]:
    """Refuses an instance on a new connection. Returns `must_exit` of each of its reports."""
    one.connected(connection, now, dialled="z:1")
    frame = one.pull(connection, now)
    assert frame is not None
    hello = decode(frame[_HEAD:])
    assert isinstance(hello, Hello)
    one.received(connection, sign_frame(HELLO_FRAME, KEYS.hello_keys()[0], 0, encode(Refuse(hello.nonce, reason))), now)
    return [output.must_exit for output in taken(one, RefusedByPeer)]


def test_an_instance_exits_if_the_cluster_is_full_whatever_its_start() -> None:
    assert refuse(protocol_of("a"), 1, CLUSTER_FULL, 0.1) == [True]


def test_an_instance_that_was_in_the_cluster_does_not_exit_when_it_is_full() -> None:
    a, b = protocol_of("a"), protocol_of("b")
    connect(a, b, 1, 0.0)
    assert refuse(a, 2, CLUSTER_FULL, 0.1) == [False]
    a.lost(1, 0.2)
    assert refuse(a, 3, CLUSTER_FULL, 0.3) == [False]
    for step in range(20):
        a.tick(0.4 + step / 10)
    assert "b:1" in {output.address for output in taken(a, Dial)}
