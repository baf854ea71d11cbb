"""Opens the real device: CUDA's library, the raw kernels, torch. nothing of it is imported without a GPU."""

from caraserve.gpu.driver.cuda_driver import CudaDriver
from caraserve.gpu.driver.libcuda import Cuda
from caraserve.gpu.driver.modules import CudaKernels
from caraserve.gpu.forward.builder import GpuDevice
from caraserve.model.dtype import Dtype


def open_device(activation: Dtype) -> GpuDevice:
    """The first device that is visible. Raises ConfigError when a package is missing."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 means fp32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.cuda.set_device(0)
    kernels = CudaKernels(activation)
    driver = CudaDriver(Cuda(), kernels)
    name = torch.cuda.get_device_name(0)
    return GpuDevice(
        driver,
        kernels,
        torch.device("cuda", 0),
        name,
        enter_thread=lambda: torch.cuda.set_device(0),
        synchronize=torch.cuda.synchronize,
    )
