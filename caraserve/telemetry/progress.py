"""Long work as people see it: a bar on a terminal, one log line elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

log = logging.getLogger(__name__)

_FUNCTIONS = 95  # that a first start compiles, more or less; only shown
_TELL_S = 2.0  # between log lines


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives what is to be called `total` times."""
    console = Console(stderr=True)
    started_s = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
    log.info("%s loaded in %.1f s", label, time.monotonic() - started_s)


class CompileProgress:
    """What is told of the compilation of CPU kernels: nothing where all of them come from the cache."""

    def __init__(self) -> None:
        self._done = 0
        self._started_s = self._told_s = 0.0

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[], None]]:
        """Gives what is to be called for each compiled function. Several stretches of work count together."""
        console = Console(stderr=True)
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            yield lambda: self._count(bar)

    def _count(self, bar: Progress) -> None:
        now_s = time.monotonic()
        if self._done == 0:
            self._started_s = self._told_s = now_s
            log.info("compiling CPU kernels; later starts have them from the cache")
        self._done += 1
        if not bar.tasks:
            bar.add_task("compiling CPU kernels", total=_FUNCTIONS)
        bar.update(bar.task_ids[0], completed=min(self._done, _FUNCTIONS))
        if now_s - self._told_s >= _TELL_S and bar.disable:
            self._told_s = now_s
            log.info(
                "compiling CPU kernels %d/%d, %.0f s", self._done, max(self._done, _FUNCTIONS), now_s - self._started_s
            )
