"""Performs the runs of a benchmark, and shows their progress and the time that is left.

On a terminal that is a bar, elsewhere a line every 30 s.

Ctrl-C ends the current run and prevents further ones.
"""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from caraserve.bench.client.dialects import LoadSettings
from caraserve.bench.client.endpoint import Endpoint, adapter_loads
from caraserve.bench.client.player import Player, RunProgress, report_progress
from caraserve.bench.records import PlannedRequest, Run, Workload

_SHOW_S = 1.0  # period of drawing, which delays requests by 1 to 2 ms
_LOG_S = 30.0  # between lines about a run where stderr is no terminal
_LOADS_S = 0.05  # between two looks at the loads under way
_BETWEEN_S = 5.0  # of a run beside its load: adapters are requested, the machine becomes calm, last answers end
_WARM_TOKENS = 8  # prompt tokens of the request that makes the server read an adapter


@dataclass(slots=True)
class TimeLeft:
    """Predicts the end of runs, first by their loads, then by the time that those before took.

    `load_s`: for how long a run sends requests, None if that depends on the answers. `start_s`: the time in which all
    servers start. `now`: a clock in seconds.
    """

    variants: int
    repeats: int
    load_s: float | None
    start_s: float
    now: Callable[[], float]
    _done: int = 0
    _begun_s: float = field(init=False)
    _ended_s: float = field(init=False)  # when the last of the runs that are done ended

    def __post_init__(self) -> None:
        self._begun_s = self._ended_s = self.now()

    def run_ended(self) -> None:
        """Counts a run as done."""
        self._done += 1
        self._ended_s = self.now()

    def outline(self) -> str:
        """Returns what will be run and how long it takes, for a line before the first run."""
        runs = self.variants * self.repeats
        text = f"{_counted(self.variants, 'mode')}, {_counted(self.repeats, 'repeat')}: {_counted(runs, 'run')}"
        if self.load_s is None:
            return f"{text}, as long as this machine needs; the time that is left is known after the first."
        expected = shown_duration(runs * (self.load_s + _BETWEEN_S) + self.start_s)
        return f"{text} of {shown_duration(self.load_s)} each, together about {expected}."

    def position(self) -> str:
        """Returns which run is under way, and how long all that are left take."""
        repeat, run = divmod(self._done, self.variants)
        left_s = self._left_s()
        text = f"run {run + 1} of {self.variants} in repeat {repeat + 1} of {self.repeats}"
        return text if left_s is None else f"{text}, about {shown_duration(left_s)} left"

    def _left_s(self) -> float | None:
        """Returns the rest of the run under way, none if it takes longer than expected, and all later runs."""
        if self._done:
            each_s, start_s = (self._ended_s - self._begun_s) / self._done, 0.0
        elif self.load_s is not None:
            each_s, start_s = self.load_s + _BETWEEN_S, self.start_s
        else:
            return None
        later = self.variants * self.repeats - self._done - 1
        return max(0.0, each_s - (self.now() - self._ended_s)) + start_s + later * each_s


def shown_duration(seconds: float) -> str:
    """Formats a time: `45 s`, `12 min`, `1 h 30 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def progress_text(live: RunProgress, elapsed_s: float, sent_after_s: float, time_left: TimeLeft | None) -> str:
    """Returns the text beside the progress bar. `sent_after_s`: from the start until the last request is sent."""
    rate = live.done / max(elapsed_s, 1e-9)
    parts = [f"{live.done}/{live.total}"]
    if time_left is not None:
        parts.append(time_left.position())
    elif live.done:  # a server that falls behind ends later than the load is sent
        left_s = max(sent_after_s - elapsed_s, (live.total - live.done) / rate)
        parts.append(f"about {shown_duration(left_s)} left")
    parts.append(f"{rate:.1f} requests/s")
    if recent := sorted(live.recent_ttft_s):
        parts.append(f"median TTFT {1000 * recent[len(recent) // 2]:.0f} ms")
    if live.failed:
        parts.append(f"{live.failed} failed")
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
                position = "" if self.time_left is None else f"; {self.time_left.position()}"
                self.log(f"{label}: sending {player.live.total} requests{position}")
            with self._showing(label, player.live, workload) as shown:
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

    def _fresh(self, concurrency: int | None) -> LoadSettings:
        """Returns settings with a new seed: an earlier run's prompts would hit the server's prefix cache."""
        return replace(self._settings, max_concurrency=concurrency, seed=secrets.randbits(63))

    @contextmanager
    def _showing(self, label: str, live: RunProgress, workload: Workload) -> Iterator[Callable[[RunProgress], None]]:
        """Yields a function that shows progress, from the event loop's thread."""
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[text]}")
        started_s = logged_s = time.monotonic()
        sent_after_s = max((one.at_s for one in workload.requests), default=0.0)

        def text(live: RunProgress) -> str:
            return progress_text(live, time.monotonic() - started_s, sent_after_s, self.time_left)

        if not self._console.is_terminal:

            def log(live: RunProgress) -> None:
                nonlocal logged_s
                if (now_s := time.monotonic()) - logged_s >= _LOG_S:
                    logged_s = now_s
                    self.log(f"{label}: {text(live)}")

            yield log
            return
        with Progress(*columns, console=self._console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task(label, total=live.total, text=text(live))
            yield lambda live: progress.update(task, completed=live.done, text=text(live), refresh=True)


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
