"""Stage `env`: reports the device, the driver and the installed packages."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from caraserve.bench.records import machine, versions
from caraserve.util.units import human_bytes
from scripts.laboratory.gpu.device_facts import DeviceFacts
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.setup import CheckSetup

_PACKAGES = (
    *("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cublas"),
    *("transformers", "peft", "pytest"),
)


@dataclass(frozen=True, slots=True)
class EnvFigures:
    """The device, the machine around it, and the installed packages' versions."""

    device: DeviceFacts
    machine: dict[str, str | int]
    versions: dict[str, str]


def env(setup: CheckSetup) -> StageResult[EnvFigures]:
    """Collects the machine's facts; computes nothing on the device."""
    facts, lines = setup.facts, Lines()
    found = versions()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    cuda = f"{facts.driver_version // 1000}.{facts.driver_version % 1000 // 10}"
    sms, memory, l2 = facts.multiprocessors, human_bytes(facts.memory_bytes), human_bytes(facts.l2_bytes)
    lines.add(facts.name, f"{sms} multiprocessors, {memory}, L2 {l2}, driver of CUDA {cuda}")
    lines.add("packages", ", ".join(f"{name} {found[name]}" for name in found if name != "caraserve"))
    words = "yes" if facts.has_stream_memory_operations else "no: kernels wait in their place"
    lines.add("streams can wait for words", words)
    locked = "no limit" if facts.lockable_bytes is None else human_bytes(facts.lockable_bytes)
    lines.add("memory that may be locked", locked)
    return StageResult(EnvFigures(facts, machine(), found), lines.all)
