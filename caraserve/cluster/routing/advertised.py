"""Encodes and decodes what instances advertise to routers: load, performance model, link speeds. No I/O, no clock.

    EngineLoad            ─► InstanceLoad ──heartbeat──► Backlog ─┐
    PerfModel, LinkSpeeds ─► values ──LwwMap──► the same ─────────┴─► router.Instance

A value that is malformed, or of another version of this program, counts as not advertised.
"""

import dataclasses
import operator
from functools import lru_cache
from math import inf

from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.routing.cost import Backlog, LinkSpeeds
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.router import Instance
from caraserve.cluster.state.lww_map import EntryValue
from caraserve.cluster.state.replicated_map import InstanceLoad, ServingStatus
from caraserve.engine.stats import EngineLoad

# Keys in an instance's own map; placement has two more, uploads have theirs, and all others are digests.
MODEL, LINKS = ":model", ":links"

_MOST_VALUES = 256  # decoded models, or links, in the cache: several of each instance

STALE_S = 1.0  # four heartbeats; with an older load an instance is not able
_HUNG_S, _HUNG_ITERATIONS = 2.0, 10.0  # an iteration may take 2 s, or ten times the predicted time if that is longer


# --- load ---


def load_of(
    work: EngineLoad, status: ServingStatus, response_tokens: float, iteration_age_s: float = 0.0, lag_s: float = 0.0
) -> InstanceLoad:
    """Returns the load to send. `iteration_age_s`: since the last iteration ended, if there is work."""
    return InstanceLoad(
        status=status,
        running=work.running,
        queued=work.queued,
        ranks=tuple(sorted(work.ranks.items())),
        queued_tokens=work.queued_tokens,
        queued_token_ranks=work.queued_token_ranks,
        kv_tokens=work.kv_tokens,
        kv_free_tokens=work.kv_free_tokens,
        queue_room=work.queue_room,
        response_tokens=response_tokens,
        iteration_age_s=iteration_age_s,
        lag_s=lag_s,
    )


def backlog_of(load: InstanceLoad) -> Backlog:
    """Returns what the cost function needs of a load."""
    return Backlog(
        requests=load.running + load.queued,
        rank_sum=sum(rank * count for rank, count in load.ranks),
        rank_max=max((rank for rank, count in load.ranks if count), default=0),
        queued_tokens=load.queued_tokens,
        queued_token_ranks=load.queued_token_ranks,
        kv_tokens=load.kv_tokens,
        kv_free_tokens=load.kv_free_tokens,
        queue_room=load.queue_room,
    )


# --- performance model and links ---


def model_value(model: PerfModel | None) -> EntryValue:
    """Returns a performance model as an entry's value, with floats as exact texts; () if the machine was never
    measured. Without padded prefill its coefficient is left out, as older versions know none."""
    if model is None:
        return ()
    values = dataclasses.astuple(model)
    return _value(values if model.prefill_token_rank_max_ms else values[:-1])


@lru_cache(maxsize=_MOST_VALUES)
def model_of(value: EntryValue) -> PerfModel | None:
    """Returns the performance model in an entry's value, or None. Equal values give one object, which keeps its
    caches."""
    try:
        alpha_ms, gamma_ms, beta_ms, padded, *rates = map(float, value)
        base_ms, token_ms, token_rank_ms, *token_rank_max_ms = rates
        return PerfModel(
            alpha_ms, gamma_ms, beta_ms, bool(padded), base_ms, token_ms, token_rank_ms, *token_rank_max_ms
        )
    except (ValueError, TypeError):
        return None


def links_value(links: LinkSpeeds) -> EntryValue:
    """Returns link speeds as an entry's value."""
    return _value(dataclasses.astuple(links))


