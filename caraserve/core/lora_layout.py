"""The byte layout of an adapter image, the same in every cache: rank rows, layer-major, contiguous. No I/O.

Per layer, for each group of linears that read the same input (`model/plan.py`): A of every adapted linear, then B of
every site, which is a part of a linear. A is `[padded_rank, in]`; B is transposed and cut into panels,
`[out / 64, padded_rank, 64]`, so that a tile of outputs is one stream for a CPU core and for a thread block alike.
Ranks are padded to a multiple of `RANK_STEP`, A's rows to `A_COLUMNS` and B's to whole panels, all with zeros, which
add exact zeros. A group of layers is one range of bytes: loading is a copy, and CPU workers read the same layout as the
device.

Vectors are a factor and a bias of each output, fp32 `[2, out]`: y = factor · (W x + b + scale · B A x) + bias, where b
is the base's bias. DoRA has them, and LoRA with a trained bias of B. A site's vectors follow its B.

Changes of the embedding precede the bytes of layer 0 and are loaded with it; those of the head follow the bytes of the
last layer. Of scale · B A, the embedding's A is transposed, `[vocab, padded_rank]`, so that a token is one run of
bytes. Replaced rows are stored as an A, `[padded rows, hidden]`; the description has their tokens.

All other values have the adapter's own dtype, so nothing is rounded. The scale (alpha / r or alpha / sqrt(r)) is stored
apart from the bytes, because folding it in could round.
"""

import math
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from caraserve.core.score_head import ScoreHead
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.model.vocabulary import SIDES, Side, vocabulary_targets
from caraserve.util.units import align_up, ceil_div

RANK_STEP = 8
MAX_RANK = 512
A_COLUMNS = 16  # a row of A is a whole number of fp32 vectors
PANEL = 64  # outputs in a panel
ALIGN_BYTES = 64  # a cache line; every A and B starts on one
MAX_ROWS = 256  # that an adapter may replace in the embedding, and in the head
NEVER = sys.maxsize  # the first position of an adapter that is active nowhere

Array = NDArray[np.generic]
Bytes = NDArray[np.uint8]
Module = tuple[int, int]  # layer, index of the linear in it
RankAndScale = tuple[int, float]


