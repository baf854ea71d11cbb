"""Computes what one more request would cost an instance: Toppings §5, Algorithm 1, completed. No I/O, no clock.

Routers compare candidates by this cost, from their views of the instances; an instance computes it exactly for a quote.
The functions take plain numbers, so that `bench/simulator` can compile them. Where the paper leaves something open:

- Infinity times zero requests is undefined: an instance past the SLO costs infinity even when it is empty, and an empty
  one within the SLO costs its cold start alone.
- Candidates past the SLO tie at infinity: the least predicted time per token decides between them.
- Candidates without the adapter would in time download every adapter: the download is part of the cost.
- Memory is a condition in the text and absent from the pseudo-code: a request without room counts as past the SLO, and
  its wait for room is part of its predicted time.
- The mean length of answers is an estimate by adapter that starts from a prior.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from caraserve.cluster.routing.perf_model import PerfModel, decode_ms, prefill_ms
from caraserve.cluster.state.replicated_map import Tier

_DEVICE, _HOST, _DISK, _ABSENT = map(int, Tier)  # compiled code compares integers


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """How fast an instance copies an adapter's bytes from tier to tier."""

    load_latency_ms: float = 0.0
    load_bytes_per_ms: float = math.inf  # host to device
    disk_bytes_per_ms: float = math.inf
    fetch_latency_ms: float = 0.0
    fetch_bytes_per_ms: float = math.inf  # from another instance's host tier
    blocks_batch: bool = False  # the running batch waits for loads (loading mode `ondemand`)


def cold_ms(links: LinkSpeeds, tier: int, num_bytes: float) -> float:
    """Returns a cold start's wait for an adapter of so many bytes while all links are idle."""
    if tier == _DEVICE or num_bytes == 0:
        return 0.0
    wait_ms = links.load_latency_ms + num_bytes / links.load_bytes_per_ms
    if tier == _DISK:
        wait_ms += num_bytes / links.disk_bytes_per_ms
    elif tier == _ABSENT:
        wait_ms += links.fetch_latency_ms + num_bytes / links.fetch_bytes_per_ms
    return wait_ms


class Backlog(NamedTuple):
    """The load of an instance. Its heartbeats publish it, and routers add what they have sent since. A tuple, because
    every change of an instance makes one."""

    requests: int = 0  # running and queued
    rank_sum: int = 0  # of them; the base model's have rank 0
    rank_max: int = 0
    queued_tokens: int = 0  # of prompts not yet prefilled
    queued_token_ranks: int = 0  # Σ tokens · rank of them
    kv_tokens: float = math.inf  # capacity of its KV cache
    kv_free_tokens: float = math.inf  # after what the queued requests will take: below zero when they wait
    queue_room: float = math.inf  # requests that it accepts before it refuses

    def plus(self, rank: int, prompt_tokens: int, output_tokens: float) -> "Backlog":
        """Returns the backlog with this request in the queue too."""
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
    """The properties of a request that routing needs."""

    adapter: str | None  # None: the base model
    rank: int
    prompt_tokens: int
    output_tokens: float  # expected; see AnswerLengths
    adapter_bytes: int = 0
    slo_ms: float = math.inf  # promised time per token


