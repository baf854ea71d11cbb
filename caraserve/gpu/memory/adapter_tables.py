"""The device's adapter tables: address of A, B and vectors, rank and scale of each site, by adapter slot.

Kernels read everything about adapters from these tables, so one captured graph serves any mix of adapters. A slot's
column is written in stream order when an adapter is bound to it or moved in the pool. No batch uses a slot between two
adapters, so columns are never erased. Slot 0 is the base model, with rank 0.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.lora_layout import MAX_ROWS, AdapterSpec
from caraserve.gpu.kernels import cuda_launch
from caraserve.gpu.kernels.lora import SiteTables
from caraserve.gpu.kernels.vocabulary import VocabularyTables
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import SIDES
from caraserve.util.units import align_up

_SLOTS_STEP = 16


@dataclass(frozen=True, slots=True)
class Column:
    """One slot's column of each table, [layers, most sites] each, and the code of the adapter's dtype."""

    a: NDArray[np.int64]  # addresses
    b: NDArray[np.int64]
    vectors: NDArray[np.int64]  # 0: the adapter has none
    rank: NDArray[np.int32]  # padded
    scale: NDArray[np.float32]
    dtype: NDArray[np.int32]  # [1]


class AdapterTables:
    """Tables [layers, sites of the layer that has most, slots]; the sites of a group are neighbours.

    `slots` is a multiple of 16, so that the tables of every layer and site begin at a multiple of 64 bytes: Triton
    compiles a kernel again for a pointer of another alignment.
    """

    def __init__(self, plan: DecoderPlan, slots: int, device: torch.device) -> None:
        """`slots`: the least number of slots."""
        self.slots = align_up(slots, _SLOTS_STEP)
        self._plan = plan
        shape = (len(plan.layers), plan.most_sites, self.slots)
        self.a, self.b, self.vectors = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(3))
        self.rank = torch.zeros(shape, dtype=torch.int32, device=device)
        self.scale = torch.zeros(shape, dtype=torch.float32, device=device)
        self.dtype = torch.zeros(self.slots, dtype=torch.int32, device=device)
        self.vocabulary = _vocabulary_tables(self.slots, self.dtype)

    def for_triton(self, layer: int, group: int) -> SiteTables:
        """Returns the tables of one of a layer's groups, as kernels/lora.py takes them."""
        sites = self._sites(layer, group)
        tables = self.a, self.b, self.rank, self.scale, self.vectors
        a, b, rank, scale, vectors = (table[layer, sites] for table in tables)
        return SiteTables(a, b, rank, scale, self.dtype, vectors)

    def for_launch(self, layer: int, group: int) -> cuda_launch.WeightTables:
        """Returns the tables of one of a layer's groups, as the raw CUDA kernels take them."""
        first = self._sites(layer, group).start
        tables = self.a, self.b, self.rank, self.scale, self.vectors
        a, b, rank, scale, vectors = (table[layer, first].data_ptr() for table in tables)
        return cuda_launch.WeightTables(a, b, rank, scale, self.dtype.data_ptr(), vectors, self.slots)

    def _sites(self, layer: int, group: int) -> slice:
        sites = self._plan.layers[layer].groups[group].sites
        return slice(sites[0].index, sites[-1].index + 1)


def _vocabulary_tables(slots: int, dtype: Tensor) -> VocabularyTables:
    def table(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros((len(SIDES), slots, *shape), dtype=kind, device=dtype.device)

    a, b, rank, rows = (table(kind) for kind in (torch.int64, torch.int64, torch.int32, torch.int32))
    return VocabularyTables(a, b, rank, rows, table(torch.float32), table(torch.int32, MAX_ROWS), dtype)


@dataclass(frozen=True, slots=True)
class VocabularyColumn:
    """One slot's column of the tables of the embedding and the head, [2] each, and the tokens, [2, MAX_ROWS]."""

    a: NDArray[np.int64]
    b: NDArray[np.int64]
    rank: NDArray[np.int32]
    rows: NDArray[np.int32]
    scale: NDArray[np.float32]
    tokens: NDArray[np.int32]


def vocabulary_column(spec: AdapterSpec, base: int) -> VocabularyColumn:
    """Returns the column of an adapter whose bytes begin at the device address `base`."""
    count = len(SIDES)
    (a, b), (rank, rows) = np.zeros((2, count), np.int64), np.zeros((2, count), np.int32)
    scale, tokens = np.zeros(count, np.float32), np.zeros((count, MAX_ROWS), np.int32)
    for span in spec.vocabulary:
        at, change = SIDES.index(span.change.side), span.change
        a[at], b[at] = base + span.a_offset, base + span.b_offset
        rank[at], rows[at], scale[at] = span.padded_rank, len(change.tokens), change.scale
        tokens[at, : len(change.tokens)] = change.tokens
    return VocabularyColumn(a, b, rank, rows, scale, tokens)


def column(spec: AdapterSpec, plan: DecoderPlan, base: int) -> Column:
    """Returns the column of an adapter whose bytes begin at the device address `base`."""
    shape = (len(plan.layers), plan.most_sites)
    a, b, vectors = (np.zeros(shape, np.int64) for _ in range(3))
    rank, scale = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for span in spec.spans:
        at = span.layer, span.site
        a[at], b[at] = base + span.a_offset, base + span.b_offset
        rank[at], scale[at] = span.padded_rank, span.scale
        vectors[at] = 0 if span.vectors_offset is None else base + span.vectors_offset
    return Column(a, b, vectors, rank, scale, np.array([spec.dtype.value], np.int32))
