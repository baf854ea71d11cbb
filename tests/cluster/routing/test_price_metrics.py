"""The cost function as numbers for routers that know only scalars of an instance."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from caraserve.cluster.routing.cost import Arrival, Backlog, LinkSpeeds, estimate
from caraserve.cluster.routing.perf_model import DriftWatch, PerfModel
from caraserve.cluster.routing.price_metrics import USUAL_RANKS, TypicalRequest, price, price_families
from caraserve.cluster.routing.publisher import Publisher
from caraserve.core.machine_profile import load
from caraserve.engine.stats import EngineLoad

PADDED = PerfModel(0.004, 0.0, 32.0, True, 10.0, 0.1, 0.0)
TYPICAL = TypicalRequest()
IDLE = Backlog()
LOW, HIGH = Backlog(16, 16 * 8, 8), Backlog(16, 16 * 64, 64)


def scraped(
    backlog: Backlog, typical: TypicalRequest = TYPICAL, model: PerfModel = PADDED
) -> dict[tuple[str, str], float]:
    """Returns (metric, rank) → value; the rank is empty where a metric has none."""
    text = "".join(price_families(model, backlog, 'model_name="base"', typical))
    families = text_string_to_metric_families(text)
    assert all(family.type == "gauge" for family in families)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, sample.labels.get("rank", "")): sample.value for sample in samples}


def prices(backlog: Backlog, typical: TypicalRequest = TYPICAL) -> dict[int, float]:
    found = scraped(backlog, typical)
    return {rank: found["caraserve:request_price", str(rank)] for rank in USUAL_RANKS}


def test_a_high_rank_is_cheaper_where_high_ranks_run_already() -> None:
    """With a padding kernel it pads no other request there, but beside low ranks it pads all of them."""
    assert prices(HIGH)[64] < prices(LOW)[64]
    assert prices(LOW)[8] < prices(HIGH)[8]


def test_nothing_is_cheaper_than_an_idle_instance() -> None:
    assert all(prices(IDLE)[rank] < min(prices(LOW)[rank], prices(HIGH)[rank]) for rank in USUAL_RANKS)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=2, unique=True))
def test_prices_are_in_the_order_of_costs(costs: list[float]) -> None:
    low, high = sorted(costs)
    assert 0 <= price(low) <= price(high) < price(math.inf) == 1


def test_the_price_is_that_of_the_cost_function() -> None:
    arrival = Arrival(None, 64, 512, 200.0)
    assert prices(LOW)[64] == pytest.approx(price(estimate(PADDED, LOW, arrival, 0.0, False, 1.0).cost))


def test_past_the_slo_the_price_is_the_highest_and_the_headroom_negative() -> None:
    typical = TypicalRequest(slo_ms=33.0)
    assert prices(LOW, typical)[64] == 1.0
    assert scraped(LOW, typical)["caraserve:slo_headroom_ratio", "64"] < 0
    assert scraped(LOW, typical)["caraserve:slo_headroom_ratio", "8"] > 0


@pytest.mark.parametrize(
    "full", [Backlog(queue_room=0), Backlog(kv_tokens=100.0), Backlog(kv_tokens=1e4, kv_free_tokens=-1.0)]
)
def test_an_instance_without_room_has_the_highest_price_for_every_rank(full: Backlog) -> None:
    assert set(prices(full).values()) == {1.0}


def test_every_value_is_finite() -> None:
    """A picker that scales values to the range of its candidates could not use infinity."""
    for backlog in (IDLE, LOW, Backlog(queue_room=0)):
        assert all(math.isfinite(value) for value in scraped(backlog).values())


def test_no_gauge_is_named_like_a_part_of_a_histogram() -> None:
    """Line parsers such as those of llm-d and AIBrix would take such a sample for part of a histogram."""
    assert not [name for name, _ in scraped(LOW) if name.endswith(("_sum", "_count", "_bucket", "_total"))]


def test_the_batch_and_the_queue_are_exported() -> None:
    found = scraped(Backlog(3, 80, 64, queued_tokens=100, queued_token_ranks=6400))
    assert found["caraserve:batch_max_rank", ""] == 64
    assert found["caraserve:batch_summed_rank", ""] == 80
    assert found["caraserve:queued_prefill_seconds", ""] == pytest.approx(0.020)
    assert found["caraserve:next_decode_seconds", "0"] == pytest.approx((32 + 0.004 * 4 * 64) / 1000)


def test_an_instance_exports_prices_for_its_own_load() -> None:
    profile = load(Path(__file__).parents[2] / "profile.json")

    def shown(running: int) -> dict[str, float]:
        work = EngineLoad(running, 0, {64: running}, 0, 0, 100_000, 90_000, 10)
        catalog = SimpleNamespace(manager=SimpleNamespace(on_move=lambda report: None))
        engine = SimpleNamespace(workload=lambda tokens: work, draining=False, failure=None, catalog=catalog)
        node = SimpleNamespace(members=tuple)
        publisher = Publisher(node, engine, lambda: (0, 0), DriftWatch(profile), LinkSpeeds())  # type: ignore[arg-type]
        text = "".join(publisher.families('model_name="base"'))
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {s.labels["rank"]: s.value for s in samples if s.name == "caraserve:request_price"}

    idle, busy = shown(0), shown(32)
    assert set(idle) == {str(rank) for rank in USUAL_RANKS}
    assert all(idle[rank] < busy[rank] for rank in idle)
