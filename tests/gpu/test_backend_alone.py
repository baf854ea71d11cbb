"""The CUDA backend without an engine, over an emulated device: loads, moves, resizes and batches in any order, a
failing device, and a clean end."""

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import pytest

from caraserve.core.batch import Batch, BlockGrant, DeviceLost, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import CopyFailed
from caraserve.gpu import backend as gpu_backend
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.forward import graphs
from caraserve.gpu.memory.adapters import DeviceImages
from caraserve.gpu.memory.request_state import BLOCK_TOKENS
from caraserve.kv.memory_budget import MemoryBudget
from tests.gpu.host_backend import GRANULE_BYTES, KV_BLOCK_BYTES, PATIENCE_S, Host, alone, check_pool, host_tier
from tests.gpu.host_driver import HostDriver
from tests.oracle.models import ALL_TARGETS, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.subject import KINDS, Subject, make_subject

Outcome = StepResult | Exception
BLOCKS_EACH, SLOTS = 5, 4  # of a request
ADAPTER_SLOTS = 12


pytestmark = pytest.mark.usefixtures("torch_for_triton")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    kinds = {name: KINDS[name] for name in ("r8", "r13", "r64", "half", "mlp")}
    return make_subject(tmp_path_factory.mktemp("alone"), kinds | {"big": {"rank": 48, "targets": ALL_TARGETS}})


def prompt_plan(
    slot: int, prompt: Sequence[int], blocks: Sequence[int], adapter: int = 0, *, is_side_batch: bool = False
) -> Batch:
    """Returns the batch of a whole prompt, which samples its first token."""
    sampling = SlotSampling.greedy(len(prompt))
    row = ScheduledRow(slot, 0, len(prompt), adapter, samples=True, assist=is_side_batch)
    start = SlotStart(slot, tuple(prompt), sampling)
    return Batch((start,), (BlockGrant(slot, 0, tuple(blocks)),), (row,), is_side_batch=is_side_batch)


def base_plan(number: int) -> Batch:
    slot = number % SLOTS
    return prompt_plan(slot, base_prompt(number), range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH))


def base_prompt(number: int) -> list[int]:
    return prompt_of(random.Random(number), 9)


def check_base(oracle: Oracle, number: int, outcome: Outcome) -> None:
    assert isinstance(outcome, StepResult)
    token = outcome.rows[0].token_id
    assert token is not None
    oracle.check_greedy(base_prompt(number), None, [token])


@dataclass
class Served:
    """A request of `RandomUse`."""

    prompt: list[int]
    adapter: str | None
    blocks: list[int]
    tokens: "list[tuple[Future[Outcome], int]]" = field(default_factory=list)  # (result of a batch, row)

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def check(self, oracle: Oracle) -> None:
        output = []
        for future, row in self.tokens:
            outcome = future.result(PATIENCE_S)
            assert isinstance(outcome, StepResult), outcome
            token = outcome.rows[row].token_id
            assert token is not None
            output.append(token)
        oracle.check_greedy(self.prompt, self.adapter, output)


