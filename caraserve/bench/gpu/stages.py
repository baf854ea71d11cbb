"""The stages of `scripts/gpu_check` in their order, with their time limits."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.setup import CheckSetup


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. If `is_required`, no later stage runs after it has failed. `description` is for --help."""

    name: str
    budget_s: float
    description: str
    is_required: bool = False
    package: str = "caraserve.bench.gpu"

    def run(self, setup: CheckSetup) -> StageResult:
        """Calls the function of the stage's name in the module of that name. Raises whatever that raises."""
        function: Callable[[CheckSetup], StageResult] = getattr(import_module(f"{self.package}.{self.name}"), self.name)
        return function(setup)


CHECKS = "tests.gpu_device"  # checks of results are among the tests: they need a checkout of the repository
STAGES = (
    Stage("env", 15, "device, driver, packages"),
    Stage("build", 50, "all kernels compiled and loaded", is_required=True),
    Stage("correct", 130, "kernels beside fp64, a tiny model beside the CPU's", is_required=True, package=CHECKS),
    Stage("protocol", 45, "hand-offs to CPU workers, workers stopped and killed", is_required=True, package=CHECKS),
    Stage("limits", 25, "copies, link, matrix product"),
    Stage("lora", 45, "LoRA of decode by rows and ranks"),
    Stage("model", 70, "decode and prefill of a 7B shape"),
    Stage("cold", 60, "what cold requests cost themselves and others"),
    Stage("server", 130, "`caraserve bench modes` on a 7B shape"),
)
