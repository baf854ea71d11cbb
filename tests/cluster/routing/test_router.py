"""Routing policies: they order instances as their papers do, and a request is tried at most once on each instance."""

import math
import random
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caraserve.cluster.placement.loraserve import make_plan
from caraserve.cluster.placement.plan import AdapterDemand, Server
from caraserve.cluster.routing.cost import Arrival, Backlog, CostEstimate, LinkSpeeds, cold_ms, estimate
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.placement_plan import PlacementPlan, Share
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.policy_rules import ATTEMPTS
from caraserve.cluster.routing.router import (
    Attempt,
    Fleet,
    Instance,
    LazyOrder,
    Reason,
    Refusal,
    RoutingTarget,
    SentRequests,
    apply_quotes,
    check_acceptance,
    next_target,
)
from caraserve.cluster.state.replicated_map import Tier
from caraserve.config import ROUTINGS
from caraserve.errors import ConfigError

PADDED = PerfModel(0.01, 0.0, 20.0, True, 5.0, 0.1, 0.0)
UNPADDED = PerfModel(0.01, 0.0, 20.0, False, 5.0, 0.1, 0.0)
LINKS = LinkSpeeds(0.1, 1e6, 1e5, 1.0, 1e5)
ARRIVAL = Arrival("a", 8, 100, 50.0, 10_000_000, 30.0)
NAMES = [f"i{index:02d}" for index in range(12)]


def instance(name: str, count: int = 0, rank: int = 8, model: PerfModel = PADDED, able: bool = True) -> Instance:
    return Instance(name, model, Backlog(count, rank * count, rank * (count > 0)), LINKS, able)


def fleet(loads: Mapping[str, tuple[int, int]], plan: PlacementPlan | None = None, me: str = "i00") -> Fleet:
    """Returns a fleet of instances with (requests, their rank), all with adapter a on their device."""
    instances = tuple(instance(name, *load) for name, load in loads.items())
    return Fleet.of(me, instances, {"a": dict.fromkeys(loads, Tier.DEVICE)}, plan)


def first(name: str, seen: Fleet, arrival: Arrival = ARRIVAL, seed: int = 0) -> str:
    return apply_quotes(Policy(name).propose(arrival, seen, random.Random(seed)), {})[0]


def plan_of(shares: Mapping[str, Mapping[str, float]], classes: Mapping[str, int]) -> PlacementPlan:
    return PlacementPlan.made(
        1, {a: tuple(Share(*share) for share in parts.items()) for a, parts in shares.items()}, classes
    )


# --- every policy ---


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Draws any view that one instance may have, even a wrong one."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=12, unique=True))
    instances = tuple(
        Instance(
            name,
            draw(st.sampled_from([PADDED, UNPADDED])),
            Backlog(
                (count := draw(st.integers(0, 50))),
                (rank := draw(st.sampled_from([0, 8, 64])) * (count > 0)) * count,
                rank,
                kv_free_tokens=draw(st.sampled_from([math.inf, 0.0, -500.0])),
                kv_tokens=draw(st.sampled_from([math.inf, 1e4, 100.0])),
                queue_room=draw(st.sampled_from([math.inf, 0, 1])),
            ),
            draw(st.sampled_from([LINKS, LinkSpeeds()])),
            draw(st.booleans()),
        )
        for name in names
    )
    tiers = draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from(Tier)))
    shares = draw(st.dictionaries(st.sampled_from("ab"), st.dictionaries(st.sampled_from(NAMES), st.floats(0.1, 1))))
    classes = draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from([8, 64])))
    plan = draw(st.sampled_from([None, plan_of(shares, classes)]))
    return Fleet.of(draw(st.sampled_from(NAMES)), instances, {"a": tiers}, plan)


ARRIVALS = st.builds(
    Arrival,
    st.sampled_from([None, "a", "unknown"]),
    st.sampled_from([0, 8, 64]),
    st.integers(1, 1000),
    st.floats(1, 500),
    st.sampled_from([0, 10_000_000]),
    st.sampled_from([1.0, 30.0, math.inf]),
)


