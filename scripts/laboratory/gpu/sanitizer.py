"""Stage `sanitizer`: every kernel under NVIDIA's compute-sanitizer, where that tool is installed.

racecheck takes many times as long as the other tools: it has a process for each kernel and looks at no other there.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module

from caraserve.gpu.kernels import cuda_sources
from scripts.laboratory.gpu.processes import StageProcess
from scripts.laboratory.gpu.results import Lines, Outcome, StageReport, StageResult, WrongResult
from scripts.laboratory.gpu.setup import CheckSetup

# Accesses out of bounds; barriers that not all threads reach; shared memory used by two threads without a barrier.
_DECIDING = ("memcheck", "synccheck")  # racecheck also reports pipelined copies, which it does not know
_BY_KERNEL = "racecheck"
_TRITON = (
    *("attention.triton", "kernels.delta_net", "kernels.elementwise", "kernels.experts", "kernels.heads"),
    *("kernels.lora", "kernels.norms", "kernels.quantized"),
)  # modules of gpu/
_KERNEL_SUFFIX = "_kernel"  # of Triton's kernels; functions without it are called by them
_FOUND_STATUS = 86
_MOST_PROCESSES = 8
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_FINDING = re.compile(r"^========= ((?:Invalid|Error|Warning|Barrier|Address|Program|Uninitialized).*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class SanitizerRun:
    """One tool over all kernels, or over one. `findings` is None if it did not come to an end, for which `note` has
    the reason; otherwise `note` is its first finding, or empty."""

    findings: int | None
    note: str


@dataclass(frozen=True, slots=True)
class SanitizerFigures:
    """The runs by tool, and by tool and kernel; `path` is empty and there are none if compute-sanitizer is not
    installed."""

    path: str
    runs: dict[str, SanitizerRun]


def sanitizer(setup: CheckSetup) -> StageResult[SanitizerFigures]:
    """Runs all tools, several processes at once. Raises WrongResult for what memcheck or synccheck find."""
    lines, path = Lines(), setup.sanitizer
    if not path:
        lines.add("compute-sanitizer", "not installed: no kernel was checked")
        return StageResult(SanitizerFigures("", {}), lines.all)
    wanted = [
        (tool, kernel)
        for tool in setup.effort.sanitizers
        for kernel in (kernel_names() if tool == _BY_KERNEL else ("",))
    ]
    with ThreadPoolExecutor(min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        ended = pool.map(lambda each: _run(setup, path, *each), wanted)
        runs = {f"{tool} {kernel}".strip(): run for (tool, kernel), run in zip(wanted, ended, strict=True)}
    for tool in setup.effort.sanitizers:
        _judge(tool, {name: run for name, run in runs.items() if name.split()[0] == tool}, lines)
    return StageResult(SanitizerFigures(path, runs), lines.all)


def kernel_names() -> tuple[str, ...]:
    """Returns the names of all kernels that a server launches."""
    modules = [import_module(f"caraserve.gpu.{name}") for name in _TRITON]
    of_triton = [name for module in modules for name in vars(module) if name.endswith(_KERNEL_SUFFIX)]
    return (*(kernel for source in cuda_sources.SOURCES for kernel in cuda_sources.kernels(source)), *of_triton)


def _judge(tool: str, runs: dict[str, SanitizerRun], lines: Lines) -> None:
    """Raises WrongResult for findings of a tool that decides."""
    ended = {name: run.findings for name, run in runs.items() if run.findings is not None}
    found = {name: count for name, count in ended.items() if count}
    for name, count in found.items() if tool in _DECIDING else ():
        raise WrongResult(f"{name} has {count} findings, the first: {runs[name].note}")
    if len(ended) < len(runs):
        notes = "; ".join(f"{name}: {run.note}" for name, run in runs.items() if run.findings is None)
        lines.add(tool, f"{len(ended)} of {len(runs)} to their end; {notes}", "to their end", met=False)
    notes = "".join(f"; {name}: {runs[name].note}" for name in found)
    if ended:
        lines.add(tool, f"{sum(ended.values())} findings in {len(ended)} runs{notes}", "0", not found)


def _run(setup: CheckSetup, path: str, tool: str, kernel: str) -> SanitizerRun:
    """Runs all kernels once under a tool, which looks at all or at one. Its process loads modules as they are used, and
    allocates every tensor alone, so that an access past a tensor's end is one out of bounds."""
    if setup.left_s <= 0:
        return SanitizerRun(None, "the stage's time was up")
    name = f"{tool}-{kernel}" if kernel else tool
    log = setup.saved / f"{name}.log"
    prefix = (path, "--tool", tool, "--error-exitcode", str(_FOUND_STATUS), "--log-file", str(log))
    only = ("--kernel-name", f"kns={kernel}") if kernel else ()
    process = StageProcess(
        "every_kernel",
        setup.folder / name,
        setup.left_s,
        is_part=True,
        prefix=(*prefix, *only, "--target-processes", "application-only"),
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
