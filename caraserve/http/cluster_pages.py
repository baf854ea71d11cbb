"""The cluster as this instance sees it, as JSON for people and tools. Called by `app.py`."""

from typing import Any

from aiohttp import web

from caraserve.cluster.members import Record
from caraserve.http.context import CONTEXT
from caraserve.http.engine_api import ClusterApi
from caraserve.http.messages import json_response


async def members(request: web.Request) -> web.Response:
    """Every instance known, this one first, with its state and newest load. A server that serves alone has no name."""
    cluster = request.app[CONTEXT].cluster
    name = cluster.name if cluster else None
    data = [_member(cluster, record) for record in cluster.members()] if cluster else []
    return json_response({"object": "list", "name": name, "data": data})


def _member(cluster: ClusterApi, record: Record) -> dict[str, Any]:
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


async def adapters(request: web.Request) -> web.Response:
    """Every adapter's name that the cluster knows, and who holds its bytes in which tier."""
    cluster = request.app[CONTEXT].cluster
    data = (
        [
            {
                "name": adapter.name,
                "digest": adapter.digest,
                "rank": adapter.rank,
                "num_bytes": adapter.num_bytes,
                "holders": {name: tier.name.lower() for name, tier in cluster.holders(adapter.digest).items()},
            }
            for adapter in sorted(cluster.adapters(), key=lambda adapter: adapter.name)
        ]
        if cluster
        else []
    )
    return json_response({"object": "list", "data": data})
