"""The priority of threads that compute beside the event loop's. Linux only."""

import contextlib
import ctypes
import os
import platform
import struct
import threading

_NICER = 5  # than the process, which may run under `nice` itself
_LEAST_URGENT = 19  # the highest nice value
_SLICE_NS = 100_000_000  # the longest that Linux allows
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the number of the system call
# Its argument: size, policy, flags, nice value, real-time priority, slice, and two times of deadline scheduling.
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def yield_to_event_loop() -> None:
    """Lowers the calling thread's priority, so that the event loop's thread preempts it as soon as it wakes.

    A nice value alone does not suffice: Linux lets a running thread finish its slice first, as noticed at a tick of its
    clock, every 4 ms. A quarter of all wake-ups took 4 ms, and a tenth 8, on two cores that compute. Since version 6.12
    a thread preempts those with a longer slice at once; before, the length is ignored.

    A sandbox may refuse each of the system calls, and Linux the policy to a process with SCHED_IDLE. The thread keeps
    the priority that it has then: answers do not depend on it.
    """
    thread = threading.get_native_id()
    nice = min(_LEAST_URGENT, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if (number := _SCHED_SETATTR.get(platform.machine())) is not None:
        attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_BATCH, 0, nice, 0, _SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # returns -1 if it is refused
