"""The fleet as one router sees it: every instance's newest beat, and on top what was sent there since.

A look at all instances is worth a few ten microseconds and is made at most every 20 ms, when somebody asks. In between,
whatever is sent somewhere is added to that one's view, our own included.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Protocol

from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.placement.plan import PlacementPlan
from caraserve.cluster.routing.cost import Arrival, Tier
from caraserve.cluster.routing.router import Fleet, Instance, SentRequests

_NAME = attrgetter("name")
_LOOK_S = 0.02
_TIERS_S = 0.25  # as long as a beat: a wrong guess costs a fetch
_MOST_DIGESTS = 4096
_SHUNNED_S = 1.0  # after a failed connection; by then membership knows more


class PeerStates(Protocol):
    """What is known of all instances; `cluster.Node` satisfies it."""

    @property
    def name(self) -> str: ...

    def instances(self) -> tuple[Instance, ...]: ...

    def record(self, name: str) -> MemberRecord | None: ...

    def holders(self, digest: str) -> Mapping[str, Tier]: ...


class FleetView:
    """What routing decisions rest on."""

    def __init__(self, peers: PeerStates, now: Callable[[], float]) -> None:
        self.plan: PlacementPlan | None = None
        self._peers, self._now = peers, now
        self._ledger = SentRequests()
        self._bases: dict[str, Instance] = {}  # as they were published
        self._seen: dict[str, Instance] = {}  # with what was sent since, by name
        self._looked_s = float("-inf")
        self._tiers: dict[str, tuple[float, Mapping[str, Tier]]] = {}
        self._shunned: dict[str, float] = {}  # until when

    def fleet(self, adapter: str | None, digest: str, *, holders_only: bool) -> Fleet:
        """The fleet for a request with that adapter. `holders_only`: nobody could get what it does not have."""
        self._look()
        if self._shunned:
            now = self._now()
            self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        able = {name: one for name, one in self._seen.items() if one.able and name not in self._shunned}
        if adapter is None:
            return Fleet(self._peers.name, able, {}, self.plan)
        tiers = self.tiers(digest)
        if holders_only:
            able = {name: one for name, one in able.items() if name in tiers}
        return Fleet(self._peers.name, able, {adapter: tiers}, self.plan)

    def tiers(self, digest: str) -> Mapping[str, Tier]:
        """Who has an adapter's bytes, and where."""
        now = self._now()
        known = self._tiers.get(digest)
        if known is None or now - known[0] > _TIERS_S:
            if len(self._tiers) >= _MOST_DIGESTS:
                self._tiers.clear()
            known = self._tiers[digest] = now, self._peers.holders(digest)
        return known[1]

    def of(self, name: str) -> Instance | None:
        """One of them, ourselves for example."""
        self._look()
        return self._seen.get(name)

    def sent(self, name: str, arrival: Arrival) -> None:
        """A request goes there, and no beat shows it yet."""
        seen = self._seen.get(name)
        if seen is None:
            return
        if name != self._peers.name:  # our own work is seen at the next look
            self._ledger.sent(name, arrival, self._now())
        backlog = seen.backlog.plus(arrival.rank, arrival.prompt_tokens, arrival.output_tokens)
        self._seen[name] = replace(seen, backlog=backlog)

    def mark_unreachable(self, name: str) -> None:
        """No connection came about, or it broke."""
        self._shunned[name] = self._now() + _SHUNNED_S

    def _look(self) -> None:
        now = self._now()
        if now - self._looked_s < _LOOK_S:
            return
        self._looked_s = now
        bases = {one.name: one for one in sorted(self._peers.instances(), key=_NAME)}
        self._ledger.forget(self._bases.keys() - bases.keys())
        seen = {}
        for name, base in bases.items():
            if self._bases.get(name) is base:
                seen[name] = self._seen[name]
                continue
            self._ledger.beat(name, now)
            seen[name] = base
            if name in self._ledger:
                seen[name] = replace(base, backlog=self._ledger.backlog(name, base.backlog, now))
        self._bases, self._seen = bases, seen
