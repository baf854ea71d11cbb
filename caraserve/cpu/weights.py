"""The base model's weights in the layout of the CPU kernels: panels of 64 outputs, one aligned array per tensor."""

import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import ALIGN_BYTES, PANEL
from caraserve.cpu import structs
from caraserve.cpu.jit import entry
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.folder_reader import Raw
from caraserve.model.rope import rope_tables
from caraserve.model.spec import SITES, ModelSpec, module_name
from caraserve.util.units import align_up

Read = Callable[[str, tuple[int, ...]], tuple[Raw, Dtype]]  # tensor name and shape → data

_CHUNK_BYTES = 32 << 20
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A MODEL record for `step`, and the arrays behind its addresses."""

    model: NDArray[np.void]
    weights: NDArray[np.int64]  # [layers, NUM_WEIGHTS], the table of the record's `weights`
    chunks: list[NDArray[np.uint8]]
    num_bytes: int


def convert(raw: Raw, source: Dtype, target: Dtype) -> Raw:
    """Converts stored weights to another dtype, rounding to nearest even."""
    if source is target:
        return raw
    values = to_float32(raw, source)
    if target is Dtype.F32:
        return values
    if target is Dtype.F16:
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


@entry
def _pack(source, panels):  # type: ignore[no-untyped-def]
    """Packs `[out, in]` into panels `[out / 64, in, 64]`, in blocks that stay in the L1 cache."""
    outputs, inputs = source.shape
    for panel in range(panels.shape[0]):
        for block in range(0, inputs, 16):
            for lane in range(min(64, outputs - 64 * panel)):
                for k in range(block, min(block + 16, inputs)):
                    panels[panel, k, lane] = source[64 * panel + lane, k]


def huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Returns zeroed memory in huge pages; it takes no room until it is written. With 4 KiB pages a core that streams
    weights loses a third of the bandwidth to address translation and to prefetchers that stop at each page."""
    memory = mmap.mmap(-1, align_up(num_bytes, _HUGE_PAGE_BYTES))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class _WeightArrays:
    """Allocates aligned arrays in chunks of 32 MiB and more; keeps them alive."""

    def __init__(self) -> None:
        self.chunks: list[NDArray[np.uint8]] = []
        self._used = 0

    def _allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        num_bytes = align_up(num_bytes, ALIGN_BYTES)
        if not self.chunks or self._used + num_bytes > self.chunks[-1].size:
            self.chunks.append(huge_pages(max(num_bytes, _CHUNK_BYTES)))
            self._used = 0
        array = self.chunks[-1][self._used : self._used + num_bytes]
        self._used += num_bytes
        return array

    def panels(self, raw: Raw) -> int:
        """Packs `[out, in]` into panels; returns the address."""
        outputs, inputs = raw.shape
        shape = (align_up(outputs, PANEL) // PANEL, inputs, PANEL)
        array = self._allocate(int(np.prod(shape)) * raw.itemsize)
        _pack(np.ascontiguousarray(raw), array[: int(np.prod(shape)) * raw.itemsize].view(raw.dtype).reshape(shape))
        return int(array.ctypes.data)

    def vector(self, values: NDArray[np.float32], padded: int | None = None) -> int:
        """Copies an fp32 vector or table, zero-padded to `padded` elements; returns the address."""
        flat = values.reshape(-1)
        array = self._allocate(4 * (padded or flat.size))
        array.view(np.float32)[: flat.size] = flat
        return int(array.ctypes.data)

    def words(self, values: NDArray[np.int64]) -> int:
        """Copies a table of int64; returns the address."""
        array = self._allocate(values.nbytes)
        array.view(np.int64)[: values.size] = values.reshape(-1)
        return int(array.ctypes.data)

    def rows(self, raw: Raw) -> int:
        """Copies a row-major table; returns the address."""
        array = self._allocate(raw.nbytes)
        array[: raw.nbytes].view(raw.dtype)[:] = raw.reshape(-1)
        return int(array.ctypes.data)


def load_model(
    spec: ModelSpec, dtype: Dtype, max_context: int, read: Read, progress: Callable[[], None]
) -> LoadedModel:
    """Reads and packs each tensor once. Calls `progress` after each layer and after the embeddings."""
    store = _WeightArrays()
    layers = np.zeros((spec.layers, structs.NUM_WEIGHTS), np.int64)
    for layer in range(spec.layers):
        _load_layer(spec, dtype, layer, read, store, layers[layer])
        progress()
    table, source = read("model.embed_tokens.weight", (spec.vocab_size, spec.hidden))
    if spec.tied_embeddings:
        embed = head = store.panels(convert(table, source, dtype))
    else:
        embed = store.rows(convert(table, source, dtype))
        raw, source = read("lm_head.weight", (spec.vocab_size, spec.hidden))
        head = store.panels(convert(raw, source, dtype))
    cos, sin = rope_tables(spec.rope, max_context)
    hidden_pad = align_up(spec.hidden, PANEL)
    model = structs.filled(
        structs.MODEL,
        layers=spec.layers,
        hidden=spec.hidden,
        hidden_pad=hidden_pad,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        q_pad=align_up(spec.heads * spec.head_dim, PANEL),
        kv_pad=align_up(spec.kv_heads * spec.head_dim, PANEL),
        inter=spec.intermediate,
        inter_pad=align_up(spec.intermediate, PANEL),
        vocab=spec.vocab_size,
        vocab_pad=align_up(spec.vocab_size, PANEL),
        dtype=dtype.value,
        tied=spec.tied_embeddings,
        eps=spec.rms_eps,
        scale=spec.head_dim**-0.5,
        embed=embed,
        head=head,
        final_norm=store.vector(to_float32(*read("model.norm.weight", (spec.hidden,))), hidden_pad),
        cos=store.vector(cos),
        sin=store.vector(sin),
        weights=store.words(layers),
        windows=store.words(np.array([window or structs.NO_WINDOW for window in spec.windows], np.int64)),
    )
    progress()
    return LoadedModel(model, layers, store.chunks, sum(chunk.nbytes for chunk in store.chunks))


def _load_layer(
    spec: ModelSpec, dtype: Dtype, layer: int, read: Read, store: _WeightArrays, out: NDArray[np.int64]
) -> None:
    prefix = f"model.layers.{layer}"
    biased = {"q_proj": spec.qkv_bias, "k_proj": spec.qkv_bias, "v_proj": spec.qkv_bias, "o_proj": spec.o_bias}
    for index, site in enumerate(SITES):
        name = module_name(layer, site)
        inputs, outputs = spec.site_shape(site)
        raw, source = read(f"{name}.weight", (outputs, inputs))
        out[structs.WQ + index] = store.panels(convert(raw, source, dtype))
        if biased.get(site, spec.mlp_bias):
            bias = to_float32(*read(f"{name}.bias", (outputs,)))
            out[structs.BQ + index] = store.vector(bias, align_up(outputs, PANEL))
    hidden_pad = align_up(spec.hidden, PANEL)
    for column, name in ((structs.ATTN_NORM, "input_layernorm"), (structs.MLP_NORM, "post_attention_layernorm")):
        weight = to_float32(*read(f"{prefix}.{name}.weight", (spec.hidden,)))
        out[column] = store.vector(weight, hidden_pad)
    if spec.qk_norm:
        for column, name in ((structs.Q_NORM, "q_norm"), (structs.K_NORM, "k_norm")):
            weight = to_float32(*read(f"{prefix}.self_attn.{name}.weight", (spec.head_dim,)))
            out[column] = store.vector(weight)


def dummy_reader(seed: int, dtype: Dtype) -> Read:
    """Returns a reader of random weights; norms are one. The same seed gives the same model."""
    rng = np.random.default_rng(seed)

    def read(name: str, shape: tuple[int, ...]) -> tuple[Raw, Dtype]:
        if len(shape) == 1:
            values = np.ones(shape, np.float32) if name.endswith("norm.weight") else np.zeros(shape, np.float32)
        else:
            values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        return convert(values, Dtype.F32, dtype), dtype

    return read


def progress_steps(spec: ModelSpec) -> int:
    """Returns how often `load_model` calls `progress`."""
    return spec.layers + 1
