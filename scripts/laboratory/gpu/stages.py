"""The stages of `scripts/gpu_check` in their order, the most valuable first; those of long loads; and the parts of
stages that are run in processes of their own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from scripts.laboratory.gpu.results import StageResult
from scripts.laboratory.gpu.setup import CheckSetup

HERE, CHECKS = "scripts.laboratory.gpu", "tests.gpu_device"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage. `description` is for --help.

    `decides`: when its results are wrong, stages with `is_timed` are not begun, because wrong kernels' speeds mean
    nothing. `is_alone`: it runs before all others where several run at once, because they use what it makes.
    """

    name: str
    budget_s: float
    description: str
    decides: bool = False
    is_timed: bool = False
    is_alone: bool = False
    module: str = ""  # that has the function of the stage's name; "": the one of that name here

    def run(self, setup: CheckSetup) -> StageResult[object]:
        """Calls the function of the stage's name. Raises whatever that raises."""
        module = import_module(self.module or f"{HERE}.{self.name}")
        function: Callable[[CheckSetup], StageResult[object]] = getattr(module, self.name)
        return function(setup)


TOTAL_S = 580.0  # for all stages, which may take their whole budgets
STAGES = (
    Stage("env", 6, "device, driver, packages"),
    Stage("build", 50, "all kernels compiled, in parallel, and loaded", is_alone=True),
    Stage(
        "correct", 68, "kernels beside fp64, a tiny model beside the CPU's", decides=True, module=f"{CHECKS}.correct"
    ),
    Stage("demo", 45, "the bundled demo served, its answers beside the CPU's"),
    Stage("limits", 15, "memory, link, matrix product, launches"),
    Stage("lora", 18, "LoRA of decode by rows and ranks"),
    Stage("model", 31, "decode and prefill of a 7B shape, the host's share", is_timed=True),
    Stage("warm", 18, "nothing is compiled after warm-up"),
    Stage("server", 100, "`caraserve bench modes` on a 7B shape", is_timed=True),
    Stage("cold", 33, "what cold requests cost themselves and others", is_timed=True),
    Stage("protocol", 32, "hand-offs to CPU workers, workers stopped and killed", module=f"{CHECKS}.protocol"),
    Stage("handover", 18, "hand-offs beside explicit synchronisation (Toppings' figure 10)", is_timed=True),
    Stage("llama3", 29, "a Llama-3-8B shape, contexts up to 32K", is_timed=True),
    Stage("sampling", 10, "top-p and top-k over 128K tokens", is_timed=True),
    Stage("quantized", 13, "products with quantised weights beside bf16's", is_timed=True),
    Stage("formats", 10, "products with weights in grouped codes, every kind", module=f"{CHECKS}.formats"),
    Stage("experts", 12, "a mixture of experts beside the memory's speed and dense products", is_timed=True),
    Stage("startup", 22, "time and memory of a start, modules loaded eagerly and lazily; its weights"),
    Stage("sanitizer", 50, "every kernel under compute-sanitizer"),
)
# Of --speed alone.
LOADS = (
    Stage("fleet", 110, "a server of an 8B shape, 32 adapters and none, 1 to 256 streams", is_timed=True),
    Stage(
        "modes",
        235,
        "`caraserve bench modes` as in server, in every loading mode",
        is_timed=True,
        module=f"{HERE}.server",
    ),
)
SPEED = {"limits": ("limits", "lora", "model"), "fleet": ("fleet",), "modes": ("modes",)}  # stages by part of --speed

# Run in processes of the stages build, startup and sanitizer.
_OF_OTHERS = {
    "compile_ahead": "",
    "start_once": f"{HERE}.startup",
    "every_kernel": f"{CHECKS}.every_kernel",
}
PARTS = tuple(Stage(name, 0.0, "a part of another stage", module=module) for name, module in _OF_OTHERS.items())


def find_stage(name: str) -> Stage:
    """Returns the stage or part of this name."""
    return next(stage for stage in (*STAGES, *LOADS, *PARTS) if stage.name == name)


def parse_stages(text: str) -> list[Stage]:
    """Returns the stages in a list such as `lora,model`. Raises ValueError for unknown names."""
    return _named(text, {stage.name: [stage] for stage in (*STAGES, *LOADS)}, "stage")


def parse_speed(text: str) -> list[Stage]:
    """Returns the stages of a list of parts such as `limits,modes`. Raises ValueError for unknown parts."""
    parts = {part: [find_stage(name) for name in names] for part, names in SPEED.items()}
    return _named(text, parts, "part of --speed")


def _named(text: str, by_name: Mapping[str, Sequence[Stage]], kind: str) -> list[Stage]:
    names = text.split(",")
    if unknown := [name for name in names if name not in by_name]:
        raise ValueError(f"{unknown[0]!r} is no {kind}; there are {', '.join(by_name)}")
    return [stage for name in names for stage in by_name[name]]
