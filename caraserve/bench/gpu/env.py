"""Stage `env`: reports the device, the driver and the installed packages."""

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.setup import CheckSetup
from caraserve.bench.records import machine, versions
from caraserve.util.units import human_bytes

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cublas", "transformers", "peft", "pytest")


def env(setup: CheckSetup) -> StageResult:
    """Collects the machine's facts; computes nothing on the device."""
    facts, result = setup.facts, StageResult()
    found = versions()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    result.figures = {"device": asdict(facts), "machine": machine(), "versions": found}
    cuda = f"{facts.driver_version // 1000}.{facts.driver_version % 1000 // 10}"
    sms, memory, l2 = facts.multiprocessors, human_bytes(facts.memory_bytes), human_bytes(facts.l2_bytes)
    result.add_line(facts.name, f"{sms} multiprocessors, {memory}, L2 {l2}, driver of CUDA {cuda}")
    result.add_line("packages", ", ".join(f"{name} {found[name]}" for name in found if name != "caraserve"))
    words = "yes" if facts.has_stream_memory_operations else "no: kernels wait in their place"
    result.add_line("streams can wait for words", words)
    locked = "no limit" if facts.lockable_bytes is None else human_bytes(facts.lockable_bytes)
    result.add_line("memory that may be locked", locked)
    return result
