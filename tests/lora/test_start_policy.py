"""The start of a prefill whose adapter is being copied, checked by a simulation of its layers one after another."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from caraserve.config import LAYERWISE_MODES, LOADING_MODES
from caraserve.core.lora_layout import AdapterSpec
from caraserve.lora.start_policy import LayerGroup, PrefillStart, StartPolicy
from caraserve.model.dtype import Dtype

MIB = 1 << 20
LEAST_GAIN_MS, LEAST_GAIN_SHARE = 0.5, 0.1  # of the prefill: auto uses CPU workers only for more
ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Costs:
    """The costs of a machine on which a layer takes the same time for every prompt."""

    layer_ms: float
    layers: int
    cpu_ms: float = 1.0
    cpu_qkv_ms: float = 1.0

    def prefill_ms(self, tokens: int, rank: int) -> float:
        return self.layer_ms * self.layers

    def cpu_lora_ms(self, tokens: int, rank: int, targets: Literal["qkv", "all"]) -> float:
        return self.cpu_ms if targets == "all" else self.cpu_qkv_ms


def adapter(layers: int, layer_bytes: int, targets: tuple[str, ...] = ("q_proj", "down_proj")) -> AdapterSpec:
    ends = tuple(layer_bytes * (layer + 1) for layer in range(layers))
    return AdapterSpec("digest", Dtype.F32, 8, targets, ends, spans=())


def rules(mode: str, layers: int, layer_ms: float, **changed: Any) -> StartPolicy:
    fields = {"link_bytes_per_s": 1e6, "costs": Costs(layer_ms, layers), "workers": 2, "handoff_ms": 0.125}
    return StartPolicy(LOADING_MODES[mode], layers, **fields | changed)  # type: ignore[arg-type]


# --- groups of layers ---

LAYERS = st.integers(1, 80)
LAYER_BYTES = st.integers(0, 40 * MIB)
LAYER_MS = st.floats(0, 50)
SPEEDS = st.floats(1e3, 1e11)  # bytes a second


def group_sizes(loading: StartPolicy, spec: AdapterSpec) -> list[int]:
    return [end - start for start, end in pairwise((0, *loading.group_ends(spec)))]


@pytest.mark.parametrize("mode", sorted({*LOADING_MODES} - {*LAYERWISE_MODES}))
def test_modes_that_wait_for_the_whole_adapter_load_it_as_one_group(mode: str) -> None:
    assert StartPolicy(LOADING_MODES[mode], layers=7, link_bytes_per_s=1e6, costs=None).group_ends(
        adapter(7, 1000)
    ) == (7,)


@given(mode=st.sampled_from(LAYERWISE_MODES), layers=LAYERS, num_bytes=LAYER_BYTES, layer_ms=LAYER_MS, speed=SPEEDS)
def test_every_layer_is_in_a_group(mode: str, layers: int, num_bytes: int, layer_ms: float, speed: float) -> None:
    sizes = group_sizes(rules(mode, layers, layer_ms, link_bytes_per_s=speed), adapter(layers, num_bytes))
    assert min(sizes) > 0
    assert sum(sizes) == layers


@given(layers=LAYERS, num_bytes=st.integers(1, 40 * MIB), load_ms=st.floats(1, 50), share=st.floats(0, 1))
def test_layers_are_copied_one_by_one_where_loading_is_slower_than_computing(
    layers: int, num_bytes: int, load_ms: float, share: float
) -> None:
    loading = rules("pipelined", layers, share * load_ms, link_bytes_per_s=1000 * num_bytes / load_ms)
    assert group_sizes(loading, adapter(layers, num_bytes)) == [1] * layers


@given(layers=LAYERS, num_bytes=st.integers(2 * MIB, 40 * MIB), load_ms=st.floats(1, 50), ratio=st.floats(2.6, 9))
def test_groups_grow_by_at_most_the_ratio_of_loading_to_computing(
    layers: int, num_bytes: int, load_ms: float, ratio: float
) -> None:
    """The next group is loaded while one is computed, so it may be larger by the ratio of the two speeds, and one layer
    more by rounding."""
    loading = rules("pipelined", layers, ratio * load_ms, link_bytes_per_s=1000 * num_bytes / load_ms)
    sizes = group_sizes(loading, adapter(layers, num_bytes))
    assert sizes[0] == 1
    assert all(before < after for before, after in pairwise(sizes[:-1]))
    assert all(after <= (before + 1) * ratio for before, after in pairwise(sizes))


@given(num_bytes=st.integers(1000, 2 * MIB))
def test_small_layers_are_not_copied_alone_where_loading_is_faster(num_bytes: int) -> None:
    loading = rules("pipelined", 80, layer_ms=50, link_bytes_per_s=1e11)
    first = group_sizes(loading, adapter(80, num_bytes))[0]
    assert first == 80 or 2 * MIB - num_bytes < first * num_bytes <= 2 * MIB


# --- when to start ---

NOW_S = 16.0
TOKENS = 40  # of the prompt


@dataclass(frozen=True)
class Case:
    """A prefill whose adapter is being copied. Times are sums of powers of two, so they compare exactly."""

    groups: list[LayerGroup]
    layer_ms: float
    cpu_ms: float  # of a layer's modules on one core
    workers: int
    handoff_ms: float
    shared_cores: bool
    targets: tuple[str, ...]

    @property
    def layers(self) -> int:
        return self.groups[-1].end

    @property
    def arrives_s(self) -> list[float]:
        """Returns when each layer is expected on the device."""
        return [next(group.arrives_s for group in self.groups if layer < group.end) for layer in range(self.layers)]

    @property
    def in_host_s(self) -> list[float]:
        """Returns when each layer is expected in host memory."""
        return [next(group.in_host_s for group in self.groups if layer < group.end) for layer in range(self.layers)]

    @property
    def extra_ms(self) -> float:
        """Returns by how many ms a layer takes longer that CPU workers compute: one hand-off for every group of
        modules, and the time of their arithmetic beyond the device's own, which runs meanwhile unless both use the same
        cores."""
        hand_offs = 1 if "down_proj" not in self.targets else 4
        beside_ms = 0 if self.shared_cores else self.layer_ms
        return hand_offs * self.handoff_ms + max(0, self.cpu_ms / self.workers - beside_ms)

    def start(self, mode: str, **changed: Any) -> PrefillStart:
        costs = Costs(self.layer_ms, self.layers, cpu_ms=self.cpu_ms, cpu_qkv_ms=self.cpu_ms)
        same = {"costs": costs, "handoff_ms": self.handoff_ms, "shared_cores": self.shared_cores}
        loading = rules(mode, self.layers, self.layer_ms, **same | {"workers": self.workers} | changed)
        return loading.start(NOW_S, self.groups, adapter(self.layers, 1000, self.targets), TOKENS)

    def waits(self, start_s: float) -> bool:
        """Returns whether a prefill that starts at this time reaches a layer before it has arrived."""
        reaches_s = [start_s + layer * self.layer_ms / 1000 for layer in range(self.layers)]
        return any(arrives > reached for arrives, reached in zip(self.arrives_s, reaches_s, strict=True))

    def assisted_end_ms(self) -> float:
        """Returns when a prefill ends that starts now, with CPU workers for layers that have not arrived when it
        reaches them. It waits for layers that are not in host memory yet."""
        spent_ms = 0.0
        for arrives_s, in_host_s in zip(self.arrives_s, self.in_host_s, strict=True):
            spent_ms = max(spent_ms, 1000 * (in_host_s - NOW_S))
            spent_ms += self.layer_ms + (self.extra_ms if 1000 * (arrives_s - NOW_S) > spent_ms else 0)
        return spent_ms


@st.composite
def cases(draw: st.DrawFn) -> Case:
    eighths = st.integers(0, 400).map(lambda count: count / 8)
    groups, end, arrives_s = [], 0, NOW_S - draw(st.integers(0, 64)) / 1024
    steps = st.tuples(st.integers(1, 6), st.integers(0, 64), st.integers(0, 64))
    for size, wait, link in draw(st.lists(steps, min_size=1, max_size=8)):
        end, arrives_s = end + size, arrives_s + wait / 1024
        groups.append(LayerGroup(end, arrives_s, in_host_s=arrives_s - link / 1024))
    return Case(
        groups,
        layer_ms=draw(eighths),
        cpu_ms=draw(eighths),
        workers=draw(st.sampled_from([1, 2, 4])),
        handoff_ms=draw(st.integers(0, 16)) / 64,
        shared_cores=draw(st.booleans()),
        targets=draw(st.sampled_from([("q_proj", "v_proj"), ("q_proj", "down_proj")])),
    )


@given(case=cases())
def test_a_pipelined_prefill_starts_as_soon_as_it_will_wait_for_no_layer(case: Case) -> None:
    start = case.start("pipelined")
    assert not start.assist
    assert start.at_s >= NOW_S
    assert not case.waits(start.at_s + ROUNDING_S), "a layer is late"
    assert start.at_s == NOW_S or case.waits(start.at_s - ROUNDING_S), "it could have started before"


@given(case=cases())
def test_an_assisted_prefill_starts_at_once(case: Case) -> None:
    assert case.start("assisted") == PrefillStart(NOW_S, assist=True)


@given(case=cases())
def test_auto_chooses_assistance_where_it_is_expected_to_save_enough(case: Case) -> None:
    """Otherwise it starts like mode `pipelined`."""
    pipelined, plain_ms = case.start("pipelined"), case.layers * case.layer_ms
    gain_ms = 1000 * (pipelined.at_s - NOW_S) + plain_ms - case.assisted_end_ms()
    least_ms = max(LEAST_GAIN_MS, LEAST_GAIN_SHARE * plain_ms)
    assume(abs(gain_ms - least_ms) > 1e-6)
    assert case.start("auto") == (PrefillStart(NOW_S, assist=True) if gain_ms > least_ms else pipelined)


@pytest.mark.parametrize("mode", ["assisted", "auto"])
@given(case=cases())
def test_without_workers_nothing_is_assisted(mode: str, case: Case) -> None:
    assert case.start(mode, workers=0) == case.start("pipelined")


@pytest.mark.parametrize("mode", ["pipelined", "auto"])
@given(case=cases())
def test_a_prefill_with_all_layers_on_the_device_starts_at_once(mode: str, case: Case) -> None:
    there = replace(case, groups=[LayerGroup(group.end, min(group.arrives_s, NOW_S)) for group in case.groups])
    assert there.start(mode) == PrefillStart(NOW_S, assist=False)
