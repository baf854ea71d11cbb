"""Adapters of the fleet on its instances: they are downloaded, stored, and kept while they have a name."""

import asyncio
import errno
from pathlib import Path

import numpy as np
import pytest

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure
from caraserve.cluster.state.replicated_map import RegisteredAdapter, Tier
from caraserve.cluster.transfer import adapter_pool
from caraserve.cluster.transfer.adapter_store import KEEP_QUERY
from caraserve.cluster.transfer.disk_cache import DiskCache
from caraserve.cluster.transfer.download import HolderWatch
from caraserve.cluster.transfer.upload import PATH
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected, CaraServeError, Unreachable
from tests.cluster.nodes import KEYS, until
from tests.cluster.pools import PoolInstance, Pools, pools, write_folder
from tests.lora.folders import SPEC, tensors_for, write_adapter


async def test_an_adapter_loaded_on_one_instance_is_downloaded_and_held_by_another(fleet: Pools) -> None:
    (a, b), digest = await fleet.loaded("a", "b")
    assert not b.pool.has(digest)
    image = await b.want("poet")
    assert np.array_equal(image.data, (await a.want("poet")).data)
    assert image.spec.digest == digest
    await until(lambda: set(a.member.holders(digest)) == {"a", "b"})
    assert b.pool.has(digest)
    assert b.stored.digests() == [digest]


async def test_a_combination_of_adapters_of_other_instances_is_made_of_what_is_downloaded(fleet: Pools) -> None:
    (a, b), _ = await fleet.loaded("a", "b")
    images = [await one.want("poet*0.5") for one in (a, b)]
    assert np.array_equal(images[0].data, images[1].data)
    assert images[0].spec.digest == images[1].spec.digest == a.catalog.get("poet*0.5").digest
    assert b.pool.can_get("poet*0.5")
    assert not b.pool.can_get("poet*0.5+sailor")


async def test_what_the_files_say_is_known_on_all_instances(fleet: Pools, tmp_path: Path) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    path = write_adapter(tmp_path / "pirate", {"base_model_name_or_path": "org/Small-1B"})
    (path / "chat_template.jinja").write_text("mine")
    facts = (await a.catalog.load("pirate", str(path), inplace=False)).facts
    await until(lambda: b.knows("pirate"))
    assert b.catalog.get("pirate").facts == facts
    assert (facts.trained_on, len(facts.template_digest)) == ("org/Small-1B", 64)


async def test_a_score_head_comes_with_its_adapter(fleet: Pools, tmp_path: Path) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    matrix = np.arange(2 * SPEC.hidden, dtype=np.float32).reshape(2, -1)
    tensors = tensors_for() | {"base_model.model.score.weight": matrix}
    path = write_adapter(tmp_path / "mood", {"task_type": "SEQ_CLS"}, tensors)
    info = await a.catalog.load("mood", str(path), inplace=False)
    await until(lambda: b.knows("mood") and b.member.holders(info.digest) != {})
    assert b.catalog.get("mood").facts.num_classes == 2
    spec = (await b.want("mood")).spec
    assert spec.head is not None
    assert (spec.digest, spec.head.data) == (info.digest, matrix.tobytes())


async def test_layers_are_reported_as_they_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.lora.manifest._LEAST_CHUNK_BYTES", 1)  # a chunk for each layer
    async with pools(tmp_path) as fleet:
        (a, b), digest = await fleet.loaded("a", "b")
        held = await a.want("poet")
        ends, into, told = held.spec.layer_ends, aligned_bytes(held.spec.num_bytes), list[int]()
        ended: asyncio.Future[HostAdapter | CaraServeError] = asyncio.get_running_loop().create_future()

        def came(image: HostAdapter, layers: int) -> None:
            assert not ended.done()
            assert image.spec == held.spec
            assert np.array_equal(image.data[: ends[layers - 1]], held.data[: ends[layers - 1]])
            told.append(layers)

        b.pool.fetch(digest, into, ended.set_result, came)
        assert isinstance(await ended, HostAdapter)
        assert told == [layers for layers in range(1, len(ends) + 1) if ends[layers - 1] < ends[-1]] + [len(ends)]


async def test_the_second_read_is_from_the_disk_cache_also_after_a_restart(fleet: Pools) -> None:
    (_, b), digest = await fleet.sharing("a", "b")
    await fleet.stop("a")
    b.evict("poet")
    await b.want("poet")
    await fleet.stop("b")
    b = await fleet.start("b")
    await b.want("poet")
    assert b.pool.downloader.counts.fetched == 0
    assert b.member.holders(digest) == {"b": Tier.DISK}


