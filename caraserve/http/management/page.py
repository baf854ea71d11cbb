"""The web page at `/`: its files, which hold no data and need no key, and the rules by which a browser runs them."""

from importlib.resources import files

from aiohttp import web

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES = {
    entry.name: (entry.read_bytes(), _TYPES[entry.name.rpartition(".")[2]])
    for entry in files("caraserve.http.management").joinpath("page").iterdir()
}
# The paths that need no key. The page asks for one when a route that it reads needs it.
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in _FILES if name != "index.html")})
# Only files of this server run, and only text becomes part of the page: a browser refuses to parse strings as markup.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


async def page(request: web.Request) -> web.Response:
    """GET /"""
    return _response("index.html")


async def page_file(request: web.Request) -> web.Response:
    """GET /page/FILE"""
    if request.path not in PAGE_PATHS:
        raise web.HTTPNotFound
    return _response(request.match_info["file"])


def _response(name: str) -> web.Response:
    body, content_type = _FILES[name]
    return web.Response(body=body, content_type=content_type, charset="utf-8", headers=_HEADERS)
