"""Applies a machine profile at the start of a server: loads it or measures one, and derives the loading policy."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from caraserve.config import LOADING_MODES, EngineConfig, LoraConfig, ModelConfig
from caraserve.core.machine_profile import (
    ASSUMED_HANDOFF_MS,
    LEAST_HANDOFF_MS,
    OtherSchema,
    Profile,
    Targets,
    default_path,
    load,
    machine_key,
)
from caraserve.errors import ConfigError
from caraserve.lora.start_policy import StartPolicy
from caraserve.model.plan import DecoderPlan, LayerPlan
from caraserve.profiling.measure import measure, measure_alone, model_key
from caraserve.profiling.microbench import target_sets

if TYPE_CHECKING:
    from caraserve.backend_factory import ServingBackend

log = logging.getLogger(__name__)

_UNPROFILED_SLICE_TOKENS = 64  # of a hand-off to one CPU worker, before its speed is measured
_HAND_OFFS = 30
_HAND_OFF_TOKENS, _DEVICE_HAND_OFF_TOKENS = 16, 1  # the time of a device's link is predicted apart
_WORKER_START_S, _QUICK_WORKER_START_S = 20.0, 0.5  # wait for workers before the hand-off is left unmeasured


def prepare_machine(
    backend: "ServingBackend",
    plan: DecoderPlan,
    model: ModelConfig,
    engine: EngineConfig,
    lora: LoraConfig,
    advance: Callable[[], None],
    *,
    for_routing: bool = False,
) -> Profile | None:
    """Starts the CPU LoRA workers, limits the link to --emulate-link-mb-per-s, and returns the profile of this machine
    with this model: from a file, or measured quickly now and saved for later. A saved one that lacks the time of a
    hand-off, as workers were missing or slow to start, gets it as soon as there are workers. The file of --profile is
    used as it is.

    None, and no workers, if neither the loading mode nor routing (`for_routing`) needs a profile. `advance` is called a
    hundred times during a measurement. Raises ConfigError if the file of --profile is not a valid profile."""
    profile = None
    dtype = plan.dtype if model.dtype == "auto" else model.dtype
    if lora.mode.needs_profile or for_routing:
        try:
            padded = backend.pads_to_largest_rank
            key = machine_key(backend.accelerator), model_key(plan, dtype, engine.cpu_threads, padded=padded)
            path = lora.profile or default_path(*key)
            profile = _load(path, required=lora.profile is not None)
            if profile is not None:
                _check_kernel(profile, path, lora)
            backend.start_workers(lambda rank: _UNPROFILED_SLICE_TOKENS)
            if profile is None:
                progress = _in_hundredths(advance)
                profile = make_profile(backend, plan, dtype, engine.cpu_threads, quick=True, progress=progress)
                _keep(profile, path)
            elif lora.profile is None and profile.handoff_ms is None and len(backend.workers) > 0:
                handoff_ms = measure_alone(backend, plan, dtype, lambda: _handoff_ms(backend, quick=True))
                if handoff_ms is not None:
                    profile = replace(profile, handoff_ms=handoff_ms)
                    _keep(profile, path)
            backend.use(profile, slice_tokens=lora.tokens_per_cpu)
        except ConfigError as error:
            if lora.profile is not None:
                raise
            effect = "adapters load as a whole" if lora.mode.needs_profile else "its speed is unknown to others"
            log.warning("this machine cannot be profiled, so %s: %s", effect, error.message)
    if lora.emulate_link_mb_per_s is not None:
        backend.emulate_link(lora.emulate_link_mb_per_s * 1e6)
    return profile


def check_profile(lora: LoraConfig, *, for_routing: bool) -> None:
    """Raises ConfigError if `prepare_machine` would refuse the file of --profile."""
    if lora.profile is not None and (lora.mode.needs_profile or for_routing):
        _check_kernel(load(lora.profile), lora.profile, lora)


def _check_kernel(profile: Profile, path: Path, lora: LoraConfig) -> None:
    if profile.decode.is_padded != (lora.padded_rank is not None):
        raise ConfigError(
            f"the profile {path} was measured with another --lora-kernel than {lora.lora_kernel}; run "
            f"`caraserve profile` with --lora-kernel {lora.lora_kernel}"
        )


def make_profile(
    backend: "ServingBackend",
    plan: DecoderPlan,
    dtype: str,
    threads: int | None,
    *,
    quick: bool,
    progress: Callable[[float], None],
) -> Profile:
    """Measures an idle backend whose workers have been started. `progress` gets the share done."""

    return measure(
        backend,
        plan,
        quick=quick,
        progress=progress,
        measure_handoff=(lambda: _handoff_ms(backend, quick=quick)) if len(backend.workers) > 0 else None,
        dtype=dtype,
        threads=threads,
        accelerator=backend.accelerator,
        padded=backend.pads_to_largest_rank,
    )


def _handoff_ms(backend: "ServingBackend", *, quick: bool) -> float | None:
    """Returns `Profile.handoff_ms`, measured with the adapter in slot 1, or None if workers are not there in time."""
    if not backend.workers.await_all(_QUICK_WORKER_START_S if quick else _WORKER_START_S):
        return None
    tokens = _DEVICE_HAND_OFF_TOKENS if backend.accelerator else _HAND_OFF_TOKENS
    times = [backend.time_hand_off(1, tokens) for _ in range(_HAND_OFFS)]
    spent_s = [time.total_s - time.compute_s for time in times if time is not None]
    if not spent_s:
        return None
    if (measured_ms := 1000 * median(spent_s)) >= LEAST_HANDOFF_MS:
        return measured_ms
    log.debug("a hand-off of %.5f ms is a mistake of the measurement: less than %g", measured_ms, LEAST_HANDOFF_MS)
    return None


def loading_rules(
    backend: "ServingBackend", plan: DecoderPlan, profile: Profile | None, lora: LoraConfig
) -> StartPolicy:
    """Returns the loading policy on this machine. Without a profile, another mode takes the place of one that needs
    it, because it cannot be predicted when a layer will be needed; other modes predict nothing."""
    profile = profile if lora.mode.needs_profile else None
    mode = LOADING_MODES[lora.mode.without_profile] if profile is None and lora.mode.needs_profile else lora.mode
    bytes_per_s = math.inf if profile is None else profile.link_bytes_per_s
    handoff_ms = None if profile is None else profile.handoff_ms
    if handoff_ms is None:
        handoff_ms = ASSUMED_HANDOFF_MS
        if mode.chooses and len(backend.workers) > 0:
            log.info(
                "the delay of CPU LoRA workers was not measured: auto assumes %.2f ms; `caraserve profile` measures it",
                handoff_ms,
            )
    tokens_per_cpu, tokens_per_worker = lora.tokens_per_cpu, None if profile is None else profile.tokens_per_worker
    return StartPolicy(
        mode=mode,
        layers=len(plan.layers),
        link_bytes_per_s=bytes_per_s if lora.emulate_link_mb_per_s is None else lora.emulate_link_mb_per_s * 1e6,
        costs=profile,
        workers=len(backend.workers),
        handoff_ms=handoff_ms,
        shared_cores=backend.shares_cores,
        delta_bytes=delta_bytes(plan, backend.delta_itemsize),
        delta_bytes_per_s=bytes_per_s,
        attention_targets=frozenset(target_sets(plan)["qkv"]),
        hand_offs=plan.most_groups,
        chunk_tokens=backend.limits.assisted_chunk_tokens,
        pipeline_groups=lora.pipeline_groups,
        tokens_per_worker=tokens_per_worker if tokens_per_cpu is None else lambda rank: tokens_per_cpu,
    )


def delta_bytes(plan: DecoderPlan, itemsize: int) -> dict[Targets, int]:
    """Returns the bytes of one token's deltas of the widest layer, by the modules of the adapter."""

    def outputs(layer: LayerPlan, targets: tuple[str, ...]) -> int:
        return sum(linear.outputs for linear in layer.linears if linear.target in targets)

    sets = target_sets(plan).items()
    return {name: itemsize * max(outputs(layer, targets) for layer in plan.layers) for name, targets in sets}


def _load(path: Path, *, required: bool) -> Profile | None:
    if not required and not path.exists():
        return None
    try:
        return load(path)
    except ConfigError as error:
        if required:
            raise
        if isinstance(error, OtherSchema):
            log.info("the profile %s is of another version; this machine is measured again", path)
        else:
            log.warning("%s; this machine is measured again", error.message)
        return None


def _keep(profile: Profile, path: Path) -> None:
    try:
        profile.save(path)
    except ConfigError as error:
        log.warning("the profile cannot be kept: %s", error.message)


def _in_hundredths(advance: Callable[[], None]) -> Callable[[float], None]:
    """Returns a function that turns shares done into a hundred calls of `advance`."""
    called = 0

    def progress(share: float) -> None:
        nonlocal called
        while called < int(100 * share):
            called += 1
            advance()

    return progress
