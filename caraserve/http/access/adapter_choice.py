"""Which adapter a request names: in `model`, or in a field by which clients of other servers name an adapter. Several
with weights, as in `sql*0.7+legal*0.3`, are a combination, which acts as one adapter.

Every field that is present counts. A request in which two fields name different adapters is refused. Which version of
the adapter may answer is checked by the header If-Match.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from caraserve.cluster.state.replicated_map import RegisteredAdapter
from caraserve.core.combined_names import (
    MAX_MEMBERS,
    Weighted,
    combined_name,
    is_combined,
    members_of,
    read_combination,
    summed,
)
from caraserve.errors import AdapterBusy, AdapterRejected, InvalidRequest, NotFound, VersionDiffers
from caraserve.http.body import fields as body_fields
from caraserve.http.body.field_types import Fields, shown
from caraserve.http.client import CLIENT, Client
from caraserve.http.context import CONTEXT, Context
from caraserve.lora.combinations import combination_of
from caraserve.lora.registry import AdapterInfo
from caraserve.lora.settings import NO_DEFAULTS, AdapterSettings, RequestDefaults

SERVED_BY_HEADER = "x-caraserve-adapter"
_REQUIRED_HEADER, _REFUSED_HEADER = "If-Match", "If-None-Match"
_TAGS = re.compile(r'\s*"[0-9a-f]{64}"\s*(,\s*"[0-9a-f]{64}"\s*){0,15}')


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    """A request's adapter, and what the request takes where it leaves a field out. `name`: None for the base model.
    `num_classes`: of its score head, 0 without one; None if that is not known here."""

    name: str | None
    defaults: RequestDefaults = NO_DEFAULTS
    num_classes: int | None = 0

    def refuse_generation(self) -> None:
        """Raises InvalidRequest for an adapter that classifies texts."""
        if self.num_classes:
            raise InvalidRequest(
                f"{self.name} classifies texts and generates none; send them as input to /v1/classify.", param="model"
            )

    def refuse_classification(self) -> None:
        """Raises InvalidRequest for an adapter without a score head, and for the base model."""
        if self.num_classes == 0:
            raise InvalidRequest(
                f"{self.name or 'The base model'} has no score head, so it cannot classify; name an adapter that has "
                "one: GET /v1/adapters shows their num_classes.",
                param="model",
            )


BASE_MODEL = ChosenAdapter(None)
_MAX_SCALE = 1e9  # of an adapter in a list; larger products are refused when the adapter is read
AdapterFinder = Callable[[str], ChosenAdapter]
"""The adapter that a model name stands for. Raises NotFound with param `model`."""


def find_adapter(request: web.Request, model: str) -> AdapterInfo | None:
    """The adapter, here or in the cluster, that `model` names as `adapter`, by an alias or, as for SGLang, as
    `base:adapter`; None for the base model. Raises NotFound with param `model`, also for an adapter that the client may
    not use: it does not learn that there is one."""
    context, client = request.app[CONTEXT], request[CLIENT]
    if model in context.engine.base_names:
        return None
    bases = [base for base in context.engine.base_names if model.startswith(f"{base}:")]
    own = model.removeprefix(f"{max(bases, key=len)}:") if bases else model  # a base model's name may have any marks
    if is_combined(own):
        return _find_combination(request, own)
    for name in (model, *(model.removeprefix(f"{base}:") for base in bases)):
        adapter = target_of(context, name)
        is_allowed = client.may_use(name) or client.may_use(adapter)
        if is_allowed and (found := find_named(context, adapter)) is not None:
            return found
        if is_allowed and adapter != name:
            reason = refusal(request, adapter)
            raise NotFound(
                f"{name!r} stands for the adapter {adapter!r}, which is not loaded.", param="model", reason=reason
            )
    raise unknown_model(model, refusal(request, name))


def _find_combination(request: web.Request, model: str) -> AdapterInfo | None:
    """The combination that `model` names; None if all of its weights are 0. Each of its adapters is found as if the
    request named it alone. Raises also InvalidRequest, and what `combination_of` does."""
    try:
        named = read_combination(model)
    except ValueError as error:
        raise InvalidRequest(
            f"The model {model[:200]!r} is no combination of adapters: {error}.", param="model"
        ) from None
    found: dict[str, AdapterInfo] = {}
    members = []
    for name, weight in named:
        if (info := find_adapter(request, name)) is None:
            raise InvalidRequest(f"{name!r} is the base model, which a combination cannot name.", param="model")
        found[info.name] = info
        members.append((info.name, weight))
    weighted = summed(members)
    if not weighted:
        return None
    if not request[CLIENT].may_use(None) and any(weight != 1.0 for _, weight in weighted):
        raise InvalidRequest(  # with the weight 1e-9 the base model would answer
            "This key may not use the base model, so its combinations have adapters with the weight 1 only.",
            param="model",
        )
    if combined_name(weighted) in found:
        return found[combined_name(weighted)]
    combination = combination_of([(found[name], weight) for name, weight in weighted])
    request.app[CONTEXT].engine.catalog.refuse_combination(combination)
    return combination


def find_forwarded(context: Context, name: str) -> AdapterInfo | None:
    """The adapter or the combination that another instance means by a name; None if it, or one of its adapters, is not
    known here. Raises what `combination_of` does."""
    if not is_combined(name):
        return find_named(context, name)
    found = [(find_named(context, member), weight) for member, weight in members_of(name)]
    members = [(info, weight) for info, weight in found if info is not None]
    return combination_of(members) if members and len(members) == len(found) else None


def target_of(context: Context, name: str) -> str:
    """The name of the adapter that an alias stands for; any other name as it is."""
    if context.management is None:
        return name
    return context.management.aliases.target(name, lambda other: find_named(context, other) is not None)


def refuse_alias(context: Context, name: str) -> None:
    """Raises AdapterRejected for the name of an alias, which can name no adapter."""
    if target_of(context, name) != name:
        raise AdapterRejected(f"{name!r} is an alias; use another name, or delete the alias.", param="name")


def find_named(context: Context, name: str) -> AdapterInfo | None:
    """The adapter of that name, here, in the cluster or being uploaded; None if there is none, also for an alias or a
    combination."""
    if is_combined(name):  # to whose adapters the client may have no access
        return None
    try:
        return context.engine.adapter(name)
    except NotFound:
        if context.cluster is None:
            return None
        remote = context.cluster.adapter(name) or next(iter(context.cluster.uploads(name).values()), None)
        return None if remote is None else remote_adapter(context, remote)


def unknown_model(name: str, reason: str = "") -> NotFound:
    """The error for a model that does not exist, or that the client may not use. `reason`: as of `refusal`."""
    listed = "GET /v1/models lists those that do."
    return NotFound(f"The model {name[:200]!r} does not exist; {listed}", param="model", reason=reason)


def refusal(request: web.Request, name: str) -> str:
    """A sentence with the reason why a folder of that name, or of its first part, as in `run1/checkpoint-500`, is not
    served; empty if there is none, or if the client may not use the folder's name."""
    management, folder = request.app[CONTEXT].management, name.partition("/")[0]
    if management is None or (found := management.refused.get(folder)) is None or not request[CLIENT].may_use(folder):
        return ""
    which = "Its folder" if folder == name else f"The folder {folder!r}"
    return f" {which} in --adapters-dir is not served: {found.reason}."


