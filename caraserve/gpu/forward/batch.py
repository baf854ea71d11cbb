"""The arrays of an iteration that kernels read, at fixed addresses of device memory, and how they are filled.

All arrays except the BGMV kernels' lists are contiguous and copied at once. They have the size of the largest batch, so
a captured graph finds every later batch at the same addresses; the rest of a smaller batch is filled with values that
kernels skip. Rows of one token, which decode, have their own kernels in attention and LoRA; all other tokens are prompt
chunks. An adapter of more than `bgmv_work.MOST_ROWS` decoding rows has the LoRA kernels of prompts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.batch import BASE_ADAPTER_SLOT, ScheduledRow
from caraserve.core.grammar import mask_words
from caraserve.core.outputs import SAMPLE_MASKED, Output
from caraserve.gpu.kernels import cuda_launch
from caraserve.gpu.kernels.bgmv_work import GROUP_WORDS, ITEM_WORDS, MOST_ROWS, most_items
from caraserve.gpu.kernels.lora import Segments, cut_segments
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.sampling import MaskedRows, Outputs
from caraserve.gpu.memory.pass_shape import Capacity, PassShape
from caraserve.gpu.memory.results import result_bytes, result_views
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import ceil_div

Ints = NDArray[np.int32]
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The arrays of one lane. One copy fills `words`; all other tensors but lists, masks and results are views
    of it."""

    words: Tensor  # int32 [words]
    tokens: TokenTables  # position NO_TOKEN: padding
    row_token: Tensor  # int32 [rows]
    tile_first: Tensor  # int32 [tiles]
    tile_tokens: Tensor  # int32 [tiles]
    segments: Segments
    outputs: Outputs
    lora_slots: Tensor  # int32 [tokens], slots of the adapters that BGMV serves, 0 for all other tokens
    adapters: Tensor  # int32 [tokens], slots of the adapters that change the embedding or the head, else 0
    embedded: Tensor  # int32 [rows, or tokens], tokens whose hidden states are embeddings
    masked: MaskedRows
    results: Tensor  # uint8: the results in `outputs`, contiguous for one copy to the host
    lists: "ItemLists"


def _places(capacity: Capacity) -> dict[str, slice]:
    sizes = {
        "slot": capacity.tokens,
        "position": capacity.tokens,
        "lora_slot": capacity.tokens,
        "adapter": capacity.tokens,
        "row_token": capacity.rows,
        "tile_first": capacity.tiles,
        "tile_tokens": capacity.tiles,
        "out_token": capacity.outputs,
        "out_kind": capacity.outputs,
        "out_wanted": capacity.outputs,
        "embedded": capacity.embedded,
        "masked": capacity.rows,
        "order": capacity.tokens,
        "segment_first": capacity.segments,
        "segment_rows": capacity.segments,
        "segment_slot": capacity.segments,
    }
    padded = [ceil_div(size, 4) * 4 for size in sizes.values()]  # each array starts at a multiple of 16 bytes
    starts = [0, *accumulate(padded)]
    return {name: slice(start, start + size) for (name, size), start in zip(sizes.items(), starts, strict=False)}


_EMPTY = {"position": NO_TOKEN, "row_token": NO_TOKEN, "out_token": NO_TOKEN, "out_wanted": -1}  # all else: 0


@dataclass(frozen=True, slots=True)
class FilledBatch:
    """A batch in its arrays. `bgmv_slots`: int32 [tokens], the adapter slots of the tokens whose LoRA the BGMV kernels
    add, 0 for all others. `counts`: int32 [rows], their tokens; `steps`: int32 [tokens], how far each token is from its
    row's first; `decodes`: bool [rows]."""

    shape: PassShape
    bgmv_slots: Ints
    counts: Ints
    steps: Ints
    decodes: NDArray[np.bool_]


