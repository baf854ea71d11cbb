"""Makes the fleet's placement plan: one instance makes it for each time step, and all adopt it.

    demand of every instance ─► first live member by the hash of the step ─► plan ─► others pull it by its digest
                                 (after its silence the second one)           └─► `reconciler.py` moves towards it

Two plans at once only cost efficiency: the later step's is in force, and of one step's two the one with the greater
digest.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from aiohttp import web

from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.peer_client import PeerClient, TransferFailure, check_peer
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.placement.plan import MAX_PLAN_BYTES, AdapterDemand, Server, decoded, extrapolated, planners
from caraserve.cluster.placement.planner_process import Question, ask
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.placement_plan import PlacementPlan
from caraserve.cluster.routing.price_metrics import TypicalRequest
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.core.adapter_rules import DIGEST
from caraserve.core.batch import ScheduledRow
from caraserve.engine.active_request import ActiveRequest
from caraserve.telemetry.prometheus import family

log = logging.getLogger(__name__)

PATH = "/cluster/placement"
STEP_S = 60.0  # a time step: demand is counted by steps, and each has a plan
PLAN, ROOM = ":plan", ":room"  # keys of an instance's own map: (epoch, digest); bytes of adapters that it can store

_MAKING_S = 120.0
_MAX_DEMAND_BYTES = 8 << 20
_MOST_TOKENS_PER_S = 1e9  # of one adapter on one instance; larger numbers are errors
_AHEAD = 1  # steps by which another instance's clock may be ahead of this one's
Rates = Mapping[str, tuple[float, float]]  # adapter → tokens/s in the last step but one, and in the last

_RUNNING = 64  # running requests of an instance, for its operating point


class DemandCounter:
    """Counts the tokens that one instance has answered, for the current time step and the two before."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[str, int]] = {}

    def count(self, name: str, wall_s: float, tokens: int = 1) -> None:
        """Adds tokens to an adapter's count in the time step of `wall_s`."""
        step = int(wall_s / STEP_S)
        counts = self._steps.get(step)
        if counts is None:
            self._steps = {old: kept for old, kept in self._steps.items() if old >= step - 2}
            counts = self._steps[step] = {}
        counts[name] = counts.get(name, 0) + tokens

    def rates(self, epoch: int) -> dict[str, tuple[float, float]]:
        """Returns tokens/s in the two steps before an epoch, earlier one first, of adapters that had any."""
        before, latest = self._steps.get(epoch - 2, {}), self._steps.get(epoch - 1, {})
        names = before.keys() | latest.keys()
        return {name: (before.get(name, 0) / STEP_S, latest.get(name, 0) / STEP_S) for name in names}


def expected_demand(parts: Iterable[Rates]) -> dict[str, float]:
    """Predicts each adapter's tokens/s in the next step, over all instances, from the last two steps."""
    sums: dict[str, tuple[float, float]] = {}
    for rates in parts:
        for name, (before, latest) in rates.items():
            known = sums.get(name, (0.0, 0.0))
            sums[name] = known[0] + before, known[1] + latest
    return {name: extrapolated(before, latest) for name, (before, latest) in sums.items()}


@dataclass(frozen=True, slots=True)
class PlannerTiming:
    """Intervals and waiting times of a planner."""

    look_s: float = 1.0  # between checks for a new step or a published plan
    settle_s: float = 3.0  # after joining, until the other instances are known
    silence_s: float = 10.0  # after which the next instance in order makes the plan


