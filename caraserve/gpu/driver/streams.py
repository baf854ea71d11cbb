"""Streams with numbered marks, which say when memory may be written again.

A mark is a point in one lane: everything issued on its stream before. `Marks` holds one number per lane and stands for
all these points. Numbers only grow, so the later of two `Marks` is their element-wise maximum. The host never waits for
a mark: the stream that uses the memory next waits, and by then the mark has mostly been passed.
"""

from collections import deque
from collections.abc import Callable
from enum import IntEnum

from caraserve.gpu.driver.api import Driver, Event, Stream


class Lane(IntEnum):
    """The streams, created once: two streams that share a hardware queue could delay each other."""

    COMPUTE = 0  # iterations
    COPY = 1  # adapters from the host
    ASSIST = 2  # prefills that wait for CPU workers
    GATE = 3  # signals graphs that layers have arrived
    LORA = 4  # in captured iterations: LoRA's products that run beside the base products


Marks = tuple[int, ...]  # one number per lane; 0: nothing
NOTHING: Marks = (0,) * len(Lane)

# LoRA's blocks are few: placed first, they end long before the base product, which would leave them no room.
_PRIORITIES = {Lane.COMPUTE: -1, Lane.COPY: 0, Lane.ASSIST: 0, Lane.GATE: -1, Lane.LORA: -2}


def latest(*marks: Marks) -> Marks:
    """Returns the point after all of these."""
    return tuple(map(max, zip(NOTHING, *marks, strict=True)))


def at(lane: Lane, number: int) -> Marks:
    """Returns a point of one lane alone."""
    return (*NOTHING[:lane], number, *NOTHING[lane + 1 :])


def covers(passed: Marks, marks: Marks) -> bool:
    """True if a lane that has passed `passed` has passed `marks` too."""
    return all(have >= need for have, need in zip(passed, marks, strict=True))


class Timelines:
    """Streams and marks of all lanes of a device. Not thread-safe: for the launching thread only."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.streams: dict[Lane, Stream] = {lane: driver.create_stream(_PRIORITIES[lane]) for lane in Lane}
        self._numbers = [0] * len(Lane)
        self._passed = [0] * len(Lane)
        self._ahead: list[deque[Event]] = [deque() for _ in Lane]  # events of the numbers after `_passed`, in order
        self._spare: list[Event] = []
        self._ordered = [[0] * len(Lane) for _ in Lane]  # [lane][other]: mark that `lane` waits for already

    def mark(self, lane: Lane) -> int:
        """Records a mark after everything issued on a lane so far, and returns its number."""
        event = self._spare.pop() if self._spare else self._driver.create_event()
        self._driver.record(event, self.streams[lane])
        self._ahead[lane].append(event)
        self._numbers[lane] += 1
        return self._numbers[lane]

    def next(self, lane: Lane) -> Marks:
        """Returns the mark that the next call of `mark` for this lane will make."""
        return at(lane, self.next_number(lane))

    def next_number(self, lane: Lane) -> int:
        """Returns the number of the mark that `next` returns."""
        return self._numbers[lane] + 1

    def issued(self) -> Marks:
        """Returns all marks made so far."""
        return tuple(self._numbers)

    @property
    def known(self) -> Marks:
        """Returns the last result of `passed`, without a driver call."""
        return tuple(self._passed)

    def passed(self) -> Marks:
        """Queries the driver without waiting, and returns all marks that have been passed."""
        for lane, ahead in enumerate(self._ahead):
            while ahead and self._driver.is_done(ahead[0]):
                self._spare.append(ahead.popleft())  # reusable: waits already issued keep the earlier recording
                self._passed[lane] += 1
        return tuple(self._passed)

    def wait(self, lane: Lane, marks: Marks) -> None:
        """Makes later operations of a lane run after `marks`, which must have been made."""
        for other, number in enumerate(marks):
            if other == lane or number <= max(self._passed[other], self._ordered[lane][other]):
                continue
            if number > self._numbers[other]:
                name = Lane(other).name
                raise AssertionError(f"mark {number} of {name} has not been made: nothing would be waited for")
            event = self._ahead[other][number - self._passed[other] - 1]
            self._driver.wait_event(self.streams[lane], event)
            self._ordered[lane][other] = number

    def settle(self, lane: Lane) -> None:
        """Blocks until a lane has run everything issued on it. Makes no mark, because the caller may have used
        `next`."""
        event = self._spare.pop() if self._spare else self._driver.create_event()
        self._driver.record(event, self.streams[lane])
        self._driver.synchronize(event)
        self._spare.append(event)


class SideStream:
    """A stream for work beside another stream's. The two wait for each other by events, so that both may be captured
    as one graph; `Timelines` knows nothing of this work, which must be joined before a mark is made."""

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver, self._stream = driver, stream
        self._begins, self._ends = driver.create_event(), driver.create_event()

    def fork(self, stream: Stream, issue: Callable[[Stream], None]) -> None:
        """Calls `issue` with the side stream; what it issues runs after everything issued on `stream` so far, beside
        what follows there."""
        self._driver.record(self._begins, stream)
        self._driver.wait_event(self._stream, self._begins)
        issue(self._stream)
        self._driver.record(self._ends, self._stream)

    def join(self, stream: Stream) -> None:
        """Makes later operations of `stream` run after everything that was forked."""
        self._driver.wait_event(stream, self._ends)