async def test_a_stored_adapter_is_kept_until_its_name_is_received_again(fleet: Pools, tmp_path: Path) -> None:
    (_, b), digest = await fleet.sharing("a", "b")
    await fleet.stop("a")
    await fleet.stop("b")
    for file in tmp_path.glob("b.db*"):  # noqa: ASYNC240
        file.unlink()
    b = await fleet.start("b")
    await b.pool.store.sweep()
    assert b.stored.digests() == [digest]


async def test_a_stored_file_that_has_changed_is_downloaded_again(fleet: Pools) -> None:
    (_, b), digest = await fleet.sharing("a", "b")
    right = (await b.want("poet")).data.copy()
    path = b.folder / digest
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    b.evict("poet")
    assert np.array_equal((await b.want("poet")).data, right)
    assert b.pool.downloader.counts.fetched == 2
    await until(lambda: digest in b.stored and path.read_bytes()[-1:] == bytes([content[-1] ^ 1]))


async def test_a_stored_file_that_cannot_be_opened_for_a_moment_is_kept(
    fleet: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, b), digest = await fleet.sharing("a", "b")
    await fleet.stop("a")
    await until(lambda: set(b.member.holders(digest)) == {"b"})
    b.evict("poet")
    with monkeypatch.context() as patch:
        patch.setattr(DiskCache, "read", _out_of_files)
        with pytest.raises(Unreachable):
            await b.want("poet")
        await _lends_nothing(b, digest)
    assert (await b.want("poet")).spec.digest == digest
    assert set(b.member.holders(digest)) == {"b"}


def _out_of_files(stored: DiskCache, digest: str, into: object) -> HostAdapter:
    raise OSError(errno.EMFILE, "Too many open files")


async def _lends_nothing(member: PoolInstance, digest: str) -> None:
    with pytest.raises(CaraServeError):
        async with member.pool.store.uploads.image_of(digest):
            pass


async def test_a_folder_that_cannot_be_read_for_a_moment_is_still_held(
    fleet: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a,), digest = await fleet.loaded("a")
    with monkeypatch.context() as patch:
        patch.setattr("caraserve.lora.adapter_reader.read_adapter", _no_disk)
        await _lends_nothing(a, digest)
    await until(lambda: not a.pool.store._tasks)  # its files have been looked at
    assert set(a.member.holders(digest)) == {"a"}
    async with a.pool.store.uploads.image_of(digest) as image:
        assert image.spec.digest == digest


async def test_a_folder_that_was_away_is_held_again_once_it_has_been_read(fleet: Pools) -> None:
    (a, b), digest = await fleet.loaded("a", "b")
    folder = Path(a.catalog.get("poet").path)
    folder.rename(folder.with_name("away"))  # noqa: ASYNC240
    await _lends_nothing(a, digest)
    await until(lambda: not b.member.holders(digest))
    folder.with_name("away").rename(folder)
    await a.want("poet")
    await until(lambda: set(b.member.holders(digest)) == {"a"})


def _no_disk(*arguments: object, **options: object) -> HostAdapter:
    raise OSError(errno.EIO, "Input/output error")


async def test_bytes_that_cannot_be_served_here_are_kept_while_they_have_a_name(fleet: Pools) -> None:
    (_, b), digest = await fleet.sharing("a", "b")
    num_bytes = (await b.want("poet")).spec.num_bytes
    await fleet.stop("a")
    too_many = 2 << 30
    b.catalog.adopt("poet", "0" * 64, 8, num_bytes)  # b's only name for it now means another thing
    b.member.register(RegisteredAdapter("bard", digest, 8, too_many))
    b.publisher.apply_registry_changes({"bard": b.member.adapter("bard")})
    assert not b.knows("bard")
    b.pool.store.renamed()
    await b.pool.store.sweep()
    assert digest in b.stored
    b.member.remove("bard")
    b.member.remove("poet")
    b.pool.store.renamed()
    await b.pool.store.sweep()
    assert digest not in b.stored


async def test_a_third_instance_downloads_from_the_second_when_the_first_has_left(fleet: Pools) -> None:
    (_, b, c), digest = await fleet.loaded("a", "b", "c")
    await b.want("poet")
    await until(lambda: "b" in c.member.holders(digest))
    await fleet.stop("a")
    b.evict("poet")  # it reads it from its disk for others, and its host tier stays as it is
    await c.want("poet")
    assert b.manager.image(digest) is None


async def test_an_adapter_without_a_holder_is_unreachable_and_others_are_served(fleet: Pools) -> None:
    (a, b), digest = await fleet.loaded("a", "b")
    await fleet.load(a, "chef", 2)
    await b.want("chef")
    await fleet.stop("a")
    await until(lambda: not b.member.holders(digest))
    with pytest.raises(Unreachable, match="no instance that has it is reachable"):
        await b.want("poet")
    await b.want("chef")


