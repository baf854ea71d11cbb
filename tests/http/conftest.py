"""What the tests of several routes watch."""

import asyncio

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
