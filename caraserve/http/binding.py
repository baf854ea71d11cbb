"""Takes a port before the server listens on it, so that one in use is found before the weights are read."""

import errno
import os
import socket

from caraserve.errors import ConfigError


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, all on one port; 0 picks a free one. None listens yet, so clients are
    refused. Raises ConfigError."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # 0.0.0.0 beside :: is a socket of its own
            one.bind((address[0], port or sockets[0].getsockname()[1], *address[2:]))
    except OSError as error:
        for one in sockets:
            one.close()
        raise cannot_listen(error, host, port) from None
    return sockets


def cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    """What to tell of an address that cannot be listened on."""
    where = f"cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{where}: another process does; choose another --port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return ConfigError(f"{where}: ports below 1024 need privileges; choose another --port")
    reason = os.strerror(error.errno) if error.errno and not isinstance(error, socket.gaierror) else error.strerror
    return ConfigError(f"{where}: {reason or error}; check --host and --port")
