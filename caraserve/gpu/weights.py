"""The base model's weights on the device; modules that read the same input form one matrix.

Tensors are allocated in their final place and filled one by one, from a checkpoint's files through pinned buffers or
with random numbers on the device, so that no tensor is on the device twice.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, GROUPS
from caraserve.cpu.weights import Raw, Read
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.rope import rope_tables
from caraserve.model.spec import ModelSpec
from caraserve.util.units import human_bytes

TORCH_DTYPES = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
DTYPES_OF_TORCH = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}
_STAGING_BYTES = 32 << 20
_STAGING_BUFFERS = 2  # one is written while the other is being copied
_DUMMY_STD = 0.02

Fill = Callable[[str, Tensor], None]  # (tensor name, tensor to fill)


@dataclass(frozen=True, slots=True)
class Linear:
    """One or more modules that read the same input, with their outputs concatenated."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]
    transposed: Tensor  # view of `weight`

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Linear":
        return cls(weight, bias, weight.t())

    def apply(self, x: Tensor, out: Tensor) -> None:
        """Computes `out = x weightᵀ + bias`, [tokens, …]. Adds the bias in a second call: torch.addmm might allocate
        memory."""
        torch.mm(x, self.transposed, out=out)
        if self.bias is not None:
            out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; norms are float32."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    head_norms: tuple[Tensor, Tensor] | None  # of q and of k, [head dim] each
    linears: tuple[Linear, ...]  # by module group of layout.GROUPS


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of the base model that a pass reads."""

    layers: tuple[Layer, ...]
    embedding: Tensor  # [vocab, hidden]
    head: Linear  # [vocab, hidden]; the same tensor as `embedding` if they are tied
    final_norm: Tensor  # float32 [hidden]
    cos: Tensor  # float32 [positions, head dim / 2]
    sin: Tensor  # float32 [positions, head dim / 2]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def columns_of(spec: ModelSpec, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (first columns, widths) of a group's modules in a row of the group's output."""
    widths = tuple(spec.site_shape(site)[1] for site in GROUPS[group])
    return tuple(sum(widths[:index]) for index in range(len(widths))), widths


