"""The order in which adapters are copied over the link to the device, and predicted arrivals.

An adapter is copied in layer groups, and a group in spans small enough that a more urgent one never waits long. Spans
that a launched iteration waits for go first and are larger, then loads in the order of their start. Only about 3 ms of
copies are issued ahead, because issued copies cannot be overtaken. `copier.py` issues the spans.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

SPAN_BYTES = 16 << 20  # 0.3 ms of an H200's link
_LEAST_SPAN_BYTES = 256 << 10
_COMMITTED_SPANS = 4  # spans issued as one copy when an iteration waits for them: its launch waits for their issue
_SPAN_S = 0.001  # most of one span, on a link on which `SPAN_BYTES` would take longer
_WINDOW_S = 0.003  # issued ahead: the launching thread sleeps for 1 ms at a time, and then waits for the interpreter


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers [first_layer, end_layer) of an adapter and their bytes [start, end)."""

    first_layer: int
    end_layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, end) of an image to be issued now. `group`: the layer group of which it is the last span, or
    None."""

    slot: int
    start: int
    end: int
    group: int | None


class LoraSource(Enum):
    """The source of a layer's LoRA, as predicted at launch."""

    DEVICE = "device"  # the layer has arrived
    WAIT = "wait"  # the device, after waiting for the layer's copy
    WORKERS = "workers"  # CPU workers, unless the layer has arrived when the device reaches it


def layer_groups(layer_ends: Sequence[int], group_ends: Sequence[int], first_layer: int = 0) -> tuple[LayerGroup, ...]:
    """Returns the layer groups of one image in the order of their copies: from that which begins at `first_layer` to
    the last layer, then those before it. Ends that are repeated or outside of the image's layers are ignored."""
    layers = len(layer_ends)
    ends = sorted({0, first_layer, *(end for end in group_ends if 0 < end < layers), layers})
    groups = [LayerGroup(a, b, layer_ends[a - 1] if a else 0, layer_ends[b - 1]) for a, b in pairwise(ends)]
    first = ends.index(first_layer)
    return (*groups[first:], *groups[:first])


def groups_until(groups: Sequence[LayerGroup], layers: int) -> int:
    """Returns how many groups are copied, in their order, until the layers [0, layers) are there."""
    return max((index + 1 for index, group in enumerate(groups) if group.first_layer < layers), default=0)


@dataclass(slots=True)
class _QueuedLoad:
    slot: int
    number: int
    groups: tuple[LayerGroup, ...]
    issued: int = 0  # bytes of the group `at`
    at: int = 0  # index of the group of the next byte
    committed: int = 0  # number of groups that a launched iteration waits for

    def urgency(self, group: int, *, is_blocked: bool = False) -> tuple[bool, bool, int]:
        """Sort key of a layer group: the least goes first."""
        return (group >= self.committed, is_blocked, self.number)


