"""Emulates a whole device on this machine's CPU: torch's CPU tensors, raw kernels compiled for the host, and streams
that run while a thread waits for them. Triton kernels run in its interpreter or are replaced by torch_kernels.py.

Only events and words order work of different streams. A seed chooses the order; a stream can be made to run `last`,
only when no other can, so that no test passes because that stream happened to run early. The target of a copy is NaN in
every dtype during the copy, and so is the source of a move after it.
"""

import ctypes
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from random import Random

import torch

from caraserve.cpu import handoff
from caraserve.gpu.driver.api import DriverError, Event, Graph, Stream, has_reached
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.kernels.work_orders import work_order_bytes
from caraserve.model.dtype import Dtype
from tests.gpu import emulator
from tests.gpu.captures import Captures
from tests.gpu.desk import AWAITED, BY_WORKERS

_STUCK_S = 60.0
_LOOK_S = 0.0002  # between two reads of words that a worker in another process will write
_AHEAD = 40  # most operations that a stream may run during one query of another stream
_NO_NUMBER = 0xFF  # NaN, if every byte has this value
BEFORE = {"bgmv_expand": "bgmv_shrink"}  # by kernel that begins early: the one beside which it may run
calling = threading.local()  # `driver` and `stream`, while a library is called


@dataclass(slots=True)
class _Operation:
    """One operation. `begin`: a step before `run`, between which other operations may run; returns the condition for
    `run`."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    begin: Callable[[], Callable[[], bool]] | None = None


@dataclass(slots=True)
class _Stream:
    waiting: deque[_Operation] = field(default_factory=deque)
    is_over: Callable[[], bool] | None = None  # condition of the operation that has begun

    @property
    def is_able(self) -> bool:
        """True if the stream can take a step."""
        if not self.waiting:
            return False
        return self.waiting[0].ready() if self.is_over is None else self.is_over()


class HostDriver(Captures[_Operation]):
    """Implements the Driver protocol on host memory. Operations run on the thread that waits."""

    def __init__(self, seed: int = 0, last: Lane | None = None, memory_bytes: int = 1 << 30) -> None:
        super().__init__()
        self._random = Random(seed)
        self._last = last
        self._memory_bytes = memory_bytes
        self._lock = threading.Condition(threading.RLock())
        self._streams: dict[int, _Stream] = {}
        self._events: dict[int, list[bool]] = {}  # by event: whether its last record has run
        self._next = 0
        self._link_free_s = 0.0
        self._newest: dict[Stream, str] = {}  # by stream: the raw kernel that was issued last, "" for anything else
        self.failed = False  # set by a test: the device has failed
        self.held: set[Lane] = set()  # set by a test: lanes that do not run
        self.link_bytes_per_s: float | None = None  # set by a test: bandwidth of the copy lane; None: unlimited
        self.replays = 0

    def create_stream(self, priority: int) -> Stream:
        number = self._number()
        self._streams[number] = _Stream()
        return Stream(number)

    def destroy_stream(self, stream: Stream) -> None:
        with self._lock:
            assert self.failed or not self._streams[stream].waiting, "a stream is destroyed before everything has run"
            del self._streams[stream]

    def create_event(self) -> Event:
        number = self._number()
        self._events[number] = [True]
        return Event(number)

    def record(self, event: Event, stream: Stream) -> None:
        recorded = [False]
        with self._lock:
            self._events[event] = recorded

        def run() -> None:
            recorded[0] = True

        self._issue(stream, run)

    def wait_event(self, stream: Stream, event: Event) -> None:
        recorded = self._events[event]
        self._issue(stream, lambda: None, lambda: recorded[0])

    def is_done(self, event: Event) -> bool:
        with self._lock:
            self._check()
            for _ in range(self._random.randrange(_AHEAD)):
                self._step()
            return self._events[event][0]

    def synchronize(self, event: Event) -> None:
        until_s = time.monotonic() + _STUCK_S
        recorded = self._events[event]
        while not recorded[0]:
            with self._lock:
                self._check()
                if not self._step():
                    self._lock.wait(_LOOK_S)
            if time.monotonic() > until_s:
                raise DriverError("nothing moves any more")

    def copy_to_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy([(target, source, num_bytes)], stream)

    def copy_rows_to_device(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: Stream
    ) -> None:
        self._copy([(target + row * target_pitch, source + row * source_pitch, width) for row in range(rows)], stream)

    def copy_to_host(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        self._copy([(target, source, num_bytes)], stream)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        assert target + num_bytes <= source or source + num_bytes <= target, "a copy overlaps itself"

        def run() -> None:
            _move(target, source, num_bytes)
            _set(source, _NO_NUMBER, num_bytes)

        self._issue(stream, run)

    def fill(self, target: int, num_bytes: int, stream: Stream) -> None:
        self._issue(stream, lambda: _set(target, 0, num_bytes))

    def write_value(self, stream: Stream, address: int, value: int) -> None:
        self._issue(stream, lambda: _set_word(address, value))
        self._note_write(stream, address, value)

    def wait_value(self, stream: Stream, address: int, value: int) -> None:
        self._check_wait(stream, address, value)
        self._issue(stream, lambda: None, lambda: has_reached(_word(address), value))

    def run(self, stream: Stream, issue: Callable[[], None]) -> None:
        self._issue(stream, issue)

    def call(self, stream: Stream, work: Callable[[], None]) -> None:
        """Calls `work` at once: what it issues, it issues itself on the stream that `calling` names."""
        assert not self.captures(stream), "a library is called in a capture"
        calling.driver, calling.stream = self, stream
        try:
            work()
        finally:
            del calling.driver, calling.stream

    def launch_graph(self, graph: Graph, stream: Stream) -> None:
        self.replays += 1
        with self._lock:
            self._check()
            self._streams[stream].waiting.extend(self._launched(graph))
            self._lock.notify_all()

    def left(self, stream: Stream) -> int:
        """Returns the number of operations of a stream that have not run."""
        with self._lock:
            return len(self._streams[stream].waiting)

    def free_bytes(self) -> int:
        return self._memory_bytes

    def total_bytes(self) -> int:
        return self._memory_bytes

    def _number(self) -> int:
        self._next += 1
        return self._next

    def issue(self, launch: Launch, stream: Stream, run: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Issues a raw kernel that waits for a condition while other streams run."""
        before = self._newest.get(stream, "")
        assert not launch.begins_early or before == BEFORE[launch.kernel], f"{launch.kernel} begins beside {before!r}"
        self._issue(stream, run, ready)
        self._newest[stream] = launch.kernel

    def _issue(
        self,
        stream: Stream,
        run: Callable[[], None],
        ready: Callable[[], bool] = lambda: True,
        begin: Callable[[], Callable[[], bool]] | None = None,
    ) -> None:
        operation = _Operation(run, ready, begin)
        self._newest[stream] = ""
        if self._captured(stream, operation):
            return
        with self._lock:
            self._check()
            self._streams[stream].waiting.append(operation)
            self._lock.notify_all()

    def _copy(self, pieces: list[tuple[int, int, int]], stream: Stream) -> None:
        """Issues copies; `pieces` are (target, source, bytes)."""

        def begin() -> Callable[[], bool]:
            for target, _, num_bytes in pieces:
                _set(target, _NO_NUMBER, num_bytes)
            return self._link_time(stream, sum(num_bytes for _, _, num_bytes in pieces))

        def run() -> None:
            for piece in pieces:
                _move(*piece)

        self._issue(stream, run, begin=begin)

    def _link_time(self, stream: Stream, num_bytes: int) -> Callable[[], bool]:
        """Returns a function that returns whether so many bytes, sent over the link from now on, have arrived."""
        if self.link_bytes_per_s is None or self._streams[stream] is not self._of(Lane.COPY):
            return lambda: True
        until_s = max(self._link_free_s, time.monotonic()) + num_bytes / self.link_bytes_per_s
        self._link_free_s = until_s
        return lambda: time.monotonic() >= until_s

    def _of(self, lane: Lane) -> _Stream | None:
        """Returns a lane's stream, None before it has one; of the streams left, the lanes' are created first, in the
        order of the lanes."""
        return next(islice(self._streams.values(), lane, None), None)

    def _check(self) -> None:
        if self.failed:
            raise DriverError("the device has failed")

    def _step(self) -> bool:
        """Takes one step of some stream; returns False if none can."""
        held = [self._of(lane) for lane in self.held]
        able = [stream for stream in self._streams.values() if stream not in held and stream.is_able]
        if not able:
            return False
        first = [stream for stream in able if self._last is None or stream is not self._of(self._last)]
        stream = self._random.choice(first or able)
        operation = stream.waiting[0]
        if operation.begin is not None and stream.is_over is None:
            stream.is_over = operation.begin()
            return True
        stream.is_over = None
        stream.waiting.popleft()
        try:
            operation.run()
        except Exception as error:
            traceback.print_exc()
            raise DriverError(f"an operation failed: {error}") from error
        return True


