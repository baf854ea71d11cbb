"""Authentication of clients by API key, and the web pages that may use the server from a browser (CORS).

Without keys, a server on the loopback interface trusts every process on the machine, but not the web pages in its
browsers. Such a page can reach the server by DNS rebinding (its own name resolves to 127.0.0.1: wrong Host) or by a
plain cross-site request (wrong Origin). Origins of --allowed-origins are trusted, and so are the host names in them.
"""

import functools
import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from caraserve.cluster.routing.forward_auth import PREFIX as PEER_PREFIX
from caraserve.config import HttpConfig
from caraserve.errors import Forbidden, Unauthorized
from caraserve.http.access.api_keys import ApiKeys
from caraserve.http.client import Client

PROBES = frozenset({"/health", "/ready", "/ping"})  # never need a key
# A browser cannot send a bearer token for an address that is typed in, but can ask for a password. It then sends that
# with requests of all sites, so no route that changes anything accepts a password.
_PASSWORD_PATHS = frozenset({"/docs", "/openapi.json"})
_ALL_ADAPTERS_PATHS = frozenset({"/metrics", "/v1/cluster/adapters"})  # of pages with all adapters' names
_PORTS = {"http": 80, "https": 443}
_MAX_AGE_S = 600  # for which a browser may keep the response to a preflight
_EXPOSED = ", ".join(
    [
        *("x-request-id", "x-caraserve-phases", "x-caraserve-ignored", "x-caraserve-adapter"),
        *("x-caraserve-instance", "retry-after", "retry-after-ms"),
        *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
    ]
)


def authenticate(request: web.Request, config: HttpConfig, keys: ApiKeys, open_paths: Collection[str]) -> Client | None:
    """The client that sends a request; None for probes, for other instances and for `open_paths`, which need no key.
    Raises Unauthorized or Forbidden."""
    if not keys.are_needed:
        if _is_local(config.host):
            _check_local_origin(request, config.allowed_origins)
        return _client_without_key(request.remote or "unknown")
    # The handlers for other instances check a signature with the cluster's secret.
    if request.path in PROBES or request.path in open_paths or request.path.startswith(f"{PEER_PREFIX}/"):
        return None
    client = keys.client(_given_key(request))
    if client is None:
        raise Unauthorized("The API key is missing or wrong; send the header Authorization: Bearer KEY.")
    if request.path in _ALL_ADAPTERS_PATHS and not client.may_use_all:
        raise Forbidden(f"{request.path} shows all adapters, and this key may use some; use another key.")
    return client


@functools.lru_cache(maxsize=1024)
def _client_without_key(address: str) -> Client:
    return Client(address, is_admin=True)


def challenge(request: web.Request) -> str:
    """The header WWW-Authenticate for a client without a valid key. Browsers only understand Basic."""
    return f'{"Basic" if _takes_password(request) else "Bearer"} realm="caraserve"'


def _takes_password(request: web.Request) -> bool:
    return request.path in _PASSWORD_PATHS and request.method in ("GET", "HEAD")


def _given_key(request: web.Request) -> str:
    """The key in a request's headers, empty without one."""
    header = request.headers.get("Authorization", "")
    scheme, _, given = header.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() == "basic" and _takes_password(request):
        try:
            password: str = aiohttp.BasicAuth.decode(header, encoding="utf-8").password
            return password
        except ValueError:
            return ""
    return request.headers.get("X-Api-Key", "")


def _check_local_origin(request: web.Request, allowed_origins: Collection[str]) -> None:
    address = request.headers.get("Host", "localhost")
    if not _is_own_host(address) and not _is_allowed_host(address, allowed_origins):
        raise Forbidden(
            f"Host {_host_name(f'//{address}')[:100]!r} is not this machine's name; use localhost, or start the "
            f"server with --allowed-origins {request.scheme}://{address[:100]} or with --api-key."
        )
    origin = request.headers.get("Origin")
    if origin is None or "*" in allowed_origins or origin.lower() in allowed_origins:
        return
    if not _is_local(_host_name(origin)):
        raise Forbidden(f"Pages of {origin[:100]!r} may not use this server; start with --allowed-origins for them.")


@functools.lru_cache(maxsize=128)  # a header may have 16 KiB
def _is_own_host(address: str) -> bool:
    """Returns whether the header Host is an IP address or a name of this machine."""
    host = _host_name(f"//{address}")
    return _is_address(host) or _is_local(host)


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_allowed_host(address: str, allowed_origins: Collection[str]) -> bool:
    """Returns whether the header Host is the host and port of an allowed origin; no port is that of its scheme."""
    if "*" in allowed_origins:
        return True
    for origin in allowed_origins:
        scheme = origin.partition("://")[0]
        if _host_and_port(origin) == _host_and_port(f"{scheme}://{address}"):
            return True
    return False


def _host_and_port(url: str) -> tuple[str, int] | None:
    """Returns the host and the port of a URL; None if it is not valid."""
    try:
        parts = urlsplit(url)
        return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return None


def _is_address(host: str) -> bool:
    """An IP address cannot be rebound: only names resolve."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=128)
def _is_local(host: str) -> bool:
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def answer_preflight(request: web.Request, allowed: Collection[str]) -> web.Response | None:
    """The response to a browser's preflight, which has no key yet; None for other requests and other origins."""
    if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
        return None
    if _allowed_origin(request, allowed) is None:
        return None
    headers = {"Access-Control-Allow-Methods": "GET, POST", "Access-Control-Max-Age": str(_MAX_AGE_S)}
    if (wanted := request.headers.get("Access-Control-Request-Headers")) is not None:
        headers["Access-Control-Allow-Headers"] = wanted
    return web.Response(status=204, headers=headers)


def add_cors_headers(request: web.Request, response: web.StreamResponse, allowed: Collection[str]) -> None:
    """Adds the headers by which a browser lets a page of an allowed origin read the response."""
    if not allowed:
        return
    if "*" not in allowed:
        response.headers.add("Vary", "Origin")
    if (origin := _allowed_origin(request, allowed)) is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED


def _allowed_origin(request: web.Request, allowed: Collection[str]) -> str | None:
    """The origin that a response allows: every one, the one of the request, or None."""
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    if "*" in allowed:
        return "*"
    return origin if origin.lower() in allowed else None
