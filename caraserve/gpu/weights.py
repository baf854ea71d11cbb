"""The base model's weights on the device; modules that read the same input form one matrix.

Tensors are allocated in their final place and filled one by one, from a checkpoint's files (`checkpoint.py`) or with
random numbers on the device, so that no tensor is on the device twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, GROUPS
from caraserve.core.quantized_groups import device_bytes, group_scheme
from caraserve.errors import ModelLoadError
from caraserve.gpu.linear.base import SCALE, Fill, JoinedModules, Linear, LinearLoader
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.formats import TORCH_CODES, dequantizing, load_linear
from caraserve.gpu.linear.quantized import row_blocks
from caraserve.model.dtype import Dtype
from caraserve.model.rope import rope_tables
from caraserve.model.spec import ModelSpec, module_name
from caraserve.util.units import human_bytes

TORCH_DTYPES = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
DTYPES_OF_TORCH = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}
_DUMMY_STD, _DUMMY_CODES_STD = 0.02, 32.0
_DUMMY_INPUT_SCALE = 0.05


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
    head: DenseLinear  # [vocab, hidden]; the same tensor as `embedding` if they are tied
    final_norm: Tensor  # float32 [hidden]
    cos: Tensor  # float32 [positions, head dim / 2]
    sin: Tensor  # float32 [positions, head dim / 2]

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def rounds_inputs(self) -> bool:
        """True if inputs of some linear modules are quantised, for which a lane needs `RoundedRows`."""
        return any(linear.rounds_inputs for layer in self.layers for linear in layer.linears)


def columns_of(spec: ModelSpec, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (first columns, widths) of a group's modules in a row of the group's output."""
    widths = tuple(spec.site_shape(site)[1] for site in GROUPS[group])
    return tuple(sum(widths[:index]) for index in range(len(widths))), widths


def num_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Returns the device memory that `load` takes, without norms, biases and rotary tables."""
    return device_bytes(spec, dtype.itemsize)


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
        loader = LinearLoader(dtype, device, dequantizing(fill, spec.quantization), torch.ones(1, device=device))
        return _load(spec, max_context, loader, progress)
    except torch.OutOfMemoryError as error:
        need = human_bytes(num_bytes(spec, dtype))
        raise ModelLoadError(f"the model's weights take {need} of device memory, more than is free") from error


def _load(spec: ModelSpec, max_context: int, loader: LinearLoader, progress: Callable[[], None]) -> Weights:
    layers = []
    for layer in range(spec.layers):
        layers.append(_load_layer(spec, layer, loader))
        progress()
    vocabulary = (spec.vocab_size, spec.hidden)
    embedding = loader.filled("model.embed_tokens.weight", vocabulary)
    head = embedding if spec.tied_embeddings else loader.filled("lm_head.weight", vocabulary)
    cos, sin = (torch.from_numpy(table).to(loader.device) for table in rope_tables(spec.rope, max_context))
    final_norm = loader.filled("model.norm.weight", (spec.hidden,), torch.float32)
    progress()
    return Weights(tuple(layers), embedding, DenseLinear.of(head, None), final_norm, cos, sin)


def _load_layer(spec: ModelSpec, layer: int, loader: LinearLoader) -> Layer:
    prefix = f"model.layers.{layer}"
    biased = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.mlp_bias)
    linears = []
    for group, (sites, has_bias) in enumerate(zip(GROUPS, biased, strict=True)):
        names, widths = [module_name(layer, site) for site in sites], columns_of(spec, group)[1]
        modules = JoinedModules(names, widths, spec.site_shape(sites[0])[0], has_bias)
        linears.append(load_linear(loader, modules, group_scheme(spec, layer, group)))

    def norm(name: str, size: int) -> Tensor:
        return loader.filled(f"{prefix}.{name}.weight", (size,), torch.float32)

    head_norms = None
    if spec.qk_norm:
        head_norms = norm("self_attn.q_norm", spec.head_dim), norm("self_attn.k_norm", spec.head_dim)
    attention, mlp = norm("input_layernorm", spec.hidden), norm("post_attention_layernorm", spec.hidden)
    return Layer(attention, mlp, head_norms, tuple(linears))


def dummy(seed: int, device: torch.device) -> Fill:
    """Returns a Fill with random weights of plausible size, generated on the device; norms are 1 and biases 0. The same
    seed gives the same model on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def fill(name: str, target: Tensor) -> None:
        if name.endswith(SCALE):
            target.fill_(_DUMMY_INPUT_SCALE if "input" in name else _DUMMY_STD / _DUMMY_CODES_STD)
        elif target.dim() == 1:
            target.fill_(float(name.endswith("norm.weight")))
        elif target.dtype in TORCH_CODES.values():
            for rows in row_blocks(target):
                codes = target[rows]
                noise = torch.empty(codes.shape, device=device).normal_(0.0, _DUMMY_CODES_STD, generator=generator)
                codes.copy_(noise.round_().clamp_(-127, 127))
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)

    return fill
