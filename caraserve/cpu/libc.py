"""The few calls into libc that compiled code makes: yield, clock, sleep until woken. Linux only.

External symbols rather than ctypes objects: functions that hold a ctypes address cannot be cached on disk. Pointers
travel as int64.
"""

import platform

import numpy as np
from numba import types

from caraserve.cpu.jit import kernel
from caraserve.cpu.simd import load_i64

sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))

_CLOCK_MONOTONIC = np.int32(1)  # Python's time.monotonic
_FUTEX = np.int64(202 if platform.machine() == "x86_64" else 98)  # the number of the system call
_WAIT, _WAKE = np.int64(0), np.int64(1)  # shared between processes, not private
_ZERO, _EVERYBODY = np.int64(0), np.int64(1 << 30)


@kernel
def now_ns(timespec):  # type: ignore[no-untyped-def]
    """The monotonic clock; `timespec` is the address of 16 bytes that this thread may write."""
    _clock_gettime(_CLOCK_MONOTONIC, timespec)
    return load_i64(timespec) * 1_000_000_000 + load_i64(timespec + 8)


@kernel
def sleep_while(word, value):  # type: ignore[no-untyped-def]
    """Sleeps if the 32 bits at `word` are `value`, until somebody calls `wake`; may also return for no reason."""
    _syscall(_FUTEX, word, _WAIT, value, _ZERO, _ZERO, _ZERO)


@kernel
def wake(word):  # type: ignore[no-untyped-def]
    """Wakes whoever sleeps on `word`, in any process."""
    _syscall(_FUTEX, word, _WAKE, _EVERYBODY, _ZERO, _ZERO, _ZERO)
