"""The server's side of the CPU LoRA workers: starts them, notices when one dies or is stuck, replaces it.

A thread of its own sleeps until a worker's descriptor says that it has died, or the zygote's socket says that one has
been born. Only while a hand-off is under way does it look now and then whether a worker's progress has stopped: such a
worker is killed, for it can be neither asked nor trusted. Whoever waits for it has gone on by then (assist.py).
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
from caraserve.cpu.shared_memory import SharedRegion

log = logging.getLogger(__name__)

_LOOK_S = 0.01  # between two looks at the progress of workers that have something to do
_STUCK_S = 0.03  # without progress: a block of tokens takes a few ms at most
_RETRY_S = (0.0, 0.0, 0.0, 0.1, 1.0)  # before the next birth, by deaths within a minute; the last for all others
_CALM_S = 60.0


@dataclass(slots=True)
class _Worker:
    """One place for a worker and whoever fills it now."""

    index: int
    core: int
    words: NDArray[np.int64]  # its block
    offset: int  # of the block in the shared region
    pid: int | None = None
    pidfd: int | None = None
    deaths: int = 0
    died_s: float = 0.0
    born_again_s: float | None = 0.0  # when to ask for the next one; None: asked, or there
    before: int = 0  # the last hand-off that was asked of another life
    progress: int = 0
    progress_s: float = 0.0

    def word(self, at: int) -> int:
        return int(self.words[at // 8])

    @property
    def is_busy(self) -> bool:
        """Whether the present life has been asked for something that it has not done."""
        request = self.word(REQUEST)
        return bool(self.word(INCARNATION)) and request != self.before and request != self.word(DONE)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker at one moment, for metrics and tests."""

    pid: int | None
    core: int
    hand_offs: int
    deaths: int
    is_busy: bool
    is_asleep: bool
    incarnation: int  # number of the present life; 0: nobody is there


