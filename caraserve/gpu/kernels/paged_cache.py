"""How kernels find a request's tokens: keys and values in blocks, and the slot and position of each token."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedCache:
    """One layer's keys and values, and the block table of all requests. All strides but the last are arbitrary."""

    keys: Tensor  # [blocks, block tokens, kv heads, head dim]
    values: Tensor  # like `keys`, with the same strides
    block_table: Tensor  # int32 [slots, most blocks of a request]; a row lists its request's blocks in order

    def __post_init__(self) -> None:
        """Raises ValueError if the strides of keys and values differ: the kernels compute a block's place once."""
        if self.keys.stride() != self.values.stride():
            raise ValueError(
                f"keys have strides {self.keys.stride()} and values {self.values.stride()}; they must be the same"
            )


@dataclass(frozen=True, slots=True)
class TokenTables:
    """Request slot and position of each token of a batch."""

    slot: Tensor  # int32 [tokens] request slot
    position: Tensor  # int32 [tokens]
