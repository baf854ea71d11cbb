"""Who may ask over HTTP what only instances may: requests signed with a shared secret. Pure.

A signature covers the method, the path with its query, and a time of day, and is good for half a minute. What it lets
in can be asked twice without harm: adapters' bytes and plans are only read, and each is checked against its digest.
"""

import hmac

from caraserve.cluster.membership.auth import Keyring

HEADER = "X-Cara-Signature"
_WINDOW_S = 30.0


def signature(keys: Keyring, method: str, path: str, wall_s: float) -> str:
    """The header's value for a request. `path`: as it is sent, the query included."""
    when = str(int(wall_s * 1000))
    return f"{when} {_mac(keys.request_keys()[0], method, path, when)}"


def is_signed(keys: Keyring, value: str, method: str, path: str, wall_s: float) -> bool:
    """Whether one who knows a secret asks, and does so now."""
    when, _, mac = value.partition(" ")
    if not (when.isascii() and when.isdigit() and len(when) < 20 and mac.isascii()):
        return False
    if abs(int(when) / 1000 - wall_s) > _WINDOW_S:
        return False
    return any(hmac.compare_digest(mac, _mac(key, method, path, when)) for key in keys.request_keys())


def _mac(key: bytes, method: str, path: str, when: str) -> str:
    return hmac.digest(key, f"{when}\n{method}\n{path}".encode("utf-8", "surrogateescape"), "sha256").hex()
