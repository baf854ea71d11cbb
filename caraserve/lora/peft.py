"""Reads an adapter's folder into an image in host memory. Every tensor is applied exactly, or the folder is refused.

A folder is inspected when it is registered (`catalog.py`), and read when a request needs it (`host_loader.py`).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from caraserve.core.lora_layout import (
    AdapterSpec,
    Array,
    Bytes,
    HostAdapter,
    Module,
    SiteSpan,
    aligned_bytes,
    place_a,
    place_b,
    place_vectors,
)
from caraserve.core.score_head import MAX_HEAD_WEIGHT
from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.lora.adapted_modules import AdaptedModule, adapted_modules, find_tensors
from caraserve.lora.adapter import files_changed
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.base_copies import BaseCopy, check_copies, check_saved_modules
from caraserve.lora.expert_tensors import refuse_experts
from caraserve.lora.folder_contents import TEMPLATE_TEXTS, TENSORS_NAME, files_of
from caraserve.lora.kinds import MATRICES, VECTORS, AdapterKind, KindWithVectors
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.lora.peft_config import PeftConfig, parse_config
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.lora.score_heads import head_layout, head_tensor
from caraserve.lora.vocabulary import ChangedMatrix, VocabularyWriter, differing_rows, is_whole_matrix, vocabulary_of
from caraserve.lora.writers import open_adapter
from caraserve.lora.writers.stored_adapter import StoredAdapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import NAMES, Dtype, rounded, to_float32
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan

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

    @property
    def modules(self) -> list[Module]:
        """The adapted modules, and the changes of the embedding and the head, by layer."""
        return sorted((*self._spans, *self._vocabulary.modules), key=lambda module: module[0])

    def modules_by_layer(self) -> dict[int, list[Module]]:
        """Returns the adapted modules, and the changes of the embedding and the head, by layer."""
        return {layer: list(modules) for layer, modules in groupby(self.modules, lambda module: module[0])}

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

    def _written(self, module: Module, piece: str, largest: float) -> Mapping[str, float] | None:
        """Notes the largest value of a piece. Returns those of all pieces of the module with its last one."""
        written = self._largest.setdefault(module, {})
        written[piece] = largest
        return self._largest.pop(module) if len(written) == len(self.pieces(module)) else None

    def finished(self, hashes: Sequence[bytes]) -> AdapterSpec:
        """Returns the spec with the score head's numbers and with the digest, once all has been written. Raises
        AdapterRejected and TensorFileError."""
        spec, tensor = self._layout.spec, self._layout.head
        if spec.head is not None and tensor is not None:
            values, largest = _finite(self._file, tensor, spec.head.dtype)
            if largest > MAX_HEAD_WEIGHT:
                raise AdapterRejected(
                    f"tensor {tensor} has {largest:.0e}; with weights above {MAX_HEAD_WEIGHT:.0e} scores overflow"
                )
            spec = replace(spec, head=replace(spec.head, data=values.tobytes()))
        return identified(spec, hashes)

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


def inspect_adapter(
    folder: Path,
    plan: DecoderPlan,
    base: BaseTensors | None = None,
    note: Callable[[str], None] = lambda text: None,
    *,
    dtype: Dtype | None = None,
) -> AdapterSpec:
    """Checks an adapter's configuration and tensors, and computes its digest. `base`: the base model's tensors, with
    which those in the adapter's file are compared; without, these are refused. `note`: called with what is left out.
    `dtype`: of the image, as in `specify`. Raises AdapterRejected, or ServerBusy if they cannot be checked now."""
    with opened(folder, plan) as adapter:
        layout = specify(adapter, plan, base, dtype=dtype)
        check_copies(layout.copies, layout.file, base)
        ends = layout.spec.layer_ends
        layer = aligned_bytes(max(end - start for start, end in pairwise((0, *ends))))
        spec = _fill(layout, lambda start, end: layer[: end - start])
        for text in layout.notes:
            note(text)
        return spec


def check_layout(folder: Path, plan: DecoderPlan, base: BaseTensors | None = None) -> AdapterSpec:
    """Checks an adapter's configuration, and the names and shapes of its tensors, and returns its layout without a
    digest. Reads what `specify` does. Raises as `inspect_adapter`."""
    with opened(folder, plan) as adapter:
        return specify(adapter, plan, base).spec


def read_adapter(
    folder: Path, plan: DecoderPlan, into: Bytes, base: BaseTensors | None = None, *, dtype: Dtype | None = None
) -> HostAdapter:
    """Reads and checks a whole adapter, which `inspect_adapter` has accepted, into `into`. Raises AdapterRejected
    naming the field or tensor."""

    with opened(folder, plan) as adapter:
        layout = _layout(parse_config(adapter.fields, plan), adapter.tensors, plan, base, dtype=dtype)
        if layout.spec.num_bytes > into.nbytes:
            raise files_changed()
        spec = _fill(layout, lambda start, end: into[start:end])
        return HostAdapter(spec, into[: spec.num_bytes])


def _fill(layout: TensorLayout, room: Callable[[int, int], Bytes]) -> AdapterSpec:
    """Writes the image layer after layer; `room(start, end)` returns the memory of a layer. Returns the spec with its
    digest."""
    writer, hasher = ImageWriter(layout), ChunkHasher(layout.spec.layer_ends)
    modules = writer.modules_by_layer()
    for layer, (start, end) in enumerate(pairwise((0, *layout.spec.layer_ends))):
        data = room(start, end)
        data[:] = 0
        for module in modules.get(layer, ()):
            for piece in writer.pieces(module):
                writer.write(module, piece, data, start)
        hasher.update(data.data)
    return writer.finished(hasher.hashes)


def resolve_adapter_path(path: str, roots: Sequence[Path]) -> Path:
    """Returns the adapter folder at `path`. A relative path is looked up in each root, in order; the folder and its
    files must lie inside one of the roots.

    Raises Forbidden when there are no roots, AdapterRejected when the folder lies outside, NotFound when there is none.
    """
    if not roots:
        raise Forbidden(
            "adapters are loaded at run time only from folders that the server was started with: "
            "--adapters-dir DIR or --allow-adapter-path ROOT"
        )
    if "\0" in path or len(path) > 4096:
        raise AdapterRejected("lora_path is not a path", param="lora_path")
    missing = NotFound(f"no adapter folder at {path[:200]!a}", param="lora_path")
    allowed = [root.resolve() for root in roots]
    outside = " or ".join(str(root) for root in allowed)

    def is_allowed(place: Path) -> bool:
        return any(place.is_relative_to(root) for root in allowed)

    try:
        places = [(root / path).resolve() for root in allowed]
        folder = next((place for place in places if is_allowed(place) and place.is_dir()), None)
    except (OSError, RuntimeError, ValueError):  # the name is too long, a loop of links, or not text
        raise missing from None
    if not any(map(is_allowed, places)):
        raise AdapterRejected(f"lora_path lies outside {outside}, from where adapters may be loaded", param="lora_path")
    if folder is None:
        raise missing
    for name in (CONFIG_NAME, TENSORS_NAME, *files_of(folder), *TEMPLATE_TEXTS):
        if not is_allowed((folder / name).resolve()):
            raise AdapterRejected(f"{name} is a link that leads outside {outside}", param="lora_path")
    return folder


@contextmanager
def opened(folder: Path, plan: DecoderPlan) -> Iterator[StoredAdapter]:
    """Opens an adapter's files, which must not change in the meantime. Raises AdapterRejected."""
    try:
        with open_adapter(folder, plan) as adapter:
            yield adapter
            adapter.tensors.check_unchanged()
    except TensorFileError as error:
        raise AdapterRejected(str(error)) from None


