"""Forwarding: views with the requests sent since, quotes, expected lengths, and signatures of forwarded requests."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caraserve.cluster.membership.auth import Keyring
from caraserve.cluster.membership.member import QueryBody
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.routing.cost import Backlog, CostEstimate
from caraserve.cluster.routing.fleet_view import FleetView
from caraserve.cluster.routing.forward_auth import (
    CLAIMS_HEADER,
    SIGNATURE_HEADER,
    ForwardClaims,
    ForwardVerifier,
    _mac,
    format_refusal,
    forward_headers,
    parse_refusal,
)
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.router import Instance, Refusal
from caraserve.cluster.routing.selector import AdapterFetcher, InstanceSelector, LatencyTargets, LocalTarget, PeerTarget
from caraserve.cluster.state.replicated_map import RegisteredAdapter, Tier
from caraserve.errors import Forbidden, Overloaded

MODEL = PerfModel(0.01, 0.1, 5.0, False, 1.0, 0.05, 0.001)
OLD, NEW = b"the old secret of this cluster", b"the new secret of this cluster"
PATH = "/cluster/v1/completions"
CLAIMS_OF_B = ForwardClaims(
    *("id", 1, "b", "a", None, "", 5),
    force=False,
    time_ms=1_000_000,
    body_digest="d",
    defaults_digest="",
    client="c",
    weight=1.0,
    owns_cache=True,
)


class Cluster:
    """Instances a, b, …, of which a is the router's own. `quotes`: the answers to queries."""

    def __init__(self, *requests: int) -> None:
        self.name, self.has_registry = "a", False
        self.quotes: dict[str, QueryBody] = {}
        self.seen = {
            name: Instance(name, MODEL, Backlog(count)) for name, count in zip("abcdef", requests, strict=False)
        }
        self.dead: set[str] = set()

    def instances(self) -> tuple[Instance, ...]:
        return tuple(self.seen.values())

    def record(self, name: str) -> MemberRecord | None:
        return MemberRecord(name, f"{name}:1", 1, 0, MemberState.DEAD if name in self.dead else MemberState.ALIVE)

    def adapter(self, name: str) -> RegisteredAdapter | None:
        return None

    def uploads(self, name: str) -> dict[str, RegisteredAdapter]:
        return {}

    def holders(self, digest: str) -> Mapping[str, Tier]:
        return {}

    async def query(self, peer: str, body: QueryBody, timeout_s: float) -> QueryBody | None:
        return self.quotes.get(peer)


def selector(
    cluster: Cluster,
    routing: str = "most-idle",
    *,
    now: Callable[[], float] | None = None,
    find: Callable[[str], RegisteredAdapter | None] = lambda name: None,
    fetcher: AdapterFetcher | None = None,
) -> InstanceSelector:
    """`now`: by default a clock that advances by a second at each reading."""
    ticks = map(float, itertools.count())
    made = InstanceSelector(
        *(cluster, cluster, Policy(routing), LatencyTargets(), find, lambda: False),  # type: ignore[arg-type]
        fetcher=fetcher,
        rng=Random(1),
        now=now or (lambda: next(ticks)),
    )
    made.join()
    return made


def test_a_burst_at_one_instance_is_spread_before_any_heartbeat() -> None:
    router = selector(Cluster(0, 0, 0), now=lambda: 0.0)
    arrival = router.arrival(None, 10, 10)
    went = []
    for _ in range(30):
        went.append(router.propose(arrival).order[0])
        router.began(went[-1], arrival)
    assert {name: went.count(name) for name in went} == {"a": 10, "b": 10, "c": 10}


def test_requests_that_a_heartbeat_does_not_include_are_added_to_it() -> None:
    now = 0.0
    cluster = Cluster(0, 0)
    router = selector(cluster, now=lambda: now)
    arrival = router.arrival(None, 10, 10)
    cluster.seen["a"] = dataclasses.replace(cluster.seen["a"], backlog=Backlog(1))
    router.propose(arrival)
    for _ in range(2):
        router.began("b", arrival)
    now = 0.03  # b sent this heartbeat before the requests arrived
    cluster.seen["b"] = dataclasses.replace(cluster.seen["b"], backlog=Backlog())
    assert router.propose(arrival).order[0] == "a"
    now = 0.2  # this heartbeat includes them
    cluster.seen["b"] = dataclasses.replace(cluster.seen["b"], backlog=Backlog())
    assert router.propose(arrival).order[0] == "b"


def test_an_unreachable_instance_is_left_out_for_a_while() -> None:
    now = 0.0
    router = selector(Cluster(5, 0), now=lambda: now)
    arrival = router.arrival(None, 10, 10)
    router.mark_unreachable("b")
    assert list(router.propose(arrival).order) == ["a"]
    now = 2.0
    assert list(router.propose(arrival).order) == ["b", "a"]


