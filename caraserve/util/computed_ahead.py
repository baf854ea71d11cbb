"""Calls a function for many items by several threads, and uses the results in order."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")

_MOST_THREADS = 8  # so many read files at the speed of the memory


@contextmanager
def computed_ahead(function: Callable[[T], U], items: Iterable[T]) -> Iterator[list[Callable[[], U]]]:
    """Yields a call for each item, in order, which returns the function's result or raises its error. At the end of the
    context, no thread runs any more, and what was not begun is left out."""
    threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "caraserve-ahead")
    try:
        yield [threads.submit(function, item).result for item in items]
    finally:
        threads.shutdown(cancel_futures=True)
