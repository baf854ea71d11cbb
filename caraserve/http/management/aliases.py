"""Serves /v1/aliases: names that stand for an adapter and are switched, and rolled back, in one step."""

import logging
from dataclasses import asdict
from typing import Any

from aiohttp import web

from caraserve.errors import AdapterRejected, InvalidRequest, NotFound
from caraserve.http import body_fields
from caraserve.http.access.adapter_choice import ListedAdapter, find_named
from caraserve.http.context import CLIENT, CONTEXT, Context
from caraserve.http.management.admin import updatable
from caraserve.http.request_schema import ALIAS, check_fields
from caraserve.http.responses import json_response, note_ignored, read_object
from caraserve.lora.aliases import Alias, Aliases
from caraserve.util.option_values import ADAPTER_NAME
from caraserve.util.tasks import in_turns

log = logging.getLogger("caraserve.http")


async def list_aliases(request: web.Request) -> web.Response:
    """GET /v1/aliases: those that the client may use, by name."""
    management = request.app[CONTEXT].management
    aliases = [] if management is None else management.aliases.all()
    shown = [_card(alias) async for alias in in_turns(aliases) if may_use_alias(request, alias)]
    return json_response({"object": "list", "data": shown})


async def show_alias(request: web.Request) -> web.Response:
    """GET /v1/aliases/NAME"""
    name = request.match_info["name"]
    alias = _aliases(request.app[CONTEXT]).get(name)
    if not may_use_alias(request, alias):
        raise NotFound(f"There is no alias {name[:200]!r}; GET /v1/aliases lists them.", param="name")
    return json_response(_card(alias))


async def put_alias(request: web.Request) -> web.Response:
    """PUT /v1/aliases/NAME {"adapter": …}: points NAME at an adapter; 201 if NAME is new."""
    context, name = updatable(request), request.match_info["name"]
    fields = await read_object(request)
    check_fields(fields, ALIAS)
    adapter = body_fields.ALIASED_ADAPTER.read(fields)
    note_ignored(request, fields)
    if not adapter:
        raise InvalidRequest("adapter must name the adapter that the alias stands for.", param="adapter")
    if not ADAPTER_NAME.fullmatch(name) or name in context.engine.base_names:
        raise AdapterRejected(
            f"{name[:80]!r} cannot name an alias: use letters, digits and . _ : - (128 at most), and not the base "
            "model's name.",
            param="name",
        )
    if find_named(context, name) is not None or context.engine.catalog.is_changing(name):  # it may be arriving
        raise AdapterRejected(f"{name!r} is an adapter; an alias needs a name of its own.", param="name")
    _target(context, adapter)
    aliases = _aliases(context)
    is_new = aliases.find(name) is None
    alias = await context.complete(aliases.point(name, adapter))
    log.info("alias %s stands for %s", name, adapter)
    return json_response(_card(alias), status=201 if is_new else 200)


async def roll_back_alias(request: web.Request) -> web.Response:
    """POST /v1/aliases/NAME/rollback: points NAME at the adapter that it stood for before."""
    context, name = updatable(request), request.match_info["name"]
    aliases = _aliases(context)
    if (previous := aliases.get(name).previous) is not None:
        _target(context, previous)
    alias = await context.complete(aliases.roll_back(name))
    log.info("alias %s stands for %s again", name, alias.adapter)
    return json_response(_card(alias))


async def delete_alias(request: web.Request) -> web.Response:
    """DELETE /v1/aliases/NAME"""
    context, name = updatable(request), request.match_info["name"]
    await context.complete(_aliases(context).remove(name))
    log.info("alias %s deleted", name)
    return json_response({"name": name, "object": "alias", "deleted": True})


def may_use_alias(request: web.Request, alias: Alias) -> bool:
    """Whether the client may use an alias: its name or its adapter's is among those of the client."""
    return request[CLIENT].may_use(alias.name) or request[CLIENT].may_use(alias.adapter)


def _target(context: Context, adapter: str) -> ListedAdapter:
    if (found := find_named(context, adapter)) is None:
        raise NotFound(f"There is no adapter {adapter[:200]!r}; GET /v1/adapters lists them.", param="adapter")
    return found


def _aliases(context: Context) -> Aliases:
    if context.management is None:
        raise NotFound("This server has no aliases.", param="name")
    return context.management.aliases


def _card(alias: Alias) -> dict[str, Any]:
    return {"object": "alias"} | asdict(alias)
