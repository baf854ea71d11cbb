"""The parent of all CPU LoRA workers: forks one whenever the server asks. a process of its own.

A fork copies one thread and every lock as it happens to be: a child of a process in which torch's or OpenMP's threads
exist hangs at their next use, and one forked while another thread compiles holds the compiler's lock for ever. So the
zygote is a process in which nothing of that kind has ever existed. The server starts it afresh instead of forking
itself: that is safe at any time and in any program, so that a dead zygote can be replaced too. It loads the compiled
kernels once; the workers that it forks share them and start within milliseconds.

The zygote ends when its socket does, and the kernel kills the workers with it, so that nothing outlives the server.
"""

import ctypes
import json
import os
import signal
import socket
import sys

from caraserve.cpu.shared_memory import SharedRegion

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_MOST_MESSAGE_BYTES = 4096
NICE = 5  # like the compute threads: the event loop comes first


def _prctl(option: int, value: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _check_alone() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1 or "torch" in sys.modules:
        raise AssertionError(f"the zygote has {threads} threads, or torch; forking it is not safe")


def _fork_worker(region: SharedRegion, index: int, core: int, offset: int) -> int:
    """Forks the worker whose block lies at `offset`; returns its pid in the zygote, never in the worker."""
    from caraserve.cpu.lora_workers.worker import work

    block = region.bytes[offset : offset + 8]
    seen = int.from_bytes(block.tobytes(), "little")  # before anybody can be told of the new worker
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:  # it died before it could be watched
            os._exit(0)
        _prctl(_PR_SET_NAME, f"caraserve-lora{index}".encode()[:15])
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        work(region.base + offset, region.base, seen)
    finally:
        os._exit(1)


def main() -> None:
    """Serves the socket given as a descriptor in argv until the server closes it or dies."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    region = SharedRegion(int(sys.argv[3]), fd=int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps; the server sees deaths through descriptors
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to answer
    _prctl(_PR_SET_NAME, b"caraserve-zyg")
    from caraserve.cpu.lora_workers.worker import compile_worker

    compile_worker()
    _check_alone()
    while message := connection.recv(_MOST_MESSAGE_BYTES):
        asked = json.loads(message)
        pid = _fork_worker(region, asked["worker"], asked["core"], asked["offset"])
        try:
            watched = os.pidfd_open(pid)
        except ProcessLookupError:  # gone already
            socket.send_fds(connection, [json.dumps({"worker": asked["worker"]}).encode()], [])
            continue
        socket.send_fds(connection, [json.dumps({"worker": asked["worker"], "pid": pid}).encode()], [watched])
        os.close(watched)


if __name__ == "__main__":
    main()
