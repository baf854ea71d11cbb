"""Instances find each other over real sockets, share their state, and end in order."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from caraserve.cluster.membership.auth import Keyring, SecretFile
from caraserve.cluster.membership.member import QueryBody
from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure
from caraserve.cluster.membership.swim import MemberRecord, MemberState, MemberUpdate
from caraserve.cluster.state.lww_map import Entry, _bucket
from caraserve.cluster.state.persistence import ClusterRegistryFile
from caraserve.cluster.state.replicated_map import REGISTRY, InstanceLoad, RegisteredAdapter, Tier
from caraserve.errors import ConfigError
from tests.cluster.nodes import Instances, instances, until

OLD, NEW = b"the old secret of this cluster", b"the new secret of this cluster"


async def test_five_instances_agree_and_one_that_leaves_is_not_suspected(running: Instances) -> None:
    seen: list[MemberState] = []
    await running.together("a", "b", "c", "d", "e")
    for one in running.running.values():
        one.handlers.on_member_change = lambda record: seen.append(record.state)
    await running.stop("e")
    await until(running.agree)
    assert all(one.sees("e") == MemberState.LEFT for one in running.running.values())
    assert seen == [MemberState.LEFT] * 4


async def test_a_name_is_registered_and_removed_on_all_instances(running: Instances) -> None:
    adapter = RegisteredAdapter("poet", "d" * 64, 8, 4096)
    heard: list[object] = []
    a, b, c = (one.member for one in await running.together("a", "b", "c"))
    running.running["c"].handlers.on_registry_change = heard.append
    a.register(adapter)
    a.advertise_tier("d1", Tier.HOST)
    await until(lambda: b.adapter("poet") == c.adapter("poet") == adapter)
    await until(lambda: c.holders("d1") == {"a": Tier.HOST})
    b.remove("poet")
    await until(lambda: a.adapter("poet") is None and c.adapter("poet") is None)
    assert heard == [{"poet": adapter}, {"poet": None}]


async def test_each_name_is_yielded_with_its_adapter_as_it_is_when_its_turn_comes(running: Instances) -> None:
    def meaning(name: str) -> RegisteredAdapter:
        return RegisteredAdapter(name, name.encode().hex().zfill(64), 8, 10)

    names = [name for name in map(str, range(2000)) if _bucket(name) == 0]  # side by side in the registry
    member = (await running.start("a")).member
    for name in names:
        member.register(meaning(name))
    seen = {}
    async for adapter in member.adapters_in_turns():
        seen[adapter.name] = adapter
        if len(seen) == 1:
            first, changed, gone, *others = [adapter.name, *(name for name in names if name != adapter.name)]
            member.register(RegisteredAdapter(changed, "a" * 64, 8, 10))
            member.remove(gone)
    assert seen == {name: meaning(name) for name in (first, *others)} | {
        changed: RegisteredAdapter(changed, "a" * 64, 8, 10)
    }


async def test_an_entry_of_a_later_version_is_not_taken_for_a_removal(running: Instances) -> None:
    heard: dict[str, RegisteredAdapter | None] = {}
    a, b = (one.member for one in await running.together("a", "b"))
    running.running["a"].handlers.on_registry_change = heard.update
    wall_ms = int(time.time() * 1000)
    later = Entry("poet", ("blake3", "digest"), wall_ms << 16, "b")
    b.protocol.state.merge(REGISTRY, [later], wall_ms)
    b.register(RegisteredAdapter("known", "d" * 64, 8, 10))
    await until(lambda: "known" in heard and a.protocol.state.registry.get("poet") == later)
    assert set(heard) == {"known"}


async def test_holders_are_live_instances_only(running: Instances) -> None:
    await running.together("a", "b")
    running.running["b"].member.advertise_tier("d1", Tier.DEVICE)
    a = running.running["a"].member
    await until(lambda: a.holders("d1") == {"b": Tier.DEVICE})
    await running.stop("b")
    await until(lambda: a.holders("d1") == {})


async def test_names_and_removals_survive_a_restart_of_all_instances(tmp_path: Path) -> None:
    async with instances(tmp_path) as running:
        a, b = (one.member for one in await running.together("a", "b"))
        for index in range(1000):
            a.register(RegisteredAdapter(f"n{index}", f"{index:064x}", 8, 10))
        b.register(RegisteredAdapter("gone", "d" * 64, 8, 10))
        await until(lambda: sum(1 for _ in b.adapters()) == sum(1 for _ in a.adapters()) == 1001)
        a.remove("gone")
        await until(lambda: b.adapter("gone") is None)
    async with instances(tmp_path) as running:
        alone = (await running.start("b")).member
        assert {adapter.name for adapter in alone.adapters()} == {f"n{index}" for index in range(1000)}
        await running.start("a")
        await until(running.agree)
        assert alone.adapter("gone") is None


async def test_a_name_removed_while_http_ends_is_stored_as_removed(tmp_path: Path) -> None:
    async with instances(tmp_path) as running:
        a = (await running.start("a")).member
        a.register(RegisteredAdapter("late", "d" * 64, 8, 10))
        await a.stop()
        a.remove("late")
    with contextlib.closing(ClusterRegistryFile(tmp_path / "a.db")) as names:
        assert [(entry.key, entry.deleted) for entry in names.restore(0)] == [("late", True)]


async def test_a_wrong_clock_is_logged_and_may_be_corrected(
    running: Instances, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    later_s = now_s + 7200
    a, b = (one.member for one in await running.together("a", "b"))
    b.protocol.state.merge(
        REGISTRY, [Entry("ahead", ("d" * 64, 8, 10), int(later_s * 1000) << 16, "b")], int(later_s * 1000)
    )
    b.register(RegisteredAdapter("poet", "d" * 64, 8, 10))
    await until(lambda: "is a clock wrong" in caplog.text)
    assert a.adapter("poet") is None
    monkeypatch.setattr("caraserve.cluster.membership.member.time.time", lambda: later_s)
    b.register(RegisteredAdapter("pirate", "d" * 64, 8, 10))
    await until(lambda: a.adapter("pirate") is not None)


async def test_refusals_are_counted_in_the_metrics(running: Instances) -> None:
    await running.together("a", "b")
    a = running.running["a"].member
    now_ms = int(time.time() * 1000)
    a.protocol.state.merge("b", [Entry("d1", (1,), now_ms << 16, "impostor")] * 3, now_ms)
    a.protocol.received(0, b"no frame", a._now())
    a.protocol.members.refused_names = 4
    a.protocol.state.registry.dropped = 5
    lines = [line for part in a.families('x="y"') for line in part.splitlines() if not line.startswith("#")]
    assert 'caraserve:cluster_members{state="alive",x="y"} 2' in lines
    assert lines[-4:] == [
        'caraserve:cluster_entries_refused_total{x="y"} 3',
        'caraserve:cluster_frames_refused_total{x="y"} 1',
        'caraserve:cluster_instances_refused_total{x="y"} 4',
        'caraserve:cluster_removals_dropped_total{x="y"} 5',
    ]


async def test_a_query_is_answered_and_one_to_an_unknown_instance_is_not(running: Instances) -> None:
    def answer(peer: str, body: QueryBody) -> QueryBody:
        return (peer, *body, 0.5)

    a, b = (one.member for one in await running.together("a", "b"))
    running.running["b"].handlers.answer_query = answer
    assert await a.query("b", ("cost", 8), 1.0) == ("a", "cost", 8, 0.5)
    assert await asyncio.gather(*(a.query("b", (index,), 1.0) for index in range(3))) == [
        ("a", index, 0.5) for index in range(3)
    ]
    assert await a.query("unknown", (), 1.0) is None
    b.protocol.leave(0.0)  # it answers no longer
    assert await a.query("b", (), 0.05) is None


async def test_a_wrong_secret_is_refused_and_logged_as_such(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with instances(tmp_path) as running:
        await running.together("a", "b")
        stranger = await running.start("stranger", keys=Keyring((b"some other secret",)))
        await until(lambda: "--cluster-secret-file" in caplog.text)
        assert [record.name for record in stranger.member.members()] == ["stranger"]
        assert running.running["a"].sees("stranger") is None


async def test_secrets_change_without_a_pause(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.secrets" for name in "ab"}
    for file in files.values():
        file.write_bytes(OLD + b"\n")
    secrets = {name: SecretFile(file) for name, file in files.items()}
    left: list[MemberState] = []
    async with instances(tmp_path) as running:
        for name in "ab":
            one = await running.start(name, keys=secrets[name])
            one.handlers.on_member_change = lambda record: left.append(record.state)
        await until(running.agree)
        for content in (OLD + b"\n" + NEW, NEW + b"\n" + OLD + b"\n", NEW):
            for name, file in files.items():
                file.write_bytes(content)
                running.running[name].member.reread_secrets()
                await asyncio.sleep(0.3)  # the two differ, and speak
        running.running["a"].member.register(RegisteredAdapter("after", "d" * 64, 8, 1))
        await until(lambda: running.running["b"].member.adapter("after") is not None)
        assert left == [MemberState.ALIVE] * 2


async def test_a_secret_file_that_became_invalid_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(OLD)
    secrets = SecretFile(file)
    async with instances(tmp_path) as running:
        await running.start("a", keys=secrets)
        await running.start("b", keys=Keyring((OLD,)))
        await until(running.agree)
        file.write_bytes(b"short")
        running.running["a"].member.reread_secrets()
        running.running["a"].member.register(RegisteredAdapter("after", "d" * 64, 8, 1))
        await until(lambda: running.running["b"].member.adapter("after") is not None)


@pytest.mark.parametrize(("settings", "reason"), [({"model": "other"}, "base model"), ({"called": "a"}, "called a")])
async def test_a_conflicting_newcomer_exits_and_the_running_instance_stays(
    running: Instances, settings: dict[str, str], reason: str
) -> None:
    await running.together("a", "b")
    a = running.running["a"]
    stranger = await running.start("stranger", peers=(a.address,), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=reason):
        await stranger.member.ended
    await running.stop("stranger")
    await until(running.agree)
    assert not a.member.ended.done()


async def test_a_defect_in_handling_one_change_does_not_stop_the_next(running: Instances) -> None:
    seen: list[str] = []

    def fail_once(record: MemberRecord) -> None:
        seen.append(record.name)
        if len(seen) == 1:
            raise ZeroDivisionError

    one = await running.start("a")
    a, one.handlers.on_member_change = one.member, fail_once
    for name in ("x", "y"):
        a.protocol.members.merge(MemberUpdate(MemberRecord(name, "127.0.0.1:1", 1, 0, MemberState.ALIVE), ""), a._now())
    await until(lambda: seen[:2] == ["x", "y"])


async def test_a_node_goes_on_after_a_failed_tick(running: Instances, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (one.member for one in await running.together("a", "b"))
    handlers = running.running["a"].handlers

    def fail_once(lag_s: float) -> InstanceLoad:
        handlers.current_load = lambda lag_s: InstanceLoad("serving", queued=7)
        raise ZeroDivisionError

    handlers.current_load = fail_once
    await until(lambda: (found := b.protocol.state.load("a", 0.0)) is not None and found[0].queued == 7)
    assert not a.ended.done()
    assert 'background_task_failures_total{task="cluster tick",x="y"} 1' in "".join(a.background.families('x="y"'))


async def test_redirects_by_a_peers_address_are_not_followed(tmp_path: Path) -> None:
    asked: list[str] = []

    async def redirect(request: web.Request) -> web.Response:
        asked.append(request.path)
        raise web.HTTPFound("/elsewhere")

    app = web.Application()
    app.router.add_get("/{path:.*}", redirect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    wire = PeerClient(lambda: Keyring((OLD,)), None)
    try:
        assert await wire.page(address, "/page", 100) is TransferFailure.FAILED
        async with instances(tmp_path) as running:
            await running.start("a", peers=(address,))
            await until(lambda: asked.count("/cluster/ws") >= 2)
    finally:
        await wire.close()
        await runner.cleanup()
    assert set(asked) == {"/page", "/cluster/ws"}


async def test_the_base_models_name_is_refused_for_an_adapter(running: Instances) -> None:
    await running.start("a", base_name="base")
    b = (await running.start("b")).member
    await until(running.agree)
    for name in ("base", "poet"):
        b.register(RegisteredAdapter(name, "d" * 64, 8, 1))
    a = running.running["a"].member
    await until(lambda: a.adapter("poet") is not None and a.protocol.state.refused > 0)
    assert [adapter.name for adapter in a.adapters()] == ["poet"]


async def test_no_web_page_can_join(tmp_path: Path) -> None:
    async with instances(tmp_path) as running, aiohttp.ClientSession() as session:
        one = await running.start("a")
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await session.ws_connect(f"http://{one.address}/cluster/ws", origin="http://evil.example")
        assert caught.value.status == 403


@pytest.mark.parametrize("frame", [b"", b"H", b"\x00" * 200_000, b"S" + b"x" * 100])
async def test_malformed_frames_disturb_no_instance(tmp_path: Path, frame: bytes) -> None:
    async with instances(tmp_path) as running, aiohttp.ClientSession() as session:
        await running.together("a", "b")
        async with session.ws_connect(f"http://{running.running['a'].address}/cluster/ws") as stream:
            with contextlib.suppress(ConnectionError):
                for _ in range(30):
                    await stream.send_bytes(frame)
            while (await stream.receive(timeout=20)).type is aiohttp.WSMsgType.BINARY:
                pass
        assert running.agree()
