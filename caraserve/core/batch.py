"""One forward pass as a value: the `Batch` that the engine launches and the `StepResult` that comes back.

`Backend.launch` takes a `Batch` and returns its `StepResult` by callback. A backend applies batches in launch order, so
a batch may be built while the one before it is still running. What exists for each row of an iteration is a `Struct`:
making one takes 0.3 µs, a frozen dataclass 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from caraserve.core.request import TokenLogprob
from caraserve.errors import CaraServeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from caraserve.core.grammar import TokenMatcher  # imports numpy, which the look for a device does not need

BASE_ADAPTER_SLOT = 0  # the adapter slot of the base model: rank 0 everywhere


class ScheduledRow(Struct, frozen=True):
    """A slice of one request: positions [start, start + count) of the tokens in `slot`.

    `assist`: CPU workers may compute the LoRA of layers whose weights have not arrived on the device yet; otherwise the
    iteration waits for them. `samples`: a token for position start + count is drawn and stored in the slot's history.
    `drafts`: guesses of the tokens at positions [start + 1, start + count), of a row that samples and has one known
    token. A token is then drawn after each position, and those up to the first that differs from its guess are the
    row's; the backend stores them in the history, and what it wrote for the positions after them is void.
    `embeds`: the last token's hidden state after the final norm is returned, with `averages` the sum of all tokens'; a
    row cannot sample and embed.
    `prompt_logprobs`: how many alternatives to report for each of the positions (start, start + count] that lie inside
    the prompt. `matcher`: structured output; only a token that it allows is drawn, and the backend appends the token.
    """

    slot: int
    start: int
    count: int
    adapter_slot: int
    samples: bool
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    assist: bool = False
    embeds: bool = False
    averages: bool = False
    matcher: "TokenMatcher | None" = None  # of a row that samples, without drafts
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """The parameters by which tokens of a slot are chosen; set when a request takes the slot. `top_k` 0 means off."""

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

    @classmethod
    def greedy(cls, prompt_tokens: int) -> Self:
        """Returns the parameters of plain greedy decoding: temperature 0 and nothing that changes the logits."""
        return cls(prompt_tokens, 0, 0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, 0, (), ())


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A request that takes a slot: its tokens so far, and how to sample. A token -1 - i is vector i of `prompt_embeds`,
    float32 [vectors, hidden]."""

    slot: int
    token_ids: tuple[int, ...]
    sampling: SlotSampling
    prompt_embeds: "NDArray[np.float32] | None" = None


@dataclass(frozen=True, slots=True)
class BlockGrant:
    """KV blocks that a slot's request gets, for the block indices [first, first + len(blocks))."""

    slot: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over a mixed batch. Rows are ordered by adapter slot; at most one row per slot.

    `merged`: the adapter slot of all rows; the pass runs without LoRA kernels, on base weights into which this adapter
    is merged. Its weights have all arrived.

    `is_side_batch`: an assisted prefill (`Limits.assisted_batches`) or a streamed prefill (`Limits.streamed_batches`),
    which has one row. Later batches overtake it. Until it ends, its slot, blocks and adapter must stay as they are.
    """

    starts: tuple[SlotStart, ...]
    grants: tuple[BlockGrant, ...]
    rows: tuple[ScheduledRow, ...]
    merged: int | None = None
    is_side_batch: bool = False

    def __post_init__(self) -> None:
        if self.is_side_batch and (len(self.rows) != 1 or self.merged is not None):
            raise AssertionError("a side batch has one row and no merged adapter")
        if self.merged is None:
            return
        if self.merged == BASE_ADAPTER_SLOT or any(row.adapter_slot != self.merged for row in self.rows):
            raise AssertionError(f"adapter slot {self.merged} cannot be merged for rows of other slots")

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


class RowResult(Struct, frozen=True):
    """The result of one row: the tokens sampled, one or, with drafts, several; and the scores that it requested, one
    for each of them if any. A row that does not sample has neither.

    `cpu_layers`: layers whose LoRA CPU workers computed because the weights had not arrived. `waited_ms`: time for
    which the row, and in an iteration all other rows with it, waited for weights of its adapter. `cpu_lora_ms`: time
    that the workers spent on those layers, added over workers.
    `needs_retry`: nothing was computed, because CPU workers failed, layers did not arrive, or the wait for them was
    cancelled. The row is to be launched again, without CPU workers. `is_finite`: False if a logit of the row's first
    token, or a number of its embedding, is infinite or not a number; the row has no token, no scores and no embedding
    then. `left_tokens`: so many tokens at the end of an assisted prefill were not computed, because all layers of the
    adapter have arrived; they are to be computed in iterations. `failure`: the request's grammar failed, and the row's
    token is undefined; or its adapter could not be copied, and the row, which is not finite then, was not computed.
    `embedding`: float32 [hidden], if the row embeds.
    """

    token_ids: tuple[int, ...] = ()
    scored: tuple[TokenLogprob, ...] = ()
    prompt_scored: tuple[TokenLogprob, ...] = ()
    cpu_layers: int = 0
    waited_ms: float = 0.0
    cpu_lora_ms: float = 0.0
    needs_retry: bool = False
    is_finite: bool = True
    left_tokens: int = 0
    failure: CaraServeError | None = None
    embedding: bytes | None = None

    @property
    def token_id(self) -> int | None:
        """The last token, or None if the row does not sample."""
        return self.token_ids[-1] if self.token_ids else None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one batch, row by row in the batch's order; times are the engine's monotonic clock, in seconds.

    `launched_s`: when the device had all that it needs to run the batch by itself, of iterations only. One that was
    launched after the one before it had ended has started then.
    """

    rows: tuple[RowResult, ...]
    started_s: float
    done_s: float
    launched_s: float | None = None

    @property
    def is_typical(self) -> bool:
        """Whether its time is that of its rows alone, without waits for weights or for CPU workers."""
        return not any(row.waited_ms or row.cpu_layers for row in self.rows)

    def interruptions_ms(self, rows: Sequence[ScheduledRow]) -> list[float]:
        """Returns for each of the batch's rows how many ms it waited for weights of other rows' adapters."""
        waits_ms = {row.adapter_slot: found.waited_ms for row, found in zip(rows, self.rows, strict=True)}
        all_ms, took_ms = sum(waits_ms.values()), 1000 * (self.done_s - self.started_s)
        # On a GPU the waits for several adapters may overlap, so their sum may exceed the iteration's time.
        return [max(0.0, min(all_ms, took_ms) - waits_ms[row.adapter_slot]) for row in rows]


class DeviceLost(Exception):
    """The error of a batch when the device has failed permanently: no later batch will run."""
