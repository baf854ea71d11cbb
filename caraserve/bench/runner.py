"""Performs the runs of a benchmark, and shows their progress: as a bar on a terminal, as a line every 30 s elsewhere.

Ctrl-C ends the current run and prevents further ones.
"""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from caraserve.bench.client.endpoint import Endpoint, adapter_loads
from caraserve.bench.client.player import LoadSettings, Player, RunProgress, report_progress
from caraserve.bench.records import PlannedRequest, Run, Workload
from caraserve.bench.time_left import TimeLeft

_SHOW_S = 1.0  # period of drawing, which delays requests by 1 to 2 ms
_LOG_S = 30.0  # between lines about a run where stderr is no terminal
_LOADS_S = 0.05  # between two looks at the loads under way
_WARM_TOKENS = 8  # prompt tokens of the request that makes the server read an adapter


def _text(live: RunProgress, started_s: float, time_left: TimeLeft | None) -> str:
    """Returns the text beside the progress bar."""
    rate = live.done / max(time.monotonic() - started_s, 1e-9)
    parts = [f"{live.done}/{live.total}", f"{rate:.1f} requests/s"]
    if recent := sorted(live.recent_ttft_s):
        p50, p99 = (1000 * recent[int(share * (len(recent) - 1))] for share in (0.5, 0.99))
        parts.append(f"TTFT p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    if live.failed:
        parts.append(f"{live.failed} failed")
    if time_left is not None:
        parts.append(time_left.position())
    return " · ".join(parts)


class BenchmarkRunner:
    """Performs runs that can be interrupted. Use it inside `interruptible`."""

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        self._player: Player | None = None
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.stopped = asyncio.Event()
        self.time_left: TimeLeft | None = None  # of all runs, shown with each; None: unknown

    def log(self, text: str) -> None:
        """Prints a line to stderr."""
        self._console.print(text, markup=False)

    def interrupt(self) -> None:
        """Ends the current run and sets `stopped`."""
        self.stopped.set()
        if self._player is not None:
            self._player.stop()

    async def play(
        self, endpoint: Endpoint, workload: Workload, names: Sequence[str], label: str, concurrency: int | None = None
    ) -> Run:
        """Performs one run; `concurrency` makes it a closed loop. Raises OSError if the endpoint cannot be reached."""
        settings = self._fresh(concurrency or self._settings.max_concurrency)
        player = self._player = Player(endpoint, workload, names, settings, label)
        try:
            if self.stopped.is_set():
                return Run(label, (), 0.0, interrupted=True)
            if not self._console.is_terminal:
                self.log(f"{label}: sending {player.live.total} requests{self._position()}")
            with self._showing(label, player.live) as shown:
                watching = asyncio.create_task(report_progress(player, shown, _SHOW_S))
                try:
                    run = await player.play()
                finally:
                    watching.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await watching
        finally:
            self._player = None
        self.log(f"{label}: {len(run.records)} requests in {run.wall_s:.1f} s, {player.live.failed} failed")
        return run

    async def warm_up(self, endpoint: Endpoint, names: Sequence[str]) -> None:
        """Requests one token from every adapter in turn, so that the server has read all their files."""
        requests = tuple(PlannedRequest(index, 0.0, index, _WARM_TOKENS, 1) for index in range(len(names)))
        settings = self._fresh(1)
        player = self._player = Player(endpoint, Workload(requests, ()), names, settings, "warm-up")
        try:
            if requests and not self.stopped.is_set():
                await player.play()
        finally:
            self._player = None
        await self.await_loads(endpoint)

    async def await_loads(self, endpoint: Endpoint) -> None:
        """Returns when the server loads no adapter: with CPU workers an answer ends before its adapter is on the
        device. Raises OSError."""
        while not self.stopped.is_set() and (await adapter_loads(endpoint)).under_way:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stopped.wait(), _LOADS_S)

    def _position(self) -> str:
        return "" if self.time_left is None else f"; {self.time_left.position()}"

    def _fresh(self, concurrency: int | None) -> LoadSettings:
        """Returns settings with a new seed: an earlier run's prompts would hit the server's prefix cache."""
        return replace(self._settings, max_concurrency=concurrency, seed=secrets.randbits(63))

    @contextmanager
    def _showing(self, label: str, live: RunProgress) -> Iterator[Callable[[RunProgress], None]]:
        """Yields a function that shows progress, from the event loop's thread."""
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}")
        started_s = logged_s = time.monotonic()
        if not self._console.is_terminal:

            def log(live: RunProgress) -> None:
                nonlocal logged_s
                if (now_s := time.monotonic()) - logged_s >= _LOG_S:
                    logged_s = now_s
                    self.log(f"{label}: {_text(live, started_s, self.time_left)}")

            yield log
            return
        with Progress(*columns, console=self._console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task(label, total=live.total, text=_text(live, started_s, self.time_left))
            yield lambda live: progress.update(
                task, completed=live.done, text=_text(live, started_s, self.time_left), refresh=True
            )


@contextmanager
def interruptible(runner: BenchmarkRunner) -> Iterator[None]:
    """Makes SIGINT, SIGTERM and SIGHUP interrupt the runner instead of the program."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        loop.add_signal_handler(number, runner.interrupt)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
