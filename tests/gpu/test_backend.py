"""A whole engine over the CUDA backend and an emulated device: tokens equal those of transformers and peft in every
mode, with any memory size and any order of streams."""

import asyncio
import json
import random
import re
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import triton

from caraserve.config import LOADING_MODES, PRELOADED_MODES, LoraConfig
from caraserve.core.batch import Batch
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.queues import RequestQueues
from caraserve.errors import ConfigError
from caraserve.gpu import builder
from caraserve.gpu.driver.api import DriverError, Graph, Stream
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.forward.lanes import CapturedPass
from caraserve.gpu.kernels.bgmv_work import AdapterItems
from caraserve.gpu.memory.pass_shape import PassShape
from caraserve.loop import Engine
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.start_policy import AwaitedPrefill, PrefillStart
from tests.gpu.answers import CONTEXT, Asked, check, run_server
from tests.gpu.host_backend import GRANULE_BYTES, PATIENCE_S, Host, hold_second_copy, on_a_loop, serving
from tests.gpu.host_driver import HostDriver
from tests.oracle.models import prompt_of
from tests.oracle.subject import KINDS, Subject
from tests.serving import MIB, PROFILE, Answer, engine_config, lora_config, model_config, running, submit

pytestmark = pytest.mark.usefixtures("torch_for_triton")


def some_requests(rng: random.Random, names: Sequence[str | None], count: int) -> list[Asked]:
    return [(prompt_of(rng, rng.choice((1, 3, 17, 40, 100))), rng.choice(names)) for _ in range(count)]


def ask(
    subject: Subject,
    asked: Sequence[Asked],
    tokens: int,
    *,
    mode: str = "pipelined",
    pool_granules: int = 24,
    device_bytes: int | None = None,
    gap_s: float = 0.0,
    padded: bool = False,
    pipeline_groups: int | None = None,
    seqs: int = 6,
    step_tokens: int = 48,
    params: dict[str, Any] | None = None,
    prepare: Callable[[Host], None] = lambda host: None,
    starts_early: bool = False,
    **device: Any,
) -> list[Answer]:
    """Returns a new engine's answers to requests sent one after another. `prepare` is called before the first.
    `starts_early`: prefills start at once, as if their layers were expected in time."""
    pool_bytes = pool_granules * GRANULE_BYTES
    lora = lora_config(subject.adapters, mode=mode, device_bytes=device_bytes or pool_bytes, host_bytes=4 * MIB)
    if padded:
        profile = json.loads(PROFILE.read_text(encoding="utf-8"))
        profile["decode"]["is_padded"] = True
        path = subject.model.with_name("padded.json")
        path.write_text(json.dumps(profile), encoding="utf-8")
        lora = replace(lora, lora_kernel="bgmv-padded", profile=path)
    # The copy begins with the second of two layers, which CPU workers need not compute.
    lora = replace(lora, pipeline_groups=2 if mode == "assisted" else pipeline_groups)
    engine = engine_config(seqs=seqs, step_tokens=step_tokens, kv_bytes=pool_bytes)

    async def serve() -> list[Answer]:
        model = model_config(subject.model, max_model_len=CONTEXT)
        async with serving(model, lora, engine, **device) as (served, host):
            if len(host.backend.workers):
                assert host.backend.workers.await_all(30)
            prepare(host)
            if starts_early:
                served.catalog.manager.arrivals.start_of = at_once  # type: ignore[method-assign]
            tasks = []
            for prompt, name in asked:
                tasks.append(submit(served, prompt, name, max_tokens=tokens, **params or {}))
                await asyncio.sleep(gap_s)
            return await asyncio.gather(*tasks)

    return asyncio.run(serve())


def at_once(adapter: Adapter, prefill: AwaitedPrefill, *, may_assist: bool) -> PrefillStart | None:
    there = adapter.tier in (AdapterTier.COPYING, AdapterTier.DEVICE)
    return PrefillStart(prefill.begins_s, assist=False) if there else None


def orders() -> list[object]:
    """Returns every mode with some order of streams; modes that load during iterations with late copies and late
    iterations, but not `auto`, which chooses among these."""
    cases: list[tuple[str, Lane | None]] = [(mode, None) for mode in LOADING_MODES]
    cases += [(mode, last) for mode in ("overlapped", "pipelined", "merged") for last in (Lane.COPY, Lane.COMPUTE)]
    return [pytest.param(*case, id=f"{case[0]}-{'any' if case[1] is None else case[1].name}") for case in cases]


