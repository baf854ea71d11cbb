"""Runs the stages one after another, each in its own process, so that a failure or hang cannot affect later stages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from caraserve.bench.gpu.results import Figures, ResultLine, StageResult
from caraserve.bench.gpu.setup import CheckSetup

_GRACE_S = 30.0  # a stage skips points when its budget is spent, and is killed this much later
_WIDTH = 140
RESULTS = Path("scripts/bench/results")


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. If `is_required`, no later stage runs after it has failed. `description` is for --help."""

    name: str
    budget_s: float
    description: str
    is_required: bool = False
    package: str = "caraserve.bench.gpu"

    def run(self, setup: CheckSetup) -> StageResult:
        """Calls the function of the stage's name in the module of that name. Raises whatever that raises."""
        function: Callable[[CheckSetup], StageResult] = getattr(import_module(f"{self.package}.{self.name}"), self.name)
        return function(setup)


CHECKS = "tests.gpu_device"  # checks of results are among the tests: they need a checkout of the repository
STAGES = (
    Stage("env", 15, "device, driver, packages"),
    Stage("build", 50, "all kernels compiled and loaded", is_required=True),
    Stage("correct", 130, "kernels beside fp64, a tiny model beside the CPU's", is_required=True, package=CHECKS),
    Stage("protocol", 45, "hand-offs to CPU workers, workers stopped and killed", is_required=True, package=CHECKS),
    Stage("limits", 25, "copies, link, matrix product"),
    Stage("lora", 45, "LoRA of decode by rows and ranks"),
    Stage("model", 70, "decode and prefill of a 7B shape"),
    Stage("cold", 60, "what cold requests cost themselves and others"),
    Stage("server", 130, "`caraserve bench modes` on a 7B shape"),
)


@dataclass(frozen=True, slots=True)
class StageReport:
    """The report of a stage's process. `error` says why there is no result, or what is wrong; it is empty otherwise."""

    figures: Figures = field(default_factory=dict)
    lines: tuple[ResultLine, ...] = ()
    error: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class StageRun:
    """A stage, its report and the seconds it took; the report of a stage that was skipped says why in `error`."""

    stage: Stage
    report: StageReport
    spent_s: float


RunStage = Callable[[Stage, Mapping[str, Figures], Path], StageReport]


def check(stages: Sequence[Stage], run: RunStage, folder: Path, file: Path, budget_s: float) -> int:
    """Runs the stages, writes `file` after each, and prints a table. Returns exit code 1 if any stage has an error."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False, soft_wrap=True)
    started_s, ran = time.monotonic(), list[StageRun]()
    for stage in stages:
        left_s = budget_s - (time.monotonic() - started_s)
        begun_s = time.monotonic()
        if wrong := [each.stage.name for each in ran if each.stage.is_required and each.report.error]:
            report = StageReport(error=f"not begun: {wrong[0]} found something wrong")
        elif left_s < stage.budget_s / 2:
            report = StageReport(error=f"not begun: {left_s:.0f} s are left of {budget_s:.0f}")
        else:
            console.print(f"{stage.name}: {stage.description} …")
            known = {each.stage.name: each.report.figures for each in ran}
            report = run(stage, known, folder)
        ran.append(StageRun(stage, report, time.monotonic() - begun_s))
        _write(ran, file)
        if report.error:
            console.print(f"{stage.name}: {report.error}")
    console.print(_table(ran))
    console.print(f"{time.monotonic() - started_s:.0f} s in all; written to {file}")
    return int(any(each.report.error for each in ran))


def process_runner(server_arguments: Sequence[str]) -> RunStage:
    """Returns a function that runs a stage as `python -m caraserve.bench.gpu`."""

    def run(stage: Stage, known: Mapping[str, Figures], folder: Path) -> StageReport:
        mine = folder / stage.name
        mine.mkdir()
        (mine / "known.json").write_text(json.dumps(known), encoding="utf-8")
        command = [sys.executable, "-m", "caraserve.bench.gpu", "--stage", stage.name, "--folder", str(mine)]
        command += ["--budget-s", str(stage.budget_s)]
        return await_report([*command, "--", *server_arguments], mine / "report.json", stage.budget_s + _GRACE_S)

    return run


def await_report(command: Sequence[str], file: Path, most_s: float, pass_fds: Sequence[int] = ()) -> StageReport:
    """Runs a command for at most `most_s` and reads its report from `file`; then kills all processes of its group."""
    process = subprocess.Popen(command, start_new_session=True, pass_fds=pass_fds)
    try:
        code = process.wait(most_s)
    except subprocess.TimeoutExpired:
        return StageReport(error=f"killed: it took longer than {most_s:.0f} s")
    finally:
        _end_group(process)
    if not file.exists():
        return StageReport(error=f"ended with {code} and without a report; what it said stands above")
    return msgspec.convert(json.loads(file.read_bytes()), StageReport)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kills what is left of the process group that the stage's process leads."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def file_name(device: str) -> str:
    """Returns the name of the results file for a device with this name."""
    words = re.findall(r"[a-z0-9]+", device.lower().replace("nvidia", ""))
    return f"gpu_check_{'_'.join(words)}.json"


def _write(ran: Sequence[StageRun], file: Path) -> None:
    """Writes all results so far as JSON. Only the first line of an error: a traceback would name local paths."""
    document = {
        "check": "gpu",
        "schema": 1,
        "stages": {
            each.stage.name: {
                "s": round(each.spent_s, 1),
                "error": each.report.error.split("\n", 1)[0],
                "figures": each.report.figures,
                "missed": [line.what for line in each.report.lines if line.met is False],
            }
            for each in ran
        },
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _table(ran: Sequence[StageRun]) -> Table:
    table = Table(title="GPU check", title_justify="left")
    for head in ("stage", "s", "what", "found", "target", ""):
        table.add_column(head, justify="right" if head == "s" else "left")
    for each in ran:
        marks = {True: "met", False: "MISSED", None: ""}
        rows = [(line.what, line.value, line.target, marks[line.met]) for line in each.report.lines]
        if each.report.error:
            rows.append((each.report.error.splitlines()[0], "", "", "FAILED"))
        for index, row in enumerate(rows or [("nothing to say", "", "", "")]):
            names = (each.stage.name, f"{each.spent_s:.0f}") if index == 0 else ("", "")
            table.add_row(*names, *row, end_section=index == len(rows) - 1)
    return table


def parse_stages(text: str) -> list[Stage]:
    """Returns the stages in a list such as `lora,model`. Raises ValueError for unknown names."""
    by_name = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in text.split(",") if name not in by_name]:
        raise ValueError(f"{unknown[0]!r} is no stage; there are {', '.join(by_name)}")
    return [by_name[name] for name in text.split(",")]
