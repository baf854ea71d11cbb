"""Runs the stages one after another within the time for all, or several at once, and writes and prints each one's
results at once."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from caraserve.bench.records import commit, today
from caraserve.bench.report.tables import TextTable, to_rich
from caraserve.gpu.driver.detect import Gpu
from scripts.laboratory.gpu.processes import GRACE_S, Known, StageProcess, end_running, run_process
from scripts.laboratory.gpu.results import Outcome, StageReport
from scripts.laboratory.gpu.stages import Stage

RESULTS = Path("scripts/bench/results")
_SCHEMA = 3
_DRIVER = Path("/sys/module/nvidia/version")  # of the kernel module


def file_name(check: str, device: str) -> str:
    """Returns the name of the file for a device with this name; `check` is a word for what was run."""
    words = re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))
    return f"gpu_{check}_{'_'.join(words)}.json"


def origin(gpu: Gpu) -> dict[str, str]:
    """Returns where and when results are made: the card, its driver, the commit, the date."""
    driver = _DRIVER.read_text().strip() if _DRIVER.exists() else ""
    cuda = f"CUDA {gpu.driver_version // 1000}.{gpu.driver_version % 1000 // 10}"
    return {
        "device": gpu.name,
        "driver": f"{driver} ({cuda})" if driver else cuda,
        "commit": commit() or "unknown",
        "date": today(),
    }


class ResultsFile:
    """One entry for each stage. A stage that is run again replaces its own entry and no other, one that is not begun
    replaces none."""

    def __init__(self, path: Path, made: Mapping[str, str]) -> None:
        """`made`: where and when results are made that are added. Entries of an older form are not kept. Raises
        ValueError for a damaged file."""
        self.path, self._made = path, made
        self._stages: dict[str, Any] = {}
        if path.exists():
            self._stages = _stages_in(path)

    def add(self, name: str, report: StageReport, spent_s: float) -> None:
        """Adds a stage and writes the file. Another file is renamed, so that a reader never finds half of it."""
        if report.outcome is Outcome.NOT_BEGUN and name in self._stages:
            return
        self._stages[name] = {
            **self._made,
            "s": round(spent_s, 1),
            "outcome": report.outcome,
            "error": report.error,
            "figures": report.figures,
            "lines": [[line.what, line.value, line.target, line.met] for line in report.lines],
        }
        document = {"check": "gpu", "schema": _SCHEMA, "stages": self._stages}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        made = self.path.with_name(f"{self.path.name}.new")
        made.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        made.replace(self.path)


def _stages_in(path: Path) -> dict[str, Any]:
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged, remove it or repair it: {error}") from None
    if not isinstance(before, dict) or not isinstance(stages := before.get("stages"), dict):
        raise ValueError(f"{path} is damaged, remove it or repair it: it has no stages")
    return stages if before.get("schema") == _SCHEMA else {}


_WIDTH = 140
_LEAST_SHARE = 0.5  # of a stage's budget; with less time left it is not begun

RunStage = Callable[[Stage, Known], StageReport]


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage, its report and the seconds it took."""

    stage: Stage
    report: StageReport
    spent_s: float

    @property
    def is_wrong(self) -> bool:
        return self.stage.decides and self.report.outcome is Outcome.WRONG


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDTH
    return Console(width=width, highlight=False, markup=False, soft_wrap=True)


def process_runner(like: StageProcess) -> RunStage:
    """Returns a function that runs each stage in a process as `like`, with a folder of its own in that one's."""

    def run(stage: Stage, known: Known) -> StageReport:
        mine = replace(like, name=stage.name, folder=like.folder / stage.name, budget_s=stage.budget_s, known=known)
        return run_process(mine)

    return run


