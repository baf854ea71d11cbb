"""Lists, uploads, labels, pins and deletes adapters under /v1/adapters."""

import asyncio
import base64
import binascii
import logging
import re
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from caraserve.config import PINS
from caraserve.errors import AdapterRejected, Forbidden, InvalidRequest, NotFound
from caraserve.http import body_fields
from caraserve.http.access.adapter_choice import ListedAdapter, find_named, refuse_alias, remote_adapter, settings_of
from caraserve.http.access.adapter_version import entity_tag
from caraserve.http.adapter_defaults import parse_defaults
from caraserve.http.apis.chat_format import check_template
from caraserve.http.context import CLIENT, CONTEXT, Context
from caraserve.http.management.admin import updatable
from caraserve.http.management.status import sorted_by_name
from caraserve.http.request_schema import ADAPTER_SETTINGS, check_fields
from caraserve.http.responses import json_response, note_ignored, read_object
from caraserve.http.validation import Fields, shown
from caraserve.lora.adapter import Adapter, AdapterTier, RemoteSource, UploadSource
from caraserve.lora.management import AdapterManagement
from caraserve.lora.uploads import UploadClaims
from caraserve.util.tasks import in_turns

log = logging.getLogger("caraserve.http")

_SHA256_HEADER = "x-content-sha256"
_DIGEST_HEADER = "Content-Digest"  # RFC 9530
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_NO_PIN = "no"
_UPLOAD_TIER = "upload"
_TIERS = {
    AdapterTier.DEVICE: "device",
    AdapterTier.HOST: "host",
    AdapterTier.STREAMING: "host",
    AdapterTier.COPYING: "host",
}


async def list_adapters(request: web.Request) -> web.Response:
    """GET /v1/adapters: the adapters that the client may use, first this instance's, then those that only others have,
    by name."""
    context, client = request.app[CONTEXT], request[CLIENT]
    cards, local_names = [], set()
    async for adapter in in_turns(context.engine.adapters()):
        local_names.add(adapter.name)
        if client.may_use(adapter.name):
            cards.append(orjson.dumps(_card(context, adapter)))
    if context.cluster is not None:
        async for some in sorted_by_name(context.cluster.adapters()):
            names = {one.name for one in some if client.may_use(one.name)} - local_names
            remote = [remote_adapter(context, one) for one in some if one.name in names]
            cards += [orjson.dumps(_card(context, one)) for one in remote]
    body = b'{"object":"list","data":[%b]}' % b",".join(cards)
    return web.Response(body=body, content_type="application/json")


async def show_adapter(request: web.Request) -> web.Response:
    """GET /v1/adapters/NAME"""
    card = _full_card(request.app[CONTEXT], _named(request))
    return json_response(card, headers={"ETag": entity_tag(card["digest"])} if card["digest"] else {})


def _named(request: web.Request) -> ListedAdapter:
    """The adapter that the URL names. Raises NotFound, also if the client may not use it."""
    context, name = request.app[CONTEXT], request.match_info["name"]
    if request[CLIENT].may_use(name) and (found := find_named(context, name)) is not None:
        return found
    raise NotFound(f"There is no adapter {name[:200]!r}; GET /v1/adapters lists them.", param="name")


def tier_of(adapter: Adapter | None) -> str:
    """The place nearest to the device that has all of an adapter; None: it has no record on this instance."""
    if adapter is None:
        return "peer"
    if isinstance(adapter.source, UploadSource):
        return _UPLOAD_TIER
    return _TIERS.get(adapter.tier) or ("peer" if isinstance(adapter.source, RemoteSource) else "disk")


def _card(context: Context, info: ListedAdapter) -> dict[str, Any]:
    adapter = context.engine.catalog.manager.find(info.digest)
    settings, tier = settings_of(context, info.name), tier_of(adapter)
    return {
        "name": info.name,
        "object": "adapter",
        "digest": "" if tier == _UPLOAD_TIER else info.digest,  # it is known when all bytes have arrived
        "rank": info.rank,
        "bytes": info.num_bytes,
        "created": int(info.created_s),
        "tier": tier,
        "requests": 0 if adapter is None else adapter.pins,
        "pinned": settings.pinned,
        "labels": settings.labels,
    }


def _full_card(context: Context, info: ListedAdapter) -> dict[str, Any]:
    """The card with the defaults of requests, which a list leaves out: a chat template may have 64 KiB."""
    return _card(context, info) | asdict(settings_of(context, info.name).defaults)


async def put_adapter(request: web.Request) -> web.Response:
    """PUT /v1/adapters/NAME: stores the body and points NAME at it; 201 if the name is new."""
    context, management = _managed(request)
    name = request.match_info["name"]
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding is not taken; send the body as it is.")
    refuse_alias(context, name)
    _refuse_uploading(context, name)
    claims = UploadClaims(request.content_length, request.query.get("config"), tuple(_checksums(request)))
    stored = await management.uploads.put(name, _pieces(request, context.timings.body_s), claims)
    log.info("adapter %s uploaded: %s", name, stored.info.digest)
    headers = {"ETag": entity_tag(stored.info.digest)}
    return json_response(_full_card(context, stored.info), status=201 if stored.is_new else 200, headers=headers)


