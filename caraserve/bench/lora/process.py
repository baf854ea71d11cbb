"""Processes that measure on cores of their own.

This module imports neither NumPy nor torch: a child process is pinned before their thread pools start.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


def pin(cores: Sequence[int]) -> None:
    """Keeps this process on some cores; before torch starts threads, which stay where they were born."""
    os.sched_setaffinity(0, cores)


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside never see a terminal's Ctrl-C: whoever started them does, and ends them. And it sees it
    only when they are started whole: one that is half started would complain of its parent."""
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what the processes inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if came:
            raise KeyboardInterrupt


@contextmanager
def pinned_process(cores: Sequence[int]) -> Iterator[ProcessPoolExecutor]:
    """One process, started anew: no thread, no imported package and no thread count of this one is in it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with deaf_to_interrupts():
            pool.submit(pin, tuple(cores)).result()
        yield pool
