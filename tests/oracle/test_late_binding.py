"""Late binding: logits have the same bits whenever layers arrive, computed by the device or by workers."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.backend import CpuBackend, CpuSizes
from caraserve.cpu.weights import dummy_reader, load_model
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.profiling.microbench import adapter_spec, random_adapter

LAYERS = 4
SPEC = plan_of(
    {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 80,
        "intermediate_size": 144,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
    }
)
BLOCKS_EACH, PROMPT_TOKENS = 6, (5, 88, 9)  # of the requests: one for the base model, two with an adapter each
FIRST_CHUNKS = (5, 50, 9)
ITERATIONS = 3
SLICE_TOKENS = 20
WORKER_CORES = tuple(sorted(os.sched_getaffinity(0)))
MOST_DELAY_US = 3000  # about as long as an iteration takes
PATIENCE_S = 120.0
NAN = 0xFF  # NaN in every dtype, if every byte has this value


@dataclass(frozen=True)
class Arrival:
    """The `layers` layers of one of two adapters arrive that are copied first; None: the missing ones never will."""

    adapter: int
    delay_us: int  # after the launch of the iteration; 0: before it
    layers: int | None


class Journey:
    """An adapter being copied to the device. Layers that have not arrived are NaN."""

    def __init__(self, adapter: HostAdapter, first_layer: int) -> None:
        self.image = CpuImage.empty(adapter, first_layer=first_layer)
        self.image.data[:] = NAN
        self._there: int | None = 0

    def go(self, layers: int | None) -> None:
        if self._there is None or (layers is not None and layers <= self._there):
            return
        self._there = layers
        if layers is None:
            self.image.mark_lost()
            return
        ends = (0, *self.image.adapter.spec.layer_ends)
        for place in range(self.image.first_layer, self.image.first_layer + layers):
            at = slice(ends[place % LAYERS], ends[place % LAYERS + 1])
            self.image.data[at] = self.image.adapter.data[at]
        self.image.mark_arrived(layers)


@dataclass(frozen=True)
class Outcome:
    """Results of one iteration: every logit, the tokens drawn, and by request the layers and the time of workers."""

    logits: bytes
    tokens: tuple[int | None, ...]
    cpu_layers: tuple[int, ...]
    cpu_lora_ms: tuple[float, ...]

    @property
    def answer(self) -> tuple[bytes, tuple[int | None, ...]]:
        return self.logits, self.tokens


class Subject:
    """A backend with three requests, the same in every run."""

    def __init__(self, backend: CpuBackend) -> None:
        self._backend = backend
        specs = [adapter_spec(SPEC, Dtype.F16, 24, LAYERS), adapter_spec(SPEC, Dtype.F32, 8, LAYERS)]
        memory = np.split(backend.host_memory, [1 << 20])
        self._adapters = [random_adapter(SPEC, *each) for each in zip(specs, memory, strict=True)]

    def run(
        self,
        arrivals: Sequence[Sequence[Arrival]],
        assist: tuple[bool, bool],
        first_layers: tuple[int, int] = (0, 0),
    ) -> list[Outcome]:
        """Computes prompts in one or two chunks, then decodes. `arrivals` by iteration, `assist` by adapter.
        `first_layers`: of each adapter, the layer that is copied first."""
        journeys = [Journey(*each) for each in zip(self._adapters, first_layers, strict=True)]
        for slot, journey in enumerate(journeys, start=1):
            self._backend._adapters.bind(slot, journey.image)
        return [self._iterate(plan, journeys, due) for plan, due in zip(plans(assist), arrivals, strict=True)]

    def _iterate(self, plan: Batch, journeys: Sequence[Journey], arrivals: Sequence[Arrival]) -> Outcome:
        results: SimpleQueue[tuple[StepResult | Exception, NDArray[np.float32]]] = SimpleQueue()
        for arrival in arrivals:
            if arrival.delay_us == 0:
                journeys[arrival.adapter].go(arrival.layers)
        launched_s = time.perf_counter()
        self._backend.launch(plan, lambda result: results.put((result, self._backend._logits.copy())))
        for arrival in arrivals:
            while time.perf_counter() < launched_s + arrival.delay_us / 1e6:
                pass
            journeys[arrival.adapter].go(arrival.layers)
        result, logits = results.get(timeout=PATIENCE_S)
        assert isinstance(result, StepResult)
        outputs = sum(len(row.prompt_scored) + (row.token_id is not None) for row in result.rows)
        assert np.isfinite(logits[:outputs]).all()
        return Outcome(
            logits[:outputs].tobytes(),
            tuple(row.token_id for row in result.rows),
            tuple(row.cpu_layers for row in result.rows),
            tuple(row.cpu_lora_ms for row in result.rows),
        )


def plans(assist: tuple[bool, bool]) -> Iterator[Batch]:
    """Yields the batches of a run, which compute the logits of all prompt tokens, too."""
    starts, grants = [], []
    for slot, count in enumerate(PROMPT_TOKENS):
        ids = tuple((17 * index + 31 * slot) % SPEC.vocab_size for index in range(count))
        starts.append(SlotStart(slot, ids, SlotSampling.greedy(count)))
        grants.append(BlockGrant(slot, 0, tuple(range(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH))))
    done = [0] * len(PROMPT_TOKENS)
    for iteration in range(ITERATIONS):
        rows = []
        for slot, prompt in enumerate(PROMPT_TOKENS):
            count = FIRST_CHUNKS[slot] if iteration == 0 else max(1, prompt - done[slot])
            helped = slot != BASE_ADAPTER_SLOT and assist[slot - 1]
            ends = done[slot] + count >= prompt
            rows.append(ScheduledRow(slot, done[slot], count, slot, samples=ends, prompt_logprobs=0, assist=helped))
            done[slot] += count
        first = iteration == 0
        yield Batch(tuple(starts) if first else (), tuple(grants) if first else (), tuple(rows))


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    loaded = load_model(SPEC, Dtype.F32, 128, dummy_reader(0, Dtype.F32), lambda: None)
    sizes = CpuSizes(
        threads=2,
        num_slots=3,
        adapter_slots=3,
        max_step_tokens=128,
        max_context=128,
        kv_cache_bytes=1 << 20,
        host_bytes=2 << 20,
        lora_cpus=WORKER_CORES,
    )
    backend = CpuBackend(SPEC, loaded, sizes)
    try:
        backend.warm_up()
        backend.start_workers(lambda rank: SLICE_TOKENS)
        assert backend.workers.await_all(PATIENCE_S)
        yield Subject(backend)
    finally:
        backend.close()


def before_the_first(layers: int | None) -> list[list[Arrival]]:
    """Returns arrivals by which both adapters have so many layers before the first iteration, and never more."""
    return [[Arrival(adapter, 0, layers) for adapter in (0, 1)], *[[] for _ in range(1, ITERATIONS)]]


@pytest.fixture(scope="module")
def resident(subject: Subject) -> list[Outcome]:
    return subject.run(before_the_first(LAYERS), assist=(False, False))


@pytest.mark.parametrize("arrived", range(LAYERS + 1))
@pytest.mark.parametrize("first_layer", [0, LAYERS - 1])
def test_workers_compute_only_the_layers_that_have_not_arrived(
    subject: Subject, arrived: int, first_layer: int
) -> None:
    """Of an adapter that is copied from its last layer on, that one arrives first."""
    for outcome in subject.run(before_the_first(arrived), (True, True), (first_layer, first_layer)):
        assert outcome.cpu_layers == (0, LAYERS - arrived, LAYERS - arrived)
        assert [ms > 0 for ms in outcome.cpu_lora_ms] == [layers > 0 for layers in outcome.cpu_layers]


def test_a_lost_adapter_is_computed_from_the_host_cache(subject: Subject, resident: list[Outcome]) -> None:
    outcomes = subject.run(before_the_first(None), assist=(False, False))
    assert [outcome.answer for outcome in outcomes] == [outcome.answer for outcome in resident]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[list[Arrival]], tuple[bool, bool], tuple[int, int]]:
    """Draws arrivals at any time, and the layers that are copied first. A row without assistance waits for all layers,
    so all arrive or are lost while the first iteration waits."""
    assist = draw(st.tuples(st.booleans(), st.booleans()))
    delays = st.one_of(st.just(0), st.integers(1, MOST_DELAY_US))
    layers = st.one_of(st.integers(1, LAYERS), st.none())
    arrivals = [draw(st.lists(st.builds(Arrival, st.sampled_from([0, 1]), delays, layers))) for _ in range(ITERATIONS)]
    arrivals[0] += [
        Arrival(adapter, draw(delays), draw(st.sampled_from([LAYERS, None])))
        for adapter in (0, 1)
        if not assist[adapter]
    ]
    first_layers = draw(st.tuples(st.integers(0, LAYERS - 1), st.integers(0, LAYERS - 1)))
    return [sorted(due, key=lambda arrival: arrival.delay_us) for due in arrivals], assist, first_layers


@settings(max_examples=40)
@given(schedule=schedules())
def test_tokens_and_logits_equal_those_of_a_loaded_adapter(
    subject: Subject,
    resident: list[Outcome],
    schedule: tuple[list[list[Arrival]], tuple[bool, bool], tuple[int, int]],
) -> None:
    outcomes = subject.run(*schedule)
    assert [outcome.answer for outcome in outcomes] == [outcome.answer for outcome in resident]
