"""What the tests of several routes watch."""

import asyncio
from collections.abc import Callable

import pytest

from caraserve.util import tasks


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The rests of loops that run in turns of the event loop, as they are taken."""
    taken_s: list[float] = []
    sleep = asyncio.sleep

    async def note(delay_s: float) -> None:
        if delay_s == tasks._REST_S:
            taken_s.append(delay_s)
        await sleep(delay_s)

    monkeypatch.setattr(asyncio, "sleep", note)
    return taken_s


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Puts the event loop's clock forward by so many seconds; callbacks that are due then run at its next turn."""

    def forward(seconds: float) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + seconds)

    return forward
