"""What one more request would cost an instance: Toppings §5, Algorithm 1, with its gaps closed. No I/O, no clock.

Where the paper leaves something open:

- a cost of infinity times no requests is no number: an instance past the SLO costs infinity even when it is empty, and
  an empty one within the SLO costs its cold start alone
- candidates past the SLO tie at infinity: the least predicted time per token decides between them
- candidates that lack the adapter would in time fetch every adapter: the fetch is part of the cost
- memory is a condition in the text and absent from the pseudo-code: a request without room counts as past the SLO, and
  its wait for room goes into its predicted time
- the mean length of answers is an estimate by adapter that starts from a prior
"""

import math
import struct
from collections import OrderedDict
from dataclasses import astuple, dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from caraserve.cluster.routing.perf_model import PerfModel, decode_ms, prefill_ms


class Tier(IntEnum):
    """How near to an instance's device an adapter is."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    ABSENT = 3  # another instance has it


_DEVICE, _HOST, _DISK, _ABSENT = map(int, Tier)  # as an array has them


@dataclass(frozen=True)  # without slots: `packed` stays with it
class LinkSpeeds:
    """How fast an instance gets an adapter's bytes, from tier to tier."""

    load_latency_ms: float = 0.0
    load_bytes_per_ms: float = math.inf  # host to device
    disk_bytes_per_ms: float = math.inf
    fetch_latency_ms: float = 0.0
    fetch_bytes_per_ms: float = math.inf  # from another instance's host tier
    blocks_batch: bool = False  # the running batch waits for loads (loading mode `ondemand`)

    @cached_property
    def packed(self) -> bytes:
        """The numbers above, one after another as float64."""
        return struct.pack("=6d", *astuple(self))

    def cold_ms(self, tier: Tier, num_bytes: int) -> float:
        """A cold start's wait for the adapter, everything idle."""
        return cold_ms(self, tier, num_bytes)


def cold_ms(links: LinkSpeeds, tier: int, num_bytes: float) -> float:
    """A cold start's wait for the adapter, everything idle."""
    if tier == _DEVICE or num_bytes == 0:
        return 0.0
    wait_ms = links.load_latency_ms + num_bytes / links.load_bytes_per_ms
    if tier == _DISK:
        wait_ms += num_bytes / links.disk_bytes_per_ms
    elif tier == _ABSENT:
        wait_ms += links.fetch_latency_ms + num_bytes / links.fetch_bytes_per_ms
    return wait_ms


class Backlog(NamedTuple):
    """What an instance carries. Its beats publish it; whoever forwards to it adds what no beat shows yet. A tuple,
    because every change of an instance makes one."""

    requests: int = 0  # running and queued
    rank_sum: int = 0  # of them; the base model's have rank 0
    rank_max: int = 0
    queued_tokens: int = 0  # of prompts not yet prefilled
    queued_token_ranks: int = 0  # Σ tokens · rank of them
    kv_tokens: float = math.inf  # that its memory holds
    kv_free_tokens: float = math.inf  # of them, after what the queued requests will take: below zero when they wait
    queue_room: float = math.inf  # requests that it takes before it refuses

    def plus(self, rank: int, prompt_tokens: int, output_tokens: float) -> "Backlog":
        """The backlog once this request is queued there as well."""
        return Backlog(
            self.requests + 1,
            self.rank_sum + rank,
            max(self.rank_max, rank),
            self.queued_tokens + prompt_tokens,
            self.queued_token_ranks + prompt_tokens * rank,
            self.kv_tokens,
            self.kv_free_tokens - prompt_tokens - output_tokens,
            self.queue_room - 1,
        )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that wants an instance."""

    adapter: str | None  # None: the base model
    rank: int
    prompt_tokens: int
    output_tokens: float  # expected; see AnswerLengths
    adapter_bytes: int = 0
    slo_ms: float = math.inf  # time per token that this fleet promises
    hop: int = 0  # 1: another instance has forwarded it


class CostEstimate(NamedTuple):
    """A candidate's worth, less is better. A tuple, because its order is the rule: where costs tie, as all infinite
    ones do, the sooner answer wins."""

    cost: float  # ms per token, summed over those who would feel it; infinite past the SLO or without memory
    latency_ms: float  # this request's time per token, its waiting included; infinite if it can never run there


def total_cost(
    added_prefill_ms: float,
    added_decode_ms: float,
    decode_after_ms: float,
    slo_ms: float,
    output_tokens: float,
    requests: float,
    cold_ms: float,
    cold_blocks: bool,
    own_weight: float,
    own_latency_ms: float,
) -> float:
    """Algorithm 1, lines 6-20: (Δprefill ÷ answer length + Δdecode) × requests there, infinite past the SLO; with the
    cold start, which the new request feels alone unless it `cold_blocks` the batch, and `own_weight` × the new
    request's own time per token. The paper has a weight of 0: it counts only what others feel, and an arrival will
    rather wait in a long queue than add to a short one."""
    if decode_after_ms > slo_ms:
        return math.inf
    cost = (added_prefill_ms / output_tokens + added_decode_ms) * requests + own_weight * own_latency_ms
    feel_cold = requests if cold_blocks else 0
    if own_weight == 0.0:  # otherwise in own_latency_ms
        feel_cold += 1
    return cost + cold_ms / output_tokens * feel_cold


def cost_and_latency(
    model: PerfModel,
    backlog: Backlog,
    rank: float,
    prompt_tokens: float,
    output_tokens: float,
    slo_ms: float,
    cold_ms: float,
    cold_blocks: bool,
    own_weight: float,
) -> tuple[float, float]:
    """An estimate's numbers."""
    needed_tokens = prompt_tokens + output_tokens
    if backlog.queue_room <= 0 or needed_tokens > backlog.kv_tokens:
        return math.inf, math.inf
    alpha_ms, gamma_ms, beta_ms, padded = model.alpha_ms, model.gamma_ms, model.beta_ms, model.padded
    requests, rank_sum, rank_max = backlog.requests, backlog.rank_sum, backlog.rank_max
    before_ms = decode_ms(alpha_ms, gamma_ms, beta_ms, padded, requests, rank_sum, rank_max)
    after_ms = decode_ms(alpha_ms, gamma_ms, beta_ms, padded, requests + 1, rank_sum + rank, max(rank_max, rank))
    added_ms = after_ms - before_ms
    if own_weight > 0.0:
        # What it adds wherever it goes is no reason to go anywhere, and times a batch's size it would outweigh how long
        # each answer takes. What is left is what its rank does to the ranks there.
        added_ms = max(0.0, added_ms - alpha_ms * rank - gamma_ms)
    base_ms, token_ms, token_rank_ms = model.prefill_base_ms, model.prefill_token_ms, model.prefill_token_rank_ms
    # The paper's line has its intercept before and after the request, in a filled queue and in an empty one.
    added_prefill_ms = prompt_tokens * (token_ms + rank * token_rank_ms)
    tokens, token_ranks = backlog.queued_tokens + prompt_tokens, backlog.queued_token_ranks + prompt_tokens * rank
    all_ms = prefill_ms(base_ms, token_ms, token_rank_ms, tokens, token_ranks)
    wait_ms = all_ms + cold_ms
    if needed_tokens > backlog.kv_free_tokens:
        short_tokens = needed_tokens - backlog.kv_free_tokens
        # An answer's time frees about all of it.
        wait_ms += before_ms * output_tokens * short_tokens / backlog.kv_tokens
        return math.inf, wait_ms / output_tokens + after_ms
    latency_ms = wait_ms / output_tokens + after_ms
    cost = total_cost(
        added_prefill_ms if own_weight == 0.0 else 0.0,  # otherwise in latency_ms
        added_ms,
        after_ms,
        slo_ms,
        output_tokens,
        requests,
        cold_ms,
        cold_blocks,
        own_weight,
        latency_ms,
    )
    return cost, latency_ms


