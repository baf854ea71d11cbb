"""vLLM's two routes that load and unload adapters. They answer in plain text, as vLLM's do; their errors have OpenAI's
shape."""

import logging

from aiohttp import web

from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.http.access.adapter_choice import refuse_alias
from caraserve.http.access.api_keys import KEYS
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, TextField
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import LOAD_ADAPTER, UNLOAD_ADAPTER
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT, Context
from caraserve.http.responses import note_ignored, read_object
from caraserve.util.option_values import ADAPTER_NAME

log = logging.getLogger("caraserve.http")


async def load_lora_adapter(request: web.Request) -> web.Response:
    """Loads an adapter from a folder."""
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
    """Unloads an adapter; answers when its last request has ended."""
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
        has_admin = request.app[KEYS].has_admin
        advice = "use one of --admin-key's, or an admin's" if has_admin else "start the server with --admin-key"
        raise Forbidden(f"This key may not load or unload adapters; {advice}.")
    return context


def _required(fields: Fields, field: TextField) -> str:
    value = field.read(fields)
    if not value:
        raise AdapterRejected(f"{field.name} is missing.", param=field.name)
    return value
