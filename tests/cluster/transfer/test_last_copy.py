"""The last copy of an adapter is never deleted, despite changing plans, old views, late answers, partitions, restarts
and lost disks."""

from collections.abc import Callable
from random import Random

import pytest

from caraserve.cluster.routing.placement_plan import PlacementPlan
from caraserve.cluster.routing.shares import Share
from caraserve.cluster.transfer.delete_lease import DeleteLeases
from caraserve.cluster.transfer.reconciler import is_elsewhere

NAMES = ("a", "b", "c")
TTL_S = 30.0
WALKS, STEPS = 150, 150


class Instance:
    """One instance: its own copies, and its possibly outdated view of the other holders."""

    def __init__(self) -> None:
        self.copies = DeleteLeases()
        self.view: set[str] = set()


class Fleet:
    """Instances to which a random event happens at each step."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.now, self.epoch = rng, 0.0, 0
        self.instances = {name: Instance() for name in NAMES}
        self.cut: set[str] = set()  # those that reach only one another
        self.answers: list[Callable[[], None]] = []  # on their way
        self.instances["a"].copies.verified("x")

    def step(self) -> None:
        who = self.rng.choice(NAMES)
        things = (self.fetches, self.fetches, self.lets_go, self.lets_go, self.lets_go, self.hears, self.hears)
        self.rng.choice((*things, self.gets_an_answer, self.parts, self.restarts, self.loses_its_disk))(who)
        self.now += self.rng.choice((0.0, 0.1, 10.0, 40.0))

    def plan(self) -> PlacementPlan:
        """Makes a random plan for one instance: instances may have different plans at one time."""
        self.epoch += 1
        others = self.rng.sample(NAMES, self.rng.randint(1, 2))
        shares = tuple(Share(name, 1 / len(others)) for name in others)
        return PlacementPlan.made(self.epoch, {"x": shares}, dict.fromkeys(NAMES, 8))

    def fetches(self, who: str) -> None:
        one = self.instances[who]
        sources = [name for name in NAMES if self.reaches(who, name) and self.instances[name].copies.has("x")]
        if who in self.plan().instances("x") and sources:
            one.copies.verified("x")

    def lets_go(self, who: str) -> None:
        one = self.instances[who]
        holders = sorted(one.view - {who})
        if not holders or not one.copies.has("x") or not is_elsewhere(self.plan(), "x", who, one.view | {who}):
            return
        number = one.copies.start_delete("x", TTL_S, self.now)
        other = self.rng.choice(holders)
        if number is None:
            return
        if not self.reaches(who, other):
            one.copies.finish_delete("x", number, False, self.now)
            return
        kept = self.instances[other].copies.promise("x", TTL_S, self.now)
        self.answers.append(lambda: one.copies.finish_delete("x", number, kept, self.now) and None)
        if self.rng.random() < 0.7:
            self.gets_an_answer(who)

    def gets_an_answer(self, who: str) -> None:
        if self.answers:
            self.answers.pop(self.rng.randrange(len(self.answers)))()

    def hears(self, who: str) -> None:
        for whom in (name for name in NAMES if self.reaches(who, name)):
            (self.instances[who].view.add if self.instances[whom].copies.has("x") else self._unheard(who))(whom)

    def _unheard(self, who: str) -> Callable[[str], None]:
        return self.instances[who].view.discard

    def parts(self, who: str) -> None:
        self.cut = set(self.rng.sample(NAMES, self.rng.randint(0, 2)))

    def restarts(self, who: str) -> None:
        """Restarts an instance. It restores its files and keeps them as long as it may have promised; answers to its
        earlier run are lost."""
        old, self.instances[who] = self.instances[who], Instance()
        self.instances[who].copies.restore(old.copies.digests(), TTL_S, self.now)

    def loses_its_disk(self, who: str) -> None:
        """Loses an instance's disk, if another one has a copy that it is not about to delete: otherwise no rule could
        keep the adapter."""
        others = [self.instances[name].copies for name in NAMES if name != who]
        if self.rng.random() < 0.2 and any(copies.has("x") and "x" not in copies._asked for copies in others):
            self.instances[who] = Instance()

    def reaches(self, who: str, whom: str) -> bool:
        return (who in self.cut) == (whom in self.cut)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_copy_is_never_deleted(seed: int) -> None:
    rng = Random(seed)
    deleted = 0
    for _ in range(WALKS):
        fleet = Fleet(rng)
        for _ in range(STEPS):
            before = sum(one.copies.has("x") for one in fleet.instances.values())
            fleet.step()
            held = sum(one.copies.has("x") for one in fleet.instances.values())
            assert held > 0
            deleted += held < before
    assert deleted > WALKS  # or it was no test