class BatchWriter:
    """Writes the batch's arrays in host memory, before the copy. Reused: `fill` overwrites the previous batch
    completely."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._places = _places(capacity)
        self.num_words = max(place.stop for place in self._places.values())
        empty = np.zeros(self.num_words, np.int32)
        for name, value in _EMPTY.items():
            empty[self._places[name]] = value
        self._empty = empty

    def empty(self) -> Ints:
        """Returns the words of a batch without rows, [num_words]."""
        return self._empty.copy()

    def fill(
        self,
        words: Ints,
        rows: tuple[ScheduledRow, ...],
        outputs: Output,
        groups: Collection[int],
        vocabulary: Collection[int] = (),
        *,
        with_lora: bool = True,
        all_prompt: bool = False,
    ) -> FilledBatch:
        """Writes a batch into `words` [num_words]. `groups`: shapes of the groups in which its adapters have modules;
        `vocabulary`: slots of those that change the embedding or the head. `with_lora`: False if layers' kernels apply
        no adapters. `all_prompt`: treats rows of one token as prompt chunks, too."""
        words[:] = self._empty
        count = len(rows)
        counts = np.fromiter([row.count for row in rows], np.int32, count)
        first = np.zeros(count + 1, np.int32)
        np.cumsum(counts, out=first[1:])
        self._put(words, "slot", np.repeat(np.fromiter([row.slot for row in rows], np.int32, count), counts))
        steps = np.arange(first[-1], dtype=np.int32) - np.repeat(first[:-1], counts)
        decodes = np.zeros(count, bool) if all_prompt else counts == 1
        self._put(words, "row_token", first[:-1][decodes])
        tiles = 0 if decodes.all() else self._put_tiles(words, first[:-1][~decodes], counts[~decodes])
        for name, values in zip(("out_token", "out_kind", "out_wanted"), outputs.arrays(), strict=True):
            self._put(words, name, values)
        self._put(words, "embedded", outputs.embedded)
        self._put(words, "masked", np.flatnonzero(outputs.kind == SAMPLE_MASKED) % self.capacity.logits_rows)
        adapters = np.fromiter([row.adapter_slot for row in rows], np.int32, count)
        if vocabulary:
            changed = np.where(np.isin(adapters, list(vocabulary)), adapters, BASE_ADAPTER_SLOT)
            self._put(words, "adapter", np.repeat(changed, counts))
        for_bgmv, others = _divided(adapters if with_lora else np.zeros_like(adapters), decodes)
        segments = self._put_segments(words, np.repeat(others, counts)) if others.any() else 0
        sizes = int(first[-1]), int(decodes.sum()), tiles, len(outputs.token), segments
        context = self._put_positions(words, rows, counts, steps, decodes)
        shape = PassShape(*sizes, bool(for_bgmv.any()), context, frozenset(groups), bool(vocabulary))
        bgmv_slots = np.repeat(for_bgmv, counts)
        self._put(words, "lora_slot", bgmv_slots)
        return FilledBatch(shape, bgmv_slots, counts, steps, decodes)

    def move(self, words: Ints, rows: tuple[ScheduledRow, ...], filled: FilledBatch) -> PassShape:
        """Writes the positions of rows that differ from those of a filled batch only in them; returns their shape."""
        context = self._put_positions(words, rows, filled.counts, filled.steps, filled.decodes)
        return replace(filled.shape, context=context)

    def positions(self, tokens: int) -> slice:
        """Returns the words that `move` writes for so many tokens."""
        start = self._places["position"].start
        return slice(start, start + tokens)

    def _put_positions(
        self, words: Ints, rows: Sequence[ScheduledRow], counts: Ints, steps: Ints, decodes: NDArray[np.bool_]
    ) -> int:
        """Returns the most positions of any row that decodes."""
        starts = np.fromiter([row.start for row in rows], np.int32, len(rows))
        self._put(words, "position", np.repeat(starts, counts) + steps)
        return int(starts[decodes].max(initial=-1)) + 1

    def _put(self, words: Ints, name: str, values: NDArray[np.integer]) -> None:
        start = self._places[name].start
        words[start : start + len(values)] = values

    def _put_tiles(self, words: Ints, first: Ints, counts: Ints) -> int:
        size = self.capacity.tile_tokens
        tiles = -(-counts // size)
        number = np.arange(tiles.sum()) - np.repeat(np.cumsum(tiles) - tiles, tiles)
        self._put(words, "tile_first", np.repeat(first, tiles) + size * number)
        self._put(words, "tile_tokens", np.minimum(np.repeat(counts, tiles) - size * number, size))
        return len(number)

    def _put_segments(self, words: Ints, slots: Ints) -> int:
        parts = cut_segments(slots)
        for name, values in zip(("order", "segment_first", "segment_rows", "segment_slot"), parts, strict=True):
            self._put(words, name, values)
        return len(parts[1])


def _divided(adapters: Ints, decodes: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Returns the adapter slot of each row twice, int32 [rows]: for BGMV and for segments, 0 where the other has it.
    An adapter of more than MOST_ROWS decoding rows is for segments."""
    decoding = np.where(decodes, adapters, BASE_ADAPTER_SLOT)
    many = np.bincount(decoding) > MOST_ROWS
    for_bgmv = np.where(many[decoding], BASE_ADAPTER_SLOT, decoding)
    return for_bgmv, adapters - for_bgmv


