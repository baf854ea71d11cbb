"""Stage `limits`: measures the device's copy bandwidth, its link and its matrix product, as bounds for other stages."""

from functools import partial

import torch

from caraserve.bench.gpu.accelerator import Accelerator
from caraserve.bench.gpu.results import StageResult, WrongResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.cpu.shared_memory import SharedRegion
from caraserve.model.dtype import Dtype

_SMALLEST_COPY_BYTES = 64 << 10
_STEP = 8  # ratio of successive copy sizes
_COPIES = 10
_KEY = "copy_bytes_per_s"


def copy_bytes_per_s(setup: CheckSetup, acc: Accelerator) -> float:
    """Returns the bytes that a copy on the device reads and writes per second; measures them if not yet known."""
    known = setup.known.get("limits", {}).get(_KEY)
    return float(known) if known else _copy_on_device(setup, acc)


def limits(setup: CheckSetup) -> StageResult:
    """Measures the limits. Raises WrongResult when bytes come back from the device changed."""
    acc = setup.accelerator(Dtype.BF16)
    result = StageResult()
    region = SharedRegion(2 * setup.effort.copy_bytes)
    base = acc.device.driver.register_host(region.base, region.num_bytes)
    try:
        _check_link(setup, acc, region, base)
        on_device = _copy_on_device(setup, acc)
        result.figures[_KEY] = on_device
        result.add_line("copy on the device, read and written", f"{on_device / 1e12:.2f} TB/s")
        _link(setup, acc, base, result)
    finally:
        acc.settle()
        acc.device.driver.unregister_host(region.base)
        region.close()
    flops = _gemm(setup, acc)
    result.figures["gemm_flop_per_s"] = flops
    result.add_line(f"product of {setup.effort.gemm}² matrices, bf16", f"{flops / 1e12:.0f} TFLOP/s")
    return result


def _copy_on_device(setup: CheckSetup, acc: Accelerator) -> float:
    size = 4 * setup.effort.copy_bytes
    source, target = (torch.zeros(size, dtype=torch.uint8, device=acc.place) for _ in range(2))
    driver = acc.device.driver

    def copy() -> None:
        driver.copy_on_device(target.data_ptr(), source.data_ptr(), size, acc.stream)

    return 2e6 * size / acc.median_us(copy, setup.effort.replays)


def _check_link(setup: CheckSetup, acc: Accelerator, region: SharedRegion, base: int) -> None:
    """Copies bytes to the device and back; raises WrongResult unless they are the same."""
    size, driver = setup.effort.copy_bytes, acc.device.driver
    there, back = region.bytes[:size], region.bytes[size : 2 * size]
    there[:: 1 << 10] = 0xA5
    there[-1], back[:] = 0x5A, 0
    device = torch.zeros(size, dtype=torch.uint8, device=acc.place)
    acc.settle()
    driver.copy_to_device(device.data_ptr(), base, size, acc.stream)
    driver.copy_to_host(base + size, device.data_ptr(), size, acc.stream)
    acc.settle()
    if not (there == back).all():
        raise WrongResult(f"{size} bytes went to the device and came back otherwise")


def _link(setup: CheckSetup, acc: Accelerator, base: int, result: StageResult) -> None:
    """Measures copies of all sizes to the device and to the host, and the largest size both ways at once."""
    effort, driver = setup.effort, acc.device.driver
    room = torch.zeros(2 * effort.copy_bytes, dtype=torch.uint8, device=acc.place)
    device = room.data_ptr()
    there, back = {}, {}
    for size in _sizes(effort.copy_bytes):
        to_device = partial(driver.copy_to_device, device, base, size, acc.stream)
        to_host = partial(driver.copy_to_host, base, device, size, acc.stream)
        there[size] = 1e6 * size / acc.median_us(to_device, effort.replays)
        back[size] = 1e6 * size / acc.median_us(to_host, effort.replays)
    both = _both_ways(setup, acc, base, device)
    result.figures |= {"to_device_bytes_per_s": there, "to_host_bytes_per_s": back, "both_ways_bytes_per_s": both}
    for what, speeds in (("host to device", there), ("device to host", back)):
        result.add_line(what, f"{max(speeds.values()) / 1e9:.1f} GB/s")
    result.add_line("both at once", f"{both / 1e9:.1f} GB/s")


def _sizes(most: int) -> list[int]:
    sizes = [most]
    while sizes[-1] // _STEP >= _SMALLEST_COPY_BYTES:
        sizes.append(sizes[-1] // _STEP)
    return sizes


def _both_ways(setup: CheckSetup, acc: Accelerator, base: int, device: int) -> float:
    """Returns the bytes per second of both directions together, with concurrent copies on two streams."""
    size, driver = setup.effort.copy_bytes, acc.device.driver
    other, begun, ended = driver.create_stream(0), driver.create_event(), driver.create_event()
    start = acc.stopwatch.mark(acc.stream)
    driver.record(begun, acc.stream)
    driver.wait_event(other, begun)
    for _ in range(_COPIES):
        driver.copy_to_device(device, base, size, acc.stream)
        driver.copy_to_host(base + size, device + size, size, other)
    driver.record(ended, other)
    driver.wait_event(acc.stream, ended)
    end = acc.stopwatch.mark(acc.stream)
    acc.settle()
    return 2e6 * _COPIES * size / acc.stopwatch.between_us(start, end)


def _gemm(setup: CheckSetup, acc: Accelerator) -> float:
    size, generator = setup.effort.gemm, acc.generator(0)
    a, b = (acc.random(generator, size, size) for _ in range(2))  # a product of zeros would run faster
    c = torch.empty_like(a)

    def multiply() -> None:
        torch.mm(a, b, out=c)

    return 2e6 * size**3 / acc.median_us(lambda: acc.run(multiply), _COPIES)
