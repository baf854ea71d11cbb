"""Exports the cost of one more request on this instance, by rank, for external routers to scrape.

A router in Kubernetes (llm-d's endpoint picker) chooses by scalars of each instance. It cannot evaluate our cost
function for its request's rank, so the function is evaluated here for each usual rank, and the picker's configuration
names the series to use. `caraserve:request_price` is the one to choose by; the others are for dashboards and filters.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from caraserve.cluster.routing.cost import Arrival, Backlog, estimate
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.telemetry.prometheus import family

USUAL_RANKS = (0, 8, 16, 32, 64, 128)
_EVEN_MS = 50.0  # the cost whose price is ½; the same on all instances, so that prices can be compared


@dataclass(frozen=True, slots=True)
class TypicalRequest:
    """The request that is priced. `slo_ms`: time per token that this fleet promises, in ms."""

    prompt_tokens: int = 512
    output_tokens: float = 200.0
    slo_ms: float = math.inf


def price(cost_ms: float) -> float:
    """Maps a cost between 0 and infinity to a price between 0 and 1, in the same order. Pickers scale scraped values to
    the candidates' range, in which a single infinity would make all others equal."""
    return 1.0 if math.isinf(cost_ms) else cost_ms / (cost_ms + _EVEN_MS)


def price_families(
    model: PerfModel,
    backlog: Backlog,
    labels: str,
    typical: TypicalRequest = TypicalRequest(),
    ranks: Sequence[int] = USUAL_RANKS,
) -> Iterator[str]:
    """Yields metric families as Prometheus' text. `labels`: those of every sample, as `prometheus.label_set` writes
    them."""
    prices: list[tuple[str, float]] = []
    decodes: list[tuple[str, float]] = []
    headrooms: list[tuple[str, float]] = []
    for rank in ranks:
        arrival = Arrival(None, rank, typical.prompt_tokens, typical.output_tokens, slo_ms=typical.slo_ms)
        cost = estimate(model, backlog, arrival, 0.0, False, 1.0).cost
        after_ms = model.decode_ms(backlog.requests + 1, backlog.rank_sum + rank, max(backlog.rank_max, rank))
        series = f'rank="{rank}",{labels}'
        prices.append((series, price(cost)))
        decodes.append((series, after_ms / 1000))
        headrooms.append((series, 1.0 if math.isinf(typical.slo_ms) else 1.0 - after_ms / typical.slo_ms))
    queue_s = model.prefill_ms(backlog.queued_tokens, backlog.queued_token_ranks, backlog.rank_max) / 1000
    yield family("caraserve:request_price", "gauge", "Cost of one more request of that rank, 0 to 1.", prices)
    yield family("caraserve:next_decode_seconds", "gauge", "An iteration's time with one more request.", decodes)
    yield family("caraserve:slo_headroom_ratio", "gauge", "Share of the SLO that such an iteration leaves.", headrooms)
    yield family("caraserve:queued_prefill_seconds", "gauge", "Prefill of all queued prompts.", [(labels, queue_s)])
    yield family("caraserve:batch_max_rank", "gauge", "Largest rank here.", [(labels, backlog.rank_max)])
    yield family("caraserve:batch_summed_rank", "gauge", "Sum of the requests' ranks.", [(labels, backlog.rank_sum)])
