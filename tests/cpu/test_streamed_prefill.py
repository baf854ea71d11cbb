"""Streamed prefills: when their layers are computed, and what counts as waiting time."""

import pytest

from caraserve.core.batch import Batch, RowResult, ScheduledRow, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.streamed_prefill import StreamedPrefills
from caraserve.model.dtype import Dtype

LAYERS, COMPUTE_S, WAIT_S = 3, 0.25, 100.0
BATCH = Batch((), (), (ScheduledRow(0, 0, 5, 1, samples=True),), is_side_batch=True)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class FakeCpuBatch:
    """The part of a CpuBatch that streamed prefills use."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int]] = []

    def set_layers(self, first_layer: int, end_layer: int) -> None:
        self.passes.append((first_layer, end_layer))


class Lane:
    """Streamed prefills over a device on which each pass takes COMPUTE_S, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **image: int) -> None:
        self.clock, self.cpu_batch, self.ended = Clock(), FakeCpuBatch(), list[StepResult | Exception]()
        monkeypatch.setattr("caraserve.cpu.streamed_prefill.time", self.clock)
        ends = tuple(100 * (layer + 1) for layer in range(LAYERS))
        held = HostAdapter(AdapterSpec("digest", Dtype.F32, 8, ("q_proj",), ends, ()), aligned_bytes(ends[-1]))
        self.image = CpuImage.empty(held, image["in_host"])
        self.prefills = StreamedPrefills(LAYERS, [None], self._compute, self._collect)  # type: ignore[list-item]
        self.prefills.start(BATCH, self.cpu_batch, self.image, self.ended.append)  # type: ignore[arg-type]

    def receive(self, layers: int) -> None:
        self.clock.now_s += WAIT_S
        self.image.in_host = layers
        self.image.mark_arrived(layers)
        self.prefills.advance()

    def _compute(self, *_: object) -> None:
        self.clock.now_s += COMPUTE_S

    def _collect(self, batch: Batch, cpu_batch: object, started_s: float) -> StepResult:
        return StepResult((RowResult((7,), waited_ms=1.0),), started_s, self.clock.now_s)


def test_each_layer_is_computed_once_when_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(monkeypatch, in_host=0)
    for layers in (1, 1, 3):
        lane.receive(layers)
    assert lane.cpu_batch.passes == [(0, 1), (1, 3)]
    assert len(lane.ended) == 1


def test_time_between_layers_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(monkeypatch, in_host=0)
    lane.receive(1)
    lane.receive(3)
    (result,) = lane.ended
    assert isinstance(result, StepResult)
    assert result.done_s - result.started_s == 2 * WAIT_S + 2 * COMPUTE_S
    assert result.rows[0].waited_ms == 1000 * 2 * WAIT_S + 1.0


def test_layers_in_the_host_cache_are_computed_when_the_copy_to_the_device_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Lane(monkeypatch, in_host=3)
    assert lane.cpu_batch.passes == []
    lane.image.mark_lost()
    lane.prefills.advance()
    assert lane.cpu_batch.passes == [(0, 3)]
