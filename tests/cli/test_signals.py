"""Signals that end a server let its requests end first."""

import asyncio
import os
import signal

import pytest

from caraserve.serve import _watch_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_starts_draining(number: signal.Signals) -> None:
    async def test() -> None:
        stop = _watch_signals()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 20.0)

    asyncio.run(test())


def test_an_ignored_hangup_stays_ignored() -> None:
    async def test() -> None:
        _watch_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(test())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_hangup_has_files_read_again_where_there_are_any_and_ends_nothing() -> None:
    async def test() -> None:
        read = asyncio.Event()
        stop = _watch_signals([read.set])
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(read.wait(), 20.0)
        assert not stop.is_set()

    asyncio.run(test())
