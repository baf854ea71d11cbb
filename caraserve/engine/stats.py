"""What the engine tells of itself: events as they happen, and its state at one moment. Level 3."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from caraserve.core.backend import Limits
from caraserve.core.batch import Row
from caraserve.core.request import Finish
from caraserve.engine.active_request import Open
from caraserve.engine.queues import Line
from caraserve.lora.adapter import Version
from caraserve.lora.catalog import Catalog
from caraserve.lora.manager import Residency

Watch: TypeAlias = Callable[[Sequence[tuple[Open, Row]], float], None]  # told an iteration's rows and its ms


class Metrics(Protocol):
    """What the engine reports as it happens; `metrics.py` counts it."""

    def observe_iteration(self, num_tokens: int, ms: float) -> None: ...
    def observe_first_token(self, seconds: float) -> None: ...
    def observe_token_gap(self, seconds: float) -> None: ...
    def observe_finish(self, finish: Finish) -> None: ...
    def observe_preemption(self) -> None: ...
    def observe_choice(self, choice: str, predicted_ms: float, observed_ms: float) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine at one moment."""

    running: int
    waiting: int
    kv_used_blocks: int
    kv_total_blocks: int
    running_adapters: tuple[str, ...]
    waiting_adapters: tuple[str, ...]
    device_adapters: tuple[str, ...]
    host_adapters: tuple[str, ...]  # the most recently used first
    draining: bool

    @classmethod
    def of(cls, line: Line, residency: Residency, *, draining: bool) -> "EngineSnapshot":
        """The state that metrics and the page show."""
        return cls(
            running=len(line.running),
            waiting=len(line.waiting) + len(line.loading),
            kv_used_blocks=line.pool.used,
            kv_total_blocks=residency.room.most_blocks,
            running_adapters=_names(line.running),
            waiting_adapters=_names([*line.waiting, *line.loading]),
            device_adapters=tuple(sorted(name for version in residency.on_device() for name in version.names)),
            host_adapters=tuple(name for version in reversed(residency.in_host()) for name in sorted(version.names)),
            draining=draining,
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """What the engine has to do, as the sums from which its next iterations can be predicted."""

    running: int
    queued: int
    ranks: Mapping[int, int]  # rank → requests, running and queued; the base model's have rank 0
    queued_tokens: int  # of prompts not yet prefilled
    queued_token_ranks: int  # Σ tokens · rank of them
    kv_tokens: int  # that fit into memory
    kv_free_tokens: int  # of them, after what the queued requests will take
    queue_room: int  # requests that it takes before it refuses

    @classmethod
    def of(cls, line: Line, catalog: Catalog, limits: Limits, max_queue: int, response_tokens: float) -> "Workload":
        """`response_tokens`: expected of an answer. A few tenths of a microsecond for each open request."""
        counts: dict[Version | None, int] = {}
        tokens: dict[Version | None, int] = {}
        for opened in (*line.waiting, *line.loading):
            counts[opened.version] = counts.get(opened.version, 0) + 1
            tokens[opened.version] = tokens.get(opened.version, 0) + opened.request.prompt_tokens
        queued = sum(counts.values())
        for opened in line.running:
            counts[opened.version] = counts.get(opened.version, 0) + 1
            left = opened.request.prompt_tokens - opened.request.computed
            tokens[opened.version] = tokens.get(opened.version, 0) + max(0, left)
        ranks: dict[int, int] = {}
        token_ranks = 0
        for version, count in counts.items():
            rank = rank_of(version, catalog)
            ranks[rank] = ranks.get(rank, 0) + count
            token_ranks += rank * tokens[version]
        all_tokens = sum(tokens.values())
        residency = catalog.residency
        free_blocks = line.pool.available + residency.device.growable()
        return cls(
            running=len(line.running),
            queued=queued,
            ranks=ranks,
            queued_tokens=all_tokens,
            queued_token_ranks=token_ranks,
            kv_tokens=residency.room.most_blocks * limits.block_tokens,
            kv_free_tokens=free_blocks * limits.block_tokens - all_tokens - round(queued * response_tokens),
            queue_room=max(0, max_queue - len(line.waiting)),
        )


def rank_of(version: Version | None, catalog: Catalog) -> int:
    """An adapter version's largest rank; 0 for the base model."""
    if version is None:
        return 0
    if version.spec is not None:
        return version.spec.rank
    return next((info.rank for info in map(catalog.find, version.names) if info is not None), 0)


def _names(opened: Iterable[Open]) -> tuple[str, ...]:
    return tuple(sorted({entry.request.asked.adapter for entry in opened if entry.request.asked.adapter}))
