"""Stage `sanitizer`: every kernel under NVIDIA's compute-sanitizer, where that tool is installed."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from caraserve.bench.gpu.processes import StageProcess
from caraserve.bench.gpu.results import Lines, Outcome, StageReport, StageResult, WrongResult
from caraserve.bench.gpu.setup import CheckSetup

# Accesses out of bounds; barriers that not all threads reach; shared memory used by two threads without a barrier.
_TOOLS = ("memcheck", "synccheck", "racecheck")
_DECIDING = ("memcheck", "synccheck")  # racecheck also reports pipelined copies, which it does not know
_FOUND_STATUS = 86
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_FINDING = re.compile(r"^========= ((?:Invalid|Error|Warning|Barrier|Address|Program|Uninitialized).*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SanitizerRun:
    """One tool over all kernels. `findings` is None if it did not come to an end, for which `note` has the reason;
    otherwise `note` is its first finding, or empty."""

    findings: int | None
    note: str


@dataclass(frozen=True, slots=True)
class SanitizerFigures:
    """The runs by tool; `path` is empty and there are none if compute-sanitizer is not installed."""

    path: str
    runs: dict[str, SanitizerRun]


def sanitizer(setup: CheckSetup) -> StageResult[SanitizerFigures]:
    """Runs all tools at once. Raises WrongResult for what memcheck or synccheck find."""
    lines, path = Lines(), setup.sanitizer
    if not path:
        lines.add("compute-sanitizer", "not installed: no kernel was checked")
        return StageResult(SanitizerFigures("", {}), lines.all)
    with ThreadPoolExecutor(len(_TOOLS)) as pool:
        runs = dict(zip(_TOOLS, pool.map(lambda tool: _run(setup, path, tool), _TOOLS), strict=True))
    for tool, run in runs.items():
        if run.findings and tool in _DECIDING:
            raise WrongResult(f"{tool} has {run.findings} findings, the first: {run.note}")
        if run.findings is None:
            lines.add(tool, run.note, "to its end", met=False)
        else:
            lines.add(tool, f"{run.findings} findings {run.note}".strip(), "0", run.findings == 0)
    return StageResult(SanitizerFigures(path, runs), lines.all)


def _run(setup: CheckSetup, path: str, tool: str) -> SanitizerRun:
    """Runs all kernels once under a tool. Its process loads modules as they are used, and allocates every tensor alone,
    so that an access past a tensor's end is one out of bounds."""
    log = setup.folder / f"{tool}.log"
    prefix = (path, "--tool", tool, "--error-exitcode", str(_FOUND_STATUS), "--log-file", str(log))
    process = StageProcess(
        "every_kernel",
        setup.folder / tool,
        setup.left_s,
        is_part=True,
        prefix=(*prefix, "--target-processes", "application-only"),
        module_loading="LAZY",
        environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )
    return judged(setup.run_part(process), log.read_text(encoding="utf-8") if log.exists() else "")


def judged(report: StageReport, log: str) -> SanitizerRun:
    """Returns what a run has found, by its log; the report says whether it came to an end."""
    found = _SUMMARY.search(log)
    if found is None:
        return SanitizerRun(None, report.error or "the tool wrote no summary")
    first = _FINDING.search(log)
    if report.outcome is not Outcome.DONE and int(found[1]) == 0:
        return SanitizerRun(None, report.error)
    return SanitizerRun(int(found[1]), first[1].strip() if first else "")
