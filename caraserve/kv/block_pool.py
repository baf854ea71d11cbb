"""KV blocks: who owns each, which can be found again by their contents, which may be overwritten. Pure.

A block is in exactly one state:
    free      nobody's, contents worthless
    owned     held by one or more requests (`refs` > 0); published or not
    idle      held by nobody, published: its contents can still be found by key, until room is needed
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush


class BlockPool:
    """Allocates, shares and recycles the blocks [0, num_blocks). There may be more of them later, or fewer."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))  # a heap: low numbers go first, so that the pool can shrink
        self._refs = [0] * num_blocks
        self._held_end = 0  # no block from here on is held; may be too high until it is asked for
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def available(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Blocks held by requests."""
        return self.num_blocks - self.available

    @property
    def held_end(self) -> int:
        """How small the pool may become: one more than the highest block that a request holds."""
        while self._held_end and not self._refs[self._held_end - 1]:
            self._held_end -= 1
        return self._held_end

    def resize(self, num_blocks: int) -> None:
        """There are so many blocks from now on. What was published in blocks that go is no longer found."""
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
        """`count` unpublished blocks, or None when there are not so many: all or nothing."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            block = heappop(self._free) if self._free else self._evict()
            self._hold(block)
            taken.append(block)
        return taken

    def find(self, key: bytes) -> int | None:
        """The block published under `key`, now held once more, or None."""
        block = self._block_of.get(key)
        if block is None:
            return None
        self._idle.pop(block, None)
        self._hold(block)
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Lets later requests find `block`. The first block published under a key stays the one that is found."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def release(self, blocks: Iterable[int]) -> None:
        """Gives up one hold on each. The last blocks of a request become the first to be overwritten, because a
        prefix is of use only with all that comes before it."""
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    heappush(self._free, block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes back the publications of blocks that a request holds: no later one finds them."""
        for block in blocks:
            if block in self._key_of:
                self._unpublish(block)

    def forget_all(self) -> None:
        """Takes back every publication: after a failed iteration nobody knows what the blocks hold."""
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
