"""One iteration as a value: all that passes between the loop and a backend.

`scheduler.py` makes a `Batch`; `Backend.launch` takes it; the `StepResult` comes back by callback. Everything in a
plan is applied by the backend in launch order, so a plan may be built while the one before it is still running.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from caraserve.core.request import TokenLogprob

BASE_ADAPTER_SLOT = 0  # the adapter slot of the base model: rank 0 everywhere


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A slice of one request: positions [start, start + count) of the tokens in `slot`.

    `assist`: CPU workers may compute the LoRA of layers whose weights have not arrived on the device yet; otherwise the
    iteration waits for them. `samples`: a token for position start + count is drawn and stored in the slot's history.
    `prompt_logprobs`: how many alternatives to report for each of the positions (start, start + count] that lie inside
    the prompt.
    """

    slot: int
    start: int
    count: int
    adapter_slot: int
    samples: bool
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    assist: bool = False


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How tokens of one slot are chosen; set when a request takes the slot. `top_k` 0 means off."""

    prompt_tokens: int
    seed: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    min_tokens: int
    end_ids: tuple[int, ...]  # banned while fewer than min_tokens have been sampled
    logit_bias: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A request takes a slot: its tokens so far and how to sample."""

    slot: int
    token_ids: tuple[int, ...]
    sampling: SlotSampling


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """KV blocks for block indices [first, first + len(blocks)) of a slot."""

    slot: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over a mixed batch. Rows are ordered by adapter slot; at most one row per slot.

    `merged`: the adapter slot that all rows have; the pass is to run without LoRA kernels, over base weights into which
    this adapter is merged. Its weights have all arrived.

    `aside`: the one row is a prompt that CPU workers help with (`Limits.aside_plans`), or whose adapter is not all in
    host memory (`Limits.streamed_plans`): other plans pass it, it ends when it ends, and until then its slot, its
    blocks and its adapter are not to be touched.
    """

    starts: tuple[SlotStart, ...]
    grants: tuple[BlockGrant, ...]
    rows: tuple[ScheduledRow, ...]
    merged: int | None = None
    aside: bool = False

    def __post_init__(self) -> None:
        if self.aside and (len(self.rows) != 1 or self.merged is not None):
            raise AssertionError("aside goes one row alone")
        if self.merged is None:
            return
        if self.merged == BASE_ADAPTER_SLOT or any(row.adapter_slot != self.merged for row in self.rows):
            raise AssertionError(f"adapter slot {self.merged} cannot be merged for rows of other slots")

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row gave: the token sampled (None if the row does not sample), scores where asked for.

    `cpu_layers`: layers whose LoRA was computed by CPU workers, the adapter's weights not having arrived; `waited_ms`:
    time for which the row, and in an iteration all others with it, stood still until weights of its adapter arrived.
    `void`: nothing was computed, for the CPU workers have failed, or layers have not come or were no longer waited for;
    the row is to be launched again, without help. `is_finite`: False if a logit of the row is infinite or not a number;
    the row has no token and no scores then.
    """

    token_id: int | None
    scored: TokenLogprob | None = None
    prompt_scored: tuple[TokenLogprob, ...] = ()
    cpu_layers: int = 0
    waited_ms: float = 0.0
    void: bool = False
    is_finite: bool = True


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one plan, row by row in the plan's order; times are the engine's monotonic clock."""

    rows: tuple[RowResult, ...]
    started_s: float
    done_s: float

    def interruptions_ms(self, rows: Sequence[ScheduledRow]) -> list[float]:
        """For how long each of the plan's rows stood still until weights of other rows' adapters arrived."""
        waits_ms = {row.adapter_slot: found.waited_ms for row, found in zip(rows, self.rows, strict=True)}
        all_ms, took_ms = sum(waits_ms.values()), 1000 * (self.done_s - self.started_s)
        # On a GPU the waits for several adapters may overlap: their sum is more than the iteration took.
        return [max(0.0, min(all_ms, took_ms) - waits_ms[row.adapter_slot]) for row in rows]


class DeviceLost(Exception):
    """In a result's place: the device has failed for good, and nothing that is launched from now on will run."""
