"""The memory that benchmarks give their servers for adapters: as much as the device's pool takes for them."""

from pathlib import Path

import pytest

from caraserve.bench import servers
from caraserve.bench.cli import bench_parser
from caraserve.bench.mode_loads import mode_loads
from caraserve.bench.modes import ModesOptions, ModeVariant, _Prepared
from caraserve.bench.options import LoadOptions
from caraserve.bench.servers import Synthetic, make_synthetic
from caraserve.core.backend import Limits, SharedMemory
from caraserve.gpu.driver.detect import DeviceChoice
from caraserve.gpu.driver.streams import NOTHING
from caraserve.gpu.memory.pool import GRANULE_BYTES, DevicePool
from caraserve.kv.memory_budget import MemoryBudget
from caraserve.model.spec import SITES

MIB = 1 << 20


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes `auto` and `cuda` a GPU; returns the devices that were asked for."""
    asked: list[str] = []

    def detect(wanted: str) -> DeviceChoice:
        asked.append(wanted)
        return DeviceChoice("cpu" if wanted == "cpu" else "cuda")

    monkeypatch.setattr(servers, "detect", detect)
    return asked


def made(folder: Path, *serve: str) -> Synthetic:
    return make_synthetic(folder / "_".join(serve or ["auto"]), "10M", "float32", 64, (8, 16), SITES, serve)


def test_a_gpus_pool_of_that_room_takes_all_adapters_and_its_budget_allows_them(tmp_path: Path, gpu: list[str]) -> None:
    """Modes that keep every adapter on the device refuse to start with less."""
    adapters = made(tmp_path)
    room_bytes, total = adapters.room_bytes(), 64 * MIB
    assert any(size % GRANULE_BYTES for size in adapters.sizes), "the sizes leave nothing to round"
    pool = DevicePool(total, MIB, lora_bytes=room_bytes)
    shared = SharedMemory(total, MIB, GRANULE_BYTES, adapter_bytes=room_bytes, least_blocks=1)
    budget = MemoryBudget(Limits(1, 16, 1, 3, 16, 16, 16, shared), room_bytes)
    assert budget.most_adapter_bytes >= sum(map(budget.takes, adapters.sizes))
    assert all(pool.place(slot, size, NOTHING) for slot, size in enumerate(adapters.sizes, start=1))
    assert pool.place(len(adapters.sizes) + 1, 1, NOTHING) is None


def test_on_a_cpu_an_adapter_takes_its_own_bytes_alone(tmp_path: Path, gpu: list[str]) -> None:
    adapters = made(tmp_path, "--device", "cpu")
    assert gpu == ["cpu"]
    assert (adapters.room_bytes(), adapters.room_bytes(1)) == (sum(adapters.sizes), max(adapters.sizes))


def test_room_for_some_is_room_for_the_largest() -> None:
    adapters = Synthetic((), (), ("a", "b", "c"), (3 * MIB, MIB, 5 * MIB), 2 * MIB)
    assert [adapters.room_bytes(count) // MIB for count in (1, 2, 3, None)] == [6, 10, 12, 12]
    assert adapters.host_room() == ("--max-host-adapters-bytes", str((2 * 9 + 256) * MIB))


def test_bench_modes_gives_cached_room_for_all(tmp_path: Path) -> None:
    args = bench_parser().parse_args(["modes"])
    given = {name: getattr(args, name) for name in ModesOptions.__slots__ if name != "serve"}
    spec = LoadOptions.from_args(args).spec()
    adapters = Synthetic((), (), ("a", "b"), (3 * MIB, 3 * MIB), GRANULE_BYTES)
    bench = _Prepared(ModesOptions(**given, serve=()), adapters, tmp_path, spec, mode_loads(spec, 1), resident=1)
    pools = {}
    for mode in ("cached", "auto"):
        arguments = bench.arguments(ModeVariant(mode, None, mode))
        pools[mode] = int(arguments[arguments.index("--lora-pool-bytes") + 1]) // MIB
    assert pools == {"cached": 8, "auto": 4}
