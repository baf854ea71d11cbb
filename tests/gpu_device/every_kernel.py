"""A part of stage `sanitizer`: every kernel once, with its result checked."""

from dataclasses import dataclass

from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device.correct import CHECKS
from tests.gpu_device.handshake_rounds import handshake_bench, run_rounds

_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class EveryKernelFigures:
    """The checks that were run."""

    checks: tuple[str, ...]


def every_kernel(setup: CheckSetup) -> StageResult[EveryKernelFigures]:
    """Runs the first case of every check of stage `correct`, whose kernels are compiled already, and hand-offs to a CPU
    worker. Raises WrongResult."""
    acc = setup.accelerator(setup.effort.dtypes[0])
    for check in CHECKS.values():
        check(setup, acc, 0)
    with handshake_bench(setup, acc) as bench:
        for by_stream in (True, False):
            run_rounds(bench, _ROUNDS, acc.generator(0), by_stream=by_stream)
    return StageResult(EveryKernelFigures((*CHECKS, "hand-offs")), Lines().all)
