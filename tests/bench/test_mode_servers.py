"""`bench modes` keeps the servers of all modes running where their memory permits."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.bench import mode_servers
from caraserve.bench.mode_servers import ModeServers

GIB = 1 << 30


class Log:
    """Starts servers that only record their start and end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @asynccontextmanager
    async def start(self, variant: str) -> AsyncIterator[Any]:
        self.events.append(f"start {variant}")
        yield SimpleNamespace(memory_bytes=lambda: 2 * GIB), variant
        self.events.append(f"end {variant}")


async def played(log: Log, keep: bool = True) -> list[str]:
    async with ModeServers(log.start, 3, keep) as servers:
        for variant in ("cached", "auto", "auto", "cached"):
            async with servers.serve(variant) as (_, endpoint):
                log.events.append(f"run {endpoint}")
    return log.events


async def test_a_server_runs_until_the_benchmark_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_servers, "available_bytes", lambda: 7 * GIB)
    runs = ["start cached", "run cached", "start auto", "run auto", "run auto", "run cached"]
    assert await played(Log()) == [*runs, "end auto", "end cached"]


@pytest.mark.parametrize(("available_bytes", "keep"), [(6 * GIB, True), (100 * GIB, False)])
async def test_servers_that_do_not_fit_together_run_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, available_bytes: int, keep: bool
) -> None:
    monkeypatch.setattr(mode_servers, "available_bytes", lambda: available_bytes)
    each = [(f"start {one}", f"run {one}", f"end {one}") for one in ("cached", "auto", "auto", "cached")]
    assert await played(Log(), keep) == [event for events in each for event in events]


async def test_servers_end_when_a_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode_servers, "available_bytes", lambda: 100 * GIB)
    log = Log()
    with pytest.raises(ZeroDivisionError):
        async with ModeServers(log.start, 2, keep=True) as servers, servers.serve("cached"):
            raise ZeroDivisionError
    assert log.events == ["start cached", "end cached"]
