"""Servers of `bench modes`: one for each variant, kept running between its runs where memory permits."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from caraserve.bench.client.endpoint import Endpoint
from caraserve.bench.servers import OwnServer

Variant = TypeVar("Variant")
WarmServer: TypeAlias = tuple[OwnServer, Endpoint]
_GROWTH = 1.5  # a server's memory after its runs ÷ that after its start, at most: KV blocks are touched on first use


class ModeServers(Generic[Variant]):
    """Gives each run the server of its variant.

    A machine's speed drifts within minutes: by 15 % from one setting to the next, in one measurement. So short runs of
    all variants should alternate, which a start of 10 to 20 s before every run would prevent. Servers that together
    need more memory than there is run one at a time. `count`: of variants. `keep` is False where servers cannot run
    at the same time, as on one GPU.
    """

    def __init__(
        self, start: Callable[[Variant], AbstractAsyncContextManager[WarmServer]], count: int, keep: bool
    ) -> None:
        self._start, self._count, self._keep = start, count, keep
        self._stack = AsyncExitStack()
        self._running: dict[Variant, WarmServer] = {}

    async def __aenter__(self) -> "ModeServers[Variant]":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @asynccontextmanager
    async def serve(self, variant: Variant) -> AsyncIterator[WarmServer]:
        """Yields a warm server of a variant. Raises BackendFailed and Interrupted as `own_server` does."""
        if variant not in self._running:
            async with AsyncExitStack() as starting:
                warm = await starting.enter_async_context(self._start(variant))
                if not self._keep_running(warm[0]):
                    yield warm
                    return
                self._running[variant] = warm
                self._stack.push_async_exit(starting.pop_all().__aexit__)
        yield self._running[variant]

    def _keep_running(self, server: OwnServer) -> bool:
        """Returns whether servers are kept; the first one's memory decides for all."""
        if self._keep and not self._running:
            needed_bytes = (self._count - 1) * _GROWTH * server.memory_bytes()
            self._keep = needed_bytes < available_bytes()
        return self._keep


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Returns the memory that programs can use without swapping."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return next(1024 * int(words[1]) for words in lines if words[0] == "MemAvailable:")