def test_an_instance_that_fails_again_and_again_is_left_out_for_longer_each_time() -> None:
    now = 0.0
    view: Any = Cluster(0, 0)
    fleet = FleetView(view, view, lambda: now)

    def left_out_s() -> float:
        nonlocal now
        began_s = now
        for _ in range(3):  # three requests fail at once
            fleet.mark_unreachable("b")
        while "b" not in fleet.fleet(None, (), holders_only=False).able:
            now += 0.5
        return now - began_s

    assert [left_out_s() for _ in range(4)] == [1.0, 2.0, 4.0, 8.0]
    fleet.mark_reached("b")
    assert left_out_s() == 1.0


async def test_quotes_decide_among_the_best() -> None:
    cluster = Cluster(50, 0, 0, 0)
    cluster.quotes = {"b": (9.0, 9.0), "c": (1.0, 1.0), "d": (-1.0, -1.0)}
    router = selector(cluster, "rank-aware")
    target = (await router.begin(router.arrival(None, 10, 10))).next()
    assert target == PeerTarget("c", "c:1", 1, force=False)


async def test_missed_quotes_are_counted() -> None:
    cluster = Cluster(50, 0, 0, 0)
    cluster.quotes = {"b": (9.0, 9.0)}
    router = selector(cluster, "rank-aware")
    await router.begin(router.arrival(None, 10, 10))
    assert router.routing_metrics.unquoted == 2
    assert 'caraserve:missed_quotes_total{x="y"} 2' in "".join(router.routing_metrics.families('x="y"'))


async def test_dead_instances_are_skipped_even_if_the_view_has_them() -> None:
    cluster = Cluster(50, 0, 1)
    cluster.dead = {"b", "c"}
    router = selector(cluster)
    assert isinstance((await router.begin(router.arrival(None, 10, 10))).next(), LocalTarget)


def test_a_quote_is_what_the_request_would_cost_here() -> None:
    router = selector(Cluster(3, 0), "rank-aware")
    cost, latency_ms = router.quote("b", ("route", "", 10, 10.0))
    own = Cluster(3, 0).seen["a"].estimate(router.arrival(None, 10, 10), Tier.DEVICE, 0.0)
    assert (cost, latency_ms) == own
    assert router.quote("b", ("route", "nobody's", 10, 10.0)) == (-1.0, -1.0)


@given(st.lists(st.one_of(st.text(), st.integers(), st.floats(allow_nan=False)), max_size=6))
def test_any_query_gets_an_answer(body: list[str | int | float]) -> None:
    selector(Cluster(1)).quote("b", tuple(body))


def test_the_expected_length_follows_earlier_answers() -> None:
    router = selector(Cluster(0))
    before = router.arrival("poet", 10, 1000).output_tokens
    for _ in range(200):
        router.answered("poet", 20)
    assert router.arrival("poet", 10, 1000).output_tokens < min(before, 30)
    assert router.arrival("poet", 10, 7).output_tokens == 7


# --- signed claims ---


def headers(keys: Keyring = Keyring((NEW,)), claims: ForwardClaims = CLAIMS_OF_B) -> dict[str, str]:  # noqa: B008 -- never changes
    return forward_headers(keys, PATH, claims)


def gate(*secrets: bytes) -> ForwardVerifier:
    return ForwardVerifier(lambda: "a", lambda: Keyring(secrets))


def test_verified_claims_equal_the_signed_ones() -> None:
    assert gate(NEW).admit(PATH, headers(), CLAIMS_OF_B.time_ms) == CLAIMS_OF_B


def test_requests_signed_with_either_of_two_secrets_are_accepted() -> None:
    assert gate(OLD, NEW).admit(PATH, headers(), CLAIMS_OF_B.time_ms)
    with pytest.raises(Forbidden):
        gate(OLD).admit(PATH, headers(), CLAIMS_OF_B.time_ms)


@pytest.mark.parametrize("late_ms", [-31_000, 31_000])
def test_claims_over_30_s_from_the_own_clock_are_refused(late_ms: int) -> None:
    with pytest.raises(Forbidden, match="clocks"):
        gate(NEW).admit(PATH, headers(), CLAIMS_OF_B.time_ms + late_ms)


def test_an_attempt_is_remembered_as_long_as_it_is_valid() -> None:
    door = gate(NEW)
    door.admit(PATH, headers(), CLAIMS_OF_B.time_ms - 29_000)
    for number in range(100):
        other = dataclasses.replace(CLAIMS_OF_B, attempt=2 + number)
        door.admit(PATH, headers(claims=other), CLAIMS_OF_B.time_ms)
    with pytest.raises(Forbidden, match="taken"):
        door.admit(PATH, headers(), CLAIMS_OF_B.time_ms + 29_000)


