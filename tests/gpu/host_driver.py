"""Emulates the driver of a device on this machine's memory: streams whose operations run while a thread waits for them.

Only events and words order work of different streams. A seed chooses the order; a stream can be made to run `last`,
only when no other can, so that no test passes because that stream happened to run early. The target of a copy is NaN in
every dtype during the copy, and so is the source of a move after it.

A driver that `finds_races` checks all orders besides the one that it runs: each access must be ordered after every
conflicting one by stream order, events, words or what the host has observed. It is for tests of one thread.
"""

import ctypes
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from caraserve.gpu.driver.api import DriverError, Event, Graph, Stream, WordWait, WordWrite, has_reached
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import Lane

_STUCK_S = 60.0
_LOOK_S = 0.0002  # between two reads of words that a worker in another process will write
_AHEAD = 40  # most operations that a stream may run during one query of another stream
_NO_NUMBER = 0xFF  # NaN, if every byte has this value
_HOST = 0  # the host's thread, as a stream
BEFORE = dict.fromkeys(
    ("bgmv_expand", "bgmv_expand_apart"), "bgmv_shrink"
)  # by kernel that begins early: the one beside which it may run

Clock = dict[int, int]  # by stream: number of its operations that come before
Span = tuple[int, int]  # addresses [start, end)


class Race(AssertionError):
    """Two operations access the same bytes, one writes, and nothing orders them."""


class Stuck(AssertionError):
    """Operations are left and none can ever run."""


class WaitBeforeWrite(AssertionError):
    """A wait was issued for a word of device memory before the write that ends it. If both streams share a hardware
    queue, the write never runs."""


@dataclass(slots=True)
class Operation:
    """One operation of a stream, such as a kernel. `begin`: a step before `run`, between which other operations may
    run; returns the condition for `run`. `joins`: clocks that it comes after, once it is ready; `leaves`: receives the
    clock of its end."""

    name: str
    run: Callable[[], None] = lambda: None
    ready: Callable[[], bool] = lambda: True
    begin: Callable[[], Callable[[], bool]] | None = None
    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()
    joins: Callable[[], Sequence[Clock]] = tuple
    leaves: Callable[[Clock], None] = lambda clock: None
    issued: Clock = field(default_factory=dict)  # clock of the host


@dataclass(slots=True)
class _Recorded:
    """One record of an event."""

    has_run: bool = False
    clock: Clock = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    number: int
    waiting: deque[Operation] = field(default_factory=deque)
    is_over: Callable[[], bool] | None = None  # condition of the operation that has begun
    clock: Clock = field(default_factory=dict)

    @property
    def is_able(self) -> bool:
        """True if the stream can take a step."""
        if not self.waiting:
            return False
        return self.waiting[0].ready() if self.is_over is None else self.is_over()


Records = dict[int, _Recorded]  # of one launch of a graph, by the number of the record in the graph


@dataclass(slots=True)
class _Capture:
    """Operations of a graph with their streams, each made again for every launch, and what is checked or noted of words
    at each launch."""

    stream: Stream
    operations: list[tuple[Stream, Callable[[Records], Operation]]] = field(default_factory=list)
    of_words: list[Callable[[], None]] = field(default_factory=list)
    records: dict[Event, tuple[int, Stream]] = field(default_factory=dict)  # newest of each event: its number, stream
    unjoined: dict[Stream, int] = field(default_factory=dict)  # newest operation of each, unless it is waited for