@dataclass(frozen=True, slots=True)
class SiteSpan:
    """The offsets of A and B of one site in the image. Sites of one linear share A. `rank` is without padding."""

    layer: int
    site: int  # its index in the layer
    linear: int  # index of its linear in the layer
    rank: int
    scale: float
    a_offset: int
    b_offset: int
    vectors_offset: int | None = None  # None: the adapter has none

    @property
    def padded_rank(self) -> int:
        return align_up(self.rank, RANK_STEP)

    @property
    def module(self) -> Module:
        return self.layer, self.linear


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """What an adapter changes in the embedding or the head. `tokens`: whose rows are replaced; none: scale · B A of
    `rank` is added."""

    side: Side
    rank: int = 0
    scale: float = 1.0
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VocabularySpan:
    """The offsets of A, or of the replaced rows, and of B of one change in the image."""

    change: VocabularyChange
    a_offset: int
    b_offset: int

    @property
    def padded_rank(self) -> int:
        return align_up(len(self.change.tokens) or self.change.rank, RANK_STEP)


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """The description of an adapter, without its name and bytes. `digest` (sha256, hex) identifies it."""

    digest: str
    dtype: Dtype
    rank: int  # the largest of any module
    targets: tuple[str, ...]  # names of adapted modules, in the order of the plan's
    layer_ends: tuple[int, ...]  # [layers] where each layer's bytes end; a layer without modules has none
    spans: tuple[SiteSpan, ...]  # ordered by layer, then by site
    chunks: tuple[bytes, ...] = ()  # sha256 of each chunk of the bytes (`lora/manifest.py`)
    invocation: tuple[int, ...] = ()  # of an activated LoRA: the tokens from which on it is active
    vocabulary: tuple[VocabularySpan, ...] = ()  # changes of the embedding, then of the head
    has_vectors: bool = False  # whether each module has a factor and a bias for every output
    head: ScoreHead | None = None
    # The base model's name in the configuration. It changes no answer, so the digest does not depend on it.
    trained_on: str = field(default="", compare=False)

    @classmethod
    def of(
        cls,
        plan: DecoderPlan,
        dtype: Dtype,
        modules: Mapping[Module, RankAndScale],
        digest: str = "",
        invocation: tuple[int, ...] = (),
        vocabulary: Sequence[VocabularyChange] = (),
        *,
        has_vectors: bool = False,
    ) -> Self:
        """Returns the description of an adapter of some modules. Without `digest`, which follows from its bytes."""
        before, start = _lay_out_side(plan, dtype, vocabulary, "embedding", 0)
        spans, layer_ends = lay_out(plan, dtype, modules, start, has_vectors=has_vectors)
        after, end = _lay_out_side(plan, dtype, vocabulary, "head", layer_ends[-1])
        changed = {plan.layers[layer].linears[linear].target for layer, linear in modules}
        sides = {change.side for change in vocabulary}
        targets = tuple(target for target in plan.targets if target in changed)
        targets += tuple(vocabulary_targets(plan)[side] for side in SIDES if side in sides)
        rank = max(1, *(rank for rank, _ in modules.values()), *(change.rank for change in vocabulary))
        ends = (*layer_ends[:-1], end)
        return cls(
            digest,
            dtype,
            rank,
            targets,
            ends,
            spans,
            invocation=invocation,
            vocabulary=before + after,
            has_vectors=has_vectors,
        )

    @property
    def num_bytes(self) -> int:
        return self.layer_ends[-1]

    def active_from(self, prompt: Sequence[int]) -> int:
        """Returns the position from which the adapter is active: 0, or, of an activated LoRA, the first token of the
        last occurrence of its invocation tokens in the prompt. NEVER: they do not occur, so the base answers."""
        if not self.invocation:
            return 0
        tokens = np.frombuffer(array("q", prompt), np.int64)
        starts = len(tokens) - len(self.invocation) + 1
        if starts <= 0:
            return NEVER
        # Token by token: 20 ms for 256 in a prompt of 128 Ki, where a search of texts may take 100 times as long.
        found = np.ones(starts, bool)
        for place, token in enumerate(self.invocation):
            found &= tokens[place : place + starts] == token
        return int(starts - 1 - found[::-1].argmax()) if found.any() else NEVER


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter image in the host cache. `data`: uint8 [spec.num_bytes], 64-byte aligned, laid out as `spec.spans`.
    `is_checked`: whether its digest was computed from these bytes; else it is what its files had when they were last
    read, and have not changed since."""

    spec: AdapterSpec
    data: Bytes
    is_checked: bool = True


def modules_of(plan: DecoderPlan, targets: Collection[str], layers: int | None = None) -> list[Module]:
    """Returns the modules of these names in the first `layers` layers, None: in all."""
    return [
        (layer, index)
        for layer, one in enumerate(plan.layers[:layers])
        for index, linear in enumerate(one.linears)
        if linear.target in targets
    ]


def lay_out(
    plan: DecoderPlan,
    dtype: Dtype,
    modules: Mapping[Module, RankAndScale],
    start: int = 0,
    *,
    has_vectors: bool = False,
) -> tuple[tuple[SiteSpan, ...], tuple[int, ...]]:
    """Places modules {(layer, linear): (rank, scale)} from the offset `start` on. Returns the spans, and the end of
    each layer's bytes."""
    spans: list[SiteSpan] = []
    ends, offset = [start] * len(plan.layers), start
    for layer in sorted({layer for layer, _ in modules}):
        for group in plan.layers[layer].groups:
            sites = [site for site in group.sites if (layer, site.linear) in modules]
            a_offsets: dict[int, int] = {}
            for linear in dict.fromkeys(site.linear for site in sites):
                a_offsets[linear] = offset
                offset += _matrix_bytes(modules[layer, linear][0], align_up(group.inputs, A_COLUMNS), dtype)
            for site in sites:
                rank, scale = modules[layer, site.linear]
                b_offset, offset = offset, offset + _matrix_bytes(rank, align_up(site.outputs, PANEL), dtype)
                vectors = offset if has_vectors else None
                offsets = a_offsets[site.linear], b_offset, vectors
                spans.append(SiteSpan(layer, site.index, site.linear, rank, scale, *offsets))
                offset += vectors_bytes(site.outputs) if has_vectors else 0
        ends[layer:] = [offset] * (len(ends) - layer)
    return tuple(spans), tuple(ends)


