"""Tests of scripts/gpu_check without a GPU: every stage on an emulated device, and stages that fail."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from caraserve.bench.gpu.results import ResultLine, StageResult, WrongResult, check_close, check_same_bits
from caraserve.bench.gpu.run import STAGES, Stage, StageReport, await_report, check, file_name, parse_stages

ROOT = Path(__file__).parents[3]
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def rehearse(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the check in a new process, as Triton's interpreter must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "tests.gpu.rehearsal", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | INTERPRETER, capture_output=True, text=True)


def test_every_stage_succeeds_on_an_emulated_device(tmp_path: Path) -> None:
    done = rehearse(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "result.json").read_text()
    stages = json.loads(text)["stages"]
    assert list(stages) == [stage.name for stage in STAGES]
    assert {name: stage["error"] for name, stage in stages.items()} == dict.fromkeys(stages, "")
    assert all(stage["figures"] for stage in stages.values())
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    figures = {name: stage["figures"] for name, stage in stages.items()}
    assert figures["correct"]["tiny_model_tokens"] == 6
    assert figures["protocol"]["cpu_layers"] == 2
    assert figures["protocol"]["wait_by_stream"]["rounds"] == figures["protocol"]["wait_by_kernel"]["rounds"] == 8
    assert {tuple(point["ranks"]) for point in figures["lora"]["points"]} == {(8,), (16,), (8, 16)}
    assert set(figures["cold"]["assumed"]) == {"handoff_ms", "core_lora_flop_per_s", "copy_s"}  # the link was measured
    assert set(figures["cold"]["itl"]) == {"warm", "overlapped", "pipelined"}
    assert {mode for point in figures["cold"]["exposed"] for mode in point["exposed_ms"]} == {
        "ondemand",
        "pipelined",
        "assisted",
    }
    assert figures["server"]["beside_cached"]["auto"]["itl_p99"] == pytest.approx(1.1)
    assert "GPU check" in done.stdout
    assert "the sum of its parts" in done.stdout


@pytest.mark.parametrize("kernel", ["bgmv_shrink"])
def test_a_kernel_that_does_nothing_is_found_before_anything_is_timed(kernel: str, tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--only", "correct,lora", "--without", kernel)
    assert done.returncode == 1, done.stdout + done.stderr
    stages = json.loads((tmp_path / "result.json").read_text())["stages"]
    assert stages["correct"]["error"].startswith("WRONG: ")
    assert stages["lora"] == {
        "s": 0.0,
        "error": "not begun: correct found something wrong",
        "figures": {},
        "missed": [],
    }


def test_lora_with_wrong_results_is_not_timed(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--only", "lora", "--without", "bgmv_expand")
    assert done.returncode == 1
    assert "WRONG: LoRA of decode" in done.stdout


# --- stages in processes ---

FIRST, SECOND = (Stage(name, 1.0, "says", is_required=False) for name in ("first", "second"))


def python(code: str, file: Path) -> StageReport:
    return await_report([sys.executable, "-c", code], file, most_s=60.0)


def test_a_stage_whose_process_dies_is_reported(tmp_path: Path) -> None:
    report = python("import os; os.abort()", tmp_path / "report.json")
    assert report.error.startswith("ended with -6 and without a report")


def test_a_stage_that_hangs_is_killed_with_its_child_processes(tmp_path: Path) -> None:
    held, free = os.pipe()  # it ends when the last process that has it is gone
    os.set_inheritable(free, True)
    code = f"import subprocess; subprocess.Popen(['sleep', '600'], pass_fds=[{free}]).wait()"
    report = await_report([sys.executable, "-c", code], tmp_path / "report.json", most_s=0.5, pass_fds=(free,))
    os.close(free)
    assert report.error.startswith("killed: it took longer than")
    assert os.read(held, 1) == b""
    os.close(held)


def test_a_report_is_read_back_unchanged(tmp_path: Path) -> None:
    report = StageReport({"a": [1.5]}, (ResultLine("what", "value", "≥ 1", True), ResultLine("more", "1")), "")
    file = tmp_path / "report.json"
    file.write_text(report.to_json())
    assert python("", file) == report


def test_a_failed_stage_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports = {
        "first": StageReport(error="RuntimeError: no\nTraceback"),
        "second": StageReport({"x": 1}, (ResultLine("a", "b"),)),
    }
    file = tmp_path / "results" / "gpu.json"
    code = check([FIRST, SECOND], lambda stage, known, folder: reports[stage.name], tmp_path, file, 100.0)
    assert code == 1
    stages = json.loads(file.read_text())["stages"]
    assert (stages["first"]["error"], stages["second"]["figures"]) == ("RuntimeError: no", {"x": 1})
    assert "FAILED" in capsys.readouterr().out


def test_later_stages_get_earlier_figures_and_stages_without_time_are_skipped(tmp_path: Path) -> None:
    seen: list[object] = []

    def run(stage: Stage, known: object, folder: Path) -> StageReport:
        seen.append(known)
        return StageReport({"of": stage.name}, (ResultLine("a", "b", "≥ 2", False),))

    late = Stage("late", 1e6, "says")
    assert check([FIRST, SECOND, late], run, tmp_path, tmp_path / "x.json", 100.0) == 1
    assert seen == [{}, {"first": {"of": "first"}}]
    stages = json.loads((tmp_path / "x.json").read_text())["stages"]
    assert stages["late"]["error"] == "not begun: 100 s are left of 100"
    assert stages["first"]["missed"] == ["a"]


def test_the_file_is_named_after_the_device() -> None:
    assert file_name("NVIDIA H200") == "gpu_check_h200.json"
    assert file_name("NVIDIA A100-SXM4-80GB") == "gpu_check_a100_sxm4_80gb.json"


def test_stages_are_chosen_by_name() -> None:
    assert [stage.name for stage in parse_stages("lora,env")] == ["lora", "env"]
    with pytest.raises(ValueError, match="'speed' is no stage; there are env, build"):
        parse_stages("env,speed")
    assert sum(stage.budget_s for stage in STAGES) < 600


# --- what is right ---


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.2])
def test_nan_infinities_and_large_errors_are_not_close(wrong: float) -> None:
    got, expected = torch.tensor([[1.0, 2.0], [0.05, 4.0]]), torch.tensor([[1.0, 2.0], [0.0, 4.0]]).double()
    assert check_close("sum", got, expected, 0.1) == pytest.approx(0.5)
    got[1, 0] = wrong
    with pytest.raises(WrongResult, match=r"sum: at \(1, 0\) it is"):
        check_close("sum", got, expected, 0.1)


def test_with_zero_tolerance_only_equal_numbers_are_close() -> None:
    values = torch.tensor([1.0, -2.0])
    assert check_close("copy", values, values.double(), 0.0) == 0.0
    with pytest.raises(WrongResult):
        check_close("copy", values, values.double() + 1e-9, 0.0)


def test_plus_and_minus_zero_have_different_bits() -> None:
    check_same_bits("row", torch.tensor([0.0]), torch.tensor([0.0]))
    with pytest.raises(WrongResult, match="row: the bits depend on what else is in the batch"):
        check_same_bits("row", torch.tensor([0.0]), torch.tensor([-0.0]))


def test_a_target_is_met_or_missed() -> None:
    result = StageResult()
    result.at_least("speed", 0.8, 0.8)
    result.at_most("time", 6.0, 5.0)
    assert [(line.target, line.met) for line in result.lines] == [("≥ 0.8", True), ("≤ 5", False)]


# --- the command ---


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    script = ROOT / "scripts" / "gpu_check"
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True)


def test_help_names_every_stage_and_how_wheels_are_fetched() -> None:
    said = command("--help").stdout
    assert re.findall(r"^  (\w+) +\d+ s  ", said, re.MULTILINE) == [stage.name for stage in STAGES]
    assert "pip download" in said


def test_missing_packages_are_reported_in_one_line() -> None:
    missing = command("--list-missing").stdout.split()
    assert "torch" not in missing
    if missing != ["nothing", "is", "missing"]:
        done = command()
        assert done.returncode == 1
        assert (
            done.stderr.strip()
            == f"error: this Python lacks {', '.join(missing)}; bring their wheels in a folder: --wheels DIR"
        )


def test_a_folder_without_the_wheels_is_refused(tmp_path: Path) -> None:
    if command("--list-missing").stdout.strip() != "nothing is missing":
        done = command("--wheels", str(tmp_path))
        assert done.returncode == 1
        assert f"error: {tmp_path} has no wheels of" in done.stderr
