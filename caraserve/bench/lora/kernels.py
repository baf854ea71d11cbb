"""Measures the CPU LoRA kernels on one core, and torch and NumPy on the same core.

One process, pinned to one core, measures one point after another; within a point, the implementations alternate. The
adapter has so many layers that weights are read from memory, as they are when a batch uses several adapters.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from caraserve.bench.synthetic import MODULES, Shape, shape_plan
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import adapter_spec, random_adapter

QKV = MODULES[:3]
_HEAD_DIM = 128


def one_layer_plan(hidden: int, layers: int = 1) -> DecoderPlan:
    """Returns a model with full-size attention projections and a minimal MLP and vocabulary: LoRA needs no more."""
    heads = max(1, hidden // _HEAD_DIM)
    return shape_plan(Shape(hidden, layers, 64, 64, heads, heads), 1024)


def adapter_of(plan: DecoderPlan, dtype: Dtype, rank: int) -> HostAdapter:
    """Returns an adapter for q, k and v in every layer, as in the papers, with random weights in new memory."""
    spec = adapter_spec(plan, dtype, rank, len(plan.layers), QKV)
    return random_adapter(plan, spec, aligned_bytes(spec.num_bytes))


_WEIGHTS_BYTES = 64 << 20  # of all layers of one point: more than any L2 cache, and than a core's share of L3
_SAMPLE_S = 0.03
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """Speeds of the LoRA of q, k and v in one layer for one prompt, in GFLOP/s."""

    dtype: str
    rank: int
    tokens: int
    peak: float  # fp32 multiply-adds of the core, measured between the runs of this point
    ours: float
    torch: float  # all in `dtype`
    numpy: float | None  # fp32 only: NumPy has no fast matrix product in other dtypes

    @property
    def share_of_peak(self) -> float:
        return self.ours / self.peak


@dataclass(frozen=True, slots=True)
class GpuPoint:
    """The LoRA of q, k and v of decode in one layer on a GPU, with a different adapter in every row."""

    rows: int
    ranks: tuple[int, ...]  # row i has rank ranks[i % len(ranks)]
    us: float
    mbytes: float  # of adapter weights
    share_of_floor: float  # the time in which the memory can be read ÷ measured time
    torch_us: float | None  # torch.bmm over stacked weights; None for mixed ranks

    @property
    def name(self) -> str:
        return f"n {self.rows}, rank {'+'.join(map(str, self.ranks))}"


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A point to measure: sizes and dtype."""

    hidden: int
    dtype: Dtype
    rank: int
    tokens: int

    @property
    def gflop(self) -> float:
        """Gigaflop of one layer: x Aᵀ and (x Aᵀ) B for three modules."""
        return 2e-9 * self.tokens * self.rank * 2 * self.hidden * len(QKV)


def measure(case: KernelCase) -> KernelPoint:
    """Measures one point. Call it in a separate process that is pinned to one core (process.py)."""
    from caraserve.cpu.peak import peak_flops  # here, because this import compiles kernels

    layers = max(1, _WEIGHTS_BYTES // (2 * case.hidden * case.rank * len(QKV) * case.dtype.itemsize))
    contestants: dict[str, Callable[[], float]] = {"ours": _ours(case, layers)}
    contestants["torch"] = partial(_mean_s, torch_layers(case, layers, threads=1), layers)
    if case.dtype is Dtype.F32:
        contestants["numpy"] = partial(_mean_s, _numpy_layers(case, layers), layers)
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    peaks = []
    for layer_s in contestants.values():
        layer_s()
    for _ in range(_ROUNDS):
        peaks.append(peak_flops() / 1e9)
        for name, layer_s in contestants.items():
            speeds[name].append(case.gflop / layer_s())
    middle = {name: median(each) for name, each in speeds.items()}
    return KernelPoint(
        dtype=case.dtype.name.lower(),
        rank=case.rank,
        tokens=case.tokens,
        peak=median(peaks),
        ours=middle["ours"],
        torch=middle["torch"],
        numpy=middle.get("numpy"),
    )


def _ours(case: KernelCase, layers: int) -> Callable[[], float]:
    from caraserve.profiling.cpu_lora_rate import LayerLora

    plan = one_layer_plan(case.hidden, layers)
    lora = LayerLora(plan, adapter_of(plan, case.dtype, case.rank), QKV, case.tokens)

    def layer_s() -> float:
        once_s = lora.layer_ms(1) * layers / 1000
        return lora.layer_ms(max(1, round(_SAMPLE_S / once_s))) / 1000

    return layer_s


def torch_layers(case: KernelCase, layers: int, threads: int) -> Callable[[int], None]:
    """Returns a function that computes one layer with torch: x by the stacked A of q, k and v, then by each B."""
    import torch

    torch.set_num_threads(threads)
    dtype = {Dtype.F32: torch.float32, Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16}[case.dtype]
    x = torch.rand(case.tokens, case.hidden).to(dtype)
    a = [torch.rand(len(QKV) * case.rank, case.hidden).to(dtype).T for _ in range(layers)]  # [hidden, 3 rank]
    b = [torch.rand(len(QKV), case.rank, case.hidden).to(dtype) for _ in range(layers)]
    parts = [slice(site * case.rank, (site + 1) * case.rank) for site in range(len(QKV))]
    out = torch.empty(len(QKV), case.tokens, case.hidden, dtype=dtype)
    shrunk = torch.empty(case.tokens, len(QKV) * case.rank, dtype=dtype)

    def compute(layer: int) -> None:
        torch.mm(x, a[layer], out=shrunk)
        for site, part in enumerate(parts):
            torch.mm(shrunk[:, part], b[layer][site], out=out[site])

    return compute


def _numpy_layers(case: KernelCase, layers: int) -> Callable[[int], None]:
    rng = np.random.default_rng(0)
    x = rng.random((case.tokens, case.hidden), np.float32)
    a = [rng.random((len(QKV) * case.rank, case.hidden), np.float32).T for _ in range(layers)]
    b = [rng.random((len(QKV), case.rank, case.hidden), np.float32) for _ in range(layers)]
    out = np.empty((len(QKV), case.tokens, case.hidden), np.float32)

    def compute(layer: int) -> None:
        shrunk = x @ a[layer]
        for site in range(len(QKV)):
            np.matmul(shrunk[:, site * case.rank : (site + 1) * case.rank], b[layer][site], out=out[site])

    return compute


def _mean_s(compute: Callable[[int], Any], layers: int) -> float:
    """Returns the mean time of a layer, over as many layers as fit into a sample of 30 ms, and at least one."""
    count, started_s = 0, time.perf_counter()
    while True:
        compute(count % layers)
        count += 1
        spent_s = time.perf_counter() - started_s
        if spent_s > _SAMPLE_S:
            return spent_s / count
