"""Lists, uploads, labels, pins and deletes adapters under /v1/adapters; vLLM's two routes that load and unload them."""

import asyncio
import base64
import binascii
import logging
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from aiohttp import web

from caraserve.core.adapter_rules import PINS
from caraserve.errors import AdapterAliased, AdapterBusy, AdapterRejected, Forbidden, InvalidRequest, NotFound
from caraserve.http.access.adapter_choice import (
    check_change,
    entity_tag,
    find_named,
    refusal,
    refuse_alias,
    remote_adapter,
    settings_of,
)
from caraserve.http.access.api_keys import KEYS
from caraserve.http.apis.chat_format import check_template
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, TextField, shown
from caraserve.http.body.known_fields import check_fields
from caraserve.http.body.request_schema import ADAPTER_SETTINGS, LOAD_ADAPTER, UNLOAD_ADAPTER
from caraserve.http.body.sampling import parse_defaults
from caraserve.http.client import CLIENT
from caraserve.http.context import CONTEXT, Context, HttpTimings
from caraserve.http.management.model_list import facts_card
from caraserve.http.management.status import sorted_by_name
from caraserve.http.responses import json_response, note_ignored, read_object
from caraserve.lora.adapter import Adapter, AdapterTier, RemoteSource, UploadSource
from caraserve.lora.management import AdapterManagement, DeletedAdapter
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.uploads import UploadClaims, UploadedAdapter
from caraserve.util.least_rate import LeastRate
from caraserve.util.option_values import ADAPTER_NAME
from caraserve.util.tasks import in_turns

log = logging.getLogger("caraserve.http")

_SHA256_HEADER = "x-content-sha256"
_DIGEST_HEADER = "Content-Digest"  # RFC 9530
_HEX = re.compile(r"[0-9a-fA-F]{64}")
_NO_PIN = "no"
_LEAST_BYTES_PER_S = 1000.0  # of an upload, on average, once `upload_grace_s` has passed
_LONGEST_S = 3600.0  # of an upload, after `upload_grace_s`: 500 MB need 1.1 Mbit/s
_RETRY_S = 1.0
_UPLOAD_TIER = "upload"
_TIERS = {
    AdapterTier.DEVICE: "device",
    AdapterTier.HOST: "host",
    AdapterTier.STREAMING: "host",
    AdapterTier.COPYING: "host",
}


async def list_adapters(request: web.Request) -> web.Response:
    """Lists the adapters, and the folders that are not served.

    They are those that the client may use: first this instance's adapters, then those that only others have, by name;
    then the folders that this instance does not serve, and why.
    """
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
    refused = b",".join([orjson.dumps(one) for one in refused_folders(request)])
    body = b'{"object":"list","data":[%b],"refused":[%b]}' % (b",".join(cards), refused)
    return web.Response(body=body, content_type="application/json")


def refused_folders(request: web.Request) -> Iterator[dict[str, Any]]:
    """The folders of this instance that are not served, by the names that the client may use."""
    management, client = request.app[CONTEXT].management, request[CLIENT]
    for one in [] if management is None else management.refused.all():
        if client.may_use(one.name):
            yield {"name": one.name, "object": "refused_adapter", "reason": one.reason, "since": int(one.since_s)}


async def show_adapter(request: web.Request) -> web.Response:
    """Shows an adapter."""
    card = _full_card(request.app[CONTEXT], _named(request))
    return json_response(card, headers={"ETag": entity_tag(card["digest"])} if card["digest"] else {})


def _named(request: web.Request) -> AdapterInfo:
    """The adapter that the URL names. Raises NotFound, also if the client may not use it."""
    context, name = request.app[CONTEXT], request.match_info["name"]
    if request[CLIENT].may_use(name) and (found := find_named(context, name)) is not None:
        return found
    raise _unknown(request)


def _unknown(request: web.Request) -> NotFound:
    """The error for a name in the URL that stands for no adapter."""
    name = request.match_info["name"]
    reason = refusal(request, name)
    return NotFound(f"There is no adapter {name[:200]!r}; GET /v1/adapters lists them.", param="name", reason=reason)


def tier_of(adapter: Adapter | None) -> str:
    """The place nearest to the device that has all of an adapter; None: it has no record on this instance."""
    if adapter is None:
        return "peer"
    if isinstance(adapter.source, UploadSource):
        return _UPLOAD_TIER
    return _TIERS.get(adapter.tier) or ("peer" if isinstance(adapter.source, RemoteSource) else "disk")


