"""The order of stream operations: of moves in the pool, of an iteration, of an assisted prefill.

The backend's launching thread calls these with the kernels of a pass (`Pass`, which knows its batch); they issue and
return at once. Whatever another lane must not overtake is said by marks (timeline.py); a pass that may have to wait for
CPU workers has a lane of its own, so that decoding goes on, and device memory of its own for its batch.
"""

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from caraserve.core.lora_layout import GROUPS
from caraserve.gpu.assist.handshake import HandOffFlags, SyncSlot
from caraserve.gpu.driver.api import Driver, Graph, Stream
from caraserve.gpu.driver.streams import Lane, Marks, Timelines, at
from caraserve.gpu.memory.copier import AdapterCopier
from caraserve.gpu.memory.link_queue import LoraSource
from caraserve.gpu.memory.pool import Grant, Move

ASSISTED_CHUNK_TOKENS = 128  # a larger GEMM's tiles hold multiprocessors for so long that decoding shows it


class Pass(Protocol):
    """The kernels of one pass over the model. A group is an index into layout.GROUPS: modules that read the same x."""

    def begin(self, stream: Stream) -> None:
        """Embeds the tokens."""

    def before(self, layer: int, group: int, stream: Stream) -> None:
        """All that leads to a group's x: norm, attention, activation."""

    def project(self, layer: int, group: int, stream: Stream) -> None:
        """The base model's part."""

    def lora(self, layer: int, group: int, stream: Stream) -> None:
        """Adds the adapters' part from weights on the device; nothing for a batch without."""

    def publish(self, layer: int, group: int, hand_off: "HandOff", stream: Stream) -> None:
        """Decides once, for all blocks, whether the layer has arrived: its ready word is `hand_off.ready_generation`.
        If not, copies x to the workers and sets x_flag; if so, or if a worker is missing, sets y_flag. Flags come after
        what they stand for."""

    def add(self, layer: int, group: int, hand_off: "HandOff", stream: Stream) -> None:
        """Adds what the workers made of x, or what weights on the device do, as `publish` decided. Nothing, if the
        book's status says that the chunk was given up; then it raises the pass's error word."""

    def end(self, stream: Stream) -> None:
        """Samples; the results are left in the batch."""


@dataclass(frozen=True, slots=True)
class HandOff:
    """What kernels are told of one hand-off; addresses are the device's."""

    index: int  # for what the kernels keep by entry
    x_flag: int
    y_flag: int
    status: int
    generation: int
    ready: int
    ready_generation: int


def chunk_ends(start: int, end: int) -> Iterator[int]:
    """Where the chunks of an assisted prefill of positions [start, end) end."""
    yield from range(start + ASSISTED_CHUNK_TOKENS, end, ASSISTED_CHUNK_TOKENS)
    if end > start:
        yield end


def issue_moves(
    driver: Driver, timelines: Timelines, base: int, grant: Grant, relocate: Callable[[Move, Stream], None]
) -> None:
    """Does a grant's moves between two iterations. To be called right after the pool has granted, which was told
    `timelines.next(Lane.COMPUTE)`. `relocate` makes the tables point to an adapter's new place, in stream order."""
    if not grant.moves:
        return
    stream = timelines.streams[Lane.COMPUTE]
    timelines.wait(Lane.COMPUTE, grant.moves_after)
    for move in grant.moves:
        for target, source, num_bytes in move.pieces():
            driver.copy_on_device(base + target, base + source, num_bytes, stream)
        relocate(move, stream)
    timelines.mark(Lane.COMPUTE)


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A captured pass. `gate`: the word by which a gated one waits for layers; None: it waits for nothing."""

    graph: Graph
    gate: int | None


def issue_pass(
    work: Pass,
    stream: Stream,
    layers: int,
    before_layer: Callable[[int], None] = lambda layer: None,
) -> None:
    """All layers of a pass, one after another; run or captured."""
    work.begin(stream)
    for layer in range(layers):
        before_layer(layer)
        for group in range(len(GROUPS)):
            work.before(layer, group, stream)
            work.project(layer, group, stream)
            work.lora(layer, group, stream)
    work.end(stream)


def capture_pass(driver: Driver, work: Pass, stream: Stream, layers: int, gate: int | None) -> CapturedPass:
    """A graph of a pass. A gated one gets to layer l when the word at `gate` has reached l + 1. Raises DriverError,
    with no capture under way, when the driver refuses something of it."""

    def wait(layer: int) -> None:
        if gate is not None:
            driver.wait_value(stream, gate, layer + 1)

    driver.begin_capture(stream)
    try:
        issue_pass(work, stream, layers, wait)
    except BaseException:
        driver.abandon_capture(stream)
        raise
    return CapturedPass(driver.end_capture(stream), gate)


class IterationLane:
    """Launches iterations, in order."""

    def __init__(self, driver: Driver, timelines: Timelines, copier: AdapterCopier, layers: int) -> None:
        self._driver, self._timelines, self._copier, self._layers = driver, timelines, copier, layers
        self._stream = timelines.streams[Lane.COMPUTE]

    def launch(
        self, metadata: Callable[[Stream], None], work: Pass | CapturedPass, slots: Collection[int], after: Marks
    ) -> int:
        """Issues one iteration and returns its mark. `metadata` issues the copies of what kernels read of the batch; a
        replay finds it where it was captured. `slots`: adapters of its rows that may not have arrived. `after`: other
        lanes' work that wrote what it reads, or read what it writes."""
        self._copier.commit(slots, self._layers)
        self._timelines.wait(Lane.COMPUTE, after)
        metadata(self._stream)
        if isinstance(work, CapturedPass):
            if work.gate is not None:
                self._open(work.gate, slots)
            else:
                self._timelines.wait(Lane.COMPUTE, self._copier.arrival_of_all(slots, self._layers - 1))
            self._driver.launch_graph(work.graph, self._stream)
        else:
            issue_pass(
                work,
                self._stream,
                self._layers,
                lambda layer: self._timelines.wait(Lane.COMPUTE, self._copier.arrival_of_all(slots, layer)),
            )
        return self._timelines.mark(Lane.COMPUTE)

    def _open(self, gate: int, slots: Collection[int]) -> None:
        """Has the gate lane let the graph through, group by group. It begins after the reset; the next reset comes
        after the graph, which ends after the last opening: none is lost, and none is for another iteration."""
        self._driver.write_value(self._stream, gate, 0)
        reset = self._timelines.mark(Lane.COMPUTE)
        self._timelines.wait(Lane.GATE, at(Lane.COMPUTE, reset))
        gate_stream = self._timelines.streams[Lane.GATE]
        seen = self._copier.arrival_of_all(slots, 0)
        self._timelines.wait(Lane.GATE, seen)
        for layer in range(1, self._layers):
            marks = self._copier.arrival_of_all(slots, layer)
            if marks != seen:
                self._driver.write_value(gate_stream, gate, layer)
                self._timelines.wait(Lane.GATE, marks)
                seen = marks
        self._driver.write_value(gate_stream, gate, self._layers)