async def test_an_instance_whose_folder_has_changed_is_no_holder(fleet: Pools) -> None:
    (a, b), digest = await fleet.loaded("a", "b")
    write_folder(Path(a.catalog.get("poet").path), 2)
    with pytest.raises(Unreachable):
        await b.want("poet")
    assert a.member.holders(digest) == {}
    assert a.pool.store.answer("b", (KEEP_QUERY, digest, 5.0)) == (0,)


async def test_a_name_that_is_loaded_again_changes_on_all_instances(fleet: Pools) -> None:
    (a, b), old = await fleet.sharing("a", "b")
    new = await fleet.load(a, "poet", 2)
    assert (await b.want("poet")).spec.digest == new
    await until(lambda: old not in b.stored and not (b.folder / old).exists())
    assert set(b.member.holders(old)) <= {"a"}


async def test_a_name_whose_new_adapter_cannot_be_served_is_not_answered_with_the_old_one(fleet: Pools) -> None:
    (a, b), old = await fleet.loaded("a", "b")
    running = a.catalog.pin("poet")
    b.member.register(RegisteredAdapter("poet", "0" * 64, 8, 2 << 30))
    await until(lambda: not a.knows("poet"))
    assert running.digest == old
    with pytest.raises(AdapterRejected, match="more than"):
        await a.pool.ensure("poet")
    a.manager.unpin(running)


async def test_a_request_gets_the_newest_adapter_of_its_name(fleet: Pools, tmp_path: Path) -> None:
    (a, b), _ = await fleet.loaded("a", "b")
    b.publisher._on_wanted = a.publisher._on_wanted = lambda adapter: None  # no instance adopts it by itself
    new = await a.catalog.load("poet", str(write_folder(tmp_path / "new", 2)), inplace=True)
    await until(lambda: new.digest in {one.digest for one in b.member.adapters()})
    assert b.catalog.get("poet").digest != new.digest
    await b.pool.ensure("poet")
    assert b.catalog.get("poet").digest == new.digest


async def test_a_request_for_an_adapter_without_a_holder_is_refused_before_it_is_queued(fleet: Pools) -> None:
    (_, b), _ = await fleet.loaded("a", "b")
    assert b.pool.can_get("poet")
    await fleet.stop("a")
    await until(lambda: not b.pool.can_get("poet"))
    with pytest.raises(Unreachable, match="no instance that has it is reachable"):
        await b.pool.ensure("poet")
    assert b.manager.counters.disk_reads == 0


async def test_a_download_ends_when_no_request_waits_for_it_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_pool, "_SWEEP_S", 0.01)
    monkeypatch.setattr(adapter_pool, "_UNWANTED_S", 0.05)
    async with pools(tmp_path) as fleet:
        (a, b), _ = await fleet.loaded("a", "b")
        await fleet.load(a, "chef", 2)
        with monkeypatch.context() as patch:
            patch.setattr(b._transfers, "page", _no_answer)
            planned = asyncio.create_task(b.pool.store_planned("chef"))
            first, second = [asyncio.create_task(b.want("poet")) for _ in range(2)]
            await until(lambda: b.pool.downloader.in_progress == 2)
            first.cancel()
            await asyncio.sleep(0.2)
            assert b.pool.downloader.in_progress == 2  # the second request waits
            second.cancel()
            await until(lambda: b.pool.downloader.in_progress == 1)
            assert not planned.done()
            planned.cancel()
        assert await b.want("poet") is not None


async def _no_answer(*arguments: object) -> bytes:
    await asyncio.Event().wait()
    return b""


async def test_another_name_for_an_adapter_in_a_folder_is_read_from_that_folder(fleet: Pools) -> None:
    (a, b), digest = await fleet.loaded("a", "b")
    b.member.register(RegisteredAdapter("bard", digest, 4, a.catalog.get("poet").num_bytes))
    await until(lambda: a.knows("bard"))
    assert (await a.want("bard")).spec.digest == digest
    assert (a.pool.downloader.counts.fetched, a.pool.downloader.counts.failed) == (0, 0)


async def test_a_name_registered_again_while_its_last_request_runs_is_kept(fleet: Pools) -> None:
    (a, b), _ = await fleet.loaded("a", "b")
    meaning = b.member.adapter("poet")
    assert meaning is not None
    running = b.catalog.pin("poet")
    b.member.remove("poet")
    await until(lambda: a.member.adapter("poet") is None and not a.knows("poet"))
    b.publisher.apply_registry_changes({"poet": None})
    await asyncio.sleep(0)  # the unloading has begun
    b.member.register(meaning)
    await until(lambda: not b.knows("poet"))
    b.manager.unpin(running)
    await until(lambda: a.knows("poet") and b.knows("poet"))
    assert a.member.adapter("poet") == b.member.adapter("poet") == meaning


