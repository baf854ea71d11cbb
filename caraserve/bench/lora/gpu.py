"""The GPU part of `caraserve bench lora`: the same measurement as stage `lora` of `scripts/gpu_check`."""

import tempfile
from pathlib import Path

from caraserve.bench.gpu.limits import copy_bytes_per_s
from caraserve.bench.gpu.lora import LoraPoint, measure
from caraserve.bench.gpu.results import WrongResult
from caraserve.bench.gpu.setup import CheckSetup, real_setup
from caraserve.errors import BackendFailed
from caraserve.gpu.driver.detect import prepare_environment
from caraserve.model.dtype import Dtype


def gpu_points(budget_s: float) -> list[LoraPoint]:
    """Measures this machine's GPU for up to `budget_s`. Raises BackendFailed when its results are wrong."""
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        return points(real_setup(Path(folder), budget_s, {}, ()))


def points(setup: CheckSetup) -> list[LoraPoint]:
    """Returns as many points as the setup's time allows, most rows first. Raises BackendFailed for wrong results."""
    acc = setup.accelerator(Dtype.BF16)
    try:
        return list(measure(setup, acc, copy_bytes_per_s(setup, acc)))
    except WrongResult as error:
        raise BackendFailed(f"the GPU's LoRA kernels are wrong: {error}") from error
