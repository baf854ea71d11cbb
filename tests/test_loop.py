"""The engine's behaviour for its callers, with the CPU backend and the bundled demo model."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from caraserve import demo
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.config import PRELOADED_MODES
from caraserve.core.machine_profile import load
from caraserve.core.tenant import Tenant
from caraserve.errors import (
    AdapterRejected,
    ContextLengthExceeded,
    Displaced,
    Draining,
    Forbidden,
    NotFound,
    Overloaded,
)
from caraserve.loop import Engine
from caraserve.telemetry.usage import Usage
from tests.serving import MIB, PROFILE, Answer, engine_config, lora_config, model_config, running, submit

ADAPTERS = {name: demo.adapters_folder() / name for name in demo.ADAPTER_NAMES}
PROMPT = tuple(range(5, 45))


@asynccontextmanager
async def demo_engine(
    *,
    adapters: dict[str, Path] | None = None,
    mode: str = "overlapped",
    device_bytes: int = 64 * MIB,
    max_queue: int = 4096,
    seqs: int = 8,
) -> AsyncIterator[Engine]:
    folder = demo.adapters_folder() if adapters is None else None
    lora = lora_config(
        ADAPTERS if adapters is None else adapters, mode=mode, device_bytes=device_bytes, adapters_dir=folder
    )
    settings = engine_config(seqs=seqs, max_queue=max_queue)
    async with running(model_config(demo.model_folder()), lora, settings) as engine:
        yield engine


@pytest.fixture
def engine() -> AbstractAsyncContextManager[Engine]:
    return demo_engine()


async def until(condition: Callable[[], bool]) -> None:
    """Runs the event loop until `condition` holds, for states that have no event."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_an_unknown_adapter_is_refused_without_effect(engine: Engine) -> None:
    with pytest.raises(NotFound):
        submit(engine, PROMPT, "unknown")
    engine.check()


async def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(engine: Engine) -> None:
    with pytest.raises(ContextLengthExceeded, match=rf"{engine.max_model_len}.*{engine.max_model_len}"):
        submit(engine, [5] * engine.max_model_len)


async def test_the_time_to_retry_is_what_the_performance_model_predicts_for_the_queue() -> None:
    """While there is no answer yet, answers are taken to have 200 tokens."""
    model = PerfModel.of(load(PROFILE))
    async with demo_engine(mode="auto", max_queue=40, seqs=1) as engine:
        tasks = [submit(engine, PROMPT, max_tokens=2) for _ in range(41)]  # one runs, 40 wait
        with pytest.raises(Overloaded) as caught:
            submit(engine, PROMPT)
        predicted_ms = model.prefill_ms(40 * len(PROMPT), 0) + 40 * 200 * model.decode_ms(1, 0, 0)
        assert caught.value.retry_after_s == pytest.approx(min(60.0, predicted_ms / 1000), rel=0.05)
        assert engine.predicted_answer_s() == pytest.approx(0.2 * model.decode_ms(2, 0, 0), rel=0.1)
        await asyncio.gather(*tasks)


async def test_a_client_that_fills_the_queue_loses_its_newest_request_to_another_client() -> None:
    """The newest request of the flood is refused, not the other client's."""
    async with demo_engine(max_queue=4, seqs=1) as engine:
        flood = [submit(engine, PROMPT, tenant=Tenant("flood", f"user {i}")) for i in range(5)]  # one runs, four wait
        quiet = [submit(engine, PROMPT, tenant=Tenant("quiet")) for _ in range(2)]
        with pytest.raises(Overloaded):  # both have two waiting requests: it has its share
            submit(engine, PROMPT, tenant=Tenant("quiet"))
        assert [(await task).finish.reason for task in quiet] == ["length"] * 2
        answers = [await task for task in flood]
        errors = [answer.finish.error for answer in answers if answer.finish.reason == "error"]
        assert [type(error) for error in errors] == [Displaced, Displaced]
        engine.check()


async def test_ended_requests_are_counted_by_client_and_adapter(engine: Engine) -> None:
    first = await submit(engine, PROMPT, "poet", tenant=Tenant("c"))
    again = await submit(engine, PROMPT, "poet", tenant=Tenant("c", "user"))
    base = await submit(engine, PROMPT, max_tokens=3, tenant=Tenant("d"))
    metrics = engine._metrics
    cached = first.finish.cached_tokens + again.finish.cached_tokens
    assert cached > 0
    assert list(metrics.usage.rows()) == [
        ("c", "poet", Usage(2, 2 * len(PROMPT), cached, 16, 0)),
        ("d", None, Usage(1, len(PROMPT), base.finish.cached_tokens, 3, 0)),
    ]
    page = metrics.render(engine.snapshot(), lambda name: engine.adapter(name).rank).decode()
    for name, count in (("poet", 2), ("base", 1)):
        assert f'caraserve:adapter_time_to_first_token_seconds_count{{adapter_name="{name}",' in page
        assert re.search(rf'caraserve:adapter_requests_total{{reason="length",adapter_name="{name}",.*}} {count}', page)


