"""Loads the raw CUDA kernels through CuPy, launches them on a given stream, and opens the device with them.

CuPy allocates nothing here: the caller owns all memory. It cannot set launch attributes, so kernels that begin early
are launched by a call of the driver library. Kernels are loaded before any stream waits for a word and before any
capture: loading a module takes locks that the release of a waiting device may need.
"""

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caraserve.gpu.driver import libcuda
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.cuda_driver import CudaDriver
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.libcuda import Cuda, LaunchAttribute, LaunchConfig
from caraserve.gpu.kernels.cuda_sources import cubin_file, import_cupy, kernels, units
from caraserve.model.dtype import Dtype
from caraserve.util.cache_folder import cache_folder

log = logging.getLogger(__name__)

_EARLY_CAPABILITY = 90  # first on which a kernel may begin before the one before it has ended
_EARLY_DRIVER = 12030  # first version that captures such launches


@dataclass(frozen=True, slots=True)
class _Handle:
    """A stream as CuPy's launcher needs it: a handle. CuPy's own stream objects would change the current stream."""

    ptr: int


class CudaKernels:
    """All raw kernels for one activation dtype, on the current device."""

    def __init__(self, activation: Dtype, cuda: Cuda, cache: Path | None = None) -> None:
        """Compiles and loads the kernels. `cache`: folder in which machine code is kept between starts. Raises
        ConfigError without CuPy."""
        cupy = import_cupy()
        device = cupy.cuda.Device()
        version, capability = cupy.cuda.runtime.driverGetVersion(), device.compute_capability
        self.multiprocessors: int = device.attributes["MultiProcessorCount"]
        self._cuda = cuda
        self._can_begin_early = int(capability) >= _EARLY_CAPABILITY and version >= _EARLY_DRIVER
        self._kernels: dict[str, Any] = {}
        self._functions: dict[str, int] = {}  # CUfunction, by kernel
        self.registers: dict[str, int] = {}  # per thread, by kernel
        for unit in units(activation, f"sm_{capability}"):
            module = cupy.RawModule(path=str(cubin_file(unit, cache or cache_folder("cubins"))))
            for name in kernels(unit.source):
                kernel = module.get_function(name)
                if kernel.local_size_bytes:  # reading this loads the kernel
                    log.warning("%s spills registers on %s: it will be slower than it was measured", name, unit.arch)
                self._kernels[name] = kernel
                self._functions[name] = kernel.kernel.ptr
                self.registers[name] = int(kernel.num_regs)

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Issues a launch on a stream, given by its CUstream; may be captured. The device must be current on the
        calling thread. Raises DriverError if the device has failed."""
        if launch.begins_early and self._can_begin_early:
            self._launch_early(launch, stream)
            return
        try:
            self._kernels[launch.kernel]((launch.grid,), (launch.block,), launch.arguments, stream=_Handle(stream))
        except Exception:  # of CuPy, which has its own names for what has failed
            self._cuda.memory()  # raises DriverError if the device has failed for good
            raise

    def _launch_early(self, launch: Launch, stream: Stream) -> None:
        """Issues a launch that may begin before the one before it has ended."""
        attribute = LaunchAttribute(libcuda.LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed=1)
        sizes = (launch.grid, 1, 1, launch.block, 1, 1, 0)
        config = LaunchConfig(*sizes, stream, ctypes.pointer(attribute), 1)
        values = ctypes.create_string_buffer(b"".join(each.tobytes().ljust(8, b"\0") for each in launch.arguments))
        first, count = ctypes.addressof(values), len(launch.arguments)
        addresses = (ctypes.c_void_p * count)(*range(first, first + 8 * count, 8))
        self._cuda.call("cuLaunchKernelEx", ctypes.byref(config), self._functions[launch.kernel], addresses, None)


def open_device(activation: Dtype) -> GpuDevice:
    """Returns the first visible device. Raises ConfigError if a package is missing."""
    torch.backends.cuda.matmul.allow_tf32 = False  # computes fp32 products in fp32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.cuda.set_device(0)
    cuda = Cuda()
    loaded = CudaKernels(activation, cuda)
    return GpuDevice(
        CudaDriver(cuda, loaded),
        loaded,
        torch.device("cuda", 0),
        torch.cuda.get_device_name(0),
        enter_thread=lambda: torch.cuda.set_device(0),
        synchronize=torch.cuda.synchronize,
    )
