"""Reads a PEFT folder into an adapter image in host memory. Every tensor is applied exactly, or the folder is refused.

A folder is inspected when it is registered (`catalog.py`), and read when a request needs it (`host_loader.py`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, HostAdapter, SiteSpan, aligned_bytes, lay_out
from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.lora.adapter import files_changed
from caraserve.lora.folder_contents import TENSORS_NAME as TENSORS_NAME
from caraserve.lora.folder_contents import why_no_adapter
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.lora.peft_config import CONFIG_NAME, PeftConfig, read_config, refusal
from caraserve.lora.peft_names import module_name
from caraserve.model.dtype import Dtype
from caraserve.model.safetensors_reader import TensorFile, TensorFileError
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up, ceil_div

_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>model\.layers\.(?P<layer>[0-9]{1,6})\.(?:self_attn|mlp)\."
    rf"(?P<site>{'|'.join(SITES)}))\.lora_(?P<half>[AB])(?P<adapter>(?:\.[A-Za-z0-9_-]+)?)\.weight"
)
# Of A's and B's product with the scale, for inputs of 1: what is larger overflows where it is squared, in norms and
# attention. The adapters of the demo reach 500.
LARGEST_UPDATE = 1e18
Site = tuple[int, str]  # layer, module


@dataclass(frozen=True, slots=True)
class Pair:
    """The two tensors of one adapted module, with its rank and scale."""

    a: str
    b: str
    rank: int
    scale: float


def inspect_adapter(folder: Path, model: ModelSpec) -> AdapterSpec:
    """Checks an adapter's configuration and tensors, and computes its digest. Raises AdapterRejected, or ServerBusy if
    they cannot be checked now."""
    with _opened(folder) as file:
        spec, pairs = specify(folder, file, model)
        starts = (0, *spec.layer_ends)
        layer = aligned_bytes(max(end - start for start, end in pairwise(starts)))
        return _fill(file, spec, pairs, model, lambda start, end: layer[: end - start])


def check_layout(folder: Path, model: ModelSpec) -> AdapterSpec:
    """Checks an adapter's configuration, and the names and shapes of its tensors, and returns its layout without a
    digest. Reads no tensor. Raises as `inspect_adapter`."""
    with _opened(folder) as file:
        return specify(folder, file, model)[0]


def read_adapter(folder: Path, model: ModelSpec, into: NDArray[np.uint8]) -> HostAdapter:
    """Reads and checks a whole adapter, which `inspect_adapter` has accepted, into `into`. Raises AdapterRejected
    naming the field or tensor."""
    with _opened(folder) as file:
        spec, pairs = _specify(read_config(folder), file, model)
        if spec.num_bytes > into.nbytes:
            raise files_changed()
        spec = _fill(file, spec, pairs, model, lambda start, end: into[start:end])
        return HostAdapter(spec, into[: spec.num_bytes])


def _fill(
    file: TensorFile,
    spec: AdapterSpec,
    pairs: Mapping[Site, Pair],
    model: ModelSpec,
    room: Callable[[int, int], NDArray[np.uint8]],
) -> AdapterSpec:
    """Writes the image layer after layer; `room(start, end)` returns the memory of a layer. Returns the spec with its
    digest."""
    hasher = ChunkHasher(spec.layer_ends)
    for layer, (start, end) in enumerate(pairwise((0, *spec.layer_ends))):
        data = room(start, end)
        data[:] = 0
        for span in (span for span in spec.spans if span.layer == layer):
            pair = pairs[layer, SITES[span.site]]
            inputs, outputs = model.site_shape(SITES[span.site])
            (a, largest_a), (b, largest_b) = (tensor_values(file, name, spec.dtype) for name in (pair.a, pair.b))
            check_product(pair, inputs, largest_a * largest_b)
            place_a(a, data, span, span.a_offset - start, inputs)
            place_b(b, data, span, span.b_offset - start, outputs)
        hasher.update(data.data)
    return identified(spec, hasher.hashes)


def place_a(values: NDArray[np.generic], data: NDArray[np.uint8], span: SiteSpan, offset: int, inputs: int) -> None:
    """Copies A, `values` [rank, in], into a layer's bytes at `offset`."""
    shape = span.padded_rank, align_up(inputs, A_COLUMNS)
    _view(data, offset, shape, values.dtype)[: span.rank, :inputs] = values


