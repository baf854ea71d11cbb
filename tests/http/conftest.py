"""What the tests of several routes use and watch."""

import asyncio
from contextlib import AbstractAsyncContextManager

import pytest

from caraserve.util import tasks
from tests.http.fake_engine import FakeEngine
from tests.http.fleet import Fleet, fleet
from tests.http.serving import Client, serving


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client(fake: FakeEngine) -> AbstractAsyncContextManager[Client]:
    """A client of a new server over `fake`."""
    return serving(fake)


@pytest.fixture
def running() -> AbstractAsyncContextManager[Fleet]:
    """A fleet without instances."""
    return fleet()


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