class PlacementPlanner:
    """Counts one instance's demand, makes plans when it is this instance's turn, and adopts those of others."""

    def __init__(
        self,
        member: Member,
        views: InstanceViews,
        transfers: PeerClient,
        routing: str,
        room_bytes: int,
        slo_ms: float,
        on_plan: Callable[[PlacementPlan], None],
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pace: PlannerTiming | None = None,
    ) -> None:
        """`room_bytes`: of adapters that this instance can store. `slo_ms`: promised time per token. `on_plan`: called
        with each plan that this instance adopts."""
        self.demand = DemandCounter()
        self.plan: PlacementPlan | None = None
        self.made = self.failed = 0
        self._member, self._views, self._transfers = member, views, transfers
        self._routing, self._room_bytes, self._slo_ms, self._on_plan = routing, room_bytes, slo_ms, on_plan
        self._now, self._wall, self._pace = now, wall, pace or PlannerTiming()
        self._body = b""  # the plan, encoded
        self._adopted_s = 0.0

    def routes(self) -> list[web.RouteDef]:
        """Returns the routes for the port that other instances use."""
        return [web.get(f"{PATH}/demand", self._serve_demand), web.get(f"{PATH}/plans/{{digest}}", self._serve_plan)]

    def count_prompts(self, rows: Sequence[tuple[ActiveRequest, ScheduledRow]], ms: float) -> None:
        """Counts one token for the adapter of each request whose prompt an iteration has completed."""
        wall_s = self._wall()
        for active, row in rows:
            adapter = active.request.inputs.adapter
            if adapter is not None and row.start + row.count >= active.request.prompt_tokens:
                self.demand.count(adapter, wall_s)

    async def run(self) -> None:
        """Adopts and makes plans until cancelled."""
        self._member.advertise(ROOM, (self._room_bytes,))
        joined_s, again_s = self._wall(), self._now()
        while True:
            await asyncio.sleep(self._pace.look_s)
            epoch = int(self._wall() / STEP_S)
            if self.plan is not None and self.plan.epoch > epoch + _AHEAD:
                self.plan, self._body = None, b""  # this clock was ahead when the plan was adopted
            await self._adopt_published(epoch + _AHEAD)
            if self.plan is not None and self.plan.epoch >= epoch:
                continue
            waited_s = self._wall() - max(epoch * STEP_S, joined_s + self._pace.settle_s)
            if waited_s >= self._pace.silence_s * self._turn(epoch) and self._now() >= again_s:
                await self._make(epoch)
                if self.plan is None or self.plan.epoch < epoch:
                    again_s = self._now() + self._pace.silence_s

    # --- making ---

    def _turn(self, epoch: int) -> int:
        """Returns how many live instances come before this one in the order of the epoch."""
        name = self._member.name
        return planners(epoch, [name, *(record.name for record in self._others())]).index(name)

    def _others(self) -> list[MemberRecord]:
        """Returns the records of the other instances that are alive."""
        return [record for record in self._member.members()[1:] if record.state == MemberState.ALIVE]

    async def _make(self, epoch: int) -> None:
        models = {one.name: one.model for one in self._views.instances()}
        rooms = {}
        for name, value in self._member.advertised(ROOM).items():
            match value:
                case (int(room),) if name in models:
                    rooms[name] = room
        if not rooms:
            return
        adapters, demand = await self._adapters_and_demand(epoch)
        previous, body = self.plan, self._body
        try:
            inputs = self._routing, epoch, adapters, demand, rooms, models, self._slo_ms
            body = await ask(await asyncio.to_thread(_question, *inputs), body, _MAKING_S)
            plan = await asyncio.to_thread(decoded, body) if body else None
        except (OSError, ValueError, TimeoutError) as error:
            self.failed += 1
            log.error("no plan could be made for step %d: %s", epoch, error)
            return
        if plan is not None and self.plan is previous:
            self.made += 1
            self._adopt(plan, body)

    async def _adapters_and_demand(self, epoch: int) -> tuple[list[RegisteredAdapter], list[Rates]]:
        """Returns all adapters of the registry, read in turns of the event loop, and the demand of each instance that
        answers."""
        path, page = f"{PATH}/demand?epoch={epoch}", self._transfers.page
        bodies = await asyncio.gather(*(page(one.address, path, _MAX_DEMAND_BYTES) for one in self._others()))
        others_rates = await asyncio.to_thread(lambda: [*map(_rates, bodies)])
        adapters = [adapter async for adapter in self._member.adapters_in_turns()]
        return adapters, [self.demand.rates(epoch), *others_rates]

    # --- adopting and publishing ---

    async def _adopt_published(self, most_epoch: int) -> None:
        """Downloads the newest published plan, if it replaces the present one, from an instance that has it. Plans of
        epochs after `most_epoch` are ignored: they come from a wrong clock, and would replace all others until then."""
        held = self.plan
        ours = (held.epoch, held.digest) if held is not None else (-1, "")
        published: dict[tuple[int, str], list[str]] = {}
        values = self._member.advertised(PLAN)
        for record in self._others():
            match values.get(record.name):
                case (int(epoch), str(digest)) if (
                    ours < (epoch, digest) and epoch <= most_epoch and DIGEST.fullmatch(digest)
                ):
                    published.setdefault((epoch, digest), []).append(record.address)
        for best in sorted(published, reverse=True):
            for address in published[best]:
                if await self._adopt_from(address, *best):
                    return

    async def _adopt_from(self, address: str, epoch: int, digest: str) -> bool:
        body = await self._transfers.page(address, f"{PATH}/plans/{digest}", MAX_PLAN_BYTES)
        if isinstance(body, TransferFailure):
            return False
        try:
            plan = await asyncio.to_thread(decoded, body)
        except ValueError as error:
            log.warning("the plan at %s is of no use: %s", address, error)
            return False
        if (plan.epoch, plan.digest) != (epoch, digest):
            return False
        self._adopt(plan, body)
        return True

    def _adopt(self, plan: PlacementPlan, body: bytes) -> None:
        if not plan.holds_over(self.plan):
            return
        self.plan, self._body, self._adopted_s = plan, body, self._now()
        self._member.advertise(PLAN, (plan.epoch, plan.digest))
        self._on_plan(plan)

    async def _serve_demand(self, request: web.Request) -> web.Response:
        check_peer(request, self._member.keys)
        text = request.query.get("epoch", "")
        epoch = int(text) if text.isdecimal() and len(text) < 12 else 0
        return web.Response(body=orjson.dumps(self.demand.rates(epoch)), content_type="application/json")

    async def _serve_plan(self, request: web.Request) -> web.Response:
        check_peer(request, self._member.keys)
        if self.plan is None or request.match_info["digest"] != self.plan.digest:
            raise web.HTTPNotFound(text="This instance goes by another plan.")
        return web.Response(body=self._body, content_type="application/octet-stream")

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics. `labels`: those of every sample."""
        plan = self.plan
        age_s = self._now() - self._adopted_s if plan is not None else 0.0
        for name, kind, text, value in (
            ("plan_epoch", "gauge", "Time step of the placement in force; 0: none.", plan.epoch if plan else 0),
            ("plan_age_seconds", "gauge", "Since it was adopted.", age_s),
            ("plan_peak_ratio", "gauge", "Its largest utilisation over the mean.", plan.peak if plan else 0.0),
            ("plan_strange_ratio", "gauge", "Its load at other ranks' instances.", plan.strange if plan else 0.0),
            ("plans_made_total", "counter", "Plans that this instance made.", self.made),
            ("plans_failed_total", "counter", "Plans that it could not make.", self.failed),
        ):
            yield family(f"caraserve:{name}", kind, text, [(labels, value)])


def _rates(body: bytes | TransferFailure) -> Rates:
    """Parses another instance's demand. It is empty if the download failed or the body is not valid."""
    if isinstance(body, TransferFailure):
        return {}
    try:
        return {name: (_rate(old), _rate(new)) for name, (old, new) in orjson.loads(body).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def _rate(tokens_per_s: Any) -> float:
    rate = float(tokens_per_s)
    return rate if 0 <= rate <= _MOST_TOKENS_PER_S else 0.0


def _question(
    routing: str,
    epoch: int,
    registered: Iterable[RegisteredAdapter],
    demand: Iterable[Rates],
    rooms: Mapping[str, int],
    models: Mapping[str, PerfModel],
    slo_ms: float,
) -> bytes:
    """Encodes the input of the planner process. Speeds are relative to the first instance by name."""
    typical = TypicalRequest()
    tokens_per_s = expected_demand(demand)
    adapters = [AdapterDemand(one.name, one.rank, one.num_bytes, tokens_per_s.get(one.name, 0.0)) for one in registered]
    ranks = sorted({adapter.rank for adapter in adapters})

    def point(name: str, rank: int) -> float:
        sizes = typical.prompt_tokens, typical.output_tokens
        return models[name].operating_point(rank, slo_ms, *sizes, _RUNNING)

    measure = min(rooms)
    middle = ranks[len(ranks) // 2] if ranks else 0
    servers = [Server(name, room, point(name, middle) / point(measure, middle)) for name, room in rooms.items()]
    points = {rank: point(measure, rank) for rank in ranks}
    return msgspec.json.encode(Question(routing, epoch, adapters, servers, points, models[measure].padded))
