"""Runs the CUDA backend over the device of host_device.py, under a whole engine or alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ParamSpec

import pytest

import caraserve.backend_factory
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.lora_layout import HostAdapter
from caraserve.gpu import builder, weights
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.builder import BackendParts, GpuSizes
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.detect import DeviceChoice
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Kernels
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.kernels import cuda_kernels
from caraserve.gpu.memory.host_memory import SYNC_SLOTS
from caraserve.gpu.memory.pool import DevicePool
from caraserve.loop import Engine
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan
from tests.gpu.host_device import host_device
from tests.gpu.host_driver import HostDriver
from tests.serving import running

GRANULE_BYTES = 32 << 10  # small, so that tiny adapters differ in their number of granules
KV_BLOCK_BYTES = 8 << 10  # of the models here in fp32
NO_NUMBER = 0xFF  # NaN, if every byte has this value
PATIENCE_S = 60.0

P = ParamSpec("P")


@dataclass
class Host:
    """A device and the backend over it."""

    driver: HostDriver
    backend: CudaBackend

    @property
    def parts(self) -> BackendParts:
        return self.backend._parts

    def on_launching_thread(self, job: Any) -> Any:
        """Returns the result of a job that runs on the launching thread between two others."""
        result: SimpleQueue[Any] = SimpleQueue()

        def run() -> None:
            try:
                result.put((job(), None))
            except BaseException as error:
                result.put((None, error))

        self.backend._jobs.put(run)
        value, error = result.get(timeout=PATIENCE_S)
        if error is not None:
            raise error
        return value

    def check_at_rest(self) -> None:
        """Checks that nothing is in progress, once copies that a test has held back have ended, and that everything
        held by passes and loads has been released."""
        ends_s = time.monotonic() + PATIENCE_S
        while self.on_launching_thread(lambda: self.parts.is_busy) and time.monotonic() < ends_s:
            pass
        self.on_launching_thread(self._check_at_rest)

    def _check_at_rest(self) -> None:
        parts = self.parts
        check_pool(parts.images.pool)
        assert not parts.is_busy
        assert not parts.assisted.is_open
        assert parts.context.queue.answers == 0
        assert all(extent.pins == 0 for extent in parts.images.pool._extents), "an adapter is pinned without a user"
        assert set(parts.images.pool._by_slot) == set(parts.images.bound), "an adapter's bytes have no owner"
        assert [lane.results._free.qsize() for lane in parts.lanes] == [3, SYNC_SLOTS]
        for lane in Lane:
            parts.context.timelines.settle(lane)
        parts.assisted._sync_slots.reclaim(())
        assert len(parts.assisted._sync_slots._free) == len(parts.region.hand_off_buffers)


@asynccontextmanager
async def serving(
    model: ModelConfig,
    lora: LoraConfig,
    engine: EngineConfig,
    *,
    seed: int = 0,
    last: Lane | None = None,
    **sizes: Any,
) -> AsyncIterator[tuple[Engine, Host]]:
    """Yields a running engine over a device of its own and checks all counts at the end. `sizes`: fields of GpuSizes
    that differ from the settings; `graph_bytes` is 0 unless given, None: as in the settings."""
    drivers: list[HostDriver] = []

    def open_device(dtype: Dtype) -> GpuDevice:
        device, driver = host_device(dtype, seed, last)
        drivers.append(driver)
        return device

    def with_sizes(**fields: Any) -> GpuSizes:
        changed = {"adapter_slots": 16, "graph_bytes": 0} | sizes
        return GpuSizes(**fields | {name: value for name, value in changed.items() if value is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "open_device", open_device)
        patch.setattr(builder, "GpuSizes", with_sizes)
        patch.setattr(builder, "GRANULE_BYTES", GRANULE_BYTES)
        patch.setattr(caraserve.backend_factory, "detect", lambda device: DeviceChoice("cuda"))
        async with running(model, lora, replace(engine, device="cuda")) as served:
            backend = served._backend
            assert isinstance(backend, CudaBackend)
            host = Host(drivers[0], backend)
            spoil_pool(host)
            yield served, host
            await served.drain(PATIENCE_S)
            await asyncio.to_thread(host.check_at_rest)


def spoil_pool(host: Host) -> None:
    """Fills the pool with NaN, unless adapters are loaded."""
    if not host.parts.images.bound:
        host.parts.images.memory.fill_(NO_NUMBER)


@contextmanager
def alone(
    folder: Path,
    *,
    seed: int = 0,
    last: Lane | None = None,
    kernels: Callable[[Kernels, HostDriver], Kernels] = lambda kernels, driver: kernels,
    **sizes: Any,
) -> Iterator[Host]:
    """Yields a backend without an engine, with memory for about four adapters. `kernels` returns what launches the raw
    kernels, instead of what it is given."""
    plan = load_plan(folder)
    device, driver = host_device(Dtype.F32, seed, last)
    device = replace(device, kernels=kernels(device.kernels, driver))
    fields: dict[str, Any] = {
        "num_slots": 4, "adapter_slots": 12, "max_step_tokens": 64, "max_context": 128, "memory_utilization": 0.5,
        "host_bytes": 4 << 20, "graph_bytes": 0, "pool_bytes": 40 * GRANULE_BYTES,
    }  # fmt: skip
    used = GpuSizes(**fields | sizes)
    loaded, _ = load_checkpoint(
        folder, device, partial(weights.load, plan, weights.TORCH_DTYPES[Dtype.F32], used.max_context)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "GRANULE_BYTES", GRANULE_BYTES)
        backend = CudaBackend(plan, loaded, used, device)
        host = Host(driver, backend)
        try:
            backend.warm_up()
            spoil_pool(host)
            yield host
        finally:
            driver.held.clear()
            backend.close()


def host_tier(host: Host, folders: Mapping[str, Path], model: Path) -> dict[str, HostAdapter]:
    """Puts adapters into the backend's host memory, one after another."""
    plan, at, found = load_plan(model), 0, {}
    base = BaseTensors(model, plan)
    for name, folder in folders.items():
        num_bytes = inspect_adapter(folder, plan, base).num_bytes
        found[name] = read_adapter(folder, plan, host.backend.host_memory[at : at + num_bytes], base)
        at += -(-num_bytes // 4096) * 4096
    return found


def on_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Makes a test of a coroutine, which fails if it takes some minutes, as when an answer never comes."""

    @wraps(test)
    def run(*args: P.args, **named: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **named), 5 * PATIENCE_S))

    return run


def check_pool(pool: DevicePool) -> None:
    """Fails if bytes have two owners or a limit is exceeded."""
    place = pool._lowest(pool.kv_blocks)
    for extent in pool._extents:
        assert extent.start >= place, f"adapter slot {extent.slot} overlaps what lies before it"
        assert extent.start % pool._granule == 0, f"adapter slot {extent.slot} is not on a granule"
        assert pool._by_slot[extent.slot] is extent, f"adapter slot {extent.slot} is registered at another place"
        place = extent.end
    assert place <= pool.num_bytes, "adapters reach beyond the pool"
    assert len(pool._extents) == len(pool._by_slot), "an adapter is lost"
    assert pool.adapter_bytes <= pool.lora_bytes, "adapters are over their cap"


def hold_second_copy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the copy lane stand still once its second copy has begun. Returns the bytes of the copies that have
    begun."""
    link_time, begun = HostDriver.link_time, list[int]()

    def holding(driver: HostDriver, stream: Stream, num_bytes: int) -> Callable[[], bool]:
        if driver.is_lane(stream, Lane.COPY):
            begun.append(num_bytes)
            driver.held |= {Lane.COPY} if len(begun) == 2 else set()
        return link_time(driver, stream, num_bytes)

    monkeypatch.setattr(HostDriver, "link_time", holding)
    return begun


def note_calls(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, calls: list[str]) -> None:
    """Makes a method add its name to `calls` whenever it is called."""
    original = getattr(owner, name)

    def noted(*given: Any) -> Any:
        calls.append(name)
        return original(*given)

    monkeypatch.setattr(owner, name, noted)
