"""What makes the fleet's adapters this server's own: the pool, the placement, and the way of their bytes, wired."""

import ssl
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf

from caraserve.cluster.membership.node import Body, Node
from caraserve.cluster.placement.planner import Planner
from caraserve.cluster.placement.reconciler import Mending
from caraserve.cluster.routing.forwarding import LOCAL, Forwarding
from caraserve.cluster.state.publisher import Publisher
from caraserve.cluster.transfer.adapter_pool import Pool
from caraserve.cluster.transfer.adapter_store import HOLD
from caraserve.cluster.transfer.disk_cache import Stored, beside
from caraserve.cluster.transfer.peer_client import Transfers
from caraserve.cluster.transfer.upload import Routes
from caraserve.config import PRELOADED_MODES, ClusterConfig, LoraConfig
from caraserve.core.batch import ScheduledRow
from caraserve.engine.active_request import ActiveRequest
from caraserve.loop import Engine
from caraserve.lora.catalog import AdapterReader
from caraserve.model.spec import ModelSpec
from caraserve.telemetry.metrics import Metrics

_TEMPORARY_BYTES = 1 << 30
_PLANNED = ("auto", "loraserve", "s-lora-random", "s-lora-contiguous")  # routings that go by a placement


@dataclass(frozen=True, slots=True)
class FleetAdapters:
    """Made with the node, joined with it, closed after it."""

    node: Node
    pool: Pool
    transfers: Transfers
    planner: Planner | None
    can_fetch: bool  # False: the adapters of the start are all that this instance will ever serve

    def routes(self) -> Routes:
        """For the port on which other instances ask."""
        return [*self.pool.keeping.lending.routes(), *(self.planner.routes() if self.planner else ())]

    def prepare(self, publisher: Publisher, forwarding: Forwarding) -> None:
        """Before the node starts."""
        node, pool = self.node, self.pool

        def answer(peer: str, body: Body) -> Body:
            return pool.keeping.answer(peer, body) if body[:1] == (HOLD,) else forwarding.quote(peer, body)

        node.on_question, publisher.on_wanted = answer, pool.adopt
        if self.can_fetch:
            forwarding.exchange = pool
        if self.planner is not None:
            self.planner.on_plan = forwarding.adopt

    def join(self, stack: AsyncExitStack, publisher: Publisher, engine: Engine, metrics: Metrics) -> None:
        """When the node has started; from then on adapters may be loaded and fetched. `stack` undoes it."""
        self.pool.begin(publisher)
        engine.catalog.on_change = self.pool.changed
        metrics.show(self.pool.families)
        background = self.node.background
        background.run(stack, self.pool.run, "cluster pool")
        planner = self.planner
        if planner is None:
            return
        demand = planner.demand

        def watch(rows: Sequence[tuple[ActiveRequest, ScheduledRow]], ms: float) -> None:
            publisher.watch(rows, ms)
            wall_s = time.time()
            for opened, row in rows:
                asked = opened.request.asked
                if asked.adapter is not None and row.start + row.count >= opened.request.prompt_tokens:
                    demand.count(asked.adapter, wall_s)

        engine.watch = watch
        metrics.show(planner.families)
        background.run(stack, planner.run, "cluster planner")
        if self.can_fetch:
            mending = Mending(self.node, self.pool)
            metrics.show(mending.families)
            background.run(stack, lambda: mending.run(lambda: planner.plan), "cluster mending")

    async def close(self) -> None:
        """Ends transfers."""
        await self.pool.close()
        await self.transfers.close()


def disk_bytes(most_bytes: int, *, is_temporary: bool) -> int:
    """What other instances' adapters may take on our disk. Where temporary files are is often memory, or small."""
    return min(most_bytes, _TEMPORARY_BYTES) if is_temporary else most_bytes


def planned(routing: str) -> str | None:
    """The routing by whose placement a fleet keeps its adapters; None: by none. Where somebody else routes there is one
    all the same, or nothing would copy again what an instance had that is gone."""
    if routing == LOCAL:
        return "auto"
    return routing if routing in _PLANNED else None


def make_fleet_adapters(
    node: Node,
    engine: Engine,
    reader: AdapterReader,
    model: ModelSpec,
    lora: LoraConfig,
    cluster: ClusterConfig,
    tls: ssl.SSLContext | None,
) -> FleetAdapters:
    """`tls`: for dialling. Raises ConfigError."""
    stored = Stored(beside(lora.registry) if lora.registry else None, model)
    transfers = Transfers(lambda: node.keys, tls)
    most_bytes = disk_bytes(cluster.adapter_disk_bytes, is_temporary=lora.registry is None)
    pool = Pool(node, engine.catalog, reader, stored, transfers, model, most_bytes)
    planner = None
    if (routing := planned(cluster.routing or "auto")) is not None:
        slo_ms = cluster.slo_tpot_ms or inf
        planner = Planner(node, transfers, routing, lora.max_host_adapters_bytes, slo_ms)
    return FleetAdapters(node, pool, transfers, planner, lora.loading_mode not in PRELOADED_MODES)
