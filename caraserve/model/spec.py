"""The sizes of a base model, read from `config.json`. Pure."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from caraserve.errors import ModelLoadError
from caraserve.model.not_a_model import why_no_model
from caraserve.model.quantization import Quantization, parse_quantization

# The seven linear modules of a decoder layer that an adapter may change, in the order of use.
SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def module_name(layer: int, site: str) -> str:
    """Returns the whole name of one of a layer's linear modules, as checkpoints have it."""
    return f"model.layers.{layer}.{'self_attn' if site in SITES[:4] else 'mlp'}.{site}"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: the base frequency, and how it is stretched for long contexts."""

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes in elements; `windows` holds each layer's attention window in tokens, None for all of the context."""

    family: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    rms_eps: float
    rope: RopeSpec
    max_position: int
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    dtype: str  # as the checkpoint states it: float32, bfloat16 or float16
    quantization: Quantization | None = None

    def site_shape(self, site: str) -> tuple[int, int]:
        """Returns the (input, output) features of one of `SITES`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }[site]

    @property
    def num_parameters(self) -> int:
        """Returns the number of weights of embeddings, head and linear modules, without norms and biases."""
        per_layer = sum(math.prod(self.site_shape(site)) for site in SITES)
        return self.layers * per_layer + self.vocab_size * self.hidden * (1 if self.tied_embeddings else 2)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of K and V of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def load_spec(folder: Path) -> ModelSpec:
    """Reads `folder/config.json`. Raises ModelLoadError naming the file or field that cannot be served."""
    path = folder / "config.json"
    try:
        if problem := why_no_model(folder):
            raise ModelLoadError(problem)
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{error.filename or path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return parse_spec(config)


def parse_spec(config: dict[str, Any]) -> ModelSpec:
    """Turns a Hugging Face config into a ModelSpec. Raises ModelLoadError for what this server cannot compute."""
    family = _family(config)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(f"config.json: hidden_act {config['hidden_act']!r} is not supported; only silu is")
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    layers = _positive(config, "num_hidden_layers")
    kv_heads = _positive(config, "num_key_value_heads", default=heads)
    head_dim = _positive(config, "head_dim", default=hidden // heads)
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} heads cannot share {kv_heads} key-value heads evenly")
    if head_dim % 16:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is not a multiple of 16, which the kernels need")
    biased = bool(config.get("attention_bias", False))
    max_position = _positive(config, "max_position_embeddings", default=2048)
    return ModelSpec(
        family=family,
        vocab_size=_positive(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_positive(config, "intermediate_size"),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, max_position),
        max_position=max_position,
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and biased),
        o_bias=family in ("llama", "qwen3") and biased,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, family, layers),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        quantization=parse_quantization(config),
    )


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if not names and config.get("model_type") in _ARCHITECTURES.values():
        return str(config["model_type"])
    raise ModelLoadError(
        f"config.json: architecture {names or config.get('model_type')!r} is not supported; "
        f"supported are {', '.join(_ARCHITECTURES)}"
    )


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _rope(config: dict[str, Any], max_position: int) -> RopeSpec:
    # transformers 5 writes one `rope_parameters`; older files have `rope_theta` and `rope_scaling`.
    merged = {"rope_theta": config.get("rope_theta", 10000.0)}
    merged |= config.get("rope_scaling") or {}
    merged |= config.get("rope_parameters") or {}
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ModelLoadError(f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are")
    if float(config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError("config.json: partial_rotary_factor other than 1 is not supported")
    return RopeSpec(
        theta=float(merged["rope_theta"]),
        kind=kind,
        factor=float(merged.get("factor", 1.0)),
        low_freq_factor=float(merged.get("low_freq_factor", 1.0)),
        high_freq_factor=float(merged.get("high_freq_factor", 4.0)),
        original_max_position=int(merged.get("original_max_position_embeddings", max_position)),
    )


def _windows(config: dict[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family == "llama" or window is None or (family != "mistral" and not config.get("use_sliding_window", False)):
        return (None,) * layers
    if family == "mistral":
        return (int(window),) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", layers))
        return tuple(int(window) if layer >= first else None for layer in range(layers))
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
