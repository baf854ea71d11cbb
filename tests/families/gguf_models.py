"""Writes the models of cases as GGUF files, as llama.cpp's converter does: names, metadata, and changes of values.

Nothing here knows plans: names and values follow from those of transformers.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.model.gguf_files import write_gguf

Tensors = dict[str, NDArray[Any]]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "PhiForCausalLM": "phi2",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Exaone4ForCausalLM": "exaone4",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "SmolLM3ForCausalLM": "smollm3",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Glm4ForCausalLM": "glm4",
    "GlmForCausalLM": "chatglm",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gpt-oss",
    "Starcoder2ForCausalLM": "starcoder2",
    "StableLmForCausalLM": "stablelm",
    "NemotronForCausalLM": "nemotron",
    "GPT2LMHeadModel": "gpt2",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "SeedOssForCausalLM": "seed_oss",
    "Ministral3ForCausalLM": "mistral3",
    "Qwen3_5ForCausalLM": "qwen35",
}
_ROTATED_IN_TURNS = ("llama", "mistral3", "granite", "granitemoe", "smollm3")
_NORMS_AFTER = ("gemma2", "gemma3", "olmo2", "exaone4", "glm4")  # of attention
_NORMS_FROM_1 = ("gemma", "gemma2", "gemma3", "nemotron", "qwen35")
_OWN_MLP_NORM = ("gpt-oss", "seed_oss", "glm4moe", "qwen35")  # is called post_attention_norm
_NAMES = (
    (r"(?:model|transformer)\.(?:embed_tokens|wte)\.weight", "token_embd.weight"),
    (r"transformer\.wpe\.weight", "position_embd.weight"),
    (r"(?:model\.(?:norm|final_layernorm)|transformer\.ln_f)\.(weight|bias)", r"output_norm.\1"),
    (r"lm_head\.(weight|bias)", r"output.\1"),
    (r"(?:input_layernorm|ln_1)\.", "attn_norm."),
    (r"self_attn\.([qkv])_proj\.", r"attn_\1."),
    (r"self_attn\.qkv_proj\.|attn\.c_attn\.", "attn_qkv."),
    (r"self_attn\.(?:o_proj|dense)\.|^attn\.c_proj\.", "attn_output."),
    (r"self_attn\.sinks$", "attn_sinks.weight"),
    (r"linear_attn\.in_proj_qkv\.", "attn_qkv."),
    (r"linear_attn\.in_proj_z\.", "attn_gate."),
    (r"linear_attn\.in_proj_a\.", "ssm_alpha."),
    (r"linear_attn\.in_proj_b\.", "ssm_beta."),
    (r"linear_attn\.out_proj\.", "ssm_out."),
    (r"linear_attn\.(conv1d|norm)\.", r"ssm_\1."),
    (r"linear_attn\.A_log$", "ssm_a"),
    (r"linear_attn\.dt_bias$", "ssm_dt.bias"),
    (r"self_attn\.(?:(q|k)_norm|(q)uery_layernorm|(k)ey_layernorm)\.", r"attn_\1\2\3_norm."),
    (r"post_self_attn_layernorm\.", "post_attention_norm."),
    (r"(?:post_feedforward|post_mlp)_layernorm\.", "post_ffw_norm."),
    (r"(?:pre_feedforward_layernorm|ln_2)\.", "ffn_norm."),
    (r"mlp\.gate_proj\.", "ffn_gate."),
    (r"mlp\.(?:up_proj|gate_up_proj|c_fc|fc1)\.", "ffn_up."),
    (r"mlp\.(?:down_proj|c_proj|fc2)\.", "ffn_down."),
    (
        r"(?:block_sparse_moe\.router(?:\.layer)?|block_sparse_moe\.gate|mlp\.gate|mlp\.router)\.(weight|bias)",
        r"ffn_gate_inp.\1",
    ),
    (r"mlp\.shared_expert_gate\.", "ffn_gate_inp_shexp."),
    (r"mlp\.shared_experts?\.(gate|up|down)_proj\.", r"ffn_\1_shexp."),
    (r"mlp\.gate\.e_score_correction_bias", "exp_probs_b.bias"),
)


def write(model: Any, path: Path, more: Mapping[str, Any] | None = None, dtype: str = "F32") -> Path:
    """Writes a model of transformers. `more`: metadata beside the configuration's. `dtype`: of matrices."""
    config = model.config.get_text_config()
    name = ARCHITECTURES[type(model).__name__]
    metadata = metadata_of(name, config) | (more or {})
    tensors = {stored: _stored(values, dtype) for stored, values in tensors_of(name, model.state_dict(), config)}
    return write_gguf(path, metadata, tensors | _factors(model, config))