async def patch_adapter(request: web.Request) -> web.Response:
    """PATCH /v1/adapters/NAME {"labels": …, "pinned": …, "sampling": …}: sets what is given. A null ends a default."""
    context, management = _managed(request)
    fields = await read_object(request)
    check_fields(fields, ADAPTER_SETTINGS)
    labels, pinned = _labels(fields), fields.raw(body_fields.PINNED.name)
    if pinned is not None and pinned not in (_NO_PIN, *PINS):
        choices = ", ".join([_NO_PIN, *PINS])
        raise InvalidRequest(f"pinned must be one of {choices}, not {shown(pinned)}.", param="pinned")
    defaults = asdict(parse_defaults(fields))
    if (template := defaults["chat_template"]) is not None:
        tenant = request[CLIENT].tenant(user="")
        await check_template(context.engine.tokenizer, template, tenant, request.match_info["name"])
    given_defaults = {name: defaults[name] for name, _ in fields.items() if name in defaults}
    changes: dict[str, Any] = {} if labels is None else {"labels": labels}
    if pinned is not None:
        changes["pinned"] = None if pinned == _NO_PIN else pinned
    note_ignored(request, fields)
    adapter = _named(request)
    if changes or given_defaults:
        await context.complete(management.settings.change(adapter.name, changes, given_defaults))
    return json_response(_full_card(context, adapter))


def _labels(fields: Fields) -> dict[str, str] | None:
    if fields.raw(body_fields.LABELS.name) is None:
        return None
    labels = fields.mapping(body_fields.LABELS.name)
    if len(labels) > body_fields.MAX_LABELS:
        raise InvalidRequest(f"labels has {len(labels)} entries; {body_fields.MAX_LABELS} are allowed.", param="labels")
    for name, value in labels.items():
        if not re.fullmatch(body_fields.LABEL_NAME, name) or not isinstance(value, str):
            raise InvalidRequest(
                f"labels has {shown(name)}: {shown(value)}; a name has letters, digits and . _ / - (63 at most), "
                "its value is a string.",
                param="labels",
            )
        if len(value) > body_fields.MAX_LABEL_CHARACTERS:
            raise InvalidRequest(
                f"labels.{name} has {len(value)} characters; {body_fields.MAX_LABEL_CHARACTERS} are allowed.",
                param="labels",
            )
    return labels


async def _delete(context: Context, management: AdapterManagement, name: str) -> None:
    await management.uploads.delete(name)
    await _remove_settings(context, management, name)


async def _remove_settings(context: Context, management: AdapterManagement, name: str) -> None:
    """Removes the settings of a deleted adapter, unless another instance has given its name to another one meanwhile:
    requests of the deleted one may have run for long."""

    def is_deleted() -> bool:
        return find_named(context, name) is None

    if is_deleted():
        await management.settings.remove(name)
        if context.cluster is not None:
            management.settings.remove_later(name, is_deleted)


async def delete_adapter(request: web.Request) -> web.Response:
    """DELETE /v1/adapters/NAME: responds when no running request uses the adapter any more."""
    context, management = _managed(request)
    name = request.match_info["name"]
    _refuse_uploading(context, name)
    try:
        await context.complete(_delete(context, management, name))
    except NotFound:
        _named(request)
        assert context.cluster is not None
        context.cluster.remove(name)
        await context.complete(_remove_settings(context, management, name))
    log.info("adapter %r deleted", name)
    return json_response({"name": name, "object": "adapter", "deleted": True})


def _refuse_uploading(context: Context, name: str) -> None:
    """Raises AdapterRejected for an adapter that is being uploaded to another instance."""
    if context.cluster is not None and (instances := context.cluster.uploads(name)):
        raise AdapterRejected(
            f"the adapter {name!r} is being uploaded to the instance {min(instances)!r}; try again", param="name"
        )


def _managed(request: web.Request) -> tuple[Context, AdapterManagement]:
    """The context and its parts that change adapters, for a client that may. Raises Forbidden."""
    context = updatable(request)
    if context.management is None:
        raise Forbidden("This server's adapters are not managed over HTTP.")
    return context, context.management


async def _pieces(request: web.Request, patience_s: float) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises HTTPRequestTimeout after `patience_s` without a byte, or InvalidRequest."""
    try:
        while True:
            async with asyncio.timeout(patience_s):
                piece = await request.content.readany()
            if not piece:
                return
            yield piece
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"No byte of the body arrived for {patience_s:g} s.") from None
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"The body could not be read: {error}.") from None


def _checksums(request: web.Request) -> list[tuple[str, bytes]]:
    """The SHA-256 of the body, by the headers that state it. Raises InvalidRequest naming a malformed one."""
    found = []
    if (text := request.headers.get(_SHA256_HEADER)) is not None:
        if not _HEX.fullmatch(text.strip()):
            raise InvalidRequest(f"{_SHA256_HEADER} must be 64 hexadecimal digits.", param=_SHA256_HEADER)
        found.append((_SHA256_HEADER, bytes.fromhex(text.strip())))
    if (text := request.headers.get(_DIGEST_HEADER)) is not None:
        found.append((_DIGEST_HEADER, _sha256_in(text)))
    return found


def _sha256_in(header: str) -> bytes:
    for item in header.split(","):
        name, _, value = item.strip().partition("=")
        if name == "sha-256" and value.startswith(":") and value.endswith(":"):
            try:
                digest = base64.b64decode(value[1:-1], validate=True)
            except binascii.Error:
                break
            if len(digest) == 32:
                return digest
    raise InvalidRequest(f"{_DIGEST_HEADER} must have sha-256=:BASE64:.", param=_DIGEST_HEADER)