@pytest.mark.parametrize(("mode", "last"), orders())
def test_every_mode_answers_like_peft(subject: Subject, mode: str, last: Lane | None) -> None:
    """The memory holds about three adapters, which are loaded, evicted and moved while the KV cache grows and
    shrinks."""
    rng = random.Random(f"{mode} {last}")
    asked = some_requests(rng, [None, *subject.adapters], 8)
    granules, gap_s = 64 if mode in PRELOADED_MODES else 24, rng.choice((0.0, 0.02))
    seed = rng.randrange(1 << 30)
    answers = ask(subject, asked, 5, mode=mode, pool_granules=granules, gap_s=gap_s, seed=seed, last=last)
    check(subject, asked, answers, 5)


class Seen:
    """Records what became of an engine's launches."""

    def __init__(self) -> None:
        self.replays: list[bool] = []  # for each iteration that took a graph: whether it was gated
        self.moved = 0  # number of moved adapters
        self.waited = 0  # iterations launched before all layers of their adapters had arrived

    def look_at(self, host: Host, *, first_layers_late: bool = False) -> None:
        """Watches a backend. `first_layers_late`: no layer is copied until an iteration has been launched without
        it."""
        captured_graphs, images = host.parts.captured_graphs, host.parts.images
        find, relocate = captured_graphs.find, images._relocate
        host.driver.held = {Lane.COPY} if first_layers_late else set()

        def finding(plan: Batch, shape: PassShape, arriving: Collection[int]) -> CapturedPass | None:
            replay = find(plan, shape, arriving)
            self.replays += [] if replay is None else [replay.gate is not None]
            self.waited += len(images.arriving({row.adapter_slot for row in plan.rows})) > 0
            if first_layers_late:
                host.driver.held = set() if self.waited else {Lane.COPY}
            return replay

        def relocating(*asked: Any) -> None:
            self.moved += 1
            relocate(*asked)

        captured_graphs.find, images._relocate = finding, relocating  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize(
    ("last", "groups"), [(Lane.LORA, 2), (Lane.COPY, 2), (Lane.GATE, 2), (Lane.COPY, 1)], ids=lambda value: str(value)
)
def test_graphs_answer_like_kernels_launched_one_by_one(subject: Subject, last: Lane | None, groups: int) -> None:
    """Also while layers are being copied, by gated graphs; those that are copied at once, by the ordinary ones."""
    rng, seen = random.Random(f"graphs {last}"), Seen()
    asked = some_requests(rng, [None, *subject.adapters], 12)
    device: dict[str, Any] = {"seed": 1, "last": last, "graph_bytes": 1 << 30, "pipeline_groups": groups}
    answers = ask(
        subject, asked, 5, prepare=lambda host: seen.look_at(host, first_layers_late=True), starts_early=True, **device
    )
    check(subject, asked, answers, 5)
    assert seen.waited
    assert set(seen.replays) == ({False} if groups == 1 else {True, False})


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_enforce_eager_launches_every_iteration_kernel_by_kernel(subject: Subject, enforce_eager: bool) -> None:
    rng = random.Random(13)
    asked = some_requests(rng, [None, *subject.adapters], 4)

    async def serve() -> tuple[list[Answer], int, int]:
        room = 24 * GRANULE_BYTES
        lora = lora_config(subject.adapters, mode="pipelined", device_bytes=room, host_bytes=4 * MIB)
        engine = replace(engine_config(seqs=2, step_tokens=8, kv_bytes=room), enforce_eager=enforce_eager)
        async with serving(model_config(subject.model, max_model_len=CONTEXT), lora, engine, graph_bytes=None) as (
            served,
            host,
        ):
            answers = await asyncio.gather(*(submit(served, *each, max_tokens=4) for each in asked))
            return answers, host.parts.captured_graphs.count, host.driver.replays

    answers, count, replays = asyncio.run(serve())
    check(subject, asked, answers, 4)
    assert (count == 0) == (replays == 0) == enforce_eager


