"""Tests of the pacer: calls come in order, none early, and at once if their time has passed."""

import asyncio
import time

import uvloop

from caraserve.bench.client.player import Pacer


def paced(moments_s: list[float], stop_at: int | None = None) -> list[tuple[int, float]]:
    """Returns (index, seconds after the scheduled time) of every call."""

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
    """Lets the event loop run all pending callbacks."""
    for _ in range(count):
        await asyncio.sleep(0.001)


def test_calls_are_in_order_and_none_is_early() -> None:
    calls = paced([0.0, 0.0, 0.003, 0.0031, 0.02])
    assert [index for index, _ in calls] == [0, 1, 2, 3, 4]
    assert all(late_s >= 0 for _, late_s in calls)


def test_calls_whose_time_has_passed_are_made_at_once() -> None:
    assert [index for index, _ in paced([-1.0, -0.5, 0.0])] == [0, 1, 2]


def test_a_stopped_pacer_makes_no_more_calls() -> None:
    assert [index for index, _ in paced([0.0, 0.001, 0.002, 0.003], stop_at=1)] == [0, 1]
