"""Host memory that CudaDriver registers in chunks, over the stub driver library: no copy spans two chunks."""

import numpy as np
import pytest

from caraserve.gpu.driver import cuda_driver
from caraserve.gpu.driver.api import DriverError
from caraserve.gpu.driver.cuda_driver import CudaDriver
from caraserve.gpu.driver.libcuda import Cuda
from tests.gpu.stub_driver import DriverCase, Recorder, Stub, Torch

GIB = 1 << 30
PORTABLE_DEVICEMAP = 3


# --- registered memory; these tests use addresses only ---

FAR = (1 << 45) + 12288  # a multiple of 4 KiB but not of 2 MiB


def test_large_host_memory_is_registered_in_chunks_at_contiguous_device_addresses(case: DriverCase) -> None:
    address = case.driver.register_host(FAR, 20 * GIB)
    chunks = case.stub.calls("cuMemHostRegister_v2")[1:]
    assert sum(size for size, _ in chunks) == 20 * GIB
    assert all(size <= 8 * GIB and flags == PORTABLE_DEVICEMAP for size, flags in chunks)
    assert len(chunks) == 3
    assert (FAR + chunks[0][0]) % (2 << 20) == 0  # chunks meet at huge page boundaries
    assert address == case.driver.register_host(FAR + 20 * GIB, 4096) - 20 * GIB
    case.driver.unregister_host(FAR)
    assert len(case.stub.calls("cuMemHostUnregister")) == 3


@pytest.mark.parametrize("gap", [1 << 21, -4096])
def test_host_memory_that_the_driver_maps_non_contiguously_is_rejected(stub: Stub, gap: int) -> None:
    driver = CudaDriver(Cuda(stub.path), Recorder(), torch=Torch())
    stub.set_gap(gap)
    with pytest.raises(DriverError, match="addresses far apart"):
        driver.register_host(FAR, 9 * GIB)
    assert len(stub.calls("cuMemHostUnregister")) == 2


def test_no_chunk_stays_registered_when_the_driver_rejects_one(case: DriverCase) -> None:
    case.stub.fail("cuMemHostRegister_v2", 2)
    with pytest.raises(DriverError, match="cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        case.driver.register_host(FAR, 9 * GIB)
    assert case.stub.calls("cuMemHostUnregister") == []
    case.driver.register_host(FAR, 9 * GIB)


# --- copies ---


@pytest.fixture
def chopped(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> DriverCase:
    """Registers host memory in chunks of 64 bytes; the first may be smaller."""
    monkeypatch.setattr(cuda_driver, "_CHUNK_BYTES", 64)
    monkeypatch.setattr(cuda_driver, "_HUGE_PAGE_BYTES", 16)
    return DriverCase(stub)


def test_no_copy_spans_two_registered_chunks(chopped: DriverCase) -> None:
    """The stub library rejects copies that do."""
    driver, at = chopped.driver, chopped.device
    first = chopped.stub.calls("cuMemHostRegister_v2")[0][0]
    for start, size in ((first - 8, 100), (first, 64), (first - 1, 2), (5, 1000), (first + 64, 3)):
        driver.copy_to_device(at, chopped.host + start, size, chopped.stream)
        assert (chopped.on_device()[:size] == chopped.bytes[start : start + size]).all()
    before = chopped.bytes.copy()
    driver.copy_to_host(chopped.host + first + 60, at, 200, chopped.stream)
    assert (chopped.bytes[first + 60 :][:200] == chopped.on_device()[:200]).all()
    assert (
        np.delete(chopped.bytes, slice(first + 60, first + 260)) == np.delete(before, slice(first + 60, first + 260))
    ).all()


def test_no_copy_spans_memory_that_two_calls_have_registered(case: DriverCase) -> None:
    """The stub library rejects copies that do."""
    both = np.random.default_rng(1).integers(1, 255, 64, np.uint8)
    host = case.driver.register_host(both.ctypes.data, 40)
    assert case.driver.register_host(both.ctypes.data + 40, 24) == host + 40
    case.driver.copy_to_device(case.device, host, 64, case.stream)
    assert (case.on_device()[:64] == both).all()
    assert case.stub.calls("cuMemcpyAsync")[:2] == [(40,), (24,)]


@pytest.mark.parametrize(("pitch", "width"), [(40, 40), (48, 30), (16, 16), (200, 150)])
def test_no_row_copy_spans_two_registered_chunks(chopped: DriverCase, pitch: int, width: int) -> None:
    """A chunk may end within a row or between two rows, and a row may span several chunks."""
    chopped.driver.fill(chopped.device, 4096, chopped.stream)
    chopped.driver.copy_rows_to_device(chopped.device + 8, 250, chopped.host + 3, pitch, width, 9, chopped.stream)
    expected = np.zeros(4096, np.uint8)
    for row in range(9):
        expected[8 + 250 * row :][:width] = chopped.bytes[3 + pitch * row :][:width]
    assert (chopped.on_device() == expected).all()


def test_memory_registered_again_as_one_chunk_is_copied_at_once(
    chopped: DriverCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    chopped.driver.unregister_host(chopped.bytes.ctypes.data)
    monkeypatch.setattr(cuda_driver, "_CHUNK_BYTES", 8192)
    host = chopped.driver.register_host(chopped.bytes.ctypes.data, chopped.bytes.nbytes)
    chopped.driver.copy_to_device(chopped.device, host, 4000, chopped.stream)
    assert chopped.stub.calls("cuMemcpyAsync") == [(4000,)]
