"""Plans that change, views that are old, crashes, partitions and restarts: the last copy of an adapter is deleted by
nobody."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from caraserve.cluster.assignment import AdapterDemand, Plan, Share
from caraserve.cluster.copies import Copies
from caraserve.cluster.migration import MigrationLimits, Mover

NAMES = ("a", "b", "c", "d")
ADAPTERS = {name: AdapterDemand(name, 8, 10, 1.0) for name in ("x", "y")}
TTL_S = 30.0


class Instance:
    """What one knows: its own copies for certain, the others' as it last heard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.copies = Copies()
        self.mover = Mover(name, MigrationLimits())
        self.view: dict[str, set[str]] = {adapter: set() for adapter in ADAPTERS}
        self.plan: Plan | None = None

    def held(self) -> set[str]:
        return {adapter for adapter in ADAPTERS if self.copies.has(adapter)}


class Fleet(RuleBasedStateMachine):
    """Each step is one thing that happens somewhere; who hears of it when is drawn, too."""

    @initialize(seed=st.integers(0, 9999))
    def begin(self, seed: int) -> None:
        self.rng = Random(seed)
        self.now = 0.0
        self.instances = {name: Instance(name) for name in NAMES}
        self.cut: set[str] = set()  # those that reach only one another
        self.epoch = 0
        for adapter in ADAPTERS:
            self.instances["a"].copies.verified(adapter)

    @rule(who=st.sampled_from(NAMES), others=st.sets(st.sampled_from(NAMES), min_size=1, max_size=2))
    def plan_reaches(self, who: str, others: set[str]) -> None:
        """Plans are made by views, so there are several at once, and not all get all of them."""
        self.epoch += 1
        shares = tuple(Share(name, 1 / len(others)) for name in sorted(others))
        self.instances[who].plan = Plan.made(self.epoch, dict.fromkeys(ADAPTERS, shares), dict.fromkeys(NAMES, 8))

    @rule(who=st.sampled_from(NAMES), whom=st.sampled_from(NAMES))
    def hears_of(self, who: str, whom: str) -> None:
        if self._reaches(who, whom):
            for adapter, holders in self.instances[who].view.items():
                (holders.add if self.instances[whom].copies.has(adapter) else holders.discard)(whom)

    @rule(who=st.sampled_from(NAMES))
    def fetches(self, who: str) -> None:
        one = self.instances[who]
        if one.plan is None:
            return
        for adapter in one.mover.fetches(one.plan, one.held(), ADAPTERS, self.now):
            if any(self._reaches(who, other) and self.instances[other].copies.has(adapter) for other in NAMES):
                one.copies.verified(adapter)
            one.mover.done(adapter)

    @rule(who=st.sampled_from(NAMES), is_late=st.booleans())
    def lets_go(self, who: str, is_late: bool) -> None:
        one = self.instances[who]
        if one.plan is None:
            return
        views = {adapter: holders | {who} for adapter, holders in one.view.items()}
        for adapter in one.mover.drops(one.plan, one.held(), views):
            holders = sorted(one.view[adapter] - {who})
            number = one.copies.ask(adapter, TTL_S, self.now)
            if number is None or not holders:
                one.copies.give_up(adapter)
                continue
            other = self.instances[self.rng.choice(holders)]
            kept = self._reaches(who, other.name) and other.copies.promise(adapter, TTL_S, self.now)
            self.now += 40.0 if is_late else 0.1
            one.copies.answered(adapter, number, kept, self.now)

    @rule(cut=st.sets(st.sampled_from(NAMES), max_size=3))
    def parts(self, cut: set[str]) -> None:
        self.cut = cut

    @rule(who=st.sampled_from(NAMES))
    def restarts(self, who: str) -> None:
        """It finds its files, and keeps them for as long as it may have promised."""
        old, new = self.instances[who], Instance(who)
        held = old.held()
        new.copies.restore(held, dict.fromkeys(held, TTL_S), self.now)
        self.instances[who] = new

    @rule(who=st.sampled_from(NAMES))
    def loses_its_disk(self, who: str) -> None:
        """With all its adapters, those excepted that it alone has: they are lost with any rule."""
        held = {adapter for other in NAMES if other != who for adapter in self.instances[other].held()}
        if self.instances[who].held() <= held:
            self.instances[who] = Instance(who)

    @rule(seconds=st.sampled_from([1.0, 10.0, 35.0]))
    def waits(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def every_adapter_is_somewhere(self) -> None:
        if hasattr(self, "instances"):
            assert set().union(*(one.held() for one in self.instances.values())) == set(ADAPTERS)

    def _reaches(self, who: str, whom: str) -> bool:
        return (who in self.cut) == (whom in self.cut)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
