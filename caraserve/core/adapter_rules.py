"""Names, digests, pins and settings of adapters: what is valid, on every instance."""

import re
from typing import Any, TypeGuard

from caraserve.errors import ConfigError
from caraserve.util.option_values import ADAPTER_NAME as ADAPTER_NAME

PINS = ("host", "device")  # the caches in which an adapter may be pinned; on the device includes in host memory
PINNED_SHARE = 2  # all pinned adapters together take at most half of a cache, so that others find room
# For so long removals of names and settings are remembered. With one day, a cluster that is off over a weekend would
# restore names that it removed on Friday; a removal costs 100 bytes. An instance that was off for longer restores only
# its own adapters' names (`cluster/state/persistence.py`).
TOMBSTONE_S = 30 * 86_400.0
MAX_SETTING = 120_000  # characters of an alias's or adapter's settings, packed: they fit into a frame between instances
# Kinds of settings, and the most characters of one as JSON: two names; labels, and a chat template of 64 KiB.
SETTING_KINDS = {"alias": 1 << 10, "adapter": 192 << 10}
MAX_CHAT_TEMPLATE_BYTES = 64 << 10  # of an adapter
MAX_LABELS, MAX_LABEL_CHARACTERS = 32, 256  # of an adapter, and of a label's value
LABEL_NAME = "^[A-Za-z0-9][A-Za-z0-9._/-]{0,62}$"
MAX_INVOCATION_TOKENS = 256  # of an activated LoRA; published ones have about ten
DIGEST = re.compile(r"[0-9a-f]{64}")  # an adapter's identity: sha256 of its contents


def check_adapter_name(name: str, base: str) -> None:
    """Raises ConfigError when `name` cannot name an adapter beside the base model `base`."""
    if not ADAPTER_NAME.fullmatch(name):
        raise ConfigError(f"adapter name {name[:80]!r}: use letters, digits and . _ : - (128 at most)")
    if name == base:
        raise ConfigError(f"adapter name {name!r} is the base model's own name")


def are_invocation_tokens(value: Any) -> TypeGuard[list[int]]:
    """Returns whether a value from outside is a list of token ids from which on an activated LoRA may be active."""
    return (
        isinstance(value, list)
        and 1 <= len(value) <= MAX_INVOCATION_TOKENS
        and all(type(token) is int and 0 <= token < 1 << 31 for token in value)
    )