def _card(context: Context, info: AdapterInfo) -> dict[str, Any]:
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
        **facts_card(context, info),
    }


def _full_card(context: Context, info: AdapterInfo) -> dict[str, Any]:
    """The card with what a list leaves out: the modules that are adapted, none where only other instances know them,
    and the defaults of requests, as a chat template may have 64 KiB."""
    settings = settings_of(context, info.name)
    more = {"target_modules": info.targets, "folder_chat_template": settings.folder_template}
    return _card(context, info) | asdict(settings.defaults) | more


async def put_adapter(request: web.Request) -> web.Response:
    """Stores an adapter, as a tar or safetensors file, under a name; 201 if the name is new."""
    context, management = _managed(request)
    name = request.match_info["name"]
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding is not taken; send the body as it is.")
    config, checksums = request.query.get("config"), tuple(_checksums(request))
    claims = UploadClaims(request.content_length, config, checksums, request[CLIENT].name)
    check = _Replacement(request, context, management, name).check
    stored = await management.uploads.put(name, _pieces(request, context.timings), claims, check)
    log.info("adapter %s %s: %s", name, _what_happened(stored), stored.info.digest)
    headers = {"ETag": entity_tag(stored.info.digest)}
    card = _full_card(context, stored.info) | {"skipped_files": stored.skipped}
    return json_response(card, status=201 if stored.is_new else 200, headers=headers)


def _what_happened(stored: UploadedAdapter) -> str:
    if stored.old is None:
        return "uploaded"
    return "uploaded again, the same version" if stored.old.digest == stored.info.digest else "replaced"


class _Change:
    """A change of what a name stands for. Raises InvalidRequest."""

    def __init__(self, request: web.Request, context: Context, management: AdapterManagement, name: str) -> None:
        self._request, self._context, self._aliases, self._name = request, context, management.aliases, name
        self._is_forced = _is_forced(request)
        self._at_first: list[str] = []  # aliases that stood for the name when an upload began


class _Replacement(_Change):
    """Checks an upload that is to replace what a name stands for, when it begins and when it is to be stored."""

    def check(self, digest: str | None) -> None:
        """As `CheckUpload`. Raises AdapterRejected, AdapterBusy, VersionDiffers or AdapterAliased."""
        refuse_alias(self._context, self._name)
        _refuse_uploading(self._context, self._name)
        version, aliases = _version(self._context, self._name), self._aliases.names_of(self._name)
        check_change(self._request, self._name, version)
        if digest is None:
            self._at_first = aliases
        if version is None:  # an alias of an adapter that is still arriving is none of a former one
            aliases = [alias for alias in aliases if alias in self._at_first]
        elif digest is None or digest == version:  # nothing may change
            return
        if aliases and not self._is_forced:
            raise _aliased(self._name, aliases, "they then stand for the new version")


def _aliased(name: str, aliases: list[str], forced: str) -> AdapterAliased:
    names = _some_of(aliases)
    who = f"The alias {names} stands" if len(aliases) == 1 else f"The aliases {names} stand"
    return AdapterAliased(
        f"{who} for {name!r}; nothing was changed. Point aliases at another adapter first, or send ?force=true: "
        f"{forced}.",
        param="force",
    )


def _some_of(aliases: Sequence[str]) -> str:
    """The first aliases of many, for a message."""
    return ", ".join(map(repr, aliases[:5])) + (" and others" if len(aliases) > 5 else "")


def _is_forced(request: web.Request) -> bool:
    """Whether aliases are of no concern. Raises InvalidRequest."""
    force = request.query.get("force", "false")
    if force not in ("true", "false"):
        raise InvalidRequest(f"force must be true or false, not {shown(force)}.", param="force")
    return force == "true"


def _version(context: Context, name: str) -> str | None:
    """The digest that a name stands for, here or in the cluster; None if it stands for no adapter that is complete."""
    found = context.engine.catalog.find_whole(name) or (context.cluster and context.cluster.adapter(name))
    return found.digest if found else None


async def patch_adapter(request: web.Request) -> web.Response:
    """Sets an adapter's labels, its cache, and its requests' values for fields that they leave out; null: none."""
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

    async def change() -> AdapterInfo:
        name = request.match_info["name"]
        async with context.engine.catalog.changing(name):
            adapter = _named(request)
            check_change(request, name, _version(context, name))
            if changes or given_defaults:
                await management.settings.change(name, changes, given_defaults)
            return adapter

    changed = await context.complete(change())
    if given := [*changes, *given_defaults]:
        log.info("adapter %s: %s changed", changed.name, ", ".join(given))
    return json_response(_full_card(context, changed))


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