class HostKernels:
    """Runs raw kernels on the host, in stream order."""

    multiprocessors = 1

    def __init__(self, driver: HostDriver, activation: Dtype) -> None:
        self._driver, self._activation = driver, activation
        self._waits_s: dict[int, float] = {}  # start of a wait for weights, by its work order

    def launch(self, launch: Launch, stream: Stream) -> None:
        waits = launch.kernel == "handoff_wait"
        self._driver.issue(
            launch,
            stream,
            lambda: emulator.run(launch, self._activation),
            (lambda: self._ends_wait(*map(int, launch.arguments[:2]))) if waits else (lambda: True),
        )

    def _ends_wait(self, order: int, outcome: int) -> bool:
        """True if the wait of a hand-off would end now."""
        if ended := self._has_come(order, outcome):
            self._waits_s.pop(order, None)
        return ended

    def _has_passed(self, order: int, deadline_ns: int) -> bool:
        """True if a wait for weights has lasted for so long."""
        return 1e9 * (time.monotonic() - self._waits_s.setdefault(order, time.monotonic())) > deadline_ns

    def _has_come(self, order: int, outcome: int) -> bool:
        if _word(outcome) not in (BY_WORKERS, AWAITED):
            return True
        tasks, _, _, deadline_ns, ready, wanted, status, generation = (ctypes.c_int64 * 8).from_address(order)
        if _word(ready) == wanted or _word(status) == generation:
            return True
        if _word(outcome) == AWAITED:
            self._driver.check_issued(ready, wanted)
            return self._has_passed(order, deadline_ns)
        first, size = work_order_bytes(0), work_order_bytes(1) - work_order_bytes(0)
        asked = [(ctypes.c_int64 * 2).from_address(order + first + size * task) for task in range(tasks)]
        return all(ctypes.c_int64.from_address(block + handoff.DONE).value == number for block, number in asked)


def host_device(activation: Dtype = Dtype.F32, seed: int = 0, last: Lane | None = None) -> tuple[GpuDevice, HostDriver]:
    """Returns a new device and its driver."""
    driver = HostDriver(seed, last)
    return GpuDevice(driver, HostKernels(driver, activation), torch.device("cpu"), "a device on the host"), driver


def _move(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)


def _word(address: int) -> int:
    return ctypes.c_uint32.from_address(address).value


def _set_word(address: int, value: int) -> None:
    ctypes.c_uint32.from_address(address).value = value


def _set(address: int, value: int, num_bytes: int) -> None:
    ctypes.memset(address, value, num_bytes)
