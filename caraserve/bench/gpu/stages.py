"""The stages, in their order, and how long each may take."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from caraserve.bench.gpu.outcome import Outcome
from caraserve.bench.gpu.rig import Rig


@dataclass(frozen=True, slots=True)
class Stage:
    """`decides`: what comes after is not begun when this one finds a wrong result. `says`: for --help."""

    name: str
    budget_s: float
    says: str
    decides: bool = False

    def run(self, rig: Rig) -> Outcome:
        """Raises what goes wrong."""
        function: Callable[[Rig], Outcome] = getattr(import_module(f"caraserve.bench.gpu.{self.name}"), self.name)
        return function(rig)


STAGES = (
    Stage("env", 15, "device, driver, packages"),
    Stage("build", 50, "all kernels compiled and loaded", decides=True),
    Stage("correct", 130, "kernels beside fp64, a tiny model beside the CPU's", decides=True),
    Stage("protocol", 45, "hand-offs to CPU workers, workers stopped and killed", decides=True),
    Stage("limits", 25, "copies, link, matrix product"),
    Stage("lora", 45, "LoRA of decode by rows and ranks"),
    Stage("model", 70, "decode and prefill of a 7B shape"),
    Stage("cold", 60, "what cold requests cost themselves and others"),
    Stage("server", 130, "`caraserve bench modes` on a 7B shape"),
)
