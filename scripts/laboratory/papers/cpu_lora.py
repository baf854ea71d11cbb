"""Figures of LoRA on CPUs: hand-offs by shared memory and by sockets, one core's time, workers beside torch's threads.

Weights have the sizes of Llama-2-7B, as the papers' do.
"""

import os
from collections.abc import Mapping

from caraserve.bench.lora.handoff import HandoffBench, RoundTripPoint, beside_threads, timed_transports
from caraserve.bench.lora.kernels import KernelCase, measure
from caraserve.bench.lora.process import pinned_process
from caraserve.model.dtype import Dtype
from scripts.laboratory.papers.command import PaperOptions
from scripts.laboratory.papers.result import FigureData, Panel, Series, Value

_HIDDEN, _RANK = 4096, 64
_TOKENS_EACH, _HAND_OFFS = 16, 300
_PROMPTS = (8, 16, 32, 64, 128, 256)
_CORE_RANKS = (8, 16, 32, 64)
_THREAD_RANKS, _ROUNDS = (8, 16, 32, 64, 128), 15
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
        points = list(beside_threads(bench, _HIDDEN, _THREAD_RANKS, cores, _ROUNDS, tokens))
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
    setting = f"{_WEIGHTS}, in fp32, {tokens} tokens, on 1 and {len(cores)} cores; medians of {_ROUNDS} rounds in turn."
    return FigureData("measured", (setting,), tuple(values), tuple(panels))


def _worker_cores() -> tuple[int, ...]:
    """Returns this process's cores, the first one last: a server's event loop uses it."""
    first, *others = sorted(os.sched_getaffinity(0))
    return (*others, first)
