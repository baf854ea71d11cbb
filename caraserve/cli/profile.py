"""`caraserve profile`: builds a backend as `serve` does, measures it, writes the profile and prints it."""

import importlib.util
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from caraserve.backend_factory import build_backend
from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.machine_profile import LineFit, Profile, default_path
from caraserve.errors import ConfigError
from caraserve.model.spec import load_spec
from caraserve.profiling.apply import make_profile
from caraserve.serve import with_demo

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
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: install the package's `plot` extra")
    model_config, lora_config = with_demo(model_config, lora_config)
    assert model_config.model is not None
    spec = load_spec(model_config.model)
    backend = build_backend(spec, model_config, engine_config, lora_config)
    dtype = spec.dtype if model_config.dtype == "auto" else model_config.dtype
    try:
        backend.start_workers(lambda rank: _SLICE_TOKENS)
        with _progress() as progress:
            made = make_profile(backend, spec, dtype, engine_config.cpu_threads, quick=quick, progress=progress)
    finally:
        backend.close()
    path = output or default_path(made.machine, made.model)
    made.save(path)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for table in (_fits(made), _rates(made)):
        console.print(table)
    console.print(f"written to {path}")
    if plot is not None:
        _draw(made, plot)
        console.print(f"drawn in {plot}")


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, one log line elsewhere."""
    console = Console(stderr=True)
    started_s = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("measuring", total=1.0)
        yield lambda share: progress.update(task, completed=share)
    log.info("measured in %.1f s", time.monotonic() - started_s)


def _fits(made: Profile) -> Table:
    table = Table(title=f"{made.model} on {made.machine}", title_justify="left")
    table.add_column("what")
    table.add_column("time", no_wrap=True)
    table.add_column("R²", justify="right")
    latency = f"{_time(made.link_latency_ms)} + " if made.link_latency_ms else ""
    table.add_row("copy to the device", f"{latency}bytes at {made.link_bytes_per_s / 1e9:.1f} GB/s", "")
    handoff = "not measured" if made.handoff_ms is None else _time(made.handoff_ms)
    table.add_row("hand-off to a worker", handoff, "", end_section=True)
    fit = made.prefill
    text = f"{_time(fit.base_ms)} + tokens · ({_time(fit.per_token_ms)} + rank · {_time(fit.per_token_rank_ms)})"
    table.add_row("prefill", text, f"{fit.r2:.3f}")
    decode = made.decode
    text = f"{_time(decode.beta_ms)} + requests · {_time(decode.gamma_ms)} + Σ rank · {_time(decode.alpha_ms)}"
    table.add_row("decode", text, f"{decode.r2:.3f}")
    table.add_row("decode, padded", *_line(decode.padded, "requests · max rank"))
    table.add_row("decode, unpadded", *_line(decode.unpadded, "Σ rank"))
    return table


def _line(fit: LineFit, x: str) -> tuple[str, str]:
    return f"{_time(fit.beta_ms)} + {x} · {_time(fit.alpha_ms)}", f"{fit.r2:.3f}"


def _rates(made: Profile) -> Table:
    table = Table(title="LoRA of one layer on one core", title_justify="left")
    for head in ("rank", "q, k, v: tokens/s", "all modules: tokens/s", "tokens a worker takes"):
        table.add_column(head, justify="right")
    rates = {(rate.rank, rate.targets): f"{rate.tokens_per_s:,.0f}" for rate in made.lora}
    for rank in sorted({rate.rank for rate in made.lora}):
        known = [rates.get((rank, "qkv"), "–"), rates.get((rank, "all"), "–")]
        table.add_row(str(rank), *known, str(made.tokens_per_worker(rank)))
    return table


def _time(ms: float) -> str:
    """`0.0116` → `11.6 µs`."""
    for unit, factor in (("ms", 1.0), ("µs", 1e3)):
        if ms * factor >= 1:
            return f"{ms * factor:.3g} {unit}"
    return f"{ms * 1e6:.3g} ns"


def _draw(made: Profile, file: Path) -> None:
    """Measured points and the fits through them."""
    # An extra, and only this option needs it.
    from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for rank in sorted({point.rank for point in made.prefill.points}):
        points = sorted((point.tokens, point.ms) for point in made.prefill.points if point.rank == rank)
        tokens = [at for at, _ in points]
        (line,) = left.plot(tokens, [made.prefill_ms(at, rank) for at in tokens], label=f"rank {rank}")
        left.scatter(tokens, [ms for _, ms in points], color=line.get_color(), s=14)
    left.set(xlabel="prompt tokens", ylabel="ms", title=f"prefill, R² = {made.prefill.r2:.3f}")
    left.legend()
    decode = made.decode
    predicted = [decode.alpha_ms * p.rank_sum + decode.gamma_ms * p.batch + decode.beta_ms for p in decode.points]
    measured = [point.ms for point in decode.points]
    shown = right.scatter(predicted, measured, c=[point.rank_sum for point in decode.points], s=14)
    figure.colorbar(shown, ax=right, label="Σ rank")
    right.axline((0, 0), slope=1, linewidth=0.8)
    right.set(xlabel="predicted ms", ylabel="measured ms", title=f"decode, R² = {decode.r2:.3f}")
    figure.suptitle(f"{made.model} on {made.machine}", fontsize=9)
    figure.savefig(file, dpi=150)
