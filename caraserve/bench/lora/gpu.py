"""The GPU's part of `caraserve bench lora`: what `scripts/gpu_check` measures in its stage `lora`."""

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
    """On this machine's GPU. Raises BackendFailed when it computes something else than it should."""
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        return points(real_setup(Path(folder), budget_s, {}, ()))


def points(setup: CheckSetup) -> list[LoraPoint]:
    """What there is time for, the most rows first."""
    acc = setup.accelerator(Dtype.BF16)
    try:
        return list(measure(setup, acc, copy_bytes_per_s(setup, acc)))
    except WrongResult as error:
        raise BackendFailed(f"the GPU's LoRA kernels are wrong: {error}") from error