def estimate(
    model: PerfModel, backlog: Backlog, arrival: Arrival, cold_ms: float, cold_blocks: bool, own_weight: float
) -> CostEstimate:
    """The cost of this request on an instance with this backlog."""
    rank, tokens, output_tokens = arrival.rank, arrival.prompt_tokens, arrival.output_tokens
    numbers = cost_and_latency(
        model, backlog, rank, tokens, output_tokens, arrival.slo_ms, cold_ms, cold_blocks, own_weight
    )
    return CostEstimate(*numbers)


_BACKLOG = struct.Struct("=8d")


def row(model: PerfModel, links: LinkSpeeds, backlog: Backlog) -> bytes:
    """An instance's numbers, one after another as float64: `ranking.py` lays candidates' rows together."""
    return model.packed + links.packed + _BACKLOG.pack(*backlog)


class AnswerLengths:
    """Expected tokens of an adapter's answers: the mean of those seen lately, drawn to the fleet's mean while there
    are few, and to a prior before there are any."""

    def __init__(self, prior_tokens: float = 200.0, prior_weight: float = 8.0, most_adapters: int = 50_000) -> None:
        self._prior_weight = prior_weight
        self._most = most_adapters
        self._all = (prior_weight, prior_weight * prior_tokens)
        self._by_adapter: OrderedDict[str | None, tuple[float, float]] = OrderedDict()  # weight, Σ tokens

    def observe(self, adapter: str | None, output_tokens: int) -> None:
        """Takes a finished answer's length."""
        self._all = _faded(self._all, output_tokens, 1000.0)
        self._by_adapter[adapter] = _faded(self._by_adapter.get(adapter, (0.0, 0.0)), output_tokens, 50.0)
        self._by_adapter.move_to_end(adapter)
        if len(self._by_adapter) > self._most:  # names come from clients
            self._by_adapter.popitem(last=False)

    def expected(self, adapter: str | None) -> float:
        """At least one token."""
        weight, tokens = self._by_adapter.get(adapter, (0.0, 0.0))
        prior = self._all[1] / self._all[0]
        return max(1.0, (tokens + self._prior_weight * prior) / (weight + self._prior_weight))


def _faded(sums: tuple[float, float], tokens: int, memory: float) -> tuple[float, float]:
    """One more answer; older ones fade so that the weights sum to at most `memory`."""
    keep = 1.0 - 1.0 / memory
    return sums[0] * keep + 1.0, sums[1] * keep + tokens
