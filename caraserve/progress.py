"""Long work as people see it: a bar on a terminal, one log line elsewhere. Level 6."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

log = logging.getLogger(__name__)


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """Gives what is to be called `total` times."""
    console = Console(stderr=True)
    started_s = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
    log.info("%s loaded in %.1f s", label, time.monotonic() - started_s)