@given(st.sampled_from(ROUTINGS), fleets(), ARRIVALS, st.integers(0, 9))
def test_every_policy_orders_each_able_instance_once(name: str, seen: Fleet, arrival: Arrival, seed: int) -> None:
    proposal = Policy(name).propose(arrival, seen, random.Random(seed))
    able = [*seen.able]
    assert sorted(proposal.order) == able
    assert set(proposal.ask) <= proposal.estimates.keys() <= set(able)
    assert proposal.ask == proposal.order[: len(proposal.ask)]
    assert sorted(apply_quotes(proposal, dict.fromkeys(proposal.ask[:2]))) == able


@given(st.sampled_from(ROUTINGS), fleets(), ARRIVALS, st.integers(0, 9), st.randoms())
def test_the_order_in_which_instances_are_known_does_not_matter(
    name: str, seen: Fleet, arrival: Arrival, seed: int, chance: random.Random
) -> None:
    known = [*seen.able.values(), instance("none", able=False)]
    other = Fleet.of(seen.me, chance.sample(known, len(known)), seen.tiers, seen.plan)
    proposals = [Policy(name).propose(arrival, view, random.Random(seed)) for view in (seen, other)]
    assert proposals[0] == proposals[1]


def test_an_unknown_policy_is_refused_with_a_list_of_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown routing policy 'best'; there are auto, rank-aware"):
        Policy("best")


# --- refusals ---


REASONS: tuple[Reason, ...] = ("slo", "full", "draining", "no-adapter", "stale-epoch")


@settings(max_examples=60)
@given(st.sampled_from(ROUTINGS), fleets(), ARRIVALS, st.data())
def test_a_request_is_neither_offered_to_nor_forced_on_an_instance_twice(
    name: str, view: Fleet, arrival: Arrival, data: st.DataObject
) -> None:
    """Checks it for all answers of the instances."""
    attempts: list[Attempt] = []
    order = apply_quotes(Policy(name).propose(arrival, view, random.Random(0)), {})
    while target := next_target(order, attempts, data.draw(st.floats(0, 1000)), 1000.0):
        refusal = st.builds(Refusal, st.sampled_from(REASONS), st.just(CostEstimate(1.0, 1.0)))
        attempts.append((target, data.draw(st.none() | refusal)))
        assert len(attempts) <= 2 * ATTEMPTS + ATTEMPTS
    told = [(target.name, target.force) for target, _ in attempts]
    assert len(told) == len(set(told))


def refused(reason: Reason, latency_ms: float = 1.0) -> Refusal:
    return Refusal(reason, CostEstimate(math.inf, latency_ms))


def test_after_three_refusals_the_request_is_forced_on_the_least_latency() -> None:
    order = ("a", "b", "c", "d")
    attempts: list[Attempt] = []
    for name, latency_ms in zip("abc", (70.0, 50.0, 60.0), strict=True):
        assert next_target(order, attempts, 0.0, 1000.0) == RoutingTarget(name)
        attempts.append((RoutingTarget(name), refused("slo", latency_ms)))
    assert next_target(order, attempts, 0.0, 1000.0) == RoutingTarget("b", force=True)
    attempts.append((RoutingTarget("b", True), None))  # it died
    assert next_target(order, attempts, 0.0, 1000.0) == RoutingTarget("c", force=True)


def test_refusals_may_take_a_fifth_of_the_time_to_the_first_token() -> None:
    attempts: list[Attempt] = [(RoutingTarget("a"), refused("slo"))]
    assert next_target(("a", "b"), attempts, 199.0, 1000.0) == RoutingTarget("b")
    assert next_target(("a", "b"), attempts, 200.0, 1000.0) == RoutingTarget("a", force=True)
    assert next_target(("a", "b"), [], 5000.0, 1000.0) == RoutingTarget("a")


def test_a_request_is_not_forced_on_an_instance_that_cannot_serve_it() -> None:
    attempts: list[Attempt] = [(RoutingTarget("a"), refused("draining")), (RoutingTarget("b"), refused("no-adapter"))]
    assert next_target(("a", "b"), attempts, 0.0, 1000.0) is None
    assert next_target(("a", "b", "c"), attempts, 900.0, 1000.0) == RoutingTarget("c", force=True)
    assert next_target((), [], 0.0, 1000.0) is None