class RandomUse:
    """Random requests and adapters, within the totals that the engine guarantees."""

    def __init__(self, host: Host, tier: dict[str, HostAdapter], oracle: Oracle, rng: random.Random) -> None:
        self.host, self.tier, self.oracle, self.rng = host, tier, oracle, rng
        self.room = MemoryBudget(host.backend.limits, 0)
        self.slots: dict[str, int] = {}
        self.loading: set[str] = set()
        self.loads: SimpleQueue[tuple[str, Exception | None]] = SimpleQueue()
        self.grown: SimpleQueue[Exception | None] = SimpleQueue()
        self.requests: dict[int, Served] = {}
        self.ended: list[Served] = []

    def step(self) -> None:
        actions = (self.load, self.unload, self.grow, self.start, self.decode, self.decode, self.end, self.exchange)
        self.rng.choice(actions)()
        while not self.loads.empty():
            self.loaded()
        if self.room.is_growing and not self.grown.empty():
            assert self.grown.get() is None
            self.room.grown()
        self.room.check()
        self.host.on_launching_thread(lambda: check_pool(self.host.parts.images.pool))

    def load(self) -> None:
        name = self.rng.choice(sorted(self.tier))
        num_bytes = self.tier[name].spec.num_bytes
        if name in self.slots or self.room.excess(num_bytes):
            return
        if self.room.add_adapter(num_bytes):
            self.host.backend.resize_kv(self.room._kv_blocks, lambda error: None)
        self.slots[name] = min(set(range(1, ADAPTER_SLOTS)) - set(self.slots.values()))
        self.loading.add(name)
        self.host.backend.load_adapter(
            self.tier[name], self.slots[name], lambda failure: self.loads.put((name, failure)), [1]
        )

    def loaded(self) -> None:
        name, failure = self.loads.get(timeout=PATIENCE_S)
        assert failure is None
        self.loading.remove(name)

    def unload(self) -> None:
        used = {request.adapter for request in self.requests.values()}
        idle = sorted(set(self.slots) - used - self.loading)
        if idle:
            name = self.rng.choice(idle)
            self.host.backend.unload_adapter(self.slots.pop(name))
            self.room.remove_adapter(self.tier[name].spec.num_bytes)

    def grow(self) -> None:
        blocks = self.room._kv_blocks + self.rng.randrange(1, 40)
        if not self.room.is_growing and not self.room.excess_for_blocks(blocks):
            self.room.grow(blocks)
            self.host.backend.resize_kv(blocks, self.grown.put)

    def start(self) -> None:
        free = sorted(set(range(SLOTS)) - set(self.requests))
        blocks = self.room.pool.take(BLOCKS_EACH) if free else None
        if blocks is None:
            return
        name = self.rng.choice([None, *self.slots])
        request = Served(prompt_of(self.rng, self.rng.choice((1, 7, 30))), name, blocks)
        self.requests[free[0]] = request
        self.run(prompt_plan(free[0], request.prompt, blocks, self.slots[name] if name else 0))

    def decode(self) -> None:
        rows = [
            ScheduledRow(
                slot, request.known - 1, 1, self.slots[request.adapter] if request.adapter else 0, samples=True
            )
            for slot, request in self.requests.items()
            if request.known < BLOCKS_EACH * BLOCK_TOKENS
        ]
        if rows:
            self.run(Batch((), (), tuple(sorted(rows, key=lambda row: row.adapter_slot))))

    def run(self, plan: Batch) -> None:
        outcome: Future[Outcome] = Future()
        self.host.backend.launch(plan, outcome.set_result)
        for index, row in enumerate(plan.rows):
            self.requests[row.slot].tokens.append((outcome, index))

    def end(self) -> None:
        """Ends the request before its last tokens have been returned; its memory is reused after them."""
        if self.requests:
            self.leave(self.rng.choice(sorted(self.requests)))

    def leave(self, slot: int) -> None:
        request = self.requests.pop(slot)
        self.room.pool.release(request.blocks)
        self.ended.append(request)

    def exchange(self) -> None:
        """Ends all requests before their last iteration has begun, and replaces their adapters."""
        while self.loading:
            self.loaded()
        for request in [*self.requests.values(), *self.ended]:
            request.check(self.oracle)
        self.ended = []
        self.host.driver.held = {Lane.COMPUTE}
        self.decode()
        for slot in list(self.requests):
            self.leave(slot)
        while self.slots:
            self.unload()
        for _ in range(4):
            self.load()
        for _ in range(5):
            self.host.on_launching_thread(self.host.parts.poll)
        self.host.driver.held = set()

    def settle(self) -> None:
        """Waits until nothing is in progress."""
        while self.requests:
            self.end()
        for request in self.ended:
            request.check(self.oracle)
        while self.loading:
            self.loaded()
        while self.slots:
            self.unload()


