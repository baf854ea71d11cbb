"""Calls of CuPy, with a stand-in for it: the real one needs a driver."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.errors import ConfigError
from caraserve.gpu.driver import nvrtc
from caraserve.gpu.driver.api import DriverError, Stream
from caraserve.gpu.driver.libcuda import Cuda
from caraserve.gpu.driver.modules import CudaKernels
from caraserve.gpu.kernels import cuda_launch
from caraserve.model.dtype import Dtype
from tests.gpu import cubin
from tests.gpu.stub_driver import Stub, World

ITEMS, PART = cuda_launch.WorkList(1, 2, 3), cuda_launch.ShrinkBuffer(1 << 40, 64, 3, 16)
EXPAND = cuda_launch.expand(
    660,
    cuda_launch.WeightTables(4, 5, 6, 7, 8, 9),
    ITEMS,
    PART,
    cuda_launch.ActivationRows(32, 96, 90),
    cuda_launch.Projections((0, 32, 64), (32, 30, 26)),
)


class Kernel:
    def __init__(self, name: str, calls: list[Any], spills: bool) -> None:
        self.name, self.calls, self.local_size_bytes, self.num_regs = name, calls, 8 * spills, 90
        (arguments,) = (found[name] for source in nvrtc.SOURCES if name in (found := nvrtc.kernels(source)))
        self.kernel = SimpleNamespace(ptr=len(arguments))  # a function's handle, as the stub of the driver has it

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, stream: Any) -> None:
        self.calls.append((self.name, grid, block, arguments, stream.ptr))


def cupy(calls: list[Any], *, spills: bool = False, capability: str = "90", version: int = 13020) -> SimpleNamespace:
    """Returns a stand-in for CuPy, on an H200 with a driver of CUDA 13.2 unless told otherwise."""

    def raw_module(path: str) -> SimpleNamespace:
        names = set(cubin.kernels(Path(path).read_bytes()))
        return SimpleNamespace(get_function=lambda name: Kernel(name, calls, spills) if name in names else None)

    device = SimpleNamespace(compute_capability=capability, attributes={"MultiProcessorCount": 132})
    runtime = SimpleNamespace(driverGetVersion=lambda: version)
    return SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device, runtime=runtime), RawModule=raw_module)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def any_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for drivers of any version by the NVRTC that there is."""
    newest = nvrtc.load()
    monkeypatch.setattr(nvrtc, "load", lambda major: newest)


@pytest.fixture
def cuda(stub: Stub) -> Cuda:
    return Cuda(stub.path)


def test_a_launch_runs_its_kernel_on_the_given_stream(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, cache: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "cupy", cupy(calls))
    kernels = CudaKernels(Dtype.BF16, cuda, cache)
    launch = cuda_launch.wait(1, 2, 3)
    kernels.launch(launch, Stream(0xBEEF))
    assert calls == [("handoff_wait", (1,), (32,), launch.arguments, 0xBEEF)]
    assert kernels.bgmv_grid == 5 * 132
    names = sorted(path.name.rsplit("-", 1)[0] for path in cache.iterdir())
    assert names == ["bgmv-bf16-sm_90", "handoff-bf16-sm_90", "sampling-bf16-sm_90", "words-f32-sm_90"]


@pytest.mark.usefixtures("any_driver")
def test_a_launch_that_begins_early_says_so_to_the_driver(
    monkeypatch: pytest.MonkeyPatch, world: World, cache: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy([], version=12030))
    CudaKernels(Dtype.BF16, Cuda(world.stub.path), cache).launch(EXPAND, world.stream)
    blocks, threads, shared_bytes, attributes = 660, 128, 0, 1
    assert world.stub.calls("cuLaunchKernelEx") == [(blocks, 1, 1, threads, 1, 1, shared_bytes, attributes)]
    programmatic_stream_serialization, allowed = 6, 1
    assert world.stub.calls("attribute") == [(programmatic_stream_serialization, allowed)]
    assert world.stub.calls("argument") == [(int(argument),) for argument in EXPAND.arguments]
    assert not world.stub.kept_gil  # a launch waits while the stream's queue is full


@pytest.mark.usefixtures("any_driver")
@pytest.mark.parametrize(("capability", "version"), [("89", 13020), ("90", 12020)])
def test_older_devices_and_drivers_begin_no_launch_early(
    capability: str, version: int, monkeypatch: pytest.MonkeyPatch, world: World, cache: Path
) -> None:
    calls: list[Any] = []
    cubin_file = nvrtc.cubin_file  # the code for another device would do nothing else here, and take 4 s to compile
    monkeypatch.setattr(nvrtc, "cubin_file", lambda unit, *given: cubin_file(replace(unit, arch="sm_90"), *given))
    monkeypatch.setitem(sys.modules, "cupy", cupy(calls, capability=capability, version=version))
    CudaKernels(Dtype.BF16, Cuda(world.stub.path), cache).launch(EXPAND, world.stream)
    assert calls == [("bgmv_expand", (660,), (128,), EXPAND.arguments, world.stream)]
    assert not world.stub.calls("cuLaunchKernelEx")


def test_an_error_of_a_launch_is_the_drivers_if_the_device_has_failed(
    monkeypatch: pytest.MonkeyPatch, world: World, cache: Path
) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setitem(sys.modules, "cupy", cupy([]))
    monkeypatch.setattr(Kernel, "__call__", refuse)
    kernels = CudaKernels(Dtype.BF16, Cuda(world.stub.path), cache)
    with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
        kernels.launch(cuda_launch.wait(1, 2, 3), Stream(1))
    world.stub.fail("cuMemGetInfo_v2", 700)
    with pytest.raises(DriverError, match="cuMemGetInfo_v2: other"):
        kernels.launch(cuda_launch.wait(1, 2, 3), Stream(1))


def test_every_kernel_is_loaded_before_the_first_launch(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda, cache: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy([]))
    loaded = CudaKernels(Dtype.BF16, cuda, cache)._kernels
    assert set(loaded) == {name for source in nvrtc.SOURCES for name in nvrtc.kernels(source)}


def test_a_kernel_that_spills_is_logged(
    monkeypatch: pytest.MonkeyPatch, cuda: Cuda, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy([], spills=True))
    CudaKernels(Dtype.BF16, cuda, cache)
    assert "bgmv_shrink spills registers on sm_90" in caplog.text


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pip install 'caraserve\[cuda13\]'"):
        CudaKernels(Dtype.BF16, cuda, cache)
