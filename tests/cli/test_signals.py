"""Signals that end a server let its requests end first."""

import asyncio
import os
import signal
from collections.abc import Callable

import pytest

from caraserve.serve import _reread_on_hangup, _watch_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_starts_draining(number: signal.Signals) -> None:
    stop = _watch_signals()
    os.kill(os.getpid(), number)
    await asyncio.wait_for(stop.wait(), 20.0)


def test_an_ignored_hangup_stays_ignored() -> None:
    async def test() -> None:
        _reread_on_hangup([])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(test())
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("has_files", [True, False])
async def test_a_hangup_has_files_read_again_and_ends_nothing(has_files: bool) -> None:
    handled, read, rereads = asyncio.Event(), asyncio.Event(), list[Callable[[], None]]()
    _reread_on_hangup(rereads)
    stop = _watch_signals()
    if has_files:
        rereads.append(read.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.set)
    for number in (signal.SIGHUP, signal.SIGUSR1):  # handled in this order
        os.kill(os.getpid(), number)
    await asyncio.wait_for(handled.wait(), 20.0)
    assert (read.is_set(), stop.is_set()) == (has_files, False)
