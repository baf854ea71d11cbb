"""Stage `env`: what the machine is and has, and what is missing."""

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

from caraserve.bench.gpu.outcome import Outcome
from caraserve.bench.gpu.rig import Rig
from caraserve.bench.machine import machine, versions
from caraserve.util.units import human_bytes

_PACKAGES = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "nvidia-cublas", "transformers", "peft", "pytest")


def env(rig: Rig) -> Outcome:
    """Nothing is computed."""
    facts, outcome = rig.facts, Outcome()
    found = versions()
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    outcome.figures = {"device": asdict(facts), "machine": machine(), "versions": found}
    cuda = f"{facts.driver_version // 1000}.{facts.driver_version % 1000 // 10}"
    sms, memory, l2 = facts.multiprocessors, human_bytes(facts.memory_bytes), human_bytes(facts.l2_bytes)
    outcome.say(facts.name, f"{sms} multiprocessors, {memory}, L2 {l2}, driver of CUDA {cuda}")
    outcome.say("packages", ", ".join(f"{name} {found[name]}" for name in found if name != "caraserve"))
    words = "yes" if facts.has_stream_memory_operations else "no: kernels wait in their place"
    outcome.say("streams can wait for words", words)
    locked = "no limit" if facts.lockable_bytes is None else human_bytes(facts.lockable_bytes)
    outcome.say("memory that may be locked", locked)
    return outcome
