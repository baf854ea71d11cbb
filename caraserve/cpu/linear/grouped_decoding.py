"""How codes become weights in registers: vector code for sixteen outputs, emitted as LLVM IR.

An integer code is masked where it lies in its word and converted, which gives code · 2^position. Powers of two commute
with rounding, so fma(code · 2^position, scale · 2^-position, offset) has the bits of fma(code, scale, offset), without
a shift. (Scales below 2^-100, which no model has, would lose bits.) Values of a table are looked up as bytes and
converted alike if they are small integers or halves of such, and as numbers otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from caraserve.cpu.linear.grouped_layout import Layout
from caraserve.cpu.linear.grouped_scales import Scales
from caraserve.cpu.simd import HAS_PERMUTES, HAS_WIDE_REGISTERS, I32, LANES, VF, VI, emit_fma, emit_rounded
from caraserve.model.dtype import Code, Dtype, decoded
from caraserve.model.formats.grouped import GroupedCodes, Offset, Scale

_SCALE_BITS = {Scale.F16: 11, Scale.BF16: 8, Scale.E8M0: 1, Scale.NESTED: 19, Scale.F32: 24, Scale.E4M3: 24}
_FP8_EXPONENT = -120  # 2^120: a code's value over that of the fp32 number with its exponent and fraction
_UNSHIFTED = {4: 4, 8: 3}  # codes that are converted in their places before a word is shifted
Place = tuple[int, int]  # of a code in a word: shift to the right, and position then


def _ints(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(VF, [value] * LANES)


# --- numbers of codes ---


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the codes of a word are turned into: value = (number / 2^position + lowest) / 2^exponent."""

    places: tuple[Place, ...]
    emit: Callable[[Any, Any, int], Any]  # (builder, word, index of the code in it): a vector of numbers
    lowest: float = 0.0
    exponent: int = 0


def numbers_of(kind: GroupedCodes) -> tuple[Numbers, NDArray[np.uint8]]:
    """Returns how codes are decoded, and the number by which each code is stored. Raises ValueError."""
    values, kept = np.array(kind.values, np.float32), np.arange(256, dtype=np.uint8)
    fp8 = decoded(kept, Code.F8_E4M3)  # kernels do not know NaN, which readers refuse
    if kind.bits == 8 and np.array_equal(values[~np.isnan(fp8)], fp8[~np.isnan(fp8)]):
        return Numbers(((0, 0),) * 4, _fp8_number, exponent=_FP8_EXPONENT), kept
    order = np.argsort(values, kind="stable")
    if np.array_equal(values[order] - values[order[0]], np.arange(1 << kind.bits)):
        kept[order] = np.arange(1 << kind.bits)
        return _integers(4 if kind.bits == 4 else 8, float(values[order[0]])), kept
    if kind.bits != 4:
        raise ValueError(f"codes of {kind.bits} bits that are no integers have no kernels")
    for exponent in (0, 1):
        doubled = np.ldexp(values, exponent)
        bias = 1 << int(np.ceil(np.log2(max(-float(doubled.min()), 1.0))))
        is_small = np.array_equal(doubled, np.rint(doubled)) and doubled.max() + bias < 256
        if is_small and HAS_PERMUTES and not HAS_WIDE_REGISTERS:
            return _small_values(doubled.astype(np.int64) + bias, -float(bias), exponent), kept
    return Numbers(((0, 0),) * 8, _looked_up(kind.values)), kept


