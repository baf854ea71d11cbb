"""FlashInfer in stage `correct`: checked in a process of its own where it is installed; otherwise a line says so."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from caraserve.bench.synthetic import Shape
from caraserve.gpu.forward.flashinfer_prefill import PlannedPrefill
from caraserve.gpu.kernels.attention import PagedCache
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.processes import StageProcess
from scripts.laboratory.gpu.results import Lines, Outcome, StageReport, WrongResult
from scripts.laboratory.gpu.setup import CheckEffort, CheckSetup
from tests.gpu.fake_flashinfer import Used, install
from tests.gpu.host_device import host_device
from tests.gpu_device.correct import _check_flashinfer
from tests.gpu_device.correct_flashinfer import correct_flashinfer

EFFORT = CheckEffort(
    shape=Shape(hidden=256, layers=1, intermediate=96, vocab=160, heads=4, kv_heads=2),
    context=270,
    dtypes=(Dtype.BF16, Dtype.F32),
)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Used:
    return install(monkeypatch)


@pytest.fixture
def setup(tmp_path: Path) -> CheckSetup:
    facts: Any = SimpleNamespace(l2_bytes=1 << 12)
    stopwatch: Any = None
    return CheckSetup(lambda dtype: (host_device(dtype)[0], stopwatch), facts, EFFORT, tmp_path)


def test_chunks_are_compared_with_fp64_in_the_dtypes_that_it_has(used: Used, setup: CheckSetup) -> None:
    result = correct_flashinfer(setup)
    assert set(result.figures.worst_share_of_tolerance) == {"bf16"}
    assert [line.value for line in result.lines] == ["4 random cases right"]
    assert used.runs == 8  # with and without a window


@pytest.mark.usefixtures("used")
def test_a_wrong_result_is_found(setup: CheckSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PlannedPrefill.attend

    def shifted(planned: PlannedPrefill, q: Tensor, cache: PagedCache, out: Tensor, window: int) -> None:
        attend(planned, q, replace(cache, values=cache.keys), out, window)

    monkeypatch.setattr(PlannedPrefill, "attend", shifted)
    with pytest.raises(WrongResult, match="prefill by FlashInfer, BF16"):
        correct_flashinfer(setup)


def said(setup: CheckSetup, report: StageReport) -> str:
    """Returns the line of stage `correct` after a report of the part's process."""

    def run_part(process: StageProcess) -> StageReport:
        assert (process.name, process.is_part) == ("correct_flashinfer", True)
        return report

    return _check_flashinfer(replace(setup, run_part=run_part))


def test_where_it_is_not_installed_nothing_is_run(setup: CheckSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr("tests.gpu_device.correct.find_spec", lambda name: None)
    assert said(setup, StageReport(Outcome.DONE)) == "not checked: it is not installed"


@pytest.mark.usefixtures("used")
def test_the_part_decides_only_by_wrong_results(setup: CheckSetup) -> None:
    lines = Lines()
    lines.add("prompts", "4 random cases right")
    assert said(setup, StageReport(Outcome.DONE, lines=lines.all)) == "4 random cases right"
    killed = said(setup, StageReport(Outcome.KILLED, "it took longer than 9 s and was killed"))
    assert killed.startswith("not checked: it took longer than 9 s and was killed; a start with --attention-backend")
    with pytest.raises(WrongResult, match="prefill"):
        said(setup, StageReport(Outcome.WRONG, "prefill by FlashInfer: at (0, 0) it is 1.0"))
