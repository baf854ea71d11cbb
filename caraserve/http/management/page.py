"""The web page at `/`: its files, and the numbers that it polls: GET /stats every second, GET /stats/adapters for its
table.

The files hold no data and need no key. The numbers show a client the names of adapters that it may use, and count the
others.
"""

import dataclasses
import heapq
import operator
import time
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from aiohttp import web

from caraserve import __version__
from caraserve.engine.batch_timeline import INTERVAL_S, INTERVALS, TimelineRow, position
from caraserve.errors import InvalidRequest
from caraserve.http.access.adapter_choice import remote_adapter, settings_of
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT, Context
from caraserve.http.management.adapters import refused_folders, tier_of
from caraserve.http.responses import json_response
from caraserve.lora.adapter import Adapter, AdapterTier
from caraserve.lora.registry import AdapterInfo
from caraserve.util.tasks import in_turns, slices

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {
    entry.name: (entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
    for entry in files("caraserve.http.management").joinpath("page").iterdir()
}
# The paths that need no key. The page asks for one when a route that it reads needs it.
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES if name != "index.html")})
# Only files of this server run, and only text becomes part of the page: a browser refuses to parse strings as markup.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_SHOWN_ROWS = 20  # of the timeline
_SHOWN_ADAPTERS = 100
_SHOWN_REFUSED = 20
_SLICE = 100  # adapters between two looks at the clock
LONGEST_FILTER = 200
_LOADING = {
    AdapterTier.READING: "reading",
    AdapterTier.STREAMING: "downloading and copying",
    AdapterTier.COPYING: "copying",
}
TIER_FILTERS = ("device", "host", "disk", "peer", "upload", "loading")


async def page(request: web.Request) -> web.Response:
    """A page to talk to adapters side by side, to manage them, and to see the state of the server."""
    return _response("index.html")


async def page_file(request: web.Request) -> web.Response:
    """A file of the page at /."""
    if request.path not in PAGE_PATHS:
        raise web.HTTPNotFound
    return _response(request.match_info["file"])


def _response(name: str) -> web.Response:
    body, content_type = _FILES[name]
    return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)


async def stats(request: web.Request) -> web.Response:
    """The numbers of the page at /, and what its client may do."""
    context, client = request.app[CONTEXT], request[CLIENT]
    engine, metrics, snapshot = context.engine, context.metrics, context.engine.snapshot()
    now_s = time.monotonic()
    rows, others = engine.timeline.rows(now_s, _SHOWN_ROWS, client.may_use)
    return json_response(
        {
            "model": engine.base_name,
            "version": __version__,
            "instance": context.cluster.name if context.cluster else None,
            "max_model_len": engine.max_model_len,
            "can_chat": engine.tokenizer.can_chat,
            "can_update": context.allow_lora_updates and context.management is not None,
            "client": {"admin": client.is_admin, "base_model": client.base_model},
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
    """The adapters that the page at / lists: at most 100, and how many there are.

    Those come first that are loading, then those with the most requests. The folders that are not served follow, and
    how many adapters each tier has. All are filtered and sorted in turns of the event loop.
    """
    context, client, now_s = request.app[CONTEXT], request[CLIENT], time.monotonic()
    contains, wanted = _filters(request)
    counts: Counter[str] = Counter(dict.fromkeys(TIER_FILTERS, 0))
    find, sees_all = context.engine.catalog.manager.find, client.may_use_all
    matching, first = 0, list[tuple[tuple[Any, ...], AdapterInfo, Adapter | None]]()
    async for some in in_turns(slices(_listed(context), _SLICE)):  # 100 take 0.3 ms
        rows = []
        for info in some:
            if not (sees_all or client.may_use(info.name)):
                continue
            adapter = find(info.digest)
            tier = tier_of(adapter)
            is_loading = adapter is not None and adapter.tier in _LOADING
            counts[tier] += 1
            counts["loading"] += is_loading
            if (wanted in ("", tier) or (wanted == "loading" and is_loading)) and contains in info.name.lower():
                rows.append((_place(context, info, adapter, tier, now_s), info, adapter))
        matching += len(rows)
        first = heapq.nsmallest(_SHOWN_ADAPTERS, [*first, *rows], key=operator.itemgetter(0))
    refused = [one for one in refused_folders(request) if contains in one["name"].lower()]
    return json_response(
        {
            "counts": counts,
            "matching": matching,
            "adapters": [_entry(info, adapter, context, now_s) for _, info, adapter in first],
            "refused": {"matching": len(refused), "folders": refused[:_SHOWN_REFUSED]},
        }
    )


def _place(context: Context, info: AdapterInfo, adapter: Adapter | None, tier: str, now_s: float) -> tuple[Any, ...]:
    """The place of an adapter in the table, for sorting."""
    if adapter is None:
        return True, 0.0, 0, TIER_FILTERS.index(tier), info.name
    counts = context.engine.request_counts
    rate, unfinished = counts.per_minute(info.name, now_s), counts.unfinished(info.name)
    return adapter.tier not in _LOADING, -rate, -unfinished, TIER_FILTERS.index(tier), info.name


def _listed(context: Context) -> Iterator[AdapterInfo]:
    """This instance's adapters, then those that only others have."""
    yield from context.engine.adapters()
    if context.cluster is not None:
        for one in context.cluster.adapters():
            if context.engine.catalog.find(one.name) is None:
                yield remote_adapter(context, one)


def _entry(info: AdapterInfo, adapter: Adapter | None, context: Context, now_s: float) -> dict[str, Any]:
    """A line of the page's table; `adapter` is None for one that only other instances have. `layers`: of a download,
    how many layers have arrived, and of how many."""
    settings, counts = settings_of(context, info.name), context.engine.request_counts
    partial = None if adapter is None else adapter.partial
    return {
        "name": info.name,
        "rank": info.rank,
        "num_bytes": info.num_bytes,
        "tier": tier_of(adapter),
        "loading": None if adapter is None else _LOADING.get(adapter.tier),
        "layers": None if partial is None else (partial.layers, len(partial.image.spec.layer_ends)),
        "pinned": settings.pinned,
        "labels": settings.labels,
        "own_chat_template": settings.request_defaults.chat_template is not None,
        "requests": 0 if adapter is None else counts.unfinished(info.name),
        "per_minute": 0.0 if adapter is None else round(counts.per_minute(info.name, now_s), 1),
        **_remarkable(info, context),
    }


def _remarkable(info: AdapterInfo, context: Context) -> dict[str, Any]:
    """What few adapters have: a score head, or another base model that they were trained on."""
    facts = info.facts
    return ({"num_classes": facts.num_classes} if facts.num_classes else {}) | (
        {"trained_on": facts.trained_on} if context.engine.catalog.rules.base.is_other(facts) else {}
    )


def _filters(request: web.Request) -> tuple[str, str]:
    """The text and the tier that adapters are filtered by, "" for none. Raises InvalidRequest."""
    contains, tier = request.query.get("contains", "").lower(), request.query.get("tier", "")
    if len(contains) > LONGEST_FILTER:
        raise InvalidRequest(f"contains may have {LONGEST_FILTER} characters.", param="contains")
    if tier and tier not in TIER_FILTERS:
        raise InvalidRequest(f"tier must be one of {', '.join(TIER_FILTERS)}.", param="tier")
    return contains, tier