def place_b(values: NDArray[np.generic], data: NDArray[np.uint8], span: SiteSpan, offset: int, outputs: int) -> None:
    """Copies B, `values` [out, rank] as PEFT stores it, into panels in a layer's bytes at `offset`."""
    panels = _view(data, offset, (ceil_div(outputs, PANEL), span.padded_rank, PANEL), values.dtype)
    whole = outputs // PANEL
    panels[:whole, : span.rank] = values[: whole * PANEL].reshape(whole, PANEL, span.rank).transpose(0, 2, 1)
    panels[whole:, : span.rank, : outputs % PANEL] = values[whole * PANEL :].T


def _view(
    data: NDArray[np.uint8], offset: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]
) -> NDArray[np.generic]:
    return data[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def may_exist(path: Path) -> bool:
    """Returns False if there is no file at `path`; True also if its folder may not be searched."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # the caller opens the file and reports this error
        return True
    return True


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
    path = folder / TENSORS_NAME
    if not may_exist(path):
        try:
            reason = why_no_adapter(folder)
        except OSError:
            reason = None
        raise AdapterRejected(reason or f"the folder has no {TENSORS_NAME}")
    try:
        with TensorFile(path) as file:
            yield file
            file.check_unchanged()
    except TensorFileError as error:
        raise AdapterRejected(str(error)) from None


def specify(folder: Path, file: TensorFile, model: ModelSpec) -> tuple[AdapterSpec, dict[Site, Pair]]:
    """Returns an adapter's layout, still without its digest, and its pairs of tensors. Reads no tensor. Raises
    AdapterRejected, or ServerBusy if the configuration's regular expressions cannot be matched now."""
    config = read_config(folder)
    spec, pairs = _specify(config, file, model)
    config.check_patterns(tuple(module_name(*site) for site in sorted(pairs)))
    return spec, pairs


def _specify(config: PeftConfig, file: TensorFile, model: ModelSpec) -> tuple[AdapterSpec, dict[Site, Pair]]:
    """As `specify`, but matches no regular expressions: they change nothing in the layout."""
    pairs = _pairs(file, config, model)
    kinds = {file.dtype(name) for pair in pairs.values() for name in (pair.a, pair.b)}
    dtype = kinds.pop() if len(kinds) == 1 else Dtype.F32  # fp32 represents all of them exactly
    spans, layer_ends = lay_out(model, dtype, {site: (pair.rank, pair.scale) for site, pair in pairs.items()})
    sites = {site for _, site in pairs}
    spec = AdapterSpec(
        digest="",  # follows from the bytes
        dtype=dtype,
        rank=max(pair.rank for pair in pairs.values()),
        targets=tuple(site for site in SITES if site in sites),
        layer_ends=layer_ends,
        spans=spans,
    )
    return spec, pairs


def _pairs(file: TensorFile, config: PeftConfig, model: ModelSpec) -> dict[Site, Pair]:
    """Returns the tensors of all adapted modules. Raises AdapterRejected if a tensor belongs to none of them."""
    if config.layers is not None and max(config.layers) >= model.layers:
        raise refusal("layers_to_transform", f"names layers that a model with {model.layers} does not have")
    halves = _halves(file, model)
    if not halves:
        raise AdapterRejected(f"{TENSORS_NAME} has no LoRA tensors")
    pairs: dict[Site, Pair] = {}
    for (layer, site), found in halves.items():
        module = module_name(layer, site)
        missing = {"A", "B"} - found.keys()
        if missing:
            raise AdapterRejected(f"tensor {next(iter(found.values()))} has no lora_{missing.pop()} beside it")
        if not config.covers(layer, module):
            raise AdapterRejected(f"tensor {found['A']}: adapter_config.json does not target this module")
        rank = config.ranks.of(module)
        _check_shapes(file, found["A"], found["B"], rank, model.site_shape(site))
        pairs[layer, site] = Pair(found["A"], found["B"], rank, config.scale_of(module, rank))
    _check_complete(config, pairs, model)
    return pairs


def _halves(file: TensorFile, model: ModelSpec) -> dict[Site, dict[str, str]]:
    """Returns the tensors' names as {(layer, module): {"A": name, "B": name}}."""
    halves: dict[Site, dict[str, str]] = {}
    adapters: set[str] = set()
    for name in file.names:
        match = _TENSOR.fullmatch(name)
        if match is None or match["module"] != module_name(int(match["layer"]), match["site"]):
            raise AdapterRejected(f"tensor {ascii(name)[:200]} is not LoRA A or B of one of {', '.join(SITES)}")
        layer = int(match["layer"])
        if layer >= model.layers:
            raise AdapterRejected(f"tensor {name}: the base model has only {model.layers} layers")
        found = halves.setdefault((layer, match["site"]), {})
        if match["half"] in found:
            raise AdapterRejected(f"tensor {name} and {found[match['half']]} are the same module's")
        found[match["half"]] = name
        adapters.add(match["adapter"])
        if len(adapters) > 1:
            raise AdapterRejected(f"tensor {name} belongs to another adapter than those before it")
    return halves


def _check_shapes(file: TensorFile, a: str, b: str, rank: int, features: tuple[int, int]) -> None:
    for name, expected in ((a, (rank, features[0])), (b, (features[1], rank))):
        if file.shape(name) != expected:
            raise AdapterRejected(
                f"tensor {name} has shape {list(file.shape(name))}; "
                f"rank {rank} on this base model needs {list(expected)}"
            )


def _check_complete(config: PeftConfig, pairs: dict[Site, Pair], model: ModelSpec) -> None:
    """Raises AdapterRejected if a module that the configuration names has no tensors."""
    for layer in range(model.layers):
        for site in SITES:
            module = module_name(layer, site)
            if config.requires(layer, module) and (layer, site) not in pairs:
                raise refusal("target_modules", f"covers {module}, but {TENSORS_NAME} has no tensors for it")


def tensor_values(file: TensorFile, name: str, dtype: Dtype) -> tuple[NDArray[np.generic], float]:
    """Returns a tensor in the adapter's dtype, and its largest absolute value. Raises AdapterRejected if a value is not
    finite."""
    raw, source = file.raw(name), file.dtype(name)
    largest = _largest(raw, source)
    if not math.isfinite(largest):
        raise AdapterRejected(f"tensor {name} has values that are not finite")
    if source is dtype:
        return raw, largest
    if source is Dtype.F16:
        return raw.view(np.float16).astype(np.float32), largest
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32), largest


def check_product(pair: Pair, inputs: int, largest_values: float) -> None:
    """Raises AdapterRejected for a module whose results would not be finite. `largest_values`: the product of the
    largest value of A and that of B."""
    largest = abs(pair.scale) * pair.rank * inputs * largest_values
    if largest > LARGEST_UPDATE:
        raise AdapterRejected(
            f"tensors {pair.a} and lora_B: with the scale {pair.scale:.3g} their product may reach {largest:.0e}; "
            f"above {LARGEST_UPDATE:.0e}, what is computed with it is not finite"
        )


def _largest(raw: NDArray[np.generic], dtype: Dtype) -> float:
    """Returns the largest absolute value; not finite if one of the values is not. Without their signs, the bits of
    floats are in the order of the values."""
    if dtype is Dtype.F32:
        return max(float(raw.max()), -float(raw.min()))  # both are NaN if one of the values is
    bits = np.max(raw.view(np.uint16) & np.uint16(0x7FFF))
    if dtype is Dtype.F16:
        return float(bits.view(np.float16))
    return float((bits.astype(np.uint32) << np.uint32(16)).view(np.float32))