def adapter_finder(request: web.Request) -> AdapterFinder:
    """A function that gives the adapter that a model name stands for, among those that the client of `request` may
    use; see `find_adapter`."""

    def find(model: str) -> ChosenAdapter:
        if (adapter := find_adapter(request, model)) is None:
            return BASE_MODEL
        return chosen_adapter(request.app[CONTEXT], adapter.name, adapter)

    return find


def chosen_adapter(context: Context, name: str, adapter: AdapterInfo | None) -> ChosenAdapter:
    """The adapter of a name; None: it is not known here yet."""
    is_known = adapter is not None and adapter.digest != ""  # else it is uploaded to another instance
    num_classes = adapter.facts.num_classes if adapter is not None and is_known else None
    return ChosenAdapter(name, settings_of(context, name).request_defaults, num_classes)


def settings_of(context: Context, name: str) -> AdapterSettings:
    """What an admin has set for an adapter."""
    return AdapterSettings() if context.management is None else context.management.settings.get(name)


def remote_adapter(context: Context, adapter: RegisteredAdapter) -> AdapterInfo:
    """An entry of the cluster's registry as the API lists it; its path is the digest: it has no folder here."""
    digest, created_s = adapter.digest, context.started_s
    return AdapterInfo(
        adapter.name, digest, digest, adapter.rank, (), adapter.num_bytes, created_s, facts=adapter.facts
    )


def choose_adapter(fields: Fields, base_name: str, find: AdapterFinder, client: Client) -> tuple[str, ChosenAdapter]:
    """Returns the name that the response repeats, and the adapter. If `model` is absent or names the base model, the
    other fields choose.

    Raises NotFound or InvalidRequest naming the field, and NotFound if only the base model is left and `client` may not
    use it.
    """
    shown_name = body_fields.MODEL.read(fields) or base_name
    adapter = find(shown_name)
    chosen_by = None if adapter == BASE_MODEL else "model"
    for field, name in _named(fields):
        other = _found(field, name, find)
        if chosen_by is None:
            shown_name, adapter, chosen_by = name, other, field
        elif other != adapter:
            raise InvalidRequest(
                f"{chosen_by} and {field} name different adapters, {shown(shown_name)} and {shown(name)}; send one.",
                param=field,
            )
    if adapter == BASE_MODEL and not client.may_use(None):
        raise unknown_model(shown_name)
    return shown_name, adapter


