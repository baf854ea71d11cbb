"""Moments are met in their order, none early; what is already past comes at once."""

import asyncio
import time

import uvloop

from caraserve.bench.client.player import Pacer


def paced(moments_s: list[float], stop_at: int | None = None) -> list[tuple[int, float]]:
    """(index, seconds after the moment) of every call."""

    async def run() -> list[tuple[int, float]]:
        started_s, ended = time.perf_counter(), asyncio.Event()
        calls: list[tuple[int, float]] = []
        pacer: Pacer

        def call(index: int) -> None:
            calls.append((index, time.perf_counter() - started_s - moments_s[index]))
            if index == stop_at:
                pacer.stop()
            if index in (stop_at, len(moments_s) - 1):
                ended.set()

        pacer = Pacer([started_s + moment_s for moment_s in moments_s], call)
        await ended.wait()
        await _turns(5)
        return calls

    return uvloop.run(run())


async def _turns(count: int) -> None:
    """Lets the loop do what it still has to do."""
    for _ in range(count):
        await asyncio.sleep(0.001)


def test_every_moment_is_met_in_order_and_none_early() -> None:
    calls = paced([0.0, 0.0, 0.003, 0.0031, 0.02])
    assert [index for index, _ in calls] == [0, 1, 2, 3, 4]
    assert all(late_s >= 0 for _, late_s in calls)


def test_moments_gone_by_are_met_at_once() -> None:
    assert [index for index, _ in paced([-1.0, -0.5, 0.0])] == [0, 1, 2]


def test_stopped_it_calls_no_more() -> None:
    assert [index for index, _ in paced([0.0, 0.001, 0.002, 0.003], stop_at=1)] == [0, 1]
