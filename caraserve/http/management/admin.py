"""Lists models and adapters, and serves vLLM's two routes that load and unload adapters.

Like vLLM's, the two routes answer in plain text, and their errors have OpenAI's shape.
"""

import logging

from aiohttp import web

from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.http import body_fields
from caraserve.http.access.adapter_choice import (
    find_adapter,
    refuse_alias,
    target_of,
    unknown_model,
)
from caraserve.http.context import CLIENT, CONTEXT, Context
from caraserve.http.field_types import TextField
from caraserve.http.management.model_list import MODELS, adapter_card, base_card
from caraserve.http.request_schema import LOAD_ADAPTER, UNLOAD_ADAPTER, check_fields
from caraserve.http.responses import json_response, note_ignored, read_object
from caraserve.http.validation import Fields
from caraserve.util.option_values import ADAPTER_NAME

log = logging.getLogger("caraserve.http")


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
        return json_response(base_card(context, name))
    is_alias = target_of(context, name) != name
    card = adapter_card(context, adapter, shows_path=request[CLIENT].is_admin)
    return json_response(card | ({"id": name} if is_alias else {}))


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

    def check() -> None:
        refuse_alias(context, name)

    await context.complete(context.engine.load_adapter(name, path, inplace=inplace, check=check))
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
