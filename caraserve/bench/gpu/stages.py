"""The stages of `scripts/gpu_check` in their order, the most valuable first, and the parts of stages that are run in
processes of their own."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from caraserve.bench.gpu.results import StageResult
from caraserve.bench.gpu.setup import CheckSetup

CHECKS = "tests.gpu_device"  # checks of results are among the tests: they need a checkout of the repository


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. `description` is for --help.

    `decides`: when its results are wrong, stages with `is_timed` are not begun, because wrong kernels' speeds mean
    nothing.
    """

    name: str
    budget_s: float
    description: str
    decides: bool = False
    is_timed: bool = False
    package: str = "caraserve.bench.gpu"

    def run(self, setup: CheckSetup) -> StageResult[object]:
        """Calls the function of the stage's name in the module of that name. Raises whatever that raises."""
        module = import_module(f"{self.package}.{self.name}")
        function: Callable[[CheckSetup], StageResult[object]] = getattr(module, self.name)
        return function(setup)


TOTAL_S = 580.0  # for all stages, which may take their whole budgets
STAGES = (
    Stage("env", 12, "device, driver, packages"),
    Stage("build", 50, "all kernels compiled, in parallel, and loaded"),
    Stage("correct", 75, "kernels beside fp64, a tiny model beside the CPU's", decides=True, package=CHECKS),
    Stage("limits", 18, "copies, link, matrix product, launches"),
    Stage("lora", 28, "LoRA of decode by rows and ranks"),
    Stage("model", 45, "decode and prefill of a 7B shape, the host's share", is_timed=True),
    Stage("warm", 25, "nothing is compiled after warm-up"),
    Stage("server", 90, "`caraserve bench modes` on a 7B shape", is_timed=True),
    Stage("cold", 40, "what cold requests cost themselves and others", is_timed=True),
    Stage("protocol", 35, "hand-offs to CPU workers, workers stopped and killed", package=CHECKS),
    Stage("handover", 25, "hand-offs beside explicit synchronisation (Toppings' figure 10)", is_timed=True),
    Stage("llama3", 40, "a Llama-3-8B shape, contexts up to 32K", is_timed=True),
    Stage("sampling", 12, "top-p and top-k over 128K tokens", is_timed=True),
    Stage("quantized", 20, "products with quantised weights beside bf16's", is_timed=True),
    Stage("startup", 24, "time and memory of a start, modules loaded eagerly and lazily; its weights"),
    Stage("sanitizer", 40, "every kernel under compute-sanitizer"),
)

# Run in processes of the stages build, startup, sanitizer and correct.
_OF_OTHERS = {
    "compile_ahead": "caraserve.bench.gpu",
    "start_once": "caraserve.bench.gpu",
    "every_kernel": CHECKS,
    "correct_flashinfer": CHECKS,
}
PARTS = tuple(Stage(name, 0.0, "a part of another stage", package=package) for name, package in _OF_OTHERS.items())


def find_stage(name: str) -> Stage:
    """Returns the stage or part of this name."""
    return next(stage for stage in (*STAGES, *PARTS) if stage.name == name)


def parse_stages(text: str) -> list[Stage]:
    """Returns the stages in a list such as `lora,model`. Raises ValueError for unknown names."""
    by_name = {stage.name: stage for stage in STAGES}
    if unknown := [name for name in text.split(",") if name not in by_name]:
        raise ValueError(f"{unknown[0]!r} is no stage; there are {', '.join(by_name)}")
    return [by_name[name] for name in text.split(",")]
