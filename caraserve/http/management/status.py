"""Probes, metrics, and the state of the cluster."""

import contextlib
import heapq
import operator
from collections.abc import AsyncIterator, Iterator
from typing import Any

import orjson
from aiohttp import web

from caraserve import __version__
from caraserve.cluster.membership.member import Member
from caraserve.cluster.membership.swim import MemberRecord
from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.errors import BackendFailed, Draining, NotReady
from caraserve.http.context import CONTEXT
from caraserve.http.responses import json_response
from caraserve.telemetry.prometheus import CONTENT_TYPE
from caraserve.util.tasks import in_turns, slices

_SLICE = 50  # adapters that are sorted or encoded at once
_NAME = operator.attrgetter("name")


async def health(request: web.Request) -> web.Response:
    """200 while the event loop and the device work, also during a drain: an orchestrator that restarts the process
    would end the requests under way. Raises BackendFailed when the device has failed: then it should restart."""
    if (failure := request.app[CONTEXT].engine.failure) is not None:
        raise BackendFailed(f"The device has failed: {failure}")
    return web.Response()


async def ready(request: web.Request) -> web.Response:
    """200 if new requests should be sent to this instance. A background task that has failed several times in a row
    makes it unready: its view of the cluster may be out of date. A single failure does not."""
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
    return json_response({"version": __version__})


async def load(request: web.Request) -> web.Response:
    """The number of requests under way, as vLLM gives it."""
    snapshot = request.app[CONTEXT].engine.snapshot()
    return json_response({"server_load": snapshot.running + snapshot.waiting})


async def metrics(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    engine = context.engine
    body = context.metrics.render(engine.snapshot(), lambda name: engine.adapter(name).rank)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def cluster_members(request: web.Request) -> web.Response:
    """All known instances, this one first, with state and newest load. Without peers: no name, no instances."""
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
    """All adapters of the cluster, with the instances that hold each and in which tier. There may be tens of thousands:
    they are sorted and written some at a time, with turns of the event loop in between."""
    cluster = request.app[CONTEXT].cluster
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    with contextlib.suppress(ConnectionError):  # the client has left
        await response.prepare(request)
        await response.write(b'{"object":"list","data":[')
        comma = b""
        async for some in sorted_by_name(cluster.adapters() if cluster else iter(())):
            await response.write(comma + b",".join(orjson.dumps(_adapter(cluster, adapter)) for adapter in some))
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
