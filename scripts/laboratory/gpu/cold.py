"""Stage `cold`: measures how much a cold start delays its own request and other running requests.

The exposed time is the time from the start of load and prefill to the first token, minus that of a warm prompt. A warm
prompt of an adapter of q, k and v takes a graph with LoRA for these modules alone. While layers arrive there is only a
graph with LoRA for all modules, so the exposed time is also measured from a warm prompt that takes such a graph.
`ondemand` and `overlapped` are equal for the request itself, which waits for the whole adapter in both; they differ for
the requests that decode meanwhile.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import get_args

import numpy as np

from caraserve.core import machine_profile as profiles
from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.lora_layout import RANK_STEP, AdapterSpec, HostAdapter, modules_of
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import target_sets
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.held_link import HeldLink
from scripts.laboratory.gpu.limits import link_bytes_per_s
from scripts.laboratory.gpu.measured_model import MeasuredModel, measured_model
from scripts.laboratory.gpu.results import Lines, StageResult
from scripts.laboratory.gpu.session import wait_for_load
from scripts.laboratory.gpu.setup import CheckSetup

_MODES = ("ondemand", "pipelined", "assisted")
_CORE_FLOP_PER_S = 60e9  # assumed speed of the LoRA kernel on one core
_COPY_S = 6e-6  # assumed time to issue a copy of any size
_PIPELINED_TARGET = 1.2  # times the predicted exposed time
_NOISE_MS = 0.3  # times below this are not compared with a prediction
_ITL_TARGET = 1.05
_SLOT = 1
_BIRTH_S = 60.0
_WORKERS = 8


@dataclass(frozen=True, slots=True)
class ColdPoint:
    """Times of one adapter with one prompt; exposed times are by loading mode, and predicted for two modes.

    `warm_all_ms`: a warm prompt by a graph with LoRA for all modules; the same as `warm_ms` for an adapter of them all.
    """

    targets: str
    rank: int
    tokens: int
    mbytes: float
    warm_ms: float
    warm_all_ms: float
    exposed_ms: dict[str, float]  # beyond `warm_ms`
    predicted_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps between the tokens of requests that decode."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, gaps_ms: Sequence[float]) -> "Gaps":
        return cls(float(np.percentile(gaps_ms, 50)), float(np.percentile(gaps_ms, 99)))


@dataclass(frozen=True, slots=True)
class ColdFigures:
    """All points, and the gaps of running requests by what happens beside them."""

    link_bytes_per_s: float
    assumed: dict[str, float]  # used by predictions and not measured
    exposed: tuple[ColdPoint, ...]
    itl: dict[str, Gaps]


def cold(setup: CheckSetup) -> StageResult[ColdFigures]:
    """Measures exposed times and interruptions; results are checked in stage `correct`."""
    effort, lines = setup.effort, Lines()
    acc = setup.accelerator(DTYPE)
    link_speed = link_bytes_per_s(setup, acc)
    context = max(*effort.cold_prompts, 2 * min(effort.contexts))
    assumed = {"handoff_ms": profiles.ASSUMED_HANDOFF_MS, "core_lora_flop_per_s": _CORE_FLOP_PER_S, "copy_s": _COPY_S}
    lines.add("host to device", f"{link_speed / 1e9:.1f} GB/s")
    lines.add("assumed by predictions, not measured", ", ".join(f"{what} {each:g}" for what, each in assumed.items()))
    link = HeldLink(acc.device.driver)
    device, adapter_slots = replace(acc.device, driver=link.driver), effort.arrivals + 2
    with measured_model(
        setup, effort.bystanders + 1, context, adapter_slots, workers=_WORKERS, device=device
    ) as subject:
        subject.session.grow_kv(effort.bystanders + 1)
        subject.backend.start_workers(lambda rank: 64)
        subject.backend.workers.await_all(_BIRTH_S)
        subject.backend.use(_profile(setup, subject, link_speed))
        points = []
        for rank in effort.cold_ranks:
            for targets in get_args(profiles.Targets):
                points += _points(setup, subject, targets, rank, link_speed)
        _judge(points, lines)
        gaps = _bystanders(setup, subject, link, lines)
    link.close()
    return StageResult(ColdFigures(link_speed, assumed, tuple(points), gaps), lines.all)


def _profile(setup: CheckSetup, subject: MeasuredModel, link: float) -> profiles.Profile:
    """Returns a profile for the backend's predictions, from the link's speed and warm prefills of the base model."""
    prompts = [profiles.PrefillPoint(count, 0, subject.prefill_ms(count, 0)) for count in setup.effort.cold_prompts]
    flop = 4 * subject.plan.hidden * len(target_sets(subject.plan)["qkv"])  # per token and unit of rank
    rates = [
        profiles.LoraRate(rank, targets, _CORE_FLOP_PER_S / flop / rank, fixed_ms=0.0)
        for targets in get_args(profiles.Targets)
        for rank in (8, 64)
    ]
    return profiles.Profile(
        schema=profiles.SCHEMA,
        machine="",
        model="",
        made_unix_s=time.time(),
        quick=True,
        link_bytes_per_s=link,
        link_latency_ms=1000 * _COPY_S,
        handoff_ms=None,
        lora=tuple(rates),
        prefill=profiles.Prefill.fitted(prompts),
        decode=profiles.Decode.fitted([profiles.DecodePoint(1, 0, 0, 1.0)]),
    )


def _points(
    setup: CheckSetup, subject: MeasuredModel, targets: profiles.Targets, rank: int, link: float
) -> list[ColdPoint]:
    subject.forget_adapters()
    adapter, points = subject.adapter(rank, targets), []
    whole = subject.put(_with_one_more(subject.plan, rank)) if targets == "qkv" else adapter
    for count in setup.effort.cold_prompts:
        if adapter is None or whole is None or setup.left_s < setup.budget_s / 4:
            break
        warm_ms = _warm_ms(setup, subject, adapter, count)
        warm_all_ms = warm_ms if whole is adapter else _warm_ms(setup, subject, whole, count)
        exposed = {mode: _median(setup, partial(_cold_ms, subject, adapter, count, mode)) - warm_ms for mode in _MODES}
        predicted = _predicted(adapter.spec, warm_ms, link)
        mbytes = adapter.spec.num_bytes / 1e6
        points.append(ColdPoint(targets, rank, count, mbytes, warm_ms, warm_all_ms, exposed, predicted))
    return points


def _with_one_more(plan: DecoderPlan, rank: int) -> AdapterSpec:
    """Returns the spec of an adapter of q, k and v and of one more module in the first layer, of the least rank:
    prompts take the graph of all modules for it, and compute no more LoRA than without that module."""
    modules = dict.fromkeys(modules_of(plan, target_sets(plan)["qkv"]), (rank, 1.0))
    last = 0, len(plan.layers[0].linears) - 1
    return AdapterSpec.of(plan, DTYPE, modules | {last: (RANK_STEP, 1.0)}, f"{rank} and one more")


def _warm_ms(setup: CheckSetup, subject: MeasuredModel, adapter: HostAdapter, count: int) -> float:
    """Returns the time of a prompt whose adapter is loaded."""
    wait_for_load(subject.session.start_load(adapter, _SLOT))
    warm_ms = _median(setup, partial(_asked_ms, subject, count))
    subject.backend.unload_adapter(_SLOT)
    return warm_ms


def _median(setup: CheckSetup, once_ms: Callable[[], float]) -> float:
    return median(once_ms() for _ in range(setup.effort.cold_repeats))


def _asked_ms(subject: MeasuredModel, count: int, *, is_side_batch: bool = False) -> float:
    """Returns the time from the launch of a prefill to its token."""
    started_s = time.monotonic()
    (ended,) = subject.session.run(subject.prompt_batch(count, _SLOT, 0, is_side_batch=is_side_batch))
    return 1000 * (ended.received_s - started_s)


def _cold_ms(subject: MeasuredModel, adapter: HostAdapter, count: int, mode: str) -> float:
    started_s = time.monotonic()
    groups = () if mode == "ondemand" else group_ends(adapter.spec)
    loading = subject.session.start_load(adapter, _SLOT, groups)
    if mode == "ondemand":
        wait_for_load(loading)
    _asked_ms(subject, count, is_side_batch=mode == "assisted")
    spent_ms = 1000 * (time.monotonic() - started_s)
    if mode != "ondemand":
        wait_for_load(loading)
    subject.backend.unload_adapter(_SLOT)
    return spent_ms


def group_ends(spec: AdapterSpec) -> tuple[int, ...]:
    """Returns layer groups of one layer each, so that the layers are copied one after another."""
    return tuple(range(1, len(spec.layer_ends)))


def _predicted(spec: AdapterSpec, warm_ms: float, link: float) -> dict[str, float]:
    """Predicts exposed times: of each layer's load, only the time that the previous layer computes is hidden."""
    layers = len(spec.layer_ends)
    load_ms = 1000 * (spec.num_bytes / layers / link + _COPY_S)
    compute_ms = warm_ms / layers
    hidden_ms = (layers - 1) * min(load_ms, compute_ms)
    return {"ondemand": 1000 * spec.num_bytes / link, "pipelined": layers * load_ms - hidden_ms}


