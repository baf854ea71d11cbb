"""Calls of CuPy, with a stand-in for it: the real one needs a driver."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from caraserve.errors import ConfigError
from caraserve.gpu.driver import nvrtc
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.modules import CudaKernels
from caraserve.gpu.kernels import cuda_launch
from caraserve.model.dtype import Dtype
from tests.gpu import cubin


class Kernel:
    def __init__(self, name: str, calls: list[Any], spills: bool) -> None:
        self.name, self.calls, self.local_size_bytes, self.num_regs = name, calls, 8 * spills, 90

    def __call__(self, grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...], *, stream: Any) -> None:
        self.calls.append((self.name, grid, block, arguments, stream.ptr))


def cupy(calls: list[Any], *, spills: bool = False) -> SimpleNamespace:
    """Returns a stand-in for CuPy on an H200 with a driver of CUDA 13."""

    def raw_module(path: str) -> SimpleNamespace:
        names = set(cubin.kernels(Path(path).read_bytes()))
        return SimpleNamespace(get_function=lambda name: Kernel(name, calls, spills) if name in names else None)

    device = SimpleNamespace(compute_capability="90", attributes={"MultiProcessorCount": 132})
    runtime = SimpleNamespace(driverGetVersion=lambda: 13020)
    return SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device, runtime=runtime), RawModule=raw_module)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


def test_a_launch_runs_its_kernel_on_the_given_stream(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "cupy", cupy(calls))
    kernels = CudaKernels(Dtype.BF16, cache)
    launch = cuda_launch.wait(1, 2, 3)
    kernels.launch(launch, Stream(0xBEEF))
    assert calls == [("handoff_wait", (1,), (32,), launch.arguments, 0xBEEF)]
    assert kernels.bgmv_grid == 5 * 132
    names = sorted(path.name.rsplit("-", 1)[0] for path in cache.iterdir())
    assert names == ["bgmv-bf16-sm_90", "handoff-bf16-sm_90", "sampling-bf16-sm_90", "words-f32-sm_90"]


def test_every_kernel_is_loaded_before_the_first_launch(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy([]))
    loaded = CudaKernels(Dtype.BF16, cache)._kernels
    assert set(loaded) == {name for source in nvrtc.SOURCES for name in nvrtc.kernels(source)}


def test_a_kernel_that_spills_is_logged(
    monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy([], spills=True))
    CudaKernels(Dtype.BF16, cache)
    assert "bgmv_shrink spills registers on sm_90" in caplog.text


def test_without_cupy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pip install 'caraserve\[cuda13\]'"):
        CudaKernels(Dtype.BF16, cache)
