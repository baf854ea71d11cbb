"""An unfinished request: its state, its text, its adapter and its prefix key.

`ActiveRequest` is the only writer of `core.request.Request`: each change of a request is one of its methods.

    waiting ─ wait_for_adapter ─ start ─ schedule, record_token … ─ finish
                                   └──── preempt: the request starts again and computes its tokens again
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from caraserve.core.backend import Limits
from caraserve.core.batch import BASE_ADAPTER_SLOT, RowResult, ScheduledRow
from caraserve.core.grammar import TokenMatcher
from caraserve.core.lora_layout import AdapterSpec
from caraserve.core.request import Finish, FinishReason, Phase, Request, TokenDelta, TokenLogprob
from caraserve.engine.prompt_lookup import PromptLookup
from caraserve.engine.token_stream import TokenStream
from caraserve.errors import CaraServeError
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.start_policy import ModeChoice
from caraserve.tokenizer.detokenizer import Detokenizer


class TokenText(NamedTuple):
    """The text that an output token adds, and the reasons if the request ends with it."""

    text: str
    reason: FinishReason | None
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends, and what its last delta has beside that: a text, tokens with their scores, an embedding."""

    reason: FinishReason
    stop_reason: str | int | None = None
    error: CaraServeError | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    embedding: bytes | None = None


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request from its submission to its end. Identity is the object."""

    request: Request
    stream: TokenStream
    detokenizer: Detokenizer
    adapter: Adapter | None  # None: the base model
    prefix_key: bytes = b""  # of the last KV block published
    published: int = 0  # KV blocks published
    reused: int = 0  # KV blocks found by their prefix when it last took a slot
    holds_adapter: bool = False  # whether `adapter` is acquired for it, since its admission
    pooled: NDArray[np.float64] | None = None  # the sum of the hidden states so far
    assist: bool = False  # whether CPU workers may compute layers of `adapter` that have not arrived
    in_side_batch: bool = False  # whether a side batch with it is under way
    waits_for_whole_adapter: bool = False  # whether it starts only when all of its adapter is in host memory
    choice: ModeChoice | None = None  # the start that mode `auto` has chosen for it
    matcher: TokenMatcher | None = None  # of its grammar, while it has a slot
    lookup: PromptLookup | None = None  # that guesses its tokens, once speculation has asked for it
    prompt_scored: int = 0  # prompt tokens whose scores were sent
    first_token_s: float | None = None
    last_token_s: float | None = None

    # --- state ---

    @property
    def is_finished(self) -> bool:
        return self.request.phase is Phase.FINISHED

    @property
    def spec(self) -> AdapterSpec | None:
        """The layout of its adapter; None: it has none, or the layout is not known yet."""
        return None if self.adapter is None else self.adapter.spec

    @property
    def may_be_merged(self) -> bool:
        """Whether its adapter may be merged into the base weights: these hold no factors and biases of outputs."""
        return self.spec is not None and not self.spec.has_vectors

    @property
    def adapter_slot(self) -> int:
        """Its entry of the device's adapter table for the next token: its adapter's, or 0 for the base model."""
        if self.adapter is None or self.request.computed < self.request.base_tokens:
            return BASE_ADAPTER_SLOT
        return self.adapter.slot

    @property
    def is_activated(self) -> bool:
        """Whether its adapter is an activated LoRA, before which the base model computes a part of the prompt."""
        return self.spec is not None and bool(self.spec.invocation)

    @property
    def needs_device_copy(self) -> bool:
        """Whether it starts only when its whole adapter is on the device: an adapter changes the embedding or the head
        there alone."""
        return self.spec is not None and bool(self.spec.vocabulary)

    @property
    def is_streamed(self) -> bool:
        """Whether its adapter is copied to the device while it is still being downloaded."""
        return self.adapter is not None and self.adapter.tier is AdapterTier.STREAMING

    @property
    def can_run(self) -> bool:
        """Whether it may be in an iteration: its adapter is on the device or being copied from host memory, and neither
        still being downloaded nor about to leave the device."""
        adapter = self.adapter
        return adapter is None or (adapter.tier in (AdapterTier.COPYING, AdapterTier.DEVICE) and adapter.takes_requests)

    def needs_side_batch(self, limits: Limits) -> bool:
        """Returns whether a running request is in a side batch, or must be in one next instead of an iteration."""
        if self.in_side_batch or not self.can_run:
            return True
        if not (limits.assisted_batches and self.assist and self.request.phase is Phase.PREFILL):
            return False
        return self.adapter is not None and self.adapter.tier is AdapterTier.COPYING

    # --- waiting, and taking a slot ---

    def wait_for_adapter(self, now_s: float) -> None:
        """Counts the time from now on as loading, unless the request was preempted or needs no adapter."""
        if self.request.phase is Phase.WAITING and self.adapter is not None:
            self.request.move_to(Phase.LOADING, now_s)

    def wait_for_whole_adapter(self) -> None:
        """Lets the request start only when all of its adapter is in host memory."""
        self.waits_for_whole_adapter = True
        if self.choice is not None and not self.choice.is_observed:
            self.choice = None  # its prediction was for a start before that

    def find_activation(self) -> None:
        """Finds the position from which its adapter, whose layout is known by now, is active."""
        if self.adapter is not None:
            assert self.adapter.spec is not None
            self.request.base_tokens = self.adapter.spec.active_from(self.request.inputs.prompt_ids)

    def start(
        self,
        slot: int,
        prefix: Sequence[int],
        prefix_key: bytes,
        block_tokens: int,
        now_s: float,
        matcher: TokenMatcher | None = None,
    ) -> None:
        """Records the slot, the KV blocks of the first tokens, the last one's `prefix_key`, and the matcher."""
        request, self.matcher = self.request, matcher
        request.slot = slot
        request.blocks += prefix
        request.computed = len(prefix) * block_tokens
        request.cached_tokens = max(request.cached_tokens, min(request.computed, request.prompt_tokens))
        self.prefix_key, self.published, self.reused = prefix_key, len(prefix), len(prefix)
        request.move_to(Phase.PREFILL, now_s)

    def release_slot(self) -> None:
        """Clears the slot and the KV blocks, which the caller has released, and the matcher."""
        self.request.slot, self.request.blocks, self.matcher = None, [], None

    def preempt(self, now_s: float) -> None:
        """Returns a running request to the state before its start: all its tokens are computed again."""
        self.release_slot()
        self.request.computed = 0
        self.request.move_to(Phase.PREEMPTED, now_s)

    # --- batches ---

    def schedule(self, row: ScheduledRow, blocks: Sequence[int]) -> None:
        """Counts the tokens of a launched row as computed. `blocks`: KV blocks granted for it."""
        self.request.blocks += blocks
        self.request.computed += row.count
        self.request.launched_outputs += row.samples + len(row.drafts)

    def reject_drafts(self, row: ScheduledRow, result: RowResult) -> None:
        """Uncounts the drafts of a row that turned out wrong, and the positions computed for them."""
        wrong = 1 + len(row.drafts) - len(result.token_ids)
        self.request.launched_outputs -= wrong
        if self.request.slot is not None:  # otherwise it starts again
            self.request.computed -= wrong

    def rollback(self, row: ScheduledRow, *, has_state: bool = False) -> None:
        """Uncounts a launched row that was not computed to its end. It is launched again, without CPU workers.
        `has_state`: the slot has a state that some layers have advanced already, so the request begins again."""
        self.request.computed = 0 if has_state else self.request.computed - row.count
        self.request.launched_outputs -= row.samples
        self.assist = False

    def leave(self, row: ScheduledRow, result: RowResult) -> ScheduledRow:
        """Uncounts the tokens of a launched row that are left to iterations. Returns the row of the others."""
        if not result.left_tokens:
            return row
        self.request.computed -= result.left_tokens
        self.request.launched_outputs -= row.samples
        count = row.count - result.left_tokens
        return replace(row, count=count, samples=False, embeds=False, logprobs=None, matcher=None)

    def record_waits(self, result: RowResult, interrupted_ms: float) -> None:
        """Adds the time for which a batch waited for this request's adapter and, `interrupted_ms`, for other
        adapters. A request that was preempted meanwhile has spent that time in the queue."""
        self.request.cpu_layers += result.cpu_layers
        self.request.cpu_lora_ms += result.cpu_lora_ms
        if self.request.slot is None:
            return
        self.request.stalled_ms += result.waited_ms
        self.request.interrupted_ms += interrupted_ms

    def record_interruption(self, ms: float) -> None:
        """Adds time in which no iteration ran because of a load."""
        self.request.interrupted_ms += ms

    def record_token(
        self, token: int, eos_ids: frozenset[int], max_context: int, now: Callable[[], float]
    ) -> TokenText:
        """Adds an output token. Returns its text, and the reasons if the request ends with it."""
        request, params = self.request, self.request.inputs.params
        request.output_ids.append(token)
        if request.phase is Phase.PREFILL:
            request.move_to(Phase.DECODE, now())
        may_stop = len(request.output_ids) >= params.min_tokens
        reason, stop_reason = request.ended_by(token, eos_ids) if may_stop else (None, None)
        text = ""
        if reason is None or params.include_stop_str_in_output:
            text, stop = self.detokenizer.push(token, may_stop=may_stop)
            if reason is None and stop is not None:
                reason, stop_reason = "stop", stop
        if reason is None and not request.wants_more(max_context):
            reason = "length"
        return TokenText(text, reason, stop_reason)

    def pool(self, row: ScheduledRow, states: bytes) -> bytes | None:
        """Adds the sum of a row's hidden states. Returns the embedding, if the prompt ends with the row."""
        inputs, end = self.request.inputs, row.start + row.count
        if not inputs.averages:
            return states
        added = np.frombuffer(states, np.float32).astype(np.float64)
        # A preempted request begins again, with its first token: no block of another request is reused.
        self.pooled = added if row.start == 0 or self.pooled is None else self.pooled + added
        return (self.pooled / end).astype(np.float32).tobytes() if end == self.request.prompt_tokens else None

    def send_prompt_scores(self, row: ScheduledRow, result: RowResult) -> None:
        """Sends scores of prompt tokens, each once: a preempted request computes them again."""
        new = result.prompt_scored[max(0, self.prompt_scored - row.start) :]
        if not new:
            return
        first: tuple[TokenLogprob | None, ...] = (None,) if self.prompt_scored == 0 else ()
        self.prompt_scored += len(new)
        self.stream.put(TokenDelta("", (), prompt_logprobs=(*first, *new)))

    def end(self, now_s: float) -> None:
        """Ends the request, whose last delta is sent later."""
        self.request.move_to(Phase.FINISHED, now_s)

    def finish(self, ending: Ending, now_s: float) -> Finish:
        """Ends the request, unless it has ended already, and sends its last delta, which contains the returned
        `Finish`."""
        request = self.request
        if not self.is_finished:
            self.end(now_s)
        finish = Finish(
            reason=ending.reason,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=len(request.output_ids),
            cached_tokens=request.cached_tokens,
            phases=request.phases(now_s, "" if self.choice is None else self.choice.name),
            stop_reason=ending.stop_reason,
            error=ending.error,
            served_by=self.stream.served_by(),
            head=None if self.spec is None else self.spec.head,
        )
        text = ending.text + self.detokenizer.flush()
        self.stream.put(TokenDelta(text, ending.token_ids, ending.logprobs, finish=finish, embedding=ending.embedding))
        return finish
