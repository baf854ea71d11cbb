"""Stage `handover`: the prefill of prompts whose LoRA CPU workers compute in every layer, with the server's hand-over
and with explicit synchronisation (Toppings' figure 10, CaraServe's 16).

Both launch kernel by kernel, as the papers do. The link is held, so that no layer's weights arrive.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from caraserve.errors import BackendFailed
from caraserve.gpu.assist.lane import chunk_ends
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.driver.launch import Kernels, Launch
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from scripts.laboratory.gpu.backends import DTYPE
from scripts.laboratory.gpu.cold import group_ends
from scripts.laboratory.gpu.held_link import HeldLink
from scripts.laboratory.gpu.measured_model import MeasuredModel, measured_model
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult
from scripts.laboratory.gpu.session import wait_for_load
from scripts.laboratory.gpu.setup import CheckSetup
from scripts.laboratory.gpu.warm import NOTHING_ARRIVES

_HANDS_OVER, _AWAITS = "handoff_publish", "handoff_wait"


class ExplicitSync:
    """Launches raw kernels for a backend, with explicit synchronisation while it is switched on.

    Only for measurements, and for passes that are launched kernel by kernel: a graph launches none of these kernels.
    """

    def __init__(self, kernels: Kernels, driver: Driver) -> None:
        self._kernels, self._driver = kernels, driver
        self._event = driver.create_event()
        self._is_on = False
        self.waits = 0  # of the host, so far

    @property
    def multiprocessors(self) -> int:
        """Number of the device's multiprocessors."""
        return self._kernels.multiprocessors

    @contextmanager
    def switched_on(self) -> Iterator[None]:
        """Synchronises explicitly within the block. No pass may be in flight at its start and end."""
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def launch(self, launch: Launch, stream: Stream) -> None:
        """Issues a kernel; while switched on, waits for the stream before x is handed over and after an answer."""
        if self._is_on and launch.kernel == _HANDS_OVER:
            self._wait_for(stream)
        self._kernels.launch(launch, stream)
        if self._is_on and launch.kernel == _AWAITS:
            self._wait_for(stream)

    def _wait_for(self, stream: Stream) -> None:
        """Waits until a stream has run everything issued on it. Spins, as PyTorch does: a thread that sleeps on an
        event wakes tens of µs late."""
        self.waits += 1
        self._driver.record(self._event, stream)
        while not self._driver.is_done(self._event):
            pass


_RANK, _SLOT = 64, 1
_WORKERS, _SLICE_TOKENS = 8, 16
_BIRTH_S = 60.0
_WAITS_OF_A_HAND_OFF = 2  # of the host, with explicit synchronisation


@dataclass(frozen=True, slots=True)
class HandOverPoint:
    """Median times from the launch of a prompt to its first token."""

    tokens: int
    sync_free_ms: float
    explicit_ms: float

    @property
    def ratio(self) -> float:
        """Time with explicit synchronisation ÷ without."""
        return self.explicit_ms / self.sync_free_ms


@dataclass(frozen=True, slots=True)
class HandOverFigures:
    """All points. The adapter has q, k and v; a worker computes up to `slice_tokens` of a chunk's hand-off."""

    rank: int
    workers: int
    slice_tokens: int
    chunk_tokens: int
    points: tuple[HandOverPoint, ...]


@dataclass(frozen=True, slots=True)
class _Prefill:
    ms: float
    token_id: int | None


