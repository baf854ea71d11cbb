"""The inner loops over grouped codes: a row times a panel, and a panel's weights, emitted as LLVM IR.

Addresses are integers. `constants` are those of a group, fp32 [4, constants, 16]: for each sixteen outputs of a panel.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from numba.core import cgutils

from caraserve.core.lora_layout import PANEL
from caraserve.cpu.linear.grouped_decoding import Decoder
from caraserve.cpu.simd import (
    DTYPE_F32,
    LANES,
    VF,
    VI,
    emit_fma,
    emit_load,
    emit_load_splat,
    emit_prefetch,
    emit_store,
    i64,
    make_void_intrinsic,
    offset,
    pointer,
)

_VECTORS = PANEL // LANES
_VECTOR_BYTES = 4 * LANES
_PREFETCH_BYTES = 2048  # ahead of a single row's codes
_PREFETCHED_BITS = (6, 8)  # whose rows then take about a tenth less time; those of 4 and 5 bits do not


def constants_bytes(decoder: Decoder) -> int:
    """Returns the bytes of a group's constants."""
    return _VECTORS * decoder.constants * _VECTOR_BYTES


def constants_tile(decoder: Decoder) -> Any:
    """Intrinsic `(panel, above, group, constants)`: writes the constants of the group at `group`. `panel`, `above`:
    addresses of its panel and of the scales of its super group."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        panel, above, group, to = arguments
        with cgutils.for_range(b, i64(_VECTORS)) as loop:
            vectors = decoder.emit_constants(b, panel, above, group, b.mul(loop.index, i64(LANES)))
            at = offset(b, to, b.mul(loop.index, i64(decoder.constants * _VECTOR_BYTES)))
            for index, vector in enumerate(vectors):
                emit_store(b, vector, offset(b, at, i64(index * _VECTOR_BYTES)))

    return make_void_intrinsic("grouped_constants", 4, emit)


class _Chunk:
    """The words of a chunk for some vectors of sixteen outputs, and the constants of their group."""

    def __init__(
        self, b: Any, decoder: Decoder, codes: Any, vectors: Sequence[Any], constants: Sequence[Sequence[Any]]
    ) -> None:
        self._b, self._decoder, self._constants = b, decoder, constants
        self._codes = [offset(b, codes, b.mul(vector, i64(_VECTOR_BYTES))) for vector in vectors]

    def weights(self) -> Iterator[list[Any]]:
        """Emits the weights of one input after another: yields a vector for each sixteen outputs."""
        b = self._b
        for step in self._decoder.steps():
            emitters = [
                step.emit(b, [self._word(at, word) for word in step.words], constants)
                for at, constants in zip(self._codes, self._constants, strict=True)
            ]
            for index in range(step.inputs):
                yield [emit(index) for emit in emitters]

    def prefetch(self, ahead_bytes: int) -> None:
        """Emits prefetches of the words that lie so far ahead."""
        for at in self._codes:
            for word in range(self._decoder.layout.words):
                emit_prefetch(self._b, offset(self._b, at, i64(ahead_bytes + 4 * PANEL * word)))

    def _word(self, at: Any, word: int) -> Any:
        value = self._b.load(pointer(self._b, offset(self._b, at, i64(4 * PANEL * word)), VI))
        value.align = 4
        return value


def row_tile(decoder: Decoder) -> Any:
    """Intrinsic `(panel, above, group, codes, x, chunks, sums)`: `sums[64] += x · weights` over the inputs of some
    chunks of a group, in order. The first three are those of `constants_tile`."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        panel, above, group, codes, x, chunks, sums = arguments
        layout, at_once = decoder.layout, decoder.at_once
        for_range = cgutils.for_range
        with for_range(b, i64(_VECTORS // at_once)) as passes:
            vectors = [b.add(b.mul(passes.index, i64(at_once)), i64(index)) for index in range(at_once)]
            constants = [
                decoder.emit_constants(b, panel, above, group, b.mul(vector, i64(LANES))) for vector in vectors
            ]
            places = [offset(b, sums, b.mul(vector, i64(_VECTOR_BYTES))) for vector in vectors]
            totals = [cgutils.alloca_once(b, VF) for _ in vectors]
            for total, place in zip(totals, places, strict=True):
                b.store(emit_load(b, place, DTYPE_F32), total)
            with for_range(b, chunks) as loop:
                at = offset(b, codes, b.mul(loop.index, i64(layout.chunk)))
                chunk = _Chunk(b, decoder, at, vectors, constants)
                inputs = offset(b, x, b.mul(loop.index, i64(4 * layout.inputs)))
                if layout.bits in _PREFETCHED_BITS:
                    chunk.prefetch(_PREFETCH_BYTES)
                for index, weights in enumerate(chunk.weights()):
                    splat = emit_load_splat(b, offset(b, inputs, i64(4 * index)))
                    for weight, total in zip(weights, totals, strict=True):
                        b.store(emit_fma(b, splat, weight, b.load(total)), total)
            for total, place in zip(totals, places, strict=True):
                emit_store(b, b.load(total), place)

    return make_void_intrinsic("grouped_row", 7, emit)


def weights_tile(decoder: Decoder) -> Any:
    """Intrinsic `(codes, constants, chunks, y)`: writes the weights of some chunks of a group, fp32 [inputs, 64]."""

    def emit(b: Any, arguments: Sequence[Any]) -> None:
        codes, constants, chunks, y = arguments
        layout = decoder.layout
        with cgutils.for_range(b, chunks) as loop, cgutils.for_range(b, i64(_VECTORS)) as vectors:
            at = offset(b, codes, b.mul(loop.index, i64(layout.chunk)))
            row = offset(b, y, b.mul(loop.index, i64(4 * PANEL * layout.inputs)))
            row = offset(b, row, b.mul(vectors.index, i64(_VECTOR_BYTES)))
            held = offset(b, constants, b.mul(vectors.index, i64(decoder.constants * _VECTOR_BYTES)))
            places = (offset(b, held, i64(index * _VECTOR_BYTES)) for index in range(decoder.constants))
            numbers = [emit_load(b, place, DTYPE_F32) for place in places]
            for index, (weight,) in enumerate(_Chunk(b, decoder, at, [vectors.index], [numbers]).weights()):
                emit_store(b, weight, offset(b, row, i64(4 * PANEL * index)))

    return make_void_intrinsic("grouped_weights", 4, emit)
