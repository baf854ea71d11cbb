"""One instance with peers: the parts that it has beside its engine, and the order in which they start.

Member ◄─ Publisher ◄─ AdapterPool, UploadRemoval      what this instance has, told and sent to other instances
   ▲
   └───── InstanceViews ◄─ InstanceSelector ◄─ PlacementPlanner ─► Reconciler      where requests and adapters go
"""

import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from math import inf
from random import Random

from aiohttp import web

from caraserve.cluster.membership.auth import Keyring, SecretFile
from caraserve.cluster.membership.member import Member, MemberConfig, MemberListener, QueryBody
from caraserve.cluster.membership.peer_client import PeerClient
from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.placement.planner import PlacementPlanner
from caraserve.cluster.routing.advertised import InstanceViews
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import DriftWatch
from caraserve.cluster.routing.policies import Policy
from caraserve.cluster.routing.publisher import Publisher
from caraserve.cluster.routing.selector import LOCAL, InstanceSelector, LatencyTargets, refuses_new_requests
from caraserve.cluster.state.persistence import ClusterRegistryFile, cluster_registry_path
from caraserve.cluster.state.setting_entries import entry_of, settings_in, stored_entry_of
from caraserve.cluster.transfer.adapter_pool import AdapterPool
from caraserve.cluster.transfer.adapter_store import KEEP_QUERY
from caraserve.cluster.transfer.disk_cache import DiskCache, beside
from caraserve.cluster.transfer.reconciler import Reconciler
from caraserve.cluster.transfer.upload_removal import REMOVE_QUERY, UploadRemoval
from caraserve.config import ClusterConfig, LoraConfig
from caraserve.core.machine_profile import Profile
from caraserve.engine.stats import EngineObservers
from caraserve.loop import Engine
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.registry import Setting
from caraserve.lora.replicated_settings import ReplicatedSettings
from caraserve.lora.uploads import AdapterUploads
from caraserve.model.plan import DecoderPlan
from caraserve.telemetry.metrics import Metrics
from caraserve.util.tasks import in_turns

log = logging.getLogger(__name__)

# Assumed, not measured: a common disk and a network of 10 Gbit/s. An instance that has the adapter is always preferred.
_DISK_BYTES_PER_MS, _FETCH_MS, _FETCH_BYTES_PER_MS = 2e6, 5.0, 1e6

_TEMPORARY_BYTES = 1 << 30
_WITH_PLACEMENT = ("auto", "loraserve", "s-lora-random", "s-lora-contiguous")  # routings that follow a placement

AnswerQuery = Callable[[str, QueryBody], QueryBody]  # given the instance that asks, and the query


@dataclass(frozen=True, slots=True)
class LocalParts:
    """The parts of a server that it has with or without peers."""

    engine: Engine
    observers: EngineObservers
    reader: AdapterReader
    settings: ReplicatedSettings
    uploads: AdapterUploads
    plan: DecoderPlan
    model_digest: str
    profile: Profile | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class Node:
    """The parts of an instance with peers. Built before the port listens; `join` starts them when it does."""

    config: ClusterConfig
    lora: LoraConfig
    local: LocalParts
    member: Member
    publisher: Publisher
    pool: AdapterPool
    removal: UploadRemoval
    selector: InstanceSelector
    planner: PlacementPlanner | None

    def routes(self) -> list[web.RouteDef]:
        """Returns the HTTP routes by which other instances get adapters, demand and plans."""
        return [*self.pool.store.uploads.routes(), *(self.planner.routes() if self.planner else ())]

    async def join(
        self,
        stack: AsyncExitStack,
        address: str,
        on_member_change: Callable[[MemberRecord], None],
        answers: Mapping[str, AnswerQuery],
    ) -> None:
        """Joins the cluster; `stack` leaves it. Other instances can connect to `address`. `answers`: to kinds of
        queries of which other parts of the server know. Raises ConfigError.

        The pool starts before adapters are announced, so that it misses no change of their names, and forwarding
        starts after that, when other instances can find them.
        """
        member, pool, publisher, metrics = self.member, self.pool, self.publisher, self.local.metrics
        if self.local.profile is None:
            log.warning(
                "without a profile of this machine the cluster takes it for as slow as its slowest instance with a "
                "profile; give --profile"
            )
        answers = {KEEP_QUERY: pool.store.answer, REMOVE_QUERY: self.removal.answer, **answers}

        def answer_query(peer: str, body: QueryBody) -> QueryBody:
            return answers.get(str(body[0]) if body else "", self.selector.quote)(peer, body)

        listener = MemberListener(
            current_load=publisher.current_load,
            on_registry_change=publisher.apply_registry_changes,
            on_settings_change=lambda entries: self.local.settings.merge(settings_in(entries)),
            on_holders_change=pool.on_holders_change,
            on_member_change=on_member_change,
            answer_query=answer_query,
        )
        stack.push_async_callback(member.stop)
        await member.start(address, listener)
        pool.begin()
        self._observe(self.local.observers)
        run = member.background.run
        run(stack, pool.run, "cluster pool")
        for part in (publisher, member, member.background, pool):
            metrics.show(part.families)
        if self.planner is not None:
            self._start_placement(stack, self.planner)
        await self._announce_settings()
        await publisher.announce()
        self.selector.join()
        metrics.show(self.selector.routing_metrics.families)
        run(stack, publisher.run, "cluster publisher")

    def _observe(self, observers: EngineObservers) -> None:
        """Begins to tell other instances what happens on this one. Before `member` has started it could not be told,
        and `announce` makes up for what happened until then."""
        observers.iterations.append(self.publisher.watch)
        if self.planner is not None:
            observers.iterations.append(self.planner.count_prompts)
        observers.adapters.append(self.pool.changed)
        observers.uploads.append(self.publisher.upload_changed)
        observers.removals.append(self.removal.removed)
        observers.settings.append(self._share_setting)

    def _start_placement(self, stack: AsyncExitStack, planner: PlacementPlanner) -> None:
        """Starts the planner, and the moves of adapters that its plans ask for."""
        self.local.metrics.show(planner.families)
        self.member.background.run(stack, planner.run, "cluster planner")
        if not self.lora.mode.preloads:
            reconciler = Reconciler(self.member, self.pool)
            self.local.metrics.show(reconciler.families)
            self.member.background.run(stack, lambda: reconciler.run(lambda: planner.plan), "cluster reconciler")

    async def _announce_settings(self) -> None:
        """Adds the settings of earlier runs to the registry. Instances that lack one ask for it."""
        async for setting in in_turns(self.local.settings.all()):
            if (entry := stored_entry_of(setting, self.member.name)) is not None:
                self.member.restore(entry)

    def _share_setting(self, setting: Setting) -> None:
        if not self.member.share(entry_of(setting, self.member.name)):
            log.warning("the %s %s holds on this instance alone: the registry is full", setting.kind, setting.name)


