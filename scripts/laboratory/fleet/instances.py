"""Profiles instances and starts fleets of them, each with an equal share of the machine's cores."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp

from caraserve.bench.client.endpoint import Endpoint, find_endpoint
from caraserve.bench.servers import OwnServer, Synthetic, end_with_parent, own_server
from caraserve.errors import BackendFailed
from scripts.laboratory.fleet.cpu_share import CpuShare

SHARE_CORES = 0.2  # of one instance: eight of them leave a fifth of two cores to the client and the system
MAX_RUNNING = 32
_LIMITS = (
    *("--cpu-threads", "1", "--loading-mode", "cached"),
    *("--max-num-seqs", str(MAX_RUNNING), "--kv-cache-bytes", "512MiB"),
)
_JOINED_S = 60.0  # for instances to find one another


async def profile_instances(made: Synthetic, shares: Sequence[CpuShare], files: Sequence[Path]) -> None:
    """Measures a profile in each share, all at the same time, so that they compete for memory bandwidth as a busy fleet
    does. Raises BackendFailed with the end of the output of one that fails."""
    for share in shares:
        share.limit()
    await asyncio.gather(*(_profile(made, share, file) for share, file in zip(shares, files, strict=True)))
    for share in shares:
        share.unlimit()


async def _profile(made: Synthetic, share: CpuShare, file: Path) -> None:
    def prepare() -> None:
        end_with_parent()
        share.join()

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "caraserve", "profile", *made.arguments, *_LIMITS, "--output", str(file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        preexec_fn=prepare,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise BackendFailed(f"the profile was not measured:\n{output.decode('utf-8', 'replace')[-2000:].strip()}")


@asynccontextmanager
async def start_fleet(
    made: Synthetic, shares: Sequence[CpuShare], profiles: Sequence[Path], folder: Path, *options: str
) -> AsyncIterator[list[OwnServer]]:
    """Starts one instance in each share with its own profile, as one fleet, and yields them when each knows all others.

    `folder` is for their registries. `options` are those of `caraserve serve` that all have. Shares are limited when
    all instances are ready. Raises BackendFailed if one does not get ready or does not find the others.
    """
    ports = free_ports(len(shares))
    peers = ",".join(f"127.0.0.1:{port}" for port in ports)
    common = (*made.arguments, *_LIMITS, "--peers", peers, *options)
    async with AsyncExitStack() as stack:

        async def start(number: int, port: int) -> OwnServer:
            own = ("--profile", str(profiles[number]), "--registry", str(folder / f"registry-{port}.sqlite"))
            server = own_server((*common, *own), asyncio.Event(), port=port, join=shares[number].join)
            return await stack.enter_async_context(server)

        servers = await asyncio.gather(*(start(number, port) for number, port in enumerate(ports)))
        await asyncio.gather(*(_joined(server.url, len(servers)) for server in servers))
        for share in shares:
            share.limit()
        try:
            yield servers
        finally:
            for share in shares:
                share.unlimit()  # so that instances end quickly


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


async def _joined(url: str, instances: int) -> None:
    """Returns when an instance knows so many instances, itself included."""
    known = 0
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(_JOINED_S):
            while known < instances:
                async with session.get(f"{url}/v1/cluster") as answer:
                    listed = await answer.json()
                known = sum(1 for one in listed["data"] if one["state"] == "alive")
                await asyncio.sleep(0.2)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise BackendFailed(f"{url} knows {known} of {instances} instances: {error}") from None


async def endpoints_of(servers: Sequence[OwnServer]) -> list[Endpoint]:
    """Returns the servers' OpenAI endpoints."""
    return [await find_endpoint(server.url, "openai", None, None) for server in servers]
