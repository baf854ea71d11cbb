"""Advertises this instance's load, speed and adapters to its cluster, and applies registry changes of others.

engine.workload ─► heartbeats             engine.watch ─► DriftWatch ─► performance model, and its errors
catalog ─► registry and own adapters      registry changes of others ─► unloaded here too, or `on_wanted`
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from caraserve.cluster.membership.member import Member
from caraserve.cluster.routing.advertised import backlog_of, load_of, publish_speed
from caraserve.cluster.routing.cost import LinkSpeeds
from caraserve.cluster.routing.perf_model import DriftWatch
from caraserve.cluster.routing.price_metrics import TypicalRequest, price_families
from caraserve.cluster.routing.selector import refuses_new_requests
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter, ServingStatus, Tier
from caraserve.core.batch import ScheduledRow
from caraserve.engine.active_request import ActiveRequest
from caraserve.engine.iteration_times import IterationWork
from caraserve.engine.stats import rank_of
from caraserve.errors import CaraServeError
from caraserve.loop import Engine
from caraserve.lora.adapter import AdapterTier
from caraserve.lora.registry import AdapterInfo
from caraserve.telemetry.prometheus import family
from caraserve.util.tasks import Tasks, in_turns

log = logging.getLogger(__name__)

_HOLDINGS_S = 1.0  # between updates of the tiers: an outdated one costs a load or a download
_MEMORY = 0.3  # weight of the latest second's answers in the mean length
_PRIOR_TOKENS = 200.0  # of an answer, before there are any


class Publisher:
    """Keeps the cluster informed of one engine."""

    def __init__(
        self,
        member: Member,
        engine: Engine,
        answers: Callable[[], tuple[int, int]],
        drift: DriftWatch | None,
        links: LinkSpeeds,
        on_wanted: Callable[[RegisteredAdapter], None] = lambda adapter: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`answers`: returns how many answers have ended, and their tokens.
        `drift` None: this machine was not measured; routers use the model of the slowest instance that was.
        `on_wanted`: called for a name in the registry whose bytes are not here."""
        self._member, self._engine, self._answers = member, engine, answers
        self._drift, self._links, self._on_wanted, self._now = drift, links, on_wanted, now
        self._tiers: dict[str, Tier] = {}  # of the digests that this instance holds, as last advertised
        self._moved: set[str] = set()  # digests that may have another tier than the advertised one
        engine.catalog.manager.on_move(self._moved.add)
        self._response_tokens = _PRIOR_TOKENS
        self._answered = (0, 0)
        self._iteration_ended_s: float | None = None  # when the last iteration ended, while there is work
        self._times_ms = dict.fromkeys(("decode", "prefill"), (0.0, 0.0))  # predicted, observed; of all so far
        self._unloads = Tasks()
        self._unloading: set[str] = set()  # names to be unloaded because other instances removed them
        self._unannounced: set[str] = set()  # names loaded at the start that `announce` has not reached yet

    async def announce(self) -> None:
        """Registers all adapters that this instance starts with, then advertises its speed. Requests come only then.

        A name that the cluster changed or removed after this instance loaded it gets the cluster's meaning. Names may
        change meanwhile, so `changed` must be an observer of the catalog before this method is started.
        """
        infos = self._engine.catalog.all()
        self._unannounced = {info.name for info in infos}
        async for info in in_turns(infos):
            self._unannounced.discard(info.name)
            if self._engine.catalog.find_whole(info.name) is not info:
                continue
            given_s, meant = self._member.last_changed_s(info.name), self._member.adapter(info.name)
            is_other = meant is None or meant.digest != info.digest
            if given_s is not None and given_s > info.created_s and is_other:
                self.advertise(info.digest, Tier.DISK)
                self.apply_registry_changes({info.name: meant})
            else:
                self.changed(info.name, info)
        publish_speed(self._member, self._drift.model if self._drift else None, self._links)

    def changed(self, name: str, info: AdapterInfo | None) -> None:
        """Registers an adapter that was loaded here, or removes the name of one that was unloaded."""
        self._unannounced.discard(name)
        if info is None:
            if name in self._unloading:
                self._unloading.remove(name)
            else:
                self._member.remove(name)
            return
        try:
            self._member.register(RegisteredAdapter(name, info.digest, info.rank, info.num_bytes, info.facts))
        except CaraServeError as error:
            log.warning("adapter %s serves on this instance alone: %s", name, error.message)
        self.advertise(info.digest, Tier.DISK)

    def upload_changed(self, name: str, info: AdapterInfo | None) -> None:
        """Advertises that this instance takes requests for an adapter while it is uploaded to it, or no longer."""
        try:
            if info is None:
                self._member.withdraw_upload(name)
            else:
                self._member.advertise_upload(name, info.rank, info.num_bytes)
        except CaraServeError as error:
            log.warning("adapter %s serves on this instance alone until it is complete: %s", name, error.message)

    def advertise(self, digest: str, tier: Tier) -> None:
        """Advertises that all bytes of a digest are here and verified."""
        if digest not in self._tiers:
            self._advertise_tier(digest, tier)
            self._moved.add(digest)  # it may be in a cache already

    def withdraw(self, digest: str) -> None:
        """Withdraws this instance from the holders of a digest."""
        self._tiers.pop(digest, None)
        self._member.withdraw(digest)

    def apply_registry_changes(self, news: Mapping[str, RegisteredAdapter | None]) -> None:
        """Unloads names that others removed, and calls `on_wanted` for names whose bytes are not here.

        Skips names that `announce` has not reached yet: it compares the times of the cluster's and the own change.
        """
        for name, adapter in news.items():
            if name in self._unannounced:
                continue
            here = self._engine.catalog.find_whole(name)
            if adapter is None:
                if here is not None and name not in self._unloading:
                    self._unloads.start(self._unload(name), "cluster unload")
            elif here is None or here.digest != adapter.digest:
                if here is not None:
                    log.warning("adapter %s has other contents now: %s, not %s", name, adapter.digest, here.digest)
                self._on_wanted(adapter)

    def current_load(self, lag_s: float) -> InstanceLoad:
        """Returns the load for the next heartbeat."""
        work = self._engine.workload(self._response_tokens)
        if not work.running:
            self._iteration_ended_s = None
        elif self._iteration_ended_s is None:
            self._iteration_ended_s = self._now()
        age_s = 0.0 if self._iteration_ended_s is None else self._now() - self._iteration_ended_s
        status: ServingStatus = "draining" if refuses_new_requests(self._engine) else "serving"
        return load_of(work, status, self._response_tokens, age_s, lag_s)

    def watch(self, rows: Sequence[tuple[ActiveRequest, ScheduledRow]], ms: float) -> None:
        """Compares an iteration's time with its prediction, and publishes a refitted model. Observes an engine."""
        self._iteration_ended_s = self._now()
        drift = self._drift
        if drift is None:
            return
        work = IterationWork.of(rows, lambda active: rank_of(active.adapter, self._engine.catalog))
        if work.tokens == 0:
            decode = work.requests, work.rank_sum, work.rank_max
            self._count("decode", drift.model.decode_ms(*decode), ms)
            refitted = drift.observe_decode(*decode, ms)
        elif work.requests == 0:
            prefill = work.tokens, work.token_ranks, work.prompt_rank_max
            self._count("prefill", drift.model.prefill_ms(*prefill), ms)
            refitted = drift.observe_prefill(*prefill, ms)
        else:
            return
        if refitted:
            publish_speed(self._member, drift.model, self._links)

    async def run(self) -> None:
        """Advertises changed tiers every second, until cancelled."""
        while True:
            await asyncio.sleep(_HOLDINGS_S)
            self._observe_answers()
            moved = list(self._moved)
            self._moved.clear()
            async for digest in in_turns(moved):
                if digest in self._tiers and (tier := self._tier_of(digest)) is not self._tiers[digest]:
                    self._advertise_tier(digest, tier)

    def _advertise_tier(self, digest: str, tier: Tier) -> None:
        self._tiers[digest] = tier
        self._member.advertise_tier(digest, tier)

    def _tier_of(self, digest: str) -> Tier:
        manager = self._engine.catalog.manager
        adapter = manager.find(digest)
        if adapter is not None and adapter.tier is AdapterTier.DEVICE:
            return Tier.DEVICE
        return Tier.DISK if manager.image(digest) is None else Tier.HOST

    def families(self, labels: str) -> Iterator[str]:
        """Yields the metric families for GET /metrics. `labels`: those of every sample."""

        def by(name: str, kind: str, text: str, label: str, values: Mapping[str, float]) -> str:
            return family(name, kind, text, [(f'{label}="{of}",{labels}', value) for of, value in values.items()])

        if self._drift is None:
            return
        for index, kind in enumerate(("predicted", "observed")):
            seconds = {phase: times[index] / 1000 for phase, times in self._times_ms.items()}
            text = f"Iterations of one phase, {kind}; those that mix phases are left out."
            yield by(f"caraserve:{kind}_iteration_seconds_total", "counter", text, "phase", seconds)
        errors = {"decode": self._drift.decode_error, "prefill": self._drift.prefill_error}
        text = "Median of |predicted - observed| / observed over recent iterations."
        yield by("caraserve:prediction_error_ratio", "gauge", text, "phase", errors)
        text = "Times that the performance model was refitted."
        yield family("caraserve:model_refits_total", "counter", text, [(labels, self._drift.refits)])
        typical = TypicalRequest(output_tokens=self._response_tokens)
        yield from price_families(self._drift.model, backlog_of(self.current_load(0.0)), labels, typical)

    def _count(self, phase: str, predicted_ms: float, observed_ms: float) -> None:
        predicted, observed = self._times_ms[phase]
        self._times_ms[phase] = predicted + predicted_ms, observed + observed_ms

    def _observe_answers(self) -> None:
        count, tokens = self._answers()
        if (new := count - self._answered[0]) > 0:
            mean = (tokens - self._answered[1]) / new
            self._response_tokens += _MEMORY * (max(1.0, mean) - self._response_tokens)
        self._answered = count, tokens

    async def _unload(self, name: str) -> None:
        self._unloading.add(name)

        def is_wanted() -> bool:
            """Whether the name is still removed, and stands for an adapter here, when its turn has come."""
            return self._member.adapter(name) is None and self._engine.catalog.find_whole(name) is not None

        try:
            await self._engine.unload_adapter(name, is_wanted)
            if name not in self._unloading:  # `changed` was told
                log.info("adapter %s was removed from the cluster", name)
        except CaraServeError as error:
            log.warning("adapter %s was removed from the cluster and stays here: %s", name, error.message)
        finally:
            self._unloading.discard(name)
        again = self._member.adapter(name)  # it may have been registered again meanwhile
        self.apply_registry_changes({name: again} if again else {})
