"""Which model a body asks for: `model`, or one of the fields by which clients of other servers name an adapter. Pure.

Called by the parsers of all routes that take a model. Every field that is present counts: a request in which two of
them name different adapters is refused, since there is no telling which one is meant.
"""

from collections.abc import Iterator
from typing import Any

from caraserve.errors import InvalidRequest, NotFound
from caraserve.http.interfaces import Find
from caraserve.http.validation import Fields, shown

_LONGEST_NAME = 1024


def choose_adapter(fields: Fields, base_name: str, find: Find) -> tuple[str, str | None]:
    """The name that the response repeats, and the adapter, None for the base. `model` naming the base, or absent,
    leaves the choice to the other fields.

    Raises NotFound or InvalidRequest naming the field.
    """
    shown_name = fields.maybe_text("model", _LONGEST_NAME) or base_name
    adapter = find(shown_name)
    chosen_by = "model" if adapter is not None else None
    for field, name in _named(fields):
        other = _found(field, name, find)
        if chosen_by is None:
            shown_name, adapter, chosen_by = name, other, field
        elif other != adapter:
            raise InvalidRequest(
                f"{chosen_by} and {field} name different adapters, {shown(shown_name)} and {shown(name)}; send one.",
                param=field,
            )
    return shown_name, adapter


def _found(field: str, name: str, find: Find) -> str | None:
    try:
        return find(name)
    except NotFound:
        raise NotFound(
            f"{field} must name an adapter that is loaded, and {shown(name)} is none; GET /v1/models lists them.",
            param=field,
        ) from None


def _named(fields: Fields) -> Iterator[tuple[str, str]]:
    """Fields beside `model` that name an adapter, each with the name: SGLang's, LoRAX' and TGI's, llama.cpp's."""
    for field in ("lora_path", "adapter_id"):
        if isinstance(fields.raw(field), list):
            raise InvalidRequest(
                f"{field} must be one adapter's name, not a list; send one request for each adapter.", param=field
            )
        if name := fields.maybe_text(field, _LONGEST_NAME):
            yield field, name
    entries = fields.array("lora", most=1 << 10)
    if len(entries) > 1:
        raise InvalidRequest(
            f"lora has {len(entries)} adapters; a request is answered by one adapter at scale 1.", param="lora"
        )
    for entry in entries:
        yield "lora", _entry_name(entry)


def _entry_name(entry: Any) -> str:
    """The adapter of one entry of llama.cpp's `lora`, `{"id": NAME, "scale": 1}`."""
    if not isinstance(entry, dict):
        raise InvalidRequest(
            f'lora must be [{{"id": NAME, "scale": 1}}], and its entry is {shown(entry)}.', param="lora"
        )
    if unknown := entry.keys() - {"id", "scale"}:
        raise InvalidRequest(f"lora[0] has an unknown field {shown(min(unknown))}; send id and scale.", param="lora")
    name, scale = entry.get("id"), entry.get("scale", 1)
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME:
        # Numbers would be places in a list, and a list changes as adapters come and go.
        raise InvalidRequest(
            f"lora[0].id must be an adapter's name, not {shown(name)}; GET /v1/models lists them.", param="lora"
        )
    if type(scale) not in (int, float) or scale != 1:
        raise InvalidRequest(f"lora[0].scale must be 1, not {shown(scale)}; no other is served.", param="lora")
    return name
