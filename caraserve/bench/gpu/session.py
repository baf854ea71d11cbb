"""A session that runs batches known in advance on a backend, without an engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from caraserve.bench.gpu.results import WrongResult
from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import BackendFailed
from caraserve.util.units import ceil_div

_T = TypeVar("_T")
_PATIENCE_S = 60.0  # for one answer; longer means that the device hangs


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request in a slot of its own. `adapter`: its slot."""

    slot: int
    token_ids: tuple[int, ...]
    adapter: int = BASE_ADAPTER_SLOT


@dataclass(frozen=True, slots=True)
class TimedResult:
    """A batch's result, and when it was received, by the monotonic clock."""

    result: StepResult
    received_s: float


class Session:
    """Every request slot has its own blocks, for contexts of at most `context` tokens."""

    def __init__(self, backend: Backend, context: int) -> None:
        self.backend, self.context = backend, context
        self._blocks_each = ceil_div(context + 1, backend.limits.block_tokens)
        self._ended: SimpleQueue[tuple[StepResult | Exception, float]] = SimpleQueue()

    def grow_kv(self, slots: int) -> None:
        """KV blocks for so many slots, where the backend shares memory among blocks and adapters."""
        if self.backend.limits.shared is not None:
            grown: SimpleQueue[None] = SimpleQueue()
            self.backend.resize_kv(slots * self._blocks_each, lambda: grown.put(None))
            wait_for(grown)

    def load(self, adapter: HostAdapter, slot: int, group_ends: Sequence[int] = ()) -> float:
        """Copies an adapter to a slot; the time until it was there in s."""
        started_s = time.monotonic()
        wait_for_load(self.start_load(adapter, slot, group_ends))
        return time.monotonic() - started_s

    def start_load(
        self, adapter: HostAdapter, slot: int, group_ends: Sequence[int] = ()
    ) -> "SimpleQueue[Exception | None]":
        """Asks for a copy and returns at once."""
        done: SimpleQueue[Exception | None] = SimpleQueue()
        self.backend.load_adapter(adapter, slot, done.put, group_ends)
        return done

    def launch(self, plan: Batch) -> None:
        """Returns at once; `next` has the outcome."""
        self.backend.launch(plan, lambda result: self._ended.put((result, time.monotonic())))

    def next(self) -> TimedResult:
        """The outcome of the next plan that ends. Raises BackendFailed."""
        result, received_s = wait_for(self._ended)
        if isinstance(result, Exception):
            raise BackendFailed(f"an iteration failed: {result}")
        return TimedResult(result, received_s)

    def run(self, *plans: Batch) -> list[TimedResult]:
        """All of them back to back."""
        for plan in plans:
            self.launch(plan)
        return [self.next() for _ in plans]

    def started(self, prompts: Sequence[Prompt], rows: Sequence[ScheduledRow], *, is_side_batch: bool = False) -> Batch:
        """A plan that begins with these requests; all blocks are granted at once."""
        starts, grants = [], []
        for prompt in prompts:
            starts.append(SlotStart(prompt.slot, prompt.token_ids, greedy(len(prompt.token_ids))))
            first = prompt.slot * self._blocks_each
            grants.append(BlockGrant(prompt.slot, 0, tuple(range(first, first + self._blocks_each))))
        return Batch(tuple(starts), tuple(grants), tuple(rows), is_side_batch=is_side_batch)

    def serve(self, prompts: Sequence[Prompt], new_tokens: int, chunk: int) -> list[list[int]]:
        """`new_tokens` for each request, all of them together, prompts in chunks of so many tokens."""
        ordered = sorted(prompts, key=lambda prompt: prompt.adapter)
        rows = [_rows(prompt, new_tokens, chunk) for prompt in ordered]
        plans = []
        for turn in range(max(map(len, rows))):
            now = tuple(each[turn] for each in rows if turn < len(each))
            plans.append(self.started(ordered, now) if turn == 0 else Batch((), (), now))
        found: dict[int, list[int]] = {prompt.slot: [] for prompt in prompts}
        for plan, ended in zip(plans, self.run(*plans), strict=True):
            for row, made in zip(plan.rows, ended.result.rows, strict=True):
                if row.samples:
                    if made.token_id is None:
                        raise WrongResult("a row that samples got no token")
                    found[row.slot].append(made.token_id)
        return [found[prompt.slot] for prompt in prompts]


def _rows(prompt: Prompt, new_tokens: int, chunk: int) -> list[ScheduledRow]:
    length = len(prompt.token_ids)
    rows = [
        ScheduledRow(prompt.slot, at, min(chunk, length - at), prompt.adapter, samples=at + chunk >= length)
        for at in range(0, length, chunk)
    ]
    return rows + [
        ScheduledRow(prompt.slot, length + index, 1, prompt.adapter, samples=True) for index in range(new_tokens - 1)
    ]


def tokens(count: int, vocab: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt."""
    return tuple((17 * index * index + 31 * salt + 7 * index + 1) % vocab for index in range(count))


def greedy(prompt_tokens: int) -> SlotSampling:
    """Always the likeliest token."""
    return SlotSampling.greedy(prompt_tokens)


def wait_for(queue: "SimpleQueue[_T]") -> _T:
    """Raises BackendFailed when nothing comes."""
    try:
        return queue.get(timeout=_PATIENCE_S)
    except Empty:
        raise BackendFailed(f"the device gave no answer within {_PATIENCE_S:.0f} s") from None


def wait_for_load(done: "SimpleQueue[Exception | None]") -> None:
    """Raises BackendFailed when an adapter could not be copied."""
    if (error := wait_for(done)) is not None:
        raise BackendFailed(f"an adapter could not be copied: {error}")
