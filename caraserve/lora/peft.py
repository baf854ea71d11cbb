"""Reads a PEFT folder into an adapter image in host memory. Every tensor is applied exactly, or the folder is refused.

A folder is inspected when it is registered (`catalog.py`), and read when a request needs it (`host_loader.py`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
)
from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.lora.adapter import files_changed
from caraserve.lora.expert_tensors import refuse_experts
from caraserve.lora.folder_contents import TENSORS_NAME as TENSORS_NAME
from caraserve.lora.folder_contents import why_no_adapter
from caraserve.lora.kinds import MATRICES, AdapterKind
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.lora.peft_config import PeftConfig, read_config
from caraserve.lora.peft_fields import CONFIG_NAME, refusal
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan
from caraserve.model.safetensors_reader import TensorFile, TensorFileError

_LAYER_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,5})(?=\.)")
# Of A's and B's product with the scale, for inputs of 1: what is larger overflows where it is squared, in norms and
# attention. The adapters of the demo reach 500.
LARGEST_UPDATE = 1e18


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One adapted module, with its rank and scale."""

    name: str  # in the file
    tensors: Mapping[str, str]  # {name in the module: name in the file}
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The tensors of an adapter's file, and the image that they become."""

    plan: DecoderPlan
    kind: AdapterKind
    modules: Mapping[Module, AdaptedModule]
    spec: AdapterSpec  # without digest, which follows from the bytes


class ImageWriter:
    """Writes the matrices of an adapter into its image, in any order."""

    def __init__(self, file: TensorFile, layout: TensorLayout) -> None:
        self._file, self._layout = file, layout
        self._largest: dict[Module, float] = {}  # values of the matrices that were written first
        self._spans: dict[Module, list[SiteSpan]] = {}
        for span in layout.spec.spans:
            self._spans.setdefault(span.module, []).append(span)

    def modules_by_layer(self) -> dict[int, list[Module]]:
        """Returns the adapted modules in the order of the image."""
        return {layer: list(modules) for layer, modules in groupby(self._spans, lambda module: module[0])}

    def end(self, module: Module, matrix: str) -> int:
        """Returns where the last of a matrix's tensors ends in the file."""
        return max(self._file.end(tensor) for tensor in self._sources(module, matrix).values())

    def write(self, module: Module, matrix: str, data: Bytes, start: int = 0) -> None:
        """Writes one of `MATRICES` to `data`, the bytes of the image from `start` on, which must be zero. Raises
        AdapterRejected for values that are not finite or whose results would not be, and TensorFileError."""
        plan, dtype, spans = self._layout.plan, self._layout.spec.dtype, self._spans[module]
        values, largest = self._values(module, matrix)
        if (other := self._largest.pop(module, None)) is None:
            self._largest[module] = largest
        else:
            self._check_product(module, largest * other)
        if matrix == "A":
            place_a(values, data, spans[0], dtype, start)
            return
        layer, linear = module
        parts = plan.layers[layer].linears[linear].parts
        for span in spans:
            part = parts[plan.layers[layer].sites[span.site].part]
            place_b(values[part.index], data, span, dtype, start)

    def _sources(self, module: Module, matrix: str) -> dict[str, str]:
        tensors = self._layout.modules[module].tensors
        return {name: tensors[name] for name in self._layout.kind.sources[matrix]}

    def _values(self, module: Module, matrix: str) -> tuple[Array, float]:
        """Returns a matrix in the adapter's dtype, and its largest absolute value."""
        kind, dtype = self._layout.kind, self._layout.spec.dtype
        read = {name: _finite(self._file, tensor, dtype) for name, tensor in self._sources(module, matrix).items()}
        values = kind.matrix(matrix, {name: tensor for name, (tensor, _) in read.items()})
        return values, _largest(values, dtype) if kind.is_computed else max(largest for _, largest in read.values())

    def _check_product(self, module: Module, largest_values: float) -> None:
        """Raises AdapterRejected for a module whose results would not be finite. `largest_values`: the product of the
        largest value of A and that of B."""
        kind, adapted, (layer, linear) = self._layout.kind, self._layout.modules[module], module
        inputs = self._layout.plan.layers[layer].linears[linear].inputs
        largest = abs(adapted.scale) * adapted.rank * inputs * largest_values
        if not largest <= LARGEST_UPDATE:  # nor NaN
            (a, *_), (b, *_) = (kind.sources[matrix] for matrix in MATRICES)
            raise AdapterRejected(
                f"tensors {adapted.tensors[a]} and {b}: with the scale {adapted.scale:.3g} their product may reach "
                f"{largest:.0e}; above {LARGEST_UPDATE:.0e}, what is computed with it is not finite"
            )


