"""A folder here is used again when its name has come to stand for an adapter that no instance has."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.cluster.transfer import adapter_pool, replaced_folders
from caraserve.cluster.transfer.replaced_folders import ReplacedFolders
from caraserve.errors import AdapterBusy, AdapterRejected, CaraServeError, NotFound
from caraserve.lora import upload_folders
from caraserve.lora.registry import AdapterInfo
from tests.cluster.nodes import until
from tests.cluster.pools import PoolInstance, Pools, pools, write_folder

PIRATE = RegisteredAdapter("pirate", "f" * 64, 8, 1000)


@asynccontextmanager
async def pirated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Pools, PoolInstance, PoolInstance, str]]:
    """Yields two instances, of which the first loads a folder, and the second then gives its name another meaning."""
    monkeypatch.setattr(adapter_pool, "_SWEEP_S", 0.02)
    monkeypatch.setattr(replaced_folders, "_NEVER_HELD_S", 0.2)
    async with pools(tmp_path) as fleet:
        a, b = await fleet.start("a"), await fleet.start("b")
        digest = await fleet.load(a, "pirate", 1)
        b.member.register(PIRATE)
        await until(lambda: a.catalog.get("pirate").digest == PIRATE.digest)
        assert not a.pool.can_get("pirate")
        yield fleet, a, b, digest


@pytest.mark.parametrize("stays", [True, False])
async def test_a_name_whose_bytes_no_instance_has_stands_for_the_folder_again_on_all_instances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: bool
) -> None:
    async with pirated(tmp_path, monkeypatch) as (fleet, a, b, digest):
        if not stays:
            await fleet.stop("b")
            b = a
        await until(lambda: a.catalog.get("pirate").digest == digest)
        await a.pool.ensure("pirate")
        await until(lambda: b.catalog.get("pirate").digest == digest and b.pool.can_get("pirate"))
        assert (await b.want("pirate")).spec.digest == digest


async def test_a_name_that_is_removed_meanwhile_stays_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_folders, "_NEVER_HELD_S", 0.0)
    async with pools(tmp_path) as fleet:
        a, b = await fleet.start("a"), await fleet.start("b")
        await fleet.load(a, "pirate", 1)
        monkeypatch.setattr(a.pool._replaced, "_is_lost", lambda name: False)
        b.member.register(PIRATE)
        await until(lambda: a.catalog.get("pirate").digest == PIRATE.digest)
        b.member.remove("pirate")
        await until(lambda: not a.knows("pirate"))
        monkeypatch.setattr(a.pool._replaced, "_is_lost", lambda name: True)
        await a.pool._replaced.restore()
        await a.pool._replaced.restore()
        assert not a.knows("pirate")


class World:
    """A catalog that has one folder, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s, self.is_lost, self.loads = 0.0, True, list[str]()
        self.errors: list[CaraServeError] = []  # of the next loads
        self.info = AdapterInfo("pirate", "1" * 64, str(folder), 8, ("q_proj",), 1000, 0.0)
        catalog: Any = SimpleNamespace(find_whole=lambda name: self.info, load=self._load)
        self.folders = ReplacedFolders(catalog, lambda name: self.is_lost, lambda: self.now_s)

    async def _load(self, name: str, path: str, *, inplace: bool, was_served: bool) -> AdapterInfo:
        self.loads.append(path)
        if self.errors:
            raise self.errors.pop(0)
        return self.info

    async def pass_s(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1
            await self.folders.restore()


@pytest.mark.parametrize(("is_new", "was_held", "after_s"), [(True, False, 30), (True, True, 600), (False, False, 600)])
async def test_an_instance_that_had_the_bytes_may_be_restarting(
    tmp_path: Path, is_new: bool, was_held: bool, after_s: int
) -> None:
    world = World(write_folder(tmp_path / "pirate", 1))
    world.folders.adopted(PIRATE, is_new=is_new)
    world.is_lost = not was_held
    await world.pass_s(1)
    world.is_lost = True
    await world.pass_s(after_s - 1)
    assert world.loads == []
    await world.pass_s(2)
    assert world.loads == [world.info.path]
    await world.pass_s(700)
    assert len(world.loads) == 1


async def test_an_uploaded_folder_stays_replaced(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pirate", 1)
    (folder / upload_folders._MARK).touch()
    world = World(folder)
    world.folders.adopted(PIRATE, is_new=True)
    await world.pass_s(700)
    assert world.loads == []


async def test_the_same_bytes_elsewhere_replace_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.folders.adopted(RegisteredAdapter("pirate", world.info.digest, 8, 1000), is_new=True)
    await world.pass_s(700)
    assert world.loads == []


async def test_a_folder_that_is_refused_for_now_is_registered_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(write_folder(tmp_path / "pirate", 1))
    world.errors = [AdapterBusy("pirate is being changed", retry_after_s=1.0) for _ in range(2)]
    world.folders.adopted(PIRATE, is_new=True)
    await world.pass_s(31)
    assert len(world.loads) == 1
    await world.pass_s(60)
    assert len(world.loads) == 3
    assert caplog.text.count("is being changed") == 1
    assert caplog.text.count("stands for") == 1
    await world.pass_s(700)
    assert len(world.loads) == 3


@pytest.mark.parametrize("error", [NotFound("no folder"), AdapterRejected("rank 0")])
async def test_a_folder_that_is_no_adapter_any_more_is_given_up(tmp_path: Path, error: CaraServeError) -> None:
    world = World(write_folder(tmp_path / "pirate", 1))
    world.errors = [error]
    world.folders.adopted(PIRATE, is_new=True)
    await world.pass_s(700)
    assert len(world.loads) == 1