async def test_output_ends_at_max_tokens_and_at_the_context(engine: Engine) -> None:
    short = await submit(engine, PROMPT, max_tokens=3)
    assert (short.finish.reason, len(short.token_ids)) == ("length", 3)
    prompt = [5] * (engine.max_model_len - 4)
    full = await submit(engine, prompt, max_tokens=100)
    assert (full.finish.reason, len(full.token_ids)) == ("length", 4)


async def test_a_stop_token_ends_the_output_and_is_not_shown(engine: Engine) -> None:
    free = await submit(engine, PROMPT, "poet", max_tokens=10)
    stopped = await submit(engine, PROMPT, "poet", max_tokens=10, stop_token_ids=(free.token_ids[4],))
    ended = free.token_ids.index(free.token_ids[4]) + 1
    assert stopped.token_ids == free.token_ids[:ended]
    assert (stopped.finish.reason, stopped.finish.stop_reason) == ("stop", free.token_ids[4])
    assert free.text.startswith(stopped.text)
    assert len(stopped.text) < len(free.text)


async def test_a_stop_string_ends_the_output_and_is_cut_off_by_default(engine: Engine) -> None:
    free = await submit(engine, PROMPT, "pirate", max_tokens=30)
    word = free.text[8:14]
    first = free.text.index(word)
    for included in (False, True):
        stopped = await submit(
            engine, PROMPT, "pirate", max_tokens=30, stop=(word,), include_stop_str_in_output=included
        )
        assert stopped.text == free.text[: first + (len(word) if included else 0)]
        assert (stopped.finish.reason, stopped.finish.stop_reason) == ("stop", word)


async def test_the_end_token_counts_only_after_min_tokens(engine: Engine) -> None:
    prompt = engine.tokenizer.chat([{"role": "user", "content": "Tell me about the sea."}], add_generation_prompt=True)
    ended = await submit(engine, prompt, "poet", max_tokens=200, ignore_eos=False)
    assert ended.finish.reason == "stop"
    longer = await submit(engine, prompt, "poet", max_tokens=200, ignore_eos=False, min_tokens=len(ended.token_ids) + 5)
    assert len(longer.token_ids) >= len(ended.token_ids) + 5


async def test_a_common_prefix_is_computed_once_for_each_adapter_salt_and_tenant_with_a_cache_of_its_own() -> None:
    async with demo_engine() as engine:
        a, b = Tenant("a", owns_cache=True), Tenant("b", owns_cache=True)
        owners: list[tuple[dict[str, Any], int]] = [
            *(({"adapter": "poet"}, 0), ({"adapter": "poet"}, 32), ({"adapter": "pirate"}, 0), ({}, 0), ({}, 32)),
            *(({"cache_salt": "a"}, 0), ({"cache_salt": "b"}, 0), ({"cache_salt": "b"}, 32)),
            *(({"tenant": a}, 0), ({"tenant": b}, 0), ({"tenant": b}, 32)),
        ]
        for owner, cached in owners:
            assert (await submit(engine, PROMPT, **owner)).finish.cached_tokens == cached, owner


async def test_draining_refuses_new_requests_and_lets_unfinished_ones_end(engine: Engine) -> None:
    task = submit(engine, PROMPT, "poet", max_tokens=60)
    await asyncio.sleep(0)
    draining = asyncio.create_task(engine.drain(30.0))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        submit(engine, PROMPT)
    await draining
    assert (await task).finish.reason == "length"


async def test_a_drain_that_takes_too_long_cancels_the_requests_left(engine: Engine) -> None:
    task = submit(engine, PROMPT, "poet", max_tokens=900)
    await asyncio.sleep(0)
    await engine.drain(0.0)
    assert (await task).finish.reason == "cancelled"


async def test_unloading_waits_for_running_requests_and_refuses_new_ones_at_once(engine: Engine) -> None:
    task = submit(engine, PROMPT, "poet", max_tokens=80)
    unloading = asyncio.create_task(engine.unload_adapter("poet"))
    await until(lambda: "poet" not in {info.name for info in engine.adapters()})
    with pytest.raises(NotFound):
        submit(engine, PROMPT, "poet")
    assert not unloading.done()
    answer = await task
    await unloading
    assert len(answer.token_ids) == 80
    assert "poet" not in engine.snapshot().device_adapters


