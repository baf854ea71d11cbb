"""Kernels that CuPy compiles, loads and launches. It compiles here, too; a stand-in loads and launches, for which it
needs a driver."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.errors import ConfigError
from caraserve.gpu.driver.api import DriverError, Stream
from caraserve.gpu.driver.libcuda import Cuda
from caraserve.gpu.kernels import cuda_kernels, cuda_launch, cuda_sources
from caraserve.gpu.kernels.cuda_kernels import CudaKernels
from caraserve.model.dtype import Dtype
from tests.gpu import cubin
from tests.gpu.compiled_units import compiled
from tests.gpu.stub_driver import DriverCase, Stub

ITEMS, PART = cuda_launch.WorkList(1, 2, 3), cuda_launch.ShrinkBuffer(1 << 40, 64, 3, 16)
EXPAND = cuda_launch.expand(
    660,
    cuda_launch.WeightTables(4, 5, 6, 7, 8, 9, 10),
    ITEMS,
    PART,
    cuda_launch.ActivationRows(32, 96, 90),
    cuda_launch.Projections((0, 32, 64), (32, 30, 26)),
)
NVRTC = cuda_sources.import_cupy().cuda.nvrtc  # CuPy's own
NVRTC.getVersion()  # loads the library, by CuPy's own module, which tests replace


class Kernel:
    def __init__(self, name: str, calls: list[Any], spills: bool) -> None:
        self.name, self.calls, self.local_size_bytes, self.num_regs = name, calls, 8 * spills, 90
        kernels = [cuda_sources.kernels(source) for source in cuda_sources.SOURCES]
        (arguments,) = (found[name] for found in kernels if name in found)
        self.kernel = SimpleNamespace(ptr=len(arguments))  # a function's handle, as the stub of the driver has it

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, stream: Any) -> None:
        self.calls.append((self.name, grid, block, arguments, stream.ptr))


class Loaded:
    """Kernels on a device, an H200 with a driver of CUDA 13.2 unless said otherwise; `calls`: CuPy's launches."""

    def __init__(self, patch: pytest.MonkeyPatch, stub: Stub, cache: Path) -> None:
        self._patch, self._stub, self._cache = patch, stub, cache
        self.calls: list[Any] = []

    def load(self, *, spills: bool = False, capability: str = "90", version: int = 13020) -> CudaKernels:
        def raw_module(path: str) -> SimpleNamespace:
            names = set(cubin.kernels(Path(path).read_bytes()))
            return SimpleNamespace(
                get_function=lambda name: Kernel(name, self.calls, spills) if name in names else None
            )

        device = SimpleNamespace(compute_capability=capability, attributes={"MultiProcessorCount": 132})
        runtime = SimpleNamespace(driverGetVersion=lambda: version)
        cuda = SimpleNamespace(Device=lambda: device, runtime=runtime, nvrtc=NVRTC)
        self._patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, RawModule=raw_module))
        return CudaKernels(Dtype.BF16, Cuda(self._stub.path), self._cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch, stub: Stub, cache: Path) -> Loaded:
    monkeypatch.setattr(cuda_sources, "compiled", compiled)  # by the same compiler
    return Loaded(monkeypatch, stub, cache)


def test_a_launch_runs_its_kernel_on_the_given_stream(loaded: Loaded, cache: Path) -> None:
    kernels, launch = loaded.load(), cuda_launch.wait(1, 2, 3)
    kernels.launch(launch, Stream(0xBEEF))
    assert loaded.calls == [("handoff_wait", (1,), (32,), launch.arguments, 0xBEEF)]
    assert kernels.multiprocessors == 132
    names = sorted(path.name.rsplit("-", 1)[0] for path in cache.iterdir())
    assert names == ["bgmv-bf16-sm_90", "handoff-bf16-sm_90", "sampling-bf16-sm_90", "words-f32-sm_90"]


def test_a_launch_that_begins_early_says_so_to_the_driver(loaded: Loaded, case: DriverCase) -> None:
    loaded.load(version=12030).launch(EXPAND, case.stream)
    blocks, threads, shared_bytes, attributes = 660, 128, 0, 1
    assert case.stub.calls("cuLaunchKernelEx") == [(blocks, 1, 1, threads, 1, 1, shared_bytes, attributes)]
    programmatic_stream_serialization, allowed = 6, 1
    assert case.stub.calls("attribute") == [(programmatic_stream_serialization, allowed)]
    assert case.stub.calls("argument") == [(int(argument),) for argument in EXPAND.arguments]
    assert not case.stub.kept_gil  # a launch waits while the stream's queue is full


@pytest.mark.parametrize(("capability", "version"), [("89", 13020), ("90", 12020)])
def test_older_devices_and_drivers_begin_no_launch_early(
    capability: str, version: int, monkeypatch: pytest.MonkeyPatch, loaded: Loaded, case: DriverCase
) -> None:
    cubin_file = cuda_kernels.cubin_file  # the code for another device would do nothing else here, and take 4 s
    monkeypatch.setattr(cuda_kernels, "cubin_file", lambda unit, cache: cubin_file(replace(unit, arch="sm_90"), cache))
    loaded.load(capability=capability, version=version).launch(EXPAND, case.stream)
    assert loaded.calls == [("bgmv_expand", (660,), (128,), EXPAND.arguments, case.stream)]
    assert not case.stub.calls("cuLaunchKernelEx")


def test_an_error_of_a_launch_is_the_drivers_if_the_device_has_failed(
    monkeypatch: pytest.MonkeyPatch, loaded: Loaded, case: DriverCase
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(Kernel, "__call__", refuse)
    kernels = loaded.load()
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        kernels.launch(cuda_launch.wait(1, 2, 3), Stream(1))
    case.stub.fail("cuMemGetInfo_v2", 700)
    with pytest.raises(DriverError, match="cuMemGetInfo_v2: other"):
        kernels.launch(cuda_launch.wait(1, 2, 3), Stream(1))


def test_every_kernel_is_loaded_before_the_first_launch(loaded: Loaded) -> None:
    kernels = {name for source in cuda_sources.SOURCES for name in cuda_sources.kernels(source)}
    assert set(loaded.load().registers) == kernels


def test_a_kernel_that_spills_is_logged(loaded: Loaded, caplog: pytest.LogCaptureFixture) -> None:
    loaded.load(spills=True)
    assert "bgmv_shrink spills registers on sm_90" in caplog.text


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, stub: Stub) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pip install 'caraserve\[cuda13\]'"):
        CudaKernels(Dtype.BF16, Cuda(stub.path))
