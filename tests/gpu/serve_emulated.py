"""`caraserve` with `--device cuda` on an emulated device: `python -m tests.gpu.serve_emulated serve …`.

Triton's kernels are those of torch_kernels.py, whose results are the same and which take a hundredth of the time.
"""

import sys
from dataclasses import replace

import caraserve.backend_factory
from caraserve.__main__ import run
from caraserve.gpu import builder
from caraserve.gpu.driver.detect import DeviceChoice
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.kernels import cuda_kernels
from caraserve.model.dtype import Dtype
from tests.gpu.host_device import host_device
from tests.gpu.torch_kernels import torch_kernels


def main() -> int:
    """Runs the command on a device of this process, with few captured graphs: they bring no speed here."""
    real_sizes = builder.GpuSizes
    cuda_kernels.open_device = open_device
    builder.GpuSizes = lambda **fields: replace(real_sizes(**fields), graph_bytes=1 << 21)
    caraserve.backend_factory.detect = lambda wanted: DeviceChoice("cpu" if wanted == "cpu" else "cuda")
    with torch_kernels():
        return run()


def open_device(dtype: Dtype) -> GpuDevice:
    return host_device(dtype)[0]


if __name__ == "__main__":
    sys.exit(main())
