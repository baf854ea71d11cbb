"""The interface of attention over a paged cache: one file of this folder for each backend.

Decoding rows and prompt chunks are chosen apart, so that an `Attention` may join two backends.
"""

from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables

NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends: a score is s = `q·k · scale + slope · (key's position - query's)`, or with a cap
    `cap · tanh(s / cap)`, and a query at position p sees positions (p - window, p]."""

    scale: float
    cap: float | None = None
    window: int = NO_WINDOW
    sinks: Tensor | None = None  # float32 [heads], a score for each head that takes weight and has no value
    slopes: Tensor | None = None  # float32 [heads], of ALiBi


class Scratch(Protocol):
    """Device memory that decoding rows use within a launch."""

    def rows_at(self, max_context: int) -> int:
        """Returns the most rows whose contexts may have `max_context` tokens."""

    def within(self, rows: int, max_context: int) -> Self:
        """Returns views of the same memory for fewer rows and shorter contexts: less work, bit-identical results."""


S = TypeVar("S", bound=Scratch)


class DecodeAttention(Protocol[S]):
    """Attention of rows of one token, each of another request."""

    def scratch_bytes(self, heads: int, head_dim: int, max_context: int) -> int:
        """Returns the bytes of scratch of one row whose context has up to `max_context` tokens."""

    def scratch(self, rows: int, heads: int, head_dim: int, max_context: int, device: torch.device) -> S:
        """Allocates scratch for `rows` rows whose contexts have up to `max_context` tokens."""

    def attend(
        self,
        q: Tensor,
        cache: PagedCache,
        tokens: TokenTables,
        row_token: Tensor,
        out: Tensor,
        scratch: S,
        how: LayerAttention,
    ) -> None:
        """Computes attention of single tokens, whose contexts must fit `scratch`.

        q, out: [tokens, heads · head dim], rows at any stride; row_token: int32 [rows], -1: no row.
        """


class PrefillAttention(Protocol):
    """Attention of prompt chunks, whose own keys and values are already in the cache."""

    def tile_tokens(self, dtype: torch.dtype, head_dim: int) -> int:
        """Returns the most tokens of a tile, on every device."""

    def attend(
        self,
        q: Tensor,
        cache: PagedCache,
        tokens: TokenTables,
        tile_first: Tensor,
        tile_tokens: Tensor,
        out: Tensor,
        how: LayerAttention,
    ) -> None:
        """Computes attention of tiles of consecutive tokens of one request, the first at row `tile_first` of the batch.

        q, out: [tokens, heads · head dim], rows at any stride; tile_first, tile_tokens: int32 [tiles], 0 tokens: no
        tile.
        """


@dataclass(frozen=True, slots=True)
class Attention:
    """What computes attention of decoding rows, and of prompt chunks."""

    decode: DecodeAttention[Any]
    prefill: PrefillAttention
