"""Runs one stage of `scripts/gpu_check --emulated` in this process, on a device emulated on the host.

Triton's interpreter must have been selected before this module is imported.
"""

import sys
from dataclasses import replace
from pathlib import Path

from scripts.laboratory.gpu.__main__ import main
from scripts.laboratory.gpu.processes import StageProcess, run_process
from scripts.laboratory.gpu.results import StageReport
from scripts.laboratory.gpu.setup import CheckSetup, DeviceLimits
from tests.gpu.rehearsal import emulated_setup, opener, prepare_interpreter


def make_setup(
    folder: Path, budget_s: float, limits: DeviceLimits | None, more: tuple[str, ...], *, is_smoke: bool = False
) -> CheckSetup:
    """Returns the setup of the stage. Sizes are always those that an emulation can manage."""
    return emulated_setup(folder, budget_s, limits, more, opener(), run_part)


def run_part(process: StageProcess) -> StageReport:
    return run_process(replace(process, module="tests.gpu.emulated_stage"))


if __name__ == "__main__":
    prepare_interpreter()
    sys.exit(main(make_setup))
