"""Reads what an adapter's requests take where they leave a field out, by the tables that check requests."""

from collections.abc import Mapping
from typing import Any

from caraserve.errors import InvalidRequest
from caraserve.http import body_fields
from caraserve.http.request_schema import ADAPTER_SAMPLING
from caraserve.http.validation import Fields, shown, stop_strings
from caraserve.lora.settings import RequestDefaults

_LIMIT = body_fields.CHAT_MAX_TOKENS.name


def read_defaults(values: Mapping[str, Any]) -> RequestDefaults:
    """Returns the defaults in what the registry has of an adapter. Raises as `parse_defaults`."""
    return parse_defaults(Fields(values))


def parse_defaults(fields: Fields) -> RequestDefaults:
    """Returns the defaults among the fields of a body. The chat template is not compiled. Raises InvalidRequest that
    names the field."""
    return RequestDefaults(_chat_template(fields), stop_strings(fields) or None, _sampling(fields) or None)


def field_defaults(defaults: RequestDefaults) -> dict[str, Any]:
    """Returns defaults as fields of a request, without the chat template and the limit of tokens."""
    values: dict[str, Any] = {name: value for name, value in (defaults.sampling or {}).items() if name != _LIMIT}
    return values if defaults.stop is None else values | {"stop": list(defaults.stop)}


def default_limit(defaults: RequestDefaults) -> int | None:
    """Returns how many tokens an answer may have without a limit of its own. Where the context has no room for as many,
    there are fewer, since no client has asked for them."""
    limit = (defaults.sampling or {}).get(_LIMIT)
    return None if limit is None else int(limit)


def _chat_template(fields: Fields) -> str | None:
    text = body_fields.CHAT_TEMPLATE.read(fields)
    if text is not None and (size := len(text.encode(errors="replace"))) > body_fields.MAX_CHAT_TEMPLATE_BYTES:
        most = body_fields.MAX_CHAT_TEMPLATE_BYTES
        raise InvalidRequest(f"chat_template has {size} bytes; {most} are allowed.", param="chat_template")
    return text


def _sampling(fields: Fields) -> dict[str, float]:
    given = {name: value for name, value in fields.mapping("sampling").items() if value is not None}
    if unknown := given.keys() - ADAPTER_SAMPLING.served:
        name = min(unknown)
        known = ", ".join(ADAPTER_SAMPLING.served)
        raise InvalidRequest(
            f"sampling has an unknown field {shown(name)}; it takes {known}.", param=f"sampling.{name[:64]}"
        )
    try:
        values = {one.name: one.read(Fields(given)) for one in body_fields.DEFAULT_SAMPLING if one.name in given}
    except InvalidRequest as error:
        raise InvalidRequest(f"sampling.{error.message}", param=f"sampling.{error.param}") from None
    return {name: value for name, value in values.items() if value is not None}
