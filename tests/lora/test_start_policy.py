"""The start of a prefill whose adapter is being copied, checked by a simulation of its layers one after another."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from caraserve.config import LAYERWISE_MODES, LOADING_MODES
from caraserve.core.lora_layout import AdapterSpec
from caraserve.lora.copy_groups import MOST_GROUPS
from caraserve.lora.start_policy import AwaitedPrefill, CopyPlan, ExpectedLayers, PrefillStart, StartPolicy
from caraserve.model.dtype import Dtype

MIB = 1 << 20
LEAST_GAIN_MS = 0.5  # auto uses CPU workers only for more
ROUNDING_S = 1e-9


@dataclass(frozen=True)
class Costs:
    """The costs of a machine on which a layer takes the same time for every prompt, of which the LoRA of all modules,
    of any rank, takes `lora_ms`."""

    layer_ms: float
    layers: int
    cpu_ms: float = 1.0
    cpu_qkv_ms: float = 1.0
    lora_ms: float = 0.0

    def prefill_ms(self, tokens: int, rank: int) -> float:
        return (self.layer_ms - (0.0 if rank else self.lora_ms)) * self.layers

    def cpu_lora_ms(self, tokens: int, rank: int, targets: Literal["qkv", "all"]) -> float:
        return self.cpu_ms if targets == "all" else self.cpu_qkv_ms


def adapter(layers: int, layer_bytes: int, targets: tuple[str, ...] = ("q_proj", "down_proj")) -> AdapterSpec:
    ends = tuple(layer_bytes * (layer + 1) for layer in range(layers))
    return AdapterSpec("digest", Dtype.F32, 8, targets, ends, spans=())


def rules(mode: str, layers: int, layer_ms: float, **changed: Any) -> StartPolicy:
    fields = {"link_bytes_per_s": 1e6, "costs": Costs(layer_ms, layers), "workers": 2, "handoff_ms": 0.125}
    fields |= {"attention_targets": frozenset(("q_proj", "k_proj", "v_proj")), "hand_offs": 4}
    return StartPolicy(LOADING_MODES[mode], layers, **fields | changed)  # type: ignore[arg-type]


# --- groups of layers ---

AT_ONCE = AwaitedPrefill(128, begins_s=0.0)
LAYERS = st.integers(1, 80)
LAYER_BYTES = st.integers(0, 40 * MIB)
LAYER_MS = st.floats(0, 50)
SPEEDS = st.floats(1e3, 1e11)  # bytes a second


def group_sizes(loading: StartPolicy, spec: AdapterSpec) -> list[int]:
    return [end - start for start, end in pairwise((0, *ends_of(loading.plan_copy(spec, 0.0, AT_ONCE))))]


def ends_of(plan: CopyPlan) -> list[int]:
    return [group.end for group in plan.groups]


@pytest.mark.parametrize("mode", sorted({*LOADING_MODES} - {*LAYERWISE_MODES}))
def test_modes_that_wait_for_the_whole_adapter_load_it_as_one_group(mode: str) -> None:
    loading = StartPolicy(LOADING_MODES[mode], layers=7, link_bytes_per_s=1e6, costs=None)
    assert group_sizes(loading, adapter(7, 1000)) == [7]


@given(mode=st.sampled_from(LAYERWISE_MODES), layers=LAYERS, num_bytes=LAYER_BYTES, layer_ms=LAYER_MS, speed=SPEEDS)
def test_every_layer_is_in_a_group(mode: str, layers: int, num_bytes: int, layer_ms: float, speed: float) -> None:
    sizes = group_sizes(rules(mode, layers, layer_ms, link_bytes_per_s=speed), adapter(layers, num_bytes))
    assert min(sizes) > 0
    assert sum(sizes) == layers
    assert len(sizes) <= MOST_GROUPS


@given(layers=LAYERS, num_bytes=st.integers(1, 40 * MIB), layer_ms=LAYER_MS, speed=SPEEDS)
def test_an_adapter_that_arrives_well_before_its_prefill_is_one_group(
    layers: int, num_bytes: int, layer_ms: float, speed: float
) -> None:
    copy_s = layers * num_bytes / speed
    loading, prefill = rules("pipelined", layers, layer_ms, link_bytes_per_s=speed), AwaitedPrefill(40, 1.26 * copy_s)
    assert ends_of(loading.plan_copy(adapter(layers, num_bytes), 0.0, prefill)) == [layers]


# --- the layer that is copied first ---


@dataclass(frozen=True)
class Copy:
    """An adapter of 7 layers to be copied for a prefill that begins at `BEGINS_S`: each may be a group of its own."""

    layer_ms: float  # of the prefill
    load_ms: float  # of a layer
    cpu_ms: float  # of a layer's modules, on the one worker
    copy_s: float

    LAYERS = 7
    BEGINS_S = 100.0

    def plan(self, mode: str = "assisted", **changed: Any) -> CopyPlan:
        costs = Costs(self.layer_ms, self.LAYERS, cpu_ms=self.cpu_ms)
        fields = {"link_bytes_per_s": 1e6 / self.load_ms, "costs": costs, "workers": 1, "shared_cores": True}
        loading = rules(mode, self.LAYERS, self.layer_ms, **fields | {"handoff_ms": 0.0} | changed)
        return loading.plan_copy(adapter(self.LAYERS, 1000), self.copy_s, AwaitedPrefill(TOKENS, self.BEGINS_S))

    def late(self, first_layer: int) -> bool:
        """Returns whether the layer after those that workers compute, or the last one, arrives after it is reached, if
        layers are copied one by one from `first_layer` on."""
        reached_ms = first_layer * (self.layer_ms + self.cpu_ms)
        wait_ms, others = 1000 * (self.copy_s - self.BEGINS_S), self.LAYERS - first_layer
        next_ms, last_ms = wait_ms + self.load_ms, wait_ms + others * self.load_ms
        return next_ms > reached_ms or last_ms > reached_ms + (others - 1) * self.layer_ms


copies = st.builds(
    Copy,
    layer_ms=st.integers(1, 16),
    load_ms=st.integers(1, 40),
    cpu_ms=st.integers(1, 16),
    copy_s=st.integers(-64, 64).map(lambda wait: Copy.BEGINS_S + wait / 1024),
)


@given(copy=copies)
def test_a_copy_begins_after_the_fewest_layers_by_whose_computing_all_others_arrive_in_time(copy: Copy) -> None:
    first_layer = copy.plan().first_layer
    if first_layer:
        assert copy.late(first_layer - 1)
        assert not copy.late(first_layer)
    else:
        assert not copy.late(0) or all(copy.late(layer) for layer in range(copy.LAYERS))


@given(copy=copies)
def test_layers_before_the_first_one_copied_arrive_last(copy: Copy) -> None:
    plan = copy.plan()
    order = sorted(plan.groups, key=lambda group: group.arrives_s)
    assert [group.end for group in order] == [
        *[end for end in ends_of(plan) if end > plan.first_layer],
        *[end for end in ends_of(plan) if end <= plan.first_layer],
    ]
    assert order[-1].arrives_s == pytest.approx(copy.copy_s + copy.LAYERS * copy.load_ms / 1000)


def test_the_first_group_is_larger_the_longer_the_link_is_busy_and_the_faster_the_prefill() -> None:
    copy = Copy(layer_ms=8, load_ms=13, cpu_ms=8, copy_s=Copy.BEGINS_S)
    busy = [replace(copy, copy_s=Copy.BEGINS_S + wait_ms / 1000) for wait_ms in (0, 32, 64)]
    fast = [replace(copy, layer_ms=layer_ms, cpu_ms=layer_ms) for layer_ms in (8, 5, 3)]
    assert [each.plan().first_layer for each in busy] == [3, 4, 6]
    assert [each.plan().first_layer for each in fast] == [3, 4, 5]


@given(copy=copies, mode=st.sampled_from([*LAYERWISE_MODES]))
def test_without_workers_a_copy_begins_with_the_first_layer(copy: Copy, mode: str) -> None:
    assert copy.plan("pipelined").first_layer == 0
    assert copy.plan(mode, workers=0) == copy.plan("pipelined")


@given(copy=copies)
def test_auto_takes_the_order_with_which_the_prefill_ends_first(copy: Copy) -> None:
    fields = {"workers": 1, "shared_cores": True, "handoff_ms": 0.0}
    costs = Costs(copy.layer_ms, copy.LAYERS, cpu_ms=copy.cpu_ms)
    loading = rules("auto", copy.LAYERS, copy.layer_ms, **fields, costs=costs)

    def ends_s(plan: CopyPlan) -> float:
        ends = loading.start(AwaitedPrefill(TOKENS, copy.BEGINS_S), plan.groups, adapter(copy.LAYERS, 1000)).ends_s
        assert ends is not None
        return ends

    assert ends_s(copy.plan("auto")) == min(ends_s(copy.plan("pipelined")), ends_s(copy.plan("assisted")))


def test_a_number_of_groups_replaces_the_rule() -> None:
    copy = Copy(layer_ms=8, load_ms=13, cpu_ms=8, copy_s=Copy.BEGINS_S)
    by_count = {count: copy.plan(pipeline_groups=count) for count in (1, 2, 5, 40)}
    assert {count: ends_of(plan) for count, plan in by_count.items()} == {
        1: [7],
        2: [3, 7],
        5: [1, 2, 4, 5, 7],
        40: [*range(1, 8)],
    }
    assert [plan.first_layer for plan in by_count.values()] == [0, 3, 1, 1]
    assert copy.plan("pipelined", pipeline_groups=2).first_layer == 0


def test_limited_slices_share_a_prompt_among_fewer_workers() -> None:
    copy = Copy(layer_ms=8, load_ms=13, cpu_ms=32, copy_s=Copy.BEGINS_S)
    limits = [None, *(lambda rank, most=most: most for most in (TOKENS // 4, TOKENS))]
    plans = [copy.plan(workers=4, tokens_per_worker=limit) for limit in limits]
    assert plans[0] == plans[1] == replace(copy, cpu_ms=8).plan()
    assert plans[2] == copy.plan()


# --- when to start ---

NOW_S = 16.0
TOKENS = 40  # of the prompt


@dataclass(frozen=True)
class Case:
    """A prefill whose adapter is being copied. Times are sums of powers of two, so they compare exactly."""

    groups: list[ExpectedLayers]
    layer_ms: float
    cpu_ms: float  # of a layer's modules on one core
    workers: int
    handoff_ms: float
    deltas_ms: float  # of a layer's deltas on the link
    shared_cores: bool
    targets: tuple[str, ...]
    lora_ms: float  # of a layer's modules on the device; part of `layer_ms`
    iteration_s: float  # of other requests
    others: int  # requests that decode
    chunk_tokens: int | None  # of assisted prefills beside iterations

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

    def extra_ms(self, tokens: int) -> float:
        """Returns by how many ms a layer takes longer that CPU workers compute: one hand-off for every group of
        modules, the deltas' time on the link, and the time of their arithmetic beyond that of the device, which runs
        meanwhile. Where both use the same cores, the device only saves the time of the same arithmetic."""
        hand_offs = 1 if "down_proj" not in self.targets else 4
        beside_ms = self.lora_ms if self.shared_cores else self.layer_ms
        deltas_ms = self.deltas_ms * tokens / TOKENS
        return hand_offs * self.handoff_ms + max(0, self.cpu_ms / self.workers - beside_ms) + deltas_ms

    def start(self, mode: str, **changed: Any) -> PrefillStart:
        costs = Costs(self.layer_ms, self.layers, cpu_ms=self.cpu_ms, cpu_qkv_ms=self.cpu_ms, lora_ms=self.lora_ms)
        same: dict[str, Any] = {"costs": costs, "handoff_ms": self.handoff_ms, "shared_cores": self.shared_cores}
        delta_bytes = self.deltas_ms * 1e6 / 1000 / TOKENS  # of a token
        same |= {"delta_bytes": dict.fromkeys(("qkv", "all"), delta_bytes), "delta_bytes_per_s": 1e6}
        same |= {"workers": self.workers, "chunk_tokens": self.chunk_tokens}
        loading = rules(mode, self.layers, self.layer_ms, **same | changed)
        prefill = AwaitedPrefill(TOKENS, NOW_S, self.iteration_s, self.others)
        return loading.start(prefill, self.groups, adapter(self.layers, 1000, self.targets))

    def waits(self, start_s: float) -> bool:
        """Returns whether a prefill that starts at this time reaches a layer before it has arrived."""
        reaches_s = [start_s + layer * self.layer_ms / 1000 for layer in range(self.layers)]
        return any(arrives > reached for arrives, reached in zip(self.arrives_s, reaches_s, strict=True))

    def next_iteration_ms(self, at_s: float) -> float:
        """Returns how long a prefill waits that may start at `at_s`, but not within an iteration."""
        begins_s = NOW_S
        while self.iteration_s and begins_s < at_s:
            begins_s += self.iteration_s
        return 1000 * (max(begins_s, at_s) - NOW_S)

    def least_start_s(self) -> float:
        """Returns the earliest start of a prefill that waits for no layer."""
        late_s = [at_s - layer * self.layer_ms / 1000 for layer, at_s in enumerate(self.arrives_s)]
        return max(NOW_S, *late_s)

    def waits_inside(self) -> bool:
        """Returns whether an iteration with the prefill waits for layers, for 2 ms at most: all its requests together
        lose no more time than the prefill does if it begins with a later iteration."""
        stall_ms = 1000 * (self.least_start_s() - NOW_S)
        lost_ms = stall_ms * (1 + self.others)
        return 0 < stall_ms <= 2 and lost_ms <= self.next_iteration_ms(self.least_start_s())

    def pipelined_end_ms(self) -> float:
        """Returns when a prefill ends that starts without CPU workers."""
        start_s = self.least_start_s()
        waited_ms = 1000 * (start_s - NOW_S) if self.waits_inside() else self.next_iteration_ms(start_s)
        return waited_ms + self.layers * self.layer_ms

    def assisted_end_ms(self) -> float:
        """Returns when a prefill ends that starts now, with CPU workers for layers that have not arrived when it
        reaches them. It waits for layers that are not in host memory yet. Beside iterations the workers help chunk by
        chunk, which take twice as long as alone, until all layers have arrived; an iteration computes the rest."""
        spent_ms, left = 0.0, TOKENS
        while left == TOKENS or (left > 0 and spent_ms < 1000 * (max(self.arrives_s) - NOW_S)):
            tokens = left if self.chunk_tokens is None else min(left, self.chunk_tokens)
            layer_ms = self.layer_ms * (2 if self.chunk_tokens is not None and self.iteration_s else 1)
            for arrives_s, in_host_s in zip(self.arrives_s, self.in_host_s, strict=True):
                spent_ms = max(spent_ms, 1000 * (in_host_s - NOW_S))
                spent_ms += layer_ms + (self.extra_ms(tokens) if 1000 * (arrives_s - NOW_S) > spent_ms else 0)
            left -= tokens
        if left:
            spent_ms = self.next_iteration_ms(NOW_S + spent_ms / 1000) + self.layers * self.layer_ms
        return spent_ms


@st.composite
def cases(draw: st.DrawFn) -> Case:
    eighths = st.integers(0, 400).map(lambda count: count / 8)
    groups, end, arrives_s = [], 0, NOW_S - draw(st.integers(0, 64)) / 1024
    steps = st.tuples(st.integers(1, 6), st.integers(0, 64), st.integers(0, 64))
    for size, wait, link in draw(st.lists(steps, min_size=1, max_size=8)):
        end, arrives_s = end + size, arrives_s + wait / 1024
        groups.append(ExpectedLayers(end, arrives_s, in_host_s=arrives_s - link / 1024))
    layer_ms = draw(eighths)
    return Case(
        groups,
        layer_ms=layer_ms,
        cpu_ms=draw(st.integers(1, 400)) / 8,
        workers=draw(st.sampled_from([1, 2, 4])),
        handoff_ms=draw(st.integers(0, 16)) / 64,
        deltas_ms=draw(st.integers(0, 16)) / 8,
        shared_cores=draw(st.booleans()),
        targets=draw(st.sampled_from([("q_proj", "v_proj"), ("q_proj", "down_proj")])),
        lora_ms=layer_ms * draw(st.integers(0, 8)) / 8,
        iteration_s=draw(st.integers(0, 64)) / 1024,
        others=draw(st.integers(0, 3)),
        chunk_tokens=draw(st.sampled_from([None, 8, 16, 64])),
    )


@given(case=cases())
def test_a_pipelined_prefill_starts_as_soon_as_it_will_wait_for_no_layer(case: Case) -> None:
    assume(not case.waits_inside())
    start = case.start("pipelined")
    assert not start.assist
    assert start.at_s >= NOW_S
    assert not case.waits(start.at_s + ROUNDING_S), "a layer is late"
    assert start.at_s == NOW_S or case.waits(start.at_s - ROUNDING_S), "it could have started before"


@given(late_us=st.integers(1, 3000), iteration_us=st.integers(0, 9000), others=st.integers(0, 8))
def test_an_iteration_waits_for_layers_where_requests_lose_less_time_by_that(
    late_us: int, iteration_us: int, others: int
) -> None:
    prefill = AwaitedPrefill(TOKENS, NOW_S, iteration_us / 1e6, others)
    groups = [ExpectedLayers(2, NOW_S + late_us / 1e6)]
    start = rules("pipelined", 2, 1.0).start(prefill, groups, adapter(2, 1000))
    later_us = -(-late_us // iteration_us) * iteration_us if iteration_us else late_us
    assume(abs(late_us * (1 + others) - later_us) > 1)
    waits_inside = late_us <= 2000 and late_us * (1 + others) < later_us
    assert start.at_s == pytest.approx(NOW_S if waits_inside else NOW_S + late_us / 1e6)


@given(case=cases())
def test_an_assisted_prefill_starts_at_once(case: Case) -> None:
    assert case.start("assisted") == PrefillStart(NOW_S, assist=True)


@given(case=cases())
def test_auto_chooses_assistance_where_it_is_expected_to_save_enough(case: Case) -> None:
    """Otherwise it starts like mode `pipelined`, which may start in none but the next iteration."""
    gain_ms = case.pipelined_end_ms() - case.assisted_end_ms()
    assume(abs(gain_ms - LEAST_GAIN_MS) > 1e-6)
    pipelined = case.start("pipelined")
    assert case.start("auto") == (PrefillStart(NOW_S, assist=True) if gain_ms > LEAST_GAIN_MS else pipelined)


@pytest.mark.parametrize("mode", ["assisted", "auto"])
@given(case=cases())
def test_without_workers_nothing_is_assisted(mode: str, case: Case) -> None:
    assert case.start(mode, workers=0) == case.start("pipelined")


@pytest.mark.parametrize("mode", ["pipelined", "auto"])
@given(case=cases())
def test_a_prefill_with_all_layers_on_the_device_starts_at_once(mode: str, case: Case) -> None:
    there = replace(case, groups=[ExpectedLayers(group.end, min(group.arrives_s, NOW_S)) for group in case.groups])
    assert there.start(mode) == PrefillStart(NOW_S, assist=False)