def inspect_adapter(folder: Path, plan: DecoderPlan) -> AdapterSpec:
    """Checks an adapter's configuration and tensors, and computes its digest. Raises AdapterRejected, or ServerBusy if
    they cannot be checked now."""
    with _opened(folder) as file:
        layout = specify(folder, file, plan)
        ends = layout.spec.layer_ends
        layer = aligned_bytes(max(end - start for start, end in pairwise((0, *ends))))
        return _fill(file, layout, lambda start, end: layer[: end - start])


def check_layout(folder: Path, plan: DecoderPlan) -> AdapterSpec:
    """Checks an adapter's configuration, and the names and shapes of its tensors, and returns its layout without a
    digest. Reads no tensor. Raises as `inspect_adapter`."""
    with _opened(folder) as file:
        return specify(folder, file, plan).spec


def read_adapter(folder: Path, plan: DecoderPlan, into: Bytes) -> HostAdapter:
    """Reads and checks a whole adapter, which `inspect_adapter` has accepted, into `into`. Raises AdapterRejected
    naming the field or tensor."""

    with _opened(folder) as file:
        layout = _layout(read_config(folder, plan), file, plan)
        if layout.spec.num_bytes > into.nbytes:
            raise files_changed()
        spec = _fill(file, layout, lambda start, end: into[start:end])
        return HostAdapter(spec, into[: spec.num_bytes])


def _fill(file: TensorFile, layout: TensorLayout, room: Callable[[int, int], Bytes]) -> AdapterSpec:
    """Writes the image layer after layer; `room(start, end)` returns the memory of a layer. Returns the spec with its
    digest."""
    writer, hasher = ImageWriter(file, layout), ChunkHasher(layout.spec.layer_ends)
    modules = writer.modules_by_layer()
    for layer, (start, end) in enumerate(pairwise((0, *layout.spec.layer_ends))):
        data = room(start, end)
        data[:] = 0
        for module in modules.get(layer, ()):
            for matrix in MATRICES:
                writer.write(module, matrix, data, start)
        hasher.update(data.data)
    return identified(layout.spec, hasher.hashes)


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
    for name in (CONFIG_NAME, TENSORS_NAME):
        if not is_allowed((folder / name).resolve()):
            raise AdapterRejected(f"{name} is a link that leads outside {outside}", param="lora_path")
    return folder


@contextmanager
def _opened(folder: Path) -> Iterator[TensorFile]:
    path, reason = folder / TENSORS_NAME, None
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        with suppress(OSError):
            reason = why_no_adapter(folder)
        raise AdapterRejected(reason or f"the folder has no {TENSORS_NAME}") from None
    except OSError:
        pass  # such as a folder that may not be searched: opening the file reports it
    try:
        with TensorFile(path) as file:
            yield file
            file.check_unchanged()
    except TensorFileError as error:
        raise AdapterRejected(str(error)) from None


def specify(folder: Path, file: TensorFile, plan: DecoderPlan) -> TensorLayout:
    """Returns the layout of an adapter's tensors in the file and in the image. Reads no tensor. Raises AdapterRejected,
    or ServerBusy if the configuration's regular expressions cannot be matched now."""
    refuse_experts(file, plan)
    config = read_config(folder, plan)
    layout = _layout(config, file, plan)
    config.check_patterns(tuple(layout.modules[module].name for module in sorted(layout.modules)))
    return layout


def _layout(config: PeftConfig, file: TensorFile, plan: DecoderPlan) -> TensorLayout:
    """As `specify`, but matches no regular expressions: they change nothing in the layout."""
    modules = _modules(file, config, plan)
    dtypes = {file.dtype(tensor) for module in modules.values() for tensor in module.tensors.values()}
    exact = dtypes.pop() if len(dtypes) == 1 else Dtype.F32  # fp32 represents all of them exactly
    dtype = Dtype.F32 if config.kind.is_computed else exact
    sizes = {place: (module.rank, module.scale) for place, module in modules.items()}
    return TensorLayout(plan, config.kind, modules, AdapterSpec.of(plan, dtype, sizes))


