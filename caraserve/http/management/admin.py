"""Lists models and adapters, and serves vLLM's two routes that load and unload adapters.

Like vLLM's, the two routes answer in plain text, and their errors have OpenAI's shape.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import orjson
from aiohttp import web

from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.http import body_fields
from caraserve.http.access.adapter_choice import (
    ListedAdapter,
    find_adapter,
    find_named,
    refuse_alias,
    remote_adapter,
    target_of,
    unknown_model,
)
from caraserve.http.access.client import Client
from caraserve.http.context import CLIENT, CONTEXT, Context
from caraserve.http.field_types import TextField
from caraserve.http.management.status import sorted_by_name
from caraserve.http.request_schema import LOAD_ADAPTER, UNLOAD_ADAPTER, check_fields
from caraserve.http.responses import json_response, note_ignored, read_object
from caraserve.http.validation import Fields
from caraserve.lora.registry import AdapterInfo
from caraserve.util.option_values import ADAPTER_NAME
from caraserve.util.tasks import in_turns

log = logging.getLogger("caraserve.http")

_MOST_LISTS = 16  # kept at once, one for each set of models that a client may use


class ModelList:
    """The encoded list of models, encoded again after each change, some adapters in each turn of the event loop:
    routers poll it, and 40,000 adapters take half a second. Each client gets the models that it may use."""

    def __init__(self) -> None:
        self._adapters: list[AdapterInfo] | None = None
        self._versions = 0, 0  # of the cluster's registry, and of the aliases
        self._bodies: dict[tuple[tuple[str, ...], bool], bytes] = {}  # by what a client may use
        self._encoding = asyncio.Lock()

    async def body(self, context: Context, client: Client) -> bytes:
        async with self._encoding:
            adapters = context.engine.adapters()
            registry_version = context.cluster.registry_version if context.cluster else 0
            versions = registry_version, context.management.aliases.version if context.management else 0
            if adapters != self._adapters or versions != self._versions:
                self._bodies.clear()
                self._adapters, self._versions = adapters, versions
            allowed = client.adapters, client.base_model
            if (body := self._bodies.get(allowed)) is None:
                if len(self._bodies) >= _MOST_LISTS:
                    self._bodies.clear()
                body = self._bodies[allowed] = await _encoded_list(context, client, adapters)
            return body


async def _encoded_list(context: Context, client: Client, adapters: Sequence[AdapterInfo]) -> bytes:
    """The models that a client may use: the base model by all its names, this instance's adapters, those that only
    other instances have, by name, then the aliases."""
    base_names = context.engine.base_names if client.may_use(None) else ()
    cards = [orjson.dumps(_base_card(context, name)) for name in base_names]
    local_names = set()
    async for adapter in in_turns(adapters):
        local_names.add(adapter.name)
        if client.may_use(adapter.name):
            cards.append(orjson.dumps(_card(context, adapter)))
    if context.cluster is not None:
        async for some in sorted_by_name(context.cluster.adapters()):
            remote = [one for one in some if one.name not in local_names and client.may_use(one.name)]
            cards += [orjson.dumps(_card(context, remote_adapter(context, one))) for one in remote]
    async for alias in in_turns(context.management.aliases.all() if context.management else ()):
        is_allowed = client.may_use(alias.name) or client.may_use(alias.adapter)
        if is_allowed and (target := find_named(context, alias.adapter)) is not None:
            cards.append(orjson.dumps(_card(context, target) | {"id": alias.name}))
    return b'{"object":"list","data":[%b]}' % b",".join(cards)


MODELS = web.AppKey("MODELS", ModelList)


async def list_models(request: web.Request) -> web.Response:
    body = await request.app[MODELS].body(request.app[CONTEXT], request[CLIENT])
    return web.Response(body=body, content_type="application/json")


async def show_model(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    name = request.match_info["model"]
    adapter = find_adapter(request, name)
    if adapter is None and not request[CLIENT].may_use(None):
        raise unknown_model(name)
    if adapter is None:
        return json_response(_base_card(context, name))
    is_alias = target_of(context, name) != name
    return json_response(_card(context, adapter) | ({"id": name} if is_alias else {}))


def _base_card(context: Context, name: str) -> dict[str, Any]:
    """vLLM's model card of the base model."""
    return {
        "id": name,
        "object": "model",
        "created": int(context.started_s),
        "owned_by": "caraserve",
        "root": context.engine.base_name,
        "parent": None,
        "rank": None,
        "max_model_len": context.engine.max_model_len,
        "permission": [],
    }


def _card(context: Context, adapter: ListedAdapter) -> dict[str, Any]:
    """vLLM's model card with an adapter's rank; `root` is where the weights are from, `parent` its base model."""
    return _base_card(context, adapter.name) | {
        "created": int(adapter.created_s),
        "root": adapter.path,
        "parent": context.engine.base_name,
        "rank": adapter.rank,
    }


async def load_lora_adapter(request: web.Request) -> web.Response:
    context = updatable(request)
    fields = await read_object(request)
    check_fields(fields, LOAD_ADAPTER)
    name, path = _required(fields, body_fields.LORA_NAME), _required(fields, body_fields.LORA_FOLDER)
    inplace = body_fields.LOAD_INPLACE.read(fields)
    note_ignored(request, fields)
    if not ADAPTER_NAME.fullmatch(name) or name in context.engine.base_names:
        raise AdapterRejected(
            f"{name[:80]!r} cannot name an adapter: use letters, digits and . _ : - (128 at most), beginning with a "
            "letter or digit, and not the base model's name.",
            param="lora_name",
        )
    refuse_alias(context, name)
    await context.complete(context.engine.load_adapter(name, path, inplace=inplace))
    log.info("adapter %s loaded from %r", name, path)
    return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")


async def unload_lora_adapter(request: web.Request) -> web.Response:
    """Responds when no running request uses the adapter any more."""
    context = updatable(request)
    fields = await read_object(request)
    check_fields(fields, UNLOAD_ADAPTER)
    name = _required(fields, body_fields.LORA_NAME)
    note_ignored(request, fields)
    try:
        await context.complete(context.engine.unload_adapter(name))
    except NotFound:
        if context.cluster is None or context.cluster.adapter(name) is None:
            raise
        context.cluster.remove(name)
    log.info("adapter %r unloaded", name)
    return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")


def updatable(request: web.Request) -> Context:
    """The context, for a client that may change adapters. Raises Forbidden."""
    context = request.app[CONTEXT]
    if not context.allow_lora_updates:
        raise Forbidden("Adapters cannot be changed while this server runs; start with --allow-runtime-lora-updating.")
    if not request[CLIENT].is_admin:
        may = (
            "use one of --admin-key's, or an admin's" if context.keys.has_admin else "start the server with --admin-key"
        )
        raise Forbidden(f"This key may not load or unload adapters; {may}.")
    return context


def _required(fields: Fields, field: TextField) -> str:
    value = field.read(fields)
    if not value:
        raise AdapterRejected(f"{field.name} is missing.", param=field.name)
    return value
