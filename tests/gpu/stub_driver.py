"""A stand-in for CUDA's driver library that executes calls on host memory: libcuda_stub.c."""

import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.cuda_driver import CudaDriver
from caraserve.gpu.driver.launch import Launch
from caraserve.gpu.driver.libcuda import Cuda
from tests.gpu.emulator import shared_library

_TRITON = find_spec("triton")
assert _TRITON is not None
assert _TRITON.origin is not None
HEADER = Path(_TRITON.origin).parent / "backends/nvidia/include/cuda.h"  # part of Triton
_SOURCE = Path(__file__).with_name("libcuda_stub.c")
_FLAGS = ("-std=c11", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-fno-sanitize=all")


def build() -> Path:
    """Compiles the library and returns its file."""
    files = {HEADER.name: HEADER.read_text(encoding="utf-8"), _SOURCE.name: _SOURCE.read_text(encoding="utf-8")}
    return shared_library("cc", (*_FLAGS, "-isystem."), _SOURCE.name, files)


class Stub:
    """Controls and inspects the library, besides CUDA's own calls."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.stub_log.restype = ctypes.c_char_p
        self._library.stub_reset()

    @property
    def log(self) -> list[str]:
        """All calls in order, with their numeric arguments."""
        text: bytes = self._library.stub_log()
        return text.decode().splitlines()

    def calls(self, name: str) -> list[tuple[int, ...]]:
        """Returns the arguments of every call of a function."""
        lines = (line.split() for line in self.log)
        return [tuple(map(int, arguments)) for called, *arguments in lines if called == name]

    @property
    def unmet_waits(self) -> int:
        """Number of waits for words that had not reached their value: on a device they would have blocked."""
        return int(self._library.stub_unmet())

    @property
    def kept_gil(self) -> bool:
        """True if the last call was made with the GIL kept."""
        return bool(self._library.stub_kept_gil())

    def device_memory(self, num_bytes: int) -> int:
        """Allocates device memory and returns its address. The calling thread must have a context."""
        address = ctypes.c_uint64()
        assert self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(num_bytes)) == 0
        return address.value

    @property
    def launch_bytes(self) -> tuple[int, int]:
        """Bytes of a launch's configuration and of one attribute, by the header."""
        return self._library.stub_launch_config_bytes(), self._library.stub_launch_attribute_bytes()

    def set_attribute(self, attribute: int, value: int) -> None:
        self._library.stub_attribute(attribute, value)

    def set_busy(self, busy: bool) -> None:
        """Sets whether events find work pending."""
        self._library.stub_busy(busy)

    def set_gap(self, gap: int) -> None:
        """Sets the bytes on the device between the next registered memory and the previous one."""
        self._library.stub_chunk_gap(ctypes.c_longlong(gap))

    def fail(self, name: str, status: int) -> None:
        """Makes the next call of a function return an error."""
        self._library.stub_fail(name.encode(), status)


class Recorder:
    """Kernels that only record launches."""

    multiprocessors = 1

    def __init__(self) -> None:
        self.launched: list[tuple[Launch, Stream]] = []

    def launch(self, launch: Launch, stream: Stream) -> None:
        self.launched.append((launch, stream))


class Torch:
    """Stand-in for torch's part in streams and captures."""

    def __init__(self) -> None:
        self.current: list[int] = []
        self.given = 5

    def make_current(self, stream: int) -> None:
        self.current.append(stream)

    def allocations(self) -> int:
        return self.given


class DriverCase:
    """A driver, a stream, 4 KiB on the host and 4 KiB on the device, which the host can read, too."""

    def __init__(self, stub: Stub) -> None:
        self.stub, self.kernels, self.torch = stub, Recorder(), Torch()
        self.driver = CudaDriver(Cuda(stub.path), self.kernels, torch=self.torch)
        self.stream = self.driver.create_stream(0)
        self.bytes = np.random.default_rng(0).integers(1, 255, 4096).astype(np.uint8)
        self.host = self.driver.register_host(self.bytes.ctypes.data, self.bytes.nbytes)
        self.device = stub.device_memory(4096)

    def on_device(self, num_bytes: int = 4096) -> np.ndarray:
        """Returns what is in device memory now."""
        seen = np.empty(num_bytes, np.uint8)
        stream = self.driver.create_stream(0)
        address = self.driver.register_host(seen.ctypes.data, num_bytes)
        self.driver.copy_to_host(address, self.device, num_bytes, stream)
        self.driver.unregister_host(seen.ctypes.data)
        return seen

    def word(self, at: int = 0) -> int:
        return int(self.bytes[at : at + 4].view(np.uint32)[0])
