"""Figures of an iteration's time by the ranks in a batch, with the padded LoRA kernel and with the one that pads
nothing."""

import os
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product

import numpy as np

from caraserve.bench.lora.kernels import QKV
from caraserve.bench.synthetic import SHAPES, Shape, shape_spec
from caraserve.core.machine_profile import LineFit
from caraserve.cpu.backend import CpuBackend, CpuSizes
from caraserve.cpu.weights import dummy_reader, load_model
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import MeasuredBackend, Measurement, SyntheticRequests, adapter_spec, random_adapter
from scripts.laboratory.papers.command import PaperOptions
from scripts.laboratory.papers.result import FigureData, Panel, Series, Value

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
    spec = shape_spec(shape, _MAX_CONTEXT)
    most, ranks_used = max(map(len, batches)), sorted({rank for ranks in batches for rank in ranks})
    specs = {rank: adapter_spec(spec, Dtype.F16, rank, spec.layers, QKV) for rank in ranks_used}
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
        kv_cache_bytes=spec.kv_bytes_per_token(4) * _MAX_CONTEXT * most,
        host_bytes=max(each.num_bytes for each in specs.values()),
        padded=padded,
    )
    loaded = load_model(spec, Dtype.F32, _MAX_CONTEXT, dummy_reader(0, Dtype.F32), lambda: None)
    backend = CpuBackend(spec, loaded, sizes)
    stack.callback(backend.close)
    backend.warm_up()
    device = MeasuredBackend(backend)
    for rank, its_slots in slots.items():
        image = random_adapter(spec, specs[rank], device.host_memory)
        for slot in its_slots:
            device.load(image, slot)
    requests = SyntheticRequests(
        device,
        spec.vocab_size,
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
