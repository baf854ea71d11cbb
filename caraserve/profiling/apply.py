"""What a machine's profile decides at the start: it is read, or made and kept, and applied. For `serve.py`."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from caraserve.config import EngineConfig, LoraConfig, ModelConfig
from caraserve.core.machine_profile import ASSUMED_HANDOFF_MS, Profile, default_path, load, machine_key
from caraserve.errors import ConfigError
from caraserve.lora.start_policy import LAYERWISE_MODES, StartPolicy
from caraserve.model.spec import ModelSpec
from caraserve.profiling.measure import measure, model_key

if TYPE_CHECKING:
    from caraserve.backend_factory import ServingBackend

log = logging.getLogger(__name__)

_UNPROFILED_SLICE_TOKENS = 64  # of a hand-off to one CPU worker, until it is known how fast that is
_HAND_OFFS = 30
_HAND_OFF_TOKENS = 16
_BIRTH_S, _QUICK_BIRTH_S = 20.0, 0.5  # after all else is measured, until the profile does without the workers


def tuned(
    backend: "ServingBackend",
    spec: ModelSpec,
    model: ModelConfig,
    engine: EngineConfig,
    lora: LoraConfig,
    advance: Callable[[], None],
) -> Profile | None:
    """What is known of this machine with this model: from a file, or measured now, quickly, and kept for next time.
    None where the loading mode does not ask for it.

    Starts the CPU LoRA workers on the way. `advance` is called a hundred times. Raises ConfigError for a file that was
    asked for and is no profile.
    """
    profile = None
    if lora.loading_mode in LAYERWISE_MODES:
        try:
            profile = _found_or_made(backend, spec, model, engine, lora, advance)
            backend.use(profile)
        except ConfigError as error:
            if lora.profile is not None:
                raise
            log.warning("this machine cannot be profiled, so adapters load as a whole: %s", error.message)
    if lora.emulate_link_mb_per_s is not None:
        backend.emulate_link(lora.emulate_link_mb_per_s * 1e6)
    return profile


def _found_or_made(
    backend: "ServingBackend",
    spec: ModelSpec,
    model: ModelConfig,
    engine: EngineConfig,
    lora: LoraConfig,
    advance: Callable[[], None],
) -> Profile:
    dtype = spec.dtype if model.dtype == "auto" else model.dtype
    path = lora.profile or default_path(machine_key(backend.accelerator), model_key(spec, dtype, engine.cpu_threads))
    profile = _known(path, required=lora.profile is not None)
    backend.start_workers(lambda rank: _UNPROFILED_SLICE_TOKENS)
    if profile is None:
        profile = make_profile(backend, spec, dtype, engine.cpu_threads, quick=True, progress=_percents(advance))
        try:
            profile.save(path)
        except ConfigError as error:
            log.warning("the profile cannot be kept: %s", error.message)
    return profile


def make_profile(
    backend: "ServingBackend",
    spec: ModelSpec,
    dtype: str,
    threads: int | None,
    *,
    quick: bool,
    progress: Callable[[float], None],
) -> Profile:
    """Measures an idle backend whose workers have been started. `progress` is told the share done."""

    def handoff_ms() -> float | None:
        if not backend.workers.await_all(_QUICK_BIRTH_S if quick else _BIRTH_S):
            return None
        times = [backend.time_hand_off(1, _HAND_OFF_TOKENS) for _ in range(_HAND_OFFS)]
        spent_s = [time.total_s - time.compute_s for time in times if time is not None]
        return 1000 * median(spent_s) if spent_s else None

    return measure(
        backend,
        spec,
        quick=quick,
        progress=progress,
        measure_handoff=handoff_ms if len(backend.workers) > 0 else None,
        dtype=dtype,
        threads=threads,
        accelerator=backend.accelerator,
    )


def loading_rules(backend: "ServingBackend", spec: ModelSpec, profile: Profile | None, lora: LoraConfig) -> StartPolicy:
    """The loading mode on this machine. Without a profile it is not known when a layer will be needed."""
    mode = "overlapped" if profile is None and lora.loading_mode in LAYERWISE_MODES else lora.loading_mode
    bytes_per_s = math.inf if profile is None else profile.link_bytes_per_s
    handoff_ms = None if profile is None else profile.handoff_ms
    if handoff_ms is None:
        handoff_ms = ASSUMED_HANDOFF_MS
        if mode == "auto" and len(backend.workers) > 0:
            log.info("a hand-off to a CPU worker was not measured: auto assumes %.2f ms", handoff_ms)
    return StartPolicy(
        mode=mode,
        layers=spec.layers,
        link_bytes_per_s=bytes_per_s if lora.emulate_link_mb_per_s is None else lora.emulate_link_mb_per_s * 1e6,
        costs=profile,
        workers=len(backend.workers),
        handoff_ms=handoff_ms,
        shared_cores=backend.shares_cores,
    )


def _known(path: Path, *, required: bool) -> Profile | None:
    if not required and not path.exists():
        return None
    try:
        return load(path)
    except ConfigError as error:
        if required:
            raise
        log.warning("%s; this machine is measured again", error.message)
        return None


def _percents(advance: Callable[[], None]) -> Callable[[float], None]:
    """From shares done to a hundred calls."""
    told = 0

    def progress(share: float) -> None:
        nonlocal told
        while told < int(100 * share):
            told += 1
            advance()

    return progress
