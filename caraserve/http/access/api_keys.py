"""The API keys: those of the command line, and those of a file that is read again when it changes.

The file is TOML, or JSON if its name ends in .json. An entry of `keys` has the SHA-256 of a key, never the key:

    [[keys]]
    name = "team-a"                 # in the log and in /v1/usage
    sha256 = "9f86d081884c7d65…"    # or a list of them, while a key is being replaced
    adapters = ["sql-*", "legal"]   # names and patterns; default: all
    base_model = false              # whether it may use the base model; default: true
    admin = false                   # whether it may load and unload adapters; default: false
    weight = 2.0                    # its share of the server while others wait; default: 1
    requests_per_minute = 600       # default: no limit, as for the next two
    tokens_per_minute = 100000
    concurrency = 8                 # requests under way
"""

import asyncio
import hashlib
import json
import logging
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from aiohttp import web

from caraserve.config import HttpConfig
from caraserve.errors import ConfigError
from caraserve.http.client import ALL_ADAPTERS, Client, RateLimits
from caraserve.util.watched_files import WatchedFiles

log = logging.getLogger("caraserve.http")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_FIELDS = {
    *("name", "sha256", "adapters", "base_model", "admin", "weight"),
    *("requests_per_minute", "tokens_per_minute", "concurrency"),
}


def key_name(key: str) -> str:
    """The name of the client with a key of the command line: the beginning of its digest, since logs show it."""
    return f"key-{key_digest(key).hex()[:8]}"


def key_digest(key: str) -> bytes:
    """SHA-256 of a key. How long the look-up of a digest takes says nothing about the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ApiKeys:
    """All keys of one server, each with its client."""

    def __init__(self, config: HttpConfig) -> None:
        """Raises ConfigError if the file cannot be read or is wrong."""
        self.are_needed = config.needs_keys
        self._path = config.api_key_file
        self._of_options = {
            key_digest(key): Client(key_name(key), is_admin=key in config.admin_key)
            for key in (*config.api_key, *config.admin_key)
        }
        self._files = WatchedFiles(*([] if self._path is None else [self._path]))
        self._clients = self._read()

    @property
    def num_keys(self) -> int:
        """The number of keys that are taken."""
        return len(self._clients)

    def client(self, key: str) -> Client | None:
        """The client with this key; None for an unknown key."""
        return self._clients.get(key_digest(key))

    @property
    def has_admin(self) -> bool:
        """Whether any key may load and unload adapters."""
        return any(client.is_admin for client in self._clients.values())

    def reread(self) -> None:
        """Lets `watch` read the file again now."""
        self._files.ask()

    async def watch(self) -> None:
        """Reads the file again within a second of each change, until cancelled. A wrong file changes nothing."""
        while True:
            await self._files.changed()
            try:
                self._clients = await asyncio.to_thread(self._read)
            except ConfigError as error:
                log.error("%s; the keys from before stay", error.message)
            else:
                log.info("%s was read again: %d keys", self._path, len(self._clients) - len(self._of_options))

    def _read(self) -> dict[bytes, Client]:
        if self._path is None:
            return self._of_options
        where = f"--api-key-file {str(self._path)!r}"
        found = read_keys(self._path, where)
        if twice := found.keys() & self._of_options.keys():
            raise ConfigError(
                f"{where}: the key of {found[min(twice)].name!r} is also given as --api-key or --admin-key"
            )
        return found | self._of_options


KEYS = web.AppKey("KEYS", ApiKeys)


def read_keys(path: Path, where: str) -> dict[bytes, Client]:
    """Reads a file of keys; returns clients by their keys' digests. `where` begins the text of ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
        document: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{where} is not {kind}: {error}") from None
    entries = document.get("keys") if isinstance(document, dict) and document.keys() == {"keys"} else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where} must have one list, `keys`, with at least one entry, and nothing else")
    clients: dict[bytes, Client] = {}
    names = set()
    for place, entry in enumerate(entries):
        client, digests = _Entry(entry, f"{where}: keys[{place}]").read()
        if client.name in names:
            raise ConfigError(f"{where}: two entries have the name {client.name!r}; one may have a list of sha256")
        names.add(client.name)
        for digest in digests:
            if (other := clients.get(digest)) is not None:
                raise ConfigError(f"{where}: {client.name!r} and {other.name!r} have the same sha256")
            clients[digest] = client
    return clients


class _Entry:
    """One entry of a key file. Its methods raise ConfigError."""

    def __init__(self, entry: Any, where: str) -> None:
        if not isinstance(entry, dict):
            raise ConfigError(f"{where} must be a table of fields")
        if unknown := entry.keys() - _FIELDS:
            raise ConfigError(f"{where} has the unknown field {min(unknown)!r}; known are {', '.join(sorted(_FIELDS))}")
        self._entry, self._where = entry, where

    def read(self) -> tuple[Client, list[bytes]]:
        """Returns the client and the digests of its keys."""
        concurrency = self._number("concurrency", None)
        if concurrency is not None and (concurrency != int(concurrency) or concurrency < 1):
            self._refuse("concurrency", "a whole number from 1")
        client = Client(
            name=self._name(),
            is_admin=self._switch("admin", False),
            adapters=tuple(self._texts("adapters", ALL_ADAPTERS)),
            base_model=self._switch("base_model", True),
            weight=self._number("weight", 1.0) or 1.0,
            limits=RateLimits(
                self._number("requests_per_minute", None),
                self._number("tokens_per_minute", None),
                None if concurrency is None else int(concurrency),
            ),
            owns_cache=True,
        )
        digests = self._texts("sha256", ())
        if not digests or not all(map(_SHA256.fullmatch, digests)):
            self._refuse("sha256", "the SHA-256 of the key, 64 hexadecimal digits, or a list of such")
        return client, [bytes.fromhex(digest) for digest in digests]

    def _name(self) -> str:
        name = self._entry.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            self._refuse("name", "letters, digits and . _ @ - (64 at most)")
        return str(name)

    def _texts(self, field: str, default: tuple[str, ...]) -> list[str]:
        value = self._entry.get(field, list(default))
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            self._refuse(field, "a text or a list of texts")
        return list(texts)

    def _switch(self, field: str, default: bool) -> bool:
        value = self._entry.get(field, default)
        if not isinstance(value, bool):
            self._refuse(field, "true or false")
        return bool(value)

    def _number(self, field: str, default: float | None) -> float | None:
        value = self._entry.get(field, default)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value < math.inf:
            self._refuse(field, "a number above 0")
        return float(value)

    def _refuse(self, field: str, right: str) -> None:
        shown = repr(self._entry[field])[:80] if field in self._entry else "missing"
        raise ConfigError(f"{self._where}: {field} must be {right}, and is {shown}")
