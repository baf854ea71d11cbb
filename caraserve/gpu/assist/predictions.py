"""Predicts how long CPU workers take for a layer of a chunk. Predictions affect speed only, never results."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from caraserve.core.machine_profile import ASSUMED_HANDOFF_MS, Profile, Targets
from caraserve.gpu.kernels.work_orders import split_rows
from caraserve.gpu.memory.pass_shape import all_groups
from caraserve.model.plan import DecoderPlan

_UNKNOWN_S = 0.002  # assumed time of a layer's hand-offs where none was measured


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What the workers are asked for in a layer of a chunk. `slice_tokens`: the most tokens of one worker; `has_all`:
    whether the adapter has modules in other groups than the plan's `attention_inputs`."""

    tokens: int
    slice_tokens: int
    rank: int
    has_all: bool


@dataclass(frozen=True, slots=True)
class AssistPredictions:
    """Predicted times of this machine; the defaults are used until it has been measured."""

    layer_s: Callable[[int], float] = lambda tokens: 0.0  # of one layer, by the prefill's number of tokens
    hand_offs_s: Callable[[LayerWork], float] = lambda work: _UNKNOWN_S  # of all groups of a layer
    tokens_per_worker: Callable[[int], int] = lambda rank: 64  # most tokens in a slice, by rank

    def work_of(self, tokens: int, rank: int, has_all: bool, workers: int) -> LayerWork:
        """Returns the work of a layer that so many workers share; without any, that of one."""
        slices = split_rows(tokens, self.tokens_per_worker(rank), max(1, workers))
        return LayerWork(tokens, max(rows for _, rows in slices), rank, has_all)


def measured_predictions(
    profile: Profile, plan: DecoderPlan, delta_itemsize: int, slice_tokens: int | None
) -> AssistPredictions:
    """Returns the predictions of a profile. `delta_itemsize`: bytes of a number of the deltas, which the device reads
    over the link; `slice_tokens`: most tokens in a slice, whatever the rank (None: by the profile).

    An adapter with all modules has a hand-off for each group of a layer; layers are taken to be alike.
    """
    handoff_ms = ASSUMED_HANDOFF_MS if profile.handoff_ms is None else profile.handoff_ms
    of_all, of_inputs = _mean_layer(plan, all_groups(plan)), _mean_layer(plan, plan.attention_inputs)

    def hand_offs_s(work: LayerWork) -> float:
        targets: Targets = "all" if work.has_all else "qkv"
        count, width = of_all if work.has_all else of_inputs
        lora_ms = profile.cpu_lora_ms(work.slice_tokens, work.rank, targets)
        link_s = work.tokens * delta_itemsize * width / profile.link_bytes_per_s
        return (count * handoff_ms + lora_ms) / 1000 + link_s

    return AssistPredictions(
        layer_s=lambda tokens: profile.prefill_ms(tokens, 0) / 1000 / len(plan.layers),
        hand_offs_s=hand_offs_s,
        tokens_per_worker=profile.tokens_per_worker if slice_tokens is None else lambda rank: slice_tokens,
    )


def _mean_layer(plan: DecoderPlan, groups: Collection[int]) -> tuple[float, float]:
    """Returns the mean hand-offs, and columns of deltas, of the layers that have some of these group shapes."""
    found = [wanted for shapes in plan.shapes_of_groups if (wanted := [shape for shape in shapes if shape in groups])]
    widths = [sum(plan.group_shapes[shape].widths) for wanted in found for shape in wanted]
    return len(widths) / max(1, len(found)), sum(widths) / max(1, len(found))
