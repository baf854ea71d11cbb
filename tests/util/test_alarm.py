"""Alarms of uvloop's event loop, by the real clock."""

import asyncio
import time

import pytest
import uvloop

from caraserve.util.alarm import Alarm


def late_by_s(*after_s: float) -> list[float]:
    """Returns how late an alarm is that is set again for each of these times after the one before has come."""

    async def run() -> list[float]:
        alarm, rang, late_s = Alarm(), asyncio.Event(), []
        for each_s in after_s:
            at_s = time.monotonic() + each_s
            alarm.set(at_s, rang.set)
            await rang.wait()
            rang.clear()
            late_s.append(time.monotonic() - at_s)
        alarm.close()
        return late_s

    return uvloop.run(run())


def test_an_alarm_is_never_early_and_mostly_late_by_less_than_a_millisecond() -> None:
    """uvloop's own timers are early by up to 0.4 ms, or late by 0.8."""
    late_s = late_by_s(*(0.0002 + 0.00013 * number for number in range(30)))
    assert min(late_s) >= 0.0
    assert sorted(late_s)[10] < 0.001


@pytest.mark.parametrize("at_s", [-5.0, 0.0])
def test_a_time_in_the_past_comes_at_once(at_s: float) -> None:
    assert late_by_s(at_s)[0] < 0.5 - at_s


async def test_an_alarm_set_again_comes_once_and_one_that_is_closed_never() -> None:
    alarm, calls = Alarm(), []
    now_s = time.monotonic()
    alarm.set(now_s - 1.0, lambda: calls.append("first"))
    rang = asyncio.Event()
    alarm.set(now_s + 0.001, rang.set)
    await rang.wait()
    alarm.set(now_s, lambda: calls.append("closed"))
    alarm.close()
    alarm.close()
    later, rang = Alarm(), asyncio.Event()
    later.set(time.monotonic() + 0.001, rang.set)
    await rang.wait()
    later.close()
    assert calls == []
