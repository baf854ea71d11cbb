"""The base model's weights on the device; modules that read the same input form one matrix.

Tensors are allocated in their final place and filled one by one, from a checkpoint's files (`checkpoint.py`) or with
random numbers on the device, so that no tensor is on the device twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, GROUPS
from caraserve.core.quantized_groups import device_bytes, group_scheme
from caraserve.errors import ModelLoadError
from caraserve.gpu.kernels.attention import compute_capability
from caraserve.gpu.quantized_linear import TORCH_CODES, QuantizedLinear, RoundedRows, inputs_on
from caraserve.model.dtype import Dtype
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes
from caraserve.model.rope import rope_tables
from caraserve.model.spec import ModelSpec, module_name
from caraserve.util.units import human_bytes

TORCH_DTYPES = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
DTYPES_OF_TORCH = {theirs: ours for ours, theirs in TORCH_DTYPES.items()}
SCALE = "_scale"
_DUMMY_STD, _DUMMY_CODES_STD = 0.02, 32.0
_DUMMY_INPUT_SCALE = 0.05
_PIECE_NUMBERS = 1 << 24  # of a matrix, which are float32 at a time while it is dequantised

# (tensor name, contiguous tensor to fill); torch may use it at once. Targets in a dtype of codes are filled with the
# codes of a quantised module's weights; targets of names that end in SCALE are float32 vectors, also where the
# checkpoint has one scale for all of one.
Fill = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class Linear:
    """One or more modules that read the same input, with their outputs concatenated."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]
    transposed: Tensor  # view of `weight`

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None) -> "Linear":
        return cls(weight, bias, weight.t())

    def apply(self, x: Tensor, out: Tensor, rounded: RoundedRows | None = None) -> None:
        """Computes `out = x weightᵀ + bias`, [tokens, …]; needs no `rounded`. Adds the bias in a second call:
        torch.addmm might allocate memory."""
        torch.mm(x, self.transposed, out=out)
        if self.bias is not None:
            out.add_(self.bias)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one decoder layer; norms are float32."""

    attention_norm: Tensor  # [hidden]
    mlp_norm: Tensor  # [hidden]
    head_norms: tuple[Tensor, Tensor] | None  # of q and of k, [head dim] each
    linears: tuple[Linear | QuantizedLinear, ...]  # by module group of layout.GROUPS


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

    @property
    def quantized(self) -> tuple[QuantizedLinear, ...]:
        """Returns the linear modules that are quantised."""
        linears = (linear for layer in self.layers for linear in layer.linears)
        return tuple(linear for linear in linears if isinstance(linear, QuantizedLinear))

    @property
    def quantizes_inputs(self) -> bool:
        """True if inputs of some linear modules are quantised, for which a lane needs `RoundedRows`."""
        return any(linear.inputs is not Inputs.KEPT for linear in self.quantized)


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
        return _load(spec, max_context, _Maker(spec, dtype, device, fill, torch.ones(1, device=device)), progress)
    except torch.OutOfMemoryError as error:
        need = human_bytes(num_bytes(spec, dtype))
        raise ModelLoadError(f"the model's weights take {need} of device memory, more than is free") from error


def _load(spec: ModelSpec, max_context: int, maker: "_Maker", progress: Callable[[], None]) -> Weights:
    layers = []
    for layer in range(spec.layers):
        layers.append(maker.layer(layer))
        progress()
    vocabulary = (spec.vocab_size, spec.hidden)
    embedding = maker.matrix("model.embed_tokens", vocabulary)
    head = embedding if spec.tied_embeddings else maker.matrix("lm_head", vocabulary)
    cos, sin = (torch.from_numpy(table).to(maker.device) for table in rope_tables(spec.rope, max_context))
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
    one: Tensor  # float32 [1]

    def layer(self, index: int) -> Layer:
        prefix, spec = f"model.layers.{index}", self.spec
        biased = (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.mlp_bias)
        linears = [self._linear(index, group, has_bias) for group, has_bias in enumerate(biased)]
        head_norms = None
        if spec.qk_norm:
            q, k = (self.norm(f"{prefix}.self_attn.{name}_norm.weight", spec.head_dim) for name in "qk")
            head_norms = q, k
        return Layer(
            self.norm(f"{prefix}.input_layernorm.weight", spec.hidden),
            self.norm(f"{prefix}.post_attention_layernorm.weight", spec.hidden),
            head_norms,
            tuple(linears),
        )

    def matrix(self, module: str, shape: tuple[int, ...]) -> Tensor:
        made = self._empty(shape, self.dtype)
        self._fill_matrix(module, made)
        return made

    def norm(self, name: str, size: int) -> Tensor:
        made = self._empty((size,), torch.float32)
        self.fill(name, made)
        return made

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _linear(self, layer: int, group: int, has_bias: bool) -> Linear | QuantizedLinear:
        modules = [module_name(layer, site) for site in GROUPS[group]]
        inputs = self.spec.site_shape(GROUPS[group][0])[0]
        columns, widths = columns_of(self.spec, group)
        spans = [slice(column, column + width) for column, width in zip(columns, widths, strict=True)]
        bias = self._empty((sum(widths),), self.dtype) if has_bias else None
        if bias is not None:
            for module, span in zip(modules, spans, strict=True):
                self.fill(f"{module}.bias", bias[span])
        scheme = group_scheme(self.spec, layer, group)
        if isinstance(scheme, ScaledCodes):
            return self._quantized(scheme, modules, spans, inputs, bias)
        weight = self._empty((sum(widths), inputs), self.dtype)
        for module, span in zip(modules, spans, strict=True):
            self._fill_matrix(module, weight[span])
        return Linear.of(weight, bias)

    def _quantized(
        self, scheme: ScaledCodes, modules: Sequence[str], spans: Sequence[slice], inputs: int, bias: Tensor | None
    ) -> QuantizedLinear:
        outputs, capability = spans[-1].stop, compute_capability(self.device)
        weight = self._empty((outputs, inputs), TORCH_CODES[scheme.code])
        scale, input_scale = self._empty((outputs,), torch.float32), None
        for module, span in zip(modules, spans, strict=True):
            self.fill(f"{module}.weight", weight[span])
            self.fill(f"{module}.weight_scale", scale[span])
        quantized = inputs_on(capability, scheme)
        if quantized is Inputs.STATIC:
            scales = self._empty((len(modules),), torch.float32)
            for index, module in enumerate(modules):
                self.fill(f"{module}.input_scale", scales[index : index + 1])
            input_scale = scales.amax(0, keepdim=True)
            scale *= input_scale
        return QuantizedLinear(weight, scale, bias, scheme.code, quantized, input_scale, self.one, capability)

    def _fill_matrix(self, module: str, target: Tensor) -> None:
        """Fills a matrix, dequantised if it is quantised in the checkpoint."""
        scheme = None if self.spec.quantization is None else self.spec.quantization.format_of(module)
        if not isinstance(scheme, ScaledCodes):
            self.fill(f"{module}.weight", target)
            return
        codes = self._empty(tuple(target.shape), TORCH_CODES[scheme.code])
        scale = self._empty((len(target),), torch.float32)
        self.fill(f"{module}.weight", codes)
        self.fill(f"{module}.weight_scale", scale)
        for rows in _row_pieces(target):
            target[rows] = codes[rows].float() * scale[rows, None]


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
            for rows in _row_pieces(target):
                piece = target[rows]
                noise = torch.empty(piece.shape, device=device).normal_(0.0, _DUMMY_CODES_STD, generator=generator)
                piece.copy_(noise.round_().clamp_(-127, 127))
        else:
            target.normal_(0.0, _DUMMY_STD, generator=generator)

    return fill


def _row_pieces(matrix: Tensor) -> Iterator[slice]:
    """Yields ranges of rows of about _PIECE_NUMBERS numbers each."""
    step = max(1, _PIECE_NUMBERS // matrix.shape[1])
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)
