"""Runs `bench modes` for a figure, on servers with a random model of 100 million parameters."""

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import uvloop

from caraserve.bench.cli import bench_parser
from caraserve.bench.modes import bench_modes, modes_options
from caraserve.bench.serve import Measurements
from caraserve.bench.workload.presets import find_preset
from caraserve.errors import BackendFailed
from scripts.laboratory.papers.command import PaperOptions

# A load of rank 64 on q, k and v of a 7B model, 100 MB. The papers only draw load times; at 9 requests/s they lost 29 %
# of the serving time to loads (Toppings, figure 4), which is 30 ms a load.
LOAD_S_OF_RANK_64 = 0.030
_PART_S = 30.0  # some six times as long as a request takes
_MODEL = ("--random-model", "100M", "--dtype", "float32")


def load_share(preset: str) -> float:
    """Returns the share of time for which the paper's link was busy if each request loaded an adapter."""
    setting = find_preset(preset)
    assert setting.rates is not None
    rank = statistics.fmean(setting.ranks.default)
    return setting.rates.default * LOAD_S_OF_RANK_64 * rank / 64


def run_preset(
    preset: str, figure: Mapping[str, str], options: PaperOptions, words: Sequence[str] = ()
) -> Measurements:
    """Runs a setting in the figure's modes, with these arguments too; returns the runs of the modes that it shows.

    Half of the cores stand for the GPU, the others for its host's CPUs: workers take next to no time from the model, as
    on the papers' machines. Figures of one setting have the same modes, so that they share runs. Raises BackendFailed.
    """
    device, host = split_cores(sorted(os.sched_getaffinity(0)))
    serve = f"--cpu-threads {len(device)} {figure.get('serve') or worker_cores(host)}"
    measured = _shared_runs((*_preset_words(preset, figure, options), *words), options, serve)
    shown = figure.get("shown", figure["modes"]).split(",")
    cores = len({*device, *host})
    note = f"The model has {len(device)} of {cores} cores, CPU LoRA workers have the others."
    runs = [run for run in measured.runs if run.label in shown]
    return replace(measured, runs=runs, notes=[note, *measured.notes])


def split_cores(cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the cores that stand for the GPU, and those of its host's CPUs; a single core is both."""
    half = max(1, len(cores) // 2)
    return cores[:half], cores[half:] or cores


def worker_cores(cores: Sequence[int]) -> str:
    """Returns the server's argument that gives CPU LoRA workers these cores."""
    return f"--lora-cpus {','.join(map(str, cores))}"


def _preset_words(preset: str, figure: Mapping[str, str], options: PaperOptions) -> list[str]:
    """Returns the arguments of `bench modes` for a setting: the duration in parts in which the modes alternate."""
    parts = max(1, round(options.duration_s / _PART_S))
    words = ["--preset", preset, "--modes", figure["modes"], "--scale", "0.02"]
    words += ["--load-share", f"{load_share(preset):g}", "--duration-s", f"{options.duration_s / parts:g}"]
    return [*words, "--repeats", str(options.repeats * parts), *figure.get("arguments", "").split()]


def run_modes(words: Sequence[str], options: PaperOptions, serve: str = "") -> Measurements:
    """Runs `bench modes` with these arguments. Raises BackendFailed if it was cut off."""
    args = bench_parser().parse_args(["modes", *_MODEL, "--seed", str(options.seed), *words])
    args.serve_arguments = tuple(serve.split())
    measured = uvloop.run(bench_modes(*modes_options(args)))
    if measured.failure is not None or len(measured.runs) < args.repeats * len(args.modes):
        raise BackendFailed(f"the measurement was cut off: {measured.failure or 'interrupted'}")
    return measured


@cache
def _shared_runs(words: tuple[str, ...], options: PaperOptions, serve: str) -> Measurements:
    """Runs `bench modes` for the first of several figures with the same arguments."""
    return run_modes(words, options, serve)
