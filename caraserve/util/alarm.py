"""A timer of the event loop that is exact to 0.1 ms. Linux only.

Those of uvloop have whole milliseconds: they are up to 0.4 ms early and 0.8 ms late.
"""

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

_CLOCK_MONOTONIC = 1  # what `time.monotonic` and `time.perf_counter` read on Linux
_NONBLOCK, _CLOEXEC, _ABSOLUTE = 0o4000, 0o2000000, 1
_libc = ctypes.CDLL(None, use_errno=True)


class Alarm:
    """Calls back at a time, once for each setting."""

    def __init__(self) -> None:
        """Belongs to the running event loop. Raises OSError if the system refuses a timer."""
        self._call: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = _libc.timerfd_create(_CLOCK_MONOTONIC, _NONBLOCK | _CLOEXEC)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop.add_reader(self._timer, self._ring)

    def set(self, at_s: float, call: Callable[[], None]) -> None:
        """Calls `call` at a time of the monotonic clock, in the next turn of the event loop if that is past. Replaces
        an earlier setting."""
        self._call = call
        moment = struct.pack("qqqq", 0, 0, *divmod(max(1, int(1e9 * at_s)), 1_000_000_000))
        _libc.timerfd_settime(self._timer, _ABSOLUTE, moment, None)

    def close(self) -> None:
        """Never calls again. May be called repeatedly."""
        self._call = None
        if self._timer >= 0:
            self._loop.remove_reader(self._timer)
            os.close(self._timer)
            self._timer = -1

    def _ring(self) -> None:
        try:
            os.read(self._timer, 8)
        except BlockingIOError:  # it was set again after it had expired
            return
        call, self._call = self._call, None
        if call is not None:
            call()