def test_policies_without_an_slo_force_requests_from_the_start() -> None:
    assert [name for name in ROUTINGS if Policy(name).enforces_slo] == ["auto", "rank-aware"]
    assert next_target(("a",), [], 0.0, 1000.0, force=True) == RoutingTarget("a", force=True)


@pytest.mark.parametrize(
    ("own", "tier", "extra", "reason"),
    [
        (instance("i"), Tier.DEVICE, {}, None),
        (instance("i"), Tier.ABSENT, {}, None),
        (instance("i"), Tier.DEVICE, {"draining": True}, "draining"),
        (instance("i", 200), Tier.DEVICE, {}, "slo"),
        (Instance("i", PADDED, Backlog(queue_room=0)), Tier.DEVICE, {}, "full"),
        (Instance("i", PADDED, Backlog(kv_tokens=10)), Tier.DEVICE, {}, "full"),
    ],
)
def test_only_a_refusal_because_of_the_slo_can_be_overruled_by_force(
    own: Instance, tier: Tier, extra: dict[str, bool], reason: Reason | None
) -> None:
    asked = check_acceptance(ARRIVAL, own, tier, force=False, **extra)
    told = check_acceptance(ARRIVAL, own, tier, force=True, **extra)
    assert (asked.reason if asked else None) == reason
    assert (told.reason if told else None) == (None if reason == "slo" else reason)


# --- orders ---


def test_the_rest_of_an_order_is_computed_only_when_it_is_read() -> None:
    reads: list[int] = []

    def rest() -> list[str]:
        reads.append(1)
        return ["b", "a", "c"]

    order = LazyOrder(["a"], rest)
    assert (order[0], bool(order), next(iter(order)), reads) == ("a", True, "a", [])
    assert [*order] == ["a", "b", "c"]
    assert (len(order), order[-1], order[1:], order == ("a", "b", "c"), reads) == (3, "c", ("b", "c"), True, [1])
    assert not LazyOrder([], list)
    assert LazyOrder([], lambda: ["a"])[0] == "a"


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_first_choice_is_made_without_ordering_the_others(name: str) -> None:
    plan = plan_of({"a": {"i01": 0.5, "i02": 0.5}}, dict.fromkeys(NAMES, 8))
    order = apply_quotes(Policy(name).propose(ARRIVAL, fleet(dict.fromkeys(NAMES, (3, 8)), plan), random.Random(0)), {})
    assert next_target(order, [], 0.0, 100.0) == RoutingTarget(order[0])
    assert isinstance(order, LazyOrder)
    assert order._rest is not None


# --- by cost ---


def test_ties_of_cost_are_decided_by_latency_and_then_at_random() -> None:
    requests = {"a": 0, "b": 0, "past the SLO": 9, "further past the SLO": 10}
    padded = PerfModel(0.0, 10.0, 20.0, True, 5.0, 0.1, 0.0)
    seen = Fleet.of("a", [Instance(name, padded, Backlog(count, 8 * count, 8)) for name, count in requests.items()])
    arrival = Arrival(None, 0, 10, 5.0, slo_ms=50.0)
    orders = {tuple(Policy("rank-aware").propose(arrival, seen, random.Random(seed)).order) for seed in range(20)}
    last = ("past the SLO", "further past the SLO")
    assert {order[2:] for order in orders} == {last}
    assert {first("rank-aware", seen, arrival, seed) for seed in range(20)} == {"a", "b"}


def test_the_base_model_is_downloaded_by_no_instance() -> None:
    seen = Fleet.of("a", [Instance(name, UNPADDED, links=LinkSpeeds(fetch_latency_ms=1000.0)) for name in "ab"])
    estimates = Policy("rank-aware").propose(Arrival(None, 0, 10, 5.0), seen, random.Random(0)).estimates
    assert {one.cost for one in estimates.values()} == {0}


