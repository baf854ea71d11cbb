"""The fork server: a process that forks a CPU LoRA worker whenever the server requests one.

A fork copies one thread, and every lock in its present state: a child of a process with threads of torch or OpenMP
hangs at their next use, and a child that was forked while another thread compiled finds the compiler's lock taken. So
the fork server is a process in which no other thread has ever existed. It is started as a new program, which is safe at
any time and in any process, so a dead fork server can be replaced too. It loads the compiled kernels once; the workers
that it forks share them and start within milliseconds.

The fork server ends when its socket is closed, and the kernel kills the workers with it, so no process outlives the
server.
"""

import contextlib
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
        raise AssertionError(f"the fork server has {threads} threads, or torch; forking it is not safe")


def _fork_worker(region: SharedRegion, index: int, core: int, offset: int) -> int:
    """Forks the worker whose block lies at `offset`; returns its pid in the fork server, never in the worker."""
    from caraserve.cpu.lora_workers.worker import work

    block = region.bytes[offset : offset + 8]
    seen = int.from_bytes(block.tobytes(), "little")  # read before the server can send this worker a request
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the fork server died before PR_SET_PDEATHSIG took effect
            os._exit(0)
        _prctl(_PR_SET_NAME, f"caraserve-lora{index}".encode()[:15])
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
        work(region.base + offset, region.base, seen)
    finally:
        os._exit(1)


def _serve(connection: socket.socket, region: SharedRegion) -> None:
    """Answers fork requests until the server closes the socket or dies, which it may do between any two steps."""
    with contextlib.suppress(ConnectionError):
        while message := connection.recv(_MOST_MESSAGE_BYTES):
            request = json.loads(message)
            pid = _fork_worker(region, request["worker"], request["core"], request["offset"])
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError:  # it has died already
                socket.send_fds(connection, [json.dumps({"worker": request["worker"]}).encode()], [])
                continue
            socket.send_fds(connection, [json.dumps({"worker": request["worker"], "pid": pid}).encode()], [pidfd])
            os.close(pidfd)


def main() -> None:
    """Answers fork requests until the server closes the socket or dies.

    argv: descriptors of the socket and of the shared region, then the bytes of the region.
    """
    connection = socket.socket(fileno=int(sys.argv[1]))
    region = SharedRegion(int(sys.argv[3]), fd=int(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children; the server sees deaths through pidfds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    _prctl(_PR_SET_NAME, b"caraserve-fork")
    from caraserve.cpu.lora_workers.worker import compile_worker

    compile_worker()
    _check_alone()
    _serve(connection, region)


if __name__ == "__main__":
    main()