class CostEstimate(NamedTuple):
    """What a request costs on an instance. A tuple, because its order is the rule: where costs tie, as all infinite
    ones do, the lower latency wins."""

    cost: float  # ms per token, summed over the requests delayed; infinite past the SLO or without memory
    latency_ms: float  # this request's time per token, waiting included; infinite if it can never run there


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
    """Computes Algorithm 1, lines 6-20: (Δprefill ÷ answer length + Δdecode) × requests there, infinite past the SLO.

    Adds the cold start, which delays the new request alone unless it `cold_blocks` the batch, and `own_weight` × the
    new request's own time per token. The paper has a weight of 0: it counts only the delay of others, so an arrival
    prefers waiting in a long queue to adding to a short one.
    """
    if decode_after_ms > slo_ms:
        return math.inf
    cost = (added_prefill_ms / output_tokens + added_decode_ms) * requests + own_weight * own_latency_ms
    delayed = requests if cold_blocks else 0
    if own_weight == 0.0:  # otherwise the new request's wait is in own_latency_ms
        delayed += 1
    return cost + cold_ms / output_tokens * delayed


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
    """Returns the numbers of `CostEstimate`."""
    needed_tokens = prompt_tokens + output_tokens
    if backlog.queue_room <= 0 or needed_tokens > backlog.kv_tokens:
        return math.inf, math.inf
    alpha_ms, gamma_ms, beta_ms, padded = model.alpha_ms, model.gamma_ms, model.beta_ms, model.padded
    requests, rank_sum, rank_max = backlog.requests, backlog.rank_sum, backlog.rank_max
    before_ms = decode_ms(alpha_ms, gamma_ms, beta_ms, padded, requests, rank_sum, rank_max)
    after_ms = decode_ms(alpha_ms, gamma_ms, beta_ms, padded, requests + 1, rank_sum + rank, max(rank_max, rank))
    added_ms = after_ms - before_ms
    if own_weight > 0.0:
        # The time that the request adds on every instance cannot distinguish them, and multiplied by the batch's size
        # it would outweigh the time of each answer. So only the padding that its rank causes there is counted.
        added_ms = max(0.0, added_ms - alpha_ms * rank - gamma_ms)
    base_ms, token_ms, by_sum_ms = model.prefill_base_ms, model.prefill_token_ms, model.prefill_token_rank_ms
    by_max_ms, rank_max_after = model.prefill_token_rank_max_ms, max(rank_max, rank)
    # The paper counts the line's intercept before and after the request, so it cancels: only the slope is left.
    added_prefill_ms = prompt_tokens * (token_ms + rank * by_sum_ms)
    # Kernels that pad prompts to the largest rank make the queued ones longer too: as if they were in one iteration.
    added_prefill_ms += by_max_ms * (
        (backlog.queued_tokens + prompt_tokens) * rank_max_after - backlog.queued_tokens * rank_max
    )
    tokens, token_ranks = backlog.queued_tokens + prompt_tokens, backlog.queued_token_ranks + prompt_tokens * rank
    all_ms = prefill_ms(base_ms, token_ms, by_sum_ms, by_max_ms, tokens, token_ranks, rank_max_after)
    wait_ms = all_ms + cold_ms
    if needed_tokens > backlog.kv_free_tokens:
        short_tokens = needed_tokens - backlog.kv_free_tokens
        # All KV blocks are freed about once per answer time.
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
    """Returns the cost of this request on an instance with this backlog."""
    rank, tokens, output_tokens = arrival.rank, arrival.prompt_tokens, arrival.output_tokens
    numbers = cost_and_latency(
        model, backlog, rank, tokens, output_tokens, arrival.slo_ms, cold_ms, cold_blocks, own_weight
    )
    return CostEstimate(*numbers)


PRIOR_TOKENS, PRIOR_WEIGHT = 200.0, 8.0  # of an answer before there are any
ALL_ANSWERS, OWN_ANSWERS = 1000.0, 50.0  # that count, of all adapters and of one


def with_answer(weight: float, tokens: float, answer_tokens: float, memory: float) -> tuple[float, float]:
    """Adds an answer to a weight and Σ tokens. Older answers fade, so that the weights sum to at most `memory`."""
    keep = 1.0 - 1.0 / memory
    return weight * keep + 1.0, tokens * keep + answer_tokens


def expected_tokens(weight: float, tokens: float, all_weight: float, all_tokens: float) -> float:
    """Returns the expected tokens of an adapter's answer, at least 1, by its own sums and those of all adapters."""
    prior = all_tokens / all_weight
    return max(1.0, (tokens + PRIOR_WEIGHT * prior) / (weight + PRIOR_WEIGHT))


class AnswerLengths:
    """Expects the tokens of an adapter's answers: the mean of recent ones, weighted with the mean over all adapters
    while there are few, and with a prior before there are any."""

    def __init__(self, max_adapters: int = 50_000) -> None:
        self._max_adapters = max_adapters
        self._all = (PRIOR_WEIGHT, PRIOR_WEIGHT * PRIOR_TOKENS)
        self._by_adapter: OrderedDict[str | None, tuple[float, float]] = OrderedDict()  # weight, Σ tokens

    def observe(self, adapter: str | None, output_tokens: int) -> None:
        """Records the length of a finished answer."""
        self._all = with_answer(*self._all, output_tokens, ALL_ANSWERS)
        own = self._by_adapter.get(adapter, (0.0, 0.0))
        self._by_adapter[adapter] = with_answer(*own, output_tokens, OWN_ANSWERS)
        self._by_adapter.move_to_end(adapter)
        if len(self._by_adapter) > self._max_adapters:  # names come from clients
            self._by_adapter.popitem(last=False)

    def expected(self, adapter: str | None) -> float:
        """Returns the expected tokens of an answer, at least 1."""
        return expected_tokens(*self._by_adapter.get(adapter, (0.0, 0.0)), *self._all)
