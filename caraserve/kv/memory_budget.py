"""The device's memory: what KV blocks take of it, what adapters take, and who gives way to whom. Pure.

Both take from one sum where a device has them share its memory (`SharedMemory`): KV blocks the low end, adapters the
rest. `AdapterManager` asks before it copies an adapter, and asks for more blocks when requests need them. Where
things lie is the backend's to say, so these are accounts, not addresses.

    KV gives way to an adapter     down to the highest block that a request holds, and never below `least_blocks`; not
                                   at all while running requests wait for blocks
    adapters give way to KV        those that nobody uses; `AdapterManager` chooses which

Blocks that are asked for count from then on, but nobody gets them before the backend has made room (`grown`).
"""

from caraserve.core.backend import Limits, SharedMemory
from caraserve.kv.block_pool import BlockPool
from caraserve.util.units import align_up


class MemoryBudget:
    """The accounts of one device."""

    def __init__(self, limits: Limits, adapter_bytes: int) -> None:
        """`adapter_bytes`: for adapters, where KV blocks have memory of their own."""
        own = SharedMemory(adapter_bytes, block_bytes=0, granule_bytes=1, adapter_bytes=adapter_bytes, least_blocks=0)
        self.is_shared = limits.shared is not None
        self.pool = BlockPool(limits.num_blocks)
        self.adapter_bytes = 0  # taken by adapters
        self.wanted_blocks = 0  # in all, while running requests wait for some; 0 while none does
        self._memory = limits.shared or own
        self._kv_blocks = limits.num_blocks  # those asked for included
        if self.is_shared and self._memory.least_blocks * limits.block_tokens < limits.max_context:
            raise AssertionError(f"{self._memory.least_blocks} blocks do not hold a request of full context")

    # --- questions ---

    @property
    def most_adapter_bytes(self) -> int:
        """Most that adapters may ever take together."""
        granule = self._memory.granule_bytes
        return min(self._memory.adapter_bytes, self._memory.num_bytes - self._kv_bytes(0)) // granule * granule

    @property
    def most_blocks(self) -> int:
        """KV blocks that there could be without any adapter."""
        return self._blocks_in(self._memory.num_bytes)

    @property
    def is_growing(self) -> bool:
        """Whether the backend is making room for blocks."""
        return self._kv_blocks > self.pool.num_blocks

    def takes(self, num_bytes: int) -> int:
        """Bytes that an adapter of so many takes."""
        return align_up(max(1, num_bytes), self._memory.granule_bytes)

    def over_cap(self, num_bytes: int) -> int:
        """By how much adapters would be over what they may take together, with another one of so many bytes."""
        return max(0, self.adapter_bytes + self.takes(num_bytes) - self._memory.adapter_bytes)

    def excess(self, num_bytes: int) -> int:
        """Bytes that other adapters must give up before one of so many can come, when KV gives up all it may."""
        least = self._kv_blocks if self.is_growing else max(self.pool.held_end, self.wanted_blocks)
        over = self._kv_bytes(least) + self.adapter_bytes + self.takes(num_bytes) - self._memory.num_bytes
        return max(0, over, self.over_cap(num_bytes))

    def blocks_without(self, num_bytes: int) -> int:
        """KV blocks that there could be if adapters gave up so many bytes."""
        return self._blocks_in(self._memory.num_bytes - self.adapter_bytes + num_bytes)

    def excess_for_blocks(self, blocks: int) -> int:
        """Bytes that adapters must give up before there can be so many KV blocks."""
        return max(0, self._kv_bytes(blocks) + self.adapter_bytes - self._memory.num_bytes)

    # --- adapters ---

    def add_adapter(self, num_bytes: int) -> bool:
        """An adapter comes; there is no `excess`. True when KV has given up blocks for it, which the backend must be
        told first."""
        if self.excess(num_bytes):
            raise AssertionError(f"no room for an adapter of {num_bytes} bytes")
        self.adapter_bytes += self.takes(num_bytes)
        left = self._memory.num_bytes - self.adapter_bytes
        if self._kv_bytes(self._kv_blocks) <= left:
            return False
        self._kv_blocks = self._blocks_in(left)
        self.pool.resize(self._kv_blocks)
        return True

    def remove_adapter(self, num_bytes: int) -> None:
        """An adapter has gone."""
        self.adapter_bytes -= self.takes(num_bytes)

    # --- KV blocks ---

    def grow(self, blocks: int) -> None:
        """The backend is being asked for so many KV blocks in all; there is no `excess_for_blocks`."""
        if self.is_growing or self.excess_for_blocks(blocks) or blocks <= self._kv_blocks:
            raise AssertionError(f"KV cannot grow to {blocks} blocks now")
        self._kv_blocks = blocks

    def grown(self) -> None:
        """The backend has made room: the blocks asked for can be handed out."""
        self.pool.resize(self._kv_blocks)

    # --- accounts ---

    def check(self) -> None:
        """Raises AssertionError when there are more claims than memory."""
        assert self.pool.num_blocks <= self._kv_blocks, "blocks are handed out that are not accounted for"
        assert 0 <= self.adapter_bytes <= self._memory.adapter_bytes, "adapters are over their cap"
        claimed = self._kv_bytes(self._kv_blocks) + self.adapter_bytes
        assert claimed <= self._memory.num_bytes, "KV blocks and adapters claim more than there is"

    def _kv_bytes(self, blocks: int) -> int:
        """Bytes that adapters cannot have while there are so many blocks."""
        kept = max(blocks, self._memory.least_blocks)
        return align_up(kept * self._memory.block_bytes, self._memory.granule_bytes)

    def _blocks_in(self, num_bytes: int) -> int:
        if not self.is_shared:
            return self.pool.num_blocks
        granule = self._memory.granule_bytes
        return num_bytes // granule * granule // self._memory.block_bytes
