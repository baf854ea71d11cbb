"""The pool of KV blocks: which are in use, which can be reused by their keys, which may be overwritten. No I/O.

A block is in exactly one state:
    free      not in use, contents worthless
    owned     held by one or more requests (`_refs` > 0); published or not
    idle      held by no request, but published: it can be found by its key until it is needed for other contents
"""

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from caraserve.core.request import PromptEmbeds
from caraserve.core.tenant import NO_TENANT, Tenant


class BlockPool:
    """Allocates, shares and recycles the blocks [0, num_blocks). `resize` changes their number."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a heap: low numbers go first, so that the pool can shrink
        self._refs = [0] * num_blocks
        self._held_end = 0  # no block from here on is held; lowered to the exact value by `held_end`
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """The number of blocks that `take` could return."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """The number of blocks that requests hold."""
        return self.num_blocks - self.available

    @property
    def held_end(self) -> int:
        """The least size to which the pool can shrink: one more than the highest block that a request holds."""
        while self._held_end and not self._refs[self._held_end - 1]:
            self._held_end -= 1
        return self._held_end

    def resize(self, num_blocks: int) -> None:
        """Sets the number of blocks, and withdraws the publications of those that are removed. Raises AssertionError if
        a request holds one of them."""
        if num_blocks < self.held_end:
            raise AssertionError(f"a request holds block {self.held_end - 1} of {num_blocks}")
        for block in [block for block in self._idle if block >= num_blocks]:
            del self._idle[block]
            self._unpublish(block)
        self._free = [block for block in self._free if block < num_blocks]
        self._free += range(self.num_blocks, num_blocks)
        heapify(self._free)
        self._refs[num_blocks:] = [0] * (num_blocks - self.num_blocks)
        self.num_blocks = num_blocks

    def take(self, count: int) -> list[int] | None:
        """Returns `count` unpublished blocks, held once each. None: fewer are available, and none was taken."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = heappop(self._free) if self._free else self._evict()
            self._hold(block)
            taken.append(block)
        return taken

    def find(self, key: bytes) -> int | None:
        """Returns the block published under `key`, held once more than before, or None."""
        block = self._block_of.get(key)
        if block is None:
            return None
        self._idle.pop(block, None)
        self._hold(block)
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Lets later requests find `block` by `key`. Has no effect if a block is published under that key,
        or if `block` is published already."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Iterable[int]) -> None:
        """Takes one hold off each block. Of a request's blocks the last are overwritten first, because a block can be
        reused only together with all blocks before it."""
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    heappush(self._free, block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Withdraws the publications of blocks that a request holds, so that no later request reuses them."""
        for block in blocks:
            if block in self._key_of:
                self._unpublish(block)

    def forget_all(self) -> None:
        """Withdraws every publication, as the blocks' contents are unknown after a failed iteration."""
        self._free += self._idle
        heapify(self._free)
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

    def check(self, held: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless the requests' lists `held` account for every block."""
        refs = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from what requests hold"
        assert not any(refs[self.held_end :]), "a block that is held counts as one that may go"
        owned = sum(1 for count in refs if count)
        assert owned + len(self._free) + len(self._idle) == self.num_blocks, "a block is in no state or in two"
        assert not set(self._free) & set(self._idle), "a block is both free and idle"
        assert all(self._block_of[key] == block for block, key in self._key_of.items()), "the index is inconsistent"

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._unpublish(block)
        return block

    def _unpublish(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]

    def _hold(self, block: int) -> None:
        self._refs[block] += 1
        self._held_end = max(self._held_end, block + 1)


# --- keys ---

# A key is a chained digest over everything that the block's contents depend on: the adapter's content digest (not its
# name: a replaced adapter's KV is not reused for its successor), the tenant if it shares its KV with no other, the
# request's salt, and all tokens up to the block's end, with the digests of vectors that stand in place of tokens. Of an
# activated LoRA, the blocks before the first that it changes have the base model's keys. With 16 bytes of BLAKE2b,
# equal keys mean equal tokens; they are not compared again.


def root_key(adapter_digest: str | None, salt: str, tenant: Tenant = NO_TENANT) -> bytes:
    """Returns the key that precedes a request's first block."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (adapter_digest or "", tenant.client if tenant.owns_cache else "", salt):
        encoded = part.encode()
        digest.update(struct.pack("<q", len(encoded)) + encoded)
    return digest.digest()


def activated_key(previous: bytes, adapter_digest: str, first: int) -> bytes:
    """Returns the key that precedes the block of position `first`, from which an activated LoRA is active. `previous`:
    key of the base model's block before."""
    return hashlib.blake2b(previous + struct.pack("<q", first) + adapter_digest.encode(), digest_size=16).digest()


def next_key(previous: bytes, tokens: Sequence[int], embeds: PromptEmbeds | None = None) -> bytes:
    """Returns the key of the block that holds `tokens` and follows the block with the key `previous`. Negative tokens
    are vectors of `embeds`."""
    digests = b"" if embeds is None else embeds.digests_in(tokens)
    return hashlib.blake2b(previous + struct.pack(f"<{len(tokens)}i", *tokens) + digests, digest_size=16).digest()
