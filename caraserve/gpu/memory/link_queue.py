"""What goes over the link to the device next, and when it will be there: one queue for all adapters. Pure.

An adapter goes in groups of layers, a group in pieces small enough that one which is needed sooner never waits long.
What a launched iteration waits for goes first, then loads in the order of asking. Only a little is issued ahead,
because what has been issued cannot be overtaken. `copier.py` issues, and says what arrived.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

PIECE_BYTES = 16 << 20  # 0.3 ms of an H200's link
_WINDOW_S = 0.001  # issued ahead: what the thread that issues may sleep


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers [first_layer, end_layer) of an adapter and their bytes [start, end)."""

    first_layer: int
    end_layer: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, end) of an image to be issued now. `group`: which arrives with it, if it is the last of one."""

    slot: int
    start: int
    end: int
    group: int | None


class LoraSource(Enum):
    """Whence a layer's LoRA comes, as far as it can be said at launch."""

    DEVICE = "device"  # it has arrived
    WAIT = "wait"  # from the device, behind its event
    WORKERS = "workers"  # unless it has arrived when the device gets there


def layer_groups(layer_ends: Sequence[int], group_ends: Sequence[int]) -> tuple[LayerGroup, ...]:
    """The groups of one image; ends that are no layers, or twice there, count for nothing."""
    layers, ends = len(layer_ends), [0]
    ends += sorted({end for end in group_ends if 0 < end < layers})
    bounds = zip(ends, [*ends[1:], layers], strict=True)
    return tuple(LayerGroup(a, b, layer_ends[a - 1] if a else 0, layer_ends[b - 1]) for a, b in bounds)


@dataclass(slots=True)
class _QueuedLoad:
    slot: int
    number: int
    groups: tuple[LayerGroup, ...]
    issued: int = 0  # bytes
    at: int = 0  # the group that the next byte belongs to
    committed: int = 0  # groups that a launched iteration waits for

    def urgency(self, group: int, *, is_blocked: bool = False) -> tuple[bool, bool, int]:
        """What goes first is least."""
        return (group >= self.committed, is_blocked, self.number)


@dataclass(slots=True)
class LinkQueue:
    """Loads that have not been issued whole, and how much is on its way."""

    bytes_per_s: float
    piece_bytes: int = PIECE_BYTES
    in_flight: int = 0  # bytes of pieces
    answers: int = 0  # bytes that come from CPU workers meanwhile; what goes to them takes the other direction
    _loads: dict[int, _QueuedLoad] = field(default_factory=dict)
    _numbers: int = 0

    def ask(self, slot: int, groups: Sequence[LayerGroup]) -> None:
        """Queues a load. One per adapter slot."""
        if slot in self._loads:
            raise AssertionError(f"adapter slot {slot} is being loaded already")
        self._numbers += 1
        self._loads[slot] = _QueuedLoad(slot, self._numbers, tuple(groups))

    def commit(self, slot: int, layers: int) -> None:
        """An iteration is being launched that will wait for the first `layers` layers: their groups go now."""
        if slot in self._loads:
            load = self._loads[slot]
            load.committed = max(load.committed, sum(group.first_layer < layers for group in load.groups))

    def cancel(self, slot: int) -> None:
        """The rest of a load is not wanted. Nobody may be waiting for it."""
        load = self._loads.get(slot)
        if load is not None and load.at < load.committed:
            raise AssertionError(f"adapter slot {slot}: an iteration waits for the load")
        self._loads.pop(slot, None)

    def next(self, blocked: Collection[int] = ()) -> Piece | None:
        """The piece to be issued now; None when there is none, or enough is on its way. `blocked`: adapter slots whose
        bytes are being read still; theirs would hold up all that is issued after, so they go last."""
        waiting = [(load.urgency(load.at, is_blocked=load.slot in blocked), load) for load in self._loads.values()]
        if not waiting:
            return None
        load = min(waiting, key=lambda entry: entry[0])[1]
        if self.in_flight >= self._window_bytes and load.at >= load.committed:
            return None
        group = load.groups[load.at]
        start = max(load.issued, group.start)
        end = min(group.end, start + self.piece_bytes)
        piece = Piece(load.slot, start, end, load.at if end == group.end else None)
        load.issued = end
        self.in_flight += end - start
        if end == group.end:
            load.at += 1
            if load.at == len(load.groups):
                del self._loads[load.slot]
        return piece

    def await_answers(self, num_bytes: int) -> None:
        """CPU workers are going to answer: their answers share the link with loads, and hold none of them back."""
        self.answers += num_bytes

    def answered(self, num_bytes: int) -> None:
        """Answers have come, or never will."""
        self.answers -= num_bytes

    def arrived(self, num_bytes: int) -> None:
        """Bytes issued before have arrived."""
        self.in_flight -= num_bytes
        if self.in_flight < 0:
            raise AssertionError("more has arrived than was issued")

    def arrival_of_issued(self, now_s: float) -> float:
        """When all that has been issued is expected."""
        return now_s + (self.in_flight + self.answers) / self.bytes_per_s

    def arrivals(self, slot: int, now_s: float) -> dict[int, float]:
        """When each group that has not been issued whole is expected, by its index."""
        rest = sorted(
            (load.urgency(index), load.slot, index, load.groups[index].end - max(load.issued, load.groups[index].start))
            for load in self._loads.values()
            for index in range(load.at, len(load.groups))
        )
        issued_s, ahead, expected = self.arrival_of_issued(now_s), 0, {}
        for _, owner, index, num_bytes in rest:
            ahead += num_bytes
            if owner == slot:
                expected[index] = issued_s + ahead / self.bytes_per_s
        return expected

    @property
    def _window_bytes(self) -> float:
        return max(2.0 * self.piece_bytes, self.bytes_per_s * _WINDOW_S)


def choose_source(*, arrived: bool, arrives_s: float, use_s: float, stall_s: float | None) -> LoraSource:
    """What to launch for a layer. `stall_s`: what its hand-off to CPU workers would cost; None: they cannot help.

    Only how well it goes depends on the prediction: whatever is taken from the device sits behind its event."""
    if arrived:
        return LoraSource.DEVICE
    if stall_s is None or arrives_s <= use_s + stall_s:
        return LoraSource.WAIT
    return LoraSource.WORKERS
