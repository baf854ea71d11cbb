"""Tests of stage `server` of scripts/gpu_check: the arguments of `caraserve bench modes`, and how it reads reports."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.bench.cli import bench_parser
from caraserve.errors import BackendFailed
from scripts.laboratory.gpu.processes import run_bench_modes
from scripts.laboratory.gpu.results import StageResult
from scripts.laboratory.gpu.server import BesideCached, ServerFigures, arguments, server
from scripts.laboratory.gpu.setup import CheckEffort, smoke_effort


def run(label: str, *, ttft_ms: float = 10.0, gap_ms: float = 5.0, interrupted: bool = False) -> dict[str, Any]:
    latency = {"ttft": {"mean_ms": ttft_ms}, "itl": {"percentiles_ms": {"p99": gap_ms}}}
    return {"label": label, "latency": latency, "completed": 9, "sent": 9, "interrupted": interrupted}


def judged(tmp_path: Path, *runs: Mapping[str, Any]) -> StageResult[ServerFigures]:
    def bench_modes(argv: Sequence[str], timeout_s: float) -> None:
        folder = Path(argv[argv.index("--save") + 1])
        folder.mkdir()
        (folder / "modes.json").write_text(json.dumps({"runs": runs, "notes": [], "arguments": {}}))

    setup: Any = SimpleNamespace(
        effort=CheckEffort(), saved=tmp_path, server_arguments=(), left_s=100.0, bench_modes=bench_modes
    )
    return server(setup)


@pytest.mark.parametrize("effort", [CheckEffort(), smoke_effort()], ids=["full", "smoke"])
def test_own_arguments_replace_defaults_and_servers_use_the_gpu(effort: CheckEffort, tmp_path: Path) -> None:
    argv = arguments(effort.server, effort.serve, ("--repeats", "2", "--", "--seed", "7"), tmp_path)
    at = argv.index("--")
    args = bench_parser().parse_args(["modes", *argv[:at]])
    assert (args.preset, args.targets, args.repeats, args.save) == ("toppings-s3", "all", 2, tmp_path)
    assert (args.modes[0], args.resident < args.adapters) == ("cached", True)
    assert argv[at + 1 :] == ["--device", "cuda", *effort.serve, "--seed", "7"]


def test_the_server_holds_three_quarters_of_32_adapters_of_all_modules() -> None:
    """Running requests hold theirs: with a quarter on the device, they would wait for one another."""
    args = bench_parser().parse_args(["modes", *arguments(CheckEffort().server, (), (), Path("x"))[:-3]])
    assert (args.adapters, args.resident, args.random_model) == (32, 24, "llama2-7b")
    args = bench_parser().parse_args(["modes", *CheckEffort().modes])
    assert args.modes == ("cached", "auto", "pipelined", "ondemand", "assisted"), "those that are most wanted first"


def test_running_requests_are_compared_with_those_of_cached(tmp_path: Path) -> None:
    result = judged(tmp_path, run("cached"), run("auto", ttft_ms=10.1, gap_ms=6.0), run("ondemand", ttft_ms=20.0))
    assert result.figures.beside_cached["auto"] == BesideCached(ttft=1.01, itl_p99=1.2)
    assert [line.met for line in result.lines if line.target] == [True, False]
    assert any(line.what == "server, ondemand ÷ cached" for line in result.lines)


def test_interrupted_runs_are_not_compared(tmp_path: Path) -> None:
    result = judged(tmp_path, run("cached"), run("auto", interrupted=True))
    assert result.figures.beside_cached == {}
    assert result.lines[0].value == "time was up: 1 of 2 runs are whole"


def test_without_a_complete_cached_run_the_stage_fails(tmp_path: Path) -> None:
    with pytest.raises(BackendFailed, match="did not come to the end of cached"):
        judged(tmp_path, run("auto"), run("cached", interrupted=True))


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Returns a function that makes `python -m caraserve` run other code."""

    def put(code: str) -> None:
        (tmp_path / "caraserve.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.chdir(tmp_path)

    return put


def test_a_benchmark_that_fails_is_a_failure(instead: Callable[[str], None]) -> None:
    instead("import sys; sys.exit('no such preset')")
    with pytest.raises(BackendFailed, match="bench modes ended with 1: no such preset"):
        run_bench_modes(["--preset", "x"], 60.0)


def test_a_benchmark_that_takes_too_long_is_terminated(instead: Callable[[str], None]) -> None:
    """A terminated benchmark still writes a report, so this is no failure yet."""
    instead("import signal\nsignal.pause()\n")
    run_bench_modes([], 0.5)
