"""Runs stages in processes of their own, so that an error or a hang of one cannot affect another.

`python -m scripts.laboratory.gpu` is such a process. It writes its report to a file in its folder.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from caraserve.errors import BackendFailed
from scripts.laboratory.gpu.results import Outcome, StageReport

GRACE_S = 15.0  # a stage skips points when its budget is spent, and is killed this much later
KNOWN, REPORT = "known.json", "report.json"  # files in the folder of a process
SAVED, LOG = "saved", "output.log"  # a folder of files that are kept beside the report, and one of them
_LAST_LINES = 25
_ROOT = Path(__file__).parents[3]

_RUNNING: "set[subprocess.Popen[bytes]]" = set()
Known = dict[str, dict[str, Any]]  # figures of earlier stages, JSON, by stage


@dataclass(frozen=True, slots=True)
class StageProcess:
    """How a stage is run, or with `is_part` a part of one in a process of the stage's. `folder` does not exist yet.

    `prefix`: a command that runs the process. `module_loading`: value of CUDA_MODULE_LOADING; "" for this project's.
    `module`: what Python runs. `is_quiet`: its output goes to a file, whose end is printed if it does not end well.
    """

    name: str
    folder: Path
    budget_s: float
    is_part: bool = False
    known: Known = field(default_factory=dict)
    server_arguments: Sequence[str] = ()
    prefix: Sequence[str] = ()
    module_loading: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    module: str = "scripts.laboratory.gpu"
    is_smoke: bool = False
    is_quiet: bool = False


def run_process(process: StageProcess) -> StageReport:
    """Runs a stage in a process. The report of one that does not end in time, or dies, says so."""
    process.folder.mkdir()
    (process.folder / KNOWN).write_bytes(msgspec.json.encode(process.known))
    command = [*process.prefix, sys.executable, "-m", process.module, "--stage", process.name]
    command += ["--folder", str(process.folder), "--budget-s", str(process.budget_s)]
    if process.is_smoke:
        command += ["--smoke"]
    if process.module_loading:
        command += ["--module-loading", process.module_loading]
    command += ["--", *process.server_arguments]
    report = process.folder / REPORT
    most_s = process.budget_s if process.is_part else process.budget_s + GRACE_S
    log_file = process.folder / SAVED / LOG
    if process.is_quiet:
        log_file.parent.mkdir()
    with log_file.open("wb") if process.is_quiet else contextlib.nullcontext() as log:
        found = await_report(
            command, report, most_s, is_part=process.is_part, environment=process.environment, output=log
        )
    if process.is_quiet and found.outcome is not Outcome.DONE:
        said = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        sys.stderr.write("".join(f"{process.name} | {line}\n" for line in said))
    return found


def await_report(
    command: Sequence[str],
    file: Path,
    most_s: float,
    *,
    is_part: bool = False,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    output: BinaryIO | None = None,
) -> StageReport:
    """Runs a command for at most `most_s` and reads its report from `file`; then kills all that it has started.

    A command has a session of its own; with `is_part` it has a group in the caller's session, whose end is its end.
    `output`: where it writes to; None: where this process does.
    """
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    group = 0 if is_part else None
    process = subprocess.Popen(
        command,
        start_new_session=not is_part,
        process_group=group,
        pass_fds=pass_fds,
        env=variables,
        stdout=output,
        stderr=output,
    )
    _RUNNING.add(process)
    try:
        code = process.wait(most_s)
    except subprocess.TimeoutExpired:
        return StageReport(Outcome.KILLED, f"it took longer than {most_s:.0f} s and was killed")
    finally:
        _RUNNING.discard(process)
        _end_all(process)
    if not file.exists():
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        return StageReport(Outcome.FAILED, f"its process {how} before it had a report; its last words are above")
    return msgspec.json.decode(file.read_bytes(), type=StageReport)


def end_running() -> None:
    """Kills all processes that `await_report` waits for in other threads, with what they have started."""
    for process in list(_RUNNING):
        _end_all(process)


def _end_all(process: "subprocess.Popen[bytes]") -> None:
    """Kills what is left of the processes whose session, or group, the process leads."""
    for number in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(ProcessLookupError):
            if process.pid in (os.getsid(number), os.getpgid(number)):
                os.kill(number, signal.SIGKILL)
    process.wait()


def run_bench_modes(argv: Sequence[str], timeout_s: float) -> None:
    """Runs `caraserve bench modes` in a process.

    After `timeout_s` the process is terminated and still writes a report of the runs so far. Raises BackendFailed when
    it exits with an error before that.
    """
    command = [sys.executable, "-m", "caraserve", "bench", "modes", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: the process must stop its server and write its report
        process.communicate()
        return
    if process.returncode != 0:
        sys.stderr.write(said)
        last = next(iter(said.strip().splitlines()[-1:]), "it said nothing")
        raise BackendFailed(f"bench modes ended with {process.returncode}: {last}")


def find_sanitizer() -> str:
    """Returns the path of NVIDIA's compute-sanitizer, or "" where it is not installed."""
    folders = sorted(Path("/usr/local").glob("cuda*/bin"), reverse=True)
    found = (shutil.which("compute-sanitizer", path=folder) for folder in (None, *map(str, folders)))
    return next(filter(None, found), "")
