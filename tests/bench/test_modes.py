"""`bench modes`: the requests and adapters of its repeats, the servers of its variants, and the room that these get."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.bench import mode_servers, servers
from caraserve.bench.cli import bench_parser
from caraserve.bench.mode_loads import ModeLoads, mode_loads
from caraserve.bench.mode_servers import ModeServers
from caraserve.bench.modes import ModesOptions, ModeVariant, _Prepared, mode_variants, modes_options
from caraserve.bench.options import LoadOptions
from caraserve.bench.servers import Synthetic, make_synthetic
from caraserve.bench.synthetic import MODULES
from caraserve.core.backend import Limits, SharedMemory
from caraserve.gpu.driver.detect import DeviceChoice
from caraserve.gpu.driver.streams import NOTHING
from caraserve.gpu.memory.pool import GRANULE_BYTES, DevicePool
from caraserve.kv.memory_budget import MemoryBudget

ADAPTERS, RESIDENT, REPEATS = 40, 10, 4
MIB, GIB = 1 << 20, 1 << 30


def parsed(*words: str) -> tuple[ModesOptions, LoadOptions]:
    args = bench_parser().parse_args(["modes", *words])
    args.serve_arguments = ()
    return modes_options(args)[:2]


# --- requests ---


def loads_of(popularity: str, requests: int) -> ModeLoads:
    words = ("--lora-assignment", popularity, "--adapters", str(ADAPTERS), "--num-prompts", str(requests))
    return mode_loads(parsed(*words)[1].spec(), REPEATS)


def dealt(loads: ModeLoads, repeat: int) -> list[int]:
    return [request.adapter for request in loads.repeats[repeat].requests if request.adapter is not None]


def hits(requested: Sequence[int], before: Sequence[int]) -> int:
    """Returns how many requests find their adapter on a device that drops the least recently used of RESIDENT."""
    held, found = list(before), 0
    for adapter in requested:
        found += adapter in held[-RESIDENT:]
        held = [*(other for other in held if other != adapter), adapter]
    return found


def test_no_request_finds_its_adapter_where_adapters_leave_the_device_after_use() -> None:
    """On a new server in each repeat, on one that is kept, and when a run is repeated."""
    for requests in (5, 9, 12, 20, 50):  # of each repeat: some repeats begin near the end of the order
        loads, kept = loads_of("distinct", requests), list[int]()
        for repeat in range(REPEATS):
            before, now = loads.held_before(repeat, RESIDENT), dealt(loads, repeat)
            assert hits(now, before) == 0, (requests, repeat)
            kept += before
            assert hits(now, kept) == 0, (requests, repeat)
            kept += [*now, *before]
            assert hits(now, kept) == 0, (requests, repeat)
            kept += now


def test_repeats_have_the_arrivals_and_lengths_of_their_seeds() -> None:
    in_turn, drawn = loads_of("distinct", 20).repeats, loads_of("uniform", 20).repeats
    assert in_turn[0].requests[5].at_s != in_turn[1].requests[5].at_s
    for one, other in zip(in_turn, drawn, strict=True):
        assert [request.at_s for request in one.requests] == [request.at_s for request in other.requests]


def test_a_server_reads_the_files_that_runs_use() -> None:
    assert loads_of("identical", 20).used() == [0]
    for popularity in ("uniform", "zipf:2", "distinct"):
        loads = loads_of(popularity, 9)
        assert loads.used() == sorted({adapter for repeat in range(REPEATS) for adapter in dealt(loads, repeat)})


def test_each_repeat_of_a_drawn_load_begins_with_the_same_adapters_on_the_device() -> None:
    loads = loads_of("zipf:2", 20)
    for repeat in range(REPEATS):
        assert loads.held_before(repeat, RESIDENT) == [*range(ADAPTERS - RESIDENT, ADAPTERS)]
    assert loads.held_before(0, 0) == []
    assert loads.held_before(0, 2 * ADAPTERS) == [*range(ADAPTERS)]


# --- variants ---


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--modes", "cached"), [("cached", None, "cached")]),
        (("--modes", "cached", "--lora-kernel", "bgmv-padded"), [("cached", "bgmv-padded", "cached")]),
        (
            ("--modes", "auto,cached", "--lora-kernel", "bgmv,bgmv-padded"),
            [
                *(("auto", "bgmv", "auto"), ("auto", "bgmv-padded", "auto bgmv-padded")),
                *(("cached", "bgmv", "cached"), ("cached", "bgmv-padded", "cached bgmv-padded")),
            ],
        ),
    ],
    ids=["the server's kernel", "one kernel", "two kernels"],
)
def test_each_mode_is_run_with_each_kernel_in_turn(
    words: tuple[str, ...], expected: list[tuple[str, str | None, str]]
) -> None:
    assert mode_variants(parsed(*words)[0]) == [ModeVariant(*each) for each in expected]


def test_the_error_for_an_unknown_kernel_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--lora-kernel", "sgmv")
    assert "'sgmv' is no LoRA kernel; there are bgmv, bgmv-padded" in capsys.readouterr().err


def arguments(folder: Path, variant: ModeVariant, *words: str) -> tuple[str, ...]:
    """Returns the arguments of a variant's server with two adapters of 3 MiB, one of them on the device at once."""
    options, load = parsed(*words)
    adapters = Synthetic((), (), ("a", "b"), (3 * MIB, 3 * MIB), GRANULE_BYTES)
    spec = load.spec()
    return _Prepared(options, adapters, folder, spec, mode_loads(spec, 1), resident=1).arguments(variant)