@lru_cache(maxsize=_MOST_VALUES)
def links_of(value: EntryValue) -> LinkSpeeds:
    """Returns the link speeds in an entry's value; infinitely fast ones if there are none."""
    try:
        load_ms, load_rate, disk_rate, fetch_ms, fetch_rate, blocks = map(float, value)
    except ValueError:
        return LinkSpeeds()
    # One comparison for each: `min` of a number and NaN may be the number.
    if not (0 <= load_ms < inf and 0 <= fetch_ms < inf and load_rate > 0 and disk_rate > 0 and fetch_rate > 0):
        return LinkSpeeds()
    return LinkSpeeds(load_ms, load_rate, disk_rate, fetch_ms, fetch_rate, bool(blocks))


def _value(numbers: tuple[float | bool, ...]) -> EntryValue:
    return tuple(repr(float(number)) for number in numbers)  # which reads back exactly


def publish_speed(member: Member, model: PerfModel | None, links: LinkSpeeds) -> None:
    """Advertises the speed of this instance; None: it was not measured."""
    member.advertise(MODEL, model_value(model))
    member.advertise(LINKS, links_value(links))


# --- an instance as a router sees it ---


def instance_of(
    record: MemberRecord, load: InstanceLoad, model: PerfModel, links: LinkSpeeds, age_s: float
) -> Instance:
    """Returns an instance as a router sees it. `age_s`: the age of the load."""
    able = (
        record.state == MemberState.ALIVE and age_s <= STALE_S and load.status == "serving" and not is_hung(load, model)
    )
    return Instance(record.name, model, backlog_of(load), links, able)


class InstanceViews:
    """The instances of a cluster as a router sees them, each made again only when its heartbeat, performance model or
    state has changed.

    An instance that was never measured gets the model of the slowest that was: it attracts no requests from faster
    ones, and gets its share when they are busy. While none was measured, each instance answers what it receives.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._known: dict[str, tuple[tuple[object, ...], Instance]] = {}

    def instances(self) -> tuple[Instance, ...]:
        """Returns the instances whose load and model are known, this one included."""
        models, links = self._member.advertised(MODEL), self._member.advertised(LINKS)
        measured: list[Instance] = []
        unmeasured: list[tuple[MemberRecord, tuple[InstanceLoad, float]]] = []
        for record in self._member.live():
            load = self._member.load(record.name)
            if load is None or record.name not in models:
                continue
            instance = self._instance(record, load, models[record.name], links.get(record.name))
            if instance is None:
                unmeasured.append((record, load))
            else:
                measured.append(instance)
        if not measured:
            return ()
        slowest = max(measured, key=lambda one: _typical_ms(one.model)).name
        values = models[slowest], links.get(slowest)
        taken = (self._instance(record, load, *values) for record, load in unmeasured)
        return (*measured, *filter(None, taken))

    def _instance(
        self, record: MemberRecord, found: tuple[InstanceLoad, float], value: EntryValue, links: EntryValue | None
    ) -> Instance | None:
        """Returns the instance, or None if `value` is no model."""
        load, age_s = found
        parts = (record, load, value, links, age_s > STALE_S)
        known = self._known.get(record.name)
        if known is not None and all(map(operator.is_, known[0], parts)):
            return known[1]
        model = model_of(value)
        if model is None:
            return None
        instance = instance_of(record, load, model, LinkSpeeds() if links is None else links_of(links), age_s)
        self._known[record.name] = parts, instance
        return instance


def _typical_ms(model: PerfModel) -> float:
    """Returns the time of a lone request with 100 tokens of prompt and of answer, to compare machines."""
    return model.prefill_ms(100, 1600) + 100 * model.decode_ms(1, 16, 16)


def is_hung(load: InstanceLoad, model: PerfModel) -> bool:
    """Returns whether an engine seems to hang, although its event loop answers."""
    backlog = backlog_of(load)
    predicted_ms = model.decode_ms(backlog.requests, backlog.rank_sum, backlog.rank_max)
    predicted_ms += model.prefill_ms(backlog.queued_tokens, backlog.queued_token_ranks, backlog.rank_max)
    return load.iteration_age_s > max(_HUNG_S, _HUNG_ITERATIONS * predicted_ms / 1000)