def handover(setup: CheckSetup) -> StageResult[HandOverFigures]:
    """Times both ways in turn. Raises WrongResult if their tokens differ, BackendFailed if workers do not compute every
    layer."""
    effort, lines = setup.effort, Lines()
    opened = setup.open(DTYPE)[0]
    link, explicit = HeldLink(opened.driver), ExplicitSync(opened.kernels, opened.driver)
    device = replace(opened, driver=link.driver, kernels=explicit)
    without_graphs = replace(setup, effort=replace(effort, graph_bytes=0))
    longest = max(effort.handover_prompts)
    with measured_model(without_graphs, 1, longest, 2, workers=_WORKERS, device=device) as subject:
        subject.session.grow_kv(1)
        subject.backend.start_workers(lambda rank: _SLICE_TOKENS)
        subject.backend.use(NOTHING_ARRIVES, slice_tokens=_SLICE_TOKENS)
        if not subject.backend.workers.await_all(_BIRTH_S):
            raise BackendFailed("the CPU LoRA workers are not there")
        points = _points(setup, subject, link, explicit)
        workers = len(subject.backend.workers)
    link.close()
    for point in points:
        text = f"{point.sync_free_ms:.2f} ms sync-free, {point.explicit_ms:.2f} ms with explicit synchronisation"
        lines.add(f"prefill of {point.tokens} tokens with CPU workers", text)
        lines.at_least(f"… of {point.tokens} tokens, explicit ÷ sync-free", point.ratio, 1.0)
    return StageResult(HandOverFigures(_RANK, workers, _SLICE_TOKENS, ASSISTED_CHUNK_TOKENS, points), lines.all)


def _points(
    setup: CheckSetup, subject: MeasuredModel, link: HeldLink, explicit: ExplicitSync
) -> tuple[HandOverPoint, ...]:
    adapter, prompts = subject.adapter(_RANK, "qkv"), setup.effort.handover_prompts
    if adapter is None:
        raise BackendFailed("the host tier is too small for an adapter")
    for count in prompts:  # with the link open: a kernel that is loaded now may wait for streams that wait
        loading = subject.session.start_load(adapter, _SLOT)
        subject.session.run(subject.prompt_batch(count, _SLOT, 0, is_side_batch=True))
        wait_for_load(loading)
        subject.backend.unload_adapter(_SLOT)
    link.hold()
    loading = subject.session.start_load(adapter, _SLOT, group_ends(adapter.spec))
    try:
        return tuple(_point(setup, subject, explicit, count) for count in prompts)
    finally:
        link.release()
        wait_for_load(loading)


def _point(setup: CheckSetup, subject: MeasuredModel, explicit: ExplicitSync, count: int) -> HandOverPoint:
    """Times prompts of one length, both ways in turn, while there is time."""
    sync_free, explicit_ones, before = list[_Prefill](), list[_Prefill](), explicit.waits
    for _ in range(setup.effort.handover_rounds):
        if explicit_ones and setup.left_s < 0:
            break
        sync_free.append(_prefill(subject, count))
        with explicit.switched_on():
            explicit_ones.append(_prefill(subject, count))
    token_ids = {each.token_id for each in (*sync_free, *explicit_ones)}
    if len(token_ids) > 1:
        raise WrongResult(f"{count} tokens: the first token differs with the hand-over, {token_ids}")
    hand_offs = len(subject.plan.layers) * len(list(chunk_ends(0, count))) * len(explicit_ones)
    if (waits := explicit.waits - before) != _WAITS_OF_A_HAND_OFF * hand_offs:
        raise BackendFailed(f"the host waited {waits} times in {hand_offs} hand-offs: kernels were launched by a graph")
    return HandOverPoint(count, median(each.ms for each in sync_free), median(each.ms for each in explicit_ones))


def _prefill(subject: MeasuredModel, count: int) -> _Prefill:
    (ended,) = subject.session.run(subject.prompt_batch(count, _SLOT, 0, is_side_batch=True))
    (made,) = ended.result.rows
    if made.needs_retry or made.cpu_layers < len(subject.plan.layers):
        layers = f"{made.cpu_layers} of {len(subject.plan.layers)} layers"
        raise BackendFailed(f"CPU workers computed {layers} of a prompt of {count} tokens whose weights do not arrive")
    return _Prefill(1000 * (ended.result.done_s - ended.result.started_s), made.token_id)
