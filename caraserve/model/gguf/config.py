"""The configuration, as config.json would have it, of a model in a GGUF file: from its metadata, the types and shapes
of its tensors, and what is known of its architecture. Unknown keys are refused, because they could change answers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caraserve.errors import ModelLoadError
from caraserve.model.gguf.architectures import ARCHITECTURES, IGNORED, SIZES, Architecture
from caraserve.model.gguf.files import GgufModel, names_in

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose scale of q follows from the hidden size
_POOLINGS = {0: "none", 1: "mean", 2: "the first token", 3: "last", 4: "rank"}
_OTHER_FILES = {  # by their general.type
    "adapter": "it is an adapter; serve its base model with --lora-modules NAME=FOLDER, the folder that the file is in",
    "mmproj": "it has the part of a model that reads images; give the file of its text model",
    "imatrix": "it has statistics for quantising a model; give the file of the model",
}
Vector = Callable[[str], Sequence[float]]  # reads a tensor of one axis


def config_of(model: GgufModel, vector: Vector) -> dict[str, Any]:
    """Returns the configuration of a model. `vector`: reads its small tensors. Raises ModelLoadError."""
    name = model.architecture
    kind = "mmproj" if name == "clip" else str(model.metadata.get("general.type", "model"))
    if kind in _OTHER_FILES:
        raise ModelLoadError(f"{model.name} is no model: {_OTHER_FILES[kind]}")
    if name not in ARCHITECTURES:
        raise ModelLoadError(
            f"{model.name}: architecture {ascii(name)[:80]} is not supported in GGUF files; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    keys = _Keys(model)
    if EMBEDDING not in model.tensors:
        raise ModelLoadError(f"{model.name}: tensor {EMBEDDING} is missing; is it a model of text?")
    for key in architecture.needs:
        if keys.get(key) is None:
            raise ModelLoadError(f"{model.name}: {name}.{key} is missing, without which answers could be wrong")
    config: dict[str, Any] = {"architectures": [architecture.model], **architecture.constants}
    config |= {field: keys.get(key) for key, field in (SIZES | dict(architecture.fields)).items() if key in keys}
    config |= {
        architecture.epsilon[1]: keys.get(architecture.epsilon[0]),
        "vocab_size": model.shape(EMBEDDING)[0],
        "tie_word_embeddings": HEAD not in model.tensors,
        "dtype": dtype_of(model),
        "_name_or_path": names_in(model.metadata, model.paths[0])[-1],
    }
    if config[architecture.epsilon[1]] is None:
        raise ModelLoadError(f"{model.name}: {name}.{architecture.epsilon[0]} is missing")
    _size_layers_and_heads(keys, config)
    config |= _rotation(model, keys, config, vector)
    _experts(model, keys, architecture, config)
    if name in _COMPLETED:
        _COMPLETED[name](model, keys, config)
    _windows(keys, config, config["num_hidden_layers"])
    keys.check_all_known(architecture)
    return config


def dtype_of(model: GgufModel) -> str:
    """Returns the dtype of the matrices that are numbers, if they have one of 16 bits in common; float32 otherwise."""
    kinds = {place.tensor.kind for place in model.tensors.values() if len(place.tensor.shape) > 1} & DTYPES.keys()
    return DTYPES[kinds.pop()] if len(kinds) == 1 else "float32"


class _Keys:
    """The metadata of the architecture, by keys without its name. Notes which were asked for."""

    def __init__(self, model: GgufModel) -> None:
        self._model, self._start = model, f"{model.architecture}."
        self._values = {
            key.removeprefix(self._start): value for key, value in model.metadata.items() if key.startswith(self._start)
        }
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> Any:
        """Returns a value, None if there is none. Raises ModelLoadError for a list of different values: what differs
        from layer to layer is not computed."""
        value = self.whole(key)
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise self.refusal(key, "differs from layer to layer, which is not supported")
            return value[0]
        return value

    def whole(self, key: str) -> Any:
        """Returns a value that may be a list of different values."""
        self._known.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise self.refusal(key, "must be a whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
            raise self.refusal(key, "must be a number")
        return float(value)

    def refusal(self, key: str, why: str) -> ModelLoadError:
        value = ascii(self._values.get(key, "absent"))[:80]
        return ModelLoadError(f"{self._model.name}: {self._start}{key} is {value}; it {why}")

    def check_all_known(self, architecture: Architecture) -> None:
        for key in sorted(self._values.keys() - self._known - IGNORED - architecture.ignored):
            raise self.refusal(key, "is not known here and could change answers")


def _size_layers_and_heads(keys: _Keys, config: dict[str, Any]) -> None:
    """Completes sizes that follow from others; checks those that must be as these."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    layers = keys.integer("block_count") - keys.integer("nextn_predict_layers", 0)
    if heads < 1 or hidden < 1 or layers < 1:
        raise keys.refusal("attention.head_count", "must be positive, as sizes and layers")
    config["num_hidden_layers"] = layers
    config.setdefault("num_key_value_heads", heads)
    head_dim = config.setdefault("head_dim", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refusal("attention.value_length", f"must be as long as keys, {head_dim}")
    if keys.get("attention.causal") is False:
        raise keys.refusal("attention.causal", "must be true")
    if (pooling := keys.integer("pooling_type", 0)) not in (0, 3):
        raise keys.refusal("pooling_type", f"is not served ({_POOLINGS.get(pooling)}); 0 and 3 (last token) are")
    if "expert_feed_forward_length" in keys:
        config.setdefault("intermediate_size", keys.integer("expert_feed_forward_length"))


def _rotation(model: GgufModel, keys: _Keys, config: Mapping[str, Any], vector: Vector) -> dict[str, Any]:
    """Returns the fields of the rotation."""
    head_dim = config["head_dim"]
    rotated = keys.integer("rope.dimension_count", head_dim)
    if not isinstance(head_dim, int) or head_dim < 1 or not 0 < rotated <= head_dim:
        raise keys.refusal("rope.dimension_count", f"must be up to a head's {head_dim!r:.20} dimensions")
    partial = rotated / head_dim
    if int(head_dim * partial) != rotated:
        partial = (rotated + 0.5) / head_dim
    made: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0), "partial_rotary_factor": partial}
    scaling = _scaling(model, keys, config, vector)
    original = keys.get("rope.scaling.original_context_length")
    if original is not None and "divisors" not in scaling:
        made["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    return made | ({"rope_scaling": scaling} if scaling else {})


def _scaling(model: GgufModel, keys: _Keys, config: Mapping[str, Any], vector: Vector) -> dict[str, Any]:
    """Returns `rope_scaling`, empty if frequencies are as they are."""
    kind = keys.get("rope.scaling.type") or "linear"  # as llama.cpp takes a factor without a type
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier not in ((0.0, 1.0) if model.architecture == "mistral3" else (0.0,)):
        raise keys.refusal("rope.scaling.yarn_log_multiplier", "is not supported; 0 is, and of mistral3 1")
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise keys.refusal("rope.scaling.yarn_ext_factor", "is not supported; 1 is")
    yarn = {
        field: keys.number(key, 0.0)
        for key, field in (
            ("rope.scaling.yarn_beta_fast", "beta_fast"),
            ("rope.scaling.yarn_beta_slow", "beta_slow"),
            ("rope.scaling.yarn_attn_factor", "attention_factor"),
        )
        if key in keys
    }
    factors = [f"rope_factors_{which}.weight" for which in ("short", "long")]
    if any(name in model.tensors for name in factors):
        short, long = (list(vector(name)) for name in factors)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": attention}
    if attention != 1.0:
        raise keys.refusal("rope.scaling.attn_factor", "is only known with factors of frequencies")
    if "rope_freqs.weight" in model.tensors:
        if kind not in ("none", "llama3") and factor != 1.0:
            raise keys.refusal("rope.scaling.type", "is not known together with the tensor rope_freqs.weight")
        return {"rope_type": "divided", "divisors": list(vector("rope_freqs.weight"))}
    match kind:
        case "none":
            return {}
        case "linear":
            return {} if factor == 1.0 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            keys.integer("rope.scaling.original_context_length")
            scales = {"mscale": multiplier, "mscale_all_dim": multiplier} if multiplier else {}
            return {"rope_type": "yarn", "factor": factor, **yarn, **scales}
    raise keys.refusal(
        "rope.scaling.type", "is not supported; none, linear and yarn are, and longrope with its factors"
    )


def _experts(model: GgufModel, keys: _Keys, architecture: Architecture, config: dict[str, Any]) -> None:
    """Checks what is said of experts; a model of architecture llama with experts is a Mixtral."""
    name = model.architecture
    experts = keys.integer("expert_count", 0)
    keys.whole("expert_used_count")
    if name == "llama" and experts:
        config |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": experts, "sliding_window": None}
        config["num_experts_per_tok"] = keys.integer("expert_used_count")
    elif experts and "expert_count" not in architecture.fields:
        raise keys.refusal("expert_count", f"must be 0: {name} is known without experts")
    gatings = {"glm4moe": (2,), "gpt-oss": (0, 1, 3)}.get(name, (0, 1))  # 1: softmax, 2: sigmoid, 3: of the chosen
    if keys.integer("expert_gating_func", gatings[0]) not in gatings:
        raise keys.refusal("expert_gating_func", "is not how this architecture scores experts")
    if "expert_weights_scale" not in architecture.fields and keys.number("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise keys.refusal("expert_weights_scale", "is not supported; 1 is")


def _gemma(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    scale = config.pop("attention_scale", None)
    if scale is not None:
        config["query_pre_attn_scalar"] = keys.number("attention.scale", 0.0) ** -2
    elif config["num_hidden_layers"] == _LAYERS_OF_27B[model.architecture]:
        config["query_pre_attn_scalar"] = config["hidden_size"] / config["num_attention_heads"]
    else:
        config["query_pre_attn_scalar"] = config["head_dim"]


def _phi3(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    config["sliding_window"] = config["sliding_window"] or None  # 0: none
    config.setdefault("original_max_position_embeddings", config["max_position_embeddings"])


def _olmo(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    if config.get("sliding_window"):
        config["architectures"] = ["Olmo3ForCausalLM"]


def _head_norms(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    has_norms = "blk.0.attn_q_norm.weight" in model.tensors
    config |= dict.fromkeys(("qk_layernorm", "use_qk_norm"), has_norms)
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in model.tensors


def _gpt_oss(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    if "rope_scaling" in config:
        config["rope_scaling"] |= {"truncate": False}


def _gpt2(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    config |= {"n_embd": config["hidden_size"], "n_positions": config["max_position_embeddings"]}
    config |= {"n_head": config["num_attention_heads"], "n_layer": config["num_hidden_layers"]}
    config["n_inner"] = config.get("intermediate_size")


def _mistral3(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    length, original = keys.integer("attention.temperature_length", 0), config.get("original_max_position_embeddings")
    config["rope_parameters"] = {}
    if beta := keys.number("attention.temperature_scale", 0.0):
        if original is None or length not in (0, original):
            raise keys.refusal("attention.temperature_scale", "needs the original length of the context")
        config["rope_parameters"] = {"llama_4_scaling_beta": beta}


def _qwen35(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    inner, heads = keys.integer("ssm.inner_size"), keys.integer("ssm.time_step_rank")
    if heads < 1 or inner % heads:
        raise keys.refusal("ssm.inner_size", f"must be a multiple of {heads} heads")
    config["linear_value_head_dim"] = inner // heads
    interval, layers = keys.integer("full_attention_interval", 4), config["num_hidden_layers"]
    flags = keys.whole("attention.recurrent_layers")
    if flags is None:
        config["full_attention_interval"] = interval
    elif isinstance(flags, list) and len(flags) >= layers and all(isinstance(one, bool | int) for one in flags):
        config["layer_types"] = ["linear_attention" if one else "full_attention" for one in flags[:layers]]
    else:
        raise keys.refusal("attention.recurrent_layers", f"must have a flag for each of {layers} layers")


def _granite(model: GgufModel, keys: _Keys, config: dict[str, Any]) -> None:
    if keys.get("rope.scaling.finetuned") is False:
        raise keys.refusal("rope.scaling.finetuned", "would mean that nothing is rotated, which is not read")


# By architecture: completes what no key says as config.json does.
_COMPLETED: Mapping[str, Callable[[GgufModel, _Keys, dict[str, Any]], None]] = {
    "gemma2": _gemma,
    "gemma3": _gemma,
    "phi3": _phi3,
    "olmo2": _olmo,
    "stablelm": _head_norms,
    "command-r": _head_norms,
    "glm4moe": _head_norms,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "mistral3": _mistral3,
    "qwen35": _qwen35,
    "granite": _granite,
    "granitemoe": _granite,
}


def _windows(keys: _Keys, config: dict[str, Any], layers: int) -> None:
    """Reads which layers have a window: a list of flags, or a number."""
    pattern = keys.whole("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) != layers or not all(isinstance(one, bool | int) for one in pattern):
            raise keys.refusal("attention.sliding_window_pattern", f"must have a flag for each of {layers} layers")
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = keys.integer("attention.sliding_window_pattern")