def _judge(points: Sequence[ColdPoint], lines: Lines) -> None:
    for point in points:
        text = ", ".join(f"{mode} {exposed_ms:.2f}" for mode, exposed_ms in point.exposed_ms.items())
        if more_ms := point.warm_all_ms - point.warm_ms:
            beyond = ", ".join(f"{mode} {exposed_ms - more_ms:.2f}" for mode, exposed_ms in point.exposed_ms.items())
            text += f"; beyond a warm graph of all modules {beyond}"
        expected, got = point.predicted_ms["pipelined"], point.exposed_ms["pipelined"]
        name = f"cold {point.targets} rank {point.rank}, {point.tokens} tokens: ms exposed"
        if max(expected, got) < _NOISE_MS:
            lines.add(name, text)
        else:
            met = got <= _PIPELINED_TARGET * expected + _NOISE_MS
            lines.add(name, text, f"pipelined ≈ {expected:.2f}", met)


# --- requests that decode meanwhile ---


def _bystanders(setup: CheckSetup, subject: MeasuredModel, link: HeldLink, lines: Lines) -> dict[str, Gaps]:
    """Compares the gaps between running requests' tokens during cold starts with those during warm arrivals, and those
    while an adapter's copy stands still with those of requests alone."""
    effort, context = setup.effort, min(setup.effort.contexts)
    subject.forget_adapters()
    adapter = subject.adapter(64 if 64 in effort.cold_ranks else effort.cold_ranks[0], "qkv")
    if adapter is None:
        lines.add("requests that decode meanwhile", "not measured: the host tier is too small for an adapter")
        return {}
    subject.fill(range(effort.bystanders), context)
    gaps = {name: Gaps.of(_gaps_ms(subject, adapter, context, name)) for name in ("warm", "overlapped", "pipelined")}
    text = f"p50 {gaps['warm'].p50_ms:.2f}, p99 {gaps['warm'].p99_ms:.2f} ms"
    lines.add(f"{effort.bystanders} requests decode while warm ones arrive", text)
    for name in ("overlapped", "pipelined"):
        ratio = gaps[name].p99_ms / gaps["warm"].p99_ms
        lines.at_most(f"p99 of their gaps while cold ones do, {name} ÷ warm", ratio, _ITL_TARGET)
    gaps["alone"] = Gaps.of(_decode_gaps_ms(subject, context))
    gaps["link held"] = Gaps.of(_held_gaps_ms(subject, link, adapter, context))
    ratio = gaps["link held"].p99_ms / gaps["alone"].p99_ms
    lines.at_most("p99 of their gaps while the link is held ÷ alone", ratio, _ITL_TARGET)
    return gaps


