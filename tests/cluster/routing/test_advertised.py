"""Advertised values are decoded exactly, and malformed ones count as not advertised."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.routing.advertised import (
    backlog_of,
    instance_of,
    is_hung,
    links_of,
    links_value,
    load_of,
    model_of,
    model_value,
)
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.state.lww_map import EntryValue, entry_fits
from caraserve.cluster.state.replicated_map import InstanceLoad
from caraserve.engine.stats import EngineLoad

times = st.floats(0, 1e9)
some_times = st.floats(1e-6, 1e9)
rates = st.floats(min_value=0, exclude_min=True) | st.just(math.inf)
MODEL = PerfModel(0.01, 0.1, 5.0, False, 1.0, 0.05, 0.001)
WORK = EngineLoad(2, 3, {16: 1, 8: 4}, 700, 5600, 1000, -20, 7)
ALIVE = MemberRecord("a", "a:1", 1, 0, MemberState.ALIVE)


@given(st.builds(PerfModel, times, times, some_times, st.booleans(), times, some_times, times, times))
def test_a_performance_model_is_decoded_exactly(model: PerfModel) -> None:
    value = model_value(model)
    assert entry_fits(":model", value)
    assert model_of(value) == model


@given(st.builds(LinkSpeeds, times, rates, rates, times, rates, st.booleans()))
def test_link_speeds_are_decoded_exactly(links: LinkSpeeds) -> None:
    value = links_value(links)
    assert entry_fits(":links", value)
    assert links_of(value) == links


@pytest.mark.parametrize(
    "value",
    [
        *((), ("1",), ("x",) * 7, ("-1",) * 7, ("nan",) * 7, ("inf",) * 7, ("1",) * 9, (1, "", 2, 3, 4, 5, 6)),
        *(("0",) * 7, ("1e300",) * 7, ("1", "0", "0", "0", "1", "1", "1"), ("1", "1", "1", "0", "0", "0", "1")),
    ],
)
def test_malformed_performance_models_count_as_none(value: EntryValue) -> None:
    assert model_of(value) is None


@pytest.mark.parametrize(
    "value",
    [
        *((), ("1",), ("x",) * 6, ("-1",) * 6, ("nan",) * 6, ("1", "0", "1", "1", "1", "1")),
        *(("1", "1", "1", "nan", "1", "0"), ("inf", "1", "1", "1", "1", "0"), ("1", "1", "nan", "1", "1", "0")),
    ],
)
def test_malformed_link_speeds_count_as_infinite(value: EntryValue) -> None:
    assert links_of(value) == LinkSpeeds()


def test_the_largest_rank_falls_when_its_last_request_ends() -> None:
    assert backlog_of(replace(load_of(WORK, "serving", 50.0), ranks=((8, 2), (64, 0)))).rank_max == 8


def test_a_load_has_all_that_the_cost_function_needs() -> None:
    backlog = backlog_of(load_of(WORK, "serving", 50.0))
    assert (backlog.requests, backlog.rank_sum, backlog.rank_max) == (5, 48, 16)
    assert (backlog.queued_tokens, backlog.queued_token_ranks) == (700, 5600)
    assert (backlog.kv_tokens, backlog.kv_free_tokens, backlog.queue_room) == (1000, -20, 7)


@pytest.mark.parametrize(
    ("record", "load", "age_s", "able"),
    [
        (ALIVE, InstanceLoad("serving"), 0.2, True),
        (ALIVE, InstanceLoad("serving"), 1.1, False),
        (ALIVE, InstanceLoad("draining"), 0.2, False),
        (ALIVE, InstanceLoad("starting"), 0.2, False),
        (ALIVE, InstanceLoad("serving", running=1, iteration_age_s=3.0), 0.2, False),
        (MemberRecord("a", "a:1", 1, 0, MemberState.SUSPECT), InstanceLoad("serving"), 0.2, False),
    ],
)
def test_which_instances_accept_requests(record: MemberRecord, load: InstanceLoad, age_s: float, able: bool) -> None:
    assert instance_of(record, load, MODEL, LinkSpeeds(), age_s).able is able


def test_an_iteration_may_take_ten_times_the_predicted_time() -> None:
    long = InstanceLoad("serving", running=1, queued_tokens=10_000, iteration_age_s=4.9)  # 506 ms
    assert not is_hung(long, MODEL)
    assert is_hung(InstanceLoad("serving", running=1, queued_tokens=10_000, iteration_age_s=5.2), MODEL)
