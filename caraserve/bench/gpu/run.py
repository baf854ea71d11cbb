"""Runs the stages one after another within the time for all, and writes and prints each one's results at once."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from caraserve.bench.gpu.processes import GRACE_S, Known, StageProcess, run_process
from caraserve.bench.gpu.results import Outcome, StageReport
from caraserve.bench.gpu.stages import Stage

_WIDTH = 140
_LEAST_SHARE = 0.5  # of a stage's budget; with less time left it is not begun
RESULTS = Path("scripts/bench/results")

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


def process_runner(folder: Path, server_arguments: Sequence[str]) -> RunStage:
    """Returns a function that runs each stage in a process with a folder of its own in `folder`."""

    def run(stage: Stage, known: Known) -> StageReport:
        mine = folder / stage.name
        return run_process(
            StageProcess(stage.name, mine, stage.budget_s, known=known, server_arguments=server_arguments)
        )

    return run


def check(stages: Sequence[Stage], run: RunStage, file: Path, budget_s: float) -> int:
    """Runs the stages. After each, prints its results and writes all so far to `file`.

    A stage gets its budget or the time left, if that is less, and is killed `GRACE_S` after that at the latest: no
    stage ends after `budget_s`. Returns exit code 1 if any stage did not end well.
    """
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False, soft_wrap=True)
    started_s, ran = time.monotonic(), list[StageRun]()
    for stage in stages:
        begun_s = time.monotonic()
        left_s = budget_s - (begun_s - started_s)
        limited = replace(stage, budget_s=min(stage.budget_s, left_s - GRACE_S))
        if reason := _obstacle(stage, limited, ran, left_s):
            report = StageReport(Outcome.NOT_BEGUN, reason)
        else:
            console.print(f"{stage.name}: {stage.description} …")
            report = run(limited, {each.stage.name: each.report.figures for each in ran})
        ran.append(StageRun(stage, report, time.monotonic() - begun_s))
        _write(ran, file)
        console.print(_table(ran[-1]))
    console.print(_summary(ran))
    console.print(f"{time.monotonic() - started_s:.0f} s in all; written to {file}")
    return int(any(each.report.outcome is not Outcome.DONE for each in ran))


def _obstacle(stage: Stage, limited: Stage, ran: Sequence[StageRun], left_s: float) -> str:
    """Returns why a stage cannot begin, or "" if it can."""
    wrong = next((each.stage.name for each in ran if each.is_wrong), None)
    if wrong is not None and stage.is_timed:
        return f"{wrong} found wrong results, so speeds mean nothing"
    if limited.budget_s < _LEAST_SHARE * stage.budget_s:
        return f"{max(left_s, 0):.0f} s are left for all, and it needs {_LEAST_SHARE * stage.budget_s + GRACE_S:.0f}"
    return ""


def file_name(device: str) -> str:
    """Returns the name of the results file for a device with this name."""
    words = re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))
    return f"gpu_check_{'_'.join(words)}.json"


def _write(ran: Sequence[StageRun], file: Path) -> None:
    """Writes all results so far as JSON. Another file is renamed, so that a reader never finds half of them."""
    document = {
        "check": "gpu",
        "schema": 2,
        "stages": {
            each.stage.name: {
                "s": round(each.spent_s, 1),
                "outcome": each.report.outcome,
                "error": each.report.error,
                "figures": each.report.figures,
                "lines": [[line.what, line.value, line.target, line.met] for line in each.report.lines],
            }
            for each in ran
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    made = file.with_name(f"{file.name}.new")
    made.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    made.replace(file)


def _table(run: StageRun) -> Table:
    """Returns the results of one stage."""
    table = Table(title=f"{run.stage.name}: {run.spent_s:.1f} s", title_justify="left")
    for head in ("what", "found", "target", ""):
        table.add_column(head)
    marks = {True: "met", False: "MISSED", None: ""}
    for line in run.report.lines:
        table.add_row(line.what, line.value, line.target, marks[line.met])
    if run.report.outcome is not Outcome.DONE:
        table.add_row(run.report.outcome.upper(), run.report.error)
    return table


def _summary(ran: Sequence[StageRun]) -> Table:
    """Returns a line for each stage: how it ended, and which targets it missed."""
    table = Table(title="GPU check", title_justify="left")
    for head in ("stage", "s", "outcome", "targets met", "missed, or what happened"):
        table.add_column(head, justify="right" if head == "s" else "left")
    for each in ran:
        judged = [line for line in each.report.lines if line.met is not None]
        missed = [f"{line.what}: {line.value}" for line in judged if not line.met]
        met = f"{len(judged) - len(missed)} of {len(judged)}" if judged else ""
        table.add_row(
            each.stage.name,
            f"{each.spent_s:.1f}",
            each.report.outcome,
            met,
            "\n".join([*filter(None, [each.report.error]), *missed]),
        )
    return table
