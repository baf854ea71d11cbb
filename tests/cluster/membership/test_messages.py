"""Messages and frames: encoding is exact, invalid ones are refused, and decoding never raises."""

from random import Random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.membership.auth import (
    HELLO_FRAME,
    SESSION_FRAME,
    WINDOW,
    Keyring,
    ReplayWindow,
    sign_frame,
    verify_frame,
)
from caraserve.cluster.membership.messages import (
    MAX_BATCH,
    MAX_FRAME,
    Ack,
    Compare,
    Entries,
    Heartbeat,
    Hello,
    Leave,
    Malformed,
    Message,
    Nack,
    PeerQuery,
    Ping,
    PingRequest,
    Refuse,
    Sync,
    decode,
    encode,
    entry_batches,
)
from caraserve.cluster.membership.swim import MAX_KNOWN, MAX_UPDATES, MemberRecord, MemberState, MemberUpdate
from caraserve.cluster.state.lww_map import BUCKETS, MAX_ADDRESS, MAX_KEY, MAX_NAME, MAX_VALUE, Entry
from caraserve.cluster.state.replicated_map import InstanceLoad
from caraserve.errors import ConfigError

SECRETS = (b"the first secret of all", b"the second secret of all")

plain = st.text(st.sampled_from("abz09 .:/-_[]"), min_size=1, max_size=MAX_NAME).filter(lambda text: "\\" not in text)
names = st.text(st.sampled_from("abz09.:-"), min_size=1, max_size=20)
maybe = st.one_of(st.just(""), names)
counts = st.integers(0, 2**62 - 1)
words = st.integers(0, 2**64 - 1)
reals = st.floats(0, 1e9)
addresses = st.sampled_from(["a:1", "10.0.0.7:65535", "[::1]:80", "b-2.c_d.example.:8000"])
records = st.builds(MemberRecord, names, addresses, counts, counts, st.sampled_from(MemberState))
updates = st.lists(st.builds(MemberUpdate, records, maybe), max_size=4).map(tuple)
loads = st.builds(
    InstanceLoad,
    st.sampled_from(["starting", "serving", "draining"]),
    *(counts, counts, st.lists(st.tuples(counts, counts), max_size=5).map(tuple)),
    *(counts, counts, counts, st.integers(-(2**62) + 1, 2**62 - 1), counts),
    *(reals, reals, reals),
)
entries = st.one_of(
    st.builds(
        Entry,
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30),
        st.lists(st.one_of(st.text(max_size=9), counts), max_size=8).map(tuple),
        *(counts, names),
        st.just(False),
    ),
    st.builds(Entry, names, st.just(()), counts, names, st.just(True)),
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, counts, maybe, maybe, names, addresses, counts, names, maybe, st.booleans()),
    st.builds(Refuse, names, plain),
    st.builds(Heartbeat, records, counts, loads, words, words, updates),
    st.builds(Ping, counts, updates),
    st.builds(PingRequest, counts, names, updates),
    st.builds(Ack, counts, records),
    st.builds(Nack, counts),
    st.builds(
        Sync,
        st.booleans(),
        st.lists(records, max_size=5).map(tuple),
        st.lists(st.tuples(maybe, words), max_size=5).map(tuple),
    ),
    st.builds(Compare, counts, maybe, st.tuples(*[words] * 4).map(lambda four: four * (BUCKETS // 4))),
    st.builds(Entries, counts, maybe, st.lists(entries, max_size=5).map(tuple), counts, st.booleans()),
    st.builds(PeerQuery, counts, st.booleans(), st.lists(st.one_of(names, counts, reals), max_size=5).map(tuple)),
    st.builds(Leave, records),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=80)
@given(message=messages)
def test_a_message_decodes_to_what_was_encoded(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=80)
@given(body=st.one_of(st.binary(max_size=200), json_values.map(lambda value: orjson.dumps(value, default=str))))
def test_decoding_never_raises(body: bytes) -> None:
    assert isinstance(decode(body), Malformed | Nack)


def places(value: object, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Yields every position in nested lists."""
    inner = (
        [place for index, item in enumerate(value) for place in places(item, (*path, index))]
        if isinstance(value, list)
        else []
    )
    return [path, *inner] if path else inner


@settings(max_examples=120)
@given(message=messages, other=json_values, data=st.data())
def test_a_message_with_one_wrong_thing_in_it_never_raises(
    message: Message, other: object, data: st.DataObject
) -> None:
    value = orjson.loads(encode(message))
    *way, last = data.draw(st.sampled_from(places(value)))
    inner = value
    for index in way:
        inner = inner[index]
    inner[last] = other
    read = decode(orjson.dumps(value))
    if not isinstance(read, Malformed):  # then the new value was as good as the old one
        assert decode(encode(read)) == read


@pytest.mark.parametrize(
    "value",
    [
        *(["nack"], ["nack", 1, 2], ["nack", -1], ["nack", True], ["nack", 1.0], ["nack", 2**62], ["nack", "1"]),
        *(
            [],
            ["?"],
            [["nack"]],
            {"nack": 1},
            7,
            None,
            ["ack", 1, ["a", "b:1", 1, 1, 4]],
            ["ack", 1, ["a", "b:1", 1, 1, True]],
        ),
        *(["ack", 1, ["", "b:1", 1, 1, 0]], ["ack", 1, ["a\n", "b:1", 1, 1, 0]], ["ack", 1, ['a"', "b:1", 1, 1, 0]]),
        *(["ping", 1, [[["a", "b:1", 1, 1, 0], ""]] * (MAX_UPDATES + 1)], ["compare", 1, "", [0] * (BUCKETS - 1)]),
        ["entries", 0, "", [["k", [], 1, "n", False]] * (MAX_BATCH + 1), 0, False],
        ["entries", 0, "", [["k", ["left over"], 1, "n", True]], 0, False],
        ["entries", 0, "", [["k" * (MAX_KEY + 1), [], 1, "n", False]], 0, False],
        ["entries", 0, "", [["k", [1.5], 1, "n", False]], 0, False],
        ["sync", False, [["a", "b:1", 1, 1, 0]] * (MAX_KNOWN + 1), []],
        ["query", 1, False, ["x" * (MAX_VALUE + 1)]],
        ["query", 1, False, [[1]]],
    ],
)
def test_messages_outside_the_bounds_are_malformed(value: object) -> None:
    assert isinstance(decode(orjson.dumps(value)), Malformed)


ELSEWHERE = [
    "127.0.0.1:8399/latest/meta-data/?x=",
    "127.0.0.1/latest/meta-data/?x=:80",
    *("a", "a:", ":1", "a:0", "a:65536", "a:1:2", "a:-1", "a:1.0", "a b:1", "a@b:1", "a#:1", "a?:1", "a%41:1", "-a:1"),
    *("[::1]", "::1:80", "[a]:1", "[::1%eth0]:1", "[::1]a:1", "[127.0.0.1]:1", "x" * 254 + ":1"),
]


@pytest.mark.parametrize("address", ELSEWHERE)
def test_addresses_are_host_and_port_in_every_message(address: str) -> None:
    record = MemberRecord("a", "a:1", 1, 1, MemberState.ALIVE)
    updates = (MemberUpdate(record, ""),)
    said: list[Message] = [
        Hello(2, "c", "m", "a", "a:1", 1, "n", "", False),
        *(
            Heartbeat(record, 1, InstanceLoad(), 0, 0, ()),
            Ping(1, updates),
            PingRequest(1, "b", updates),
            Ack(1, record),
        ),
        *(Sync(False, (record,), ()), Leave(record)),
    ]
    for message in said:
        body = encode(message)
        assert decode(body) == message
        assert isinstance(decode(body.replace(b'"a:1"', orjson.dumps(address))), Malformed)


@pytest.mark.parametrize(
    "body", [b"", b"[", b'["nack",NaN]', b"[" * 100_000, b"\xff", b" " * (MAX_FRAME + 1), b'["\\ud800"]']
)
def test_bodies_that_are_not_json_are_malformed(body: bytes) -> None:
    assert isinstance(decode(body), Malformed)


@pytest.mark.parametrize(
    "body",
    [
        b'["sync",false,[],[["",18446744073709551616]]]',
        b'["heartbeat",["a","a:1",1,1,0],1,["serving"],18446744073709551616,0,[]]',
        b'["heartbeat",["a","a:1",1,1,0],1,["serving",0,0,[],0,0,0,0,0,1e999,0,0],0,0,[]]',
        b'["heartbeat",["a","a:1",1,1,0],1,["serving",0,0,[],0,0,0,0,0,0,0,0,0],0,0,[]]',
    ],
)
def test_numbers_and_fields_beyond_the_bounds_are_malformed(body: bytes) -> None:
    assert isinstance(decode(body), Malformed)


def test_the_largest_messages_fit_into_a_frame() -> None:
    highest = 2**62 - 1
    record = MemberRecord("n" * MAX_NAME, "a" * (MAX_ADDRESS - 6) + ":65535", highest, highest, MemberState.SUSPECT)
    update = MemberUpdate(record, "n" * MAX_NAME)
    load = InstanceLoad(
        "starting",
        *(highest, highest, ((highest, highest),) * 64),
        *(highest, highest, highest, -highest, highest),
        *(1e300, 1e300, 1e300),
    )
    entry = Entry("\x00" * MAX_KEY, ("\x00" * MAX_VALUE, *[highest] * 7), highest, "n" * MAX_NAME)
    largest: list[Message] = [
        Sync(False, (record,) * MAX_KNOWN, (("n" * MAX_NAME, 2**64 - 1),) * (MAX_KNOWN + 1)),
        Heartbeat(record, highest, load, 2**64 - 1, 2**64 - 1, (update,) * MAX_UPDATES),
        Compare(highest, "n" * MAX_NAME, (2**64 - 1,) * BUCKETS),
        *(Entries(highest, "n" * MAX_NAME, batch, highest, False) for batch in entry_batches([entry] * 50)),
    ]
    for message in largest:
        frame = sign_frame(SESSION_FRAME, b"key", 2**64 - 1, encode(message))
        assert len(frame) <= MAX_FRAME
        assert verify_frame(SESSION_FRAME, (b"key",), frame) is not None
        assert decode(encode(message)) == message


@given(sizes=st.lists(st.integers(1, MAX_KEY), max_size=500))
def test_batches_lose_nothing_and_keep_the_order(sizes: list[int]) -> None:
    given_entries = [Entry("k" * size, (), index, "n") for index, size in enumerate(sizes)]
    pieces = list(entry_batches(given_entries))
    assert [entry for piece in pieces for entry in piece] == given_entries
    assert all(0 < len(piece) <= MAX_BATCH for piece in pieces)


# ---- frames


@settings(max_examples=100)
@given(body=st.binary(max_size=100), sequence=words, at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_frame_with_a_flipped_bit_does_not_verify(body: bytes, sequence: int, at: int, bit: int) -> None:
    keys = Keyring(SECRETS).session_keys("a", "b")
    frame = sign_frame(SESSION_FRAME, keys[0], sequence, body)
    assert verify_frame(SESSION_FRAME, keys, frame) == (sequence, body)
    at %= len(frame)
    assert verify_frame(SESSION_FRAME, keys, frame[:at] + bytes([frame[at] ^ 1 << bit]) + frame[at + 1 :]) is None


@given(frame=st.binary(max_size=100))
def test_a_frame_of_anything_does_not_verify(frame: bytes) -> None:
    assert verify_frame(SESSION_FRAME, Keyring(SECRETS).hello_keys(), frame) is None


def test_a_frame_is_good_for_one_kind_direction_and_connection() -> None:
    ring = Keyring(SECRETS)
    frame = sign_frame(SESSION_FRAME, ring.session_keys("a", "b")[0], 1, b"[]")
    assert verify_frame(SESSION_FRAME, ring.session_keys("a", "b"), frame) is not None
    for wrong in (ring.session_keys("b", "a"), ring.session_keys("a", "c"), ring.hello_keys()):
        assert verify_frame(SESSION_FRAME, wrong, frame) is None
    assert verify_frame(HELLO_FRAME, ring.session_keys("a", "b"), frame) is None
    assert verify_frame(HELLO_FRAME, ring.session_keys("a", "b"), HELLO_FRAME + frame[1:]) is None


@pytest.mark.parametrize("secrets", [(), (b"short",), (SECRETS[0], b"")])
def test_a_secret_that_can_be_guessed_is_refused(secrets: tuple[bytes, ...]) -> None:
    with pytest.raises(ConfigError, match="16 bytes"):
        Keyring(secrets)


@given(seed=st.integers(0, 999), spread=st.integers(1, 3 * WINDOW))
def test_a_sequence_number_is_accepted_once(seed: int, spread: int) -> None:
    rng, window, taken = Random(seed), ReplayWindow(), set[int]()
    for step in range(200):
        number = step + rng.randrange(spread)
        new = window.is_new(number)
        recent = number > max(taken, default=0) - WINDOW
        assert new == (number not in taken and (recent or not taken))
        if new:
            taken.add(number)


def test_a_far_jump_forgets_and_takes_nothing_twice() -> None:
    window = ReplayWindow()
    assert window.is_new(0)
    assert window.is_new(2**64 - 1)
    assert not window.is_new(0)
    assert not window.is_new(2**64 - 1)
    assert window.is_new(2**64 - 2)
