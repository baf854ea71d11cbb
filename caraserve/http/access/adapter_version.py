"""Names the version of the adapter that answers, in a header, and checks the one that a client requires (If-Match)."""

import re

from aiohttp import web

from caraserve.errors import InvalidRequest, VersionDiffers
from caraserve.http.validation import shown

SERVED_BY_HEADER = "x-caraserve-adapter"
_REQUIRED_HEADER, _REFUSED_HEADER = "If-Match", "If-None-Match"
_TAGS = re.compile(r'\s*"[0-9a-f]{64}"\s*(,\s*"[0-9a-f]{64}"\s*){0,15}')


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