def make_node(
    stack: AsyncExitStack,
    config: ClusterConfig,
    lora: LoraConfig,
    keys: SecretFile | Keyring,
    tls: ssl.SSLContext | None,
    local: LocalParts,
) -> Node:
    """Builds all parts; `stack` closes them. `tls`: for connecting to other instances. Raises ConfigError."""
    if lora.registry is None:
        log.warning("without --registry this instance forgets the cluster's adapters when it ends")
    engine, base_name = local.engine, local.engine.base_name
    names = ClusterRegistryFile(cluster_registry_path(lora.registry) if lora.registry else None)
    identity = config.cluster_name, config.name, local.model_digest, config.peers
    member = Member(MemberConfig(*identity, keys, tls, base_name), names, rng=Random())
    stack.push_async_callback(member.close)
    views = InstanceViews(member)
    publisher = Publisher(
        *(member, engine, local.metrics.answers, drift_of(local.profile, lora), link_speeds(local.profile, lora)),
        on_wanted=lambda adapter: pool.adopt(adapter),
    )
    stored = DiskCache(beside(lora.registry) if lora.registry else None, local.plan)
    transfers = PeerClient(lambda: member.keys, tls)
    stack.push_async_callback(transfers.close)
    most_bytes = disk_bytes(config.adapter_disk_bytes, is_temporary=lora.registry is None)
    pool = AdapterPool(
        member, publisher, engine.catalog, local.reader, stored, transfers, local.plan, most_bytes=most_bytes
    )
    stack.push_async_callback(pool.close)
    removal = UploadRemoval(member, local.uploads)
    stack.push_async_callback(removal.close)
    # In modes that load all adapters at the start, this instance serves only those.
    selector = make_selector(member, views, engine, config, None if lora.mode.preloads else pool)
    planner = None
    if (routing := placement_routing(config.routing or "auto")) is not None:
        limits = lora.max_host_adapters_bytes, config.slo_tpot_ms or inf
        planner = PlacementPlanner(member, views, transfers, routing, *limits, on_plan=selector.adopt)
    return Node(config, lora, local, member, publisher, pool, removal, selector, planner)


def make_selector(
    member: Member, views: InstanceViews, engine: Engine, config: ClusterConfig, pool: AdapterPool | None
) -> InstanceSelector:
    """Builds what chooses the instance for a request. `pool` None: this instance downloads no adapters."""
    routing = config.routing or "auto"
    return InstanceSelector(
        member,
        views,
        None if routing == LOCAL else Policy(routing),
        LatencyTargets(config.slo_ttft_ms or inf, config.slo_tpot_ms or inf),
        engine.catalog.find,
        lambda: refuses_new_requests(engine),
        fetcher=pool,
        rng=Random(),
    )


def disk_bytes(most_bytes: int, *, is_temporary: bool) -> int:
    """Returns the disk space for other instances' adapters: at most 1 GiB of temporary files, often held in memory."""
    return min(most_bytes, _TEMPORARY_BYTES) if is_temporary else most_bytes


def placement_routing(routing: str) -> str | None:
    """Returns the routing whose placement the cluster follows, or None for routings without placement.

    With `local`, for requests that another router has routed, it is `auto`: its placement keeps copies of the adapters
    of instances that fail.
    """
    if routing == LOCAL:
        return "auto"
    return routing if routing in _WITH_PLACEMENT else None


def drift_of(profile: Profile | None, lora: LoraConfig) -> DriftWatch | None:
    """Returns what refits this instance's performance model, with the rank that its kernels compute; None without a
    profile."""
    return DriftWatch(profile, padded_rank=lora.padded_rank) if profile else None


def link_speeds(profile: Profile | None, lora: LoraConfig) -> LinkSpeeds:
    """Returns the speeds at which this instance loads adapters; without a profile, loads from host memory are free."""
    blocks = lora.mode.stops_others
    disk_and_fetch = _DISK_BYTES_PER_MS, _FETCH_MS, _FETCH_BYTES_PER_MS
    if profile is None:
        return LinkSpeeds(0.0, inf, *disk_and_fetch, blocks_batch=blocks)
    return LinkSpeeds(profile.link_latency_ms, profile.link_bytes_per_s / 1000, *disk_and_fetch, blocks_batch=blocks)
