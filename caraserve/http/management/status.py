"""Probes, metrics, the usage of clients, and the state of the cluster."""

import contextlib
import heapq
import operator
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from caraserve import __version__
from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.errors import BackendFailed, Draining, NotReady
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT
from caraserve.http.responses import json_response
from caraserve.telemetry.prometheus import CONTENT_TYPE
from caraserve.util.tasks import in_turns, slices

_SLICE = 50  # entries of a list that are sorted, or encoded and written, at once
_NAME = operator.attrgetter("name")


async def health(request: web.Request) -> web.Response:
    """200 while the server and its device work.

    Also during a drain: an orchestrator that restarts the process would end the requests under way. Raises
    BackendFailed when the device has failed: then it should restart.
    """
    if (failure := request.app[CONTEXT].engine.failure) is not None:
        raise BackendFailed(f"The device has failed: {failure}")
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """200 if new requests should be sent here.

    A background task that has failed several times in a row makes this instance unready: its view of the cluster may be
    out of date. A single failure does not.
    """
    context = request.app[CONTEXT]
    engine = context.engine
    if engine.draining:
        raise Draining("The server is stopping.", retry_after_s=1.0)
    if engine.failure is not None:
        raise NotReady(f"The device has failed: {engine.failure}")
    if (reason := context.router.not_ready_reason()) is not None:
        raise NotReady(reason)
    if failing := context.background.failing():
        raise NotReady(f"Background tasks keep failing ({', '.join(failing)}); the server's log has the reason.")
    return web.Response()


async def version(request: web.Request) -> web.Response:
    """The server's version."""
    return json_response({"version": __version__})


async def load(request: web.Request) -> web.Response:
    """The number of requests under way."""
    snapshot = request.app[CONTEXT].engine.snapshot()
    return json_response({"server_load": snapshot.running + snapshot.waiting})


async def metrics(request: web.Request) -> web.Response:
    """Metrics for Prometheus."""
    context = request.app[CONTEXT]
    engine = context.engine
    body = context.metrics.render(engine.snapshot(), lambda name: engine.adapter(name).rank)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def cluster_members(request: web.Request) -> web.Response:
    """Lists the instances.

    They are all that are known, this one first, with state and newest load. Without peers: no name, no instances.
    """
    cluster = request.app[CONTEXT].cluster
    name = cluster.name if cluster else None
    data = [_member(cluster, record) for record in cluster.members()] if cluster else []
    return json_response({"object": "list", "name": name, "data": data})


def _member(cluster: Member, record: MemberRecord) -> dict[str, Any]:
    found = cluster.load(record.name)
    load = None
    if found is not None:
        newest, age_s = found
        load = {
            "age_s": round(age_s, 3),
            "status": newest.status,
            "running": newest.running,
            "queued": newest.queued,
            "kv_tokens": newest.kv_tokens,
            "kv_free_tokens": newest.kv_free_tokens,
        }
    return {
        "name": record.name,
        "address": record.address,
        "state": record.state.name.lower(),
        "started_ms": record.epoch,
        "incarnation": record.incarnation,
        "load": load,
    }


async def cluster_adapters(request: web.Request) -> web.StreamResponse:
    """Lists all instances' adapters."""
    cluster = request.app[CONTEXT].cluster
    adapters = sorted_by_name(cluster.adapters() if cluster else iter(()))
    return await _written(
        request, b'{"object":"list","data":[', ([_adapter(cluster, one) for one in some] async for some in adapters)
    )


async def usage(request: web.Request) -> web.StreamResponse:
    """Counts what each client has used of each adapter; a key without admin's rights sees its own.

    The counts are of this instance, since it started.
    """
    context, client = request.app[CONTEXT], request[CLIENT]
    rows = (
        [
            {"client": name, "adapter": adapter, **asdict(row)}
            for name, adapter, row in some
            if client.is_admin or name == client.name
        ]
        async for some in in_turns(slices(context.metrics.usage.rows(), _SLICE))
    )
    return await _written(request, b'{"object":"list","since":%d,"data":[' % context.started_s, rows)


async def _written(
    request: web.Request, head: bytes, data: AsyncIterator[Sequence[dict[str, Any]]]
) -> web.StreamResponse:
    """Writes a list that may have 100,000 entries, some of them at a time. `head`: up to the first entry."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    with contextlib.suppress(ConnectionError):  # the client has left
        await response.prepare(request)
        await response.write(head)
        comma = b""
        async for some in data:
            if some:
                await response.write(comma + b",".join(map(orjson.dumps, some)))
                comma = b","
        await response.write_eof(b"]}")
    return response


async def sorted_by_name(adapters: Iterator[RegisteredAdapter]) -> AsyncIterator[list[RegisteredAdapter]]:
    """The adapters sorted by name, some at a time, with turns of the event loop in between."""
    sorted_slices = [sorted(some, key=_NAME) async for some in in_turns(slices(adapters, _SLICE))]
    async for some in in_turns(slices(heapq.merge(*sorted_slices, key=_NAME), _SLICE)):
        yield some


def _adapter(cluster: Member | None, adapter: RegisteredAdapter) -> dict[str, Any]:
    holders = cluster.holders(adapter.digest) if cluster else {}
    return {
        "name": adapter.name,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "num_bytes": adapter.num_bytes,
        "holders": {name: tier.name.lower() for name, tier in holders.items()},
    }