def test_padding_keeps_ranks_apart_where_counts_would_mix_them() -> None:
    seen = fleet({"i00": (10, 8), "i01": (12, 64)})
    large = Arrival("a", 64, 100, 50.0)
    assert first("rank-aware", seen, large) == "i01"
    assert first("most-idle", seen, large) == "i00"


@pytest.mark.parametrize("name", ["rank-aware", "auto"])
def test_four_of_the_best_eight_are_queried_and_the_least_quote_wins(name: str) -> None:
    seen = fleet({name: (index + 1, 8) for index, name in enumerate(NAMES)}, me="elsewhere")
    asked: Counter[str] = Counter()
    for seed in range(200):
        proposal = Policy(name).propose(ARRIVAL, seen, random.Random(seed))
        assert len(proposal.ask) == 4
        asked.update(proposal.ask)
        quotes = {one: CostEstimate(float(index), 1.0) for index, one in enumerate(reversed(proposal.ask))}
        assert apply_quotes(proposal, quotes)[0] == proposal.ask[-1]
        # A quote that did not come: the old estimate stands.
        late: dict[str, CostEstimate | None] = dict.fromkeys(proposal.ask, CostEstimate(1e9, 1e9))
        late[proposal.ask[2]] = None
        assert apply_quotes(proposal, late)[0] == proposal.ask[2]
    assert set(asked) == set(NAMES[:8])
    assert min(asked.values()) > 60  # of 100 expected


@given(fleets(), ARRIVALS, st.integers(0, 9))
def test_the_order_is_that_of_all_estimates(seen: Fleet, arrival: Arrival, seed: int) -> None:
    draw, tiers = random.Random(seed).random, seen.tiers["a"] if arrival.adapter == "a" else {}
    missing = Tier.DEVICE if arrival.adapter is None else Tier.ABSENT
    ranked = []
    for name, one in seen.able.items():
        links, tier = one.links, tiers.get(name, missing)
        plain = estimate(one.model, one.backlog, arrival, cold_ms(links, tier, arrival.adapter_bytes), False, 0.0)
        assert one.estimate(arrival, tier, 0.0) == plain
        ranked.append((plain, draw(), name))
    proposal = Policy("rank-aware").propose(arrival, seen, random.Random(seed))
    asked = set(proposal.ask)
    assert [*proposal.order[len(asked) :]] == [name for _, _, name in sorted(ranked) if name not in asked]
    assert proposal.estimates == {name: worth for worth, _, name in ranked if name in asked}


def test_the_routers_own_instance_is_among_those_compared() -> None:
    seen = fleet({name: (index + 1, 8) for index, name in enumerate(NAMES)}, me="i05")
    for seed in range(20):
        proposal = Policy("auto").propose(ARRIVAL, seen, random.Random(seed))
        assert "i05" in proposal.ask
        assert len(proposal.ask) in (4, 5)


def test_if_all_instances_are_past_the_slo_eight_are_queried() -> None:
    seen = fleet({name: (200 + index, 8) for index, name in enumerate(NAMES)})
    proposal = Policy("rank-aware").propose(ARRIVAL, seen, random.Random(0))
    assert proposal.ask == tuple(NAMES[:8])
    assert apply_quotes(proposal, {})[0] == "i00"  # the least late


def test_the_download_of_an_adapter_is_part_of_the_cost() -> None:
    seen = Fleet.of("me", (instance("i00"), instance("i01")), {"a": {"i01": Tier.HOST}})
    assert {first("rank-aware", seen, seed=seed) for seed in range(10)} == {"i01"}
    busy = Fleet.of("me", (instance("i00"), instance("i01", 30)), {"a": {"i01": Tier.HOST}})
    assert first("rank-aware", busy) == "i00"


def test_ties_are_broken_at_random() -> None:
    seen = fleet(dict.fromkeys(NAMES[:6], (3, 8)), me="elsewhere")
    for name in ("rank-aware", "auto", "most-idle", "random", "dlora"):
        assert {first(name, seen, seed=seed) for seed in range(100)} == set(NAMES[:6])