def _found(field: str, name: str, find: AdapterFinder) -> ChosenAdapter:
    try:
        return find(name)
    except NotFound as error:
        raise NotFound(
            f"{field} must name an adapter that is loaded, and {shown(name)} is none; GET /v1/models lists them.",
            param=field,
            reason=error.reason,
        ) from None
    except (InvalidRequest, AdapterRejected, AdapterBusy) as error:  # of a combination
        error.param = field
        raise


def _named(fields: Fields) -> Iterator[tuple[str, str]]:
    """The other fields that name an adapter, each with the name: SGLang's, LoRAX' and TGI's, llama.cpp's."""
    for field in (body_fields.LORA_PATH, body_fields.ADAPTER_ID):
        if isinstance(fields.raw(field.name), list):
            raise InvalidRequest(
                f"{field.name} must be one adapter's name, not a list; send one request for each adapter.",
                param=field.name,
            )
        if name := field.read(fields):
            yield field.name, name
    entries = fields.array("lora", most=1 << 10)
    if len(entries) > MAX_MEMBERS:
        raise InvalidRequest(f"lora has {len(entries)} adapters, and {MAX_MEMBERS} are the most.", param="lora")
    if entries:
        named = [_weighted(entry, f"lora[{place}]") for place, entry in enumerate(entries)]
        yield "lora", combined_name(named)


def _weighted(entry: Any, where: str) -> Weighted:
    """The adapter and the weight of one entry of llama.cpp's `lora`, `{"id": NAME, "scale": 0.5}`."""
    if not isinstance(entry, dict):
        raise InvalidRequest(
            f'lora must be [{{"id": NAME, "scale": NUMBER}}], and an entry is {shown(entry)}.', param="lora"
        )
    if unknown := entry.keys() - {"id", "scale"}:
        raise InvalidRequest(f"{where} has an unknown field {shown(min(unknown))}; send id and scale.", param="lora")
    name, scale = entry.get("id"), entry.get("scale", 1)
    if not isinstance(name, str) or not 1 <= len(name) <= body_fields.MODEL.longest or is_combined(name):
        # A number would be an index into a list that changes as adapters are loaded and unloaded.
        raise InvalidRequest(
            f"{where}.id must be an adapter's name, not {shown(name)}; GET /v1/models lists them.", param="lora"
        )
    if type(scale) not in (int, float) or not abs(scale) <= _MAX_SCALE:
        raise InvalidRequest(
            f"{where}.scale must be a number of at most {_MAX_SCALE:g} either way, not {shown(scale)}.", param="lora"
        )
    return name, float(scale)


# --- versions ---


def entity_tag(digest: str) -> str:
    """An adapter's digest as the value of the header ETag."""
    return f'"{digest}"'


def check_version(request: web.Request, served_by: str) -> None:
    """Raises VersionDiffers if If-Match names other versions than the one that answers, or InvalidRequest if it is
    malformed. `served_by`: `adapter@digest`, or the base model's name."""
    required = _tags(request, _REQUIRED_HEADER)
    if required in ("", "*"):
        return
    name, _, digest = served_by.partition("@")
    if not digest or entity_tag(digest) not in required:
        what = f"the version {digest}" if digest else "the base model, which has no version"
        raise VersionDiffers(f"{name} is {what}, not the one that {_REQUIRED_HEADER} requires.", param=_REQUIRED_HEADER)


def check_change(request: web.Request, name: str, digest: str | None) -> None:
    """Raises VersionDiffers unless a request may change what a name stands for, by its If-Match and If-None-Match.
    `digest`: of the version that the name stands for now, None for none. Raises InvalidRequest for malformed ones."""
    is_now = "no adapter" if digest is None else f"the version {digest}"
    required, refused = _tags(request, _REQUIRED_HEADER), _tags(request, _REFUSED_HEADER)
    if required and (digest is None or (required != "*" and entity_tag(digest) not in required)):
        raise VersionDiffers(
            f"{name} is {is_now}, which {_REQUIRED_HEADER} excludes; nothing was changed.", param=_REQUIRED_HEADER
        )
    if refused and digest is not None and (refused == "*" or entity_tag(digest) in refused):
        raise VersionDiffers(
            f"{name} is {is_now}, which {_REFUSED_HEADER} excludes; nothing was changed.", param=_REFUSED_HEADER
        )


def _tags(request: web.Request, header: str) -> str:
    """The digests in a header, each in double quotes; `*` for any, empty without the header. Raises InvalidRequest."""
    if not (lines := request.headers.getall(header, [])):
        return ""
    tags = ", ".join(lines)
    if tags.strip() != "*" and not _TAGS.fullmatch(tags):
        raise InvalidRequest(
            f"{header} must be an adapter's digest in double quotes, 64 lower-case hexadecimal digits, or up to 16 of "
            f"them with commas between them, or * for any, not {shown(tags)}; GET /v1/adapters/NAME gives an adapter's "
            "as ETag.",
            param=header,
        )
    return tags.strip()