def num_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the device memory that `load` takes, without norms, biases and rotary tables."""
    return spec.num_parameters * dtype.itemsize


def progress_steps(spec: ModelSpec) -> int:
    """Returns how often `load` calls `progress`."""
    return spec.layers + 1


def load(
    spec: ModelSpec,
    dtype: torch.dtype,
    max_context: int,
    device: torch.device,
    fill: Fill,
    progress: Callable[[], None] = lambda: None,
) -> Weights:
    """Allocates the weights on `device` and fills them; calls `progress` after each layer and after the embeddings.

    Raises ModelLoadError for sizes that the kernels do not support or if device memory is too small, and the errors of
    `fill`.
    """
    for name, size in (("hidden_size", spec.hidden), ("intermediate_size", spec.intermediate)):
        if size % A_COLUMNS:
            raise ModelLoadError(f"config.json: {name} {size} is not a multiple of {A_COLUMNS}, which CUDA needs")
    try:
        return _load(spec, max_context, _Maker(spec, dtype, device, fill), progress)
    except torch.OutOfMemoryError as error:
        need = human_bytes(num_bytes(spec, dtype))
        raise ModelLoadError(f"the model's weights take {need} of device memory, more than is free") from error


def _load(spec: ModelSpec, max_context: int, maker: "_Maker", progress: Callable[[], None]) -> Weights:
    layers = []
    for layer in range(spec.layers):
        layers.append(maker.layer(layer))
        progress()
    vocabulary = (spec.vocab_size, spec.hidden)
    embedding = maker.tensor("model.embed_tokens.weight", vocabulary)
    head = embedding if spec.tied_embeddings else maker.tensor("lm_head.weight", vocabulary)
    cos, sin = (
        torch.from_numpy(table).to(maker.device) for table in rope_tables(spec.rope, spec.head_dim, max_context)
    )
    final_norm = maker.norm("model.norm.weight", spec.hidden)
    progress()
    return Weights(tuple(layers), embedding, Linear.of(head, None), final_norm, cos, sin)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Allocates tensors and fills them."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    fill: Fill

    def layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        attention, mlp, spec = f"{prefix}.self_attn", f"{prefix}.mlp", self.spec
        places = ((attention, spec.qkv_bias), (attention, spec.o_bias), (mlp, spec.mlp_bias), (mlp, spec.mlp_bias))
        linears = [self._linear(group, *place) for group, place in enumerate(places)]
        head_norms = None
        if spec.qk_norm:
            q, k = (self.norm(f"{attention}.{name}_norm.weight", spec.head_dim) for name in "qk")
            head_norms = q, k
        return Layer(
            self.norm(f"{prefix}.input_layernorm.weight", spec.hidden),
            self.norm(f"{prefix}.post_attention_layernorm.weight", spec.hidden),
            head_norms,
            tuple(linears),
        )

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        made = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.fill(name, made)
        return made

    def norm(self, name: str, size: int) -> Tensor:
        made = torch.empty(size, dtype=torch.float32, device=self.device)
        self.fill(name, made)
        return made

    def _linear(self, group: int, prefix: str, biased: bool) -> Linear:
        inputs = self.spec.site_shape(GROUPS[group][0])[0]
        columns, widths = columns_of(self.spec, group)
        weight = torch.empty((sum(widths), inputs), dtype=self.dtype, device=self.device)
        bias = torch.empty(sum(widths), dtype=self.dtype, device=self.device) if biased else None
        for site, column, width in zip(GROUPS[group], columns, widths, strict=True):
            self.fill(f"{prefix}.{site}.weight", weight[column : column + width])
            if bias is not None:
                self.fill(f"{prefix}.{site}.bias", bias[column : column + width])
        return Linear.of(weight, bias)


def from_reader(read: Read, device: torch.device) -> Fill:
    """Returns a Fill that reads a checkpoint and converts dtypes where they differ. It raises the errors of `read`."""
    upload = _Staging(device).upload if device.type == "cuda" else _put

    def fill(name: str, target: Tensor) -> None:
        raw, dtype = read(name, tuple(target.shape))
        upload(raw, dtype, target)

    return fill


def dummy(seed: int, device: torch.device) -> Fill:
    """Returns a Fill with random weights of plausible size, generated on the device; norms are 1 and biases 0. The same
    seed gives the same model on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: Tensor) -> None:
        if target.dim() == 1:
            target.fill_(float(name.endswith("norm.weight")))
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)

    return fill


def _put(raw: Raw, dtype: Dtype, target: Tensor) -> None:
    target.copy_(torch.from_numpy(raw).view(TORCH_DTYPES[dtype]))


class _Staging:
    """Pinned buffers for uploads to a CUDA device, and a device buffer for pieces whose dtype is converted there."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = [
            torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_STAGING_BUFFERS)
        ]
        cuda: Any = torch.cuda  # torch.cuda has no type annotations
        self._passed = [cuda.Event() for _ in self._pinned]
        self._arrived = torch.empty(_STAGING_BYTES, dtype=torch.uint8, device=device)
        self._turn = 0

    def upload(self, raw: Raw, dtype: Dtype, target: Tensor) -> None:
        """Copies `raw` to `target`. `raw` may be overwritten as soon as this returns."""
        source, flat = torch.from_numpy(raw).view(TORCH_DTYPES[dtype]).view(-1), target.view(-1)
        step = _STAGING_BYTES // dtype.itemsize
        for start in range(0, math.prod(target.shape), step):
            piece = source[start : start + step]
            self._turn = (self._turn + 1) % len(self._pinned)
            self._passed[self._turn].synchronize()
            size = piece.numel() * dtype.itemsize
            pinned = self._pinned[self._turn][:size].view(piece.dtype)
            pinned.copy_(piece)
            to = flat[start : start + step]
            if piece.dtype is to.dtype:
                to.copy_(pinned, non_blocking=True)
            else:
                arrived = self._arrived[:size].view(piece.dtype)
                arrived.copy_(pinned, non_blocking=True)
                to.copy_(arrived)
            self._passed[self._turn].record()
