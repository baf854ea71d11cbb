"""Tests of stage `sanitizer` with what compute-sanitizer writes: the tool itself needs a GPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.laboratory.gpu.processes import StageProcess
from scripts.laboratory.gpu.results import Outcome, StageReport, WrongResult
from scripts.laboratory.gpu.sanitizer import SanitizerRun, kernel_names, sanitizer

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
    """Returns a function that runs the stage; its arguments are the log and report of each tool, or of a kernel."""

    def run(left_s: float = 30.0, **said: tuple[str, StageReport]) -> Any:
        def run_part(process: StageProcess) -> StageReport:
            prefix = list(process.prefix)
            tool = prefix[prefix.index("--tool") + 1]
            name = prefix[prefix.index("--kernel-name") + 1].removeprefix("kns=") if tool == "racecheck" else tool
            assert ("--kernel-name" in prefix) == (tool == "racecheck")
            log, report = said.get(name, (CLEAN, DONE))
            assert prefix[0] == "/bin/compute-sanitizer"
            assert process.name == "every_kernel"
            if log:
                Path(prefix[prefix.index("--log-file") + 1]).write_text(log)
            return report

        setup: Any = SimpleNamespace(
            sanitizer="/bin/compute-sanitizer",
            folder=tmp_path,
            saved=tmp_path,
            left_s=left_s,
            run_part=run_part,
            effort=SimpleNamespace(sanitizers=("memcheck", "synccheck", "racecheck")),
        )
        return sanitizer(setup)

    return run


def test_two_tools_run_over_all_kernels_and_racecheck_over_one_at_a_time(stage: Callable[..., Any]) -> None:
    result = stage()
    names = ("memcheck", "synccheck", *(f"racecheck {kernel}" for kernel in kernel_names()))
    assert result.figures.runs == dict.fromkeys(names, SanitizerRun(0, ""))
    assert [line.met for line in result.lines] == [True, True, True]
    assert result.lines[-1].value == f"0 findings in {len(kernel_names())} runs"


def test_the_kernels_are_the_raw_ones_and_triton_s() -> None:
    some = {"bgmv_shrink", "handoff_wait", "sample_tokens", "prefill_kernel", "expand_kernel", "product_kernel"}
    assert some < set(kernel_names())
    assert len(set(kernel_names())) == len(kernel_names())
    assert "empty_kernel" not in kernel_names()  # which only measurements launch


def test_an_access_out_of_bounds_is_a_wrong_result(stage: Callable[..., Any]) -> None:
    with pytest.raises(WrongResult, match="3 findings, the first: Invalid __global__ read of size 4 bytes"):
        stage(memcheck=(OUT_OF_BOUNDS, DONE))


def test_hazards_miss_their_target(stage: Callable[..., Any]) -> None:
    result = stage(bgmv_expand=(HAZARDS, DONE))
    assert result.figures.runs["racecheck bgmv_expand"].findings == 2
    assert [line.met for line in result.lines] == [True, True, False]
    assert "racecheck bgmv_expand" in result.lines[-1].value


@pytest.mark.parametrize("log", ["", CLEAN])
def test_a_run_that_does_not_end_counts_for_nothing(log: str, stage: Callable[..., Any]) -> None:
    result = stage(synccheck=(log, KILLED))
    assert result.figures.runs["synccheck"] == SanitizerRun(None, KILLED.error)
    assert [line.met for line in result.lines] == [True, False, True]


def test_a_kernel_that_takes_too_long_does_not_hide_what_others_have(stage: Callable[..., Any]) -> None:
    result = stage(merge_kernel=("", KILLED), bgmv_expand=(HAZARDS, DONE))
    late, found = result.lines[2:]
    assert (late.met, found.met) == (False, False)
    assert f"racecheck merge_kernel: {KILLED.error}" in late.value
    assert found.value.startswith(f"2 findings in {len(kernel_names()) - 1} runs")


def test_what_cannot_begin_in_time_is_named(stage: Callable[..., Any]) -> None:
    result = stage(left_s=0.0)
    assert set(result.figures.runs.values()) == {SanitizerRun(None, "the stage's time was up")}
    assert [line.met for line in result.lines] == [False, False, False]


def test_without_the_tool_the_stage_says_so() -> None:
    setup: Any = SimpleNamespace(sanitizer="")
    result = sanitizer(setup)
    assert [(line.what, line.value) for line in result.lines] == [
        ("compute-sanitizer", "not installed: no kernel was checked")
    ]
