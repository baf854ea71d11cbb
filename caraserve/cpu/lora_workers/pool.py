"""The pool of CPU LoRA workers: starts them, detects dead and stuck ones, replaces them.

A supervisor thread sleeps until a worker's pidfd reports its death or the fork server's socket a new worker. Only while
hand-offs are under way it also checks every 10 ms whether workers make progress: a stuck worker is killed and replaced.
The caller that waits for its result has computed the slice itself by then (compute_side.py).
"""

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.handoff import ASLEEP, DONE, ENDED_NS, INCARNATION, PROGRESS, REQUEST, STARTED_NS
from caraserve.cpu.memory_order import keep_order
from caraserve.cpu.shared_memory import SharedRegion

log = logging.getLogger(__name__)

_CHECK_S = 0.01  # between two checks of the progress of busy workers
_STUCK_S = 0.03  # without progress: a block of tokens takes a few ms at most
# A worker that waits for a core is not replaced: on a busy machine the next one would wait as long, after a restart of
# some ms. The device computes its slice meanwhile.
_STUCK_RUNNABLE_S = 1.0
_RETRY_S = (0.0, 0.0, 0.0, 0.1, 1.0)  # before a restart, by deaths within a minute; the last for all later ones
_RECENT_DEATH_S = 60.0


@dataclass(slots=True)
class _Worker:
    """One place in the pool, and the process that fills it now."""

    index: int
    core: int
    words: NDArray[np.int64]  # its block
    offset: int  # of the block in the shared region
    pid: int | None = None
    pidfd: int | None = None
    deaths: int = 0
    died_s: float = 0.0
    restart_s: float | None = 0.0  # when to request a fork; None: requested, or running
    before: int = 0  # number of the last hand-off that an earlier process got
    progress: int = 0
    progress_s: float = 0.0

    def word(self, at: int) -> int:
        value = int(self.words[at // 8])
        keep_order()
        return value

    def set_incarnation(self, number: int) -> None:
        """Says which process serves hand-offs from now on; 0: none."""
        keep_order()
        self.words[INCARNATION // 8] = number

    @property
    def is_busy(self) -> bool:
        """True if the present process has a hand-off that it has not finished."""
        request = self.word(REQUEST)
        return bool(self.word(INCARNATION)) and request != self.before and request != self.word(DONE)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker at one moment."""

    pid: int | None
    core: int
    hand_offs: int  # number of the last one computed
    deaths: int
    is_busy: bool
    is_asleep: bool
    incarnation: int  # number of the present process; 0: there is none


class WorkerPool:
    """One worker for each of `cores`, pinned to it. `start` returns before the workers run."""

    def __init__(self, region: SharedRegion, blocks: NDArray[np.uint8], cores: Sequence[int], block_bytes: int) -> None:
        """`blocks`: the workers' blocks of words and slices (handoff.py), uint8, in `region`; `block_bytes` each."""
        self._region = region
        self._workers = [
            _Worker(index, core, block.view(np.int64), region.offset(int(block.ctypes.data)))
            for index, core in enumerate(cores)
            for block in [blocks[index * block_bytes :][:block_bytes]]
        ]
        self._incarnations = 0
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._closing = False
        self._watching = self._looking = False
        self._fork_server_deaths = 0
        self._fork_server_from_s = 0.0  # earliest time to start it
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition()  # notified when a worker starts or dies

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> None:
        """Starts the fork server and the workers. They compile too, unless the kernels are in the cache by now."""
        if self._workers:
            self._thread = threading.Thread(target=self._supervise, name="caraserve-workers", daemon=True)
            self._thread.start()

    def watch(self, watching: bool) -> None:
        """Turns checks of progress on while hand-offs are under way. Cheap; from any thread."""
        if self._watching != watching:
            self._watching = watching
            if watching:
                os.eventfd_write(self._wake, 1)

    def keep_awake(self, awake: bool) -> None:
        """Keeps all workers from sleeping while a device, which cannot wake them, may hand layers off."""
        from caraserve.cpu.lora_workers.worker import keep_awake

        for worker in self._workers:
            keep_awake(int(worker.words.ctypes.data), awake)

    def states(self) -> list[WorkerState]:
        """Returns the state of every place, in the order of `cores`."""
        return [
            WorkerState(
                worker.pid if worker.word(INCARNATION) else None,
                worker.core,
                worker.word(DONE),
                worker.deaths,
                worker.is_busy,
                bool(worker.word(ASLEEP)),
                worker.word(INCARNATION),
            )
            for worker in self._workers
        ]

    def last_times_ns(self) -> list[tuple[int, int]]:
        """Returns when each worker began and ended its last hand-off, by the monotonic clock."""
        return [(worker.word(STARTED_NS), worker.word(ENDED_NS)) for worker in self._workers]

    def await_all(self, timeout_s: float) -> bool:
        """Waits until every worker runs. Returns False after `timeout_s`."""
        with self.changed:
            return self.changed.wait_for(lambda: all(state.pid for state in self.states()), timeout_s)

    def close(self) -> None:
        """Ends the fork server and all workers; returns when they have died."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        for worker in self._workers:
            worker.set_incarnation(0)
            self._kill(worker)
            if worker.pidfd is not None:
                _await_readable(worker.pidfd)
                os.close(worker.pidfd)
                worker.pidfd = None
        self._end_fork_server()
        self._selector.close()
        os.close(self._wake)

    # --- on the supervisor's thread ---

    def _supervise(self) -> None:
        while not self._closing:
            if self._fork_server is None and time.monotonic() >= self._fork_server_from_s:
                self._start_fork_server()
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                elif key.data is None:
                    self._receive_fork()
                else:
                    self._on_worker_exit(key.data)
            stuck = self._kill_stuck()
            self._looking = self._watching or stuck
            self._request_forks()

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        if self._fork_server is None:
            return max(0.0, self._fork_server_from_s - now_s)
        due = [worker.restart_s - now_s for worker in self._workers if worker.restart_s is not None]
        if self._looking:
            due.append(_CHECK_S)
        return max(0.0, min(due)) if due else None

    def _start_fork_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), self._region.fd)
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMBA")}
        paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._fork_server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "caraserve.cpu.lora_workers.fork_server",
                *map(str, fds),
                str(self._region.num_bytes),
            ],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env=os.environ | threads | {"PYTHONPATH": paths},
            start_new_session=True,  # a terminal's Ctrl-C must not reach it
        )
        theirs.close()
        self._socket = ours
        self._selector.register(ours, selectors.EVENT_READ, None)

    def _request_forks(self) -> None:
        """Requests a fork for every empty place that is due."""
        now_s = time.monotonic()
        for worker in self._workers:
            if self._socket is not None and worker.restart_s is not None and worker.restart_s <= now_s:
                message = {"worker": worker.index, "core": worker.core, "offset": worker.offset + REQUEST}
                try:
                    self._socket.send(json.dumps(message).encode())
                except OSError:
                    self._restart_fork_server()
                else:
                    worker.restart_s = None

    def _receive_fork(self) -> None:
        """Registers a new worker, or restarts a fork server that has died."""
        assert self._socket is not None
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            self._restart_fork_server()
            return
        forked = json.loads(message)
        worker = self._workers[forked["worker"]]
        if not fds:
            self._schedule_restart(worker)
            return
        worker.pid, worker.pidfd = forked["pid"], fds[0]
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        worker.progress, worker.progress_s = worker.word(PROGRESS), time.monotonic()
        worker.before = worker.word(REQUEST)  # no hand-off can name this process yet
        self._incarnations += 1
        worker.set_incarnation(self._incarnations)
        with self.changed:
            self.changed.notify_all()

    def _on_worker_exit(self, worker: _Worker) -> None:
        worker.set_incarnation(0)  # first: a caller may be waiting for it
        assert worker.pidfd is not None
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        log.warning("CPU LoRA worker %d (pid %s) has died and is replaced", worker.index, worker.pid)
        worker.pid = worker.pidfd = None
        self._schedule_restart(worker)
        with self.changed:
            self.changed.notify_all()

    def _schedule_restart(self, worker: _Worker) -> None:
        now_s = time.monotonic()
        worker.deaths += 1
        recent = worker.deaths if now_s - worker.died_s < _RECENT_DEATH_S else 1
        worker.died_s = now_s
        worker.restart_s = now_s + _RETRY_S[min(recent, len(_RETRY_S)) - 1]

    def _kill_stuck(self) -> bool:
        """Kills busy workers without progress for 30 ms, or for 1 s if they can run. Returns whether any is busy."""
        now_s, busy = time.monotonic(), False
        for worker in self._workers:
            if not worker.is_busy:
                worker.progress_s = now_s
                continue
            busy = True
            if (progress := worker.word(PROGRESS)) != worker.progress:
                worker.progress, worker.progress_s = progress, now_s
                continue
            idle_s = now_s - worker.progress_s
            if idle_s > _STUCK_S and (idle_s > _STUCK_RUNNABLE_S or not _is_runnable(worker.pid)):
                log.warning("CPU LoRA worker %d (pid %s) is stuck and is killed", worker.index, worker.pid)
                self._kill(worker)
                worker.progress_s = now_s
        return busy

    @staticmethod
    def _kill(worker: _Worker) -> None:
        if worker.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _restart_fork_server(self) -> None:
        """Schedules a new fork server. The workers die with the old one; pending forks are requested again."""
        log.warning("the parent of the CPU LoRA workers has died and is started again")
        self._end_fork_server()
        self._fork_server_from_s = time.monotonic() + _RETRY_S[min(self._fork_server_deaths, len(_RETRY_S) - 1)]
        self._fork_server_deaths += 1
        for worker in self._workers:
            if worker.pid is None:
                worker.restart_s = 0.0

    def _end_fork_server(self) -> None:
        if self._socket is not None:
            if self._selector.get_map() and self._socket in self._selector.get_map():
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        if self._fork_server is not None:
            self._fork_server.kill()
            self._fork_server.wait()
            self._fork_server = None


def _is_runnable(pid: int | None) -> bool:
    """Returns whether a process runs or waits for a core, rather than being stopped, blocked or dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] == b"R"  # the command's name, in parentheses, may hold any character


def _await_readable(fd: int) -> None:
    """Returns when `fd` is readable: for a pidfd, when the process has died."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        selector.select()