def _lay_out_side(
    plan: DecoderPlan, dtype: Dtype, changes: Iterable[VocabularyChange], side: Side, start: int
) -> tuple[tuple[VocabularySpan, ...], int]:
    """Places the changes of the embedding or of the head from `start` on. Returns the spans, and where they end."""
    spans: list[VocabularySpan] = []
    for change in changes:
        if change.side != side:
            continue
        if change.tokens:
            row, column = align_up(plan.hidden, A_COLUMNS), 0
        elif side == "head":
            row, column = align_up(plan.hidden, A_COLUMNS), align_up(plan.vocab_size, PANEL)
        else:
            row, column = plan.vocab_size, align_up(plan.hidden, PANEL)
        rows = len(change.tokens) or change.rank
        end = start + _matrix_bytes(rows, row, dtype)
        spans.append(VocabularySpan(change, start, end))
        start = end + _matrix_bytes(rows, column, dtype)
    return tuple(spans), start


def _matrix_bytes(rank: int, columns: int, dtype: Dtype) -> int:
    """Returns the bytes of a matrix, up to the start of the next one."""
    return align_up(align_up(rank, RANK_STEP) * columns * dtype.itemsize, ALIGN_BYTES)


def vectors_bytes(outputs: int) -> int:
    """Returns the bytes of a site's factors and biases."""
    return 2 * align_up(outputs, PANEL) * Dtype.F32.itemsize


def stored_a(data: Bytes, span: SiteSpan | VocabularySpan, inputs: int, dtype: Dtype, start: int = 0) -> Array:
    """Returns A [padded rank, padded inputs] in `data`, the bytes of an image from `start` on."""
    return _stored(data, span.a_offset - start, (span.padded_rank, align_up(inputs, A_COLUMNS)), dtype)


def stored_b(data: Bytes, span: SiteSpan | VocabularySpan, outputs: int, dtype: Dtype, start: int = 0) -> Array:
    """Returns B [panels, padded rank, PANEL] in `data`, the bytes of an image from `start` on."""
    return _stored(data, span.b_offset - start, (ceil_div(outputs, PANEL), span.padded_rank, PANEL), dtype)


def stored_columns(data: Bytes, span: VocabularySpan, vocab: int, dtype: Dtype, start: int = 0) -> Array:
    """Returns the embedding's A, transposed [vocab, padded rank], in `data`, the bytes of an image from `start` on."""
    return _stored(data, span.a_offset - start, (vocab, span.padded_rank), dtype)


def stored_vectors(data: Bytes, span: SiteSpan, outputs: int, start: int = 0) -> Array:
    """Returns factors and biases, float32 [2, padded outputs], in `data`, the bytes of an image from `start` on."""
    assert span.vectors_offset is not None
    return _stored(data, span.vectors_offset - start, (2, align_up(outputs, PANEL)), Dtype.F32)


def _stored(data: Bytes, offset: int, shape: tuple[int, ...], dtype: Dtype) -> Array:
    return data[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype.storage).reshape(shape)


def place_a(values: Array, data: Bytes, span: SiteSpan | VocabularySpan, dtype: Dtype, start: int = 0) -> None:
    """Copies A, `values` [rank, in], into `data`, the bytes of an image from `start` on."""
    rank, inputs = values.shape
    stored_a(data, span, inputs, dtype, start)[:rank, :inputs] = values


def place_b(values: Array, data: Bytes, span: SiteSpan | VocabularySpan, dtype: Dtype, start: int = 0) -> None:
    """Copies B, `values` [out, rank] as PEFT stores it, into panels in `data`, the bytes of an image from `start`
    on."""
    outputs, rank = values.shape
    panels, whole = stored_b(data, span, outputs, dtype, start), outputs // PANEL
    panels[:whole, :rank] = values[: whole * PANEL].reshape(whole, PANEL, rank).transpose(0, 2, 1)
    panels[whole:, :rank, : outputs % PANEL] = values[whole * PANEL :].T


def place_vectors(values: Array, data: Bytes, span: SiteSpan, start: int = 0) -> None:
    """Copies factors and biases, `values` [2, out], into `data`, the bytes of an image from `start` on."""
    outputs = values.shape[1]
    stored_vectors(data, span, outputs, start)[:, :outputs] = values


def aligned_bytes(num_bytes: int) -> Bytes:
    """Returns an uninitialised uint8 array whose first byte is 64-byte aligned."""
    raw = np.empty(num_bytes + ALIGN_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGN_BYTES
    return raw[start : start + num_bytes]
