"""Encodes and decodes what an instance advertises: load, performance model, adapters by tier. No I/O, no clock.

    EngineLoad            ─► InstanceLoad ──heartbeat──► Backlog ─┐
    PerfModel, LinkSpeeds ─► entries ──LwwMap──► the same ────────┴─► router.Instance
    digests by tier       ─► entries ──LwwMap──► holders
    uploads under way     ─► entries ──LwwMap──► uploads

A value that is malformed, or of another version of this program, counts as not advertised.
"""

import dataclasses
import operator
from collections.abc import Iterable
from functools import lru_cache
from math import inf

from caraserve.cluster.membership.swim import MemberRecord, MemberState
from caraserve.cluster.routing.cost import Backlog, LinkSpeeds, Tier
from caraserve.cluster.routing.perf_model import PerfModel
from caraserve.cluster.routing.router import Instance
from caraserve.cluster.state.lww_map import Entry, EntryValue, LwwMap
from caraserve.cluster.state.replicated_map import InstanceLoad, RegisteredAdapter, ServingStatus
from caraserve.engine.stats import EngineLoad

# Keys in an instance's own map; placement has two more, and all others are digests.
MODEL, LINKS = ":model", ":links"
_UPLOAD = ":upload:"  # then the name of an adapter that takes requests there while it is uploaded

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


# --- an instance as a router sees it ---


def instance_of(
    record: MemberRecord, load: InstanceLoad, model: PerfModel, links: LinkSpeeds, age_s: float
) -> Instance:
    """Returns an instance as a router sees it. `age_s`: the age of the load."""
    able = (
        record.state == MemberState.ALIVE and age_s <= STALE_S and load.status == "serving" and not is_hung(load, model)
    )
    return Instance(record.name, model, backlog_of(load), links, able)


Known = tuple[
    MemberRecord, tuple[InstanceLoad, float] | None, LwwMap | None
]  # an instance's record, its newest load with its age in seconds, and its own map


class InstanceViews:
    """Instances as a router sees them, rebuilt only when a heartbeat, a performance model or a state has changed.

    An instance that was never measured gets the model of the slowest that was: it attracts no requests from faster
    ones, and gets its share when they are busy. While none was measured, each instance answers what it receives.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[object, ...], Instance]] = {}

    def all(self, known: Iterable[Known]) -> tuple[Instance, ...]:
        """Returns the instances whose load and model are known."""
        measured: list[tuple[Instance, Entry, Entry | None]] = []
        unmeasured: list[tuple[MemberRecord, tuple[InstanceLoad, float]]] = []
        for record, found, lww_map in known:
            model_entry, links_entry = (lww_map.get(key) if lww_map else None for key in (MODEL, LINKS))
            if found is None or model_entry is None:
                continue
            instance = self._of(record, found, model_entry, links_entry)
            if instance is None:
                unmeasured.append((record, found))
            else:
                measured.append((instance, model_entry, links_entry))
        seen = [instance for instance, _, _ in measured]
        if measured and unmeasured:
            _, model_entry, links_entry = max(measured, key=lambda one: _typical_ms(one[0].model))
            taken = (self._of(record, found, model_entry, links_entry) for record, found in unmeasured)
            seen += filter(None, taken)
        return tuple(seen)

    def _of(
        self, record: MemberRecord, found: tuple[InstanceLoad, float], model_entry: Entry, links_entry: Entry | None
    ) -> Instance | None:
        """Returns the instance, or None if its entry contains no model."""
        load, age_s = found
        parts = (record, load, model_entry, links_entry, age_s > STALE_S)
        known = self._known.get(record.name)
        if known is not None and all(map(operator.is_, known[0], parts)):
            return known[1]
        model = model_of(model_entry.value)
        if model is None:
            return None
        links = links_of(links_entry.value) if links_entry is not None else LinkSpeeds()
        instance = instance_of(record, load, model, links, age_s)
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


# --- adapters by tier ---


class AdvertisedTiers:
    """The digests that this instance advertises, and the tier of each as last advertised."""

    def __init__(self) -> None:
        self._said: dict[str, Tier] = {}

    def move(self, digest: str, tier: Tier) -> bool:
        """Notes the tier of a digest. Returns whether it is to be advertised: one that was added and has another
        tier."""
        if self._said.get(digest, tier) is tier:
            return False
        self._said[digest] = tier
        return True

    def add(self, digest: str) -> bool:
        """Adds a digest whose bytes are on the disk now. Returns whether it is new."""
        if digest in self._said:
            return False
        self._said[digest] = Tier.DISK
        return True

    def withdraw(self, digest: str) -> None:
        """Removes a digest."""
        self._said.pop(digest, None)


def tier_of(value: EntryValue) -> Tier:
    """Returns the tier in a holder's entry; DISK if it is none that is known."""
    match value:
        case (int(number), *_) if number in (Tier.DEVICE, Tier.HOST):
            return Tier(number)
    return Tier.DISK


# --- uploads under way ---


def upload_key(name: str) -> str:
    """Returns the key under which an instance advertises an adapter that takes requests while it is uploaded to it."""
    return _UPLOAD + name


def upload_of(name: str, value: EntryValue) -> RegisteredAdapter | None:
    """Returns the adapter in the entry of an upload, or None. Its digest is empty: it is not known yet."""
    match value:
        case (int(rank), int(num_bytes), *_) if rank > 0 and num_bytes > 0:
            return RegisteredAdapter(name, "", rank, num_bytes)
    return None
