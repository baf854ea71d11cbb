"""Figures of LoRA kernels: iterations by the ranks in a batch, CPU LoRA by itself, and hand-overs to it."""

import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from caraserve.bench.lora.handoff import HandoffBench, RoundTripPoint, beside_threads, timed_transports
from caraserve.bench.lora.kernels import QKV, KernelCase, measure
from caraserve.bench.lora.process import pinned_process
from caraserve.bench.report.plots import Panel, Series
from caraserve.bench.synthetic import SHAPES, Shape, shape_plan
from caraserve.core.machine_profile import LineFit
from caraserve.cpu.backend import CpuBackend, CpuSizes
from caraserve.cpu.weights import dummy_reader, load_model
from caraserve.errors import BackendFailed, ConfigError
from caraserve.gpu.driver.detect import look
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import MeasuredBackend, Measurement, SyntheticRequests, adapter_spec, random_adapter
from scripts.laboratory.papers.figures import FigureData, PaperOptions, Value

if TYPE_CHECKING:
    from scripts.laboratory.gpu.handover import HandOverFigures

Ranks = tuple[int, ...]  # of the requests of one batch, with an adapter each
TimesMs = Mapping[Ranks, float]

_KERNELS = {"padded": True, "unpadded": False}
_RANKS, _BATCHES = (8, 16, 32, 64), (4, 8, 16, 32)
_FIT_BATCHES, _FIT_MIXES = (4, 8, 12, 16, 20, 24, 28, 32), 4
_ROUNDS, _BURST = 5, 3
_CONTEXT_TOKENS, _CONTEXTS, _MAX_CONTEXT = 128, 8, 256
_LINE_POINTS = 50
_PROMPT_TOKENS, _PROMPT_RANKS, _PROMPT_ROUNDS = 128, (8, 16, 32, 64, 128), 15
_ADAPTERS = "Each request has an adapter of its own on q, k and v, in fp16."
_SETTING = (
    "A model of 100 million parameters in fp32 decodes one token for each request of a batch, on both cores; contexts "
    f"have {_CONTEXT_TOKENS} tokens.",
    _ADAPTERS,
    f"Each time is the least of {_ROUNDS} rounds of {_BURST} iterations, kernels in turn: other work only adds to it.",
)