@pytest.mark.parametrize(("seed", "last"), [(1, None), (2, Lane.COPY), (3, Lane.COMPUTE)])
def test_any_order_of_loads_and_batches_keeps_every_bytes_owner(subject: Subject, seed: int, last: Lane) -> None:
    model, adapters, oracle = subject
    with alone(model, seed=seed, last=last, adapter_slots=ADAPTER_SLOTS) as host:
        use = RandomUse(host, host_tier(host, adapters, model), oracle, random.Random(seed))
        for _ in range(150):
            use.step()
        use.settle()
        host.check_at_rest()
        assert host.parts.images.pool.adapter_bytes == 0


def test_everything_launched_before_close_has_a_result(subject: Subject) -> None:
    model, _, oracle = subject
    results: SimpleQueue[Outcome] = SimpleQueue()
    with alone(model) as host:
        names = {thread.name for thread in threading.enumerate()}
        for number in range(6):
            host.backend.launch(base_plan(number), results.put)
    for number in range(6):
        check_base(oracle, number, results.get(timeout=PATIENCE_S))
    ours = {"caraserve-launch", "caraserve-results", "caraserve-assisted", "caraserve-watchdog"}
    assert ours <= names
    assert not ours & {thread.name for thread in threading.enumerate()}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(host.parts.region.region.fd)


def test_the_link_is_measured_before_serving(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDriver, "link_time", lambda driver, stream, num_bytes: later(num_bytes / 1e8))
    with alone(subject[0]) as host:
        assert 0.2e8 < host.parts.context.queue.bytes_per_s < 1.05e8


