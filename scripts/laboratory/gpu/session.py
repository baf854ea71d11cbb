"""A session that runs batches known in advance on a backend, without an engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from caraserve.core.backend import Backend
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, BlockGrant, ScheduledRow, SlotSampling, SlotStart, StepResult
from caraserve.core.lora_layout import HostAdapter
from caraserve.errors import BackendFailed
from caraserve.profiling.microbench import wait_for
from caraserve.util.units import ceil_div
from scripts.laboratory.gpu.results import WrongResult

_PATIENCE_S = 60.0  # a result that takes longer means that the device hangs


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request in its own slot. `adapter` is the slot of its adapter."""

    slot: int
    token_ids: tuple[int, ...]
    adapter: int = BASE_ADAPTER_SLOT


@dataclass(frozen=True, slots=True)
class TimedResult:
    """The result of a batch, and the time when it was received, in s of the monotonic clock."""

    result: StepResult
    received_s: float


class Session:
    """Runs batches on a backend; every request slot has fixed KV blocks for up to `context` tokens."""

    def __init__(self, backend: Backend, context: int) -> None:
        self.backend, self.context = backend, context
        self._blocks_each = ceil_div(context + 1, backend.limits.block_tokens)
        self._ended: SimpleQueue[tuple[StepResult | Exception, float]] = SimpleQueue()

    def grow_kv(self, slots: int) -> None:
        """Grows the KV cache to `slots` requests if KV blocks and adapters share the backend's memory."""
        if self.backend.limits.shared is not None:
            grown: SimpleQueue[Exception | None] = SimpleQueue()
            self.backend.resize_kv(slots * self._blocks_each, grown.put)
            if (error := wait_for(grown, _PATIENCE_S)) is not None:
                raise BackendFailed(f"the KV cache could not grow: {error}")

    def load(self, adapter: HostAdapter, slot: int, group_ends: Sequence[int] = ()) -> float:
        """Copies an adapter to a slot; returns the time until it was complete, in s."""
        started_s = time.monotonic()
        wait_for_load(self.start_load(adapter, slot, group_ends))
        return time.monotonic() - started_s

    def start_load(
        self, adapter: HostAdapter, slot: int, group_ends: Sequence[int] = ()
    ) -> "SimpleQueue[Exception | None]":
        """Starts a copy and returns a queue that receives None when it is complete, or the error."""
        done: SimpleQueue[Exception | None] = SimpleQueue()
        self.backend.load_adapter(adapter, slot, done.put, group_ends)
        return done

    def launch(self, plan: Batch) -> None:
        """Launches a batch and returns at once; `next` returns its result."""
        self.backend.launch(plan, lambda result: self._ended.put((result, time.monotonic())))

    def next(self) -> TimedResult:
        """Waits for the next batch that ends. Raises BackendFailed if it failed or does not end."""
        result, received_s = wait_for(self._ended, _PATIENCE_S)
        if isinstance(result, Exception):
            raise BackendFailed(f"an iteration failed: {result}")
        return TimedResult(result, received_s)

    def run(self, *plans: Batch) -> list[TimedResult]:
        """Launches all batches at once and returns their results in order."""
        for plan in plans:
            self.launch(plan)
        return [self.next() for _ in plans]

    def started(self, prompts: Sequence[Prompt], rows: Sequence[ScheduledRow], *, is_side_batch: bool = False) -> Batch:
        """Returns a batch that starts these requests, with all KV blocks of their slots, and computes these rows."""
        starts, grants = [], []
        for prompt in prompts:
            starts.append(SlotStart(prompt.slot, prompt.token_ids, SlotSampling.greedy(len(prompt.token_ids))))
            first = prompt.slot * self._blocks_each
            grants.append(BlockGrant(prompt.slot, 0, tuple(range(first, first + self._blocks_each))))
        return Batch(tuple(starts), tuple(grants), tuple(rows), is_side_batch=is_side_batch)

    def serve(self, prompts: Sequence[Prompt], new_tokens: int, chunk: int) -> list[list[int]]:
        """Serves all requests together: prefill in chunks of `chunk` tokens, then decode. Returns their new tokens."""
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
    """Returns a prompt of `count` token ids, always the same for equal arguments."""
    return tuple((17 * index * index + 31 * salt + 7 * index + 1) % vocab for index in range(count))


def wait_for_load(done: "SimpleQueue[Exception | None]") -> None:
    """Waits until a load is complete. Raises BackendFailed when the adapter could not be copied."""
    if (error := wait_for(done, _PATIENCE_S)) is not None:
        raise BackendFailed(f"an adapter could not be copied: {error}")