@dataclass(frozen=True, slots=True)
class AssistedChunk:
    """A slice of one request's prompt, of at most `ASSISTED_CHUNK_TOKENS`. `groups`: of each layer, those that the
    adapter has; `sources`: whence each layer comes; `ready`: addresses of the layers' ready words."""

    slot: int
    sync_slot: SyncSlot
    sources: Sequence[LoraSource]
    groups: Sequence[Collection[int]]
    ready: Sequence[int]
    ready_generation: int

    def hand_offs(self) -> Iterator[tuple[int, int, int, HandOffFlags]]:
        """(layer, group, index, entry) of all that workers may be asked for, in the device's order."""
        for layer, source in enumerate(self.sources):
            for group in sorted(self.groups[layer]) if source is LoraSource.WORKERS else ():
                index = layer * len(GROUPS) + group
                yield layer, group, index, self.sync_slot.flags[index]


class AssistLane:
    """Launches chunks of assisted prefills, when shared memory says what workers are to do and the watchdog knows."""

    def __init__(self, driver: Driver, timelines: Timelines, copier: AdapterCopier, device_words: int) -> None:
        """`device_words`: the device's address of the memory that books are in."""
        self._driver, self._timelines, self._copier, self._words = driver, timelines, copier, device_words
        self._stream = timelines.streams[Lane.ASSIST]

    def issue(
        self, metadata: Callable[[Stream], None], work: Pass, chunk: AssistedChunk, after: Marks
    ) -> Generator[None, None, int]:
        """Issues a chunk, a layer at a time, so that what is more urgent can be issued on other lanes in between, and
        returns its mark; arguments as those of `IterationLane.launch`. The pool must hold the slot until then.

        All that is missing of the adapter goes to the copy lane before: this lane may wait for it, and who issues here
        may have to wait for this lane."""
        self._copier.commit([chunk.slot], len(chunk.sources))
        asked = {
            (layer, group): self._told(chunk, layer, index, flags) for layer, group, index, flags in chunk.hand_offs()
        }
        stream = self._stream
        self._timelines.wait(Lane.ASSIST, after)
        metadata(stream)
        work.begin(stream)
        for layer, source in enumerate(chunk.sources):
            if source is not LoraSource.WORKERS:
                self._timelines.wait(Lane.ASSIST, self._copier.arrival_of_all([chunk.slot], layer))
            for group in range(len(GROUPS)):
                self._issue_group(work, layer, group, asked, is_adapted=group in chunk.groups[layer])
            yield
        work.end(stream)
        return self._timelines.mark(Lane.ASSIST)

    def _told(self, chunk: AssistedChunk, layer: int, index: int, flags: HandOffFlags) -> HandOff:
        return HandOff(
            index=index,
            x_flag=self._words + flags.x_flag,
            y_flag=self._words + flags.y_flag,
            status=self._words + chunk.sync_slot.status,
            generation=chunk.sync_slot.generation,
            ready=chunk.ready[layer],
            ready_generation=chunk.ready_generation,
        )

    def _issue_group(
        self, work: Pass, layer: int, group: int, asked: Mapping[tuple[int, int], HandOff], *, is_adapted: bool
    ) -> None:
        """The base model's part lies between publishing and waiting, so that the workers compute beside it."""
        hand_off = asked.get((layer, group))
        work.before(layer, group, self._stream)
        if hand_off is not None:
            work.publish(layer, group, hand_off, self._stream)
        work.project(layer, group, self._stream)
        if hand_off is not None:
            self._driver.wait_value(self._stream, hand_off.y_flag, hand_off.generation)
            work.add(layer, group, hand_off, self._stream)
        elif is_adapted:
            work.lora(layer, group, self._stream)
