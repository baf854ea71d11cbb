"""GET /v1/usage: what each client has used of each adapter, on this instance, since it started."""

import contextlib
from dataclasses import asdict

import orjson
from aiohttp import web

from caraserve.http.context import CLIENT, CONTEXT
from caraserve.util.tasks import in_turns, slices

_SLICE = 50  # rows looked at, encoded and written at once


async def usage(request: web.Request) -> web.StreamResponse:
    """All rows for an admin, a client's own for any other. There may be 100,000: they are written some at a time, with
    turns of the event loop in between."""
    context, client = request.app[CONTEXT], request[CLIENT]
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    with contextlib.suppress(ConnectionError):  # the client has left
        await response.prepare(request)
        await response.write(b'{"object":"list","since":%d,"data":[' % context.started_s)
        comma = b""
        async for some in in_turns(slices(context.metrics.usage.rows(), _SLICE)):
            shown = [
                orjson.dumps({"client": name, "adapter": adapter, **asdict(row)})
                for name, adapter, row in some
                if client.is_admin or name == client.name
            ]
            if shown:
                await response.write(comma + b",".join(shown))
                comma = b","
        await response.write_eof(b"]}")
    return response
