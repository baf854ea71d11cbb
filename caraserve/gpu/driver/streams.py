"""Streams with numbered points, so that memory can say after what it may be written again.

A mark is a point of one lane: everything issued on its stream before. `Marks` has one number per lane and means all of
these points; numbers only grow, so the later of two is their element-wise maximum. The host never
waits for what a mark guards: the next user's stream waits, and mostly the point has been passed long before.
"""

from collections import deque
from enum import IntEnum

from caraserve.gpu.driver.api import Driver, Event, Stream


class Lane(IntEnum):
    """The streams; made once, for two that share a hardware queue could hold one another back."""

    COMPUTE = 0  # iterations
    COPY = 1  # adapters from the host
    ASSIST = 2  # prefills that wait for CPU workers
    GATE = 3  # tells graphs that layers have arrived


Marks = tuple[int, ...]  # one number per lane; 0: nothing
NOTHING: Marks = (0,) * len(Lane)

_PRIORITIES = {Lane.COMPUTE: -1, Lane.COPY: 0, Lane.ASSIST: 0, Lane.GATE: -1}


def latest(*marks: Marks) -> Marks:
    """Returns the point after all of these."""
    return tuple(map(max, zip(NOTHING, *marks, strict=True)))


def at(lane: Lane, number: int) -> Marks:
    """Returns a point of one lane alone."""
    return tuple(number if other is lane else 0 for other in Lane)


def covers(passed: Marks, marks: Marks) -> bool:
    """True if a lane that has passed `passed` has passed `marks` too."""
    return all(have >= need for have, need in zip(passed, marks, strict=True))


class Timelines:
    """All lanes of a device. Not thread-safe: the thread that launches."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.streams: dict[Lane, Stream] = {lane: driver.create_stream(_PRIORITIES[lane]) for lane in Lane}
        self._numbers = [0] * len(Lane)
        self._passed = [0] * len(Lane)
        self._ahead: list[deque[Event]] = [deque() for _ in Lane]  # of the numbers after `_passed`, in order
        self._spare: list[Event] = []
        self._ordered = [[0] * len(Lane) for _ in Lane]  # [lane][other]: what it has been made to wait for

    def mark(self, lane: Lane) -> int:
        """Makes a point of all that was issued on a lane so far, and returns its number."""
        event = self._spare.pop() if self._spare else self._driver.create_event()
        self._driver.record(event, self.streams[lane])
        self._ahead[lane].append(event)
        self._numbers[lane] += 1
        return self._numbers[lane]

    def next(self, lane: Lane) -> Marks:
        """What the next mark of a lane will mean."""
        return at(lane, self._numbers[lane] + 1)

    def issued(self) -> Marks:
        """All marks made so far."""
        return tuple(self._numbers)

    @property
    def known(self) -> Marks:
        """The last result of `passed`; does not ask the driver."""
        return tuple(self._passed)

    def passed(self) -> Marks:
        """All marks known to lie behind. Asks the driver, never waits."""
        for lane in Lane:
            ahead = self._ahead[lane]
            while ahead and self._driver.is_done(ahead[0]):
                self._spare.append(ahead.popleft())  # a stream that waits for it already waits for its earlier meaning
                self._passed[lane] += 1
        return tuple(self._passed)

    def wait(self, lane: Lane, marks: Marks) -> None:
        """Later operations of a lane come after `marks`, which must have been made."""
        for other in Lane:
            number = marks[other]
            if other is lane or number <= max(self._passed[other], self._ordered[lane][other]):
                continue
            if number > self._numbers[other]:
                raise AssertionError(f"mark {number} of {other.name} has not been made: nothing would be waited for")
            event = self._ahead[other][number - self._passed[other] - 1]
            self._driver.wait_event(self.streams[lane], event)
            self._ordered[lane][other] = number

    def settle(self, lane: Lane) -> None:
        """Blocks until a lane has run all that was issued on it. Makes no mark, because a caller may have announced
        the next."""
        event = self._spare.pop() if self._spare else self._driver.create_event()
        self._driver.record(event, self.streams[lane])
        self._driver.synchronize(event)
        self._spare.append(event)
