"""Giving the core away from compiled code. Level 1."""

from numba import types

# An external symbol of libc rather than a ctypes object: functions that hold a ctypes address cannot be cached on disk.
sched_yield = types.ExternalFunction("sched_yield", types.int32())
