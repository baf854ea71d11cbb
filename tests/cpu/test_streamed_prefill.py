"""Prompts that stop between layers: when they go on, and which time is whose."""

import pytest

from caraserve.core.batch import Batch, RowResult, ScheduledRow, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes
from caraserve.cpu.adapters import CpuImage
from caraserve.cpu.streamed_prefill import StreamedPrefills
from caraserve.model.dtype import Dtype

LAYERS, COMPUTE_S, WAIT_S = 3, 0.25, 100.0
PLAN = Batch((), (), (ScheduledRow(0, 0, 5, 1, samples=True),), is_side_batch=True)


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Batch:
    """As far as asides know it."""

    def __init__(self) -> None:
        self.passes: list[tuple[int, int]] = []

    def compute(self, first_layer: int, end_layer: int) -> None:
        self.passes.append((first_layer, end_layer))


class Lane:
    """Asides over a device on which a pass takes so long, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **image: int) -> None:
        self.clock, self.batch, self.ended = Clock(), Batch(), list[StepResult | Exception]()
        monkeypatch.setattr("caraserve.cpu.streamed_prefill.time", self.clock)
        ends = tuple(100 * (layer + 1) for layer in range(LAYERS))
        held = HostAdapter(AdapterSpec("digest", Dtype.F32, 8, ("q_proj",), ends, ()), aligned_bytes(ends[-1]))
        self.image = CpuImage.empty(held, image["in_host"])
        self.asides = StreamedPrefills(LAYERS, [None], self._compute, self._collect)  # type: ignore[list-item]
        self.asides.begin(PLAN, self.batch, self.image, self.ended.append)  # type: ignore[arg-type]

    def come(self, layers: int) -> None:
        self.clock.now_s += WAIT_S
        self.image.in_host = layers
        self.image.arrive(layers)
        self.asides.go_on()

    def _compute(self, *_: object) -> None:
        self.clock.now_s += COMPUTE_S

    def _collect(self, plan: Batch, batch: object, started_s: float) -> StepResult:
        return StepResult((RowResult(7, waited_ms=1.0),), started_s, self.clock.now_s)


def test_each_layer_is_computed_once_when_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(monkeypatch, in_host=0)
    for layers in (1, 1, 3):
        lane.come(layers)
    assert lane.batch.passes == [(0, 1), (1, 3)]
    assert len(lane.ended) == 1


def test_the_time_between_layers_is_waiting_and_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(monkeypatch, in_host=0)
    lane.come(1)
    lane.come(3)
    (result,) = lane.ended
    assert isinstance(result, StepResult)
    assert result.done_s - result.started_s == 2 * WAIT_S + 2 * COMPUTE_S
    assert result.rows[0].waited_ms == 1000 * 2 * WAIT_S + 1.0


def test_when_a_copy_fails_what_is_in_the_host_tier_is_computed_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(monkeypatch, in_host=3)
    assert lane.batch.passes == []
    lane.image.lose()
    lane.asides.go_on()
    assert lane.batch.passes == [(0, 3)]
