"""The fleet as one router sees it: each instance's newest heartbeat, plus what this router has sent there since.

Reading all instances takes some 10 µs and happens at most every 20 ms, when a request needs it. In between, each
request sent to an instance, this one included, is added to the view of that instance.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter

from caraserve.cluster.membership.member import Member
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.routing.cost import Arrival
from caraserve.cluster.routing.placement_plan import PlacementPlan
from caraserve.cluster.routing.router import Fleet, Instance, SentRequests
from caraserve.cluster.state.replicated_map import Tier

_NAME = attrgetter("name")
_REFRESH_S = 0.02
_TIERS_S = 0.25  # a heartbeat's period; a wrong guess costs a download
_MAX_DIGESTS = 4096
_UNREACHABLE_S = 1.0  # after a failed connection; by then membership has detected a dead instance
_MOST_DOUBLINGS = 8  # of that time, for an instance that fails again and again although its heartbeats come


class FleetView:
    """The loads, adapters and placement plan that routing decisions use."""

    def __init__(self, member: Member, views: InstanceViews, now: Callable[[], float]) -> None:
        self.plan: PlacementPlan | None = None
        self._member, self._views, self._now = member, views, now
        self._sent = SentRequests()
        self._published: dict[str, Instance] = {}
        self._seen: dict[str, Instance] = {}  # as published, with what was sent since
        self._refreshed_s = float("-inf")
        self._tiers: dict[str, tuple[float, Mapping[str, Tier]]] = {}
        self._unreachable_until_s: dict[str, float] = {}
        self._failures: dict[str, int] = {}  # of each instance, since it was last reached

    def fleet(self, adapter: str | None, digests: Sequence[str], *, holders_only: bool) -> Fleet:
        """Returns the fleet for a request with that adapter. `digests`: several of a combination. `holders_only`: no
        instance could download it."""
        self._refresh()
        if self._unreachable_until_s:
            now = self._now()
            self._unreachable_until_s = {name: s for name, s in self._unreachable_until_s.items() if s > now}
        able = {name: one for name, one in self._seen.items() if one.able and name not in self._unreachable_until_s}
        if adapter is None:
            return Fleet(self._member.name, able, {}, self.plan)
        tiers = self.tiers(digests)
        if holders_only:
            able = {name: one for name, one in able.items() if name in tiers}
        return Fleet(self._member.name, able, {adapter: tiers}, self.plan)

    def tiers(self, digests: Sequence[str]) -> Mapping[str, Tier]:
        """Returns the instances that have the bytes of these adapters, of one or of all in a combination, with the
        farthest tier where they have them."""
        first, *others = map(self._tiers_of, digests)
        if not others:
            return first
        return {
            name: max([tier, *(other[name] for other in others)])
            for name, tier in first.items()
            if all(name in other for other in others)
        }

    def _tiers_of(self, digest: str) -> Mapping[str, Tier]:
        now = self._now()
        known = self._tiers.get(digest)
        if known is None or now - known[0] > _TIERS_S:
            if len(self._tiers) >= _MAX_DIGESTS:
                self._tiers.clear()
            known = self._tiers[digest] = now, self._member.holders(digest)
        return known[1]

    def instance(self, name: str) -> Instance | None:
        """Returns the view of one instance."""
        self._refresh()
        return self._seen.get(name)

    def add_sent(self, name: str, arrival: Arrival) -> None:
        """Adds a request that goes to an instance and that no heartbeat shows yet."""
        seen = self._seen.get(name)
        if seen is None:
            return
        if name != self._member.name:  # the next refresh shows this instance's own work
            self._sent.add(name, arrival, self._now())
        backlog = seen.backlog.plus(arrival.rank, arrival.prompt_tokens, arrival.output_tokens)
        self._seen[name] = seen.with_backlog(backlog)

    def mark_unreachable(self, name: str) -> None:
        """Leaves an instance out for 1 s, after a connection failed or broke, and for twice as long each time that it
        fails after that. Failures of requests that were sent before count as one."""
        now = self._now()
        if self._unreachable_until_s.get(name, now) <= now:
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            self._unreachable_until_s[name] = now + _UNREACHABLE_S * 2 ** min(failures - 1, _MOST_DOUBLINGS)

    def mark_reached(self, name: str) -> None:
        """Ends the count of an instance's failures."""
        self._failures.pop(name, None)

    def _refresh(self) -> None:
        now = self._now()
        if now - self._refreshed_s < _REFRESH_S:
            return
        self._refreshed_s = now
        published = {one.name: one for one in sorted(self._views.instances(), key=_NAME)}
        gone = self._published.keys() - published.keys()
        self._sent.forget(gone)
        for name in gone:
            self._failures.pop(name, None)
            self._unreachable_until_s.pop(name, None)
        seen = {}
        for name, instance in published.items():
            if self._published.get(name) is instance:
                seen[name] = self._seen[name]
                continue
            self._sent.on_heartbeat(name, now)
            seen[name] = instance
            if name in self._sent:
                seen[name] = instance.with_backlog(self._sent.backlog(name, instance.backlog, now))
        self._published, self._seen = published, seen