class Workers:
    """As many workers as cores are given, each pinned to one. `start` returns at once; they appear as they are born."""

    def __init__(self, region: SharedRegion, blocks: NDArray[np.uint8], cores: Sequence[int], block_bytes: int) -> None:
        """`blocks`: the workers' blocks of words and slices (handoff.py), in `region`."""
        self._region = region
        self._workers = [
            _Worker(index, core, block.view(np.int64), region.offset(int(block.ctypes.data)))
            for index, core in enumerate(cores)
            for block in [blocks[index * block_bytes :][:block_bytes]]
        ]
        self._incarnations = 0
        self._zygote: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._closing = False
        self._watching = self._looking = False
        self._zygote_deaths = 0
        self._zygote_from_s = 0.0  # when it may be started
        self._thread: threading.Thread | None = None
        self.changed = threading.Condition()  # notified when a worker is born or dies

    def __len__(self) -> int:
        return len(self._workers)

    def start(self) -> None:
        """Starts the zygote and asks for the workers. The kernels must be in the cache by now, or it compiles too."""
        if self._workers:
            self._thread = threading.Thread(target=self._supervise, name="caraserve-workers", daemon=True)
            self._thread.start()

    def watch(self, watching: bool) -> None:
        """Says whether hand-offs are under way, and progress is to be looked after. Cheap; from any thread."""
        if self._watching != watching:
            self._watching = watching
            if watching:
                os.eventfd_write(self._wake, 1)

    def keep_awake(self, awake: bool) -> None:
        """Has all workers stay awake while a device, which cannot wake them, may hand layers over."""
        from caraserve.cpu.lora_workers.worker import keep_awake

        for worker in self._workers:
            keep_awake(int(worker.words.ctypes.data), awake)

    def states(self) -> list[WorkerState]:
        """All places."""
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
        """When each worker began and ended its last hand-off, by the monotonic clock."""
        return [(worker.word(STARTED_NS), worker.word(ENDED_NS)) for worker in self._workers]

    def await_all(self, timeout_s: float) -> bool:
        """Waits until every place is filled; for benchmarks, profiles and tests."""
        with self.changed:
            return self.changed.wait_for(lambda: all(state.pid for state in self.states()), timeout_s)

    def close(self) -> None:
        """Ends the zygote and all workers; returns when they are gone."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join()
        for worker in self._workers:
            worker.words[INCARNATION // 8] = 0
            self._kill(worker)
            if worker.pidfd is not None:
                selectors_wait(worker.pidfd)
                os.close(worker.pidfd)
                worker.pidfd = None
        self._end_zygote()
        self._selector.close()
        os.close(self._wake)

    # --- the supervisor's thread ---

    def _supervise(self) -> None:
        while not self._closing:
            if self._zygote is None and time.monotonic() >= self._zygote_from_s:
                self._start_zygote()
            for key, _ in self._selector.select(self._timeout_s()):
                if key.fileobj == self._wake:
                    os.eventfd_read(self._wake)
                elif key.data is None:
                    self._hear_zygote()
                else:
                    self._on_worker_exit(key.data)
            stuck = self._kill_stuck()
            self._looking = self._watching or stuck
            self._ask_again()

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        if self._zygote is None:
            return max(0.0, self._zygote_from_s - now_s)
        due = [worker.born_again_s - now_s for worker in self._workers if worker.born_again_s is not None]
        if self._looking:
            due.append(_LOOK_S)
        return max(0.0, min(due)) if due else None

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (theirs.fileno(), self._region.fd)
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OPENBLAS", "OMP", "MKL", "NUMBA")}
        paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._zygote = subprocess.Popen(
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
            start_new_session=True,  # a terminal's Ctrl-C is not for it
        )
        theirs.close()
        self._socket = ours
        self._selector.register(ours, selectors.EVENT_READ, None)

    def _ask_again(self) -> None:
        """Asks for a worker at every place that is empty and due."""
        now_s = time.monotonic()
        for worker in self._workers:
            if self._socket is not None and worker.born_again_s is not None and worker.born_again_s <= now_s:
                message = {"worker": worker.index, "core": worker.core, "offset": worker.offset + REQUEST}
                try:
                    self._socket.send(json.dumps(message).encode())
                except OSError:
                    self._lose_zygote()
                else:
                    worker.born_again_s = None

    def _hear_zygote(self) -> None:
        """A worker has been born, or the zygote has died."""
        assert self._socket is not None
        try:
            message, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
        except OSError:
            message, fds = b"", []
        if not message:
            self._lose_zygote()
            return
        told = json.loads(message)
        worker = self._workers[told["worker"]]
        if not fds:
            self._expect_again(worker)
            return
        worker.pid, worker.pidfd = told["pid"], fds[0]
        self._selector.register(worker.pidfd, selectors.EVENT_READ, worker)
        worker.progress, worker.progress_s = worker.word(PROGRESS), time.monotonic()
        worker.before = worker.word(REQUEST)  # nobody can ask this life for anything yet
        self._incarnations += 1
        worker.words[INCARNATION // 8] = self._incarnations
        with self.changed:
            self.changed.notify_all()

    def _on_worker_exit(self, worker: _Worker) -> None:
        worker.words[INCARNATION // 8] = 0  # first: somebody may be waiting for it
        assert worker.pidfd is not None
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        log.warning("CPU LoRA worker %d (pid %s) has died and is replaced", worker.index, worker.pid)
        worker.pid = worker.pidfd = None
        self._expect_again(worker)
        with self.changed:
            self.changed.notify_all()

    def _expect_again(self, worker: _Worker) -> None:
        now_s = time.monotonic()
        worker.deaths += 1
        recent = worker.deaths if now_s - worker.died_s < _CALM_S else 1
        worker.died_s = now_s
        worker.born_again_s = now_s + _RETRY_S[min(recent, len(_RETRY_S)) - 1]

    def _kill_stuck(self) -> bool:
        """Kills workers that have something to do and have not moved for a while. Whether any has something to do."""
        now_s, busy = time.monotonic(), False
        for worker in self._workers:
            if not worker.is_busy:
                worker.progress_s = now_s
                continue
            busy = True
            if (progress := worker.word(PROGRESS)) != worker.progress:
                worker.progress, worker.progress_s = progress, now_s
            elif now_s - worker.progress_s > _STUCK_S:
                log.warning("CPU LoRA worker %d (pid %s) is stuck and is killed", worker.index, worker.pid)
                self._kill(worker)
                worker.progress_s = now_s
        return busy

    @staticmethod
    def _kill(worker: _Worker) -> None:
        if worker.pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def _lose_zygote(self) -> None:
        """Its workers die with it and are buried one by one; those asked for and not born are asked for again."""
        log.warning("the parent of the CPU LoRA workers has died and is started again")
        self._end_zygote()
        self._zygote_from_s = time.monotonic() + _RETRY_S[min(self._zygote_deaths, len(_RETRY_S) - 1)]
        self._zygote_deaths += 1
        for worker in self._workers:
            if worker.pid is None:
                worker.born_again_s = 0.0

    def _end_zygote(self) -> None:
        if self._socket is not None:
            if self._selector.get_map() and self._socket in self._selector.get_map():
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait()
            self._zygote = None


def selectors_wait(fd: int) -> None:
    """Returns when `fd` is readable: for a process's descriptor, when it has died."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        selector.select()
