"""Threads that compute give way to the event loop's: by nice value, policy and a long slice."""

import ctypes
import os
import platform
import threading

import pytest

from caraserve.util.thread_priority import _ATTRIBUTES, yield_to_event_loop


def lowered() -> tuple[int, int, int | None]:
    """Returns policy, nice value and slice in ns of a thread after the call. The slice is None where the kernel tells
    none."""
    found: list[tuple[int, int, int | None]] = []

    def run() -> None:
        yield_to_event_loop()
        buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
        sched_getattr = {"x86_64": 315, "aarch64": 275}[platform.machine()]
        told = ctypes.CDLL(None).syscall(sched_getattr, 0, buffer, _ATTRIBUTES.size, 0) == 0
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append((os.sched_getscheduler(0), nice, _ATTRIBUTES.unpack(buffer.raw)[5] if told else None))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_that_computes_is_preempted_by_others() -> None:
    policy, nice, slice_ns = lowered()
    assert (policy, nice) == (os.SCHED_BATCH, 5)
    version = tuple(map(int, platform.release().split(".")[:2]))
    if slice_ns is None or version < (6, 12):
        pytest.skip("this kernel gives threads no slices of their own")
    assert slice_ns == 100_000_000


def test_the_calling_thread_of_a_process_keeps_its_own_priority() -> None:
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    lowered()
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == before
