"""Whose a request is."""

from typing import NamedTuple


class Tenant(NamedTuple):
    """The owner of a request. Fairness divides service between clients, and a client's share between its users."""

    client: str = ""  # the name of its key, or its address
    user: str = ""  # as the client states it
    weight: float = 1.0  # of the client: with 2 it gets twice the service of one with 1
    owns_cache: bool = False  # whether the KV of this client's prompts is reused for its own requests only


NO_TENANT = Tenant()
