"""Serves /v1/aliases: names that stand for an adapter and are switched, and rolled back, in one step."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from aiohttp import web

from caraserve.errors import AdapterRejected, InvalidRequest, NotFound
from caraserve.http.access.adapter_choice import find_named
from caraserve.http.body import fields as body_fields
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import ALIAS
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT, Context
from caraserve.http.management.adapters import updatable
from caraserve.http.responses import json_response, read_object
from caraserve.lora.aliases import Alias, Aliases
from caraserve.lora.registry import AdapterInfo
from caraserve.util.option_values import ADAPTER_NAME
from caraserve.util.tasks import in_turns

log = logging.getLogger("caraserve.http")


async def list_aliases(request: web.Request) -> web.Response:
    """Lists the aliases."""
    management = request.app[CONTEXT].management
    aliases = [] if management is None else management.aliases.all()
    shown = [_card(alias) async for alias in in_turns(aliases) if may_use_alias(request, alias)]
    return json_response({"object": "list", "data": shown})


async def show_alias(request: web.Request) -> web.Response:
    """Shows an alias."""
    name = request.match_info["name"]
    alias = _aliases(request.app[CONTEXT]).get(name)
    if not may_use_alias(request, alias):
        raise NotFound(f"There is no alias {name[:200]!r}; GET /v1/aliases lists them.", param="name")
    return json_response(_card(alias))


async def put_alias(request: web.Request) -> web.Response:
    """Points an alias at an adapter; 201 if the alias is new."""
    context, name = updatable(request), request.match_info["name"]
    fields = await read_object(request)
    check_fields(fields, ALIAS)
    adapter = body_fields.ALIASED_ADAPTER.read(fields)
    if not adapter:
        raise InvalidRequest("adapter must name the adapter that the alias stands for.", param="adapter")
    if not ADAPTER_NAME.fullmatch(name) or name in context.engine.base_names:
        raise AdapterRejected(
            f"{name[:80]!r} cannot name an alias: use letters, digits and . _ : - (128 at most), and not the base "
            "model's name.",
            param="name",
        )
    is_new, alias = await context.complete(_point(context, name, adapter))
    log.info("alias %s stands for %s", name, adapter)
    return json_response(_card(alias), status=201 if is_new else 200)


async def _point(context: Context, name: str, adapter: str) -> tuple[bool, Alias]:
    """Points an alias at an adapter, while neither name is changed otherwise. Returns whether it is new."""
    aliases = _aliases(context)
    async with _changing(context, name, adapter):
        if find_named(context, name) is not None:
            raise AdapterRejected(f"{name!r} is an adapter; an alias needs a name of its own.", param="name")
        _target(context, adapter)
        return aliases.find(name) is None, await aliases.point(name, adapter)


async def roll_back_alias(request: web.Request) -> web.Response:
    """Points an alias at the adapter that it stood for before."""
    context, name = updatable(request), request.match_info["name"]
    alias = await context.complete(_roll_back(context, name))
    log.info("alias %s stands for %s again", name, alias.adapter)
    return json_response(_card(alias))


async def _roll_back(context: Context, name: str) -> Alias:
    """Points an alias at the adapter before, while neither name is changed otherwise."""
    aliases = _aliases(context)
    while True:
        if (previous := aliases.get(name).previous) is None:
            adapter = aliases.get(name).adapter
            raise AdapterRejected(f"the alias {name!r} has stood for no adapter but {adapter!r}", param="name")
        async with _changing(context, name, previous):
            if aliases.get(name).previous == previous:  # else it was switched meanwhile
                _target(context, previous)
                return await aliases.point(name, previous)


async def delete_alias(request: web.Request) -> web.Response:
    """Deletes an alias, not its adapter."""
    context, name = updatable(request), request.match_info["name"]
    await context.complete(_delete(context, name))
    log.info("alias %s deleted", name)
    return json_response({"name": name, "object": "alias", "deleted": True})


async def _delete(context: Context, name: str) -> None:
    async with _changing(context, name):
        await _aliases(context).remove(name)


@asynccontextmanager
async def _changing(context: Context, *names: str) -> AsyncIterator[None]:
    """Waits until no other change of the names is under way, and keeps others waiting. Raises AdapterBusy."""
    async with AsyncExitStack() as stack:
        for name in sorted(set(names)):  # in one order, so that two changes do not wait for each other
            await stack.enter_async_context(context.engine.catalog.changing(name))
        yield


def may_use_alias(request: web.Request, alias: Alias) -> bool:
    """Whether the client may use an alias: its name or its adapter's is among those of the client."""
    return request[CLIENT].may_use(alias.name) or request[CLIENT].may_use(alias.adapter)


def _target(context: Context, adapter: str) -> AdapterInfo:
    if (found := find_named(context, adapter)) is None:
        raise NotFound(f"There is no adapter {adapter[:200]!r}; GET /v1/adapters lists them.", param="adapter")
    return found


def _aliases(context: Context) -> Aliases:
    if context.management is None:
        raise NotFound("This server has no aliases.", param="name")
    return context.management.aliases


def _card(alias: Alias) -> dict[str, Any]:
    return {"object": "alias"} | asdict(alias)