def test_attempts_beyond_the_limit_are_refused_and_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caraserve.cluster.routing.forward_auth._MOST_REMEMBERED", 2)
    door, later = gate(NEW), dataclasses.replace(CLAIMS_OF_B, attempt=3, time_ms=CLAIMS_OF_B.time_ms + 60_000)
    for attempt in (1, 2):
        door.admit(PATH, headers(claims=dataclasses.replace(CLAIMS_OF_B, attempt=attempt)), CLAIMS_OF_B.time_ms)
    with pytest.raises(Overloaded):
        door.admit(PATH, headers(claims=dataclasses.replace(CLAIMS_OF_B, attempt=3)), CLAIMS_OF_B.time_ms)
    with pytest.raises(Forbidden, match="taken"):
        door.admit(PATH, headers(), CLAIMS_OF_B.time_ms)
    door.admit(PATH, headers(claims=later), later.time_ms)


def by_hand(text: str) -> dict[str, str]:
    """Returns headers with this text as claims, signed with the right secret."""
    return {CLAIMS_HEADER: text, SIGNATURE_HEADER: _mac(Keyring((NEW,)).forward_keys()[0], PATH, text)}


WRONG = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from([field.name for field in dataclasses.fields(ForwardClaims)]), WRONG)
def test_signed_claims_with_any_value_are_refused_or_well_typed(field: str, value: object) -> None:
    text = json.dumps(dataclasses.asdict(CLAIMS_OF_B) | {field: value})
    try:
        claims = gate(NEW).admit(PATH, by_hand(text), CLAIMS_OF_B.time_ms)
    except Forbidden:
        return
    types = {"adapter": (str, type(None)), "seed": (int, type(None))}
    assert type(getattr(claims, field)) in types.get(field, (type(getattr(CLAIMS_OF_B, field)),))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("receiver", 5), ("receiver", None), ("time_ms", "x"), ("time_ms", None), ("id", {}), ("attempt", [])),
        *(("sender", [1]), ("adapter", 5), ("adapter", [1]), ("adapter", {}), ("adapter", "../x"), ("force", 1)),
        *(("digest", None), ("seed", 1.5), ("seed", True), ("body_digest", 0), ("client", 5), ("unknown", 1)),
    ],
)
def test_signed_claims_of_wrong_types_are_forbidden(field: str, value: object) -> None:
    text = json.dumps(dataclasses.asdict(CLAIMS_OF_B) | {field: value})
    with pytest.raises(Forbidden, match=CLAIMS_HEADER):
        gate(NEW).admit(PATH, by_hand(text), CLAIMS_OF_B.time_ms)


@pytest.mark.parametrize("text", ["[" * 8000, "[" * 4000 + "]" * 4000, "null", "[]", '"x"', "{}", '{"id":' * 1000])
def test_a_signed_header_without_claims_is_forbidden(text: str) -> None:
    with pytest.raises(Forbidden, match=CLAIMS_HEADER):
        gate(NEW).admit(PATH, by_hand(text), CLAIMS_OF_B.time_ms)


@given(st.text(max_size=50), st.text(max_size=50))
def test_unsigned_claims_are_forbidden(text: str, signature: str) -> None:
    with pytest.raises(Forbidden):
        gate(NEW).admit(PATH, {CLAIMS_HEADER: text, "X-CaraServe-Signature": signature}, 0)


@given(
    st.sampled_from(["slo", "full", "draining", "no-adapter", "stale-epoch"]),
    st.floats(0, allow_nan=False),
    st.floats(0, allow_nan=False),
)
def test_a_refusal_is_parsed_as_it_was_formatted(reason: str, cost: float, latency_ms: float) -> None:
    refusal = Refusal(reason, CostEstimate(cost, latency_ms))  # type: ignore[arg-type]
    assert parse_refusal(format_refusal(refusal)) == refusal


@given(st.text())
def test_any_text_is_parsed_as_a_refusal(text: str) -> None:
    assert parse_refusal(text).estimate.cost >= 0


class Without:
    """A fetcher that can download nothing, because no instance has the adapter."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def ensure(self, name: str) -> None:
        self.asked.append(name)

    def can_get(self, name: str) -> bool:
        return False


async def test_requests_for_an_adapter_without_a_holder_are_refused_and_get_no_quote() -> None:
    router = selector(Cluster(0, 0), fetcher=Without())
    assert router.refusal(router.arrival(None, 10, 10), force=True) is None
    refusal = router.refusal(router.arrival("poet", 10, 10), force=True)
    assert refusal is not None
    assert refusal.reason == "no-adapter"
    assert router.quote("b", ("route", "poet", 10, 10.0))[:1] == (-1.0,)  # infinite, on the wire


async def test_obtain_calls_the_fetcher_also_for_a_local_adapter() -> None:
    without = Without()
    router = selector(Cluster(0), find=lambda name: RegisteredAdapter(name, "d", 8, 1), fetcher=without)
    await router.obtain("poet")
    assert without.asked == ["poet"]
