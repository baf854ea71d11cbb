"""Tests of scripts/gpu_check without a GPU: quick stages on an emulated device, and stages that fail."""

import json
import os
import random
import re
import runpy
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from caraserve.gpu.driver.detect import Gpu
from caraserve.util.cache_folder import cache_folder
from scripts.laboratory.gpu import packages
from scripts.laboratory.gpu.pieces import pack, unpack
from scripts.laboratory.gpu.processes import GRACE_S, Known, await_report
from scripts.laboratory.gpu.results import (
    Lines,
    Outcome,
    ResultLine,
    StageReport,
    WrongResult,
    check_close,
    check_same_bits,
)
from scripts.laboratory.gpu.run import ResultsFile, check, file_name, origin
from scripts.laboratory.gpu.stages import LOADS, STAGES, TOTAL_S, Stage, parse_speed, parse_stages

ROOT = Path(__file__).parents[3]
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def rehearse(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Runs the check in a new process, as Triton's interpreter must be chosen before Triton is imported."""
    command = [sys.executable, "-m", "tests.gpu.rehearsal", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | INTERPRETER, capture_output=True, text=True)


# Those that take no more than 3 s each; `scripts/gpu_check --smoke --emulated` runs all in three minutes.
QUICK = ("env", "build", "limits", "lora", "server", "handover", "sanitizer", "every_kernel")
OF_KERNELS = ("limits", "llama3", "sampling", "experts", "startup")  # and the limits, which others compare with


def test_quick_stages_and_what_the_sanitizer_runs_succeed_on_an_emulated_device(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--only", ",".join(QUICK))
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "result.json").read_text()
    stages = json.loads(text)["stages"]
    assert tuple(stages) == QUICK
    assert {name: (stage["outcome"], stage["error"]) for name, stage in stages.items()} == dict.fromkeys(
        stages, ("done", "")
    )
    assert all(stage["figures"] for stage in stages.values())
    assert str(tmp_path) not in text
    assert str(ROOT) not in text
    figures = {name: stage["figures"] for name, stage in stages.items()}
    assert {tuple(point["ranks"]) for point in figures["lora"]["points"]} == {(8,), (16,), (8, 16)}
    assert (figures["lora"]["few_adapters"]["rows"], figures["lora"]["few_adapters"]["rank"]) == (9, 16)
    assert figures["server"]["beside_cached"]["auto"]["itl_p99"] == pytest.approx(1.1)
    assert figures["build"]["ahead"] == {"triton": 0, "raw": 0, "processes": 1, "errors": {}}
    assert [point["tokens"] for point in figures["handover"]["points"]] == [8]
    assert figures["sanitizer"] == {"path": "", "runs": {}}
    assert {"decode LoRA", "attention", "experts", "sampling", "hand-offs"} < set(figures["every_kernel"]["checks"])
    assert "GPU check" in done.stdout
    assert "the sum of its parts" in done.stdout


@pytest.mark.slow
def test_stages_that_time_kernels_and_starts_succeed_on_an_emulated_device(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--only", ",".join(OF_KERNELS))
    assert done.returncode == 0, done.stdout + done.stderr
    stages = json.loads((tmp_path / "result.json").read_text())["stages"]
    assert tuple(stages) == OF_KERNELS
    figures = {name: stage["figures"] for name, stage in stages.items()}
    assert (figures["llama3"]["long"]["tokens"], len(figures["llama3"]["long"]["chunk_ms"])) == (17, 2)
    assert set(figures["llama3"]["long"]["decode_ms"]) == {"1", "2"}
    assert [(point["batch"], point["adapters"]) for point in figures["llama3"]["added_lora"]] == [(1, 1), (2, 2)]
    assert [point["way"] for point in figures["sampling"]["points"]] == ["greedy", "top-p", "top-p and top-k"]
    assert [point["rows"] for point in figures["experts"]["points"]] == [1, 3]
    assert figures["experts"]["points"][0]["chosen"] == 2
    assert set(figures["startup"]["starts"]) == {"EAGER", "LAZY"}
    transfers = [start["parts"]["weights"] for start in figures["startup"]["starts"].values()]
    assert [transfer["num_bytes"] for transfer in transfers] == 2 * [2 * (2 * 30_848 + 2 * 160 * 64 + 64)]
    assert done.stdout.count("of the link's speed") == 2


def test_a_kernel_that_does_nothing_is_found_and_wrong_kernels_are_not_timed(tmp_path: Path) -> None:
    """`lora` checks what it times; the others rely on `correct`."""
    done = rehearse(tmp_path, "--only", "lora,correct,model,limits", "--without", "bgmv_expand")
    assert done.returncode == 1, done.stdout + done.stderr
    stages = json.loads((tmp_path / "result.json").read_text())["stages"]
    assert {name: stage["outcome"] for name, stage in stages.items()} == {
        "lora": "wrong",
        "correct": "wrong",
        "model": "not begun",
        "limits": "done",
    }
    assert stages["lora"]["error"].startswith("LoRA of decode, 2 rows of rank (8,): at ")
    assert stages["model"]["error"] == "correct found wrong results, so speeds mean nothing"


# --- stages in processes ---

FIRST, SECOND = (Stage(name, 10.0, "says") for name in ("first", "second"))


def test_a_stage_whose_process_dies_is_reported(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.abort()"]
    report = await_report(command, tmp_path / "report.json", most_s=60.0)
    assert report.outcome is Outcome.FAILED
    assert report.error.startswith("its process was ended by SIGABRT before it had a report")


def test_a_stage_that_hangs_is_killed_with_its_child_processes(tmp_path: Path) -> None:
    held, free = os.pipe()  # it ends when the last process that has it is gone
    os.set_inheritable(free, True)
    code = f"import subprocess; subprocess.Popen(['sleep', '600'], process_group=0, pass_fds=[{free}]).wait()"
    report = await_report([sys.executable, "-c", code], tmp_path / "report.json", most_s=0.5, pass_fds=(free,))
    os.close(free)
    assert (report.outcome, report.error) == (Outcome.KILLED, "it took longer than 0 s and was killed")
    assert os.read(held, 1) == b""
    os.close(held)


def test_every_stages_results_are_printed_and_written_before_the_next_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results" / "gpu.json"
    reports = {
        "first": StageReport(Outcome.KILLED, "it took longer than 25 s and was killed", {"of": "first"}),
        "second": StageReport(Outcome.DONE, "", {"x": 1}, (ResultLine("a speed", "7 GB/s"),)),
    }

    def run(stage: Stage, known: Known) -> StageReport:
        if stage.name == "second":
            assert json.loads(file.read_text())["stages"]["first"]["outcome"] == "killed"
            assert known == {"first": {"of": "first"}}, "later stages get earlier figures"
            assert "KILLED" in capsys.readouterr().out
        return reports[stage.name]

    assert check([FIRST, SECOND], run, ResultsFile(file, {}), 100.0) == 1
    stages = json.loads(file.read_text())["stages"]
    assert (stages["first"]["error"], stages["second"]["figures"]) == (reports["first"].error, {"x": 1})
    assert "a speed" in capsys.readouterr().out


def test_no_stage_ends_after_the_time_for_all(tmp_path: Path) -> None:
    """A stage with less time than its budget is told so; one with less than half of it is not begun."""
    budgets: dict[str, float] = {}

    def run(stage: Stage, known: Known) -> StageReport:
        budgets[stage.name] = stage.budget_s
        return StageReport(Outcome.DONE, "", {"of": stage.name}, (ResultLine("a", "b", "≥ 2", False),))

    stages = [Stage("whole", 60.0, "says"), Stage("shorter", 150.0, "says"), Stage("none", 190.0, "says")]
    assert check(stages, run, ResultsFile(tmp_path / "x.json", {}), 100.0) == 1
    assert budgets == {"whole": 60.0, "shorter": pytest.approx(100.0 - GRACE_S, abs=1.0)}
    reported = json.loads((tmp_path / "x.json").read_text())["stages"]
    assert reported["none"]["error"] == "100 s are left for all, and it needs 110"
    assert reported["whole"]["lines"] == [["a", "b", "≥ 2", False]]


@pytest.mark.parametrize("anyway", [False, True])
@pytest.mark.parametrize("outcome", [Outcome.KILLED, Outcome.FAILED, Outcome.WRONG])
def test_only_wrong_results_stop_stages_that_time(outcome: Outcome, anyway: bool, tmp_path: Path) -> None:
    deciding, timed = Stage("first", 10.0, "says", decides=True), Stage("second", 10.0, "says", is_timed=True)
    begun: list[str] = []

    def run(stage: Stage, known: Known) -> StageReport:
        begun.append(stage.name)
        return StageReport(outcome if stage.name == "first" else Outcome.DONE, "reason")

    check([deciding, timed], run, ResultsFile(tmp_path / "x.json", {}), 100.0, time_anyway=anyway)
    assert ("second" in begun) == (outcome is not Outcome.WRONG or anyway)


def test_several_stages_run_at_once_after_those_that_others_need(tmp_path: Path) -> None:
    """Each stage that is not alone waits until as many as may run at once have begun."""
    together, most, begun = threading.Barrier(2, timeout=60.0), [0], list[str]()
    running, lock = set[str](), threading.Lock()

    def run(stage: Stage, known: Known) -> StageReport:
        with lock:
            begun.append(stage.name)
            running.add(stage.name)
            most[0] = max(most[0], len(running))
            assert stage.is_alone is (running == {"alone"})
        if not stage.is_alone:
            together.wait()
        with lock:
            running.remove(stage.name)
        return StageReport(Outcome.DONE, "", {"of": stage.name})

    names = ("first", "alone", "second", "third", "fourth")
    stages = [Stage(name, 10.0, "says", is_alone=name == "alone") for name in names]
    assert check(stages, run, ResultsFile(tmp_path / "x.json", {}), 100.0, at_once=2) == 0
    assert (begun[0], most, set(begun)) == ("alone", [2], set(names))
    assert set(json.loads((tmp_path / "x.json").read_text())["stages"]) == set(names)


def test_a_later_run_replaces_its_own_stages_and_those_of_an_older_form_alone(tmp_path: Path) -> None:
    """A stage that is not begun the second time keeps its result, which says of which commit it is."""
    file = tmp_path / "x.json"
    file.write_text('{"check": "gpu", "schema": 2, "stages": {"of an older form": {}}}')

    def results(commit: str) -> ResultsFile:
        return ResultsFile(file, {"commit": commit})

    def report(**figures: int) -> StageReport:
        return StageReport(Outcome.DONE, "", figures)

    results("old").add("first", report(x=1), 1.0)
    results("old").add("second", report(x=2), 1.0)
    later = results("new")
    later.add("second", report(x=3), 2.0)
    later.add("first", StageReport(Outcome.NOT_BEGUN, "no time"), 0.0)
    found = json.loads(file.read_text())["stages"]
    assert {name: (each["commit"], each["figures"]["x"]) for name, each in found.items()} == {
        "first": ("old", 1),
        "second": ("new", 3),
    }


def test_results_name_card_driver_commit_and_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARASERVE_COMMIT", "1949c8b")
    made = origin(Gpu("NVIDIA H200", 90, 13000, 139 << 30))
    assert (made["device"], made["commit"]) == ("NVIDIA H200", "1949c8b")
    assert made["driver"].endswith("CUDA 13.0") or made["driver"].endswith("(CUDA 13.0)")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", made["date"])


def test_without_a_repository_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARASERVE_COMMIT", raising=False)
    monkeypatch.setattr("caraserve.__file__", str(tmp_path / "caraserve/__init__.py"))
    assert origin(Gpu("any", 90, 13000, 80 << 30))["commit"] == "unknown"


def test_the_file_is_named_after_the_device() -> None:
    assert file_name("check", "NVIDIA H200") == "gpu_check_h200.json"
    assert file_name("smoke", "NVIDIA A100-SXM4-80GB") == "gpu_smoke_a100_sxm4_80gb.json"


def test_stages_are_chosen_by_name_and_speed_has_the_long_loads_and_what_bounds_them() -> None:
    assert [stage.name for stage in parse_stages("lora,env")] == ["lora", "env"]
    assert [stage.name for stage in parse_speed("limits,fleet,modes")] == ["limits", "lora", "model", "fleet", "modes"]
    with pytest.raises(ValueError, match="'server' is no part of --speed; there are limits, fleet, modes"):
        parse_speed("server")


# --- what is right ---


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1.2])
def test_nan_infinities_and_large_errors_are_not_close(wrong: float) -> None:
    got, expected = torch.tensor([[1.0, 2.0], [0.05, 4.0]]), torch.tensor([[1.0, 2.0], [0.0, 4.0]]).double()
    assert check_close("sum", got, expected, 0.1) == pytest.approx(0.5)
    got[1, 0] = wrong
    with pytest.raises(WrongResult, match=r"sum: at \(1, 0\) it is"):
        check_close("sum", got, expected, 0.1)


def test_with_zero_tolerance_only_equal_numbers_are_close_and_only_equal_bits_are_the_same() -> None:
    values = torch.tensor([1.0, -2.0])
    assert check_close("copy", values, values.double(), 0.0) == 0.0
    with pytest.raises(WrongResult):
        check_close("copy", values, values.double() + 1e-9, 0.0)
    check_same_bits("row", torch.tensor([0.0]), torch.tensor([0.0]))
    with pytest.raises(WrongResult, match="row: the bits depend on what else is in the batch"):
        check_same_bits("row", torch.tensor([0.0]), torch.tensor([-0.0]))


def test_a_target_is_met_or_missed() -> None:
    lines = Lines()
    lines.at_least("speed", 0.8, 0.8)
    lines.at_most("time", 6.0, 5.0)
    assert [(line.target, line.met) for line in lines.all] == [("≥ 0.8", True), ("≤ 5", False)]


# --- the command ---


def command(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    script = ROOT / "scripts" / "gpu_check"
    env = os.environ | environment
    return subprocess.run([sys.executable, str(script), *arguments], env=env, capture_output=True, text=True)


def test_help_names_every_stage_and_how_all_packages_are_fetched() -> None:
    said = command("--help").stdout
    assert re.findall(r"^  (\w+) +\d+ s  ", said, re.MULTILINE) == [stage.name for stage in (*STAGES, *LOADS)]
    (fetch,) = (line for line in said.splitlines() if "pip download" in line)
    wanted = packages.required(ROOT / "pyproject.toml")[0]
    assert shlex.split(fetch)[-len(wanted) :] == [packages.shown(each) for each in wanted]
    assert "--platform manylinux_2_31_x86_64" in fetch  # llguidance has no wheels for an older C library


def test_missing_packages_are_reported_with_the_command_that_fetches_them(tmp_path: Path) -> None:
    missing = packages.missing([each for each in packages.required(ROOT / "pyproject.toml") for each in each])
    listed = command("--list-missing").stdout
    if not missing:
        assert listed == "nothing is missing\n"
        return
    names, fetch = listed.strip().split("\n")
    assert names.split(", ") == [packages.shown(each) for each in missing]
    done = command()
    assert (done.returncode, done.stderr.strip().split("\n")) == (
        1,
        [f"error: this Python lacks {names}; bring their wheels in a folder: --wheels DIR", fetch],
    )
    done = command("--wheels", str(tmp_path))
    assert done.returncode == 1
    assert f"error: {tmp_path} has no wheels of {names} that fit this Python\n{fetch}" in done.stderr


def test_smoke_writes_results_logs_and_kernels_in_pieces_to_where_out_says(tmp_path: Path) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache" / "caraserve"
    cache.mkdir(parents=True)
    cache_folder("kernels").mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(cache_folder("kernels"))  # compiled already, and packed as a link
    done = command("--smoke", "--emulated", "--only", "env", OUT=str(out), XDG_CACHE_HOME=str(cache.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(file.name for file in out.iterdir()) == [
        *("cache.tgz.0000", "gpu_smoke_emulated.json", "gpu_smoke_emulated.tgz.0000")
    ]
    (stage,) = json.loads((out / "gpu_smoke_emulated.json").read_text())["stages"].values()
    assert (stage["outcome"], stage["device"]) == ("done", "emulated")
    unpack(out, "gpu_smoke_emulated", tmp_path / "logs")
    assert (tmp_path / "logs" / "env" / "saved" / "output.log").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--speed", "limits", "--only", "env"), "--speed and --only both name what is run; give one of them"),
        (("--only", "speed"), "'speed' is no stage; there are env"),
        (("--cache", "nowhere"), "nowhere has no cache.tgz.0000"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "gpu_check"))
    with pytest.raises(SystemExit, match=f"^error: {told}[^\n]*$"):
        script["run"](script["parser"]().parse_args(["--emulated", *arguments]), tmp_path)


def test_all_stages_may_take_their_whole_budgets() -> None:
    assert sum(stage.budget_s for stage in STAGES) <= TOTAL_S


def test_a_folder_is_packed_into_pieces_and_back(tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    content = random.Random(0).randbytes(10_000)  # which cannot be compressed
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(content)
    out.mkdir()
    (out / "x.tgz.0007").write_text("of an earlier call")
    pieces = pack([root / "a", root / "none"], root, out, "x", piece_bytes=4000)
    assert [piece.name for piece in pieces] == ["x.tgz.0000", "x.tgz.0001", "x.tgz.0002"]
    assert sorted(out.iterdir()) == pieces
    assert all(piece.stat().st_size <= 4000 for piece in pieces)
    unpack(out, "x", tmp_path / "again")
    assert (tmp_path / "again" / "a" / "b" / "file").read_bytes() == content
    assert len(pack([root / "a"], root, out, "x", piece_bytes=90)) > 100
    unpack(out, "x", tmp_path / "many")
    assert (tmp_path / "many" / "a" / "b" / "file").read_bytes() == content
    assert pack([root / "none"], root, out, "x") == []


@pytest.mark.parametrize("damage", ["first missing", "last missing", "one missing", "other bytes", "no archive"])
def test_damaged_pieces_are_one_line(damage: str, tmp_path: Path) -> None:
    root, out = tmp_path / "root", tmp_path / "out"
    (root / "a").mkdir(parents=True)
    (root / "a" / "file").write_bytes(random.Random(0).randbytes(50_000))
    pieces = pack([root / "a"], root, out, "cache", piece_bytes=10_000)
    match damage:
        case "first missing":
            pieces[0].unlink()
        case "last missing":
            pieces[-1].unlink()
        case "one missing":
            pieces[2].unlink()
        case "other bytes":
            pieces[2].write_bytes(bytes(10_000))
        case _:
            pieces[0].write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"^[^\n]*out: the pieces of cache are damaged: [^\n]+$"):
        unpack(out, "cache", tmp_path / "again")


@pytest.mark.parametrize("text", ['{"check": "gpu", "sta', "[]", '{"schema": 3}', ""])
def test_a_damaged_file_of_results_is_one_line_and_stays(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu_smoke_emulated.json"
    file.write_text(text)
    monkeypatch.setenv("OUT", str(tmp_path))
    script = runpy.run_path(str(ROOT / "scripts" / "gpu_check"))
    for name, value in script["_EMULATION"].items():
        monkeypatch.setenv(name, value)  # as the script does, but only for this test
    with pytest.raises(SystemExit, match=r"^error: [^\n]*gpu_smoke_emulated.json is damaged[^\n]*$"):
        script["run"](script["parser"]().parse_args(["--emulated", "--smoke"]), tmp_path)
    assert file.read_text() == text
