"""The time to get an adapter from this instance's memory, from another one, and from a disk (LoRAServe, figure 14).

Two real servers share the machine. The holder has the adapters' files. The asker has none, and fetches every adapter
from the holder on its first request for it.
"""

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import uvloop

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.options import TARGETS
from caraserve.bench.records import PlannedRequest, Workload
from caraserve.bench.report.plots import Panel, Series
from caraserve.bench.runner import BenchmarkRunner, interruptible
from caraserve.bench.servers import Synthetic, make_synthetic, own_server, working_folder
from caraserve.errors import BackendFailed
from scripts.laboratory.fleet.instances import free_ports
from scripts.laboratory.papers.figures import FigureData, PaperOptions, Value, mean_value

_RANKS = (8, 16, 32, 64, 128)
_OF_EACH_RANK = 4  # adapters
_RESIDENT = 5  # on the device at once, so that a second round over all adapters finds none of them there
_PROMPT_TOKENS = 16
_LISTED_S = 60.0  # for other instances to announce their adapters
MEMORY, PEER, DISK = "this instance's memory", "another instance", "disk"
SOURCES = (MEMORY, PEER, DISK)
Times = Mapping[str, Mapping[int, Sequence[float]]]  # ms by source and rank


def fetch_sources(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Requests adapters of five ranks that are in each of the places, one after another."""
    return uvloop.run(_measured(options))


async def _measured(options: PaperOptions) -> FigureData:
    runner = BenchmarkRunner(LoadSettings(options.seed, True, 1))
    rounds: list[Times] = []
    with interruptible(runner), working_folder() as folder:
        made = make_synthetic(folder, "100M", "float32", 256, _RANKS * _OF_EACH_RANK, TARGETS["all"])
        files = sorted((folder / "adapters").rglob("*.safetensors"))
        for number in range(options.repeats):
            async with _servers(made, folder, number, runner.stopped) as (holder, asker):
                rounds.append(await _round(runner, made, files, holder, asker))
    return figure_data(rounds, {rank: size / 1e6 for rank, size in zip(_RANKS, made.sizes, strict=False)})


@asynccontextmanager
async def _servers(
    made: Synthetic, folder: Path, number: int, stopped: asyncio.Event
) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """Starts an instance that has all adapters and one that has none, for the round with this number."""
    port, other = free_ports(2)
    common = (
        *("--loading-mode", "ondemand", "--lora-pool-bytes", str(made.room_bytes(_RESIDENT)), *made.host_room()),
        *("--routing", "local", "--cpu-threads", "1", "--peers", f"127.0.0.1:{port},127.0.0.1:{other}"),
    )

    def named(name: str) -> tuple[str, ...]:
        return *common, "--name", name, "--registry", str(folder / f"{name}-{number}.sqlite")

    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(own_server((*made.arguments, *named("holder")), stopped, port=port))
        asker = await stack.enter_async_context(
            own_server((*made.model_arguments, *named("asker")), stopped, port=other)
        )
        await await_adapters(asker.url, made.names)
        yield await _endpoint(holder.url, made), await _endpoint(asker.url, made)


async def await_adapters(url: str, names: Sequence[str]) -> None:
    """Returns when the server at `url` lists these adapters, which other instances may hold. Raises BackendFailed if it
    does not within 60 s."""
    ends_s = time.monotonic() + _LISTED_S
    while missing := (await find_endpoint(url, "openai", None, names)).unlisted:
        if time.monotonic() > ends_s:
            raise BackendFailed(f"{url} does not list {missing[0]!r} and {len(missing) - 1} other adapters")
        await asyncio.sleep(0.1)


def drop_cached(path: Path) -> None:
    """Removes a file from the page cache, so that reading it reads the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on disk yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def _endpoint(url: str, made: Synthetic) -> Endpoint:
    return await find_endpoint(url, "openai", None, made.names)


async def _round(
    runner: BenchmarkRunner, made: Synthetic, files: Sequence[Path], holder: Endpoint, asker: Endpoint
) -> Times:
    """Returns the time of each fetch: the TTFT of a first request beyond that of a second one, sent after it."""
    for path in files:
        drop_cached(path)
    # MEMORY needs what DISK has read, and its second round counts: the first uses much of the device pool's memory for
    # the first time, for which a virtual machine's kernel can take 10 ms a MB.
    passes = ((DISK, holder), (MEMORY, holder), (MEMORY, holder), (PEER, asker))
    twice = [index for index in range(len(made.names)) for _ in range(2)]
    found = {}
    for source, endpoint in passes:
        ttfts_ms = await _ttfts_ms(runner, made, endpoint, twice)
        found[source] = by_rank([first - second for first, second in zip(ttfts_ms[::2], ttfts_ms[1::2], strict=True)])
    return found


async def _ttfts_ms(
    runner: BenchmarkRunner, made: Synthetic, endpoint: Endpoint, adapters: Sequence[int]
) -> list[float]:
    """Returns the TTFT of one request for each adapter, sent one after another. Raises BackendFailed if one fails."""
    requests = tuple(PlannedRequest(place, 0.0, index, _PROMPT_TOKENS, 1) for place, index in enumerate(adapters))
    run = await runner.play(endpoint, Workload(requests, ()), made.names, "fetches")
    ttfts_s = [record.ttft_s for record in run.records if record.error is None]
    if len(ttfts_s) < len(adapters):
        raise BackendFailed(next((record.error for record in run.records if record.error), None) or "interrupted")
    return [1000 * ttft_s for ttft_s in ttfts_s if ttft_s is not None]


def by_rank(found: Sequence[float]) -> dict[int, list[float]]:
    """Returns the values of each rank; the ranks of adapters follow one another in turn."""
    return {rank: list(found[place :: len(_RANKS)]) for place, rank in enumerate(_RANKS)}


def figure_data(rounds: Sequence[Times], sizes_mb: Mapping[int, float]) -> FigureData:
    """Returns the figure of these rounds; `sizes_mb` has the bytes of an adapter of each rank."""
    # Loads from memory take about as long as TTFT varies, so that ratios to them would be noise.
    ratios = [statistics.median(one[PEER][64]) / statistics.median(one[DISK][64]) for one in rounds]
    values = [mean_value(f"rank 64: {PEER} ÷ {DISK}", ratios)]
    lines = []
    for source in SOURCES:
        medians = [statistics.median(ms for one in rounds for ms in one[source][rank]) for rank in _RANKS]
        values += [Value(f"rank {rank}: {source}", ms, "ms") for rank, ms in zip(_RANKS, medians, strict=True)]
        lines.append(Series(source, tuple(medians), tuple(sizes_mb[rank] for rank in _RANKS)))
    setting = (
        f"Adapters of ranks 8 to 128 on all modules, {_OF_EACH_RANK} of each, for a model of 100 million parameters on "
        f"a CPU. Times are those to the first token of a prompt of {_PROMPT_TOKENS} tokens, less that of the same "
        "request sent again, when the adapter is on the device.",
        "Two servers on one machine, with TCP over loopback between them. The files are dropped from the page cache "
        "before they are read.",
    )
    return FigureData("measured", setting, tuple(values), (Panel("Fetching", "ms", tuple(lines), "adapter, MB"),))
