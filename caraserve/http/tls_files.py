"""TLS contexts whose certificate, key and CA are read again when their files change."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from caraserve.errors import ConfigError
from caraserve.util.watched_files import WatchedFiles

log = logging.getLogger("caraserve")


class _RenewedContext(ssl.SSLContext):
    """A context that wraps each new connection by its `newest` context, which is replaced as a whole: a context into
    which other files are loaded forgets no CA, and after a failure has a certificate without its key."""

    newest: ssl.SSLContext

    def wrap_bio(self, *streams: Any, **options: Any) -> ssl.SSLObject:
        return self.newest.wrap_bio(*streams, **options)


class TlsFiles:
    """Some TLS contexts, and the files from which they are made."""

    def __init__(self, read: Callable[[], Sequence[ssl.SSLContext]], paths: Sequence[Path]) -> None:
        """`read`: makes the contexts from the files. Raises its ConfigError."""
        self._read, self._paths = read, tuple(paths)
        self._files = WatchedFiles(*paths)
        self.contexts: list[_RenewedContext] = []  # for listening or connecting
        for newest in read():
            context = _RenewedContext(newest.protocol)
            context.newest = newest
            self.contexts.append(context)

    def reread(self) -> None:
        """Lets `watch` read the files again now."""
        self._files.ask()

    async def watch(self) -> None:
        """Reads the files again within a second of each change, for new connections, until cancelled. Files that are
        wrong, or do not belong together, change nothing."""
        while True:
            await self._files.changed()
            try:
                newest = await asyncio.to_thread(self._read)
            except ConfigError as error:
                log.error("%s; new connections still use the certificate from before", error.message)
                continue
            for context, one in zip(self.contexts, newest, strict=True):
                context.newest = one
            log.info("%s: read again, for new connections", ", ".join(map(str, self._paths)))


def first_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Returns the context for listening; None for plain HTTP."""
    return None if files is None else files.contexts[0]