def _modules(file: TensorFile, config: PeftConfig, plan: DecoderPlan) -> dict[Module, AdaptedModule]:
    """Returns all adapted modules. Raises AdapterRejected if one lacks tensors, or tensors belong to none of them."""
    if config.layers is not None and max(config.layers) >= len(plan.layers):
        raise refusal("layers_to_transform", f"names layers that a model with {len(plan.layers)} does not have")
    needed = [name for matrix in MATRICES for name in config.kind.sources[matrix]]
    modules: dict[Module, AdaptedModule] = {}
    for name, tensors in _tensors(file, config.kind, plan).items():
        layer, linear = module = plan.adapter_modules[name]
        if missing := [one for one in needed if one not in tensors]:
            raise AdapterRejected(f"tensor {next(iter(tensors.values()))} has no {missing[0]} beside it")
        first = tensors[needed[0]]
        if module in modules:
            raise AdapterRejected(f"tensor {first} and {modules[module].tensors[needed[0]]} are the same module's")
        if not config.covers(layer, name):
            raise AdapterRejected(f"tensor {first}: adapter_config.json does not target this module")
        rank = config.settings.rank(name)
        _check_shapes(file, tensors, rank, config.kind, plan.layers[layer].linears[linear])
        modules[module] = AdaptedModule(name, tensors, rank, config.settings.scale(name))
    if not modules:
        raise AdapterRejected(f"{TENSORS_NAME} has no LoRA tensors")
    for name, module in plan.adapter_modules.items():
        if module not in modules and config.requires(module[0], name):
            raise refusal("target_modules", f"covers {name}, but {TENSORS_NAME} has no tensors for it")
    return modules


def _tensors(file: TensorFile, kind: AdapterKind, plan: DecoderPlan) -> dict[str, dict[str, str]]:
    """Returns the tensors of each module by their names in it: {module: {name in the module: name in the file}}."""
    modules: dict[str, dict[str, str]] = {}
    adapters: set[str] = set()
    for name in file.names:
        match = kind.tensor_name.fullmatch(name.removeprefix("base_model.model."))
        if match is None or match["module"] not in plan.adapter_modules:
            if match is not None and _is_past_the_last_layer(match["module"], plan):
                raise AdapterRejected(f"tensor {name}: the base model has only {len(plan.layers)} layers")
            known = ", ".join(plan.targets)
            raise AdapterRejected(f"tensor {ascii(name)[:200]} is not {kind.what} of one of {known}")
        tensors = modules.setdefault(match["module"], {})
        if match["tensor"] in tensors:
            raise AdapterRejected(f"tensor {name} and {tensors[match['tensor']]} are the same module's")
        tensors[match["tensor"]] = name
        adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise AdapterRejected(f"tensor {name} belongs to another adapter than those before it")
    return modules


def _is_past_the_last_layer(module: str, plan: DecoderPlan) -> bool:
    number = _LAYER_NUMBER.search(module)
    if number is None or int(number[0]) < len(plan.layers):
        return False
    start, end = module[: number.start()], module[number.end() :]
    return any(f"{start}{layer}{end}" in plan.adapter_modules for layer in range(len(plan.layers)))


def _check_shapes(
    file: TensorFile, tensors: Mapping[str, str], rank: int, kind: AdapterKind, linear: LinearPlan
) -> None:
    for name, expected in kind.shapes(rank, linear.inputs, linear.outputs).items():
        if (shape := file.shape(tensors[name])) != expected:
            raise AdapterRejected(
                f"tensor {tensors[name]} has shape {list(shape)}; rank {rank} on this base model needs {list(expected)}"
            )


def _finite(file: TensorFile, name: str, dtype: Dtype) -> tuple[Array, float]:
    """Returns a tensor in the adapter's dtype, and its largest absolute value. Raises AdapterRejected if a value is not
    finite."""
    raw, source = file.raw(name), file.dtype(name)
    largest = _largest(raw, source)
    if not math.isfinite(largest):
        raise AdapterRejected(f"tensor {name} has values that are not finite")
    return raw if source is dtype else to_float32(raw, source), largest


def _largest(raw: Array, dtype: Dtype) -> float:
    """Returns the largest absolute value; not finite if one of the values is not. Without their signs, the bits of
    floats are in the order of the values."""
    if dtype is Dtype.F32:
        return max(float(raw.max()), -float(raw.min()))  # both are NaN if one of the values is
    bits = np.max(raw.view(np.uint16) & np.uint16(0x7FFF))
    if dtype is Dtype.F16:
        return float(bits.view(np.float16))
    return float((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
