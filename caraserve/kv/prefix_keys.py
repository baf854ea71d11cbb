"""Keys by which full KV blocks are found and reused. No I/O.

A key is a chained digest over everything that the block's contents depend on: the adapter's content digest (not its
name: a replaced adapter's KV is not reused for its successor), the tenant if it shares its KV with no other, the
request's salt, and all tokens up to the block's end, with the digests of vectors that stand in place of tokens. With 16
bytes of BLAKE2b, equal keys mean equal tokens; they are not compared again."""

import hashlib
import struct
from collections.abc import Sequence

from caraserve.core.request import PromptEmbeds
from caraserve.core.tenant import NO_TENANT, Tenant


def root_key(adapter_digest: str | None, salt: str, tenant: Tenant = NO_TENANT) -> bytes:
    """Returns the key that precedes a request's first block."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (adapter_digest or "", tenant.client if tenant.owns_cache else "", salt):
        encoded = part.encode()
        digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


def next_key(previous: bytes, tokens: Sequence[int], embeds: PromptEmbeds | None = None) -> bytes:
    """Returns the key of the block that holds `tokens` and follows the block with the key `previous`. Negative tokens
    are vectors of `embeds`."""
    digests = b"" if embeds is None else embeds.digests_in(tokens)
    return hashlib.blake2b(previous + struct.pack(f"<{len(tokens)}i", *tokens) + digests, digest_size=16).digest()