def test_a_server_gets_its_kernel_and_cached_gets_room_for_all(tmp_path: Path) -> None:
    padded = arguments(tmp_path, ModeVariant("cached", "bgmv-padded", "cached"))
    assert padded[padded.index("--lora-kernel") + 1] == "bgmv-padded"
    pools = {}
    for mode in ("cached", "auto"):
        plain = arguments(tmp_path, ModeVariant(mode, None, mode))
        assert "--lora-kernel" not in plain
        pools[mode] = int(plain[plain.index("--lora-pool-bytes") + 1]) // MIB
    assert pools == {"cached": 8, "auto": 4}


# --- room for adapters ---


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
    return make_synthetic(folder / "_".join(serve or ["auto"]), "10M", "float32", 64, (8, 16), MODULES, serve)


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


# --- servers ---


async def events(
    monkeypatch: pytest.MonkeyPatch, available_bytes: int, *, keep: bool, runs: Sequence[str]
) -> list[str]:
    """Returns the starts, runs and ends of servers of 2 GiB for three variants; a run of `fail` raises."""
    found: list[str] = []

    @asynccontextmanager
    async def start(variant: str) -> AsyncIterator[Any]:
        found.append(f"start {variant}")
        yield SimpleNamespace(memory_bytes=lambda: 2 * GIB), variant
        found.append(f"end {variant}")

    monkeypatch.setattr(mode_servers, "available_bytes", lambda: available_bytes)
    try:
        async with ModeServers(start, 3, keep) as running:
            for variant in runs:
                async with running.serve(variant) as (_, endpoint):
                    found.append(f"run {endpoint}")
                    if endpoint == "fail":
                        raise ZeroDivisionError
    except ZeroDivisionError:
        found.append("raised")
    return found


RUNS = ("cached", "auto", "auto", "cached")


async def test_a_server_runs_until_the_benchmark_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["start cached", "run cached", "start auto", "run auto", "run auto", "run cached"]
    assert await events(monkeypatch, 7 * GIB, keep=True, runs=RUNS) == [*expected, "end auto", "end cached"]


@pytest.mark.parametrize(("available_bytes", "keep"), [(6 * GIB, True), (100 * GIB, False)])
async def test_servers_that_do_not_fit_together_run_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, available_bytes: int, keep: bool
) -> None:
    each = [(f"start {one}", f"run {one}", f"end {one}") for one in RUNS]
    assert await events(monkeypatch, available_bytes, keep=keep, runs=RUNS) == [one for three in each for one in three]


async def test_servers_end_when_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await events(monkeypatch, 100 * GIB, keep=True, runs=("cached", "fail"))
    assert found == ["start cached", "run cached", "start fail", "run fail", "end fail", "end cached", "raised"]
