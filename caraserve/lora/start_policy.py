"""Decides when a prefill starts whose adapter is still being copied, and whether CPU workers help it. No I/O.

A prefill reaches layer l about l layer times after its start, so it may start as soon as every group
of layers is expected to have arrived when it is reached: the prefill waits for nothing, and decoding goes on meanwhile.
With assistance (Toppings §4.1) it starts at once, and CPU workers compute the LoRA of layers that have not arrived.
Predictions only choose the time: a layer that is late all the same is waited for, or computed by the CPU workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from caraserve.config import LoadingMode
from caraserve.core.lora_layout import AdapterSpec
from caraserve.core.machine_profile import Profile

_TYPICAL_TOKENS = 128  # of a prompt, for group sizes, which are fixed before the requests are known
_LEAST_GROUP_BYTES = 2 << 20  # below this the fixed cost of a copy is noticeable
# Assistance is chosen only if it saves both of these: predictions are not more accurate than that.
_LEAST_GAIN_MS = 0.5
_LEAST_GAIN_SHARE = 0.1  # of the prefill


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers up to `end` are expected on the device at `arrives_s`, and in host memory, where CPU workers read them, at
    `in_host_s`."""

    end: int
    arrives_s: float
    in_host_s: float = -inf


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
    shared_cores: bool = False  # whether the workers' cores are the device's own, as on the CPU backend

    def group_ends(self, spec: AdapterSpec) -> tuple[int, ...]:
        """Returns where groups of layers end. Where loading is faster than computing, each group may be larger than the
        one before by the ratio of the two; otherwise each layer is a group, so that no layer waits for a later one."""
        if not self.mode.is_layerwise:
            return (self.layers,)
        layer_bytes = max(1.0, spec.num_bytes / self.layers)
        load_ms = 1000 * layer_bytes / self.link_bytes_per_s
        growth = max(1.0, 0.8 * self._layer_ms(_TYPICAL_TOKENS, spec.rank) / load_ms)
        size, ends = float(max(1, int(_LEAST_GROUP_BYTES / layer_bytes))) if growth > 1 else 1.0, [0]
        while ends[-1] < self.layers:
            ends.append(min(self.layers, ends[-1] + int(size)))
            size *= growth
        return tuple(ends[1:])

    def start(
        self, now_s: float, groups: Sequence[LayerGroup], spec: AdapterSpec, tokens: int, *, may_assist: bool = True
    ) -> PrefillStart:
        """Returns when a prefill may start whose adapter is being copied in `groups`. `tokens`: of its first chunk.
        `may_assist`: whether CPU workers may help."""
        layer_ms = self._layer_ms(tokens, spec.rank)
        at_s = now_s
        for layer, group in zip((0, *(group.end for group in groups)), groups, strict=False):
            at_s = max(at_s, group.arrives_s - layer * layer_ms / 1000)
        if not self.mode.uses_workers or self.workers == 0 or not may_assist:
            return self._begin(at_s, layer_ms, assist=False)
        if not self.mode.chooses:
            return PrefillStart(now_s, assist=True)
        extra_ms = self._assisted_ms(now_s, groups, spec, tokens)
        gain_ms = 1000 * (at_s - now_s) - extra_ms
        if gain_ms > max(_LEAST_GAIN_MS, _LEAST_GAIN_SHARE * layer_ms * self.layers):
            return self._begin(now_s, layer_ms, extra_ms, assist=True)
        return self._begin(at_s, layer_ms, assist=False)

    def start_loaded(self, now_s: float, spec: AdapterSpec | None, tokens: int) -> PrefillStart:
        """Returns the start of a prefill whose whole adapter is on the device: `now_s`."""
        if not self.mode.chooses or spec is None:
            return PrefillStart(now_s, assist=False)
        return self._begin(now_s, self._layer_ms(tokens, spec.rank), assist=False)

    def _begin(self, at_s: float, layer_ms: float, extra_ms: float = 0.0, *, assist: bool) -> PrefillStart:
        ends_s = at_s + (layer_ms * self.layers + extra_ms) / 1000 if self.mode.chooses else None
        return PrefillStart(at_s, assist, ends_s)

    def _layer_ms(self, tokens: int, rank: int) -> float:
        assert self.costs is not None
        return max(0.0, self.costs.prefill_ms(tokens, rank)) / self.layers

    def _assisted_ms(self, now_s: float, groups: Sequence[LayerGroup], spec: AdapterSpec, tokens: int) -> float:
        """Returns by how many ms a prefill that starts now with the CPU workers takes longer than with a loaded
        adapter."""
        assert self.costs is not None
        layer_ms = self._layer_ms(tokens, spec.rank)
        targets: Literal["qkv", "all"] = "qkv" if set(spec.targets) <= {"q_proj", "k_proj", "v_proj"} else "all"
        cpu_ms = self.costs.cpu_lora_ms(tokens, spec.rank, targets) / self.workers
        hidden_ms = 0.0 if self.shared_cores else layer_ms
        extra_ms = self.handoff_ms * (1 if targets == "qkv" else 4) + max(0.0, cpu_ms - hidden_ms)
        spent_ms, layer = 0.0, 0
        for group in groups:
            spent_ms = max(spent_ms, 1000 * (group.in_host_s - now_s))
            for _ in range(layer, group.end):
                arrived = 1000 * (group.arrives_s - now_s) <= spent_ms
                spent_ms += layer_ms if arrived else layer_ms + extra_ms
            layer = group.end
        return spent_ms - self.layers * layer_ms
