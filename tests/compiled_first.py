"""Compiles what many tests need, a minute of work in all, before the first one: without this, both processes of xdist
and every server that a test starts would compile the same, at the same time."""

import fcntl
import importlib.util
import math
from collections.abc import Callable


def compile_all(process: int) -> None:
    """Compiles everything, or finds it in the cache. Processes begin with different parts; whichever comes second to
    one waits for it."""
    first = process % len(PARTS)
    for part in (*PARTS[first:], *PARTS[:first]):
        module, compile_part = part
        spec = importlib.util.find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            compile_part()


def _compile_kernels() -> None:
    """Compiles the CPU backend's kernels with those of merging, those of its workers, and what measures their speed."""
    from caraserve import demo
    from caraserve.bench.lora.kernels import QKV, adapter_of, one_layer_plan
    from caraserve.cpu.backend import CpuBackend, CpuSizes
    from caraserve.cpu.lora_workers.worker import compile_worker
    from caraserve.cpu.weights import dummy_reader, load_model
    from caraserve.model.dtype import Dtype
    from caraserve.model.families import load_plan
    from caraserve.profiling.cpu_lora_rate import LayerLora

    plan = load_plan(demo.model_folder())
    loaded = load_model(plan, Dtype.F32, 16, dummy_reader(0, Dtype.F32), lambda: None)
    sizes = CpuSizes(
        threads=1,
        num_slots=1,
        adapter_slots=2,
        max_step_tokens=16,
        max_context=16,
        kv_cache_bytes=1 << 20,
        host_bytes=1 << 20,
    )
    backend = CpuBackend(plan, loaded, sizes)
    try:
        backend.warm_up(merging=True)
    finally:
        backend.close()
    compile_worker()
    one_layer = one_layer_plan(64)
    LayerLora(one_layer, adapter_of(one_layer, Dtype.F16, 8), QKV, 1).layer_ms(1)


def _compile_simulator() -> None:
    """Compiles the simulator, and what its tests compile of it."""
    from caraserve.bench.records import PlannedRequest, Workload
    from caraserve.bench.simulator.setting import ClusterSetting, paper_machine
    from caraserve.bench.simulator.simulation import Simulation
    from tests.bench.simulator.compiled_steps import compile_steps

    requests = tuple(PlannedRequest(number, 0.1 * number, number, 10, 5) for number in range(2))
    setting = ClusterSetting(2 * (paper_machine("padded"),), "auto", math.inf)
    simulation = Simulation(setting, Workload(requests, (8, 16)))
    simulation.run()
    compile_steps(simulation.fleet, simulation._rng)


def _import_oracle() -> None:
    """Imports transformers and torch: Python translates 2,000 of their modules, as pip has not."""
    import peft  # noqa: F401


PARTS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("caraserve.cpu", _compile_kernels),
    ("caraserve.bench.simulator", _compile_simulator),
    ("peft", _import_oracle),
)
