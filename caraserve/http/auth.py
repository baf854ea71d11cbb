"""Who sends a request: by API key, or for a server without keys by address.

Without a key, a server on the loopback interface trusts everybody on the machine, but not the web pages that their
browsers show. Such a page can reach us by DNS rebinding (its own name resolves to 127.0.0.1: wrong Host) or by
a plain cross-site request (wrong Origin).
"""

import functools
import hashlib
import hmac
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from caraserve.cluster.routing.forward_auth import PREFIX as PEER_PREFIX
from caraserve.config import HttpConfig
from caraserve.errors import Forbidden, Unauthorized
from caraserve.http.context import Client

PROBES = frozenset({"/health", "/ready", "/ping"})  # need no key, whatever else does
# A browser cannot send a bearer token with the address of a page, but asks for a password. It then sends that by
# itself, whichever site a request comes from, so no route that changes anything takes one.
_PAGE_PATHS = frozenset({"/", "/stats"})


def identify(request: web.Request, config: HttpConfig) -> Client | None:
    """Who sends a request; None where no key says it. Raises Unauthorized or Forbidden."""
    if not config.keys:
        if _is_local(config.host):
            _check_local_origin(request, config.allowed_origins)
        return Client(request.remote or "unknown", is_admin=True)
    # Other instances sign what they send with the cluster's secret, which their handlers check.
    if request.path in PROBES or request.path.startswith(f"{PEER_PREFIX}/"):
        return None
    digest = _digest(_given_key(request))
    matching = [key for key in config.keys if hmac.compare_digest(digest, _digest_of_ours(key))]
    if not matching:
        raise Unauthorized("The API key is missing or wrong; send the header Authorization: Bearer KEY.")
    return Client(key_name(matching[0]), is_admin=matching[0] in config.admin_key)


def challenge(request: web.Request) -> str:
    """What the header WWW-Authenticate asks of a client without a key: browsers understand Basic alone."""
    return f'{"Basic" if _is_page(request) else "Bearer"} realm="caraserve"'


def _is_page(request: web.Request) -> bool:
    return request.path in _PAGE_PATHS and request.method in ("GET", "HEAD")


def _given_key(request: web.Request) -> str:
    """The key in a request's headers, empty without one."""
    header = request.headers.get("Authorization", "")
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic" and _is_page(request):
        try:
            password: str = aiohttp.BasicAuth.decode(header, encoding="utf-8").password
            return password
        except ValueError:
            return ""
    return request.headers.get("X-Api-Key", "")


def key_name(key: str) -> str:
    """How a client with this key is called; it does not say the key."""
    return f"key-{_digest_of_ours(key).hex()[:8]}"


def _digest(key: str) -> bytes:
    """What keys are compared by: all are of one length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


_digest_of_ours = functools.cache(_digest)


def _check_local_origin(request: web.Request, allowed_origins: Collection[str]) -> None:
    host = _host_name(f"//{request.headers.get('Host', 'localhost')}")
    if not _is_address(host) and not _is_local(host):
        raise Forbidden(f"Host {host[:100]!r} is not this machine's name; use localhost, or start with --api-key.")
    origin = request.headers.get("Origin")
    if origin is None or "*" in allowed_origins or origin.lower() in allowed_origins:
        return
    if not _is_local(_host_name(origin)):
        raise Forbidden(f"Pages of {origin[:100]!r} may not use this server; start with --allowed-origins for them.")


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