@pytest.mark.parametrize("mode", PRELOADED_MODES)
async def test_a_mode_without_cold_starts_keeps_the_adapters_of_the_start(mode: str) -> None:
    async with demo_engine(mode=mode) as engine:
        assert set(engine.snapshot().device_adapters) == set(ADAPTERS)
        with pytest.raises(Forbidden):
            await engine.unload_adapter("poet")
        with pytest.raises(Forbidden):
            await engine.load_adapter("new", "poet")
        answers = await asyncio.gather(*(submit(engine, PROMPT, name) for name in ADAPTERS))
        phases = [answer.finish.phases for answer in answers]
        assert [(one.load_ms, one.stalled_ms, one.interrupted_ms) for one in phases] == [(0.0, 0.0, 0.0)] * len(answers)


async def test_a_name_loaded_in_place_gets_the_new_weights_and_running_requests_keep_the_old(engine: Engine) -> None:
    poet, pirate = [await submit(engine, PROMPT, name, max_tokens=40) for name in ("poet", "pirate")]
    before = submit(engine, PROMPT, "poet", max_tokens=40)
    with pytest.raises(AdapterRejected, match="already"):
        await engine.load_adapter("poet", "pirate")
    await engine.load_adapter("poet", "pirate", inplace=True)
    after = await submit(engine, PROMPT, "poet", max_tokens=40)
    assert (await before).token_ids == poet.token_ids
    assert after.token_ids == pirate.token_ids


async def test_an_adapter_whose_files_vanish_fails_its_own_requests_only(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    for file in ADAPTERS["poet"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    async with demo_engine(adapters={"gone": folder, "pirate": ADAPTERS["pirate"]}) as engine:
        (folder / "adapter_model.safetensors").unlink()
        lost, kept = submit(engine, PROMPT, "gone"), submit(engine, PROMPT, "pirate")
        finish = (await lost).finish
        assert finish.reason == "error"
        assert isinstance(finish.error, AdapterRejected)
        assert (await kept).finish.reason == "length"


async def test_a_cold_adapter_is_served_despite_a_stream_of_requests_for_a_hot_one() -> None:
    """The device has room for one adapter, and new requests for it keep coming."""
    async with demo_engine(device_bytes=int(1.2 * MIB), seqs=4) as engine:
        hot: set[asyncio.Task[Answer]] = set()
        cold: asyncio.Task[Answer] | None = None
        for turn in range(400):
            hot.add(submit(engine, PROMPT, "chef", max_tokens=4))
            if turn == 20:
                cold = submit(engine, PROMPT, "pirate", max_tokens=4)
            await asyncio.wait({*hot, cold} if cold else hot, return_when=asyncio.FIRST_COMPLETED)
            hot = {task for task in hot if not task.done()}
            if cold is not None and cold.done():
                break
        assert cold is not None
        assert cold.done()
        await asyncio.gather(*hot)


async def test_phases_add_up_and_a_cold_adapter_shows_as_load(engine: Engine) -> None:
    cold = (await submit(engine, PROMPT, "chef")).finish.phases
    warm = (await submit(engine, PROMPT, "chef")).finish.phases
    assert cold.load_ms > 0
    assert warm.load_ms == 0
    assert cold.e2e_ms == cold.queued_ms + cold.load_ms + cold.prefill_ms + cold.decode_ms


async def test_tenants_share_the_engine() -> None:
    """A tenant with one request does not wait behind another's forty."""
    async with demo_engine(seqs=4) as engine:
        done: list[str] = []
        tasks = [submit(engine, PROMPT, tenant=Tenant("flood"), max_tokens=10) for _ in range(40)]
        tasks.append(submit(engine, PROMPT, tenant=Tenant("quiet"), max_tokens=10))
        for task, tenant in zip(tasks, ["flood"] * 40 + ["quiet"], strict=True):
            task.add_done_callback(lambda _, tenant=tenant: done.append(tenant))
        await asyncio.gather(*tasks)
        assert done.index("quiet") < 12


async def test_a_tenants_waiting_requests_of_lower_priority_start_first() -> None:
    async with demo_engine(seqs=1) as engine:
        done: list[int] = []
        tasks = [submit(engine, PROMPT, priority=priority) for priority in (0, 7, 0, -7)]  # one runs, three wait
        for number, task in enumerate(tasks):
            task.add_done_callback(lambda _, number=number: done.append(number))
        await asyncio.gather(*tasks)
        assert done == [0, 3, 2, 1]
