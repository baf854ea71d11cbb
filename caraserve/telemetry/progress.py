"""Progress of long work: a bar on a terminal, log lines elsewhere."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

log = logging.getLogger(__name__)

# For display: a first start compiles 137 in bfloat16 without adapters, 154 for a GGUF file of two types.
_FUNCTIONS = 150
_LOG_S = 2.0  # between log lines


def terminal_bar() -> Progress:
    """Returns a bar on stderr that vanishes at its end, and that is disabled where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal)


@contextlib.contextmanager
def progress(label: str, total: int, *, done: str | None = None) -> Iterator[Callable[[], None]]:
    """Yields a function to call `total` times, and logs the time that the work took, unless there was none.

    `done`: what the line says of finished work; None: that `label` is loaded.
    """
    started_s, is_begun = time.monotonic(), False
    with terminal_bar() as bar:
        task = bar.add_task(label, total=total)

        def advance() -> None:
            nonlocal is_begun
            is_begun = True
            bar.advance(task)

        yield advance
    if is_begun:
        log.info("%s in %.1f s", done or f"{label} loaded", time.monotonic() - started_s)


class CompileProgress:
    """Progress of compiling CPU kernels. Shows nothing when all come from the cache."""

    def __init__(self) -> None:
        self._done = 0
        self._started_s = self._logged_s = 0.0

    @contextlib.contextmanager
    def shown(self) -> Iterator[Callable[[], None]]:
        """Yields a function to call for each compiled function. Counts over all uses of this object."""
        with terminal_bar() as bar:
            yield lambda: self._count(bar)

    def _count(self, bar: Progress) -> None:
        now_s = time.monotonic()
        if self._done == 0:
            self._started_s = self._logged_s = now_s
            log.info("compiling CPU kernels; later starts have them from the cache")
        self._done += 1
        if not bar.tasks:
            bar.add_task("compiling CPU kernels", total=_FUNCTIONS)
        bar.update(bar.task_ids[0], completed=min(self._done, _FUNCTIONS))
        if now_s - self._logged_s >= _LOG_S and bar.disable:
            self._logged_s = now_s
            log.info(
                "compiling CPU kernels, %d of about %d, %.0f s",
                self._done,
                max(self._done, _FUNCTIONS),
                now_s - self._started_s,
            )
