"""Reads an adapter's folder into an image in host memory. Every tensor is applied exactly, or the folder is refused.

A folder is inspected when it is registered (`catalog.py`), and read when a request needs it (`host_loader.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from caraserve.core.lora_layout import (
    AdapterSpec,
    Bytes,
    HostAdapter,
    aligned_bytes,
)
from caraserve.errors import AdapterRejected, Forbidden, NotFound
from caraserve.lora.adapted_modules import adapted_modules, find_tensors
from caraserve.lora.adapter import files_changed
from caraserve.lora.adapter_tensors import AdapterTensors
from caraserve.lora.base_copies import check_copies, check_saved_modules
from caraserve.lora.expert_tensors import refuse_experts
from caraserve.lora.folder_contents import TEMPLATE_TEXTS, TENSORS_NAME, files_of
from caraserve.lora.image_filler import ImageFiller
from caraserve.lora.image_writer import ImageWriter, TensorLayout
from caraserve.lora.kinds import MATRICES, KindWithVectors
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.lora.peft_config import PeftConfig, parse_config
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.lora.score_heads import head_layout, head_tensor
from caraserve.lora.vocabulary import differing_rows, is_whole_matrix, vocabulary_of
from caraserve.lora.writers import open_adapter
from caraserve.lora.writers.stored_adapter import StoredAdapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from caraserve.model.opened_file import TensorFileError
from caraserve.model.plan import DecoderPlan


def inspect_adapter(
    folder: Path,
    plan: DecoderPlan,
    base: BaseTensors | None = None,
    note: Callable[[str], None] = lambda text: None,
    *,
    dtype: Dtype | None = None,
    filler: ImageFiller | None = None,
) -> AdapterSpec:
    """Checks an adapter's configuration and tensors, and computes its digest. `base`: the base model's tensors, with
    which those in the adapter's file are compared; without, these are refused. `note`: called with what is left out.
    `dtype`: of the image, as in `specify`. `filler`: has compiled code; None: there is none. Raises AdapterRejected, or
    ServerBusy if they cannot be checked now."""
    filler = filler or ImageFiller()
    with opened(folder, plan) as adapter:
        layout = specify(adapter, plan, base, dtype=dtype)
        check_copies(layout.copies, layout.file, base)
        ranges = list(pairwise((0, *layout.spec.layer_ends)))
        memory = aligned_bytes(max(end - start for start, end in ranges))  # of a layer
        writer, hasher = ImageWriter(layout), ChunkHasher(layout.spec.layer_ends)
        for layer, (start, end) in enumerate(ranges):
            filler.fill_layers(writer, range(layer, layer + 1), memory[: end - start], start)
            hasher.update(memory[: end - start].data)
        spec = identified(writer.finished(), hasher.hashes)
        for text in layout.notes:
            note(text)
        return spec


def check_layout(folder: Path, plan: DecoderPlan, base: BaseTensors | None = None) -> AdapterSpec:
    """Checks an adapter's configuration, and the names and shapes of its tensors, and returns its layout without a
    digest. Reads what `specify` does. Raises as `inspect_adapter`."""
    with opened(folder, plan) as adapter:
        return specify(adapter, plan, base).spec


def read_adapter(
    folder: Path,
    plan: DecoderPlan,
    into: Bytes,
    base: BaseTensors | None = None,
    *,
    dtype: Dtype | None = None,
    filler: ImageFiller | None = None,
    arrived: Callable[[HostAdapter, int], None] = lambda image, layers: None,
    digest: str | None = None,
) -> HostAdapter:
    """Reads and checks a whole adapter, which `inspect_adapter` has accepted, into `into`. `filler`: as there.
    `arrived`: called on any thread with the image, still without digest, and the number of its first layers that are
    complete, if reading takes long. `digest`: taken for the image's, which is then not checked; None: it is computed.
    Raises AdapterRejected naming the field or tensor."""
    with opened(folder, plan) as adapter:
        layout = _layout(parse_config(adapter.fields, plan), adapter.tensors, plan, base, dtype=dtype)
        if layout.spec.num_bytes > into.nbytes:
            raise files_changed()
        data, writer = into[: layout.spec.num_bytes], ImageWriter(layout)
        (filler or ImageFiller()).fill(writer, data, lambda layers: arrived(HostAdapter(layout.spec, data), layers))
        image = HostAdapter(replace(writer.finished(), digest=digest or ""), data, is_checked=False)
        return with_digest(image) if digest is None else image


def with_digest(image: HostAdapter) -> HostAdapter:
    """Returns an image with the digest of its bytes."""
    hasher = ChunkHasher(image.spec.layer_ends)
    hasher.update(image.data.data)
    return HostAdapter(identified(image.spec, hasher.hashes), image.data)


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
        raise AdapterRejected(
            f"lora_path lies outside {outside}, from where adapters may be loaded; --allow-adapter-path allows more",
            param="lora_path",
        )
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