async def test_a_name_is_unloaded_again_while_the_requests_of_its_former_adapter_run(fleet: Pools) -> None:
    (a, b), _ = await fleet.loaded("a", "b")
    running = a.catalog.pin("poet")
    b.member.remove("poet")
    await until(lambda: not a.knows("poet"))
    await fleet.load(a, "poet", 2)  # not held up by the requests of the first
    b.member.remove("poet")
    await until(lambda: not a.knows("poet"))
    a.manager.unpin(running)
    await until(lambda: not len(a.publisher._unloads))
    assert not a.knows("poet")


async def test_a_name_that_is_loaded_here_after_another_instance_removed_it_stays(fleet: Pools) -> None:
    """Its removal waits for the load, which is later than the removal."""
    (a, b), _ = await fleet.loaded("a", "b")
    async with a.catalog.changing("poet"):
        b.member.remove("poet")
        await until(lambda: a.member.adapter("poet") is None and len(a.publisher._unloads) == 1)
        info = a.catalog.get("poet")
        a.publisher.changed("poet", info)
    await until(lambda: not len(a.publisher._unloads))
    assert a.catalog.get("poet") is info
    await until(lambda: b.knows("poet"))


async def test_an_instance_is_not_among_its_own_holders(fleet: Pools) -> None:
    (a,), digest = await fleet.loaded("a")
    assert a.member.holders(digest)
    assert HolderWatch(a.member).holders(digest) == {}


async def test_only_the_bytes_of_removed_names_are_deleted(fleet: Pools) -> None:
    a, b = await fleet.start("a"), await fleet.start("b")
    digests = {name: await fleet.load(a, name, seed) for seed, name in enumerate(("poet", "chef"))}
    for name in digests:
        await b.want(name)
    await until(lambda: set(b.stored.digests()) == set(digests.values()))
    b.member.remove("poet")
    await b.catalog.unload("poet")
    await until(lambda: b.stored.digests() == [digests["chef"]] and not a.knows("poet"))
    await until(lambda: [path.name for path in b.folder.iterdir()] == [digests["chef"]])


# --- what others say ---


async def test_bytes_are_sent_only_for_signed_requests_and_valid_ranges(fleet: Pools) -> None:
    (a,), digest = await fleet.loaded("a")
    image = await a.want("poet")
    size, hashes, into = image.spec.num_bytes, list(image.spec.chunks), bytearray(image.spec.num_bytes)
    where, wires = a.instance.address, [PeerClient(lambda: KEYS, None)]
    ours, right = wires[0], list[None]()

    async def chunks(wire: PeerClient, size: int, hashes: list[bytes]) -> tuple[int, TransferFailure | None]:
        right.clear()
        path = f"{PATH}/{digest}?from=0&to={size}"
        failure = await wire.chunks(where, path, [size], hashes, memoryview(into), lambda: right.append(None))
        return len(right), failure

    async def manifest(wire: PeerClient, address: str, digest: str) -> bytes | TransferFailure:
        return await wire.page(address, f"{PATH}/{digest}/manifest", 1 << 20)

    wires.append(stranger := PeerClient(lambda: Keyring((b"some other secret",)), None))
    try:
        assert await chunks(ours, size, hashes) == (1, None)
        assert into == image.data.tobytes()
        assert await chunks(ours, size, [b"?" * 32]) == (0, TransferFailure.CORRUPT)
        assert await chunks(ours, size + 1, hashes) == (0, TransferFailure.FAILED)
        assert await manifest(ours, where, "0" * 64) is TransferFailure.ABSENT
        assert await manifest(ours, "127.0.0.1:1", digest) is TransferFailure.FAILED
        assert await manifest(stranger, where, digest) is TransferFailure.FAILED
        assert await chunks(stranger, size, hashes) == (0, TransferFailure.FAILED)
    finally:
        for wire in wires:
            await wire.close()


async def test_unfinished_and_foreign_files_are_no_adapters(tmp_path: Path) -> None:
    folder = tmp_path / "a.adapters"
    folder.mkdir()
    unfinished, foreign, link = folder / f"{'a' * 64}.part", folder / "notes.txt", folder / ("b" * 64)
    unfinished.write_bytes(b"half")
    foreign.write_bytes(b"mine")
    link.symlink_to("/etc/passwd")
    async with pools(tmp_path) as fleet:
        a = await fleet.start("a")
        assert a.stored.digests() == []
    assert not unfinished.exists()
    assert foreign.read_bytes() == b"mine"