@dataclass(slots=True)
class LinkQueue:
    """Loads that are not completely issued, and the bytes in flight."""

    bytes_per_s: float
    span_bytes: int = SPAN_BYTES  # most of a span
    emulated_bytes_per_s: float | None = None  # of loads; the answers of CPU workers have the link's own speed
    in_flight: int = 0  # bytes of spans
    answers: int = 0  # bytes that CPU workers will send meanwhile, in the same direction
    _loads: dict[int, _QueuedLoad] = field(default_factory=dict)
    _numbers: int = 0

    def ask(self, slot: int, groups: Sequence[LayerGroup]) -> None:
        """Queues a load; one per adapter slot at a time."""
        if slot in self._loads:
            raise AssertionError(f"adapter slot {slot} is being loaded already")
        self._numbers += 1
        self._loads[slot] = _QueuedLoad(slot, self._numbers, tuple(groups))

    def commit(self, slot: int, layers: int) -> None:
        """Gives priority to the first `layers` layers, because a launched iteration waits for them."""
        if slot in self._loads:
            load = self._loads[slot]
            load.committed = max(load.committed, groups_until(load.groups, layers))

    def cancel(self, slot: int) -> None:
        """Drops the rest of a load; no launched iteration may wait for it."""
        load = self._loads.get(slot)
        if load is not None and load.at < load.committed:
            raise AssertionError(f"adapter slot {slot}: an iteration waits for the load")
        self._loads.pop(slot, None)

    def next(self, blocked: Collection[int] = ()) -> Span | None:
        """Returns the span to be issued now, or None if there is none or enough is in flight. `blocked`: adapter slots
        whose memory is still being read; their copies would delay everything issued after, so they go last."""
        waiting = [(load.urgency(load.at, is_blocked=load.slot in blocked), load) for load in self._loads.values()]
        if not waiting:
            return None
        load = min(waiting, key=lambda entry: entry[0])[1]
        if self.in_flight >= self._window_bytes and load.at >= load.committed:
            return None
        group = load.groups[load.at]
        start = group.start + load.issued
        most_bytes = self._span_bytes * (_COMMITTED_SPANS if load.at < load.committed else 1)
        end = min(group.end, start + most_bytes)
        span = Span(load.slot, start, end, load.at if end == group.end else None)
        load.issued += end - start
        self.in_flight += end - start
        if end == group.end:
            load.issued = 0
            load.at += 1
            if load.at == len(load.groups):
                del self._loads[load.slot]
        return span

    def await_answers(self, num_bytes: int) -> None:
        """Adds bytes that CPU workers will send. They share the link with loads, and delay predicted arrivals."""
        self.answers += num_bytes

    def answered(self, num_bytes: int) -> None:
        """Removes bytes of CPU workers that have come or will not come."""
        self.answers -= num_bytes

    def arrived(self, num_bytes: int) -> None:
        """Records that issued bytes have arrived."""
        self.in_flight -= num_bytes
        if self.in_flight < 0:
            raise AssertionError("more has arrived than was issued")

    def arrival_of_issued(self, now_s: float) -> float:
        """Predicts when everything issued will have arrived."""
        return now_s + self.in_flight / self.load_bytes_per_s + self.answers / self.bytes_per_s

    def arrivals(self, slot: int, now_s: float) -> dict[int, float]:
        """Predicts the arrival of each layer group that is not completely issued, by index."""
        rest = sorted(
            (load.urgency(index), load.slot, index, group.end - group.start - (load.issued if index == load.at else 0))
            for load in self._loads.values()
            for index, group in enumerate(load.groups)
            if index >= load.at
        )
        issued_s, ahead, expected = self.arrival_of_issued(now_s), 0, {}
        for _, owner, index, num_bytes in rest:
            ahead += num_bytes
            if owner == slot:
                expected[index] = issued_s + ahead / self.load_bytes_per_s
        return expected

    @property
    def load_bytes_per_s(self) -> float:
        """The speed of loads."""
        return self.bytes_per_s if self.emulated_bytes_per_s is None else self.emulated_bytes_per_s

    @property
    def _span_bytes(self) -> int:
        return min(self.span_bytes, max(_LEAST_SPAN_BYTES, int(self.load_bytes_per_s * _SPAN_S)))

    @property
    def _window_bytes(self) -> float:
        return max(2.0 * self._span_bytes, self.load_bytes_per_s * _WINDOW_S)


def choose_source(*, arrived: bool, arrives_s: float, use_s: float, stall_s: float | None) -> LoraSource:
    """Chooses the source of a layer's LoRA. `stall_s`: predicted cost of its hand-off to CPU workers; None: no
    worker is free. Predictions affect speed only: weights on the device are always read after their copy."""
    if arrived:
        return LoraSource.DEVICE
    if stall_s is None or arrives_s <= use_s + stall_s:
        return LoraSource.WAIT
    return LoraSource.WORKERS
