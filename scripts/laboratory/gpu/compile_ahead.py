"""A part of stage `build`: compiles the kernels of the models that later stages run, in parallel.

They go to the folders on disk from which a backend loads them.

A backend on a device where nothing runs makes all launches of its warm-up, which says what to compile.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context

from caraserve.bench.synthetic import shape_plan
from caraserve.gpu.backend import CudaBackend
from caraserve.gpu.kernels import cuda_sources
from caraserve.gpu.weights import TORCH_DTYPES, load
from caraserve.model.dtype import Dtype
from caraserve.util.cache_folder import cache_folder
from scripts.laboratory.gpu.experts import meet_experts
from scripts.laboratory.gpu.measured_model import measured_sizes
from scripts.laboratory.gpu.null_device import null_device
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup
from scripts.laboratory.gpu.triton_builds import TritonBuild, compile_build, compile_only, recorded

_MOST_PROCESSES = 16
_LAYERS = 4  # all layers use the same kernels, and four have all alignments of their tables
_MODULES = ["scripts.laboratory.gpu.triton_builds", "caraserve.gpu.forward.decoder"]  # imported once, for all processes


@dataclass(frozen=True, slots=True)
class CompiledFigures:
    """How many variants were compiled, or were there already, and the errors, by what was compiled. CPU LoRA workers
    are compiled beside them."""

    triton: int
    raw: int
    processes: int
    errors: dict[str, str]


def compile_ahead(setup: CheckSetup) -> StageResult[CompiledFigures]:
    """Compiles all kernels; each that cannot be compiled is an entry of `errors`."""
    capability = setup.facts.capability
    compile_only(capability)
    builds = recorded(lambda: launch_all(setup)) if setup.effort.compiled else []
    units = _units(capability) if setup.effort.compiled else []
    processes = max(1, min(_MOST_PROCESSES, len(os.sched_getaffinity(0)), len(builds) + len(units)))
    errors = compiled(builds, units, capability, processes)
    lines = Lines()
    lines.add("compiled in parallel", f"{len(builds)} Triton kernels, {len(units)} raw, by {processes} processes")
    return StageResult(CompiledFigures(len(builds), len(units), processes, errors), lines.all)


def compiled(
    builds: Sequence[TritonBuild], units: Sequence[cuda_sources.Unit], capability: int, processes: int
) -> dict[str, str]:
    """Compiles everything in `processes` processes; returns errors by kernel."""
    context = get_context("forkserver")
    context.set_forkserver_preload(_MODULES)
    errors: dict[str, str] = {}
    with ProcessPoolExecutor(processes, context, compile_only, (capability,)) as pool:
        # The raw kernels first: they take longest.
        jobs: dict[Future[None], str] = {pool.submit(_compile_unit, unit): unit.source for unit in units}
        jobs |= {pool.submit(_compile_worker): "CPU LoRA workers"} if units else {}
        jobs |= {pool.submit(compile_build, build): build.kernel for build in builds}
        for job in as_completed(jobs):
            if (error := job.exception()) is not None:
                errors[jobs[job]] = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return errors


def _compile_worker() -> None:
    """Compiles what CPU LoRA workers run; a first server would otherwise be ready before them."""
    from caraserve.cpu.lora_workers.worker import compile_worker

    compile_worker()


def _compile_unit(unit: cuda_sources.Unit) -> None:
    cuda_sources.cubin_file(unit, cache_folder("cubins"))


def _units(capability: int) -> list[cuda_sources.Unit]:
    return list(dict.fromkeys(unit for dtype in Dtype for unit in cuda_sources.units(dtype, f"sm_{capability}")))


def launch_all(setup: CheckSetup) -> None:
    """Launches what later stages launch, on a device where nothing runs."""
    warm_up_all(setup)
    meet_experts(setup, null_device().device)


def warm_up_all(setup: CheckSetup) -> None:
    """Warms up a backend for every model, on a device where nothing runs."""
    slots, context = max(setup.effort.batches), max(setup.effort.contexts)
    sizes = replace(measured_sizes(setup, slots, context, slots + 1, workers=1), host_bytes=1 << 20)
    for shape, dtype in setup.effort.compiled:
        device, plan = null_device(), shape_plan(replace(shape, layers=min(shape.layers, _LAYERS)), 2 * context)
        weights = load(plan, TORCH_DTYPES[dtype], sizes.max_context, device.device, lambda name, target: None)
        backend = CudaBackend(plan, weights, sizes, device)
        backend.warm_up()
        backend.close()