# --- auto: circles ---

CLASSES = {"i00": 8, "i01": 8, "i02": 8, "i03": 64}
PLAN = plan_of({"a": {"i00": 0.5, "i01": 0.5}}, CLASSES)


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((5, 6, 0, 0), "i00"),  # its own copies are good enough: nothing spreads
        ((200, 200, 20, 0), "i02"),  # they are past the SLO: the class
        ((200, 200, 200, 1), "i03"),  # so is the class
        ((220, 210, 200, 205), "i02"),  # so is everyone
    ],
)
def test_auto_uses_the_smallest_group_within_the_slo(loads: tuple[int, ...], expected: str) -> None:
    seen = fleet({name: (count, 8) for name, count in zip(CLASSES, loads, strict=True)}, PLAN, me="elsewhere")
    assert first("auto", seen) == expected


def test_auto_prefers_an_iteration_within_the_slo_when_no_answer_is_end_to_end() -> None:
    short = Arrival("a", 8, 1000, 2.0, slo_ms=30.0)  # 105 ms of prefill over two tokens
    seen = fleet({"i00": (5, 8), "i01": (200, 8), "i02": (0, 8), "i03": (0, 8)}, PLAN, me="elsewhere")
    assert first("auto", seen, short) == "i00"


def test_auto_leaves_a_long_queue_though_its_iterations_are_within_the_slo() -> None:
    waiting = Backlog(10, 80, 8, 20_000, 160_000)  # 2 s of prefill over 50 tokens
    instances = [Instance(name, PADDED, waiting, LINKS) for name in ("i00", "i01")] + [instance("i02", 5)]
    assert first("auto", Fleet.of("elsewhere", instances, {}, PLAN)) == "i02"


def test_auto_tries_the_class_after_the_adapters_own_instances() -> None:
    plan = plan_of({"a": {"i00": 0.5, "i01": 0.5}}, {**CLASSES, "i04": 8})
    seen = fleet({"i00": (1, 8), "i01": (1, 8), "i02": (9, 8), "i03": (0, 8), "i04": (4, 8)}, plan)
    order = Policy("auto").propose(ARRIVAL, seen, random.Random(0)).order
    assert order[2:] == ("i04", "i02", "i03")  # of the class the less busy one first


def test_auto_sends_an_adapter_outside_the_plan_to_its_ranks_class() -> None:
    seen = fleet(dict.fromkeys(CLASSES, (3, 8)), PLAN, me="elsewhere")
    for rank, expected in [(8, {"i00", "i01", "i02"}), (16, {"i03"}), (128, {"i03"})]:
        arrival = Arrival("unknown", rank, 100, 50.0)
        assert {first("auto", seen, arrival, seed) for seed in range(30)} == expected


# --- the others ---


def test_loraserve_draws_by_fraction() -> None:
    seen = fleet(dict.fromkeys(CLASSES, (3, 8)), plan_of({"a": {"i00": 0.25, "i03": 0.75}}, CLASSES))
    chance = random.Random(0)
    firsts = Counter(Policy("loraserve").propose(ARRIVAL, seen, chance).order[0] for _ in range(2000))
    assert firsts.keys() == {"i00", "i03"}
    assert firsts["i03"] == pytest.approx(1500, abs=80)


def test_a_plan_whose_fractions_are_all_zero_is_drawn_from_evenly() -> None:
    seen = fleet(dict.fromkeys(NAMES, (3, 8)), plan_of({"a": {"i00": 0.0, "i01": 0.0}}, dict.fromkeys(NAMES, 8)))
    chance = random.Random(0)
    firsts = Counter(Policy("loraserve").propose(ARRIVAL, seen, chance).order[0] for _ in range(200))
    assert firsts.keys() == {"i00", "i01"}
    assert firsts["i00"] == pytest.approx(100, abs=30)


