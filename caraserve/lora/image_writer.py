"""Writes what an adapter is made of into its image. Every value is applied exactly, or the adapter is refused."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from caraserve.core.lora_layout import (
    A_COLUMNS,
    AdapterSpec,
    Array,
    Bytes,
    Module,
    SiteSpan,
    place_a,
    place_b,
    place_vectors,
)
from caraserve.core.score_head import MAX_HEAD_WEIGHT
from caraserve.errors import AdapterRejected
from caraserve.lora.adapted_modules import AdaptedModule
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.base_copies import BaseCopy
from caraserve.lora.kinds import MATRICES, VECTORS, AdapterKind, KindWithVectors
from caraserve.lora.kinds.lora import Lora
from caraserve.lora.vocabulary import ChangedMatrix, VocabularyWriter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import NAMES, Dtype, rounded, to_float32, value_of
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up

# Of A's and B's product with the scale, for inputs of 1: what is larger overflows where it is squared, in norms and
# attention. The adapters of the demo reach 500.
LARGEST_UPDATE = 1e18


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors of an adapter's file, and the image that they become."""

    plan: DecoderPlan
    kind: AdapterKind
    modules: Mapping[Module, AdaptedModule]
    spec: AdapterSpec  # without digest, which follows from the bytes
    file: AdapterTensors
    copies: tuple[BaseCopy, ...]  # of the base model's tensors, which must be equal
    notes: tuple[str, ...]  # what is left out, for the log
    vocabulary: tuple[ChangedMatrix, ...]  # in the order of the spec's
    base: BaseTensors | None  # None: there is none
    head: str | None = None  # the tensor of the score head


