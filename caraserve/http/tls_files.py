"""TLS contexts whose certificate, key and CA are read again when their files change."""

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caraserve.errors import ConfigError
from caraserve.util.watched_files import WatchedFiles

log = logging.getLogger("caraserve")

_QUIET_S = 5.0  # without a change before wrong files are reported: a key and its certificate are replaced one by one


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
        wrong, or do not belong together, change nothing, and are reported if no change of the next seconds mends
        them."""
        while True:
            await self._files.changed()
            while (problem := await self._take()) and await self._change_soon():
                pass
            if problem:
                log.error("%s; new connections still use the certificate from before", problem)

    async def _take(self) -> str:
        """Uses the files as they are now; returns why they cannot be used, "" if they can."""
        try:
            newest = await asyncio.to_thread(self._read)
        except ConfigError as error:
            return error.message
        for context, one in zip(self.contexts, newest, strict=True):
            context.newest = one
        log.info("%s: read again, for new connections", ", ".join(map(str, self._paths)))
        return ""

    async def _change_soon(self) -> bool:
        """Waits for the next change; returns whether it came soon."""
        try:
            async with asyncio.timeout(_QUIET_S):
                await self._files.changed()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PemFile:
    """A file of an option."""

    option: str
    path: Path

    def __str__(self) -> str:
        return f"{self.option} {str(self.path)!r}"


def load_files(context: ssl.SSLContext, cert: PemFile, key: PemFile | None, ca: PemFile | None) -> None:
    """Loads a certificate, its key (None: in the same file) and a CA. Raises ConfigError that names the wrong file."""
    for file in (cert, key, ca):
        if file is not None and (why := _why_unreadable(file.path)):
            raise ConfigError(f"{file} cannot be read: {why}")
    try:
        # The empty password makes a key with a passphrase an error; otherwise OpenSSL would prompt and block the start.
        context.load_cert_chain(cert.path, None if key is None else key.path, password="")
    except (OSError, ssl.SSLError) as error:
        files = str(cert) if key is None else f"{cert} and {key}"
        is_mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        raise ConfigError(f"{files}: {'this is not the key of the certificate' if is_mismatch else error}") from None
    if ca is not None:
        try:
            context.load_verify_locations(ca.path)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"{ca}: {error}") from None


def _why_unreadable(path: Path) -> str:
    try:
        path.open("rb").close()
    except OSError as error:
        return str(error.strerror)
    return ""


def first_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Returns the context for listening; None for plain HTTP."""
    return None if files is None else files.contexts[0]
