"""Stage `fleet` against an endpoint without a model."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from caraserve.bench.servers import OwnServer
from caraserve.errors import BackendFailed
from scripts.laboratory.gpu import fleet as stage
from scripts.laboratory.gpu.fleet import fleet
from scripts.laboratory.gpu.setup import CheckSetup
from tests.bench.fake_endpoint import Fake
from tests.gpu.rehearsal import FACTS, SMALL, opener


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Serves in place of `caraserve serve`."""
    made = Fake(models=("ttft-0-tpot-0", "ttft-2-tpot-0"))

    @asynccontextmanager
    async def own_server(arguments: Sequence[str], *_: Any, **__: Any) -> AsyncIterator[OwnServer]:
        assert arguments[arguments.index("--device") + 1] == "cuda"
        async with TestServer(made.app()) as server:
            yield OwnServer(str(server.make_url("")), os.getpid())

    monkeypatch.setattr(stage, "own_server", own_server)
    return made


def test_streams_of_the_base_model_and_of_adapters_in_turn(fake: Fake, tmp_path: Path) -> None:
    effort = replace(SMALL, fleet_streams=(1, 2, 3, 5))
    result = fleet(CheckSetup(opener(), FACTS, effort, tmp_path))
    points = result.figures.points
    base, adapters = (1, 3, 5), (1, 2, 3, 5)  # the base model with the least, the middle and the most alone
    assert [(point.adapters, point.streams) for point in points] == [
        *((False, count) for count in base),
        *((True, count) for count in adapters),
    ]
    assert all(point.tokens_per_s > 0 and {"p50", "p99"} <= set(point.ttft_ms) for point in points)
    assert all(point.thread_us[0] >= 0 for point in points)
    asked = [str(entry["model"]) for entry in fake.log]
    assert [asked.count(name) for name in ("base", *fake.models)] == [4 + 9 + 15, 2 + 3 + 5 + 8, 2 + 3 + 4 + 7]
    assert [line.what for line in result.lines][::6] == ["1 streams of the base model", "5 streams of 2 adapters"]


def test_an_answer_that_fails_fails_the_stage(fake: Fake, tmp_path: Path) -> None:
    fake.models = ("refuse",)
    with pytest.raises(BackendFailed, match="1 streams, adapters: a request failed: HTTP 429"):
        fleet(CheckSetup(opener(), FACTS, SMALL, tmp_path))