def check(
    stages: Sequence[Stage],
    run: RunStage,
    results: ResultsFile,
    budget_s: float,
    *,
    at_once: int = 1,
    time_anyway: bool = False,
) -> int:
    """Runs the stages, up to `at_once` of them at a time. After each, prints its results and adds them to `results`.

    A stage gets its budget or the time left, if that is less, and is killed `GRACE_S` after that at the latest: no
    stage ends after `budget_s`. Stages are timed also after wrong results with `time_anyway`. Returns exit code 1 if
    any stage did not end well.
    """
    runs = _Runs(run, results, time.monotonic() + budget_s, time_anyway)
    started_s = time.monotonic()
    if at_once == 1:
        for stage in stages:
            runs.run(stage)
    else:
        for stage in (stage for stage in stages if stage.is_alone):
            runs.run(stage)
        _run_together(runs, [stage for stage in stages if not stage.is_alone], at_once)
    ran = sorted(runs.ran, key=lambda each: stages.index(each.stage))
    runs.console.print(_summary(ran))
    runs.console.print(f"{time.monotonic() - started_s:.0f} s in all; written to {results.path}")
    return int(any(each.report.outcome is not Outcome.DONE for each in ran))


def _run_together(runs: "_Runs", stages: Sequence[Stage], at_once: int) -> None:
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(runs.run, stages))
        except BaseException:  # Ctrl-C: the pool would wait for all stages
            pool.shutdown(wait=False, cancel_futures=True)
            end_running()
            raise


@dataclass(slots=True)
class _Runs:
    """What has run so far. Threads may run stages at the same time."""

    start: RunStage
    results: ResultsFile
    until_s: float
    time_anyway: bool
    ran: list[StageRun] = field(default_factory=list)
    console: Console = field(default_factory=_console)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stage: Stage) -> None:
        """Runs a stage if nothing prevents it, and reports on it."""
        begun_s = time.monotonic()
        left_s = self.until_s - begun_s
        limited = replace(stage, budget_s=min(stage.budget_s, left_s - GRACE_S))
        with self._lock:
            known = {each.stage.name: each.report.figures for each in self.ran}
            reason = self._obstacle(stage, limited, left_s)
            if not reason:
                self.console.print(f"{stage.name}: {stage.description} …")
        report = StageReport(Outcome.NOT_BEGUN, reason) if reason else self.start(limited, known)
        with self._lock:
            self.ran.append(StageRun(stage, report, time.monotonic() - begun_s))
            self.results.add(stage.name, report, self.ran[-1].spent_s)
            self.console.print(_table(self.ran[-1]))

    def _obstacle(self, stage: Stage, limited: Stage, left_s: float) -> str:
        """Returns why a stage cannot begin, or "" if it can."""
        wrong = next((each.stage.name for each in self.ran if each.is_wrong), None)
        if wrong is not None and stage.is_timed and not self.time_anyway:
            return f"{wrong} found wrong results, so speeds mean nothing"
        if limited.budget_s < _LEAST_SHARE * stage.budget_s:
            needed_s = _LEAST_SHARE * stage.budget_s + GRACE_S
            return f"{max(left_s, 0):.0f} s are left for all, and it needs {needed_s:.0f}"
        return ""


def _table(run: StageRun) -> Table:
    """Returns the results of one stage."""
    marks = {True: "met", False: "MISSED", None: ""}
    rows = [(line.what, line.value, line.target, marks[line.met]) for line in run.report.lines]
    if run.report.outcome is not Outcome.DONE:
        rows.append((run.report.outcome.upper(), run.report.error, "", ""))
    return to_rich(TextTable(f"{run.stage.name}: {run.spent_s:.1f} s", ("what", "found", "target", ""), rows, left=4))


def _summary(ran: Sequence[StageRun]) -> Table:
    """Returns a line for each stage: how it ended, and which targets it missed."""
    rows = []
    for each in ran:
        judged = [line for line in each.report.lines if line.met is not None]
        missed = [f"{line.what}: {line.value}" for line in judged if not line.met]
        met = f"{len(judged) - len(missed)} of {len(judged)}" if judged else ""
        reasons = "\n".join([*filter(None, [each.report.error]), *missed])
        rows.append((each.stage.name, f"{each.spent_s:.1f}", each.report.outcome, met, reasons))
    heads = ("stage", "s", "outcome", "targets met", "missed, or what happened")
    return to_rich(TextTable("GPU check", heads, rows, left=5))
