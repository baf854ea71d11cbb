"""The baseline of hand-offs with explicit synchronisation, over an emulated device and real CPU workers: it gives the
product's tokens, and it does make the host wait."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from queue import SimpleQueue

import pytest

from caraserve.core.batch import Batch, BlockGrant, RowResult, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.cpu.lora_workers import pool
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.launch import Kernels, Launch
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.memory.request_state import BLOCK_TOKENS
from scripts.laboratory.gpu.handover import ExplicitSync
from tests.gpu.host_backend import Host, alone, host_tier
from tests.gpu.host_driver import HostDriver
from tests.gpu.torch_kernels import torch_kernels
from tests.oracle.models import prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.subject import KINDS, make_subject
from tests.processes import until

pytestmark = pytest.mark.slow  # of an experiment, which CI runs as a stage of the GPU check: `handover`

LAYERS, CONTEXT = 2, 160
LONG = 150  # tokens: two chunks
ADAPTER, SLOT = "r8", 1
PATIENCE_S = 60.0
CORES = tuple(sorted(os.sched_getaffinity(0)))


@dataclass
class WatchedKernels:
    """Notes at each launch of a raw kernel how many operations of its stream have not run."""

    kernels: Kernels
    driver: HostDriver
    launched: list[tuple[str, int]] = field(default_factory=list)

    @property
    def multiprocessors(self) -> int:
        return self.kernels.multiprocessors

    def launch(self, launch: Launch, stream: Stream) -> None:
        self.launched.append((launch.kernel, self.driver.left(stream)))
        self.kernels.launch(launch, stream)

    def left_at(self, kernel: str) -> list[int]:
        return [left for name, left in self.launched if name == kernel]


@dataclass
class Bench:
    """A backend whose adapter does not arrive, so that workers compute every layer."""

    host: Host
    watched: WatchedKernels
    explicit: ExplicitSync
    results: "SimpleQueue[StepResult | Exception]" = field(default_factory=SimpleQueue)

    def launch(self, prompt: list[int]) -> None:
        self.watched.launched.clear()
        start = SlotStart(0, tuple(prompt), SlotSampling.greedy(len(prompt)))
        grant = BlockGrant(0, 0, tuple(range(CONTEXT // BLOCK_TOKENS)))
        row = ScheduledRow(0, 0, len(prompt), SLOT, samples=True, assist=True)
        self.host.backend.launch(Batch((start,), (grant,), (row,), is_side_batch=True), self.results.put)

    def result(self) -> RowResult:
        result = self.results.get(timeout=PATIENCE_S)
        assert isinstance(result, StepResult), result
        return result.rows[0]

    @contextmanager
    def stopped_workers(self) -> Iterator[None]:
        self.strike(signal.SIGSTOP)
        try:
            yield
        finally:
            self.strike(signal.SIGCONT)

    def strike(self, blow: signal.Signals) -> None:
        for state in self.host.backend.workers.states():
            if state.pid is not None:
                os.kill(state.pid, blow)

    def is_asked(self) -> bool:
        return any(state.is_busy for state in self.host.backend.workers.states())


@pytest.fixture(scope="module")
def oracle_and_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Oracle, Bench]]:
    model, adapters, oracle = make_subject(tmp_path_factory.mktemp("explicit"), {ADAPTER: KINDS[ADAPTER]})
    made: list[tuple[WatchedKernels, ExplicitSync]] = []

    def explicit(kernels: Kernels, driver: HostDriver) -> ExplicitSync:
        watched = WatchedKernels(kernels, driver)
        made.append((watched, ExplicitSync(watched, driver)))
        return made[0][1]

    with torch_kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_STUCK_S", PATIENCE_S)  # a stopped worker is not to be killed
        with alone(model, kernels=explicit, lora_cpus=CORES, max_context=CONTEXT) as host:
            host.backend.start_workers(lambda rank: 64)
            assert host.backend.workers.await_all(PATIENCE_S)
            assisted = host.parts.assisted
            assisted.set_predictions(replace(assisted.predictions, hand_offs_s=lambda work: PATIENCE_S))
            host.parts.context.queue.bytes_per_s = 1e-6
            host.driver.held = {Lane.COPY}
            host.backend.load_adapter(host_tier(host, adapters, model)[ADAPTER], SLOT, lambda failure: None)
            yield oracle, Bench(host, *made[0])


@pytest.mark.parametrize("tokens", [20, LONG])
def test_both_ways_give_the_same_tokens(oracle_and_bench: tuple[Oracle, Bench], tokens: int) -> None:
    oracle, bench = oracle_and_bench
    prompt = prompt_of(random.Random(tokens), tokens)
    for synchronised in (nullcontext(), bench.explicit.switched_on()):
        with synchronised:
            bench.launch(prompt)
            made = bench.result()
        assert made.cpu_layers == LAYERS
        assert made.token_id is not None
        oracle.check_greedy(prompt, ADAPTER, [made.token_id])


def test_the_host_waits_for_x_before_it_is_handed_over_and_for_the_workers_before_later_launches(
    oracle_and_bench: tuple[Oracle, Bench],
) -> None:
    _, bench = oracle_and_bench
    before = bench.explicit.waits
    with bench.explicit.switched_on():
        with bench.stopped_workers():
            bench.launch(prompt_of(random.Random(0), 20))
            until(bench.is_asked, PATIENCE_S)
        assert bench.result().cpu_layers == LAYERS
    hand_offs = len(bench.watched.left_at("handoff_publish"))
    assert hand_offs > 0
    assert bench.watched.left_at("handoff_publish") == bench.watched.left_at("handoff_add") == [0] * hand_offs
    assert bench.explicit.waits == before + 2 * hand_offs


def test_switched_off_everything_is_launched_while_workers_stand_still(
    oracle_and_bench: tuple[Oracle, Bench],
) -> None:
    _, bench = oracle_and_bench
    before = bench.explicit.waits
    with bench.stopped_workers():
        bench.launch(prompt_of(random.Random(0), 20))
        until(lambda: bench.host.on_launching_thread(lambda: bool(bench.host.parts.assisted._in_flight)), PATIENCE_S)
        assert 0 not in bench.watched.left_at("handoff_add")
    assert bench.result().cpu_layers == LAYERS
    assert bench.explicit.waits == before


def test_the_host_goes_on_when_the_workers_have_died(oracle_and_bench: tuple[Oracle, Bench]) -> None:
    _, bench = oracle_and_bench
    with bench.explicit.switched_on():
        bench.strike(signal.SIGSTOP)
        bench.launch(prompt_of(random.Random(0), 20))
        until(bench.is_asked, PATIENCE_S)
        bench.strike(signal.SIGKILL)
        assert bench.result().needs_retry
    assert bench.host.backend.workers.await_all(PATIENCE_S)