def decode_by_rank(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Times batches of one rank and of mixed ranks with both kernels."""
    mixes = {size: _mixes(size) for size in _BATCHES}
    batches = [ranks for each in mixes.values() for ranks in each.values()]
    times = batch_times(SHAPES["100M"], batches, _ROUNDS)
    values, panels = [], []
    for kernel, times_ms in times.items():
        values += rank_values(kernel, times_ms)
        series = (
            Series(f"batch {size}", tuple(times_ms[ranks] for ranks in each.values())) for size, each in mixes.items()
        )
        panels.append(Panel(f"{kernel} kernel", "decode latency, ms", tuple(series), "ranks", tuple(mixes[4])))
    return FigureData("measured", _SETTING, tuple(values), tuple(panels))


def rank_values(kernel: str, times_ms: TimesMs) -> list[Value]:
    """Compares batches of the largest size: the slowest with the fastest, and one of rank 64 among rank 8 with rank 8
    alone."""
    size = max(map(len, times_ms))
    same = {ranks: ms for ranks, ms in times_ms.items() if len(ranks) == size}
    mixes = _mixes(size)
    return [
        Value(f"{kernel}: slowest ÷ fastest batch of equal size", max(same.values()) / min(same.values())),
        Value(f"{kernel}: one of rank 64 among rank 8 ÷ rank 8 alone", same[mixes["8, one 64"]] / same[mixes["8"]]),
    ]


def decode_fits(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Fits lines to the latencies of random batches: over requests · largest rank with padding, over Σ rank without."""
    rng = random.Random(options.seed)
    batches = list(dict.fromkeys(_random_ranks(rng, size) for size, _ in product(_FIT_BATCHES, range(_FIT_MIXES))))
    times = batch_times(SHAPES["100M"], batches, _ROUNDS)
    return fitted_lines(times, (*_SETTING, f"{len(batches)} batches of 4 to 32 requests, ranks drawn from {_RANKS}."))


def fitted_lines(times: Mapping[str, TimesMs], setting: Sequence[str]) -> FigureData:
    """Returns the R² of each kernel's line, with the points and the line to draw."""
    values, panels = [], []
    for kernel, times_ms in times.items():
        x = [float(len(ranks) * max(ranks) if _KERNELS[kernel] else sum(ranks)) for ranks in times_ms]
        fit = LineFit.fitted(x, list(times_ms.values()))
        values.append(Value(f"{kernel}: R²", fit.r2, ""))
        values.append(Value(f"{kernel}: time at a work of 1024 ÷ at none", 1 + 1024 * fit.alpha_ms / fit.beta_ms))
        line_x = tuple(float(at) for at in np.linspace(0.0, max(x), _LINE_POINTS))
        line = Series("fit", tuple(fit.alpha_ms * at + fit.beta_ms for at in line_x), line_x)
        label = "requests · largest rank" if _KERNELS[kernel] else "sum of ranks"
        points = Series("measured", tuple(times_ms.values()), tuple(x))
        panels.append(Panel(f"{kernel} kernel", "decode latency, ms", (points, line), label, points=True))
    return FigureData("measured", tuple(setting), tuple(values), tuple(panels))


def prefill_by_mix(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Times iterations over two prompts, one of rank 8 and one of each rank, with both kernels."""
    batches = [(_RANKS[0], rank) for rank in _PROMPT_RANKS] + [(rank, rank) for rank in _PROMPT_RANKS[1:]]
    times = batch_times(SHAPES["100M"], batches, _PROMPT_ROUNDS, prompt_tokens=_PROMPT_TOKENS)
    setting = (
        f"A model of 100 million parameters in fp32 prefills two prompts of {_PROMPT_TOKENS} tokens in one iteration, "
        "on both cores.",
        _ADAPTERS,
        f"Each time is the least of {_PROMPT_ROUNDS}, kernels in turn.",
    )
    return mixed_prefills(times, setting)


def mixed_prefills(times: Mapping[str, TimesMs], setting: Sequence[str]) -> FigureData:
    """Returns what a prompt of each rank costs beside one of rank 8, and how well a line over both kernels' work,
    fitted to prompts of equal rank, predicts it."""
    low, high = _PROMPT_RANKS[0], _PROMPT_RANKS[-1]
    values, panels = [], []
    for kernel, times_ms in times.items():
        values.append(Value(f"{kernel}: ranks {low} and {high} ÷ {low} and {low}", _ratio(times_ms, (low, high))))
        values.append(Value(f"{kernel}: ranks {high} and {high} ÷ {low} and {low}", _ratio(times_ms, (high, high))))
        equal = {ranks: ms for ranks, ms in times_ms.items() if len(set(ranks)) == 1}
        fit = LineFit.fitted([float(sum(ranks)) for ranks in equal], list(equal.values()))
        works = {(low, rank): 2 * rank if _KERNELS[kernel] else low + rank for rank in _PROMPT_RANKS}
        predicted = {ranks: fit.alpha_ms * work + fit.beta_ms for ranks, work in works.items()}
        error = max(abs(ms / times_ms[ranks] - 1) for ranks, ms in predicted.items())
        values.append(Value(f"{kernel}: largest error of the model", 100 * error, "%"))
        lines = (
            Series("measured", tuple(times_ms[ranks] for ranks in works), _PROMPT_RANKS),
            Series("model", tuple(predicted.values()), _PROMPT_RANKS),
        )
        panels.append(Panel(f"{kernel} kernel", f"prefill beside rank {low}, ms", lines, "rank of the other prompt"))
    return FigureData("measured", tuple(setting), tuple(values), tuple(panels))


def _ratio(times_ms: TimesMs, ranks: Ranks) -> float:
    low = _PROMPT_RANKS[0]
    return times_ms[ranks] / times_ms[low, low]


def batch_times(
    shape: Shape, batches: Sequence[Ranks], rounds: int, *, prompt_tokens: int | None = None
) -> dict[str, TimesMs]:
    """Returns the least time of one iteration of each batch, in ms, by kernel: over whole prompts of `prompt_tokens`,
    or over one decoding token of each request. Kernels alternate, and every other round runs backwards."""
    with ExitStack() as stack:
        points = {
            (kernel, ranks): point
            for kernel, padded in _KERNELS.items()
            for ranks, point in _measurements(stack, shape, batches, prompt_tokens, padded=padded).items()
        }
        order = [(kernel, ranks) for ranks in batches for kernel in _KERNELS]
        for turn in range(rounds):
            for key in order if turn % 2 == 0 else reversed(order):
                points[key].times_ms.extend(points[key].sample())
    return {kernel: {ranks: min(points[kernel, ranks].times_ms) for ranks in batches} for kernel in _KERNELS}


def _measurements(
    stack: ExitStack, shape: Shape, batches: Sequence[Ranks], prompt_tokens: int | None, *, padded: bool
) -> dict[Ranks, Measurement]:
    """Starts a backend with as many adapters of each rank as a batch has, until `stack` ends. Returns the measurement
    of each batch."""
    plan = shape_plan(shape, _MAX_CONTEXT)
    most, ranks_used = max(map(len, batches)), sorted({rank for ranks in batches for rank in ranks})
    specs = {rank: adapter_spec(plan, Dtype.F16, rank, len(plan.layers), QKV) for rank in ranks_used}
    slots, end = {}, 1
    for rank in ranks_used:
        slots[rank] = range(end, end + max(ranks.count(rank) for ranks in batches))
        end = slots[rank].stop
    sizes = CpuSizes(
        threads=len(os.sched_getaffinity(0)),
        num_slots=most,
        adapter_slots=end,
        max_step_tokens=_MAX_CONTEXT,
        max_context=_MAX_CONTEXT,
        kv_cache_bytes=plan.kv_bytes_per_token(4) * _MAX_CONTEXT * most,
        host_bytes=max(each.num_bytes for each in specs.values()),
        padded=padded,
    )
    loaded = load_model(plan, Dtype.F32, _MAX_CONTEXT, dummy_reader(0, Dtype.F32), lambda: None)
    backend = CpuBackend(plan, loaded, sizes)
    stack.callback(backend.close)
    backend.warm_up()
    device = MeasuredBackend(backend)
    for rank, its_slots in slots.items():
        image = random_adapter(plan, specs[rank], device.host_memory)
        for slot in its_slots:
            device.load(image, slot)
    requests = SyntheticRequests(
        device,
        plan.vocab_size,
        context_tokens=_CONTEXT_TOKENS,
        most=most,
        contexts=_CONTEXTS,
        most_token_ms=float("inf"),
    )

    def measurement(ranks: Ranks) -> Measurement:
        adapters = [slot for rank in slots for slot in slots[rank][: ranks.count(rank)]]
        return (
            requests.decode(adapters, _BURST) if prompt_tokens is None else requests.prefill(prompt_tokens, *adapters)
        )

    return {ranks: measurement(ranks) for ranks in batches}


def _mixes(size: int) -> dict[str, Ranks]:
    """Returns batches of `size` by their name: of one rank, with one large rank, and with equally many of all."""
    low, high = _RANKS[0], _RANKS[-1]
    same = {str(rank): (rank,) * size for rank in _RANKS}
    return same | {f"{low}, one {high}": (low,) * (size - 1) + (high,), "all": _RANKS * (size // len(_RANKS))}


def _random_ranks(rng: random.Random, size: int) -> Ranks:
    """Returns ranks up to a largest one, which is drawn first: otherwise nearly every batch would have the largest."""
    largest = rng.choice(_RANKS)
    below = [rank for rank in _RANKS if rank <= largest]
    return (*sorted(rng.choices(below, k=size - 1)), largest)


_HIDDEN, _RANK = 4096, 64
_TOKENS_EACH, _HAND_OFFS = 16, 300
_PROMPTS = (8, 16, 32, 64, 128, 256)
_CORE_RANKS = (8, 16, 32, 64)
_THREAD_RANKS, _THREAD_ROUNDS = (8, 16, 32, 64, 128), 15
_WEIGHTS = f"LoRA of q, k and v of one layer of width {_HIDDEN}"


def ipc(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Times hand-offs of 16 tokens to each of one to all workers, over shared memory and over UNIX sockets."""
    cores = _worker_cores()
    points: list[RoundTripPoint] = []
    with HandoffBench(_HIDDEN, [(Dtype.F16, _RANK)], cores) as bench:
        for count in range(1, len(cores) + 1):
            tokens = _TOKENS_EACH * count
            points += timed_transports(bench, _HIDDEN, _RANK, tokens, cores[:count], _HAND_OFFS)
    values = []
    transfer, whole = [], []
    for transport in dict.fromkeys(point.transport for point in points):
        same = [point for point in points if point.transport == transport]
        for point in same:
            name = f"{transport}, {point.workers} process{'es' if point.workers > 1 else ''}: data transfer"
            values.append(Value(name, point.beyond_us / 1000, "ms"))
        transfer.append(Series(transport, tuple(point.beyond_us / 1000 for point in same)))
        whole.append(Series(transport, tuple(point.total_us / 1000 for point in same)))
    counts = tuple(str(count + 1) for count in range(len(cores)))
    panels = (
        Panel("Data transfer", "ms", tuple(transfer), "processes", counts),
        Panel("With the computation", "ms", tuple(whole), "processes", counts),
    )
    setting = (
        f"{_WEIGHTS}, rank {_RANK}, fp16; {_TOKENS_EACH} tokens for each process.",
        f"Medians of {_HAND_OFFS} hand-offs, both ways in turn; data transfer is what exceeds the slowest process's "
        "computation.",
    )
    return FigureData("measured", setting, tuple(values), panels)


def core_time(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Times the LoRA of one layer on one core by the tokens of a prompt."""
    series, values = [], []
    with pinned_process(_worker_cores()[:1]) as pool:
        for rank in _CORE_RANKS:
            times_ms = []
            for tokens in _PROMPTS:
                case = KernelCase(_HIDDEN, Dtype.F16, rank, tokens)
                times_ms.append(1000 * case.gflop / pool.submit(measure, case).result().ours)
            series.append(Series(f"rank {rank}", tuple(times_ms), _PROMPTS))
            values.append(Value(f"rank {rank}: {_PROMPTS[-1]} tokens", times_ms[-1], "ms"))
            values.append(Value(f"rank {rank}: 256 tokens ÷ 64 tokens", times_ms[-1] / times_ms[_PROMPTS.index(64)]))
    panel = Panel("One core", "ms", tuple(series), "tokens of the prompt")
    setting = f"{_WEIGHTS}, in fp16, with weights read from memory; medians of 3 samples of 30 ms."
    return FigureData("measured", (setting,), tuple(values), (panel,))


def cpu_threads(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Times a prompt of the option's `tokens` with workers and with torch's threads on the same cores."""
    tokens, cores = int(figure["tokens"]), _worker_cores()
    with HandoffBench(_HIDDEN, [(Dtype.F32, rank) for rank in _THREAD_RANKS], cores) as bench:
        points = list(beside_threads(bench, _HIDDEN, _THREAD_RANKS, cores, _THREAD_ROUNDS, tokens))
    panels, values = [], []
    for count in dict.fromkeys(point.cores for point in points):
        same = [point for point in points if point.cores == count]
        workers = Series("workers", tuple(point.workers_ms for point in same))
        torch = Series("torch's threads", tuple(point.torch_ms for point in same))
        title = f"{count} core{'s' if count > 1 else ''}"
        panels.append(Panel(title, "ms", (workers, torch), "rank", tuple(map(str, _THREAD_RANKS))))
        ratios = [point.torch_ms / point.workers_ms for point in same]
        name = "most workers" if count == len(cores) else "one worker"
        values.append(Value(f"{name}: torch ÷ workers, largest", max(ratios)))
        values.append(Value(f"{name}: torch ÷ workers, least", min(ratios)))
    setting = f"{_WEIGHTS}, in fp32, {tokens} tokens, on 1 and {len(cores)} cores; medians of {_THREAD_ROUNDS} rounds."
    return FigureData("measured", (setting,), tuple(values), tuple(panels))


def _worker_cores() -> tuple[int, ...]:
    """Returns this process's cores, the first one last: a server's event loop uses it."""
    first, *others = sorted(os.sched_getaffinity(0))
    return (*others, first)


_BUDGET_S = 120.0  # several times that of gpu_check: kernels may have to be compiled first


def hand_overs(figure: Mapping[str, str], options: PaperOptions) -> FigureData:
    """Measures prefills on this machine's GPU. Raises ConfigError where there is none, BackendFailed when the stage
    fails."""
    gpu, problem = look()
    if gpu is None:
        raise ConfigError(f"this figure needs a GPU: {problem or 'there is no NVIDIA driver on this machine'}")
    # Here, because these need torch, which an installation for CPUs may lack.
    from scripts.laboratory.gpu.handover import HandOverFigures
    from scripts.laboratory.gpu.processes import StageProcess, run_process
    from scripts.laboratory.gpu.results import Outcome

    with tempfile.TemporaryDirectory(prefix="caraserve-hand-over-") as folder:
        report = run_process(StageProcess("handover", Path(folder) / "stage", _BUDGET_S))
    if report.outcome is not Outcome.DONE:
        raise BackendFailed(f"stage handover was not done but {report.outcome}: {report.error}")
    return hand_over_figure(msgspec.convert(report.figures, HandOverFigures), gpu.name)


def hand_over_figure(found: "HandOverFigures", device: str) -> FigureData:
    """Returns the figure of what the stage has measured on a device."""
    values = []
    for point in found.points:
        name = f"{point.tokens} tokens"
        values.append(Value(f"{name}: sync-free", point.sync_free_ms, "ms"))
        values.append(Value(f"{name}: explicit", point.explicit_ms, "ms"))
        values.append(Value(f"{name}: explicit ÷ sync-free", point.ratio))
    bars = (
        Series("sync-free", tuple(point.sync_free_ms for point in found.points)),
        Series("explicit synchronisation", tuple(point.explicit_ms for point in found.points)),
    )
    panel = Panel("Prefill with CPU LoRA", "ms", bars, "tokens", tuple(str(point.tokens) for point in found.points))
    setting = (
        f"Llama-2-7B's shape with random weights in bf16 on one {device}; an adapter of q, k and v of rank "
        f"{found.rank}, whose weights do not arrive.",
        f"{found.workers} CPU LoRA workers with up to {found.slice_tokens} tokens each of a chunk of up to "
        f"{found.chunk_tokens}; medians of prompts with both ways in turn, all kernels launched one by one.",
    )
    return FigureData("measured", setting, tuple(values), (panel,))