class ImageWriter:
    """Writes what an adapter's modules are made of, A, B and vectors, into its image, in any order."""

    def __init__(self, layout: TensorLayout) -> None:
        self._file, self._layout = layout.file, layout
        self._largest: dict[Module, dict[str, float]] = {}  # absolute values, of what was written
        self._spans: dict[Module, list[SiteSpan]] = {}
        for span in layout.spec.spans:
            self._spans.setdefault(span.module, []).append(span)
        self._vocabulary = VocabularyWriter(self._file, layout.vocabulary, layout.spec.vocabulary, layout.plan)
        # The adapted modules, and the changes of the embedding and the head, by layer.
        self.modules = sorted((*self._spans, *self._vocabulary.modules), key=lambda module: module[0])
        self._by_layer = {layer: list(found) for layer, found in groupby(self.modules, lambda module: module[0])}

    @property
    def layer_ends(self) -> tuple[int, ...]:
        """Where the bytes of each layer end in the image."""
        return self._layout.spec.layer_ends

    def modules_of(self, layers: range) -> list[Module]:
        """Returns the adapted modules, and the changes of the embedding and the head, of some layers, by layer."""
        return [module for layer in layers for module in self._by_layer.get(layer, ())]

    def pieces(self, module: Module) -> tuple[str, ...]:
        """Returns what is written of a module."""
        return MATRICES if module in self._vocabulary.modules else tuple(self._layout.kind.sources)

    def end(self, module: Module, piece: str) -> int:
        """Returns where the last of a piece's tensors ends in the file."""
        if module in self._vocabulary.modules:
            return self._file.end(self._vocabulary.source(module, piece))
        return max(self._file.end(tensor) for tensor in self._sources(module, piece).values())

    def write(self, module: Module, piece: str, data: Bytes, start: int = 0) -> None:
        """Writes one of a module's `pieces` to `data`, the bytes of the image from `start` on, which must be zero.
        Raises AdapterRejected for values that are not finite or whose results would not be, and TensorFileError."""
        if module in self._vocabulary.modules:
            self._write_vocabulary(module, piece, data, start)
            return
        dtype, spans, (layer, _) = self._layout.spec.dtype, self._spans[module], module
        values, largest = self._vectors(module) if piece == VECTORS else self._values(module, piece)
        if (written := self._written(module, piece, largest)) is not None:
            self._check_results(module, written)
        if piece == "A":
            place_a(values, data, spans[0], dtype, start)
            return
        linear, moes = self._linear(module), self._layout.plan.layers[layer].moes
        if piece == VECTORS and values[1].any() and any(moe.gates_shared and moe.out is linear for moe in moes):
            raise AdapterRejected(
                f"{linear.module}: a bias of this module is multiplied by the shared expert's gate, which is not "
                "computed; train the adapter without lora_bias on it"
            )
        parts, sites = linear.parts, self._layout.plan.layers[layer].sites
        for span in spans:
            index = parts[sites[span.site].part].index
            if piece == VECTORS:
                place_vectors(values[:, index], data, span, start)
            else:
                place_b(values[index], data, span, dtype, start)

    def copies(self, module: Module, piece: str) -> list[tuple[int, ...]]:
        """Returns the rows of `MATRIX_COPY` by which one of a module's `pieces` gets into the image: one for A, one for
        each site of B. Empty: `write` must convert the values. Raises TensorFileError."""
        kind, spec = self._layout.kind, self._layout.spec
        is_stored = type(kind).matrix is Lora.matrix and not kind.is_computed
        if not is_stored or piece not in MATRICES or module not in self._spans:
            return []
        (tensor,) = self._sources(module, piece).values()
        linear, rank, size = self._linear(module), self._spans[module][0].rank, spec.dtype.itemsize
        shape = (rank, linear.inputs) if piece == "A" else (linear.outputs, rank)
        place = self._file.place(tensor)
        if place is None or self._file.dtype(tensor) is not spec.dtype or self._file.shape(tensor) != shape:
            return []
        if piece == "A":
            stride = align_up(linear.inputs, A_COLUMNS)
            return [(*place, *shape, size, self._spans[module][0].a_offset, stride, 0)]
        found = list[tuple[int, ...]]()
        sites = self._layout.plan.layers[module[0]].sites
        for span in self._spans[module]:
            rows = linear.parts[sites[span.site].part].rows
            if not isinstance(rows, range) or rows.step != 1:
                return []
            offset = place.offset + rows.start * rank * size
            found.append((place.descriptor, offset, len(rows), rank, size, span.b_offset, span.padded_rank, 1))
        return found

    def copied(self, module: Module, piece: str, bits: int) -> bool:
        """Notes a piece that was written as `copies` says. `bits`: the largest, without a sign. Returns False if a
        value is not finite: `write` says which tensor has it. Raises AdapterRejected as `write`."""
        largest = value_of(bits, self._layout.spec.dtype)
        if not math.isfinite(largest):
            return False
        if (written := self._written(module, piece, largest)) is not None:
            self._check_results(module, written)
        return True

    def _written(self, module: Module, piece: str, largest: float) -> Mapping[str, float] | None:
        """Notes the largest value of a piece. Returns those of all pieces of the module with its last one."""
        written = self._largest.setdefault(module, {})
        written[piece] = largest
        return self._largest.pop(module) if len(written) == len(self.pieces(module)) else None

    def finished(self) -> AdapterSpec:
        """Returns the spec with the score head's numbers, without digest, once all has been written. Raises
        AdapterRejected and TensorFileError."""
        spec, tensor = self._layout.spec, self._layout.head
        if spec.head is not None and tensor is not None:
            values, largest = _finite(self._file, tensor, spec.head.dtype)
            if largest > MAX_HEAD_WEIGHT:
                raise AdapterRejected(
                    f"tensor {tensor} has {largest:.0e}; with weights above {MAX_HEAD_WEIGHT:.0e} scores overflow"
                )
            spec = replace(spec, head=replace(spec.head, data=values.tobytes()))
        return spec

    def values(self, module: Module, matrix: str) -> Array:
        """Returns one of `MATRICES` in the adapter's dtype: A [rank, inputs] or B [outputs, rank]. Raises as
        `write`."""
        return self._values(module, matrix)[0]

    def _write_vocabulary(self, module: Module, matrix: str, data: Bytes, start: int) -> None:
        dtype, vocabulary = self._layout.spec.dtype, self._vocabulary
        change, tensor = vocabulary.change(module), vocabulary.source(module, matrix)
        values, largest = _finite(self._file, tensor, dtype, vocabulary.rows(module))
        written = self._written(module, matrix, largest)
        if written is not None and change.rank:
            a, b = (vocabulary.source(module, one) for one in MATRICES)
            product = abs(change.scale) * change.rank * vocabulary.inputs(module) * written["A"] * written["B"]
            check_update(product, f"tensors {a} and {b}: with the scale {change.scale:.3g} their product")
        vocabulary.write(module, matrix, values, data, dtype, start)

    def _linear(self, module: Module) -> LinearPlan:
        layer, linear = module
        return self._layout.plan.layers[layer].linears[linear]

    def _sources(self, module: Module, piece: str) -> dict[str, str]:
        tensors = self._layout.modules[module].tensors
        return {name: tensors[name] for name in self._layout.kind.sources[piece]}

    def _values(self, module: Module, matrix: str) -> tuple[Array, float]:
        """Returns a matrix in the adapter's dtype, and its largest absolute value."""
        kind, dtype = self._layout.kind, self._layout.spec.dtype
        exact = Dtype.F32 if kind.is_computed else dtype
        read = {name: _finite(self._file, tensor, exact) for name, tensor in self._sources(module, matrix).items()}
        values = kind.matrix(matrix, {name: tensor for name, (tensor, _) in read.items()}, self._linear(module))
        if not kind.is_computed:
            return values, max(largest for _, largest in read.values())
        stored = _rounded(values, dtype, f"module {self._linear(module).module}")
        return stored, _largest(stored, dtype)

    def _vectors(self, module: Module) -> tuple[Array, float]:
        """Returns factors and biases, float32 [2, outputs], and the largest absolute value of these."""
        kind, base, f32 = self._layout.kind, self._layout.base, Dtype.F32
        assert isinstance(kind, KindWithVectors)
        read = {name: _finite(self._file, tensor, f32)[0] for name, tensor in self._sources(module, VECTORS).items()}
        tensors = {name: to_float32(values, f32) for name, values in read.items()}
        linears, scale = None if base is None else base.linears, self._layout.modules[module].scale
        with np.errstate(over="ignore"):  # `_check_results` refuses what is not finite
            values = kind.vectors(tensors, scale, self._linear(module), linears)
        return values, _largest(values, f32)

    def _check_results(self, module: Module, largest: Mapping[str, float]) -> None:
        """Raises AdapterRejected for a module whose results would not be finite. `largest`: absolute values, by
        piece."""
        kind, adapted = self._layout.kind, self._layout.modules[module]
        product = abs(adapted.scale) * adapted.rank * self._linear(module).inputs * largest["A"] * largest["B"]
        (a, *_), (b, *_) = (kind.sources[matrix] for matrix in MATRICES)
        check_update(product, f"tensors {adapted.tensors[a]} and {b}: with the scale {adapted.scale:.3g} their product")
        if VECTORS in largest:
            (vector, *_) = kind.sources[VECTORS]
            check_update(max(product, 1.0) * largest[VECTORS], f"tensor {adapted.tensors[vector]}: a result")


