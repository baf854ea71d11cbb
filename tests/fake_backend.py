"""A backend whose model is a hash: a token depends on all tokens before it, on the adapter's digest, and nothing else.

A KV entry is a hash of the adapter bound to the row's slot, the token at its position, and the entry before it *as
found through the block table*. A block used by two requests, a prefix shared across adapters, a stale adapter or a
badly resumed request therefore gives wrong tokens, which `expected` computes without blocks.
No operation ends by itself: the test chooses the one that ends next, so it can try every order.

Where memory is shared, the total of KV blocks and adapters is checked, and a removed block loses its contents. A side
batch begins in the lane's order, but ends when the test ends it, and reads and writes only then: memory that was freed
too early causes wrong tokens. A streamed prefill can succeed only when its whole adapter has been downloaded, and
checks then that the image's bytes are still there."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, Batch, RowResult, ScheduledRow, StepResult
from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.core.request import TokenLogprob
from caraserve.tokenizer.detokenizer import Detokenizer
from caraserve.util.units import align_up
from tests.fake_images import BASE, adapter_key, is_there, is_whole

VOCAB_SIZE = 97
STALL_MS = 100.0  # part of an iteration's second, for each of its adapters whose weights are still arriving
_ROOT = 1


def expected(prompt: Sequence[int], digest: str | None, count: int) -> list[int]:
    """Returns the `count` tokens that follow `prompt`, computed without blocks, batches or slots."""
    tokens, entry, adapter = list(prompt), _ROOT, adapter_key(digest)
    for position in range(len(prompt) + count):
        if position == len(tokens):
            tokens.append(entry % VOCAB_SIZE)
        entry = hash((adapter, tokens[position], entry))
    return tokens[len(prompt) :]


def expected_embedding(prompt: Sequence[int], digest: str | None) -> bytes:
    """Returns the embedding of `prompt`: the hash from which its next token would be chosen."""
    entry, adapter = _ROOT, adapter_key(digest)
    for token in prompt:
        entry = hash((adapter, token, entry))
    return _embedding(entry)


def _embedding(entry: int) -> bytes:
    return entry.to_bytes(8, signed=True)


@dataclass
class Streamed:
    """An adapter that is copied while its layers are downloaded to host memory."""

    image: HostAdapter
    layers: int
    end: Callable[[Exception | None], None]
    is_cut: bool = False

    @property
    def is_whole(self) -> bool:
        return self.layers == len(self.image.spec.layer_ends)


@dataclass
class SideBatch:
    """A side batch that has begun."""

    row: ScheduledRow
    tokens: list[int]
    adapter: int
    began_s: float
    streamed: Streamed | None
    done: Callable[[StepResult | Exception], None]


@dataclass
class FakeBackend:
    """Runs its lane's jobs (batches, bindings) in launch order, one at each `step`.

    An iteration that reaches weights which have not arrived computes with them all the same, as a real one does after
    waiting. Unless `layerwise`, launching such an iteration is a fault.
    """

    limits: Limits
    layerwise: bool = False
    host_memory: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    lane: deque[Callable[[], None]] = field(default_factory=deque)
    copies: list[Callable[[bool], None]] = field(default_factory=list)  # beside the lane; each ends as one of its jobs
    resizes: list[Callable[[], None]] = field(default_factory=list)  # growths of the KV pool under way
    resize_failure: Exception | None = None  # ends every growth
    side_batches: list[SideBatch] = field(default_factory=list)  # begun; `end_side_batch` ends each
    arriving: set[int] = field(default_factory=set)  # slots
    streamed: dict[int, Streamed] = field(default_factory=dict)  # by adapter slot, until all layers are in host memory
    bound: dict[int, int] = field(default_factory=lambda: {BASE_ADAPTER_SLOT: BASE})
    launched: list[Batch] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # calls that a correct engine never makes
    fail_next: bool = False
    kv_blocks: int = 0  # usable
    kv_claimed: int = 0  # those that room is being made for included
    images: dict[int, HostAdapter] = field(default_factory=dict)  # by slot, as passed to `load_adapter`
    now_s: float = 0.0
    takes_s: Callable[[Batch], float] = lambda _: 1.0  # an iteration's time
    outcomes: Counter[str] = field(default_factory=Counter)  # of side batches
    _ended_s: float = 0.0  # when the last iteration ended
    _bound_streams: dict[int, Streamed] = field(default_factory=dict)  # by adapter slot
    _under_way: list[Batch] = field(default_factory=list)  # side batches, begun or not
    _history: dict[int, list[int]] = field(default_factory=dict)
    _prompt_tokens: dict[int, int] = field(default_factory=dict)
    _tables: dict[int, dict[int, int]] = field(default_factory=dict)
    _entries: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv_blocks = self.kv_claimed = self.limits.num_blocks

    def launch(self, plan: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        self.launched.append(plan)
        self._check_launched(plan)
        if plan.is_side_batch:
            self.lane.append(lambda: self._begin_side_batch(plan, done))
        else:
            launched_s = self.now_s
            self.lane.append(lambda: done(self._run(plan, launched_s)))

    def _check_launched(self, plan: Batch) -> None:
        """Checks the rules that a batch alone can break."""
        beyond = [block for grant in plan.grants for block in grant.blocks if block >= self.kv_blocks]
        if beyond:
            self.faults.append(f"blocks {beyond} are named of {self.kv_blocks}")
        if taken := {row.slot for row in plan.rows} & {other.rows[0].slot for other in self._under_way}:
            self.faults.append(f"slots {taken} are in a side batch")
        if plan.is_side_batch:
            self._under_way.append(plan)
            if len(self._under_way) > self.limits.assisted_batches + self.limits.streamed_batches:
                self.faults.append(f"{len(self._under_way)} side batches are under way")
        if any(row.assist for row in plan.rows) and self.limits.assisted_batches and not plan.is_side_batch:
            self.faults.append("workers are to help within an iteration")

    def _begin_side_batch(self, plan: Batch, done: Callable[[StepResult | Exception], None]) -> None:
        self._apply(plan)
        (row,) = plan.rows

        def settle(outcome: StepResult | Exception) -> None:
            self._under_way.remove(plan)
            done(outcome)

        streamed = self._bound_streams.get(row.adapter_slot)
        self.side_batches.append(
            SideBatch(row, self._history[row.slot], self.bound[row.adapter_slot], self.now_s, streamed, settle)
        )
        self._void(lambda side_batch: side_batch.streamed is not None and side_batch.streamed.is_cut)

    def may_end(self, side_batch: SideBatch) -> bool:
        """Returns whether all layers that a side batch waits for are in host memory."""
        return side_batch.streamed is None or side_batch.streamed.is_whole

    def _void(self, which: Callable[[SideBatch], bool]) -> None:
        for side_batch in [
            side_batch for side_batch in self.side_batches if which(side_batch) and not self.may_end(side_batch)
        ]:
            self.end_side_batch(self.side_batches.index(side_batch), "void")

    def end_side_batch(self, index: int, outcome: Literal["done", "left", "void", "failed"] = "done") -> None:
        """Ends a side batch that has begun. If it has no result, its blocks get undefined contents, and so do those of
        the second half of its tokens if these are "left" to iterations."""
        side_batch = self.side_batches.pop(index)
        row = side_batch.row
        self.outcomes[outcome] += 1
        if self._history[row.slot] is not side_batch.tokens or self.bound.get(row.adapter_slot) != side_batch.adapter:
            self.faults.append(f"{row} has lost its slot or its adapter")
        self.now_s += 1.0
        if outcome == "done":
            if not (self.may_end(side_batch) and is_there(self.images[row.adapter_slot])):
                self.faults.append(f"{row} has read layers that had not come")
            waited_ms = 1000 * (self.now_s - 1.0 - side_batch.began_s)
            result = structs.replace(self._run_row(row, in_side_batch=True), waited_ms=waited_ms)
            side_batch.done(StepResult((result,), side_batch.began_s, self.now_s))
            return
        done = row.count // 2 if outcome == "left" else 0
        for position in range(row.start + done, row.start + row.count):
            self._entries[self._place(row.slot, position)] = -position
        if outcome == "left":
            result = self._run_row(structs.replace(row, count=done, samples=False, embeds=False), in_side_batch=True)
            side_batch.done(self._result(self.now_s - 1.0, structs.replace(result, left_tokens=row.count - done)))
        elif outcome == "void":
            side_batch.done(self._result(self.now_s - 1.0, RowResult(needs_retry=True)))
        else:
            side_batch.done(RuntimeError("the lane failed"))

    def _result(self, began_s: float, *rows: RowResult) -> StepResult:
        return StepResult(rows, began_s, self.now_s)

    def resize_kv(self, blocks: int, done: Callable[[Exception | None], None]) -> None:
        if self.limits.shared is None or self.kv_claimed != self.kv_blocks:
            self.faults.append("KV blocks are asked for at the wrong time")
        self.kv_claimed = blocks
        self._check_memory()
        if blocks > self.kv_blocks:

            def granted() -> None:
                if self.resize_failure is None:
                    self.kv_blocks = blocks
                done(self.resize_failure)

            self.resizes.append(granted)
            return
        self.kv_blocks = blocks

        def lose() -> None:
            for place in [place for place in self._entries if place[0] >= blocks]:
                del self._entries[place]

        self.lane.append(lose)
        done(None)

    def _check_memory(self) -> None:
        shared = self.limits.shared
        if shared is None:
            return
        adapters = sum(align_up(image.spec.num_bytes, shared.granule_bytes) for image in self.images.values())
        if align_up(self.kv_claimed * shared.block_bytes, shared.granule_bytes) + adapters > shared.num_bytes:
            self.faults.append("KV blocks and adapters overlap")
        if align_up(shared.least_blocks * shared.block_bytes, shared.granule_bytes) + adapters > shared.num_bytes:
            self.faults.append("adapters have taken the last KV blocks")
        if adapters > shared.adapter_bytes:
            self.faults.append("adapters are over their cap")

    def load_adapter(
        self,
        adapter: HostAdapter,
        slot: int,
        done: Callable[[Exception | None], None],
        group_ends: Sequence[int] = (),
        layers: int | None = None,
        first_layer: int = 0,
    ) -> None:
        self.images[slot] = adapter
        self._check_memory()
        if layers is not None and not 0 < layers < len(adapter.spec.layer_ends):
            self.faults.append(f"{layers} layers are announced")

        streamed = None if layers is None else Streamed(adapter, layers, lambda failure: end(failure))
        digest = adapter.spec.digest if streamed is not None or is_whole(adapter) else "of other bytes"

        def bind() -> None:
            if streamed is not None:
                self._bound_streams[slot] = streamed
            if slot in self.bound:
                self.faults.append(f"adapter slot {slot} is bound twice")
            self.bound[slot] = adapter_key(digest)
            self.arriving.add(slot)

        def end(failure: Exception | None) -> None:
            self.arriving.discard(slot)
            done(failure)

        self.lane.append(bind)
        if streamed is None:
            self._may_copy(end)
        else:
            self.streamed[slot] = streamed

    def _may_copy(self, end: Callable[[Exception | None], None]) -> None:
        failure = RuntimeError("the copy failed")
        self.copies.append(lambda copied: self.lane.append(lambda: end(None if copied else failure)))

    def extend_load(self, slot: int, layers: int) -> None:
        streamed = self.streamed[slot]
        if layers <= streamed.layers:
            self.faults.append(f"{layers} layers are announced after {streamed.layers}")
        streamed.layers = layers
        if streamed.is_whole:
            del self.streamed[slot]
            self._may_copy(streamed.end)

    def fail_streamed(self, slot: int) -> None:
        """Fails the copy of a streamed adapter, of which more layers may still be downloaded."""
        streamed = self.streamed[slot]
        end, streamed.end = streamed.end, lambda failure: None
        self.lane.append(lambda: end(RuntimeError("the copy failed")))

    def break_load(self, slot: int, cause: Exception) -> None:
        streamed = self.streamed.pop(slot)
        streamed.is_cut = True

        def end() -> None:
            self._void(lambda side_batch: side_batch.streamed is streamed)
            streamed.end(cause)

        self.lane.append(end)

    def recall(self, slot: int) -> None:
        self.lane.append(lambda: self._void(lambda side_batch: side_batch.row.slot == slot))

    def device_bytes(self, spec: AdapterSpec) -> int:
        return spec.num_bytes

    def release_vectors(self, slot: int) -> None:
        """Prompts have no vectors here."""

    def unload_adapter(self, slot: int) -> None:
        del self.images[slot]
        if self.streamed.pop(slot, None) is not None:
            self.faults.append(f"adapter slot {slot} is unloaded while its layers come")

        def unbind() -> None:
            self.arriving.discard(slot)
            self._bound_streams.pop(slot, None)
            if self.bound.pop(slot, None) is None:
                self.faults.append(f"adapter slot {slot} was not bound")

        self.lane.append(unbind)

    def close(self) -> None:
        while self.lane:
            self.step()

    def step(self) -> None:
        """Runs the lane's first job."""
        self.lane.popleft()()

    def _apply(self, plan: Batch) -> None:
        for start in plan.starts:
            self._history[start.slot] = list(start.token_ids)
            self._prompt_tokens[start.slot] = start.sampling.prompt_tokens
            self._tables[start.slot] = {}
        for grant in plan.grants:
            self._tables[grant.slot].update(enumerate(grant.blocks, grant.first))
        for row in plan.rows:
            if row.drafts:
                if row.start + 1 != len(self._history[row.slot]):
                    self.faults.append(f"{row} has drafts before its last token is known")
                self._history[row.slot] += row.drafts

    def _run(self, plan: Batch, launched_s: float) -> StepResult | Exception:
        self._apply(plan)
        if self.fail_next:
            self.fail_next = False
            for row in plan.rows:  # the blocks' contents are undefined after a failed iteration
                for position in range(row.start, row.start + row.count):
                    self._entries[self._place(row.slot, position)] = -position
                if row.samples:  # the next iteration, launched already, reads this token
                    self._history[row.slot] = [*self._history[row.slot][: row.start + row.count], 0]
            return RuntimeError("the device failed")
        self._check_merged(plan)
        began_s = max(launched_s, self._ended_s)
        self._ended_s = began_s + self.takes_s(plan)
        self.now_s = max(self.now_s, self._ended_s)
        return StepResult(tuple(map(self._run_row, plan.rows)), began_s, self._ended_s, launched_s)

    def _check_merged(self, plan: Batch) -> None:
        """Checks that merged weights are used only for rows of one adapter, which has arrived."""
        if plan.merged is None:
            return
        if plan.merged not in self.bound or plan.merged in self.arriving:
            self.faults.append(f"adapter slot {plan.merged} is merged, but its adapter is not there")
        if {row.adapter_slot for row in plan.rows} != {plan.merged}:
            self.faults.append(f"adapter slot {plan.merged} is merged for others' rows")

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        return self._tables[slot][position // self.limits.block_tokens], position % self.limits.block_tokens

    def _run_row(self, row: ScheduledRow, *, in_side_batch: bool = False) -> RowResult:
        history, end = self._history[row.slot], row.start + row.count
        if row.adapter_slot in self.arriving and not self.layerwise:
            self.faults.append(f"{row} names an adapter that has not arrived")
        if row.adapter_slot not in self.bound or end > len(history):
            self.faults.append(f"{row} names an unbound adapter or unknown tokens")
            return RowResult()
        streamed = self._bound_streams.get(row.adapter_slot)
        if not (in_side_batch or streamed is None or streamed.is_whole):
            self.faults.append(f"{row} would wait for layers that have not come")
        entry = self._entries[self._place(row.slot, row.start - 1)] if row.start else _ROOT
        prompt_scored, drawn = [], []
        for position in range(row.start, end):
            entry = hash((self.bound[row.adapter_slot], history[position], entry))
            self._entries[self._place(row.slot, position)] = entry
            drawn.append(entry)
            if row.prompt_logprobs is not None and position + 1 < self._prompt_tokens[row.slot]:
                prompt_scored.append(TokenLogprob(history[position + 1], float(-position - 1)))
        waited_ms = STALL_MS if row.adapter_slot in self.arriving else 0.0
        if not row.samples:
            embedding = _embedding(entry) if row.embeds else None
            return RowResult(prompt_scored=tuple(prompt_scored), waited_ms=waited_ms, embedding=embedding)
        chosen = [entry % VOCAB_SIZE for entry in drawn[-1 - len(row.drafts) :]]
        right = [token == draft for token, draft in zip(chosen, row.drafts, strict=False)]
        tokens = chosen[: [*right, False].index(False) + 1]
        history[end - len(row.drafts) :] = tokens
        return RowResult(tuple(tokens), prompt_scored=tuple(prompt_scored), waited_ms=waited_ms)


class FakeTokenizer:
    """A tokenizer whose tokens are letters."""

    vocab_size = VOCAB_SIZE
    default_sampling: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, eos_ids: frozenset[int] = frozenset()) -> None:
        self.eos_ids = eos_ids

    def detokenizer(
        self,
        prompt_ids: Sequence[int],
        *,
        stop: tuple[str, ...],
        include_stop: bool,
        skip_special_tokens: bool,
        kept_special_ids: frozenset[int],
    ) -> Detokenizer:
        return Detokenizer(letters, prompt_ids, stop=stop, include_stop=include_stop)


def letters(ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in ids)