def test_loraserve_orders_by_hash_for_an_adapter_outside_the_plan() -> None:
    seen = fleet(dict.fromkeys(NAMES, (3, 8)), PLAN)
    arrivals = [Arrival(f"unknown-{index}", 8, 100, 50.0) for index in range(50)]
    firsts = [first("loraserve", seen, arrival, seed=1) for arrival in arrivals]
    assert firsts == [first("loraserve", seen, arrival, seed=2) for arrival in arrivals]
    assert len(set(firsts)) > 6


def test_a_planned_instance_that_is_not_able_is_skipped() -> None:
    instances = (instance("i00", able=False), instance("i01"), instance("i02"))
    for name in ("loraserve", "s-lora-random", "auto"):
        assert first(name, Fleet.of("i02", instances, {}, PLAN)) == "i01"


def test_s_lora_plans_are_static_and_one_instance_each() -> None:
    adapters = [AdapterDemand(f"a{index}", 8 * 2 ** (index % 4), 1) for index in range(40)]
    servers = [Server(name, 100) for name in NAMES[:4]]
    contiguous = make_plan("s-lora-contiguous", adapters, servers, {}, 1)
    by_hash = make_plan("s-lora-random", adapters, servers, {}, 1)
    assert contiguous is not None
    assert by_hash is not None
    assert contiguous.classes == {"i00": 8, "i01": 16, "i02": 32, "i03": 64}
    assert Counter(shares[0].instance for shares in contiguous.shares.values()) == dict.fromkeys(NAMES[:4], 10)
    assert {len(shares) for shares in by_hash.shares.values()} == {1}
    assert len({shares[0].instance for shares in by_hash.shares.values()}) == 4
    assert make_plan("random", adapters, servers, {}, 1) is None
    points = {8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0}
    assert make_plan("auto", adapters, servers, points, 1) == make_plan("loraserve", adapters, servers, points, 1)


def test_round_robin_chooses_one_instance_after_the_other() -> None:
    seen, chosen = fleet(dict.fromkeys(NAMES[:3], (3, 8))), Policy("round-robin")
    firsts = [chosen.propose(ARRIVAL, seen, random.Random(0)).order[0] for _ in range(7)]
    assert firsts == ["i00", "i01", "i02", "i00", "i01", "i02", "i00"]


@pytest.mark.parametrize(
    ("counts", "expected"), [((31, 0, 0), "i00"), ((32, 5, 0), "i01"), ((40, 35, 36), "i01"), ((0, 0, 0), "i00")]
)
def test_first_fit_fills_one_instance_after_the_other(counts: tuple[int, ...], expected: str) -> None:
    assert first("first-fit", fleet({name: (count, 8) for name, count in zip(NAMES, counts, strict=False)})) == expected


def test_dlora_takes_the_least_loaded_holder() -> None:
    instances = (instance("i00", 9), instance("i01", 4), instance("i02", 0))
    seen = Fleet.of("i00", instances, {"a": {"i00": Tier.HOST, "i01": Tier.DISK}})
    assert Policy("dlora").propose(ARRIVAL, seen, random.Random(0)).order == ("i01", "i00", "i02")


# --- what a router has sent ---


def test_sent_requests_count_until_a_heartbeat_includes_them() -> None:
    sent_requests, published = SentRequests(), Backlog(1, 8, 8)
    sent_requests.add("i", ARRIVAL, 10.0)
    sent_requests.add("i", Arrival("b", 64, 10, 5.0), 10.2)
    assert sent_requests.backlog("i", published, 10.2)[:3] == (3, 80, 64)
    assert sent_requests.backlog("other", published, 10.2) == published
    sent_requests.on_heartbeat("i", 10.22)  # sent before the second request arrived
    assert sent_requests.backlog("i", published, 10.25)[:3] == (2, 72, 64)
    assert sent_requests.backlog("i", published, 12.3) == published  # no heartbeat for over 2 s
    sent_requests.on_heartbeat("i", 12.3)
    assert sent_requests._sent == {}


def test_requests_sent_to_instances_that_left_are_forgotten() -> None:
    sent_requests = SentRequests()
    sent_requests.add("i", ARRIVAL, 10.0)
    sent_requests.forget(["i", "unknown"])
    assert sent_requests.backlog("i", Backlog(), 10.0) == Backlog()
