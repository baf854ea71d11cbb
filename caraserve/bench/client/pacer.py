"""Calls back at the moments of a schedule, to some microseconds.

An event loop's own timers count in milliseconds: at 500 requests a second that alone is half a gap. So a kernel timer
wakes the loop a little early, and the rest is spun away.
"""

import asyncio
import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence

_EARLY_S = 120e-6  # the kernel, the loop and a core asleep take about this long
_CLOCK_MONOTONIC = 1  # what `time.perf_counter` reads on Linux
_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = 0o4000, 0o2000000, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Pacer:
    """`call(index)` at each of the moments, which rise; the last call ends it."""

    def __init__(self, moments_s: Sequence[float], call: Callable[[int], None]) -> None:
        """`moments_s` by `time.perf_counter`. To be made in the running loop."""
        self._moments_s, self._call, self._next = moments_s, call, 0
        self._loop = asyncio.get_running_loop()
        self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop.add_reader(self._timer, self._fire)
        self._arm()

    def stop(self) -> None:
        """No calls from now on."""
        if self._timer >= 0:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = -1

    def _arm(self) -> None:
        if self._next == len(self._moments_s):
            self.stop()
            return
        wake_ns = max(1, int(1e9 * (self._moments_s[self._next] - _EARLY_S)))
        moment = struct.pack("qqqq", 0, 0, *divmod(wake_ns, 1_000_000_000))  # a moment gone by fires at once
        _libc.timerfd_settime(self._timer, _TFD_TIMER_ABSTIME, moment, None)

    def _fire(self) -> None:
        os.read(self._timer, 8)
        while self._next < len(self._moments_s):
            ahead_s = self._moments_s[self._next] - time.perf_counter()
            if ahead_s > 2 * _EARLY_S:
                break
            while time.perf_counter() < self._moments_s[self._next]:
                pass
            index, self._next = self._next, self._next + 1
            self._call(index)
            if self._timer < 0:
                return
        self._arm()