async def delete_adapter(request: web.Request) -> web.Response:
    """Deletes an adapter; answers when its last request has ended."""
    context, management = _managed(request)
    name = request.match_info["name"]
    deletion = _Deletion(request, context, management, name)
    deleted = await context.complete(_delete(context, management, name, deletion))
    log.info("adapter %s deleted%s", name, f", and its aliases {_some_of(deleted.aliases)}" if deleted.aliases else "")
    return json_response(
        {
            "name": name,
            "object": "adapter",
            "deleted": True,
            "files_kept": deleted.keeps_files,
            "aliases_deleted": deleted.aliases,
        }
    )


async def _delete(context: Context, management: AdapterManagement, name: str, deletion: "_Deletion") -> DeletedAdapter:
    deleted = await management.delete(name, deletion)
    if context.cluster is not None:
        management.settings.remove_later(name, deletion.is_deleted)
    return deleted


class _Deletion(_Change):
    """As `Deletion`: checks the deletion of an adapter, and removes it where it is."""

    def check(self) -> None:
        """Raises NotFound, AdapterBusy, VersionDiffers or AdapterAliased."""
        _refuse_uploading(self._context, self._name)
        if self.is_deleted():
            raise _unknown(self._request)
        check_change(self._request, self._name, _version(self._context, self._name))
        if not self._is_forced and (aliases := self._aliases.names_of(self._name)):
            raise _aliased(self._name, aliases, "they are deleted too")

    def remove_elsewhere(self) -> str | None:
        """Removes an adapter that only others have. Returns its digest; None if the client may use none."""
        cluster = self._context.cluster
        found = None if cluster is None else cluster.adapter(self._name)
        if cluster is None or found is None or not self._request[CLIENT].may_use(self._name):
            return None
        cluster.remove(self._name)
        return found.digest

    def is_deleted(self) -> bool:
        """Whether the name stands for no adapter, here or in the cluster."""
        return find_named(self._context, self._name) is None


def _refuse_uploading(context: Context, name: str) -> None:
    """Raises AdapterBusy for an adapter that is being uploaded to another instance."""
    if context.cluster is not None and (instances := context.cluster.uploads(name)):
        raise AdapterBusy(
            f"the adapter {name!r} is being uploaded to the instance {min(instances)!r}; try again",
            retry_after_s=_RETRY_S,
        )


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


def _managed(request: web.Request) -> tuple[Context, AdapterManagement]:
    """The context and its parts that change adapters, for a client that may. Raises Forbidden."""
    context = updatable(request)
    if context.management is None:
        raise Forbidden("This server's adapters are not managed over HTTP.")
    return context, context.management


async def _pieces(request: web.Request, timings: HttpTimings) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises HTTPRequestTimeout after `body_s` without a byte, or when it has been behind the
    least rate, or the one that its size needs for the longest time, by `upload_grace_s`, or when that time has passed;
    or InvalidRequest."""
    clock, num_bytes = asyncio.get_running_loop().time, 0
    least_bytes_per_s = max(_LEAST_BYTES_PER_S, (request.content_length or 0) / _LONGEST_S)
    rate, began_s = LeastRate(timings.upload_grace_s, least_bytes_per_s), clock()
    deadline_s = rate.deadline_s(began_s)
    try:
        while True:
            ends_s = min(deadline_s, began_s + timings.upload_grace_s + _LONGEST_S)
            waited_s = min(timings.body_s, ends_s - clock())
            async with asyncio.timeout(waited_s):
                piece = await request.content.readany()
            if not piece:
                return
            num_bytes += len(piece)
            deadline_s = rate.deadline_s(clock(), len(piece), deadline_s)
            yield piece
    except TimeoutError:
        if waited_s == timings.body_s:
            raise web.HTTPRequestTimeout(text=f"No byte of the body arrived for {timings.body_s:g} s.") from None
        raise web.HTTPRequestTimeout(
            text=f"Only {num_bytes} bytes of the body arrived: at least {least_bytes_per_s:.0f} bytes/s are needed, "
            f"but for {timings.upload_grace_s:g} s at most, and all of them within {_LONGEST_S:g} s."
        ) from None
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


# --- vLLM's routes: they answer in plain text, but errors have OpenAI's shape ---


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


def _required(fields: Fields, field: TextField) -> str:
    value = field.read(fields)
    if not value:
        raise AdapterRejected(f"{field.name} is missing.", param=field.name)
    return value
