"""A driver without a device: operations wait in their streams until a schedule, chosen by the test, runs them.

Operations run in order within a stream and in any order between streams. An operation begins and ends in two steps,
between which others may run; meanwhile the target of a copy is garbage. Besides running one schedule, the driver checks
all of them: each access of memory must be ordered after every conflicting one by stream order, events, words or what
the host has observed. If only the schedule at hand ordered them, it raises `Race`.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from caraserve.gpu.driver.api import Event, Graph, Stream, has_reached
from tests.gpu.captures import Captures

HOST = 0  # the host's thread, treated as a stream
Clock = dict[int, int]  # stream → number of its operations that come before
Span = tuple[int, int]  # [start, end)
Choose = Callable[[int], int]  # returns an index below its argument


class Race(AssertionError):
    """Two operations access the same bytes, one writes, and nothing orders them."""


class Stuck(AssertionError):
    """Operations are left and none can ever run."""


@dataclass(slots=True)
class Operation:
    """One operation of a stream. `begin` and `end` access memory; `ready` returns whether it may begin."""

    name: str
    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()
    begin: Callable[[], None] = lambda: None
    end: Callable[[], None] = lambda: None
    ready: Callable[[], bool] = lambda: True
    joins: Callable[[], Sequence[Clock]] = tuple  # clocks that it comes after, once it is ready
    leaves: Callable[[Clock], None] = lambda clock: None  # receives the clock of its end
    issued: Clock = field(default_factory=dict)  # clock of the host


@dataclass(slots=True)
class _Stream:
    waiting: deque[Operation] = field(default_factory=deque)
    running: Operation | None = None
    clock: Clock = field(default_factory=dict)


@dataclass(slots=True)
class _Recorded:
    """One record of an event."""

    clock: Clock | None = None  # set once the record has run


class FakeDriver(Captures[Operation]):
    """Implements the Driver protocol over `memory`, which is device and host memory in one."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.memory = np.zeros(num_bytes, np.uint8)
        self.released: dict[int, Clock] = {}  # by word: clock of the last write
        self.log: list[str] = []
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, _Recorded | None] = {}
        self._host: Clock = {}
        self._accesses: list[tuple[int, int, bool, int, int, str]] = []
        self._next = HOST + 1

    # --- the protocol ---

    def create_stream(self, priority: int) -> Stream:
        number = self._number()
        self._streams[number] = _Stream()
        return Stream(number)

    def destroy_stream(self, stream: Stream) -> None:
        assert self.is_idle(stream), "a stream is destroyed before everything has run"
        del self._streams[stream]

    def create_event(self) -> Event:
        number = self._number()
        self._events[number] = None
        return Event(number)

    def record(self, event: Event, stream: Stream) -> None:
        recorded = self._events[event] = _Recorded()

        def leave(clock: Clock) -> None:
            recorded.clock = clock

        self.issue(stream, Operation("record", leaves=leave))

    def wait_event(self, stream: Stream, event: Event) -> None:
        recorded = self._events[event]
        if recorded is not None:
            self.issue(
                stream,
                Operation("wait event", ready=lambda: recorded.clock is not None, joins=lambda: [recorded.clock or {}]),
            )

    def is_done(self, event: Event) -> bool:
        recorded = self._events[event]
        if recorded is None:
            return True
        if recorded.clock is not None:
            _join(self._host, recorded.clock)
        return recorded.clock is not None

    def synchronize(self, event: Event) -> None:
        while not self.is_done(event):
            if not self.step(lambda count: 0):
                raise Stuck("the host waits forever")

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
        self._copy("on device", [(target, source, num_bytes)], stream)

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        def end() -> None:
            self.memory[target : target + num_bytes] = 0

        self.issue(stream, Operation("fill", writes=[(target, target + num_bytes)], end=end))

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        self.issue(
            stream,
            Operation(
                f"write {value}",
                end=lambda: self._set(address, value),
                leaves=lambda clock: self._release(address, clock),
            ),
        )
        self._note_write(stream, address, value)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        self._check_wait(stream, address, value)
        self.issue(
            stream,
            Operation(
                f"wait for {value}",
                ready=lambda: has_reached(self.word(address), value),
                joins=lambda: [self.released.get(address, {})],
            ),
        )

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        for operation in self._launched(graph):
            self.issue(stream, replace(operation))

    def free_bytes(self) -> int:
        return len(self.memory)

    def total_bytes(self) -> int:
        return len(self.memory)

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self.issue(stream, Operation("kernels", end=issue))

    # --- what tests do ---

    def issue(self, stream: Stream, operation: Operation) -> None:
        """Appends an operation, for example a kernel, to a stream."""
        if self._captured(stream, operation):
            return
        operation.issued = dict(self._host)
        self._streams[stream].waiting.append(operation)

    def word(self, address: int) -> int:
        return int(self.memory[address : address + 4].view(np.uint32)[0])

    def store(self, address: int, value: int) -> None:
        """Writes a word as the host or a worker, after everything that they wrote before."""
        self._host[HOST] = self._host.get(HOST, 0) + 1
        self._set(address, value)
        self._release(address, dict(self._host))

    def acquire(self, address: int) -> None:
        """Orders what the host does next after everything that the last writer of a word did before."""
        _join(self._host, self.released.get(address, {}))

    def host_access(self, start: int, num_bytes: int, *, writes: bool) -> NDArray[np.uint8]:
        """Returns bytes that the host or a worker is about to access, and checks the access for races."""
        self._host[HOST] = self._host.get(HOST, 0) + 1
        self._check((start, start + num_bytes), HOST, self._host, "host", writes=writes)
        return self.memory[start : start + num_bytes]

    def step(self, choose: Choose) -> bool:
        """Begins or ends one operation of some stream; returns False if none can."""
        able = [
            number
            for number, stream in self._streams.items()
            if stream.running is not None or (stream.waiting and stream.waiting[0].ready())
        ]
        if not able:
            return False
        number = able[choose(len(able))]
        stream = self._streams[number]
        if stream.running is None:
            self._begin(number, stream)
        else:
            self._end(stream)
        return True

    def run_all(self, choose: Choose = lambda count: 0) -> None:
        """Steps until nothing is left. Raises Stuck if operations are left that cannot run."""
        while self.step(choose):
            pass
        if (left := self.left()) > 0:
            raise Stuck(f"{left} operations wait forever")

    def left(self) -> int:
        """Returns the number of operations that have not run."""
        return sum(len(stream.waiting) + (stream.running is not None) for stream in self._streams.values())

    def is_idle(self, stream: Stream) -> bool:
        """True if a stream has run everything issued on it."""
        return not self._streams[stream].waiting and self._streams[stream].running is None

    # --- inside ---

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _set(self, address: int, value: int) -> None:
        self.memory[address : address + 4].view(np.uint32)[0] = value

    def _release(self, address: int, clock: Clock) -> None:
        self.released[address] = dict(clock)

    def _copy(self, name: str, parts: list[tuple[int, int, int]], stream: Stream) -> None:
        """Reads half of the bytes when it begins and half when it ends, as a slow copy would."""
        early: list[NDArray[np.uint8]] = []

        def begin() -> None:
            early[:] = [self.memory[source : source + size // 2].copy() for _, source, size in parts]
            for target, _, size in parts:
                self.memory[target : target + size] = 0xDD

        def end() -> None:
            for (target, source, size), half in zip(parts, early, strict=True):
                late = self.memory[source + size // 2 : source + size].copy()
                self.memory[target : target + size] = np.concatenate([half, late])

        reads = [(source, source + size) for _, source, size in parts]
        writes = [(target, target + size) for target, _, size in parts]
        self.issue(stream, Operation(name, reads, writes, begin, end))

    def _begin(self, number: int, stream: _Stream) -> None:
        operation = stream.running = stream.waiting.popleft()
        _join(stream.clock, operation.issued)
        for clock in operation.joins():
            _join(stream.clock, clock)
        stream.clock[number] = stream.clock.get(number, 0) + 1
        for span in operation.reads:
            self._check(span, number, stream.clock, operation.name, writes=False)
        for span in operation.writes:
            self._check(span, number, stream.clock, operation.name, writes=True)
        operation.begin()

    def _end(self, stream: _Stream) -> None:
        assert stream.running is not None, "nothing to end"
        operation, stream.running = stream.running, None
        operation.end()
        operation.leaves(dict(stream.clock))
        self.log.append(operation.name)

    def _check(self, span: Span, number: int, clock: Clock, name: str, *, writes: bool) -> None:
        start, end = span
        if start == end:
            return
        kept = []
        for access in self._accesses:
            low, high, wrote, other, at, what = access
            if low < end and start < high and (wrote or writes) and at > clock.get(other, 0):
                raise Race(f"{name} and {what} touch [{max(low, start)}, {min(high, end)}) at the same time")
            # Later operations need no comparison with those that this one covers and is ordered after.
            if not (writes and start <= low and high <= end):
                kept.append(access)
        self._accesses = [*kept, (start, end, writes, number, clock[number], name)]


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)
