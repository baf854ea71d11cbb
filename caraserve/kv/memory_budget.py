"""The budget of the device's memory: how much of it KV blocks take, and how much adapters take. No I/O.

Where a backend has both share its memory (`SharedMemory`), KV blocks take the low end and adapters the rest. The budget
counts bytes; the backend picks the addresses.

    room for an adapter      is taken from KV blocks above the highest one that a request holds, and never below
                             `least_blocks`; no blocks are taken while running requests wait for some
    room for KV blocks       is taken from adapters that no admitted request uses; `DeviceCache` chooses which

New blocks count from the moment in which the backend is asked for them, but are handed out only when it has made room
for them (`grown`).
"""

from caraserve.core.backend import Limits, SharedMemory
from caraserve.kv.block_pool import BlockPool
from caraserve.util.units import align_up


class MemoryBudget:
    """Counts the bytes that KV blocks and adapters take on one device."""

    def __init__(self, limits: Limits, adapter_bytes: int) -> None:
        """`adapter_bytes`: the memory for adapters, where KV blocks have memory of their own."""
        own = SharedMemory(adapter_bytes, block_bytes=0, granule_bytes=1, adapter_bytes=adapter_bytes, least_blocks=0)
        self.is_shared = limits.shared is not None
        self.pool = BlockPool(limits.num_blocks)
        self.adapter_bytes = 0  # taken by adapters
        self._wanted_blocks = 0  # total that running requests need while some of them wait; 0 while none does
        self._memory = limits.shared or own
        self._kv_blocks = limits.num_blocks  # including those that the backend is making room for
        if self.is_shared and self._memory.least_blocks * limits.block_tokens < limits.max_context:
            raise AssertionError(f"{self._memory.least_blocks} blocks do not hold a request of full context")

    # --- sizes ---

    @property
    def most_adapter_bytes(self) -> int:
        """The most bytes that adapters may ever take together."""
        granule = self._memory.granule_bytes
        return min(self._memory.adapter_bytes, self._memory.num_bytes - self._kv_bytes(0)) // granule * granule

    @property
    def most_blocks(self) -> int:
        """The number of KV blocks that fit without any adapter."""
        return self._blocks_in(self._memory.num_bytes)

    @property
    def is_growing(self) -> bool:
        """Whether the backend is still making room for blocks."""
        return self._kv_blocks > self.pool.num_blocks

    def takes(self, num_bytes: int) -> int:
        """Returns the bytes that an adapter of `num_bytes` takes: at least one granule, and whole ones."""
        return align_up(max(1, num_bytes), self._memory.granule_bytes)

    def over_cap(self, num_bytes: int) -> int:
        """Returns by how many bytes adapters would exceed their limit with one more of `num_bytes`."""
        return max(0, self.adapter_bytes + self.takes(num_bytes) - self._memory.adapter_bytes)

    def excess(self, num_bytes: int) -> int:
        """Returns how many bytes of adapters must be evicted for one of `num_bytes`, if KV blocks give up all they
        may."""
        least = self._kv_blocks if self.is_growing else max(self.pool.held_end, self._wanted_blocks)
        over = self._kv_bytes(least) + self.adapter_bytes + self.takes(num_bytes) - self._memory.num_bytes
        return max(0, over, self.over_cap(num_bytes))

    def blocks_without(self, num_bytes: int) -> int:
        """Returns how many KV blocks fit if `num_bytes` of adapters are evicted."""
        return self._blocks_in(self._memory.num_bytes - self.adapter_bytes + num_bytes)

    def excess_for_blocks(self, blocks: int) -> int:
        """Returns how many bytes of adapters must be evicted before `blocks` KV blocks fit."""
        return max(0, self._kv_bytes(blocks) + self.adapter_bytes - self._memory.num_bytes)

    # --- adapters ---

    def add_adapter(self, num_bytes: int) -> bool:
        """Counts an adapter of `num_bytes`. Returns True if the pool has lost blocks for it: the backend's `resize_kv`
        must then be called before the adapter is loaded. Raises AssertionError if `excess` is above zero."""
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
        """Stops counting an adapter of `num_bytes`, which has left the device."""
        self.adapter_bytes -= self.takes(num_bytes)

    # --- KV blocks ---

    def set_lacking_blocks(self, lacking: int) -> None:
        """Sets how many blocks running requests lack. While they lack any, no block is taken for an adapter."""
        self._wanted_blocks = self.pool.num_blocks + lacking if lacking else 0

    def grow(self, blocks: int) -> None:
        """Counts `blocks` KV blocks in total, for which the backend now makes room. Raises AssertionError if they do
        not fit."""
        if self.is_growing or self.excess_for_blocks(blocks) or blocks <= self._kv_blocks:
            raise AssertionError(f"KV cannot grow to {blocks} blocks now")
        self._kv_blocks = blocks

    def grown(self) -> None:
        """Adds the new blocks to the pool, when the backend has made room for them."""
        self.pool.resize(self._kv_blocks)

    # --- consistency ---

    def check(self) -> None:
        """Raises AssertionError if KV blocks and adapters take more than there is."""
        assert self.pool.num_blocks <= self._kv_blocks, "blocks are handed out that are not accounted for"
        assert 0 <= self.adapter_bytes <= self._memory.adapter_bytes, "adapters are over their cap"
        claimed = self._kv_bytes(self._kv_blocks) + self.adapter_bytes
        assert claimed <= self._memory.num_bytes, "KV blocks and adapters claim more than there is"

    def _kv_bytes(self, blocks: int) -> int:
        """Returns the bytes that adapters cannot take while there are `blocks` KV blocks."""
        kept = max(blocks, self._memory.least_blocks)
        return align_up(kept * self._memory.block_bytes, self._memory.granule_bytes)

    def _blocks_in(self, num_bytes: int) -> int:
        if not self.is_shared:
            return self.pool.num_blocks
        granule = self._memory.granule_bytes
        return num_bytes // granule * granule // self._memory.block_bytes
