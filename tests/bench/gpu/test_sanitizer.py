"""Tests of stage `sanitizer` with what compute-sanitizer writes: the tool itself needs a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.bench.gpu.processes import StageProcess
from caraserve.bench.gpu.results import Outcome, StageReport, WrongResult
from caraserve.bench.gpu.sanitizer import SanitizerRun, sanitizer

DONE, KILLED = StageReport(Outcome.DONE), StageReport(Outcome.KILLED, "it took longer than 30 s and was killed")
CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at bgmv_shrink+0x1f0
========= ERROR SUMMARY: 3 errors
"""
HAZARDS = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"


@pytest.fixture
def stage(tmp_path: Path) -> Callable[..., Any]:
    """Returns a function that runs the stage; its arguments are each tool's log and report."""

    def run(**said: tuple[str, StageReport]) -> Any:
        def run_part(process: StageProcess) -> StageReport:
            prefix = list(process.prefix)
            tool = prefix[prefix.index("--tool") + 1]
            log, report = said.get(tool, (CLEAN, DONE))
            assert prefix[0] == "/bin/compute-sanitizer"
            assert process.name == "every_kernel"
            if log:
                Path(prefix[prefix.index("--log-file") + 1]).write_text(log)
            return report

        setup: Any = SimpleNamespace(
            sanitizer="/bin/compute-sanitizer", folder=tmp_path, left_s=30.0, run_part=run_part
        )
        return sanitizer(setup)

    return run


def test_every_tool_runs_over_every_kernel(stage: Callable[..., Any]) -> None:
    result = stage()
    assert result.figures.runs == dict.fromkeys(("memcheck", "synccheck", "racecheck"), SanitizerRun(0, ""))
    assert [line.met for line in result.lines] == [True, True, True]


def test_an_access_out_of_bounds_is_a_wrong_result(stage: Callable[..., Any]) -> None:
    with pytest.raises(WrongResult, match="3 findings, the first: Invalid __global__ read of size 4 bytes"):
        stage(memcheck=(OUT_OF_BOUNDS, DONE))


def test_hazards_miss_their_target(stage: Callable[..., Any]) -> None:
    result = stage(racecheck=(HAZARDS, DONE))
    assert result.figures.runs["racecheck"].findings == 2
    assert [line.met for line in result.lines] == [True, True, False]


@pytest.mark.parametrize("log", ["", CLEAN])
def test_a_run_that_does_not_end_counts_for_nothing(log: str, stage: Callable[..., Any]) -> None:
    result = stage(synccheck=(log, KILLED))
    assert result.figures.runs["synccheck"] == SanitizerRun(None, KILLED.error)
    assert [line.met for line in result.lines] == [True, False, True]


def test_without_the_tool_the_stage_says_so() -> None:
    setup: Any = SimpleNamespace(sanitizer="")
    result = sanitizer(setup)
    assert [(line.what, line.value) for line in result.lines] == [
        ("compute-sanitizer", "not installed: no kernel was checked")
    ]
