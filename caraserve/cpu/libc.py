"""Calls into libc from compiled code: yield, clock, futex wait and wake. Linux only.

They are external symbols and not ctypes objects, because functions that hold a ctypes address cannot be cached on disk.
Pointers are passed as int64.
"""

import ctypes
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
_ZERO, _ALL = np.int64(0), np.int64(1 << 30)


@kernel
def now_ns(timespec):  # type: ignore[no-untyped-def]
    """Returns the monotonic clock. `timespec`: address of 16 bytes that this thread may write."""
    _clock_gettime(_CLOCK_MONOTONIC, timespec)
    return load_i64(timespec) * 1_000_000_000 + load_i64(timespec + 8)


@kernel
def sleep_while(word, value):  # type: ignore[no-untyped-def]
    """Sleeps until `wake`, if the 32 bits at `word` equal `value`. May also return without a cause."""
    _syscall(_FUTEX, word, _WAIT, value, _ZERO, _ZERO, _ZERO)


@kernel
def wake(word):  # type: ignore[no-untyped-def]
    """Wakes all threads that sleep on `word`, in any process."""
    _syscall(_FUTEX, word, _WAKE, _ALL, _ZERO, _ZERO, _ZERO)


def return_freed_memory() -> None:
    """Returns memory that has been freed to the system, if libc can. Compilers leave it 50 MiB and more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
