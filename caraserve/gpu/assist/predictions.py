"""Predicts how long CPU workers take for a layer of a chunk. Predictions affect speed only, never results."""

from collections.abc import Callable
from dataclasses import dataclass

from caraserve.core.lora_layout import GROUPS, QKV
from caraserve.core.machine_profile import ASSUMED_HANDOFF_MS, Profile, Targets
from caraserve.gpu.kernels.work_orders import split_rows
from caraserve.model.spec import ModelSpec

_UNKNOWN_S = 0.002  # assumed time of a layer's hand-offs where none was measured


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What the workers are asked for in a layer of a chunk. `slice_tokens`: the most tokens of one worker; `has_all`:
    whether the adapter has modules besides q, k and v."""

    tokens: int
    slice_tokens: int
    rank: int
    has_all: bool


@dataclass(frozen=True, slots=True)
class AssistPredictions:
    """Predicted times of this machine; the defaults are used until it has been measured."""

    layer_s: Callable[[int], float] = lambda tokens: 0.0  # of one layer, by the prefill's number of tokens
    hand_offs_s: Callable[[LayerWork], float] = lambda work: _UNKNOWN_S  # of all module groups of a layer
    tokens_per_worker: Callable[[int], int] = lambda rank: 64  # most tokens in a slice, by rank

    def work_of(self, tokens: int, rank: int, has_all: bool, workers: int) -> LayerWork:
        """Returns the work of a layer that so many workers share; without any, that of one."""
        slices = split_rows(tokens, self.tokens_per_worker(rank), max(1, workers))
        return LayerWork(tokens, max(rows for _, rows in slices), rank, has_all)


def measured_predictions(
    profile: Profile, spec: ModelSpec, delta_itemsize: int, slice_tokens: int | None
) -> AssistPredictions:
    """Returns the predictions of a profile. `delta_itemsize`: bytes of a number of the deltas, which the device reads
    over the link; `slice_tokens`: most tokens in a slice, whatever the rank (None: by the profile).

    An adapter with all modules has a hand-off for each module group of a layer.
    """
    handoff_ms = ASSUMED_HANDOFF_MS if profile.handoff_ms is None else profile.handoff_ms
    widths = [sum(spec.site_shape(site)[1] for site in group) for group in GROUPS]

    def hand_offs_s(work: LayerWork) -> float:
        targets: Targets = "all" if work.has_all else "qkv"
        count, width = (len(GROUPS), sum(widths)) if work.has_all else (1, widths[QKV])
        lora_ms = profile.cpu_lora_ms(work.slice_tokens, work.rank, targets)
        link_s = work.tokens * delta_itemsize * width / profile.link_bytes_per_s
        return (count * handoff_ms + lora_ms) / 1000 + link_s

    return AssistPredictions(
        layer_s=lambda tokens: profile.prefill_ms(tokens, 0) / 1000 / spec.layers,
        hand_offs_s=hand_offs_s,
        tokens_per_worker=profile.tokens_per_worker if slice_tokens is None else lambda rank: slice_tokens,
    )
