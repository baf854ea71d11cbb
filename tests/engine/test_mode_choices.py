"""Metrics of mode `auto`: how often it chose which start, with the predicted and the measured times."""

import asyncio
from contextlib import AbstractAsyncContextManager
from functools import partial

import pytest

from caraserve.lora.start_policy import ExpectedLayers
from caraserve.telemetry.metrics import Metrics
from tests.engine_harness import EngineHarness, in_harness, turn
from tests.http.fake_engine import FakeSnapshot

with_harness = partial(in_harness, mode="auto", device_adapters=4)


@pytest.fixture
def here() -> AbstractAsyncContextManager[EngineHarness]:
    return with_harness()


async def serve(here: EngineHarness, name: str | None, prompt: int) -> None:
    _, task = here.ask(range(prompt), name, max_tokens=3)
    await here.until_done([task])


async def test_a_cold_start_and_a_warm_one(here: EngineHarness) -> None:
    await serve(here, "a0", 5)
    await serve(here, "a0", 5)
    assert [name for name, _, _ in here.metrics.choices] == ["assisted", "cached"]


async def test_where_no_worker_is_free_a_prefill_starts_when_its_weights_are_expected() -> None:
    async with with_harness(assisted_batches=1) as here:
        tasks = [here.ask(range(5), name, max_tokens=3)[1] for name in ("a0", "a1")]
        for _ in range(5):
            await asyncio.sleep(0)
        while here.reader.reads:
            here.reader.reads.pop(0)(True)
            for _ in range(5):
                await asyncio.sleep(0)
        here.backend.copies.pop()(True)
        while here.backend.lane:
            here.backend.step()
        await here.until_done(tasks)
        assert sorted(name for name, _, _ in here.metrics.choices) == ["assisted", "pipelined"]


async def test_workers_may_compute_a_layer_that_is_late_although_none_was_expected_to_be(here: EngineHarness) -> None:
    tasks = [here.ask(range(5), "a0", max_tokens=3)[1]]
    await turn()
    here.reader.reads.pop()(True)
    await turn()
    manager = here.engine.catalog.manager
    copied = manager.find("digest-0")
    assert copied is not None
    copied.groups = (ExpectedLayers(copied.groups[-1].end, here.backend.now_s + 1.0),)  # with the iteration under way
    tasks.append(here.ask(range(10, 17), "a0", max_tokens=3)[1])
    await turn()
    while here.backend.lane:
        here.backend.step()
        await turn()
    assert [row.assist for plan in here.backend.launched for row in plan.rows if row.count == 7] == [True]
    await here.until_done(tasks)
    assert [name for name, _, _ in here.metrics.choices] == ["assisted", "pipelined"]


async def test_the_predicted_time_is_from_the_choice_to_the_end_of_the_first_chunk(here: EngineHarness) -> None:
    await serve(here, "a0", 5)
    await serve(here, "a0", 7)
    (_, cold_ms, _), (_, warm_ms, seen_ms) = here.metrics.choices
    assert cold_ms == pytest.approx(500, abs=100)
    assert warm_ms == pytest.approx(700)
    assert seen_ms == 1000, "an iteration of the fake takes a second"


@pytest.mark.parametrize("mode", ["pipelined", "assisted", "overlapped"])
async def test_other_modes_choose_nothing(mode: str) -> None:
    async with with_harness(mode=mode) as here:
        await serve(here, "a0", 5)
        assert here.metrics.choices == []


async def test_requests_of_the_base_model_count_as_no_choice(here: EngineHarness) -> None:
    await serve(here, None, 5)
    assert here.metrics.choices == []


def test_choices_are_exported_with_predicted_and_observed_seconds() -> None:
    metrics = Metrics("m", max_loras=1, block_tokens=16)
    metrics.observe_choice("assisted", 20.0, 30.0)
    metrics.observe_choice("assisted", 40.0, 50.0)
    metrics.observe_choice("cached", 1.0, 2.0)
    text = metrics.render(FakeSnapshot(), lambda name: 8).decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'choice="' in line)
    found = {(name.split("{")[0], name.split('choice="')[1].split('"')[0]): float(v) for name, v in values.items()}
    assert found["caraserve:loading_choice_total", "assisted"] == 2
    assert found["caraserve:loading_choice_total", "cached"] == 1
    assert found["caraserve:loading_choice_predicted_seconds_total", "assisted"] == pytest.approx(0.06)
    assert found["caraserve:loading_choice_observed_seconds_total", "assisted"] == pytest.approx(0.08)