def _integers(bits: int, lowest: float) -> Numbers:
    count, unshifted = 32 // bits, _UNSHIFTED[bits]
    places = tuple((index // unshifted * unshifted * bits, index % unshifted * bits) for index in range(count))
    return Numbers(places, lambda b, word, index: _converted(b, word, places[index], bits), lowest)


def emit_joined(b: Any, low: Any, rest: Any, number: int, parity: int, high: int) -> Any:
    """Returns words of four bytes: the codes of even or odd index of word `number` of a chunk. `low`, `rest`: that word
    and the chunk's last one; `high`: the bits of a code in the latter."""

    def const(value: int) -> Any:
        return ir.Constant(low.type, [value] * low.type.count)

    by = 4 - (2 * number + parity) * high
    moved = b.shl(rest, const(by)) if by > 0 else b.lshr(rest, const(-by)) if by else rest
    fours = b.and_(b.lshr(low, const(4)) if parity else low, const(0x0F0F0F0F))
    return b.or_(fours, b.and_(moved, const(((1 << high) - 1 << 4) * 0x01010101)))


def _converted(b: Any, word: Any, place: Place, bits: int) -> Any:
    shift, position = place
    shifted = b.lshr(word, _ints(shift)) if shift else word
    if position or shift + bits < 32:
        shifted = b.and_(shifted, _ints(((1 << bits) - 1) << position))
    return b.sitofp(shifted, VF)


def _small_values(table: NDArray[np.int64], lowest: float, exponent: int) -> Numbers:
    """Looks up four codes of a word at a time, as bytes of which each is converted like a code of eight bits."""
    bytes_of = _integers(8, lowest)

    def emit(b: Any, word: Any, index: int) -> Any:
        every_other = b.and_(b.lshr(word, _ints(4)) if index % 2 else word, _ints(0x0F0F0F0F))
        return bytes_of.emit(b, _shuffled_bytes(b, table, every_other), index // 2)

    places = tuple(place for place in bytes_of.places for _ in range(2))
    return Numbers(places, emit, lowest, exponent)


def _shuffled_bytes(b: Any, table: NDArray[np.int64], indices: Any) -> Any:
    """Replaces each byte of the lanes, 0 to 15, by that of the table."""
    kind = ir.VectorType(ir.IntType(8), 32)
    name = "llvm.x86.avx2.pshuf.b"
    shuffle = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind, kind]), name)
    bytes_of_table = ir.Constant(kind, [int(value) for value in table] * 2)

    def half(part: Any) -> Any:
        return b.bitcast(b.call(shuffle, [bytes_of_table, b.bitcast(part, kind)]), part.type)

    return _by_halves(b, indices, half)


