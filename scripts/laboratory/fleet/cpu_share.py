"""Confines processes to a share of one core, by control groups (version 1) of Linux.

Instances that share a machine then cannot slow one another down, except by memory bandwidth. A share is pinned to one
core as well: threads of one process would otherwise use up its quota on two cores at once, and wait on both.

Each share has a process that computes whenever nothing else in it does. Without one, a process that has been idle runs
the first 4 ms at the full speed of the core, before its quota is used up; with it a share is at any time as slow as a
core of a fifth of the speed, but for 20 ms or less.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from caraserve.bench.servers import end_with_parent
from caraserve.errors import ConfigError

_CPU = Path("/sys/fs/cgroup/cpu")
# A kernel with 250 ticks a second takes a core away at a tick only: a process that computes gets 4 ms at a time,
# whatever the period. A fifth of a core is then exactly 4 ms in 20; other shares are rounded.
PERIOD_US = 5000


@dataclass(frozen=True, slots=True)
class CpuShare:
    """A control group with `cores` of the core `core`. It applies from `limit` on; before, only the pinning does."""

    folder: Path
    core: int
    cores: float

    def join(self) -> None:
        """Moves the calling process, and threads and processes that it will start, into the share."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))
        os.sched_setaffinity(0, {self.core})

    def limit(self) -> None:
        """Applies the share to the processes in it."""
        (self.folder / "cpu.cfs_quota_us").write_text(str(round(self.cores * PERIOD_US)))

    def unlimit(self) -> None:
        """Lets the processes use their whole core, so that they start quickly."""
        (self.folder / "cpu.cfs_quota_us").write_text("-1")


@contextmanager
def cpu_shares(count: int, cores: float, first: int = 0) -> Iterator[Sequence[CpuShare]]:
    """Yields `count` shares, dealt to the cores in turn from the one with index `first` on; removes them on exit.

    Raises ConfigError without control groups of version 1, without the right to create them, or if a core would have
    more shares than fit.
    """
    usable = sorted(os.sched_getaffinity(0))
    if -(-count // len(usable)) * cores > 1:
        raise ConfigError(f"{count} shares of {cores:g} do not fit on {len(usable)} cores; use fewer or smaller ones")
    if not (_CPU / "cpu.cfs_quota_us").exists() and not (_CPU / "cpu.shares").exists():
        raise ConfigError(f"instances cannot be confined: {_CPU} has no CPU controller of control groups version 1")
    with ExitStack() as stack:
        shares = []
        for number in range(count):
            folder = _CPU / f"caraserve-{os.getpid()}-{number}"
            try:
                folder.mkdir()
                stack.callback(_remove, folder)
                (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            except OSError as error:
                raise ConfigError(f"instances cannot be confined: {folder}: {error.strerror}; run as root") from None
            share = CpuShare(folder, usable[(first + number) % len(usable)], cores)
            stack.enter_context(_filled(share))
            shares.append(share)
        yield shares


@contextmanager
def _filled(share: CpuShare) -> Iterator[None]:
    """Runs a process that takes what the others leave of a share."""

    def prepare() -> None:
        end_with_parent()
        share.join()
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))

    with subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], preexec_fn=prepare) as filler:
        try:
            yield
        finally:
            filler.kill()


def _remove(folder: Path) -> None:
    """Removes a control group; processes that are left in it go to the group of all."""
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(OSError):
                (_CPU / "cgroup.procs").write_text(pid)
        folder.rmdir()
