"""What the engine tells of itself: events as they happen, and its state at one moment. Level 3."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from caraserve.adapters.residency import Residency
from caraserve.line import Line, Open
from caraserve.request import Finish


class Metrics(Protocol):
    """What the engine reports as it happens; `metrics.py` counts it."""

    def observe_iteration(self, num_tokens: int, ms: float) -> None: ...
    def observe_first_token(self, seconds: float) -> None: ...
    def observe_token_gap(self, seconds: float) -> None: ...
    def observe_finish(self, finish: Finish) -> None: ...
    def observe_preemption(self) -> None: ...


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
            kv_total_blocks=line.pool.num_blocks,
            running_adapters=_names(line.running),
            waiting_adapters=_names([*line.waiting, *line.loading]),
            device_adapters=tuple(sorted(name for version in residency.on_device() for name in version.names)),
            host_adapters=tuple(name for version in reversed(residency.in_host()) for name in sorted(version.names)),
            draining=draining,
        )


def _names(opened: Iterable[Open]) -> tuple[str, ...]:
    return tuple(sorted({entry.request.asked.adapter for entry in opened if entry.request.asked.adapter}))