def _by_halves(b: Any, vector: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function of eight lanes to both halves of a vector."""
    kind, half = ir.VectorType(I32, LANES // 2), LANES // 2
    parts = [
        function(b.shuffle_vector(vector, vector, ir.Constant(kind, list(range(start, start + half)))))
        for start in (0, half)
    ]
    return b.shuffle_vector(*parts, ir.Constant(VI, list(range(LANES))))


def _looked_up(values: Sequence[float]) -> Callable[[Any, Any, int], Any]:
    """Looks codes up in a table of sixteen numbers: in one register, in two, or in memory."""
    look_up = _permuted_wide if HAS_WIDE_REGISTERS else _permuted if HAS_PERMUTES else _gathered

    return lambda b, word, index: look_up(b, values, word, 4 * index)


def _permuted_wide(b: Any, values: Sequence[float], word: Any, position: int) -> Any:
    shifted = b.lshr(word, _ints(position)) if position else word  # the instruction reads the low four bits of a lane
    name = "llvm.x86.avx512.permvar.sf.512"
    permute = cgutils.get_or_insert_function(b.module, ir.FunctionType(VF, [VF, VI]), name)
    return b.call(permute, [ir.Constant(VF, list(values)), shifted])


def _permuted(b: Any, values: Sequence[float], word: Any, position: int) -> Any:
    numbers, integers = ir.VectorType(VF.element, 8), ir.VectorType(I32, 8)
    kind = ir.FunctionType(numbers, [numbers, integers])
    permute = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx2.permps")

    def half(part: Any) -> Any:
        def const(value: int) -> Any:
            return ir.Constant(integers, [value] * 8)

        shifted = b.lshr(part, const(position)) if position else part  # the instruction reads the low three bits
        low, high = (
            b.call(permute, [ir.Constant(numbers, list(eight)), shifted]) for eight in (values[:8], values[8:])
        )
        return b.select(b.icmp_signed("<", b.shl(part, const(28 - position)), const(0)), high, low)

    return _by_halves(b, word, half)


def _gathered(b: Any, values: Sequence[float], word: Any, position: int) -> Any:
    kind = ir.ArrayType(VF.element, 16)
    table = cgutils.global_constant(b, "table", ir.Constant(kind, list(values)))
    result = ir.Constant(VF, ir.Undefined)
    for lane in range(LANES):
        code = b.and_(b.lshr(b.extract_element(word, I32(lane)), I32(position)), I32(15))
        result = b.insert_element(result, b.load(b.gep(table, [I32(0), code])), I32(lane))
    return result


def _fp8_number(b: Any, word: Any, index: int) -> Any:
    """Shifts the exponent and the fraction of a byte to their places in fp32, below its sign."""
    position = 8 * index
    sign = b.and_(b.shl(word, _ints(24 - position)) if position < 24 else word, _ints(-0x80000000))
    shifted = b.shl(word, _ints(20 - position)) if position < 20 else b.lshr(word, _ints(position - 20))
    return b.bitcast(b.or_(b.and_(shifted, _ints(0x7F << 20)), sign), VF)


# --- weights ---


@dataclass(frozen=True, slots=True)
class Step:
    """Consecutive inputs of a chunk whose weights are decoded together."""

    words: tuple[int, ...]  # of the chunk
    inputs: int
    emit: Callable[[Any, Sequence[Any], Sequence[Any], int], Any]  # (builder, words, constants, index of the input)


class Decoder:
    """Emits the weights of one kind of codes. `constants`: how many vectors a group has: a scale for each position of
    codes in a word, and the offset."""

    def __init__(self, kind: GroupedCodes) -> None:
        self.layout, self._kind, self._scales = Layout.of(kind), kind, Scales(kind)
        self._numbers, self.renumbered = numbers_of(kind)
        self.lowest, self.exponent = self._numbers.lowest, self._numbers.exponent
        self.has_integers = bool(np.array_equal(np.sort(kind.values) - min(kind.values), np.arange(len(kind.values))))
        self._positions = sorted({position for _, position in self._numbers.places})
        self.constants = len(self._positions) + 1
        is_exact = all(float(value).is_integer() for value in kind.values)
        # Where a product of value and scale is exact, one rounding gives what two give, which the reference has.
        self._fuses = is_exact and kind.bits + _SCALE_BITS[kind.scale] <= 24
        lowest = -self._numbers.lowest
        # scale · lowest is exact if `lowest` is a power of two, and may be added in the place of an offset.
        self._folds = kind.offset is Offset.NONE and lowest > 0 and float(np.exp2(np.rint(np.log2(lowest)))) == lowest

    def emit_constants(self, b: Any, panel: Any, above: Any, group: Any, lane: Any) -> list[Any]:
        """Returns the constants of a group; arguments as in `Scales.scale`."""
        scale = self._scales.scale(b, panel, above, group, lane)
        added = self._scales.offset(b, above, group, lane, scale)
        if added is None:
            added = b.fmul(scale, _floats(self._numbers.lowest * 2.0**-self._numbers.exponent))
        factors = (2.0 ** -(position + self._numbers.exponent) for position in self._positions)
        return [scale if factor == 1.0 else b.fmul(scale, _floats(factor)) for factor in factors] + [added]

    def steps(self) -> list[Step]:
        """Returns the steps of a chunk, in the order of inputs."""
        last = self.layout.words - 1
        if not self.layout.high:
            return [Step((word,), len(self._numbers.places), self._of_word) for word in range(last + 1)]
        return [Step((word, last), 8, partial(self._of_joined, word)) for word in range(last)]

    def _of_word(self, b: Any, words: Sequence[Any], constants: Sequence[Any], index: int) -> Any:
        number, (_, position) = self._numbers.emit(b, words[0], index), self._numbers.places[index]
        return self._weight(b, number, position, constants)

    def _of_joined(self, word: int, b: Any, words: Sequence[Any], constants: Sequence[Any], index: int) -> Any:
        joined = emit_joined(b, words[0], words[1], word, index % 2, self.layout.high)
        return self._of_word(b, [joined], constants, index // 2)

    def _weight(self, b: Any, number: Any, position: int, constants: Sequence[Any]) -> Any:
        """Returns rounded(fma(value, scale, offset))."""
        scale, added, lowest = constants[self._positions.index(position)], constants[-1], self._numbers.lowest
        if self._folds:
            weight = emit_fma(b, number, scale, added)
        else:
            value = b.fadd(number, _floats(lowest * 2.0**position)) if lowest else number
            if self._kind.offset is Offset.NONE:
                weight = b.fmul(value, scale)
            else:
                weight = emit_fma(b, value, scale, added) if self._fuses else b.fadd(b.fmul(value, scale), added)
        rounds = {Dtype.F16: 2, Dtype.BF16: 1}.get(self._kind.rounds_to or Dtype.F32)
        return weight if rounds is None else emit_rounded(b, weight, rounds)
