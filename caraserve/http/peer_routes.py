"""What other instances ask over HTTP, on the serving port or on one of its own.

Peers know each other by their secrets, inside the connection, and need no API key.
"""

import ssl
from collections.abc import Sequence

from aiohttp import web

from caraserve.cluster.membership.node import Node
from caraserve.cluster.membership.websocket import WEBSOCKET_PATH
from caraserve.cluster.routing.forward_auth import PREFIX
from caraserve.http import chat, completions
from caraserve.http.app import bare_app, listen
from caraserve.http.context import CONTEXT


def add_peer_routes(app: web.Application, node: Node, more: Sequence[web.RouteDef] = ()) -> None:
    """All routes for other instances. Whatever is added for them belongs here, so that it is on the right port."""
    app.add_routes(
        [
            web.get(WEBSOCKET_PATH, node.accept),
            web.post(f"{PREFIX}/v1/completions", completions.forwarded_completions),
            web.post(f"{PREFIX}/v1/chat/completions", chat.forwarded_chat_completions),
            *more,
        ]
    )


async def start_peer_http(
    node: Node,
    served: web.Application,
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    more: Sequence[web.RouteDef] = (),
) -> tuple[web.AppRunner, int]:
    """Listens for other instances alone, with the engine of the application `served`; the runner and the port.

    Raises ConfigError.
    """
    app = bare_app(served[CONTEXT])
    add_peer_routes(app, node, more)
    return await listen(app, served[CONTEXT].config, host, port, tls)
