"""The metrics of this process and its interpreter, under the names that Prometheus' own clients give them."""

import gc
import os
import platform
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from caraserve.telemetry.prometheus import family, label_set

_PAGE_BYTES, _TICKS_PER_S = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_KEPT_S = 5.0  # for which values are used: counting 4,000 descriptors takes 1.5 ms, and some scrape all the time


class ProcessMetrics:
    """Reads /proc, at most every five seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._until_s = 0.0
        self._text: tuple[str, ...] = ()

    def families(self, labels: str) -> Iterator[str]:
        """Yields the families for GET /metrics. They have no `labels`: their names say that they are of a process."""
        if self._now() >= self._until_s:
            self._text = (*_process(), *_interpreter())
            self._until_s = self._now() + _KEPT_S
        yield from self._text


def _process() -> Iterator[str]:
    # The second field is the command in parentheses, which may hold spaces.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    user_ticks, system_ticks, start_ticks = int(fields[11]), int(fields[12]), int(fields[19])
    boot_s = next(float(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line[:5] == "btime")
    for name, kind, text, value in (
        ("cpu_seconds_total", "counter", "CPU time of the process.", (user_ticks + system_ticks) / _TICKS_PER_S),
        ("resident_memory_bytes", "gauge", "Resident memory.", int(fields[21]) * _PAGE_BYTES),
        ("virtual_memory_bytes", "gauge", "Virtual memory.", int(fields[20])),
        ("start_time_seconds", "gauge", "Unix time of the start.", boot_s + start_ticks / _TICKS_PER_S),
        ("open_fds", "gauge", "Open file descriptors.", len(os.listdir("/proc/self/fd"))),
        ("max_fds", "gauge", "Limit of open file descriptors.", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ):
        yield family(f"process_{name}", kind, text, [("", value)])


def _interpreter() -> Iterator[str]:
    major, minor, patch = platform.python_version_tuple()
    version = {"implementation": platform.python_implementation(), "major": major, "minor": minor, "patchlevel": patch}
    info = label_set(version | {"version": platform.python_version()})
    yield family("python_info", "gauge", "The interpreter.", [(info, 1)])
    generations = list(enumerate(gc.get_stats()))
    for name, field, text in (
        ("objects_collected", "collected", "Objects freed by the garbage collector."),
        ("objects_uncollectable", "uncollectable", "Objects that the garbage collector could not free."),
        ("collections", "collections", "Garbage collections."),
    ):
        values = [(f'generation="{generation}"', stats[field]) for generation, stats in generations]
        yield family(f"python_gc_{name}_total", "counter", text, values)