class HostDriver:
    """Implements the Driver protocol. Operations run on the thread that waits; a failing one fails the driver call."""

    def __init__(
        self, seed: int = 0, last: Lane | None = None, memory_bytes: int = 1 << 30, *, finds_races: bool = False
    ) -> None:
        self._random, self._last, self._memory_bytes, self._finds_races = Random(seed), last, memory_bytes, finds_races
        self._lock = threading.Condition(threading.RLock())
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Recorded] = {}
        self._captures: dict[Stream, _Capture] = {}  # in progress
        self._graphs: dict[Graph, _Capture] = {}
        self._written: dict[int, int] = {}  # by address of a word: the value of the write that was issued last
        self._registered: dict[int, int] = {}  # first address of host memory: its bytes
        self._released: dict[int, Clock] = {}  # by word: clock of the last write
        self._host: Clock = {}
        self._accesses: list[tuple[Span, bool, int, int, str]] = []
        self._next = _HOST
        self._link_free_s = 0.0
        self._newest: dict[Stream, str] = {}  # by stream: the raw kernel that was issued last, "" for anything else
        self.log: list[str] = []  # operations that have run
        self.failed = False  # set by a test: the device has failed
        self.held: set[Lane] = set()  # set by a test: lanes that do not run
        self.link_bytes_per_s: float | None = None  # set by a test: bandwidth of the copy lane; None: unlimited
        self.replays = 0

    # --- the protocol ---

    def create_stream(self, priority: int) -> Stream:
        number = self._number()
        self._streams[number] = _Stream(number)
        return Stream(number)

    def destroy_stream(self, stream: Stream) -> None:
        with self._lock:
            assert self.failed or not self._streams[stream].waiting, "a stream is destroyed before everything has run"
            del self._streams[stream]

    def create_event(self) -> Event:
        number = self._number()
        self._events[number] = _Recorded(has_run=True)
        return Event(number)

    def record(self, event: Event, stream: Stream) -> None:
        if capture := self._captures.get(stream):
            number = len(capture.operations)
            capture.records[event] = number, stream
            self._capture(stream, lambda records: _record(records.setdefault(number, _Recorded())))
            return
        recorded = _Recorded()
        with self._lock:
            self._events[event] = recorded
        self.issue(stream, _record(recorded))

    def wait_event(self, stream: Stream, event: Event) -> None:
        """A stream that waits for an event of a capture is captured, too."""
        capture = next((each for each in self._captures.values() if event in each.records), None)
        if capture is None:
            self.issue(stream, _wait(self._events[event]))
            return
        number, other = capture.records[event]
        assert self._captures.setdefault(stream, capture) is capture, "a stream waits for another graph's event"
        if capture.unjoined.get(other) == number:
            del capture.unjoined[other]
        self._capture(stream, lambda records: _wait(records.setdefault(number, _Recorded())))

    def is_done(self, event: Event) -> bool:
        with self._lock:
            self._check_device()
            for _ in range(0 if self._finds_races else self._random.randrange(_AHEAD)):
                self.step()
            return self._observed(self._events[event])

    def synchronize(self, event: Event) -> None:
        until_s = time.monotonic() + _STUCK_S
        recorded = self._events[event]
        while not self._observed(recorded):
            with self._lock:
                self._check_device()
                if not self.step():
                    if self._finds_races:
                        raise Stuck("the host waits forever")
                    self._lock.wait(_LOOK_S)
            if time.monotonic() > until_s:
                raise DriverError("nothing moves any more")

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy("to device", [(target, source, num_bytes)], stream)

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        parts = [(target + row * target_pitch, source + row * source_pitch, width) for row in range(rows)]
        self._copy("rows to device", parts, stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy("to host", [(target, source, num_bytes)], stream)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        assert target + num_bytes <= source or source + num_bytes <= target, "a copy overlaps itself"

        def run() -> None:
            ctypes.memmove(target, source, num_bytes)
            ctypes.memset(source, _NO_NUMBER, num_bytes)

        spans = [(source, source + num_bytes), (target, target + num_bytes)]
        self.issue(stream, Operation("on device", run, reads=spans[:1], writes=spans[1:]))

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        def run() -> None:
            ctypes.memset(target, 0, num_bytes)

        self.issue(stream, Operation("fill", run, writes=[(target, target + num_bytes)]))

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        def leave(clock: Clock) -> None:
            self._released[address] = clock

        def note() -> None:
            self._written[address] = value

        self.issue(stream, Operation(f"write {value}", lambda: set_word(address, value), leaves=leave))
        self._at_launch(stream, note)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        self._at_launch(stream, lambda: self.check_issued(address, value))
        self.issue(
            stream,
            Operation(
                f"wait for {value}",
                ready=lambda: has_reached(word(address), value),
                joins=lambda: [self._released.get(address, {})],
            ),
        )

    def word_operations(self, stream: Stream, operations: Sequence[WordWrite | WordWait]) -> None:
        for each in operations:
            issue = self.write_value if isinstance(each, WordWrite) else self.wait_value
            issue(stream, each.address, each.value)

    def register_host(self, host_address: int, num_bytes: int) -> int:
        self._registered[host_address] = num_bytes
        return host_address

    def unregister_host(self, host_address: int) -> None:
        del self._registered[host_address]

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self.issue(stream, Operation("kernels", issue))

    def begin_capture(self, stream: Stream) -> None:
        self._captures[stream] = _Capture(stream)

    def end_capture(self, stream: Stream) -> Graph:
        graph, capture = Graph(self._number()), self._captures[stream]
        self.abandon_capture(stream)
        if capture.unjoined.keys() - {stream}:
            raise DriverError("a stream of the capture has not been waited for")
        self._graphs[graph] = capture
        return graph

    def abandon_capture(self, stream: Stream) -> None:
        ended = self._captures[stream]
        self._captures = {each: capture for each, capture in self._captures.items() if capture is not ended}

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        self.replays += 1
        for act in self._graphs[graph].of_words:
            act()
        records: Records = {}
        for other, operation in self._graphs[graph].operations:
            self.issue(stream if other == self._graphs[graph].stream else other, operation(records))

    def destroy_graph(self, graph: Graph) -> None:
        del self._graphs[graph]

    def free_bytes(self) -> int:
        return self._memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes

    # --- what tests do ---

    def issue(self, stream: Stream, operation: Operation) -> None:
        """Appends an operation, for example a kernel, to a stream, or to the graph that is being captured on it."""
        self._newest[stream] = ""
        if self.captures(stream):
            self._capture(stream, lambda records: replace(operation))
            return
        with self._lock:
            self._check_device()
            operation.issued = dict(self._host)
            self._streams[stream].waiting.append(operation)
            self._lock.notify_all()

    def issue_kernel(self, launch: Launch, stream: Stream, run: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Issues a raw kernel that waits for a condition while other streams run."""
        before = self._newest.get(stream, "")
        assert not launch.begins_early or before == BEFORE[launch.kernel], f"{launch.kernel} begins beside {before!r}"
        self.issue(stream, Operation(launch.kernel, run, ready))
        self._newest[stream] = launch.kernel

    def captures(self, stream: Stream) -> bool:
        """True while operations issued on the stream go into a graph."""
        return stream in self._captures

    def step(self) -> bool:
        """Begins or ends one operation of some stream; returns False if none can."""
        held = [self._of(lane) for lane in self.held]
        able = [stream for stream in self._streams.values() if stream not in held and stream.is_able]
        if not able:
            return False
        first = [stream for stream in able if self._last is None or stream is not self._of(self._last)]
        stream = self._random.choice(first or able)
        operation = stream.waiting[0]
        if stream.is_over is None and self._begin(stream, operation):
            return True
        stream.is_over = None
        stream.waiting.popleft()
        try:
            operation.run()
        except Exception as error:
            traceback.print_exc()
            raise DriverError(f"an operation failed: {error}") from error
        operation.leaves(dict(stream.clock))
        self.log.append(operation.name)
        return True

    def run_all(self) -> None:
        """Steps until nothing is left. Raises Stuck if operations are left that cannot run."""
        while self.step():
            pass
        if left := self.left():
            raise Stuck(f"{left} operations wait forever")

    def left(self, stream: Stream | None = None) -> int:
        """Returns the number of operations of a stream, or of all, that have not run."""
        with self._lock:
            streams = self._streams.values() if stream is None else [self._streams[stream]]
            return sum(len(each.waiting) for each in streams)

    def check_issued(self, address: int, value: int) -> None:
        """Raises WaitBeforeWrite if a word of device memory gets a value by no write that was issued. Words of
        registered memory are written by the host and by CPU workers, too, so waits for them may come first."""
        if any(start <= address < start + num_bytes for start, num_bytes in self._registered.items()):
            return
        if address not in self._written or not has_reached(self._written[address], value):
            last = self._written.get(address, "nothing")
            raise WaitBeforeWrite(f"a stream waits for {value}, and the last write that was issued is of {last}")

    def link_time(self, stream: Stream, num_bytes: int) -> Callable[[], bool]:
        """Returns a function that returns whether so many bytes, sent over the link from now on, have arrived."""
        if self.link_bytes_per_s is None or not self.is_lane(stream, Lane.COPY):
            return lambda: True
        until_s = max(self._link_free_s, time.monotonic()) + num_bytes / self.link_bytes_per_s
        self._link_free_s = until_s
        return lambda: time.monotonic() >= until_s

    def is_lane(self, stream: Stream, lane: Lane) -> bool:
        return self._streams[stream] is self._of(lane)

    # --- inside ---

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _capture(self, stream: Stream, operation: Callable[[Records], Operation]) -> None:
        """Adds an operation to the graph that is being captured on a stream."""
        capture = self._captures[stream]
        capture.unjoined[stream] = len(capture.operations)
        capture.operations.append((stream, operation))

    def _at_launch(self, stream: Stream, act: Callable[[], None]) -> None:
        """Acts now, or at each launch of the graph that is being captured on the stream."""
        if self.captures(stream):
            self._captures[stream].of_words.append(act)
        else:
            act()

    def _copy(self, name: str, parts: list[tuple[int, int, int]], stream: Stream) -> None:
        """Issues copies; `parts` are (target, source, bytes)."""

        def begin() -> Callable[[], bool]:
            for target, _, num_bytes in parts:
                ctypes.memset(target, _NO_NUMBER, num_bytes)
            return self.link_time(stream, sum(num_bytes for _, _, num_bytes in parts))

        def run() -> None:
            for part in parts:
                ctypes.memmove(*part)

        reads = [(source, source + num_bytes) for _, source, num_bytes in parts]
        writes = [(target, target + num_bytes) for target, _, num_bytes in parts]
        self.issue(stream, Operation(name, run, begin=begin, reads=reads, writes=writes))

    def _of(self, lane: Lane) -> _Stream | None:
        """Returns a lane's stream, None before it has one; of the streams left, the lanes' are created first, in the
        order of the lanes."""
        return next(islice(self._streams.values(), lane, None), None)

    def _check_device(self) -> None:
        if self.failed:
            raise DriverError("the device has failed")

    def _begin(self, stream: _Stream, operation: Operation) -> bool:
        """Begins an operation. Returns whether others may run before its end."""
        if self._finds_races:
            for clock in (operation.issued, *operation.joins()):
                _join(stream.clock, clock)
            stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
            for spans, writes in ((operation.reads, False), (operation.writes, True)):
                for span in spans:
                    self._check(span, stream, operation.name, writes=writes)
        stream.is_over = (lambda: True) if operation.begin is None else operation.begin()
        return operation.begin is not None or self._finds_races

    def _observed(self, recorded: _Recorded) -> bool:
        """Returns whether a record has run, which the host knows from now on."""
        if recorded.has_run:
            _join(self._host, recorded.clock)
        return recorded.has_run

    def _check(self, span: Span, stream: _Stream, name: str, *, writes: bool) -> None:
        """Raises Race if an earlier access of these bytes is not ordered before this one."""
        start, end = span
        kept = []
        for access in self._accesses:
            (low, high), wrote, other, at, what = access
            if low < end and start < high and (wrote or writes) and at > stream.clock.get(other, 0):
                raise Race(f"{name} and {what} touch [{max(low, start)}, {min(high, end)}) at the same time")
            # Later operations need no comparison with those that this one covers and is ordered after.
            if not (writes and start <= low and high <= end):
                kept.append(access)
        self._accesses = [*kept, (span, writes, stream.number, stream.clock[stream.number], name)]


def _record(recorded: _Recorded) -> Operation:
    def leave(clock: Clock) -> None:
        recorded.has_run, recorded.clock = True, clock

    return Operation("record", leaves=leave)


def _wait(recorded: _Recorded) -> Operation:
    return Operation("wait event", ready=lambda: recorded.has_run, joins=lambda: [recorded.clock])


def word(address: int) -> int:
    """Returns the word at an address."""
    return ctypes.c_uint32.from_address(address).value


def set_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
