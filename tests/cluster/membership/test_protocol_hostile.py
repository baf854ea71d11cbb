"""Protocols that receive noise, recordings and unauthenticated connections, or have peers that do not read: nothing
raises, no false record is accepted, and queues stay bounded."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.membership.connection import MAX_WAITING, UNKNOWN_SECRET
from caraserve.cluster.membership.events import CloseConnection, Dial, QueryReceived
from caraserve.cluster.membership.messages import Entries, PeerQuery, Sync
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.membership.swim import MemberChanged, MemberRecord, MemberState, MemberUpdate
from caraserve.cluster.state.lww_map import Entry
from caraserve.cluster.state.replicated_map import REGISTRY, InstanceLoad
from tests.cluster.fleet import WALL_MS, closed, protocol_of, taken


def pair() -> tuple[ClusterProtocol, ClusterProtocol, list[tuple[int, bytes]]]:
    """Returns two protocols in session over connection 1, dialled by the second, and all frames so far as
    (receiver, frame)."""
    one, other = protocol_of("a"), protocol_of("b")
    one.connected(1, 0.0)
    other.connected(1, 0.0, dialled="a:1")
    frames = exchange(one, other, 0.0)
    assert set(one.peers()) == {"b"}
    return one, other, frames


def exchange(one: ClusterProtocol, other: ClusterProtocol, now: float) -> list[tuple[int, bytes]]:
    """Ticks both and delivers frames until none is left. Returns them as (receiver, frame)."""
    frames: list[tuple[int, bytes]] = []
    one.tick(now)
    other.tick(now)
    quiet = False
    while not quiet:
        quiet = True
        for index, (here, there) in enumerate(((one, other), (other, one))):
            while (frame := here.pull(1, now)) is not None:
                quiet = False
                frames.append((1 - index, frame))
                there.received(1, frame, now)
    return frames


def test_recorded_frames_are_not_accepted_on_another_connection() -> None:
    one, other, frames = pair()
    frames += exchange(one, other, 0.3)
    victim = protocol_of("b", 10.0, seed="restarted")
    victim.connected(1, 10.0)
    for _ in range(2):
        for to, frame in frames:
            if to == 1:
                victim.received(1, frame, 10.0)
    assert set(victim.peers()) == set()
    assert len(victim.members.records()) == 1


def test_a_frame_sent_back_or_again_changes_nothing() -> None:
    one, other, frames = pair()
    frames += exchange(one, other, 0.3)
    before = (one.members.records(), one.state.load("b", 1.0), one.malformed)
    assert before[1] is not None
    for to, frame in frames:
        if to == 0:
            one.received(1, frame, 0.9)
    assert (one.members.records(), one.state.load("b", 1.0), one.malformed) == before
    reflected = [frame for to, frame in frames if to == 1 and frame[:1] == b"S"][:5]
    for frame in reflected:
        one.received(1, frame, 0.9)
    assert one.malformed == before[2] + len(reflected)
    assert one.members.records() == before[0]


def test_a_repeated_query_is_received_once() -> None:
    one, other, _ = pair()
    other.take_outputs()
    one.send_query("b", PeerQuery(1, False, ("adapter",)))
    frame = one.pull(1, 0.1)
    assert frame is not None
    for _ in range(3):
        other.received(1, frame, 0.1)
    assert other.take_outputs() == [QueryReceived("a", PeerQuery(1, False, ("adapter",)))]


def test_updates_of_a_replaced_heartbeat_are_still_sent() -> None:
    one, other, _ = pair()
    for name in "xyz":
        one.members.merge(MemberUpdate(MemberRecord(name, f"{name}:1", 5, 0, MemberState.ALIVE), ""), 0.3)
        for _ in range(30):  # as often as an update is sent, and no frame leaves
            one.set_load(InstanceLoad(), 0.3, urgent=True)
            one.tick(0.3)
    exchange_back(one, other, 0.3)
    assert {record.name for record in other.members.records()} == set("abxyz")


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), junk=st.lists(st.binary(max_size=60), max_size=8))
def test_no_bytes_raise_or_change_the_records(seed: int, junk: list[bytes]) -> None:
    rng = Random(seed)
    one, other, frames = pair()
    records = one.members.records()
    for bytes_ in junk:
        one.received(1, rng.choice([b"", b"H", b"S"]) + bytes_, 0.1)
    for _, frame in rng.sample(frames, min(6, len(frames))):
        at = rng.randrange(len(frame))
        one.received(1, frame[:at] + bytes([frame[at] ^ 1 << rng.randrange(8)]) + frame[at + 1 :], 0.1)
        one.received(1, frame[:at], 0.1)
    one.received(99, b"H", 0.1)
    assert one.members.records() == records
    assert one.malformed > 0
    exchange(one, other, 0.3)


def test_a_connection_without_a_valid_frame_is_closed() -> None:
    protocol = protocol_of()
    protocol.connected(1, 0.0)
    for _ in range(20):
        protocol.received(1, b"GET / HTTP/1.1", 0.0)
    assert protocol.take_outputs() == [CloseConnection(1, UNKNOWN_SECRET, None)]
    assert protocol.pull(1, 0.0) is None
    protocol.lost(1, 0.0)
    assert protocol.writable() == []


def test_a_connection_without_a_hello_is_closed_and_so_is_a_silent_one() -> None:
    one, other, _ = pair()
    one.connected(2, 0.0)
    other.take_outputs()
    one.take_outputs()
    now = 0.0
    closed = []
    while now < 12:
        now += 0.1
        one.tick(now)
        while one.pull(1, now) is not None or one.pull(2, now) is not None:
            pass
        closed += [(round(now), output.connection_id) for output in taken(one, CloseConnection)]
    assert closed == [(5, 2), (10, 1)]


def test_the_queue_for_a_peer_that_does_not_read_is_bounded_and_keeps_the_newest_heartbeat() -> None:
    one, other, _ = pair()
    now = 0.3
    for step in range(30):
        now += 0.25
        one.set_load(InstanceLoad(running=step), now)
        one.tick(now)
        exchange_back(other, one, now)
    assert one._connections[1].waiting < 100
    frames = []
    while (frame := one.pull(1, now)) is not None:
        frames.append(frame)
        other.received(1, frame, now)
    assert len(frames) < 100
    found = other.state.load("a", now)
    assert found is not None
    assert found[0].running == 29
    one.take_outputs()
    for number in range(MAX_WAITING + 1):
        one.send_query("b", PeerQuery(number, False, ()))
    one.tick(now)
    assert taken(one, CloseConnection) == [
        CloseConnection(1, "it does not read what it is sent", one._connections[1].dialled)
    ]
    assert one._connections[1].waiting == 0


def exchange_back(source: ClusterProtocol, sink: ClusterProtocol, now: float) -> None:
    """Ticks `source` and delivers its frames to `sink`, but none in the other direction."""
    source.tick(now)
    while (frame := source.pull(1, now)) is not None:
        sink.received(1, frame, now)


def test_unauthenticated_connections_are_bounded_and_end_no_session() -> None:
    one, _, _ = pair()
    for connection in range(100, 400):
        one.connected(connection, 0.1)
    assert closed(one) == list(range(100, 400 - 128))  # the oldest, and not the one in session


def test_a_peer_with_a_key_gets_a_session_beside_many_unauthenticated_connections() -> None:
    one = protocol_of()
    for connection in range(100, 400):
        one.connected(connection, 0.0)
    other = protocol_of("b")
    one.connected(1, 0.1)
    other.connected(1, 0.1, dialled="a:1")
    hello = other.pull(1, 0.1)
    assert hello is not None
    one.received(1, hello, 0.1)
    for connection in range(400, 700):
        one.connected(connection, 0.1)
    exchange(one, other, 0.2)
    assert set(one.peers()) == {"b"}


def test_unauthenticated_connections_close_no_dialled_ones() -> None:
    one = protocol_of()
    for connection in range(60):
        one.connected(connection, 0.0, dialled=f"peer-{connection}:1")
    for connection in range(100, 700):
        one.connected(connection, 0.1)
    for connection in range(700, 760):
        one.connected(connection, 0.2, dialled=f"peer-{connection}:1")
    closed = taken(one, CloseConnection)
    assert len(closed) == 600 - 128
    assert all(output.dialled is None for output in closed)


def test_unauthenticated_connections_do_not_push_out_the_own_nonces() -> None:
    one = protocol_of()
    one.connected(1, 0.0, dialled="own:1")
    hello = one.pull(1, 0.0)
    assert hello is not None
    one.lost(1, 0.0)
    for connection in range(100, 500):
        one.connected(connection, 0.0)
    one.take_outputs()
    one.received(499, hello, 0.1)
    assert [output.reason for output in taken(one, CloseConnection)] == ["it is our own address"]


def test_a_record_without_a_valid_address_is_dropped_and_the_session_continues() -> None:
    one, other, _ = pair()
    before = one.members.records()
    other._peers["a"].send(Sync(False, (MemberRecord("z", "a:1/meta-data/?x=:80", 5, 0, MemberState.ALIVE),), ()))
    exchange(one, other, 0.1)
    for step in range(20):
        exchange(one, other, 0.3 + step / 10)
    assert one.malformed == 1
    assert one.members.records() == before
    assert not taken(one, Dial)
    assert set(one.peers()) == {"b"}


def test_an_invalid_entry_in_a_frame_does_not_keep_out_the_others() -> None:
    one, other, _ = pair()
    good, bad = ("d" * 64, 8, 1), ("../d", 8, 1)
    entries = tuple(Entry(name, value, WALL_MS << 16, "b") for name, value in (("x", good), ("y", bad), ("z", good)))
    other._peers["a"].send(Entries(0, REGISTRY, entries, 3, True))
    exchange(one, other, 0.1)
    assert {adapter.name for adapter in one.state.adapters()} == {"x", "z"}
    assert (one.state.refused, one.malformed) == (1, 0)


def test_a_heartbeat_counts_only_for_its_sender() -> None:
    one, other, _ = pair()
    other.members.me = MemberRecord("somebody", "x:1", WALL_MS, 0, MemberState.ALIVE)
    exchange(one, other, 0.3)
    assert one.state.load("somebody", 0.3) is None
    assert one.members.get("somebody") is None


def test_every_change_of_a_member_is_reported_once() -> None:
    one, _, _ = pair()
    one.take_outputs()
    one.members.merge(MemberUpdate(MemberRecord("z", "z:1", 5, 0, MemberState.ALIVE), ""), 0.1)
    one.tick(0.1)
    events = taken(one, MemberChanged)
    assert [(event.record.name, event.before) for event in events] == [("z", None)]
