"""Threads that compute give way to the event loop's: by nice value, policy and a long slice."""

import ctypes
import os
import platform
import subprocess
import sys
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
    usual = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert (policy, nice) == (os.SCHED_BATCH, min(19, usual + 5))
    version = tuple(map(int, platform.release().split(".")[:2]))
    if slice_ns is None or version < (6, 12):
        pytest.skip("this kernel gives threads no slices of their own")
    assert slice_ns == 100_000_000


def test_the_calling_thread_of_a_process_keeps_its_own_priority() -> None:
    before = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    lowered()
    assert (os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == before


def test_a_process_without_rights_that_runs_under_nice_lowers_its_threads_too() -> None:
    code = (
        "import os, threading\n"
        "from caraserve.util.thread_priority import yield_to_event_loop\n"
        "os.nice(10)\n"
        "if os.geteuid() == 0:\n"
        "    os.setuid(65534)\n"
        "before = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "yield_to_event_loop()\n"
        "print(os.getpriority(os.PRIO_PROCESS, 0) - before)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert 0 <= int(ran.stdout) <= 5  # 19 is the most


def test_a_sandbox_that_refuses_priorities_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    lowered()
