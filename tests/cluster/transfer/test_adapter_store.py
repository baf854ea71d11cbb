"""The adapters that an instance stores: written within bounds, promised once verified, deleted only for a promise."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from caraserve.cluster.node import disk_bytes
from caraserve.cluster.state.replicated_map import Tier
from caraserve.cluster.transfer.adapter_store import KEEP_QUERY, AdapterStore
from caraserve.cluster.transfer.disk_cache import DiskCache, file_size
from caraserve.cluster.transfer.upload import UploadsBusy
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import InvalidRequest
from tests.cluster.images import MODEL, image
from tests.cluster.nodes import until
from tests.cluster.pools import PoolInstance, Pools


async def test_a_copy_is_deleted_only_with_another_holders_promise(fleet: Pools) -> None:
    (a, b, c), digest = await fleet.sharing("a", "b", "c")
    assert await b.pool.store.try_delete(digest)
    assert digest not in b.stored
    await until(lambda: set(a.member.holders(digest)) == set("ac"))
    await fleet.stop("a")
    await until(lambda: set(c.member.holders(digest)) == {"c"})
    assert not await c.pool.store.try_delete(digest)
    assert digest in c.stored


async def test_a_folder_that_is_gone_is_not_promised(fleet: Pools) -> None:
    (a, b), digest = await fleet.sharing("a", "b")
    folder = Path(a.catalog.get("poet").path)
    folder.rename(folder.with_name("away"))  # noqa: ASYNC240
    a.pool.store._checked_s.clear()  # what was seen a moment ago is still believed
    assert not await b.pool.store.try_delete(digest)
    assert digest in b.stored
    await until(lambda: set(b.member.holders(digest)) == {"b"})


async def test_a_folder_that_was_only_touched_is_promised(fleet: Pools) -> None:
    (a, _), digest = await fleet.sharing("a", "b")
    os.utime(Path(a.catalog.get("poet").path) / "adapter_model.safetensors", (1, 1))
    await until(lambda: _promises(a, digest))


async def test_adapters_of_an_earlier_run_are_promised_once_they_have_been_read(fleet: Pools, tmp_path: Path) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    digests = [await fleet.load(a, name, seed) for seed, name in enumerate(("poet", "chef"))]
    for name in ("poet", "chef"):
        await b.want(name)
    await until(lambda: set(b.stored.digests()) == set(digests))
    await fleet.stop("b")
    right, wrong = digests
    path = tmp_path / "b.adapters" / wrong
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    b = await fleet.start("b")
    assert not _promises(b, right)
    assert not _promises(b, wrong)
    await until(lambda: _promises(b, right))
    await until(lambda: wrong not in b.stored)
    assert not _promises(b, wrong)


def _promises(member: PoolInstance, digest: str) -> bool:
    return member.pool.store.answer("x", (KEEP_QUERY, digest, 5.0)) == (1,)


async def test_two_instances_that_both_delete_keep_at_least_one_copy(fleet: Pools) -> None:
    (_, b, c), digest = await fleet.sharing("a", "b", "c")
    await fleet.stop("a")
    await until(lambda: set(b.member.holders(digest)) == set(c.member.holders(digest)) == set("bc"))
    await asyncio.gather(b.pool.store.try_delete(digest), c.pool.store.try_delete(digest))
    assert digest in b.stored or digest in c.stored


async def test_a_promise_is_kept_after_a_restart(fleet: Pools) -> None:
    (_, b), digest = await fleet.sharing("a", "b")
    assert b.pool.store.answer("a", (KEEP_QUERY, digest, 30.0)) == (1,)
    await fleet.stop("b")
    b = await fleet.start("b")
    await until(lambda: "a" in b.member.holders(digest))
    assert not await b.pool.store.try_delete(digest)


@pytest.mark.parametrize(
    "body",
    [
        (KEEP_QUERY,),
        (KEEP_QUERY, "d"),
        (KEEP_QUERY, 1, 2),
        (KEEP_QUERY, "d", "x"),
        (KEEP_QUERY, "d", -1.0),
        (KEEP_QUERY, "?", 5.0),
    ],
)
async def test_only_held_adapters_are_promised(fleet: Pools, body: tuple[str | int | float, ...]) -> None:
    a = await fleet.start("a")
    assert a.pool.store.answer("b", body) == (0,)


async def test_a_full_disk_cache_deletes_the_least_recently_used_adapter_that_others_keep(fleet: Pools) -> None:
    a = await fleet.start("a")
    first = await fleet.load(a, "first", 1)
    size = file_size(await a.want("first"))
    b = await fleet.start("b", most_bytes=2 * size)
    others = [await fleet.load(a, name, seed) for seed, name in ((2, "second"), (3, "third"))]
    for name in ("first", "second", "third"):
        await b.want(name)
        digest = b.catalog.get(name).digest
        await until(lambda digest=digest: digest in b.stored)
    assert b.stored.digests() == others
    await until(lambda: sum(path.stat().st_size for path in b.folder.iterdir()) == 2 * size)
    await until(lambda: set(a.member.holders(first)) == {"a"})


async def test_an_adapter_without_room_on_disk_is_served_and_not_held(fleet: Pools) -> None:
    a, b = await fleet.start("a"), await fleet.start("b", most_bytes=1)
    digest = await fleet.load(a, "poet", 1)
    await b.want("poet")
    await until(lambda: b.pool.store.cache_full == 1)
    assert set(b.member.holders(digest)) == {"a"}
    assert b.pool.store.answer("a", (KEEP_QUERY, digest, 5.0)) == (0,)


async def test_concurrent_writes_do_not_exceed_the_disk_caches_size(fleet: Pools) -> None:
    a = await fleet.start("a")
    await fleet.load(a, "n0", 0)
    size = file_size(await a.want("n0"))
    b = await fleet.start("b", most_bytes=2 * size)
    for seed in range(1, 4):
        await fleet.load(a, f"n{seed}", seed)
    images = [await a.want(f"n{seed}") for seed in range(4)]
    await asyncio.gather(*(b.pool.store.keep(image.spec.digest, image) for image in images))
    assert len(b.stored.digests()) == 2
    assert b.stored.num_bytes == sum(path.stat().st_size for path in b.folder.iterdir()) == 2 * size
    assert b.pool.store.cache_full == 2


async def test_a_failed_write_is_counted_and_the_next_one_succeeds(
    fleet: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, b), digest = await fleet.loaded("a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(b.pool.store.uploads, "image_of", _too_many_ask)
        await b.pool.store.keep(digest)
    assert b.pool.store.cache_full == 1
    assert b.stored.num_bytes == 0
    await b.want("poet")
    await until(lambda: digest in b.stored)


@contextlib.asynccontextmanager
async def _too_many_ask(digest: str) -> AsyncIterator[HostAdapter]:
    raise UploadsBusy
    yield


async def test_an_adapter_that_cannot_be_advertised_is_still_stored(
    fleet: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, b), digest = await fleet.loaded("a", "b")
    monkeypatch.setattr(b.member, "advertise", _full)
    await b.want("poet")
    await until(lambda: b.pool.store.announce_failures == 1)
    assert digest in b.stored


def _full(digest: str, tier: Tier) -> None:
    raise InvalidRequest("the lww_map is full")


# --- lending and writing ---


async def test_an_image_whose_upload_was_cancelled_before_the_read_ended_is_freed(
    fleet: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,), digest = await fleet.loaded("a")
    uploads = a.pool.store.uploads
    reads: list[Callable[[], None]] = []
    read = a.pool.store._read_own
    monkeypatch.setattr(uploads, "_read", lambda *asked: reads.append(lambda: read(*asked)))
    asker = asyncio.create_task(_borrow(a, digest))
    await until(lambda: reads)
    asker.cancel()
    await asyncio.gather(asker, return_exceptions=True)
    reads[0]()
    await until(lambda: not uploads._reads)  # sooner than one that was used


async def _borrow(member: PoolInstance, digest: str) -> None:
    async with member.pool.store.uploads.image_of(digest):
        pass


def test_a_written_file_and_its_name_are_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(Path(f"/proc/self/fd/{number}").resolve().name))
    held = image()
    stored = DiskCache(tmp_path / "kept", MODEL)
    stored.write(held)
    assert flushed == [f"{held.spec.digest}.part", "kept"]


def test_a_temporary_disk_cache_is_small_and_deletes_those_of_killed_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, linked, young = [tmp_path / f"caraserve-adapters-{name}" for name in ("killed", "linked", "young")]
    for folder in (killed, tmp_path / "mine", young):
        folder.mkdir()
        (folder / "file").touch()
    linked.symlink_to(tmp_path / "mine")
    running = DiskCache(None, MODEL)
    for folder in (killed, running._folder):
        os.utime(folder, (1, 1))
    other = DiskCache(None, MODEL)
    assert (running._folder.exists(), killed.exists(), young.exists()) == (True, False, True)
    assert (tmp_path / "mine" / "file").exists()
    for stored in (running, other):
        stored.close()
        assert not stored._folder.exists()
    assert disk_bytes(64 << 30, is_temporary=True) <= 1 << 30
    assert disk_bytes(64 << 30, is_temporary=False) == 64 << 30


# --- many adapters ---


@pytest.mark.parametrize(
    "work",
    [
        lambda store: store.sweep(),
        lambda store: store._advertise_all(store.stored.digests()),
        lambda store: store._make_room(1 << 30),
    ],
    ids=["what has no name is looked for", "what an earlier life kept is said", "room is made on disk"],
)
async def test_loops_over_all_held_adapters_leave_time_for_other_tasks(
    fleet: Pools, monkeypatch: pytest.MonkeyPatch, work: Callable[[AdapterStore], Coroutine[Any, Any, object]]
) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    names = [f"n{seed}" for seed in range(6)]
    for seed, name in enumerate(names):
        await fleet.load(a, name, seed)
        await b.want(name)
    await until(lambda: len(b.stored.digests()) == len(names))
    store, turns = b.pool.store, 0
    store.set_planned(names)  # so that none is deleted
    store.renamed()
    monkeypatch.setattr("caraserve.util.tasks._TURN_S", 0.0)

    async def look() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    await work(store)
    looking.cancel()
    assert turns >= len(names) - 1
