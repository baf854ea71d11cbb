"""Names the version of the adapter that answers, in a header, and checks the one that a client requires (If-Match)."""

import re

from aiohttp import web

from caraserve.errors import InvalidRequest, VersionDiffers

SERVED_BY_HEADER = "x-caraserve-adapter"
_REQUIRED_HEADER = "If-Match"
_TAGS = re.compile(r'\s*"[0-9a-f]{64}"\s*(,\s*"[0-9a-f]{64}"\s*){0,15}')


def entity_tag(digest: str) -> str:
    """An adapter's digest as the value of the header ETag."""
    return f'"{digest}"'


def check_version(request: web.Request, served_by: str) -> None:
    """Raises VersionDiffers if If-Match names other versions than the one that answers, or InvalidRequest if it is
    malformed. `served_by`: `adapter@digest`, or the base model's name."""
    required = request.headers.get(_REQUIRED_HEADER)
    if required is None or required.strip() == "*":
        return
    if not _TAGS.fullmatch(required):
        raise InvalidRequest(
            f"{_REQUIRED_HEADER} must be 64 hexadecimal digits in double quotes, or several such with commas between "
            "them; GET /v1/adapters/NAME gives an adapter's as ETag.",
            param=_REQUIRED_HEADER,
        )
    name, _, digest = served_by.partition("@")
    if not digest or entity_tag(digest) not in required:
        what = f"the version {digest}" if digest else "the base model, which has no version"
        raise VersionDiffers(f"{name} is {what}, not the one that {_REQUIRED_HEADER} requires.", param=_REQUIRED_HEADER)
