"""`caraserve profile`: builds a backend as `serve` does, measures it, writes the profile and prints it."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from caraserve.backend_factory import build_backend
from caraserve.bench.report.plots import INK, can_draw, line_style, new_figure, render, style
from caraserve.bench.report.tables import NONE, TextTable, to_rich
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.machine_profile import Profile, default_path
from caraserve.demo import with_demo
from caraserve.errors import ConfigError
from caraserve.model.families import load_plan
from caraserve.profiling.apply import make_profile
from caraserve.telemetry.progress import terminal_bar

log = logging.getLogger(__name__)

_SLICE_TOKENS = 64  # of a hand-off to one CPU worker; the measurement uses one worker only


def profile(
    model_config: ModelConfig,
    lora_config: LoraConfig,
    engine_config: EngineConfig,
    *,
    quick: bool,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Measures this machine with a model. Raises ConfigError, ModelLoadError or BackendFailed."""
    if plot is not None and not can_draw():
        raise ConfigError("--plot needs matplotlib: install the package's `plot` extra")
    model_config, lora_config = with_demo(model_config, lora_config)
    assert model_config.model is not None
    plan = load_plan(model_config.model)
    backend = build_backend(plan, model_config, engine_config, lora_config)
    dtype = plan.dtype if model_config.dtype == "auto" else model_config.dtype
    try:
        backend.start_workers(lambda rank: _SLICE_TOKENS)
        with _progress() as progress:
            made = make_profile(backend, plan, dtype, engine_config.cpu_threads, quick=quick, progress=progress)
    finally:
        backend.close()
    path = output or default_path(made.machine, made.model)
    made.save(path)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for table in (_fits(made), _rates(made)):
        console.print(to_rich(table))
    console.print(f"written to {path}")
    if plot is not None:
        plot.write_bytes(_draw(made))
        console.print(f"drawn in {plot}")


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, one log line elsewhere."""
    started_s = time.monotonic()
    with terminal_bar() as progress:
        task = progress.add_task("measuring", total=1.0)
        yield lambda share: progress.update(task, completed=share)
    log.info("measured in %.1f s", time.monotonic() - started_s)


def _fits(made: Profile) -> TextTable:
    latency = f"{_time(made.link_latency_ms)} + " if made.link_latency_ms else ""
    handoff = "not measured" if made.handoff_ms is None else _time(made.handoff_ms)
    prefill, decode = made.prefill, made.decode
    curve = prefill.curve
    computed = f"{_time(curve.base_ms)} + tokens · {_time(curve.per_token_ms)}"
    base = f"max({_time(curve.least_ms)}, {computed})" if curve.least_ms else computed
    lora = f"LoRA {_time(curve.lora_ms)} + tokens · rank · {_time(curve.per_token_rank_ms)}"
    token = f"{_time(prefill.per_token_ms)} + rank · {_time(prefill.per_token_rank_ms)}"
    work = "requests · max rank" if decode.is_padded else "Σ rank"
    each = f"requests · {_time(decode.gamma_ms)} + {work} · {_time(decode.alpha_ms)}"
    rows = [
        ("copy to the device", f"{latency}bytes at {made.link_bytes_per_s / 1e9:.1f} GB/s", ""),
        ("hand-off to a worker", handoff, ""),
        ("prefill", f"{base}; {lora}", f"{curve.r2:.3f}"),
        ("prefill, a line", f"{_time(prefill.base_ms)} + tokens · ({token})", f"{prefill.r2:.3f}"),
        ("decode", f"{_time(decode.beta_ms)} + {each}", f"{decode.r2:.3f}"),
    ]
    for name, fit, x in (("padded", decode.padded, "requests · max rank"), ("unpadded", decode.unpadded, "Σ rank")):
        rows.append((f"decode, {name}", f"{_time(fit.beta_ms)} + {x} · {_time(fit.alpha_ms)}", f"{fit.r2:.3f}"))
    return TextTable(f"{made.model} on {made.machine}", ("what", "time", "R²"), rows, left=2)


def _rates(made: Profile) -> TextTable:
    rates = {(rate.rank, rate.targets): f"{rate.tokens_per_s:,.0f}" for rate in made.lora}
    rows = [
        (str(rank), rates.get((rank, "qkv"), NONE), rates.get((rank, "all"), NONE), str(made.tokens_per_worker(rank)))
        for rank in sorted({rate.rank for rate in made.lora})
    ]
    heads = ("rank", "q, k, v: tokens/s", "all modules: tokens/s", "tokens a worker takes")
    return TextTable("LoRA of one layer on one core", heads, rows)


def _time(ms: float) -> str:
    """`0.0116` → `11.6 µs`."""
    for unit, factor in (("ms", 1.0), ("µs", 1e3)):
        if ms * factor >= 1:
            return f"{ms * factor:.3g} {unit}"
    return f"{ms * 1e6:.3g} ns"


def _draw(made: Profile) -> bytes:
    """Draws the measured points and the fits through them."""
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for place, rank in enumerate(sorted({point.rank for point in made.prefill.points})):
        points = sorted((point.tokens, point.ms) for point in made.prefill.points if point.rank == rank)
        tokens, colour = [at for at, _ in points], line_style(place)["color"]
        left.plot(tokens, [made.prefill_ms(at, rank) for at in tokens], label=f"rank {rank}", color=colour)
        left.scatter(tokens, [ms for _, ms in points], color=colour, s=14)
    fit = f"prefill: points and fit, R² = {made.prefill.curve.r2:.3f}"
    style(left, xlabel="prompt tokens", ylabel="time, ms", title=fit)
    left.legend(fontsize=8, frameon=False)
    decode = made.decode
    works = [p.batch * p.rank_max if decode.is_padded else p.rank_sum for p in decode.points]
    batches = [p.batch for p in decode.points]
    predicted = [
        decode.alpha_ms * work + decode.gamma_ms * batch + decode.beta_ms
        for work, batch in zip(works, batches, strict=True)
    ]
    measured = [point.ms for point in decode.points]
    shown = right.scatter(predicted, measured, c=[point.rank_sum for point in decode.points], s=14)
    bar = figure.colorbar(shown, ax=right)
    bar.set_label("sum of ranks", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, labelcolor=INK)
    right.axline((0, 0), slope=1, color=INK, lw=0.9)
    style(right, xlabel="predicted time, ms", ylabel="measured time, ms", title=f"decode, R² = {decode.r2:.3f}")
    figure.suptitle(f"{made.model} on {made.machine}", fontsize=9)
    return render(figure)
