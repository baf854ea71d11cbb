"""The sender of a request: its name, the adapters that it may use, and its share of the server."""

import fnmatch
import functools
import re
from dataclasses import dataclass

from aiohttp import web

from caraserve.core.combined_names import is_combined, members_of
from caraserve.core.tenant import Tenant
from caraserve.util.tasks import TURN_OWNER

ALL_ADAPTERS = ("*",)


@dataclass(frozen=True, slots=True)
class RateLimits:
    """What a client may ask of one instance; None: no limit."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None  # of prompts and answers
    concurrency: int | None = None  # requests under way


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request. Without a key file, every client may use every adapter."""

    name: str  # of its key, or its address where it has no key
    is_admin: bool = False  # whether it may load and unload adapters, and see what concerns all clients
    adapters: tuple[str, ...] = ALL_ADAPTERS  # names, and patterns with * ? [], of those that it may use
    base_model: bool = True  # whether it may use the base model
    weight: float = 1.0  # its share of the server while others wait, relative to theirs
    limits: RateLimits = RateLimits()
    owns_cache: bool = False  # whether it shares no cached prompts with other clients

    def may_use(self, adapter: str | None) -> bool:
        """Whether it may use an adapter, or each one of a combination; None: the base model."""
        if adapter is None:
            return self.base_model
        names = [name for name, _ in members_of(adapter)] if is_combined(adapter) else [adapter]
        return bool(names) and all(map(name_pattern(self.adapters).fullmatch, names))

    @property
    def may_use_all(self) -> bool:
        """Whether no adapter's name has to be kept from it."""
        return self.is_admin or "*" in self.adapters

    def tenant(self, user: str) -> Tenant:
        """The owner of a request that this client sends for `user`."""
        return Tenant(self.name, user, self.weight, self.owns_cache)


CLIENT = web.RequestKey("CLIENT", Client)


def note_client(request: web.Request, client: Client) -> None:
    """Notes who has sent a request. Long loops over what it sends then go on in that client's turns."""
    request[CLIENT] = client
    TURN_OWNER.set(client.name)


@functools.lru_cache(maxsize=1024)
def name_pattern(adapters: tuple[str, ...]) -> re.Pattern[str]:
    """The names that one of these names and patterns matches, case included."""
    return re.compile("|".join(map(fnmatch.translate, adapters)) or r"(?!)")
