"""How many driver calls an iteration takes. Each may cost the launching thread a wait for the GIL, and each small copy
the device a few µs."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest
from msgspec import structs

from caraserve.core.batch import Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import Lane
from tests.gpu.host_backend import PATIENCE_S, Host, alone, host_tier
from tests.gpu.host_device import HostKernels
from tests.gpu.host_driver import HostDriver
from tests.gpu.torch_kernels import torch_kernels
from tests.oracle.models import prompt_of
from tests.oracle.subject import KINDS, make_subject

ROWS, PROMPT, BLOCKS_EACH = 4, 5, 5
ISSUING = ("record", "wait_event", "copy_to_device", "copy_rows_to_device", "copy_to_host", "copy_on_device", "fill")
ISSUING += ("write_value", "wait_value", "word_operations", "launch_graph", "run")


class Calls:
    """The calls that issue operations, by name."""

    def __init__(self, host: Host, adapters: Sequence[HostAdapter]) -> None:
        self.host, self._adapters = host, adapters
        self.made: list[str] = []

    def load(self, slot: int) -> "SimpleQueue[Exception | None]":
        """Begins to load an adapter, each layer by itself."""
        loaded: SimpleQueue[Exception | None] = SimpleQueue()
        self.host.backend.load_adapter(self._adapters[slot - 1], slot, loaded.put, group_ends=(1,))
        return loaded

    @contextmanager
    def counted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ISSUING:
                patch.setattr(HostDriver, name, self._noting(name, getattr(HostDriver, name)))
            patch.setattr(HostKernels, "launch", self._noting("kernel", HostKernels.launch))
            yield

    def _noting(self, name, call):  # type: ignore[no-untyped-def]
        def noting(driver, *arguments):  # type: ignore[no-untyped-def]
            self.made.append(arguments[0].kernel if arguments and isinstance(arguments[0], Launch) else name)
            kept, self.made = self.made, []  # not the calls that this one makes
            try:
                return call(driver, *arguments)
            finally:
                self.made = kept

        return noting

    def of(self, *batches: Batch) -> list[str]:
        """Runs batches and returns the calls of the last one."""
        for batch in batches:
            made, done = self.launch(batch)
            finished(done)
        return made

    def launch(self, batch: Batch) -> "tuple[list[str], SimpleQueue[StepResult | Exception]]":
        """Launches a batch and returns the calls that it took."""
        done: SimpleQueue[StepResult | Exception] = SimpleQueue()

        def launch() -> list[str]:
            self.made = []
            self.host.backend._launch(batch, done.put)
            return list(self.made)

        return self.host.on_launching_thread(launch), done


def finished(done: "SimpleQueue[StepResult | Exception]") -> None:
    outcome = done.get(timeout=PATIENCE_S)
    assert isinstance(outcome, StepResult), outcome


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calls]:
    """Yields a backend with graphs, CPU workers and two adapters in slots 1 and 2; a third is in host memory."""
    names = ("r8", "r13", "half")
    subject = make_subject(tmp_path_factory.mktemp("calls"), {name: KINDS[name] for name in names})
    cores = (min(os.sched_getaffinity(0)),)
    with torch_kernels(), alone(subject.model, graph_bytes=1 << 30, lora_cpus=cores) as host:
        calls = Calls(host, list(host_tier(host, subject.adapters, subject.model).values()))
        for slot in (1, 2):
            assert calls.load(slot).get(timeout=PATIENCE_S) is None
        host.backend.start_workers(lambda rank: PROMPT)
        assert host.backend.workers.await_all(PATIENCE_S)
        with calls.counted():
            yield calls


def prompts(adapters: Sequence[int]) -> Batch:
    """Returns a batch that starts a request in each slot."""
    starts, grants, rows = [], [], []
    for slot, adapter in enumerate(adapters):
        ids = prompt_of(random.Random(slot), PROMPT)
        starts.append(SlotStart(slot, tuple(ids), SlotSampling.greedy(PROMPT)))
        grants.append(BlockGrant(slot, 0, tuple(range(slot * BLOCKS_EACH, slot * BLOCKS_EACH + 1))))
        rows.append(ScheduledRow(slot, 0, PROMPT, adapter, samples=True))
    return Batch(tuple(starts), tuple(grants), tuple(rows))


def decodes(adapters: Sequence[int], step: int, granted: int = 0) -> Batch:
    rows = [ScheduledRow(slot, PROMPT + step, 1, adapter, samples=True) for slot, adapter in enumerate(adapters)]
    grants = [BlockGrant(slot, 1, (slot * BLOCKS_EACH + 1,)) for slot in range(granted)]
    return Batch((), tuple(grants), tuple(rows))


END = ["launch_graph", "record", "copy_to_host", "record"]  # the mark, the results, the waiter's event


def test_an_iteration_whose_rows_stay_takes_one_copy(calls: Calls) -> None:
    made = calls.of(prompts([0, 0, 1, 2]), decodes([0, 0, 1, 2], 0), decodes([0, 0, 1, 2], 1))
    assert made == ["copy_to_device", *END]


def test_grants_and_new_lists_of_adapters_come_with_the_batch(calls: Calls) -> None:
    made = calls.of(prompts([0, 1, 1, 2]), decodes([0, 1, 1, 2], 0, granted=3))
    assert made == ["scatter_words", *END]


def test_requests_that_start_come_with_the_batch(calls: Calls) -> None:
    assert calls.of(prompts([0, 0, 1, 2])) == ["scatter_words", *END]


def test_waiting_for_layers_takes_one_call_for_all_of_them(calls: Calls) -> None:
    """Besides the gate's reset, its mark, and the gate lane's wait for it."""
    calls.of(prompts([0, 0, 1, 2]))
    calls.host.driver.held = {Lane.COPY}
    loaded = calls.load(3)
    made, done = calls.launch(prompts([0, 1, 2, 3]))
    calls.host.driver.held = set()
    finished(done)
    assert loaded.get(timeout=PATIENCE_S) is None
    calls.host.backend.unload_adapter(3)
    assert made == ["scatter_words", "write_value", "record", "wait_event", "word_operations", "record", *END]


def test_a_chunk_that_workers_help_with_takes_one_call_for_all_layers(calls: Calls) -> None:
    """Besides it: the request's slot and blocks on the compute lane, for which the chunk waits, the batch with the work
    orders, the sampling, and the error word. Kernel by kernel it took 13 calls a layer for q, k and v, and 28 for all
    modules."""
    calls.host.parts.context.queue.bytes_per_s = 1e-6  # weights are predicted never to arrive
    calls.host.driver.held = {Lane.COPY}
    loaded, prompt = calls.load(3), prompts([3])
    helped = replace(prompt, rows=(structs.replace(prompt.rows[0], assist=True),), is_side_batch=True)
    made, done = calls.launch(helped)
    plan = calls.host.parts.plan
    assert calls.host.backend.slices_handed_off == sum(len(layer.groups) for layer in plan.layers)
    finished(done)
    calls.host.driver.held = set()
    assert loaded.get(timeout=PATIENCE_S) is None
    calls.host.backend.unload_adapter(3)
    sampling = ["run", "sample_tokens", "score_tokens"]
    assert made == [
        *("scatter_words", "record", "wait_event", "scatter_words", "launch_graph"),
        *(*sampling, "record", "copy_to_host", "copy_to_host", "record"),
    ]
