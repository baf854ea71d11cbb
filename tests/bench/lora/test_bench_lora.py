"""Tests of `caraserve bench lora`: it measures every part, reports the machine, and leaves no process running."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from rich.console import Console

from caraserve.bench.lora import kernels, run
from caraserve.bench.lora.kernels import GpuPoint, KernelCase, measure
from caraserve.bench.lora.run import tables
from caraserve.cli.main import main
from caraserve.errors import ConfigError
from caraserve.gpu.driver.detect import DeviceChoice
from caraserve.model.dtype import Dtype


def test_a_quick_run_measures_every_part_and_saves_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = replace(run.QUICK, hidden=512, ranks=(64,), tokens=(4,), round_trip_tokens=(16,), hand_offs=3, rounds=1)
    monkeypatch.setattr(run, "QUICK", small)
    core = str(min(os.sched_getaffinity(0)))
    assert main(["bench", "lora", "--quick", "--lora-cpus", core, "--save", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert json.loads((tmp_path / "lora.json").read_text()) == document
    assert document["complete"] is True
    assert document["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert [(point["rank"], point["tokens"]) for point in document["kernels"]] == [(64, 4)]
    trips = [(trip["transport"], trip["workers"], trip["tokens"]) for trip in document["round_trips"]]
    assert trips == [("shared memory", 1, 16), ("UNIX socket", 1, 16)]
    assert [(point["cores"], point["rank"]) for point in document["threads"]] == [(1, 64)]
    assert all(trip["total_us"] > trip["beyond_us"] > 0 for trip in document["round_trips"])
    assert "of the core's peak" in printed


def test_only_the_requested_parts_are_measured_with_one_worker_and_with_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "QUICK", replace(run.QUICK, hidden=256, round_trip_tokens=(16,)))
    assert main(["bench", "lora", "--quick", "--parts", "round-trip"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    trips = [(trip["transport"], trip["workers"], trip["tokens"]) for trip in document["round_trips"]]
    teams = dict.fromkeys((1, len(os.sched_getaffinity(0))))
    assert trips == [(transport, workers, 16) for workers in teams for transport in ("shared memory", "UNIX socket")]
    assert document["kernels"] == document["threads"] == []


def test_an_unavailable_core_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "lora", "--quick", "--lora-cpus", "8000"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("caraserve: --lora-cpus 8000")
    assert told.count("\n") == 1


def test_an_interrupted_benchmark_prints_the_points_measured_so_far() -> None:
    command = [sys.executable, "-m", "caraserve", "bench", "lora", "--parts", "kernels"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            assert "measuring" in process.stderr.readline()
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            printed, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert json.loads(printed.splitlines()[-1])["complete"] is False
    assert "Traceback" not in errors
    ends = time.monotonic() + 10  # those that look after others' remains go last
    while _has_members(process.pid):
        assert time.monotonic() < ends, "a process is left"
        Event().wait(0.02)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.F16, Dtype.BF16])
def test_speeds_are_below_the_cores_peak(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_WEIGHTS_BYTES", 1 << 20)
    point = measure(KernelCase(hidden=256, dtype=dtype, rank=8, tokens=4))
    assert 0 < point.ours < point.peak
    assert (point.numpy is not None) == (dtype is Dtype.F32)


def test_the_gpus_points_are_in_a_separate_table() -> None:
    points = [GpuPoint(64, (64,), 58.25, 201.3, 0.82, 116.5), GpuPoint(64, (8, 64), 30.0, 110.0, 0.85, None)]
    console = Console(width=120, record=True)
    for table in tables([], [], [], points):
        console.print(table)
    text = console.export_text()
    assert [word for word in ("58.2", "82%", "2.0", "8+64", "–") if word not in text] == []


def test_the_part_of_a_gpu_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def laboratory(module: str, arguments: str) -> None:
        raise ConfigError(f"{arguments} needs a checkout")

    monkeypatch.setattr(run, "laboratory", laboratory)
    monkeypatch.setattr(run, "detect", lambda wanted: DeviceChoice("cuda"))
    console = Console(record=True)
    with pytest.raises(ConfigError, match="lora --parts gpu needs a checkout"):
        run._parts(["gpu"], console)
    assert run._parts(None, console) == ["kernels", "round-trip", "threads"]
    assert "not measured: lora --parts gpu needs a checkout" in console.export_text()