def check_update(largest: float, what: str) -> None:
    """Raises AdapterRejected if the largest absolute value that something may reach is too large."""
    if not largest <= LARGEST_UPDATE:  # nor NaN
        raise AdapterRejected(
            f"{what} may reach {largest:.0e}; above {LARGEST_UPDATE:.0e}, what is computed with it is not finite"
        )


def _finite(file: AdapterTensors, name: str, dtype: Dtype, rows: Sequence[int] | None = None) -> tuple[Array, float]:
    """Returns a tensor, or some of its rows, in the adapter's dtype, and the largest absolute value. Raises
    AdapterRejected if a value is not finite."""
    raw = file.raw(name) if rows is None else np.concatenate([file.rows(name, row, row + 1) for row in rows])
    source = file.dtype(name)
    largest = _largest(raw, source)
    if not math.isfinite(largest):
        raise AdapterRejected(f"tensor {name} has values that are not finite")
    if source is dtype:
        return raw, largest
    values = _rounded(to_float32(raw, source), dtype, f"tensor {name}")
    return values, _largest(values, dtype)


def _rounded(values: Array, dtype: Dtype, what: str) -> Array:
    """Rounds values to a dtype. Raises AdapterRejected if the largest are beyond its range."""
    with np.errstate(over="ignore"):
        stored = rounded(to_float32(values, Dtype.F32), dtype)
    if not math.isfinite(_largest(stored, dtype)):
        raise AdapterRejected(
            f"{what} has values up to {_largest(values, Dtype.F32):.3g}, beyond those of {NAMES[dtype]}, in which "
            "--lora-dtype stores adapters; give --lora-dtype auto"
        )
    return stored


def _largest(raw: Array, dtype: Dtype) -> float:
    """Returns the largest absolute value; not finite if one of the values is not. Without their signs, the bits of
    floats are in the order of the values."""
    if dtype is Dtype.F32:
        return max(float(raw.max()), -float(raw.min()))  # both are NaN if one of the values is
    # The largest of all bits is the largest negative value, if there is one.
    bits = max(int(raw.view(np.uint16).max()) & 0x7FFF, int(raw.view(np.int16).max()))
    return value_of(bits, dtype)