def _held_gaps_ms(subject: MeasuredModel, link: HeldLink, adapter: HostAdapter, context: int) -> list[float]:
    """Returns the gaps between tokens while an adapter's copy waits from the first to the last iteration."""
    link.hold()
    loading = subject.session.start_load(adapter, _SLOT, group_ends(adapter.spec))
    try:
        return _decode_gaps_ms(subject, context)
    finally:
        link.release()
        wait_for_load(loading)
        subject.backend.unload_adapter(_SLOT)


def _decode_gaps_ms(subject: MeasuredModel, context: int) -> list[float]:
    """Returns the gaps between tokens, with two iterations in flight."""
    decodes = _decodes(subject, context)
    session, turns = subject.session, subject.setup.effort.decodes * subject.setup.effort.arrivals
    session.launch(decodes)
    received_s = []
    for _ in range(turns):
        session.launch(decodes)
        received_s.append(session.next().received_s)
    received_s.append(session.next().received_s)
    return [1000 * gap for gap in np.diff(received_s)]


def _decodes(subject: MeasuredModel, context: int) -> Batch:
    """Returns an iteration of all requests that decode, at `context`."""
    slots = range(subject.setup.effort.bystanders)
    return Batch((), (), tuple(ScheduledRow(slot, context, 1, 0, samples=True) for slot in slots))


def _gaps_ms(subject: MeasuredModel, adapter: HostAdapter, context: int, mode: str) -> list[float]:
    """Returns the gaps between tokens while new requests arrive one by one, several iterations apart.

    Two iterations are always in flight. With `overlapped` a prompt joins the batch when its adapter is loaded; with
    `pipelined` it joins at once and its layers wait for the adapter's layers.
    """
    effort = subject.setup.effort
    decodes = _decodes(subject, context)
    newcomer, spacing = effort.bystanders, effort.decodes // 2 + 1
    count = effort.cold_prompts[len(effort.cold_prompts) // 2]
    if mode == "warm":
        wait_for_load(subject.session.start_load(adapter, _SLOT))
    session, received_s, started = subject.session, [], 0
    loading = None
    session.launch(decodes)
    for turn in range(spacing * effort.arrivals):
        if turn % spacing == 0 and mode != "warm":
            loading = session.start_load(adapter, _SLOT, group_ends(adapter.spec))
        joins = turn % spacing == 0 if mode != "overlapped" else loading is not None and not loading.empty()
        if joins:
            prompt = subject.prompt_batch(count, _SLOT, newcomer)
            session.launch(Batch(prompt.starts, prompt.grants, (*decodes.rows, *prompt.rows)))
            started += 1
        else:
            session.launch(decodes)
        received_s.append(session.next().received_s)
        has_ended = turn % spacing == spacing - 1
        if loading is not None and (has_ended or (joins and mode == "overlapped")):
            wait_for_load(loading)
            subject.backend.unload_adapter(_SLOT)
            loading = None
    received_s.append(session.next().received_s)
    if mode == "warm":
        subject.backend.unload_adapter(_SLOT)
    return [1000 * gap for gap in np.diff(received_s)]
