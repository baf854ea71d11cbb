"""Instances in one process that share adapters: real sockets, folders, host caches and catalogs; no device or model."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.peer_client import PeerClient
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.cluster.transfer.disk_cache import DiskCache
from caraserve.config import LOADING_MODES
from caraserve.core.backend import Limits
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.cpu.shared_memory import Arena
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.lora.adapter import AdapterTier
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.catalog import AdapterObserver, Catalog, CatalogRules
from caraserve.lora.manager import AdapterManager
from caraserve.lora.registry import Registry
from caraserve.lora.start_policy import StartPolicy
from tests.cluster.nodes import KEYS, Handlers, Instance, Instances, instances, until
from tests.fake_backend import FakeBackend
from tests.lora.folders import SPEC, tensors_for, write_adapter

_LIMITS = Limits(
    num_blocks=1, block_tokens=16, num_slots=1, adapter_slots=9, max_step_tokens=1, max_context=1, embedding_size=1
)
_MIB = 1 << 20


def write_folder(folder: Path, seed: int) -> Path:
    """Writes a small adapter, different for each seed."""
    tensors = tensors_for()
    first = next(iter(tensors))
    tensors[first] = tensors[first] + np.float32(seed)
    return write_adapter(folder, tensors=tensors)


@dataclass
class _Engine:
    """An engine without work, for a publisher."""

    catalog: Catalog
    draining: bool = False

    async def unload_adapter(self, name: str, is_wanted: Callable[[], bool] = lambda: True) -> None:
        await self.catalog.unload(name, is_wanted)


@dataclass
class PoolInstance:
    """One instance with its catalog, disk cache and publisher."""

    folder: Path
    host_bytes: int = _MIB
    most_bytes: int = _MIB  # of its disk cache
    instance: Instance = field(init=False)
    catalog: Catalog = field(init=False)
    manager: AdapterManager = field(init=False)
    pool: AdapterPool = field(init=False)
    publisher: Publisher = field(init=False)
    stored: DiskCache = field(init=False)
    _reader: AdapterReader = field(init=False)
    _transfers: PeerClient = field(init=False)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def make(self, member: Member, handlers: Handlers) -> None:
        loop = asyncio.get_running_loop()
        self._reader = AdapterReader(SPEC, lambda call: loop.call_soon_threadsafe(call) and None)
        room, arena = MemoryBudget(_LIMITS, _MIB), Arena(aligned_bytes(self.host_bytes))
        loading = StartPolicy(LOADING_MODES["overlapped"], len(SPEC.layers), 1e9, None)
        self.manager = AdapterManager(
            *(FakeBackend(_LIMITS), room, arena, self._reader.read),
            *(lambda call: loop.call_soon(call) and None, loop.time, loading),
        )
        rules = CatalogRules("base", (Path("/"),), room.most_adapter_bytes, arena.num_bytes, keep_on_device=False)
        self._observers: list[AdapterObserver] = []
        self.catalog = Catalog(SPEC, Registry(None), self.manager, self._reader, rules, self._observers)
        self.stored = DiskCache(self.folder, SPEC)
        self._transfers = PeerClient(lambda: KEYS, None)
        engine: Any = _Engine(self.catalog)
        self.publisher = Publisher(
            *(member, engine, lambda: (0, 0), None, LinkSpeeds()), on_wanted=lambda adapter: self.pool.adopt(adapter)
        )
        self.pool = AdapterPool(
            *(member, self.publisher, self.catalog, self._reader, self.stored, self._transfers, SPEC, self.most_bytes)
        )
        handlers.on_registry_change = self.publisher.apply_registry_changes
        handlers.on_holders_change, handlers.answer_query = self.pool.on_holders_change, self.pool.store.answer

    async def begin(self, instance: Instance) -> None:
        self.instance = instance
        self.pool.begin()
        self._observers.append(self.pool.changed)
        await self.publisher.announce()
        self._tasks.append(asyncio.create_task(self.pool.run()))

    @property
    def member(self) -> Member:
        return self.instance.member

    async def want(self, name: str) -> HostAdapter:
        """Waits until an adapter is in the host cache, as a request does. Raises the error of its load."""
        version = self.catalog.pin(name)
        try:
            if version.tier is AdapterTier.FAILED:
                version.move_to(AdapterTier.DISK)
            self.manager.prefetch(version)
            while version.tier is AdapterTier.READING:
                await self.manager.next_change()
            if version.error is not None:
                raise version.error
            image = self.manager.image(version.digest)
            assert image is not None, "it was not even read"
            return image
        finally:
            self.manager.unpin(version)

    def evict(self, name: str) -> None:
        """Evicts an adapter's image from the host cache."""
        self.manager._host_loader.evict(self.catalog.get(name).digest)

    def knows(self, *names: str) -> bool:
        return all(self.catalog.find(name) is not None for name in names)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.pool.close()
        await self._transfers.close()
        self._reader.close()
        self.manager.check()


class Pools:
    """The instances of one test."""

    def __init__(self, group: Instances, folder: Path) -> None:
        self._group, self._folder = group, folder
        self.running: dict[str, PoolInstance] = {}

    async def start(self, name: str, **sizes: int) -> PoolInstance:
        folder = self._folder / f"{name}.adapters"
        one = self.running[name] = PoolInstance(folder, **sizes)

        instance = await self._group.start(
            name, prepare=one.make, routes=lambda member: one.pool.store.uploads.routes()
        )
        await one.begin(instance)
        await asyncio.gather(*one.pool._tasks, *one.pool.store._tasks)  # what is known is taken up
        await until(self._group.agree)
        return one

    async def load(self, instance: PoolInstance, name: str, seed: int) -> str:
        """Loads an adapter from a folder of that instance. Returns its digest once all have its name."""
        path = write_folder(self._folder / f"folders {name} {seed}", seed)
        info = await instance.catalog.load(name, str(path), inplace=True)
        await until(lambda: all(_means(one, name, info.digest) for one in self.running.values()))
        await until(lambda: all(one.member.holders(info.digest) for one in self.running.values()))
        return info.digest

    async def loaded(self, *names: str) -> tuple[list[PoolInstance], str]:
        """Starts instances of which the first loads an adapter, `poet`. Returns them and the adapter's digest."""
        started = [await self.start(name) for name in names]
        return started, await self.load(started[0], "poet", 1)

    async def sharing(self, *names: str) -> tuple[list[PoolInstance], str]:
        """As `loaded`, but the others also download and store the adapter."""
        started, digest = await self.loaded(*names)
        first, *others = started
        for other in others:
            await other.want("poet")
        await until(lambda: all(digest in other.stored for other in others))
        await until(lambda: set(first.member.holders(digest)) == set(names))
        return started, digest

    async def stop(self, name: str) -> None:
        one = self.running.pop(name)
        await self._group.stop(name)
        await one.close()


def _means(instance: PoolInstance, name: str, digest: str) -> bool:
    info = instance.catalog.find(name)
    return info is not None and info.digest == digest


@contextlib.asynccontextmanager
async def pools(folder: Path) -> AsyncIterator[Pools]:
    """Yields an empty group; instances that are started in it are stopped at the end."""
    async with instances(folder) as group:
        started = Pools(group, folder)
        try:
            yield started
        finally:
            for name in list(started.running):
                await started.stop(name)
