"""The handshake: which peers get a Hello, and what peers without a key or of another version get."""

from pathlib import Path

import aiohttp
import orjson
import pytest

from caraserve.cluster.membership.auth import HELLO_FRAME, Keyring, sign_frame
from caraserve.cluster.membership.connection import NO_ANSWER, UNKNOWN_SECRET
from caraserve.cluster.membership.events import CloseConnection, Dial, PeerRefused, RefusedByPeer
from caraserve.cluster.membership.messages import PROTOCOL_VERSION, Hello, Malformed, Message, Refuse, decode, encode
from caraserve.cluster.membership.protocol import ClusterProtocol
from caraserve.cluster.membership.websocket import WEBSOCKET_PATH
from tests.cluster import nodes
from tests.cluster.fleet import KEYS, WALL_MS, Fleet, closed, protocol_of, taken

OTHER_KEYS = Keyring((b"another secret, of another fleet",))
_HEAD = 25  # bytes of a frame before its message


def hello(name: str, protocol: int = PROTOCOL_VERSION, epoch: int = WALL_MS) -> Hello:
    return Hello(protocol, "c", "m", name, f"{name}:1", epoch, "its nonce", "", False)


def frame(message: Hello | Refuse, keys: Keyring = KEYS) -> bytes:
    return sign_frame(HELLO_FRAME, keys.hello_keys()[0], 0, encode(message))


def said(one: ClusterProtocol, now: float) -> list[Message | Malformed]:
    """Returns all messages that a protocol has to send over connection 1."""
    found = []
    while (sent := one.pull(1, now)) is not None:
        found.append(decode(sent[_HEAD:]))
    return found


@pytest.mark.parametrize("shown", [None, b"GET / HTTP/1.1", frame(hello("b"), OTHER_KEYS)])
def test_a_peer_without_a_valid_key_gets_no_frame(shown: bytes | None) -> None:
    a = protocol_of("a")
    a.connected(1, 0.0)
    heard: list[object] = []
    for step in range(60):
        if shown is not None and step < 3:
            a.received(1, shown, step / 10)
        a.tick(step / 10)
        heard += said(a, step / 10)
    assert heard == []
    assert closed(a) == [1]


def test_a_peer_with_a_valid_key_gets_a_hello() -> None:
    a = protocol_of("a")
    a.connected(1, 0.0)
    a.received(1, frame(hello("b")), 0.0)
    (answer,) = said(a, 0.0)
    assert isinstance(answer, Hello)
    assert (answer.name, answer.echo) == ("a", "its nonce")
    a.tick(0.6)
    assert [type(again) for again in said(a, 0.6)] == [Hello]  # the first one may have been lost


def test_with_different_secrets_both_sides_report_the_reason() -> None:
    a, b = protocol_of("a"), protocol_of("b", keys=OTHER_KEYS)
    a.connected(1, 0.0, dialled="b:1")
    b.connected(1, 0.0)
    for step in range(60):
        now = step / 10
        for here, there in ((a, b), (b, a)):
            here.tick(now)
            while (sent := here.pull(1, now)) is not None:
                there.received(1, sent, now)
        closed = [output for one in (a, b) for output in taken(one, CloseConnection)]
        if closed:
            break
    assert [one.reason for one in closed] == [
        NO_ANSWER
    ]  # the dialling side closes first; otherwise it would not report the reason
    b.lost(1, now)
    b.connected(2, now)
    for _ in range(20):
        b.received(2, frame(hello("a")), now)
    assert [output.reason for output in taken(b, CloseConnection)] == [UNKNOWN_SECRET]


def test_the_own_address_is_dialled_once() -> None:
    fleet = Fleet(1)
    fleet.start("a", ["a"])
    fleet.run(10)
    assert [output.address for _, output in fleet.nodes["a"].outputs if isinstance(output, Dial)] == ["a:1"]
    assert fleet.nodes["a"].protocol._connections == {}


@pytest.mark.parametrize("we_dial", [False, True])
@pytest.mark.parametrize("started_s", [-9.0, 9.0])
def test_on_a_conflict_of_versions_neither_instance_exits_and_each_reports_it_once(
    we_dial: bool, started_s: float
) -> None:
    a = protocol_of("a", started_s)
    a.connected(1, 0.0, dialled="z:1" if we_dial else None)
    a.received(1, frame(hello("z", PROTOCOL_VERSION + 1)), 0.1)
    ours, refusal = said(a, 0.1)
    assert isinstance(ours, Hello)
    assert isinstance(refusal, Refuse)
    assert refusal.echo == "its nonce"
    a.received(1, frame(Refuse(ours.nonce, "z speaks another version")), 0.2)
    outputs = a.take_outputs()
    (told,) = [output for output in outputs if isinstance(output, PeerRefused)]
    assert told.peer == "z at z:1"
    assert told.reason == refusal.reason
    assert (
        f"version {PROTOCOL_VERSION} of the cluster's protocol, not {PROTOCOL_VERSION + 1}; each serves without"
        in told.reason
    )
    assert [output for output in outputs if isinstance(output, RefusedByPeer)] == []
    assert [output.connection_id for output in outputs if isinstance(output, CloseConnection)] == [1]
    assert list(a.peers()) == []


@pytest.mark.parametrize("protocol", [PROTOCOL_VERSION, PROTOCOL_VERSION + 1])
def test_a_hello_with_further_fields_is_valid_only_for_another_version(protocol: int) -> None:
    longer = orjson.dumps([*orjson.loads(encode(hello("z", protocol))), {"more": True}])
    if protocol == PROTOCOL_VERSION:
        assert isinstance(decode(longer), Malformed)
    else:
        assert decode(longer) == hello("z", protocol)


async def test_an_instance_of_another_version_is_logged_once_and_ends_no_instance(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with nodes.instances(tmp_path) as running, aiohttp.ClientSession() as session:
        a = await running.start("a")
        later = hello("z", PROTOCOL_VERSION + 1, epoch=1)  # so that `a` is the later started
        for _ in range(2):
            async with session.ws_connect(f"http://{a.address}{WEBSOCKET_PATH}") as stream:
                await stream.send_bytes(frame(later, nodes.KEYS))
                ours, refusal = [decode((await stream.receive_bytes())[_HEAD:]) for _ in range(2)]
                assert isinstance(ours, Hello)
                assert isinstance(refusal, Refuse)
                await stream.send_bytes(frame(Refuse(ours.nonce, "z speaks another version"), nodes.KEYS))
                assert (await stream.receive()).type is aiohttp.WSMsgType.CLOSE
        lines = [record.getMessage() for record in caplog.records if "version" in record.getMessage()]
        assert [line.split(";")[0] for line in lines] == [
            f"z at z:1 is refused: a speaks version {PROTOCOL_VERSION} of the cluster's protocol, "
            f"not {PROTOCOL_VERSION + 1}"
        ]
        assert not a.member.ended.done()
