"""An engine over the CUDA backend and an emulated device, of which something fails: which requests end, and that the
others get their answers."""

import asyncio
import random
from typing import Any

import pytest

from caraserve.core.batch import Batch, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import CopyFailed
from caraserve.gpu.backend import Done
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.forward import iteration
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.memory.copier import AdapterCopier
from caraserve.gpu.memory.pool import DevicePool
from caraserve.loop import Engine
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.start_policy import AwaitedPrefill, PrefillStart
from tests.gpu.answers import Asked, check, run_server
from tests.gpu.host_backend import Host
from tests.oracle.models import prompt_of
from tests.oracle.subject import Subject
from tests.serving import submit

pytestmark = pytest.mark.usefixtures("torch_for_triton")


def fail(*given: object, **named: object) -> None:
    raise RuntimeError("not this time")


def lose_device(*given: object) -> None:
    raise DriverError("the device is lost")


async def until_idle(host: Host) -> None:
    """Waits for the last iteration, whose requests have ended before it."""
    await asyncio.to_thread(host.on_launching_thread, lambda: None)  # the iteration may still be in the queue
    while host.parts.lanes[0].results._free.qsize() < 3:  # noqa: ASYNC110  it has no event
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("what", ["collect", "copy_results"])
def test_an_iteration_whose_results_cannot_be_read_fails_its_requests_and_no_others(
    subject: Subject, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(random.Random(5), 9)

    async def use(engine: Engine, host: Host) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(iteration, what, fail)
            for _ in range(4):  # more requests, with an iteration or two each, than there are blocks for results
                assert (await submit(engine, prompt, "r8", max_tokens=2)).finish.reason == "error"
        check(subject, [(prompt, "r8")], [await submit(engine, prompt, "r8", max_tokens=4)], 4)

    run_server(subject, use)


def test_an_adapter_that_cannot_be_placed_fails_its_request_and_is_placed_for_the_next(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(random.Random(6), 9)

    async def use(engine: Engine, host: Host) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceImages, "_write_column", fail)
            assert (await submit(engine, prompt, "r8", max_tokens=2)).finish.reason == "error"
        check(subject, [(prompt, "r64")], [await submit(engine, prompt, "r64", max_tokens=4)], 4)

    run_server(subject, use)


def test_an_adapter_that_cannot_be_placed_fails_no_request_beside_its_own(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its load has failed when the device is given the first batch that names it."""
    asked: list[Asked] = [(prompt_of(random.Random(seed), 9), name) for seed, name in enumerate([None, "r64", "mixed"])]
    write = DeviceImages._write_column

    def fail_for_r8(images: DeviceImages, slot: int, base: int) -> None:
        if images.bound[slot].adapter.spec.rank == 8:
            fail()
        write(images, slot, base)

    async def use(engine: Engine, host: Host) -> None:
        launch, load = host.backend.launch, host.backend.load_adapter
        kept: list[tuple[Any, ...]] = []  # the load of r8
        failures: list[object] = []
        adapters_beside: list[int] = []

        def load_later(adapter: HostAdapter, slot: int, *how: Any) -> None:
            if adapter.spec.rank == 8:
                kept.append((adapter, slot, *how))
            else:
                load(adapter, slot, *how)

        def watched(batch: Batch, done: Done) -> None:
            def observed(outcome: StepResult | Exception) -> None:
                assert isinstance(outcome, StepResult)
                failures.extend(row.failure for row in outcome.rows if not row.is_finite)
                done(outcome)

            slots = {row.adapter_slot for row in batch.rows}
            if kept and kept[0][1] in slots:
                load(*kept.pop())
                adapters_beside.append(len(slots) - 1)
            launch(batch, observed)

        def at_once(adapter: Adapter, prefill: AwaitedPrefill, *, may_assist: bool) -> PrefillStart | None:
            if adapter.tier not in (AdapterTier.COPYING, AdapterTier.DEVICE):
                return None
            return PrefillStart(prefill.begins_s, assist=False)  # though its layers are not expected in time

        for prompt, name in asked:  # all others are on the device
            await submit(engine, prompt, name, max_tokens=1)
        monkeypatch.setattr(engine.catalog.manager.arrivals, "start_of", at_once)
        monkeypatch.setattr(DeviceImages, "_write_column", fail_for_r8)
        monkeypatch.setattr(host.backend, "load_adapter", load_later)
        monkeypatch.setattr(host.backend, "launch", watched)
        others = [asyncio.ensure_future(submit(engine, prompt, name, max_tokens=40)) for prompt, name in asked]
        lost = await submit(engine, prompt_of(random.Random(8), 30), "r8", max_tokens=4)
        assert isinstance(lost.finish.error, CopyFailed)
        assert lost.token_ids == []
        check(subject, asked, await asyncio.gather(*others), 40)
        assert adapters_beside == [len(asked)]
        assert {type(failure) for failure in failures} == {CopyFailed}

    run_server(subject, use)


def test_requests_end_if_the_kv_cache_cannot_grow(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(engine: Engine, host: Host) -> None:
        for name in subject.adapters:  # idle adapters take most of the memory
            assert (await submit(engine, prompt_of(random.Random(7), 9), name, max_tokens=1)).finish.reason == "length"
        monkeypatch.setattr(DevicePool, "resize_kv", fail)
        answers = await asyncio.gather(*(submit(engine, prompt_of(random.Random(seed), 90), None) for seed in range(6)))
        assert {answer.finish.reason for answer in answers} == {"error"}
        assert engine.failure == "not this time"
        await until_idle(host)

    run_server(subject, use)


def test_requests_end_if_the_device_fails_while_the_kv_cache_waits_for_room(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(engine: Engine, host: Host) -> None:
        for name in subject.adapters:  # idle adapters take most of the memory
            assert (await submit(engine, prompt_of(random.Random(7), 9), name, max_tokens=1)).finish.reason == "length"
        monkeypatch.setattr(DevicePool, "resize_kv", lambda *given, **named: None)
        answers = [submit(engine, prompt_of(random.Random(seed), 90), None) for seed in range(6)]
        while not host.parts.images._waiting:  # noqa: ASYNC110  nothing tells that the cache waits
            await asyncio.sleep(0.001)
        monkeypatch.setattr(AdapterCopier, "poll", lose_device)
        assert {answer.finish.reason for answer in await asyncio.gather(*answers)} == {"error"}
        assert engine.failure == "the device is lost"
        await until_idle(host)

    run_server(subject, use)
