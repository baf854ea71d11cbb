"""Iteration over the registry while names change and other tasks run."""

import asyncio
from pathlib import Path

import pytest

from caraserve.cluster.state.lww_map import _bucket
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from tests.cluster.nodes import instances

NAMES = [
    name for name in map(str, range(2000)) if _bucket(name) == 0
]  # one part of them, in which many are side by side


def meaning(name: str) -> RegisteredAdapter:
    return RegisteredAdapter(name, name.encode().hex().zfill(64), 8, 10)


async def test_each_name_is_yielded_with_its_adapter_at_that_time(tmp_path: Path) -> None:
    async with instances(tmp_path) as running:
        node = (await running.start("a")).member
        for name in NAMES:
            node.register(meaning(name))
        seen = {}
        async for adapter in node.adapters_in_turns():
            seen[adapter.name] = adapter
            if len(seen) == 1:
                first, changed, gone, *others = [adapter.name, *(name for name in NAMES if name != adapter.name)]
                node.register(RegisteredAdapter(changed, "a" * 64, 8, 10))
                node.remove(gone)
        assert seen == {name: meaning(name) for name in (first, *others)} | {
            changed: RegisteredAdapter(changed, "a" * 64, 8, 10)
        }


async def test_other_tasks_run_during_the_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.util.tasks._TURN_S", 0.0)
    async with instances(tmp_path) as running:
        node = (await running.start("a")).member
        for name in NAMES:
            node.register(meaning(name))
        seen: list[str] = []
        met: set[int] = set()

        async def look() -> None:
            while True:
                met.add(len(seen))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        async for adapter in node.adapters_in_turns():
            seen += [adapter.name]
        looking.cancel()
        assert len(NAMES) >= 5
        assert met >= set(range(1, len(NAMES)))