class WholeFileNeeded(Exception):
    """The error of an adapter that is still arriving, and whose layout depends on values in its file."""


def specify(
    adapter: StoredAdapter,
    plan: DecoderPlan,
    base: BaseTensors | None = None,
    *,
    dtype: Dtype | None = None,
    is_arriving: bool = False,
) -> TensorLayout:
    """Returns the layout of an adapter's tensors in the file and in the image. `dtype`: of the image; None: the one in
    which no value is rounded. Reads no tensor but a whole embedding or head, which is compared with the base model's.
    Raises AdapterRejected, ServerBusy if the configuration's regular expressions cannot be matched now, or
    WholeFileNeeded if the file `is_arriving`."""
    refuse_experts(adapter.tensors, plan)
    config = parse_config(adapter.fields, plan)
    layout = _layout(config, adapter.tensors, plan, base, dtype=dtype, is_arriving=is_arriving)
    names = [name for module in sorted(layout.modules) for name in layout.modules[module].names]
    config.check_patterns((*names, *(one.module for one in layout.vocabulary if one.change.rank)))
    return layout


def _layout(
    config: PeftConfig,
    file: AdapterTensors,
    plan: DecoderPlan,
    base: BaseTensors | None,
    *,
    dtype: Dtype | None,
    is_arriving: bool = False,
) -> TensorLayout:
    """As `specify`, but matches no regular expressions: they change nothing in the layout."""
    found = find_tensors(file, config.kind, plan, base)
    check_saved_modules(config.saved, found.copies)
    whole = [copy for copy in found.copies if is_whole_matrix(copy, plan)]
    if whole and is_arriving:
        raise WholeFileNeeded
    differing = differing_rows(whole, file, config, plan, base) if base is not None else []
    vocabulary = vocabulary_of(file, found.vocabulary, differing, config, plan)
    copies = tuple(copy for copy in found.copies if copy not in whole)
    file, modules = adapted_modules(file, found, config, plan)
    of_matrices = {name for matrix in MATRICES for name in config.kind.sources[matrix]}
    tensors = [module.tensors[name] for module in modules.values() for name in of_matrices]
    dtypes = {file.dtype(tensor) for tensor in (*tensors, *(name for one in vocabulary for name in one.tensors))}
    exact = dtypes.pop() if len(dtypes) == 1 else Dtype.F32  # fp32 represents all of them exactly
    dtype = dtype or (Dtype.F32 if config.kind.is_computed else exact)
    sizes = {place: (module.rank, module.scale) for place, module in modules.items()}
    changes = [one.change for one in vocabulary]
    has_vectors = isinstance(config.kind, KindWithVectors)
    spec = AdapterSpec.of(plan, dtype, sizes, invocation=config.invocation, vocabulary=changes, has_vectors=has_vectors)
    tensor = head_tensor(found.heads, config.head)
    head = None if tensor is None else head_layout(file, tensor, config.head, plan)
    spec = replace(spec, head=head, trained_on=config.trained_on)
    notes = *config.notes, *found.notes
    return TensorLayout(plan, config.kind, modules, spec, file, copies, notes, tuple(vocabulary), base, tensor)


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
    bits = np.max(raw.view(np.uint16) & np.uint16(0x7FFF))
    if dtype is Dtype.F16:
        return float(bits.view(np.float16))
    return float((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
