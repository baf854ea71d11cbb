"""Issues the link queue's spans on the copy lane, and records which layers have arrived.

The launching thread calls `poll` often (every ms while loads are in progress), `commit` for each arriving adapter of an
iteration before it launches it, and `arrival_of_all` where a lane gets to a layer.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from caraserve.gpu.driver.api import WORD_VALUES, Driver, WordWait, WordWrite
from caraserve.gpu.driver.streams import NOTHING, Lane, Marks, Timelines, at, covers, latest
from caraserve.gpu.memory.link_pacer import LinkPacer
from caraserve.gpu.memory.link_queue import LayerGroup, LinkQueue, Span, groups_until
from caraserve.gpu.memory.padding import RowCopy
from caraserve.gpu.memory.staging_ring import StagingRing

TIMED_BYTES = 64 << 20  # of a copy by which the link is measured: 1.2 ms on an H200
_LEAST_TIMED_BYTES, _TIMED_COPIES = 1 << 20, 4


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """One adapter to be copied, as device addresses. `ready`: addresses of a word per layer, which is set to the load's
    `generation` when the layer has arrived, so that a kernel never takes a previous adapter's layers for these.
    `rows`: the row copies of a layer group in the padded baseline; None: one range of bytes. `arrived` is called when a
    layer group is seen to have arrived, with the time at which it probably did."""

    slot: int
    source: int
    target: int
    num_bytes: int
    groups: tuple[LayerGroup, ...]
    after: Marks  # marks after which the bytes may be written
    ready: Sequence[int] = ()
    rows: Callable[[LayerGroup], Sequence[RowCopy]] | None = None
    arrived: Callable[[LayerGroup, float], None] = lambda group, at_s: None
    issued: Callable[[], None] = lambda: None  # called when the last span has been issued


@dataclass(slots=True)
class _CopyProgress:
    image: CopyRequest
    generation: int
    done: Callable[[], None]
    marks: list[int] = field(default_factory=list)  # of completely issued layer groups, on the copy lane
    last: int = 0  # mark of the last span
    has_begun: bool = False
    seen: int = 0  # layer groups for which `arrived` was called


@dataclass(frozen=True, slots=True)
class _InFlight:
    mark: int  # after the copy
    num_bytes: int
    issued_s: float


class AdapterCopier:
    """Copies adapters. Used by the launching thread only."""

    def __init__(
        self,
        driver: Driver,
        timelines: Timelines,
        queue: LinkQueue,
        arrivals_word: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`arrivals_word`: device address of a word that is 0 now. After each layer group it gets the copy lane's mark
        of it, so that a stream can wait for several groups by one driver call."""
        self._driver, self._timelines, self._queue, self._now = driver, timelines, queue, now
        self.arrivals_word = arrivals_word
        self._stream = timelines.streams[Lane.COPY]
        self._loads: dict[int, _CopyProgress] = {}
        self._in_flight: deque[_InFlight] = deque()  # spans
        self._polled_s = self._free_s = -inf  # the last poll; when the last span that has arrived probably did
        self._generations = 0
        self._pacer: LinkPacer | None = None

    def emulate_link(self, pacer: LinkPacer) -> None:
        """Makes copies issued from now on as slow as those of `pacer`."""
        self._pacer, self._queue.emulated_bytes_per_s = pacer, pacer.bytes_per_s

    def time_link(self, target: int, source: int, num_bytes: int) -> None:
        """Measures the link's speed by copies of `num_bytes` from registered host memory, and lets the queue use it;
        before any load. Fewer than 1 MiB say nothing about it. Raises DriverError."""
        if num_bytes < _LEAST_TIMED_BYTES:
            return
        times_s = []
        for _ in range(_TIMED_COPIES):
            self._timelines.settle(Lane.COPY)
            started_s = time.perf_counter()
            self._driver.copy_to_device(target, source, num_bytes, self._stream)
            self._timelines.settle(Lane.COPY)
            times_s.append(time.perf_counter() - started_s)
        self._queue.bytes_per_s = num_bytes / min(times_s)

    def load(self, image: CopyRequest, done: Callable[[], None]) -> int:
        """Queues a load; `done` is called by `poll` when all of it has arrived. Returns its generation."""
        self._generations = self._generations % (WORD_VALUES - 1) + 1  # never 0, the initial value of the words
        self._queue.ask(image.slot, image.groups)
        self._loads[image.slot] = _CopyProgress(image, self._generations, done)
        return self._generations

    def poll(self) -> None:
        """Records what has arrived, and issues what comes next."""
        began_s = self._now()
        passed = self._timelines.passed()[Lane.COPY]
        arrived_s = self._note_arrivals(passed)
        self._polled_s = began_s
        for load in self._loads.values():
            while load.seen < len(load.marks) and (mark := load.marks[load.seen]) <= passed:
                load.image.arrived(load.image.groups[load.seen], arrived_s[mark])
                load.seen += 1
        complete = [load for load in self._loads.values() if self._is_complete(load) and load.marks[-1] <= passed]
        for load in complete:
            del self._loads[load.image.slot]
            load.done()
        while (span := self._queue.next(self._blocked())) is not None:
            self._issue(span)

    def _note_arrivals(self, passed: int) -> dict[int, float]:
        """Removes what has arrived from the link. Returns by mark when it probably did: as the link's speed says, but
        not before the last poll, which did not see it. This thread may have been busy for many ms since."""
        now_s, arrived_s = self._now(), {}
        while self._in_flight and self._in_flight[0].mark <= passed:
            span = self._in_flight.popleft()
            self._queue.arrived(span.num_bytes)
            expected_s = max(self._free_s, span.issued_s) + span.num_bytes / self._queue.load_bytes_per_s
            self._free_s = arrived_s[span.mark] = min(now_s, max(expected_s, self._polled_s))
        return arrived_s

    def commit(self, slots: Collection[int], layers: int) -> None:
        """Issues what is missing of the first `layers` layers of these slots, for an iteration that is about to be
        launched: a stream can only wait for copies that have been issued."""
        for slot in slots:
            self._queue.commit(slot, layers)
        while any(self._lacks(slot, layers) for slot in slots):
            span = self._queue.next(self._blocked())
            assert span is not None, "a committed load is not in the queue"
            self._issue(span)

    def cancel(self, slot: int) -> Marks:
        """Ends a slot's load, if there is one, without calling `done`. Returns the marks until which issued copies may
        still write the bytes."""
        load = self._loads.pop(slot, None)
        if load is None:
            return NOTHING
        if not self._is_complete(load):
            self._queue.cancel(slot)
        return at(Lane.COPY, load.last)

    def has_arrived(self, slot: int, layer: int) -> bool:
        """True if a layer had arrived when the driver was last polled."""
        marks = self.arrival(slot, layer)
        return marks is not None and covers(self._timelines.known, marks)

    def group_of(self, slot: int, layer: int) -> int | None:
        """Returns the index of the layer group with a layer, or None if there is no load."""
        load = self._loads.get(slot)
        if load is None:
            return None
        return next(
            index for index, group in enumerate(load.image.groups) if group.first_layer <= layer < group.end_layer
        )

    def arrives_at_once(self, slot: int) -> bool:
        """True if no layer of an adapter is of use before all have arrived: the group that begins at layer 0 is the
        only one that had not arrived when the driver was last polled, or all had."""
        load = self._loads.get(slot)
        if load is None:
            return True
        there = sum(covers(self._timelines.known, at(Lane.COPY, mark)) for mark in load.marks)
        return all(group.first_layer == 0 for group in load.image.groups[there:])

    def arrival(self, slot: int, layer: int) -> Marks | None:
        """Returns the marks after which a layer has arrived, or None if its group has not been issued."""
        load = self._loads.get(slot)
        if load is None:
            return NOTHING  # loaded
        group = self.group_of(slot, layer)
        return at(Lane.COPY, load.marks[group]) if group is not None and group < len(load.marks) else None

    def arrival_of_all(self, slots: Collection[int], layer: int) -> Marks:
        """Returns the marks after which a layer of all these adapters has arrived; `commit` must have issued it."""
        marks = [self.arrival(slot, layer) for slot in slots]
        if None in marks:
            raise AssertionError(f"layer {layer} of a slot of {list(slots)} has not been issued: there is no event yet")
        return latest(*(entry for entry in marks if entry is not None))

    def arrival_of_adapters(self, slots: Collection[int]) -> Marks:
        """Returns the marks after which all layers of these adapters have arrived; `commit` must have issued them."""
        loads = [self._loads[slot] for slot in slots if slot in self._loads]
        if not all(map(self._is_complete, loads)):
            raise AssertionError(f"layers of a slot of {list(slots)} have not been issued: there is no event yet")
        return latest(*(at(Lane.COPY, load.marks[-1]) for load in loads))

    def _lacks(self, slot: int, layers: int) -> bool:
        """True if copies of the layers [0, layers) have not been issued."""
        load = self._loads.get(slot)
        return load is not None and len(load.marks) < groups_until(load.image.groups, layers)

    def _blocked(self) -> set[int]:
        """Slots whose memory may still be in use by its previous owner."""
        loads = [load for load in self._loads.values() if not load.has_begun]
        return {load.image.slot for load in loads if not covers(self._timelines.known, load.image.after)}

    def _is_complete(self, load: _CopyProgress) -> bool:
        return len(load.marks) == len(load.image.groups)

    def _issue(self, span: Span) -> None:
        load = self._loads[span.slot]
        image = load.image
        if not load.has_begun:
            load.has_begun = True
            self._timelines.wait(Lane.COPY, image.after)
            if image.rows is not None:
                self._driver.fill(image.target, image.num_bytes, self._stream)
        if image.rows is None:
            if span.end > span.start:
                source, target = image.source + span.start, image.target + span.start
                self._driver.copy_to_device(target, source, span.end - span.start, self._stream)
        elif span.group is not None:
            for rows in image.rows(image.groups[span.group]):
                self._driver.copy_rows_to_device(
                    image.target + rows.target,
                    rows.target_pitch,
                    image.source + rows.source,
                    rows.source_pitch,
                    rows.width,
                    rows.rows,
                    self._stream,
                )
        operations: list[WordWrite | WordWait] = []
        if self._pacer is not None:
            operations.append(self._pacer.after(span.end - span.start))
        if span.group is not None:
            group, mark = image.groups[span.group], self._timelines.next(Lane.COPY)[Lane.COPY]
            ready = image.ready[group.first_layer : group.end_layer]
            operations += [WordWrite(word, load.generation) for word in ready]
            operations.append(WordWrite(self.arrivals_word, mark % WORD_VALUES))
        if operations:
            self._driver.word_operations(self._stream, operations)
        load.last = self._timelines.mark(Lane.COPY)
        self._in_flight.append(_InFlight(load.last, span.end - span.start, self._now()))
        if span.group is not None:
            load.marks.append(load.last)
            if self._is_complete(load):
                image.issued()


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """The means by which all device code issues work: driver, streams, staging memory, link queue. Used by the
    launching thread only. The assist lane has a ring of its own: while it waits for CPU workers, a full ring would stop
    the compute lane, too."""

    driver: Driver
    timelines: Timelines
    ring: StagingRing
    assist_ring: StagingRing
    queue: LinkQueue
    copier: AdapterCopier
    arrivals: Tensor  # the copier's word
