"""How codes become weights in registers: vector code for sixteen outputs, emitted as LLVM IR.

An integer code is masked where it lies in its word and converted, which gives code · 2^position. Powers of two commute
with rounding, so fma(code · 2^position, scale · 2^-position, offset) has the bits of fma(code, scale, offset), without
a shift. (Scales below 2^-100, which no model has, would lose bits.) Values of a table are looked up as bytes and
converted alike if they are small integers or halves of such, and as numbers otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numpy.typing import NDArray

from caraserve.cpu.linear.grouped_layout import Layout
from caraserve.cpu.linear.grouped_scales import Scales
from caraserve.cpu.simd import HAS_PERMUTES, HAS_WIDE_REGISTERS, I32, LANES, VF, VI, emit_fma, emit_rounded, ints
from caraserve.model.dtype import Code, Dtype, decoded
from caraserve.model.formats.grouped import GroupedCodes, Offset, Scale

_SCALE_BITS = {Scale.F16: 11, Scale.BF16: 8, Scale.E8M0: 1, Scale.NESTED: 19, Scale.F32: 24, Scale.E4M3: 24}
_FP8_EXPONENT = -120  # 2^120: a code's value over that of the fp32 number with its exponent and fraction
_UNSHIFTED = {4: 4, 8: 3}  # codes that are converted in their places before a word is shifted
_LOOKS_UP_BYTES = HAS_PERMUTES and not HAS_WIDE_REGISTERS
Place = tuple[int, int]  # of a code in a word: shift to the right, and position then


def _floats(value: float) -> Any:
    return ir.Constant(VF, [value] * LANES)


# --- numbers of codes ---


Emit = Callable[[int], Any]  # (index of a code): a vector


@dataclass(frozen=True, slots=True)
class Numbers:
    """What the codes of a word are turned into: value = (number / 2^position + lowest) / 2^exponent."""

    places: tuple[Place, ...]
    emit: Callable[[Any, Any], Emit]  # (builder, word): emits the number of one code of the word after another
    lowest: float = 0.0
    exponent: int = 0
    at_once: int = 4 if HAS_WIDE_REGISTERS else 2  # vectors of outputs: four registers of sums hide the latency of fma


def numbers_of(kind: GroupedCodes) -> tuple[Numbers, NDArray[np.uint8]]:
    """Returns how codes are decoded, and the number by which each code is stored. Raises ValueError."""
    values, kept = np.array(kind.values, np.float32), np.arange(256, dtype=np.uint8)
    fp8 = decoded(kept, Code.F8_E4M3)  # kernels do not know NaN, which readers refuse
    if kind.bits == 8 and np.array_equal(values[~np.isnan(fp8)], fp8[~np.isnan(fp8)]):
        return Numbers(((0, 0),) * 4, _fp8_numbers, exponent=_FP8_EXPONENT), kept
    order = np.argsort(values, kind="stable")
    if np.array_equal(values[order] - values[order[0]], np.arange(1 << kind.bits)):
        kept[order] = np.arange(1 << kind.bits)
        lowest = float(values[order[0]])
        if kind.bits in (5, 6) and _LOOKS_UP_BYTES:
            # All in one position, codes of a group need one scale: a tenth less time in groups of 16.
            return Numbers(((0, 0),) * 4, lambda b, word: partial(_moved_byte, b, word), lowest, at_once=1), kept
        return _integers(4 if kind.bits == 4 else 8, lowest), kept
    if kind.bits != 4:
        raise ValueError(f"codes of {kind.bits} bits that are no integers have no kernels")
    for exponent in (0, 1):
        doubled = np.ldexp(values, exponent)
        bias = 1 << int(np.ceil(np.log2(max(-float(doubled.min()), 1.0))))
        is_small = np.array_equal(doubled, np.rint(doubled)) and doubled.max() + bias < 256
        if is_small and _LOOKS_UP_BYTES:
            return _small_values((doubled.astype(np.int64) + bias).tolist(), -float(bias), exponent), kept
    if _LOOKS_UP_BYTES:
        # Eight registers of numbers for each of words leave no room for more.
        return Numbers(((0, 0),) * 8, partial(_joined_bytes, kind.values), at_once=1), kept
    look_up = _permuted_wide if HAS_WIDE_REGISTERS else _gathered
    return Numbers(((0, 0),) * 8, lambda b, word: lambda index: look_up(b, kind.values, word, 4 * index)), kept


def _integers(bits: int, lowest: float) -> Numbers:
    count, unshifted = 32 // bits, _UNSHIFTED[bits]
    places = tuple((index // unshifted * unshifted * bits, index % unshifted * bits) for index in range(count))
    return Numbers(places, lambda b, word: lambda index: _converted(b, word, places[index], bits), lowest)


def _moved_byte(b: Any, word: Any, index: int) -> Any:
    """Converts a byte of a word, which one instruction moves to the lowest place."""
    kind, zero = ir.VectorType(ir.IntType(8), 4 * LANES), 4 * LANES
    places = [4 * lane + index if byte == 0 else zero for lane in range(LANES) for byte in range(4)]
    order = ir.Constant(ir.VectorType(I32, zero), places)
    return b.sitofp(b.bitcast(b.shuffle_vector(b.bitcast(word, kind), ir.Constant(kind, [0] * zero), order), VI), VF)


def _every_other(b: Any, word: Any, parity: int) -> Any:
    """Returns the codes of four bits of even or odd index, as bytes."""
    return b.and_(b.lshr(word, ints(4)) if parity else word, ints(0x0F0F0F0F))


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
    shifted = b.lshr(word, ints(shift)) if shift else word
    if position or shift + bits < 32:
        shifted = b.and_(shifted, ints(((1 << bits) - 1) << position))
    return b.sitofp(shifted, VF)


def _small_values(table: Sequence[int], lowest: float, exponent: int) -> Numbers:
    """Looks up four codes of a word at a time, as bytes of which each is converted like a code of eight bits."""
    bytes_of = _integers(8, lowest)

    def emit(b: Any, word: Any) -> Emit:
        four = cache(lambda parity: bytes_of.emit(b, _shuffled_bytes(table, b, _every_other(b, word, parity))))
        return lambda index: four(index % 2)(index // 2)

    places = tuple(place for place in bytes_of.places for _ in range(2))
    return Numbers(places, emit, lowest, exponent)


def _shuffled_bytes(table: Sequence[int], b: Any, indices: Any) -> Any:
    """Replaces each byte of the lanes, 0 to 15, by that of the table."""
    kind = ir.VectorType(ir.IntType(8), 32)
    name = "llvm.x86.avx2.pshuf.b"
    shuffle = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind, kind]), name)
    bytes_of_table = ir.Constant(kind, list(table) * 2)

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


def _joined_bytes(values: Sequence[float], b: Any, word: Any) -> Emit:
    """Looks up each of the four bytes of a number by an instruction for 32 bytes, and joins them: three fifths of the
    time of looking up eight numbers at a time, in two tables of eight."""
    tables = np.array(values, np.float32).view(np.uint8).reshape(-1, 4).T.tolist()
    kind, pairs = (ir.VectorType(ir.IntType(32 // per), per * LANES) for per in (4, 2))

    @cache
    def numbers(parity: int) -> list[Any]:
        codes = b.bitcast(_every_other(b, word, parity), kind)
        by_code = [4 * lane + code for code in range(4) for lane in range(4)]  # instead of by output
        codes = b.bitcast(_in_quarters(b, codes, codes, by_code), VI)
        first, second, third, fourth = (b.bitcast(_shuffled_bytes(table, b, codes), kind) for table in tables)
        found = []
        for half in (0, 1):
            low = b.bitcast(_interleaved(b, first, second, half), pairs)
            high = b.bitcast(_interleaved(b, third, fourth, half), pairs)
            found += [b.bitcast(_interleaved(b, low, high, code), VF) for code in (0, 1)]
        return found

    return lambda index: numbers(index % 2)[index // 2]


def _interleaved(b: Any, one: Any, other: Any, half: int) -> Any:
    """Returns elements of two vectors in turn: those of the lower or upper half of each 128 bits."""
    count = one.type.count // 4
    from_half = range(half * count // 2, (half + 1) * count // 2)
    return _in_quarters(b, one, other, [place for index in from_half for place in (index, count + index)])


def _in_quarters(b: Any, one: Any, other: Any, order: Sequence[int]) -> Any:
    """Orders the elements of each 128 bits of two vectors, as an instruction does."""
    count = one.type.count // 4
    places = [part * count + place % count + place // count * 4 * count for part in range(4) for place in order]
    return b.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, len(places)), places))


def _permuted_wide(b: Any, values: Sequence[float], word: Any, position: int) -> Any:
    shifted = b.lshr(word, ints(position)) if position else word  # the instruction reads the low four bits of a lane
    name = "llvm.x86.avx512.permvar.sf.512"
    permute = cgutils.get_or_insert_function(b.module, ir.FunctionType(VF, [VF, VI]), name)
    return b.call(permute, [ir.Constant(VF, list(values)), shifted])


def _gathered(b: Any, values: Sequence[float], word: Any, position: int) -> Any:
    kind = ir.ArrayType(VF.element, 16)
    table = cgutils.global_constant(b, "table", ir.Constant(kind, list(values)))
    result = ir.Constant(VF, ir.Undefined)
    for lane in range(LANES):
        code = b.and_(b.lshr(b.extract_element(word, I32(lane)), I32(position)), I32(15))
        result = b.insert_element(result, b.load(b.gep(table, [I32(0), code])), I32(lane))
    return result


def _fp8_numbers(b: Any, word: Any) -> Emit:
    """Shifts the exponents and fractions of two bytes at a time to their places in the upper half of fp32, below the
    sign."""
    kind = ir.VectorType(ir.IntType(16), 2 * LANES)

    def const(value: int) -> Any:
        return ir.Constant(kind, [value] * 2 * LANES)

    @cache
    def halves(parity: int) -> Any:
        signed = b.bitcast(word, kind) if parity else b.shl(b.bitcast(word, kind), const(8))
        return b.bitcast(b.and_(b.ashr(signed, const(4)), const(-0x7810)), VI)

    def number(index: int) -> Any:
        two = halves(index % 2)
        return b.bitcast(b.and_(two, ints(-0x10000)) if index >= 2 else b.shl(two, ints(16)), VF)

    return number


# --- weights ---


@dataclass(frozen=True, slots=True)
class Step:
    """Consecutive inputs of a chunk whose weights are decoded together."""

    words: tuple[int, ...]  # of the chunk
    inputs: int
    emit: Callable[[Any, Sequence[Any], Sequence[Any]], Emit]  # (builder, words, constants): emits weights


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
        self.at_once = self._numbers.at_once
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

    def _of_word(self, b: Any, words: Sequence[Any], constants: Sequence[Any]) -> Emit:
        numbers, places = self._numbers.emit(b, words[0]), self._numbers.places
        return lambda index: self._weight(b, numbers(index), places[index][1], constants)

    def _of_joined(self, word: int, b: Any, words: Sequence[Any], constants: Sequence[Any]) -> Emit:
        @cache
        def four(parity: int) -> Emit:
            return self._of_word(b, [emit_joined(b, words[0], words[1], word, parity, self.layout.high)], constants)

        return lambda index: four(index % 2)(index // 2)

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
