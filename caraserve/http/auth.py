"""Who may ask: the API key, and for a keyless server on this machine the pages that may not. Called by `app.py`.

Without a key, a server on the loopback interface trusts everybody on the machine, but not the web pages that their
browsers show. Such a page can reach us by DNS rebinding (its own name resolves to 127.0.0.1: wrong Host) or by
a plain cross-site request (wrong Origin).
"""

import hmac
import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from caraserve.cluster.hop import PREFIX as PEER_PREFIX
from caraserve.config import HttpConfig
from caraserve.errors import Forbidden, Unauthorized

# Probes, the scraper, the page's own text, and other instances, who prove themselves otherwise; all the rest needs the
# key.
_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/version", "/metrics"})


def check_access(request: web.Request, config: HttpConfig) -> None:
    """Raises Unauthorized or Forbidden."""
    if config.api_key:
        if request.path not in _OPEN_PATHS and not request.path.startswith(f"{PEER_PREFIX}/"):
            _check_key(request.headers.get("Authorization", ""), config.api_key)
    elif _is_local(config.host):
        _check_local_origin(request)


def _check_key(header: str, key: str) -> None:
    scheme, _, given = header.partition(" ")
    # Bytes, since compare_digest takes no other than ASCII text.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), key.encode())
    if scheme.lower() != "bearer" or not same:
        raise Unauthorized("The API key is missing or wrong; send the header Authorization: Bearer KEY.")


def _check_local_origin(request: web.Request) -> None:
    host = _host_name(f"//{request.headers.get('Host', 'localhost')}")
    if not _is_address(host) and not _is_local(host):
        raise Forbidden(f"Host {host[:100]!r} is not this machine's name; use localhost, or start with --api-key.")
    origin = request.headers.get("Origin")
    if origin is not None and not _is_local(_host_name(origin)):
        raise Forbidden(f"Pages of {origin[:100]!r} may not use this server; start with --api-key to allow clients.")


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_address(host: str) -> bool:
    """An IP address cannot be rebound: only names resolve."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(host: str) -> bool:
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")