def test_large_prompts_take_graphs_once_these_are_captured_which_happens_while_nothing_runs(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then they are launched kernel by kernel. No capture begins beside a batch."""
    model, _, oracle = subject
    results: SimpleQueue[Outcome] = SimpleQueue()
    monkeypatch.setattr(graphs, "_FIRST_TOKENS", 32)  # of 64
    monkeypatch.setattr(gpu_backend, "_IDLE_S", PATIENCE_S)
    with alone(model, graph_bytes=1 << 30) as host:
        assert host.parts.has_late_graphs
        before, host.driver.held = host.driver.replays, {Lane.COMPUTE}
        host.backend.launch(base_plan(0), results.put)
        assert not host.on_launching_thread(host.parts.capture_late)
        host.driver.held = set()
        check_base(oracle, 0, results.get(timeout=PATIENCE_S))
        assert host.driver.replays == before
        host.backend.capture_late_graphs()
        assert not host.parts.has_late_graphs
        host.backend.launch(base_plan(1), results.put)
        check_base(oracle, 1, results.get(timeout=PATIENCE_S))
        assert host.driver.replays == before + 1


def test_graphs_of_large_prompts_are_captured_without_being_asked_for(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, capture = threading.Event(), graphs.CapturedGraphs.capture_next

    def capturing(made: graphs.CapturedGraphs, passes: graphs.Passes) -> bool:
        has_more = capture(made, passes)
        if not has_more:
            captured.set()
        return has_more

    monkeypatch.setattr(graphs.CapturedGraphs, "capture_next", capturing)
    monkeypatch.setattr(graphs, "_FIRST_TOKENS", 32)
    monkeypatch.setattr(gpu_backend, "_IDLE_S", 0.001)
    with alone(subject[0], graph_bytes=1 << 30):
        assert captured.wait(PATIENCE_S)


def later(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() >= until_s


def test_a_batch_that_cannot_be_launched_fails_alone_and_in_order(subject: Subject) -> None:
    model, _, oracle = subject
    results: SimpleQueue[Outcome] = SimpleQueue()
    with alone(model) as host:
        for plan in (base_plan(0), prompt_plan(3, [5, 6], [20], adapter=7), base_plan(1)):
            host.backend.launch(plan, results.put)
        first, unknown, second = (results.get(timeout=PATIENCE_S) for _ in range(3))
        assert isinstance(unknown, KeyError)
        check_base(oracle, 0, first)
        check_base(oracle, 1, second)
        host.check_at_rest()


@pytest.mark.parametrize("is_assisted", [False, True])
def test_a_failing_device_ends_every_batch_and_load_with_an_error(subject: Subject, is_assisted: bool) -> None:
    """Every batch and every load, in progress or requested later, ends with an error; batches end in their order."""
    model, adapters, _ = subject
    ended: SimpleQueue[tuple[int, Outcome]] = SimpleQueue()
    others: SimpleQueue[Outcome | None] = SimpleQueue()

    def put_for(number: int) -> Callable[[Outcome], None]:
        return lambda outcome: ended.put((number, outcome))

    with alone(model, lora_cpus=(min(os.sched_getaffinity(0)),) if is_assisted else ()) as host:
        tier, backend = host_tier(host, adapters, model), host.backend
        host.driver.held = {Lane.COMPUTE, Lane.COPY, Lane.ASSIST}
        backend.load_adapter(tier["r8"], 1, others.put, [1])
        for number in (0, 1):
            backend.launch(base_plan(number), put_for(number))
        for slot in (1, 2, 3) if is_assisted else ():  # one more than there are sync slots
            blocks = range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH)
            backend.launch(prompt_plan(slot, [3, 4, 5], blocks, 1, is_side_batch=True), others.put)
        host.on_launching_thread(lambda: None)
        host.driver.failed = True
        for number in (2, 3, 4):
            backend.launch(base_plan(number), put_for(number))
        backend.load_adapter(tier["r13"], 2, others.put, [1])
        outcomes = [ended.get(timeout=PATIENCE_S) for _ in range(5)]
        assert [number for number, _ in outcomes] == list(range(5))
        assert all(isinstance(outcome, DriverError) for _, outcome in outcomes)
        for _ in range(5 if is_assisted else 2):
            assert isinstance(others.get(timeout=PATIENCE_S), DriverError)
        for slot in (1, 2):
            backend.unload_adapter(slot)
        host.on_launching_thread(lambda: None)
        assert not host.parts.is_busy
        assert not host.parts.images.bound


def fail_for(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes loads to an adapter slot fail once they have memory."""
    write = DeviceImages._write_column

    def write_or_fail(images: DeviceImages, written: int, base: int) -> None:
        if written == slot:
            raise RuntimeError("not this time")
        write(images, written, base)

    monkeypatch.setattr(DeviceImages, "_write_column", write_or_fail)


def test_a_load_that_fails_leaves_its_memory_to_the_next_of_its_batch(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch waits for the second load, and is before `unload_adapter` of the first in the thread's queue."""
    model, adapters, oracle = subject
    results: SimpleQueue[Outcome] = SimpleQueue()
    with alone(model) as host:
        tier, pool = host_tier(host, adapters, model), host.parts.images.pool
        room = max(pool.takes(tier[name].spec.num_bytes) for name in ("r8", "big"))
        host.backend.resize_kv((pool.num_bytes - room) // KV_BLOCK_BYTES, lambda error: None)
        fail_for(1, monkeypatch)
        for slot, name in ((1, "r8"), (2, "big")):
            host.backend.load_adapter(tier[name], slot, lambda failure: None)
        first, second = (prompt_plan(slot, base_prompt(slot), [slot], adapter=slot) for slot in (1, 2))
        both = Batch(first.starts + second.starts, first.grants + second.grants, first.rows + second.rows)
        host.backend.launch(both, results.put)
        outcome = results.get(timeout=PATIENCE_S)
        assert isinstance(outcome, StepResult)
        lost, computed = outcome.rows
        assert isinstance(lost.failure, CopyFailed)
        assert not lost.is_finite
        assert computed.token_id is not None
        oracle.check_greedy(base_prompt(2), "big", [computed.token_id])


@pytest.mark.parametrize("is_side_batch", [False, True])
def test_a_batch_of_one_adapter_that_cannot_be_placed_has_rows_that_failed(
    subject: Subject, is_side_batch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, adapters, oracle = subject
    results: SimpleQueue[Outcome] = SimpleQueue()
    with alone(model, lora_cpus=(min(os.sched_getaffinity(0)),)) as host:
        image = host_tier(host, {"r8": adapters["r8"]}, model)["r8"]
        with monkeypatch.context() as patch:
            fail_for(1, patch)
            host.backend.load_adapter(image, 1, lambda failure: None)
            host.backend.launch(prompt_plan(0, [7], [0], adapter=1, is_side_batch=is_side_batch), results.put)
            outcome = results.get(timeout=PATIENCE_S)
        assert isinstance(outcome, StepResult)
        (row,) = outcome.rows
        assert (type(row.failure), row.is_finite) == (CopyFailed, False)
        host.backend.launch(base_plan(1), results.put)
        check_base(oracle, 1, results.get(timeout=PATIENCE_S))


def test_what_exceeds_the_memory_fails_and_what_comes_after_it_does_not(subject: Subject) -> None:
    """It would wait for room that never comes, and what comes later waits behind it."""
    model, adapters, oracle = subject
    ended: SimpleQueue[Outcome | None] = SimpleQueue()
    with alone(model, adapter_bytes=GRANULE_BYTES) as host:
        tier, pool = host_tier(host, adapters, model), host.parts.images.pool
        assert pool.takes(tier["big"].spec.num_bytes) > GRANULE_BYTES
        host.backend.resize_kv(pool.num_bytes // KV_BLOCK_BYTES + 1, ended.put)
        assert isinstance(ended.get(timeout=PATIENCE_S), ValueError)
        host.backend.load_adapter(tier["big"], 1, ended.put)
        assert isinstance(ended.get(timeout=PATIENCE_S), ValueError)
        host.backend.resize_kv(pool.num_bytes // KV_BLOCK_BYTES, ended.put)
        assert ended.get(timeout=PATIENCE_S) is None
        host.backend.launch(base_plan(0), ended.put)
        outcome = ended.get(timeout=PATIENCE_S)
        assert outcome is not None
        check_base(oracle, 0, outcome)


def test_no_batch_runs_after_adapters_could_not_be_moved(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters, _ = subject
    ended: SimpleQueue[Outcome | None] = SimpleQueue()
    with alone(model) as host:
        image = host_tier(host, {"r8": adapters["r8"]}, model)["r8"]

        def fail(*given: object) -> None:
            raise RuntimeError("moved half of it")

        monkeypatch.setattr("caraserve.gpu.memory.adapters.issue_moves", fail)
        host.backend.load_adapter(image, 1, ended.put)
        assert isinstance(ended.get(timeout=PATIENCE_S), RuntimeError)
        host.backend.launch(base_plan(0), ended.put)
        assert isinstance(ended.get(timeout=PATIENCE_S), DeviceLost)


def test_kv_reuses_an_adapters_bytes_only_after_other_lanes_have_read_them(subject: Subject) -> None:
    """An assisted prefill may still be reading an unloaded adapter whose bytes KV blocks get."""
    model, adapters, oracle = subject
    results: SimpleQueue[Outcome] = SimpleQueue()
    loads: SimpleQueue[Exception | None] = SimpleQueue()
    with alone(model, last=Lane.ASSIST) as host:
        image, images = host_tier(host, {"r8": adapters["r8"]}, model)["r8"], host.parts.images
        host.backend.load_adapter(image, 1, loads.put)
        assert loads.get(timeout=PATIENCE_S) is None
        seen = np.empty(image.data.nbytes, np.uint8)
        place = images.pool.place_of(1)

        def read_on_assist_lane() -> None:
            timelines = host.parts.context.timelines
            source = images.bytes_of(1).data_ptr()
            host.driver.copy_to_host(seen.ctypes.data, source, seen.nbytes, timelines.streams[Lane.ASSIST])
            images.used([1], Lane.ASSIST, timelines.mark(Lane.ASSIST))

        host.driver.held = {Lane.ASSIST}
        host.on_launching_thread(read_on_assist_lane)
        host.backend.unload_adapter(1)
        host.backend.resize_kv(images.pool.num_bytes // KV_BLOCK_BYTES, lambda error: None)
        host.backend.launch(prompt_plan(0, base_prompt(0), [place // KV_BLOCK_BYTES]), results.put)
        host.on_launching_thread(lambda: None)
        host.driver.held = set()
        check_base(oracle, 0, results.get(timeout=PATIENCE_S))
        assert (seen == image.data).all()
