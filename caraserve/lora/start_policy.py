"""Decides in which order layers are copied, when a prefill starts meanwhile, and whether CPU workers help it. No I/O.

A prefill reaches layer l about l layer times after its start, so it may start as soon as every group
of layers is expected to have arrived when it is reached: the prefill waits for nothing, and decoding goes on meanwhile.
It may also start before, and its iteration wait for layers, where requests lose less time by that than by waiting for a
later iteration.
With assistance (Toppings §4.1) it starts at once, and CPU workers compute the LoRA of layers that have not arrived.
Its first layers are computed by CPU workers anyway, so the copy begins with the layers after them.
Predictions only choose order and time: a layer that is late all the same is waited for, or computed by the CPU workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import Literal

from caraserve.config import LoadingMode
from caraserve.core.lora_layout import AdapterSpec
from caraserve.core.machine_profile import Profile, Targets
from caraserve.lora.copy_groups import MOST_GROUPS, group_ends, groups_in_time
from caraserve.util.units import ceil_div

_TYPICAL_TOKENS = 128  # of a prompt, for adapters that no request is waiting for
_SLOWER = 1.25  # the time of a copy by which groups are divided, over the expected one
_LEAST_GAIN_MS = 0.5  # that assistance saves: for less, CPU workers are not occupied
_MOST_STALL_MS = 2.0  # for which an iteration waits for layers, at most: the copy may take longer than expected


@dataclass(frozen=True, slots=True)
class ExpectedLayers:
    """Layers up to `end` are expected on the device at `arrives_s`, and in host memory, where CPU workers read them, at
    `in_host_s`."""

    end: int
    arrives_s: float
    in_host_s: float = -inf


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """The groups of layers in which an adapter is copied, by layers. The copy begins with the group that begins at
    `first_layer`; the groups before it come last."""

    groups: tuple[ExpectedLayers, ...] = ()
    first_layer: int = 0


@dataclass(frozen=True, slots=True)
class AwaitedPrefill:
    """The prefill that an adapter is loaded for: the tokens of its first chunk, and when it could begin.

    `iteration_s`: how long an iteration of other requests takes, which begins instead if the prefill waits; 0: there
    are none. `others`: requests of the iteration, which wait with it for layers that are late.
    """

    tokens: int
    begins_s: float
    iteration_s: float = 0.0
    others: int = 0


NO_PREFILL = AwaitedPrefill(_TYPICAL_TOKENS, -inf)  # of an adapter that is loaded before a request wants it


@dataclass(frozen=True, slots=True)
class PrefillStart:
    """A prefill may start at `at_s`, with or without CPU workers for layers that have not arrived by then.

    `ends_s`: when its first chunk is expected to be done, where `auto` has chosen.
    """

    at_s: float
    assist: bool
    ends_s: float | None = field(default=None, compare=False)


@dataclass(slots=True)
class ModeChoice:
    """The start that mode `auto` has chosen for a request, with its predicted end, to be compared with the measured
    one."""

    name: Literal["cached", "pipelined", "assisted"]
    chosen_s: float
    ends_s: float  # expected end of its first chunk
    is_observed: bool = False


@dataclass(frozen=True, slots=True)
class StartPolicy:
    """The rules of one loading mode on one machine."""

    mode: LoadingMode
    layers: int
    link_bytes_per_s: float
    costs: Profile | None  # needed by layerwise modes alone
    workers: int = 0  # CPU LoRA workers
    handoff_ms: float = 0.0  # round trip of a hand-off beyond its compute
    delta_bytes: Mapping[Targets, int] = field(default_factory=dict)  # over the link, by token and layer
    delta_bytes_per_s: float = inf  # which an emulated link of loads does not limit
    shared_cores: bool = False  # whether the workers' cores are the device's own, as on the CPU backend
    pipeline_groups: int | None = None  # so many groups of about equal size; None: by predicted times
    tokens_per_worker: Callable[[int], int] | None = None  # most of one worker, by rank; None: prompts go to all
    attention_targets: frozenset[str] = frozenset()  # modules that read the attention's input: one hand-off for all
    hand_offs: int = 1  # of a layer, for adapters of other modules too
    chunk_tokens: int | None = None  # of assisted prefills beside iterations; None: workers help within iterations

    @property
    def uses_workers(self) -> bool:
        """Whether CPU workers may compute layers that are not on the device yet."""
        return self.mode.uses_workers and self.workers > 0

    # --- the order of a copy ---

    def plan_copy(self, spec: AdapterSpec, copy_s: float, prefill: AwaitedPrefill) -> CopyPlan:
        """Returns the groups and the order in which an adapter is copied from `copy_s` on.

        Where CPU workers will help the prefill, the copy begins after the layers that they compute first (Toppings
        §4.1). Mode `auto` takes the order with which it expects the prefill to end first.
        """
        in_order = self._planned(spec, copy_s, prefill, 0)
        if not self.uses_workers:
            return in_order
        first_layer = self._first_group(spec, copy_s, prefill)
        if first_layer == 0:
            return in_order
        assisted = self._planned(spec, copy_s, prefill, first_layer)
        if not self.mode.chooses:
            return assisted
        ends_s = [self._ends_s(plan, spec, prefill) for plan in (in_order, assisted)]
        return assisted if ends_s[1] < ends_s[0] else in_order

    def _ends_s(self, plan: CopyPlan, spec: AdapterSpec, prefill: AwaitedPrefill) -> float:
        start = self.start(prefill, plan.groups, spec)
        assert start.ends_s is not None
        return start.ends_s

    def _first_group(self, spec: AdapterSpec, copy_s: float, prefill: AwaitedPrefill) -> int:
        """Returns how many layers CPU workers compute while the next ones are copied: the fewest with which all others
        arrive before they are reached. 0: the copy begins with the first layer, because none is reached before it has
        arrived, or because no such number is enough."""
        if self.pipeline_groups is not None:
            return self.layers // min(self.pipeline_groups, self.layers) % self.layers
        wait_ms, tokens = 1000 * (copy_s - prefill.begins_s), self._chunk(prefill.tokens)
        layer_ms, load_ms = self._assisted_layer_ms(spec, prefill), self._load_ms(spec)
        on_workers_ms = layer_ms + self._extra_ms(spec, tokens)
        for first in range(self.layers):
            most = MOST_GROUPS - (first > 0)
            ahead_ms = first * on_workers_ms - wait_ms
            if groups_in_time(self.layers - first, ahead_ms, load_ms, layer_ms, most) is not None:
                return first
        return 0

    def _planned(self, spec: AdapterSpec, copy_s: float, prefill: AwaitedPrefill, first_layer: int) -> CopyPlan:
        """Returns a copy that begins at `copy_s` with `first_layer`, and when each group is expected."""
        ends, before = spec.layer_ends, spec.layer_ends[first_layer - 1] if first_layer else 0
        groups = []
        for end in self._group_ends(spec, copy_s, prefill, first_layer):
            num_bytes = ends[end - 1] - before + (spec.num_bytes if end <= first_layer else 0)
            groups.append(ExpectedLayers(end, copy_s + num_bytes / self.link_bytes_per_s))
        return CopyPlan(tuple(groups), first_layer)

    def _group_ends(self, spec: AdapterSpec, copy_s: float, prefill: AwaitedPrefill, first_layer: int) -> Sequence[int]:
        """Returns where groups of layers end, one of them before `first_layer`. Without help of CPU workers, copies are
        taken to be a quarter slower than the link, so that not every delay makes a layer late."""
        if not self.mode.is_layerwise:
            return [self.layers]
        if self.pipeline_groups is not None:
            count = min(self.pipeline_groups, self.layers)
            return [self.layers * (index + 1) // count for index in range(count)]
        ahead_ms, load_ms = 1000 * (prefill.begins_s - copy_s), self._load_ms(spec)
        if first_layer == 0:
            return group_ends(self.layers, ahead_ms, _SLOWER * load_ms, self._layer_ms(spec, prefill.tokens))
        layer_ms = self._assisted_layer_ms(spec, prefill)
        ahead_ms += first_layer * (layer_ms + self._extra_ms(spec, self._chunk(prefill.tokens)))
        ends = group_ends(self.layers - first_layer, ahead_ms, load_ms, layer_ms, MOST_GROUPS - 1)
        return [first_layer, *(first_layer + end for end in ends)]

    def _load_ms(self, spec: AdapterSpec) -> float:
        return 1000 * max(1.0, spec.num_bytes / self.layers) / self.link_bytes_per_s

    # --- the start of a prefill ---

    def start(
        self, prefill: AwaitedPrefill, groups: Sequence[ExpectedLayers], spec: AdapterSpec, *, may_assist: bool = True
    ) -> PrefillStart:
        """Returns when a prefill may start whose adapter is being copied in `groups`. `may_assist`: whether CPU workers
        may help."""
        at_s, layer_ms = prefill.begins_s, self._layer_ms(spec, prefill.tokens)
        for layer, group in zip((0, *(group.end for group in groups)), groups, strict=False):
            at_s = max(at_s, group.arrives_s - layer * layer_ms / 1000)
        if not self.uses_workers or not may_assist:
            return self._begin(at_s, prefill, layer_ms)
        if not self.mode.chooses:
            return PrefillStart(prefill.begins_s, assist=True)
        waiting, assisted_s = self._begin(at_s, prefill, layer_ms), self._assisted_end_s(prefill, groups, spec)
        assert waiting.ends_s is not None
        if 1000 * (waiting.ends_s - assisted_s) > _LEAST_GAIN_MS:
            return PrefillStart(prefill.begins_s, assist=True, ends_s=assisted_s)
        return waiting

    def start_loaded(self, prefill: AwaitedPrefill, spec: AdapterSpec | None) -> PrefillStart:
        """Returns the start of a prefill whose whole adapter is on the device: as soon as it could begin."""
        if not self.mode.chooses or spec is None:
            return PrefillStart(prefill.begins_s, assist=False)
        return self._begin(prefill.begins_s, prefill, self._layer_ms(spec, prefill.tokens))

    def _begin(self, at_s: float, prefill: AwaitedPrefill, layer_ms: float) -> PrefillStart:
        """Returns the start without CPU workers of a prefill that waits for no layer from `at_s` on: then, or in the
        next iteration, which waits for layers, where that costs all requests together less time."""
        stall_s, starts_s = at_s - prefill.begins_s, _next_iteration_s(prefill, at_s)
        lost_s = stall_s * (1 + prefill.others)
        if stall_s > 0 and 1000 * stall_s <= _MOST_STALL_MS and lost_s <= starts_s - prefill.begins_s:
            at_s, starts_s = prefill.begins_s, at_s
        ends_s = starts_s + layer_ms * self.layers / 1000
        return PrefillStart(at_s, assist=False, ends_s=ends_s if self.mode.chooses else None)

    def _layer_ms(self, spec: AdapterSpec, tokens: int) -> float:
        """Returns the time of a layer with the adapter on the device."""
        assert self.costs is not None
        return max(0.0, self.costs.prefill_ms(tokens, 0)) / self.layers + self._device_lora_ms(spec, tokens)

    def _device_lora_ms(self, spec: AdapterSpec, tokens: int) -> float:
        """Returns how much of a layer's time is the adapter's LoRA. The profile's prefills are with all modules, of
        which q, k and v take about the same share of the time on the device as on a CPU worker."""
        assert self.costs is not None
        all_ms = max(0.0, self.costs.prefill_ms(tokens, spec.rank) - self.costs.prefill_ms(tokens, 0)) / self.layers
        if self._targets(spec) == "all" or all_ms == 0.0:
            return all_ms
        qkv_ms, worker_ms = (self.costs.cpu_lora_ms(tokens, spec.rank, targets) for targets in ("qkv", "all"))
        return all_ms * qkv_ms / worker_ms

    def _assisted_end_s(self, prefill: AwaitedPrefill, groups: Sequence[ExpectedLayers], spec: AdapterSpec) -> float:
        """Returns when a prefill ends that starts now with the CPU workers. They help with its first chunk, and with
        others until the adapter has arrived; the rest is computed in an iteration."""
        begins_s, left, spent_ms = prefill.begins_s, prefill.tokens, 0.0
        arrives_ms = 1000 * (max(group.arrives_s for group in groups) - begins_s)
        while left == prefill.tokens or (left > 0 and spent_ms < arrives_ms):
            spent_ms = self._assisted_ms(replace(prefill, tokens=left), groups, spec, spent_ms)
            left -= self._chunk(left)
        ends_s = begins_s + spent_ms / 1000
        if left > 0:
            ends_s = _next_iteration_s(prefill, ends_s) + self.layers * self._layer_ms(spec, left) / 1000
        return ends_s

    def _chunk(self, tokens: int) -> int:
        """Returns how many of these tokens an assisted prefill computes first."""
        return tokens if self.chunk_tokens is None else min(tokens, self.chunk_tokens)

    def _assisted_ms(
        self, prefill: AwaitedPrefill, groups: Sequence[ExpectedLayers], spec: AdapterSpec, spent_ms: float
    ) -> float:
        """Returns how many ms after the prefill could begin the CPU workers and the device have computed its next
        chunk, which they begin after `spent_ms`."""
        layer_ms, layer = self._assisted_layer_ms(spec, prefill), 0
        helped_ms = layer_ms + self._extra_ms(spec, self._chunk(prefill.tokens))
        for group in groups:
            spent_ms = max(spent_ms, 1000 * (group.in_host_s - prefill.begins_s))
            missing_ms, count = 1000 * (group.arrives_s - prefill.begins_s) - spent_ms, group.end - layer
            helped = 0 if missing_ms <= 0 else count if helped_ms == 0 else min(count, ceil(missing_ms / helped_ms))
            spent_ms += helped * helped_ms + (count - helped) * layer_ms
            layer = group.end
        return spent_ms

    def _assisted_layer_ms(self, spec: AdapterSpec, prefill: AwaitedPrefill) -> float:
        """Returns the time of a layer of an assisted chunk, with the adapter on the device. A chunk beside iterations
        takes twice as long as alone, because both read all weights."""
        is_beside = self.chunk_tokens is not None and prefill.iteration_s > 0
        return self._layer_ms(spec, self._chunk(prefill.tokens)) * (2 if is_beside else 1)

    def _extra_ms(self, spec: AdapterSpec, tokens: int) -> float:
        """Returns by how many ms a layer takes longer whose LoRA the CPU workers compute. The device does not compute
        it then."""
        assert self.costs is not None
        workers, targets = self.workers, self._targets(spec)
        if self.tokens_per_worker is not None:
            workers = min(workers, ceil_div(tokens, self.tokens_per_worker(spec.rank)))
        cpu_ms = self.costs.cpu_lora_ms(tokens, spec.rank, targets) / workers
        saved_ms = self._device_lora_ms(spec, tokens) if self.shared_cores else self._layer_ms(spec, tokens)
        link_ms = 1000 * tokens * self.delta_bytes.get(targets, 0) / self.delta_bytes_per_s
        return self.handoff_ms * (1 if targets == "qkv" else self.hand_offs) + max(0.0, cpu_ms - saved_ms) + link_ms

    def _targets(self, spec: AdapterSpec) -> Targets:
        return "qkv" if self.attention_targets.issuperset(spec.targets) else "all"


def _next_iteration_s(prefill: AwaitedPrefill, at_s: float) -> float:
    """Returns when the first iteration begins that a prefill may be in which may start at `at_s`."""
    wait_s, iteration_s = at_s - prefill.begins_s, prefill.iteration_s
    return at_s if iteration_s <= 0 or wait_s <= 0 else prefill.begins_s + ceil(wait_s / iteration_s) * iteration_s
