"""The numbers that the web page polls: GET /stats every second, GET /stats/adapters for its table.

Both show a client the names of adapters that it may use, and count the others.
"""

import dataclasses
import heapq
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from caraserve import __version__
from caraserve.engine.batch_timeline import INTERVAL_S, INTERVALS, TimelineRow, position
from caraserve.errors import InvalidRequest
from caraserve.http.adapter_choice import ListedAdapter, remote_adapter
from caraserve.http.adapters import tier_of
from caraserve.http.context import CLIENT, CONTEXT, Context
from caraserve.http.responses import json_response
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.util.tasks import in_turns

_SHOWN_ROWS = 20  # of the timeline
_SHOWN_ADAPTERS = 100
LONGEST_FILTER = 200
_LOADING = {
    AdapterTier.READING: "reading",
    AdapterTier.STREAMING: "downloading and copying",
    AdapterTier.COPYING: "copying",
}
TIER_FILTERS = ("device", "host", "disk", "peer", "upload", "loading")


async def stats(request: web.Request) -> web.Response:
    """GET /stats: the engine's state, and the last minute of batches and loads."""
    context, client = request.app[CONTEXT], request[CLIENT]
    engine, metrics, snapshot = context.engine, context.metrics, context.engine.snapshot()
    now_s = time.monotonic()
    rows, others = engine.timeline.rows(now_s, _SHOWN_ROWS, client.may_use)
    return json_response(
        {
            "model": engine.base_name,
            "version": __version__,
            "instance": context.cluster.name if context.cluster else None,
            "draining": snapshot.draining,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "kv_used_blocks": snapshot.kv_used_blocks,
            "kv_total_blocks": snapshot.kv_total_blocks,
            "computed_tokens": metrics.computed_tokens,
            "first_token": dataclasses.asdict(metrics.first_token()),
            "token_gap": dataclasses.asdict(metrics.token_gap()),
            "timeline": {
                "interval_ms": 1000 * INTERVAL_S,
                "intervals": INTERVALS,
                "rows": [_row(row, engine.base_name) for row in rows],
                "others": _row(others, engine.base_name),
            },
            "loads": [
                {
                    "adapter": load.name,
                    "began": round(position(load.began_s, now_s), 2),
                    "ended": round(position(load.ended_s, now_s), 2),
                    "succeeded": load.succeeded,
                }
                for load in engine.catalog.manager.ended_loads
                if position(load.ended_s, now_s) > 0 and client.may_use(load.name)
            ],
        }
    )


def _row(row: TimelineRow, base_name: str) -> dict[str, Any]:
    return {"adapter": base_name if row.adapter is None else row.adapter, "cells": row.cells}


async def adapter_stats(request: web.Request) -> web.Response:
    """GET /stats/adapters?contains=TEXT&tier=TIER: how many adapters are in each tier, and the first of those whose
    name contains TEXT: the loading ones, then by requests. Filtered and sorted in turns of the event loop."""
    context, client, now_s = request.app[CONTEXT], request[CLIENT], time.monotonic()
    contains, wanted = _filters(request)
    counts: Counter[str] = Counter(dict.fromkeys(TIER_FILTERS, 0))
    matching, first = 0, list[_Entry]()
    async for info in in_turns(_listed(context)):
        if not client.may_use(info.name):
            continue
        entry = _Entry.of(info, context.engine.catalog.manager.find(info.digest), now_s)
        counts[entry.tier] += 1
        counts["loading"] += entry.loading is not None
        if contains in info.name.lower() and (wanted in ("", entry.tier) or (wanted == "loading" and entry.loading)):
            matching += 1
            first.append(entry)
            if len(first) >= 4 * _SHOWN_ADAPTERS:
                first = heapq.nsmallest(_SHOWN_ADAPTERS, first, key=_Entry.place)
    shown = heapq.nsmallest(_SHOWN_ADAPTERS, first, key=_Entry.place)
    return json_response({"counts": counts, "matching": matching, "adapters": shown})


def _listed(context: Context) -> Iterator[ListedAdapter]:
    """This instance's adapters, then those that only others have."""
    yield from context.engine.adapters()
    if context.cluster is not None:
        for one in context.cluster.adapters():
            if context.engine.catalog.find(one.name) is None:
                yield remote_adapter(context, one)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the page's table. `layers`: of a download, how many layers have arrived, and of how many."""

    name: str
    rank: int
    num_bytes: int
    tier: str
    loading: str | None
    layers: tuple[int, int] | None
    requests: int  # unfinished
    per_minute: float

    @classmethod
    def of(cls, info: ListedAdapter, adapter: Adapter | None, now_s: float) -> Self:
        """Describes an adapter; `adapter` is None for one that only other instances have."""
        known = info.name, info.rank, info.num_bytes, tier_of(adapter)
        if adapter is None:
            return cls(*known, None, None, 0, 0.0)
        layers = None
        if (partial := adapter.partial) is not None:
            layers = partial.layers, len(partial.image.spec.layer_ends)
        per_minute = round(adapter.requests_per_minute(now_s), 1)
        return cls(*known, _LOADING.get(adapter.tier), layers, adapter.pins, per_minute)

    def place(self) -> tuple[bool, float, int, int, str]:
        """Returns the key by which the table is sorted."""
        return self.loading is None, -self.per_minute, -self.requests, TIER_FILTERS.index(self.tier), self.name


def _filters(request: web.Request) -> tuple[str, str]:
    """The text and the tier that adapters are filtered by, "" for none. Raises InvalidRequest."""
    contains, tier = request.query.get("contains", "").lower(), request.query.get("tier", "")
    if len(contains) > LONGEST_FILTER:
        raise InvalidRequest(f"contains may have {LONGEST_FILTER} characters.", param="contains")
    if tier and tier not in TIER_FILTERS:
        raise InvalidRequest(f"tier must be one of {', '.join(TIER_FILTERS)}.", param="tier")
    return contains, tier
