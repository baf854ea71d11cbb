"""What a process does that `MessageProcess` has started: it reads messages and answers each. Its memory has a bound.

A message is its length, as 8 bytes with the largest first, and its bytes. JSON lines would be simpler, but encoding and
decoding a long text as JSON holds the interpreter lock for 10 ms and more, on whichever thread.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import TypeAlias

LENGTH_BYTES = 8
# Below the threads that compute, which have 5: three busy processes would take most of two cores from them.
NICE = 10
MAX_ANSWER_BYTES = 4 << 20  # text that the server decodes within 5 ms

Answer: TypeAlias = Callable[[bytes], bytes]
"""Returns the answer to a message. May call `limit_cpu`, which holds until it has returned."""


class _MallocInfo(ctypes.Structure):
    """What the C library's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_LIBC = ctypes.CDLL(None)
if hasattr(_LIBC, "mallinfo2"):  # glibc since 2.33
    _LIBC.mallinfo2.restype = _MallocInfo


def answer_messages(begin: Callable[[bytes], Answer], more_bytes: int) -> None:
    """Lowers the priority of this process, then answers messages until the input ends. `begin`: gets the first one,
    whose answer is empty, and returns what answers the others; for these, the private memory may grow by at most
    `more_bytes`."""
    os.nice(NICE)
    source = sys.stdin.buffer
    respond: Answer | None = None
    while head := source.read(LENGTH_BYTES):
        message, answer = source.read(int.from_bytes(head)), b""
        if respond is None:
            respond = begin(message)
            resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + more_bytes,) * 2)
        else:
            answer = respond(message)
            limit_cpu(0)
        sys.stdout.buffer.write(len(answer).to_bytes(LENGTH_BYTES) + answer)
        sys.stdout.buffer.flush()


def data_bytes() -> int:
    """Returns the size of this process's private memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")


def allocated_bytes() -> int:
    """Returns the size of all blocks of memory that this process has allocated and not freed."""
    if hasattr(_LIBC, "mallinfo2"):
        found = _LIBC.mallinfo2()
        return int(found.uordblks + found.hblkhd)
    return data_bytes()  # blocks that were freed count too


def limit_cpu(seconds: float) -> None:
    """Has SIGPROF end this process after so much more time on the CPU, other processes' not counted; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
