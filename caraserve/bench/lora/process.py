"""Starts processes that measure on given cores.

This module imports neither NumPy nor torch: a child process is pinned before their thread pools start.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


def pin(cores: Sequence[int]) -> None:
    """Pins this process to cores. Call it before torch starts its threads, which keep the cores they start with."""
    os.sched_setaffinity(0, cores)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Makes processes that are started inside ignore Ctrl-C of a terminal; their parent ends them.

    In the parent, Ctrl-C raises KeyboardInterrupt on leaving the context, when the processes have fully started.
    """
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the processes inherit this mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            raise KeyboardInterrupt


@contextmanager
def pinned_process(cores: Sequence[int]) -> Iterator[ProcessPoolExecutor]:
    """Yields a pool of one spawned process on these cores, without threads or imports of this process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with deaf_to_interrupts():
            pool.submit(pin, tuple(cores)).result()
        yield pool