@dataclass(frozen=True, slots=True)
class ItemLists:
    """Device memory of the BGMV kernels' lists, by group shape and launch. All share the groups of rows."""

    counts: Tensor  # int32 [group shapes, 2]
    lists: tuple[tuple[Tensor, Tensor], ...]  # int32 [items, ITEM_WORDS] shrink, expand
    groups: Tensor  # int32 [row groups, GROUP_WORDS]

    @classmethod
    def empty(cls, plan: DecoderPlan, rows: int, max_rank: int, device: torch.device) -> "ItemLists":
        """Allocates lists for `rows` rows of adapters of any dtype."""
        lists = []
        for shape in plan.group_shapes:
            sizes = [most_items(rows, max_rank, shape.widths, kind) for kind in Dtype]
            most = [max(size[launch] for size in sizes) for launch in range(2)]
            shrink, expand = (torch.zeros((size, ITEM_WORDS), dtype=torch.int32, device=device) for size in most)
            lists.append((shrink, expand))
        return cls(
            torch.zeros((len(lists), 2), dtype=torch.int32, device=device),
            tuple(lists),
            torch.zeros((rows, GROUP_WORDS), dtype=torch.int32, device=device),
        )

    def of(self, shape: int) -> list[cuda_launch.WorkList]:
        """Returns the lists of a group shape for shrink and expand, as launches take them."""
        return [
            cuda_launch.WorkList(items.data_ptr(), self.counts[shape, launch].data_ptr(), self.groups.data_ptr())
            for launch, items in enumerate(self.lists[shape])
        ]


def make_batch(plan: DecoderPlan, capacity: Capacity, max_rank: int, device: torch.device) -> DeviceBatch:
    """Allocates one lane's arrays, holding an empty batch."""
    places = _places(capacity)
    words = torch.zeros(max(place.stop for place in places.values()), dtype=torch.int32, device=device)
    at = {name: words[place] for name, place in places.items()}
    count = capacity.outputs
    results = torch.zeros(result_bytes(count), dtype=torch.uint8, device=device)
    return DeviceBatch(
        words=words,
        tokens=TokenTables(at["slot"], at["position"]),
        lora_slots=at["lora_slot"],
        adapters=at["adapter"],
        row_token=at["row_token"],
        tile_first=at["tile_first"],
        tile_tokens=at["tile_tokens"],
        segments=Segments(at["order"], at["segment_first"], at["segment_rows"], at["segment_slot"]),
        outputs=Outputs(
            at["out_token"],
            at["out_kind"],
            at["out_wanted"],
            *result_views(results.view(torch.int32), results.view(torch.float32), count),
        ),
        embedded=at["embedded"],
        masked=MaskedRows(
            at["masked"],
            torch.zeros((capacity.rows, mask_words(plan.vocab_size)), dtype=torch.int32, device=device),
        ),
        results=results,
        lists=ItemLists.empty(plan, capacity.rows, max_rank, device),
    )