def _stored(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if values.ndim < 2 or dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)  # the lower bits are 0


def tensors_of(name: str, state: Mapping[str, Any], config: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the tensors of a state of transformers, under the names and in the order of rows of an architecture."""
    if name == "chatglm":
        state = _with_joined_attention(state)
    if config.tie_word_embeddings:
        state = {key: value for key, value in state.items() if not key.startswith("lm_head.weight")}
    for key, value in state.items():
        layer = re.match(r"(?:model\.layers|transformer\.h)\.(\d+)\.(.*)", key)
        inner, prefix = (key, "") if layer is None else (layer[2], f"blk.{layer[1]}.")
        values = np.ascontiguousarray(value.float().numpy())
        if name == "gpt2" and layer is not None and values.ndim == 2:
            values = np.ascontiguousarray(values.T)
        if re.search(r"^(?!linear_attn).*norm\.weight", inner) and name in _NORMS_FROM_1:
            values = values + np.float32(1)
        if inner.startswith("linear_attn."):
            values = _with_tiled_heads(inner, values, config)
        experts = re.fullmatch(
            r"(?:mlp|block_sparse_moe)\.(?:experts\.)?(gate_up_proj|down_proj|input_linear|output_linear)(_bias|\.weight)?",
            inner,
        )
        if experts is not None and values.ndim + (experts[2] == "_bias") == 3:
            yield from ((prefix + one, part) for one, part in _experts(name, experts, values))
        elif heads := re.fullmatch(r"self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight", inner):
            if heads[2] == "0":
                count = config.num_attention_heads if heads[1] == "q" else config.num_key_value_heads
                start = key.removesuffix("0.weight")
                whole = np.stack([state[f"{start}{head}.weight"].numpy() for head in range(count)])
                yield f"{prefix}attn_{heads[1]}_norm.weight", whole
        else:
            stored = prefix + _name(name, inner)
            if name in _ROTATED_IN_TURNS and (part := re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", stored)):
                count = config.num_attention_heads if part[1] == "q" else config.num_key_value_heads
                halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
            yield stored, values


def _with_joined_attention(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state with q, k and v in one module."""
    made = {key: value for key, value in state.items() if not re.search(r"[qkv]_proj\.", key)}
    for key in state:
        if "q_proj." in key:
            of_all = [state[key.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            made[key.replace("q_proj", "qkv_proj")] = torch.cat(of_all)
    return made


def _with_tiled_heads(inner: str, values: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """Returns a tensor of a delta net with the first value head of each key head before the second of each."""
    keys, heads, width = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    if inner.endswith("A_log"):
        values = -np.exp(values)
    if inner.endswith("norm.weight"):
        return values
    values = values.squeeze(1) if "conv1d" in inner else values
    axis = 1 if "out_proj" in inner else 0
    first = values.shape[axis] - heads * (1 if re.search(r"in_proj_[ab]|A_log|dt_bias", inner) else width)
    before, own = np.split(values, [first], axis)
    moved = np.moveaxis(own, axis, 0)
    tiled = moved.reshape(keys, heads // keys, -1, *moved.shape[1:]).swapaxes(0, 1).reshape(moved.shape)
    return np.ascontiguousarray(np.concatenate([before, np.moveaxis(tiled, 0, axis)], axis))


def _name(name: str, inner: str) -> str:
    if inner.startswith("post_attention_layernorm."):
        word = "post_attention_norm" if name in (*_NORMS_AFTER, *_OWN_MLP_NORM) and name != "glm4" else "ffn_norm"
        return inner.replace("post_attention_layernorm", word)
    for pattern, replacement in _NAMES:
        if re.match(pattern, inner):
            return re.sub(pattern, replacement, inner, count=1)
    raise AssertionError(f"no name for {inner}")


def _experts(name: str, match: re.Match[str], values: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    ending = "bias" if match[2] == "_bias" else "weight"
    if name == "gpt-oss" and ending == "weight":
        values = values.swapaxes(1, 2)
    if match[1] in ("down_proj", "output_linear"):
        yield f"ffn_down_exps.{ending}", np.ascontiguousarray(values)
        return
    inner = values.shape[1] // 2
    gate, up = (values[:, ::2], values[:, 1::2]) if name == "gpt-oss" else (values[:, :inner], values[:, inner:])
    yield f"ffn_gate_exps.{ending}", np.ascontiguousarray(gate)
    yield f"ffn_up_exps.{ending}", np.ascontiguousarray(up)


def _factors(model: Any, config: Any) -> dict[str, NDArray[np.float32]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{one}.weight": np.array(rope[f"{one}_factor"], np.float32) for one in ("short", "long")}
    if rope.get("rope_type") == "llama3":
        stretched = model.model.rotary_emb.inv_freq.numpy()
        count = 2 * len(stretched)
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, count, 2).float() / count).numpy()
        return {"rope_freqs.weight": (plain / stretched).astype(np.float32)}
    return {}


def metadata_of(name: str, config: Any) -> dict[str, Any]:
    """Returns the metadata of a configuration of transformers."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    found: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
    }
    for key, fields in _FIELDS.items():
        found[key] = next((value for one in fields if (value := getattr(config, one, None)) is not None), None)
    found |= _rotation(name, config, head_dim) | _window(name, config) | _SPECIAL.get(name, {})
    if name == "mistral3":
        found["attention.temperature_scale"] = config.rope_parameters["llama_4_scaling_beta"]
        found["rope.scaling.yarn_log_multiplier"] = config.rope_parameters["mscale_all_dim"]
    if name == "qwen35":
        found["rope.dimension_sections"] = config.rope_parameters["mrope_section"]
        found["attention.recurrent_layers"] = [kind == "linear_attention" for kind in config.layer_types]
        found["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
    if name == "gpt-oss":
        found["expert_feed_forward_length"] = config.intermediate_size
    own = {f"{name}.{key}": value for key, value in found.items() if value is not None}
    return {"general.architecture": name, "general.name": "a b", **own}


def _rotation(name: str, config: Any, head_dim: int) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    swa = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    theta = float(rope.get("rope_theta") or 10000.0)
    if kind == "dynamic":
        theta *= rope["alpha"] ** (head_dim / (head_dim - 2))
    found: dict[str, Any] = {
        "rope.freq_base": theta,
        "rope.freq_base_swa": None if swa is None or name != "gemma3" else float(swa["rope_theta"]),
        "rope.dimension_count": round(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": original if kind != "llama3" else None,
    }
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        fields = (
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
            ("yarn_attn_factor", "attention_factor"),
        )
        found |= {f"rope.scaling.{key}": float(rope[field]) for key, field in fields if rope.get(field) is not None}
    if kind == "longrope":
        scale = config.max_position_embeddings / original
        found["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original))) if scale > 1 else 1.0
    return found


def _window(name: str, config: Any) -> dict[str, Any]:
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if name in ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "smollm3"):
        return {}  # the converter leaves it out
    if window and kinds and name in ("gemma3", "olmo2", "exaone4", "cohere2"):
        pattern = [kind == "sliding_attention" for kind in kinds]
        return {"attention.sliding_window": window, "attention.sliding_window_pattern": pattern}
    return {"attention.sliding_window": 0 if name == "phi3" and window is None else window}


_SPECIAL: dict[str, dict[str, Any]] = {
    "glm4moe": {"expert_gating_func": 2},
    "stablelm": {"use_parallel_residual": False},
}
_FIELDS = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "logit_scale": ("logit_scale", "logits_scaling"),
    "ssm.group_count": ("linear_num_key_heads",),
    "ssm.time_step_rank": ("linear_num_value_heads",),
    "ssm.state_size": ("linear_key_head_dim",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim",),
}
