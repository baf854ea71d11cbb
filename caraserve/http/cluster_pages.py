"""The cluster as this instance sees it, as JSON for people and tools."""

import contextlib
import heapq
import itertools
import operator
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from aiohttp import web

from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.http.context import CONTEXT
from caraserve.http.interfaces import ClusterApi
from caraserve.http.responses import json_response
from caraserve.util.tasks import in_turns

_SLICE = 50  # adapters written at once
_NAME = operator.attrgetter("name")


async def members(request: web.Request) -> web.Response:
    """Every instance known, this one first, with its state and newest load. A server that serves alone has no name."""
    cluster = request.app[CONTEXT].cluster
    name = cluster.name if cluster else None
    data = [_member(cluster, record) for record in cluster.members()] if cluster else []
    return json_response({"object": "list", "name": name, "data": data})


def _member(cluster: ClusterApi, record: MemberRecord) -> dict[str, Any]:
    found = cluster.load(record.name)
    load = None
    if found is not None:
        said, age_s = found
        load = {
            "age_s": round(age_s, 3),
            "status": said.status,
            "running": said.running,
            "queued": said.queued,
            "kv_tokens": said.kv_tokens,
            "kv_free_tokens": said.kv_free_tokens,
        }
    return {
        "name": record.name,
        "address": record.address,
        "state": record.state.name.lower(),
        "started_ms": record.epoch,
        "incarnation": record.incarnation,
        "load": load,
    }


async def adapters(request: web.Request) -> web.StreamResponse:
    """Every adapter's name that the cluster knows, and who holds its bytes in which tier. There may be tens of
    thousands: they are sorted and written some at a time, and requests in progress go on in between."""
    cluster = request.app[CONTEXT].cluster
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    with contextlib.suppress(ConnectionError):  # who asked has gone
        await response.prepare(request)
        await response.write(b'{"object":"list","data":[')
        comma = b""
        async for some in by_name(cluster.adapters() if cluster else iter(())):  # a write waits only for a slow reader
            await response.write(comma + b",".join(orjson.dumps(_adapter(cluster, adapter)) for adapter in some))
            comma = b","
        await response.write_eof(b"]}")
    return response


async def by_name(adapters: Iterator[RegisteredAdapter]) -> AsyncIterator[list[RegisteredAdapter]]:
    """The adapters in order, some at a time, with turns of the event loop in between."""
    sorted_slices = [sorted(some, key=_NAME) async for some in in_turns(_slices(adapters))]
    async for some in in_turns(_slices(heapq.merge(*sorted_slices, key=_NAME))):
        yield some


def _slices(adapters: Iterator[RegisteredAdapter]) -> Iterator[list[RegisteredAdapter]]:
    while some := list(itertools.islice(adapters, _SLICE)):
        yield some


def _adapter(cluster: ClusterApi | None, adapter: RegisteredAdapter) -> dict[str, Any]:
    holders = cluster.holders(adapter.digest) if cluster else {}
    return {
        "name": adapter.name,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "num_bytes": adapter.num_bytes,
        "holders": {name: tier.name.lower() for name, tier in holders.items()},
    }
