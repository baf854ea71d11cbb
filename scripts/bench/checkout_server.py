"""Starts the server of a checkout, so that several checkouts can be measured in turns."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

OWN = Path(__file__).parents[2]  # the checkout of this script
CORES = sorted(os.sched_getaffinity(0))  # the server has the first, the client the last

_READY = re.compile(rb"ready at http://\S+:(\d+)")
_OPTIONS = ("--port", "0", "--device", "cpu", "--cpu-threads", "1", "--max-queue", "2048", "--no-log-requests")


@contextmanager
def server_of(
    tree: Path, *, clock: Sequence[str] | None, options: Sequence[str] = (), is_urgent: bool = False
) -> Iterator[tuple[int, int]]:
    """Starts the server of a checkout on the first core, with the demo model; yields its port and its process. `clock`:
    options of clock_server.py, which makes a clock its device; None: the CPU is. `is_urgent`: it does not share its
    core with processes that happen to run beside it, where the system allows that."""
    module = ["-m", "caraserve"] if clock is None else [str(Path(__file__).with_name("clock_server.py")), *clock]
    # A clock that takes no time would make a profile of none.
    profile = [] if clock is None else ["--profile", str(tree / "tests" / "profile.json")]
    command = ["taskset", "-c", str(CORES[0]), sys.executable, *module, "serve", *_OPTIONS, *profile, *options]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    prepare = _become_urgent if is_urgent else None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, cwd=tree, preexec_fn=prepare
    ) as process:
        try:
            yield _port(process), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def _become_urgent() -> None:
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _port(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    shown = b""
    for line in process.stdout:
        shown += line
        if (ready := _READY.search(line)) is not None:
            return int(ready[1])
    raise SystemExit(f"The server ended:\n{shown.decode(errors='replace')[-3000:]}")