@pytest.mark.parametrize("error", [DriverError("no room for it"), RuntimeError("CUDA error: operation not\npermitted")])
def test_an_iteration_whose_graph_cannot_be_captured_is_launched_kernel_by_kernel(
    subject: Subject, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every third graph, of iterations and of prompts that CPU workers help with; the others are captured."""
    begin, run, begun = HostDriver.begin_capture, HostDriver.run, list[Stream]()

    def beginning(driver: HostDriver, stream: Stream) -> None:
        begun.append(stream)
        begin(driver, stream)

    def refusing(driver: HostDriver, stream: Stream, issue: Callable[[], None]) -> None:
        if driver.captures(stream) and len(begun) % 3 == 0:
            raise error
        run(driver, stream, issue)

    monkeypatch.setattr(HostDriver, "begin_capture", beginning)
    monkeypatch.setattr(HostDriver, "run", refusing)
    monkeypatch.setattr(builder, "_CHUNKS_SHARE", 1.0)
    rng = random.Random(14)
    asked = some_requests(rng, [None, *subject.adapters], 6)
    hosts: list[Host] = []
    answers = ask(subject, asked, 5, mode="assisted", seqs=2, prepare=hosts.append, graph_bytes=1 << 30)
    check(subject, asked, answers, 5)
    assert hosts[0].driver.replays
    count = hosts[0].parts.captured_graphs.count + hosts[0].parts.assisted.graphs.count
    assert len(set(begun)) == 2
    assert [record.message for record in caplog.records if record.name == builder.__name__] == [
        f"{count // 3} of {count} graphs cannot be captured, so what would take them is launched kernel by kernel, "
        f"which takes longer: {' '.join(str(error).split())}"
    ]


def test_a_device_that_fails_while_graphs_are_captured_ends_the_start(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(driver: HostDriver, stream: Stream) -> Graph:
        driver.abandon_capture(stream)
        driver.failed = True
        raise DriverError("an illegal address")

    monkeypatch.setattr(HostDriver, "end_capture", failing)
    before = set(threading.enumerate())
    with pytest.raises(DriverError, match="the device has failed"):
        ask(subject, [], 1, graph_bytes=1 << 30)
    assert set(threading.enumerate()) <= before


def test_adapters_are_awaited_without_graphs_if_waits_cannot_be_captured(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait_value = HostDriver.wait_value

    def refusing(driver: HostDriver, stream: Stream, address: int, value: int) -> None:
        if driver.captures(stream):
            raise DriverError("cuStreamWaitValue32_v2: not supported")
        wait_value(driver, stream, address, value)

    monkeypatch.setattr(HostDriver, "wait_value", refusing)
    rng, seen = random.Random(12), Seen()
    asked = some_requests(rng, [None, *subject.adapters], 8)
    device: dict[str, Any] = {"seed": 1, "last": Lane.COPY, "graph_bytes": 1 << 30}
    answers = ask(
        subject, asked, 5, prepare=lambda host: seen.look_at(host, first_layers_late=True), starts_early=True, **device
    )
    check(subject, asked, answers, 5)
    assert seen.waited
    assert set(seen.replays) == {False}
    (complaint,) = (record.message for record in caplog.records if record.name == builder.__name__)
    assert complaint.endswith("which takes longer: cuStreamWaitValue32_v2: not supported")


@pytest.mark.parametrize("graph_bytes", [0, 1 << 30], ids=["kernels", "graphs"])
@on_a_loop
async def test_a_layer_is_computed_while_the_next_one_is_copied(
    subject: Subject, graph_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, prompt = 24 * GRANULE_BYTES, [7]  # one token, which decoding kernels compute
    lora = lora_config(subject.adapters, mode="pipelined", device_bytes=room, host_bytes=4 * MIB, pipeline_groups=2)
    settings = engine_config(seqs=2, step_tokens=8, kv_bytes=room)
    model = model_config(subject.model, max_model_len=CONTEXT)
    async with serving(model, lora, settings, graph_bytes=graph_bytes) as (engine, host):
        before, groups = host.driver.log.count("bgmv_shrink"), len(host.parts.plan.layers[0].groups)
        hold_second_copy(monkeypatch)
        answer = submit(engine, prompt, "half", max_tokens=1)
        while (launched := host.driver.log.count("bgmv_shrink") - before) < groups:  # noqa: ASYNC110  no event
            await asyncio.sleep(0.001)
        assert not answer.done()
        assert launched == groups  # of the first of two layers
        host.driver.held = set()
        check(subject, [(prompt, "half")], [await answer], 1)


@on_a_loop
async def test_an_emulated_link_delays_loads_alone(subject: Subject) -> None:
    asked = [(prompt_of(random.Random(1), 5), name) for name in ("half", None)]
    lora = lora_config(subject.adapters, mode="overlapped", device_bytes=MIB, host_bytes=4 * MIB, link_mb_per_s=0.2)
    async with serving(
        model_config(subject.model, max_model_len=CONTEXT), lora, engine_config(seqs=2, kv_bytes=MIB)
    ) as (engine, host):
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=3) for each in asked))
        (bound,) = host.parts.images.bound.values()
        load_ms = 1000 * bound.stored.num_bytes / 0.2e6
    check(subject, asked, answers, 3)
    cold, warm = (answer.finish.phases for answer in answers)
    assert cold.load_ms > 0.9 * load_ms > 20
    assert warm.e2e_ms < load_ms


def test_passes_over_merged_weights_are_captured(subject: Subject) -> None:
    rng, seen = random.Random(5), Seen()
    asked = some_requests(rng, ["r8", "mlp", None], 8)
    answers = ask(subject, asked, 5, mode="merged", pool_granules=64, prepare=seen.look_at, graph_bytes=1 << 30)
    check(subject, asked, answers, 5)
    assert seen.replays


@pytest.mark.parametrize("last", [Lane.COPY, Lane.COMPUTE])
def test_adapters_are_moved_while_others_are_loaded_and_evicted(subject: Subject, last: Lane) -> None:
    rng, seen = random.Random(8), Seen()
    asked = [(prompt_of(rng, rng.choice((2, 30, 90))), name) for _ in range(5) for name in rng.sample(sorted(KINDS), 6)]
    answers = ask(subject, asked, 3, pool_granules=22, gap_s=0.01, seed=2, last=last, prepare=seen.look_at)
    check(subject, asked, answers, 3)
    assert seen.moved > 0


def test_the_padded_baseline_answers_like_peft_at_the_largest_rank_of_each_batch(subject: Subject) -> None:
    rng = random.Random(6)
    asked = some_requests(rng, [None, *subject.adapters], 10)
    computed: list[tuple[int, int]] = []  # rank that a batch computes, largest of its adapters

    def watch(host: Host) -> None:
        images = host.parts.images
        items_of = images.items_of

        def watching(slots: Sequence[int]) -> tuple[list[tuple[AdapterItems, ...]], int]:
            items, rank = items_of(slots)
            computed.append((rank, max(images.bound[slot].adapter.spec.rank for slot in slots)))
            return items, rank

        images.items_of = watching  # type: ignore[method-assign]

    room = {"pool_granules": 120, "device_bytes": 100 * GRANULE_BYTES}
    answers = ask(subject, asked, 4, padded=True, **room, last=Lane.COPY, prepare=watch)
    check(subject, asked, answers, 4)
    assert all(rank == -(-largest // 8) * 8 for rank, largest in computed)
    assert len({rank for rank, _ in computed}) > 1


def test_many_rows_of_one_adapter_answer_like_peft_in_graphs_of_their_own(subject: Subject) -> None:
    rng, segmented = random.Random(9), list[bool]()
    names = ["r8"] * 10 + ["r13", None, "r64"]
    asked = [(prompt_of(rng, 9), name) for name in names]

    def watch(host: Host) -> None:
        find = host.parts.captured_graphs.find

        def finding(plan: Batch, shape: PassShape, arriving: Collection[int]) -> CapturedPass | None:
            found = find(plan, shape, arriving)
            if shape.tokens == len(plan.rows) and shape.segments:
                segmented.append(found is not None)
                assert shape.has_items == any(row.adapter_slot not in (0, row_slot(plan)) for row in plan.rows)
            return found

        host.parts.captured_graphs.find = finding  # type: ignore[method-assign]

    def row_slot(plan: Batch) -> int:
        slots = [row.adapter_slot for row in plan.rows]
        return max(set(slots) - {0}, key=slots.count)

    room = {"seqs": len(asked), "step_tokens": 200, "pool_granules": 64, "graph_bytes": 1 << 30}
    answers = ask(subject, asked, 6, prepare=watch, **room)
    check(subject, asked, answers, 6)
    assert segmented
    assert all(segmented)


@pytest.mark.parametrize("host_bytes", [4 * MIB, MIB // 3])
def test_padded_adapters_that_do_not_all_fit_are_rejected_at_the_start(subject: Subject, host_bytes: int) -> None:
    """Without padding the adapters would fit; also if the host cache cannot hold all at a time."""
    device_bytes = 40 * GRANULE_BYTES
    lora = lora_config(subject.adapters, mode="cached", device_bytes=device_bytes, host_bytes=host_bytes)
    refusal = refused_start(subject, replace(lora, lora_kernel="bgmv-padded"))
    said = re.fullmatch(r"--loading-mode .*: they take at least (\d+) bytes there, more than .* (\d+)", refusal)
    assert said is not None, refusal
    assert int(said[1]) > int(said[2]) == device_bytes


def test_more_adapters_than_device_table_entries_are_rejected_at_the_start(subject: Subject) -> None:
    lora = lora_config(subject.adapters, mode="cached", device_bytes=64 * GRANULE_BYTES, host_bytes=4 * MIB)
    refusal = refused_start(subject, lora, adapter_slots=len(KINDS))
    assert refusal.endswith(f"which has places for {len(KINDS) - 1}: {len(KINDS)} were given")


def refused_start(subject: Subject, lora: LoraConfig, **device: Any) -> str:
    """Returns the error of an engine that does not start."""

    async def start() -> None:
        engine = engine_config(seqs=6, step_tokens=48, kv_bytes=80 * GRANULE_BYTES)
        async with (
            asyncio.timeout(PATIENCE_S),
            serving(model_config(subject.model, max_model_len=CONTEXT), lora, engine, **device),
        ):
            pass

    with pytest.raises(ConfigError) as refused:
        asyncio.run(start())
    return refused.value.message


def test_preempted_requests_lose_no_token(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[ActiveRequest] = []
    preempt = RequestQueues.preempt

    def counting(queues: RequestQueues, active: ActiveRequest) -> None:
        preempted.append(active)
        preempt(queues, active)

    monkeypatch.setattr(RequestQueues, "preempt", counting)
    rng = random.Random(7)
    asked = [(prompt_of(rng, 90), name) for name in (None, "r13", None, "r8", None, "r13")]
    check(subject, asked, ask(subject, asked, 60, pool_granules=16), 60)
    assert preempted


def test_prefixes_are_computed_once(subject: Subject) -> None:
    """By the first of three requests for each; the others come together."""
    rng = random.Random(8)
    stem = prompt_of(rng, 70)
    asked = [(stem + prompt_of(rng, 5), name) for name in ("r8", None) for _ in range(3)]

    async def use(engine: Engine, host: Host) -> None:
        for start in (0, 3):
            first, *others = asked[start : start + 3]
            answers = [await submit(engine, *first, max_tokens=4)]
            answers += await asyncio.gather(*(submit(engine, *each, max_tokens=4) for each in others))
            check(subject, asked[start : start + 3], answers, 4)
            assert [answer.finish.cached_tokens for answer in answers] == [0, 64, 64]

    run_server(subject, use)


def test_scores_of_tokens_and_prompts_are_those_of_peft(subject: Subject) -> None:
    rng = random.Random(9)
    asked = [(prompt_of(rng, 90), name) for name in ("half", None, "mixed")]
    answers = ask(subject, asked, 4, params={"logprobs": 3, "prompt_logprobs": 40})
    check(subject, asked, answers, 4)
    for (prompt, name), answer in zip(asked, answers, strict=True):
        scores = [entry.logprob for entry in answer.logprobs]
        subject.oracle.check_logprobs(prompt, name, answer.token_ids, scores)
        first, *rest = answer.prompt_logprobs
        assert first is None
        subject.oracle.check_scores(prompt, name, [entry for entry in rest if entry is not None], 40)
        assert all(
            entry.top_logprobs[0] >= entry.logprob - 1e-6 and len(entry.top_ids) == 3 for entry in answer.logprobs
        )


def test_samples_are_those_of_the_cpu_backend(subject: Subject) -> None:
    rng = random.Random(10)
    params: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.5}
    asked = some_requests(rng, [None, "r8", "r64"], 6)
    answers = ask(subject, asked, 8, params=params)

    async def on_the_cpu() -> list[Answer]:
        async with running(model_config(subject.model), lora_config(subject.adapters), engine_config()) as engine:
            return await asyncio.gather(*(submit(engine, *each, max_tokens=8, **params) for each in asked))

    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in asyncio.run(on_the_cpu())]


def test_a_kernel_that_is_compiled_after_the_warm_up_is_counted(subject: Subject) -> None:
    async def use(engine: Engine, host: Host) -> None:
        hook = triton.knobs.runtime.jit_post_compile_hook
        assert hook is not None
        before = host.backend.late_kernels
        hook(repr="late")
        assert host.backend.late_kernels == before + 1

    run_server(subject, use)
