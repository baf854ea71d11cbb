"""The smallest configurations of every family in which each of its fields changes the answer.

Windows are shorter than the prompt, caps and clamps bind, original lengths of rotations are small, sizes are not
multiples of each other.
"""

from dataclasses import dataclass, field, replace
from typing import Any

VOCAB = 96
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SOME_LOCAL = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "partial_rotary_factor": 0.75,
}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 7, "tie_word_embeddings": True}
_GEMMA3 = _GEMMA | {
    "layer_types": _SOME_LOCAL,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}
_OLMO3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.2,
    },
}
_GRANITE4 = {
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "layer_types": ["full_attention"] * 4,
    "mamba_n_heads": 12,
    "mamba_d_head": 16,
}
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_DELTA_NET = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
# Of vision towers, which a text model leaves out.
_PIXTRAL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 96}
_QWEN_TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


@dataclass(frozen=True)
class Case:
    """A configuration: the class of transformers, named without `Config`, and its arguments beside the base's."""

    config: str
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    offset: float = 0.0  # what the family adds to the weights of its norms
    text: dict[str, Any] | None = None  # arguments of the text model inside a model with images
    has_base: bool = True  # False: `fields` are all arguments
    # False: peft would take the names of modules of an MLP for those of experts
    adapts_mlps: bool = True


def _text(**fields: Any) -> dict[str, Any]:
    return _BASE | fields


CASES: dict[str, Case] = {
    "llama": Case("Llama", "LlamaForCausalLM"),
    "llama, biases": Case("Llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, linear": Case(
        "Llama",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama, llama3": Case("Llama", "LlamaForCausalLM", {"rope_parameters": _LLAMA3}),
    "llama, yarn": Case("Llama", "LlamaForCausalLM", {"rope_parameters": _YARN}),
    "llama, yarn with mscale": Case(
        "Llama",
        "LlamaForCausalLM",
        {
            "rope_parameters": _YARN
            | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 8, "beta_slow": 2, "truncate": False}
        },
    ),
    "falcon 3": Case("Llama", "LlamaForCausalLM", {"head_dim": 32}),
    "mistral": Case("Mistral", "MistralForCausalLM", {"sliding_window": 9}),
    "ministral": Case(
        "Ministral",
        "MinistralForCausalLM",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16},
    ),
    "ministral 3": Case("Ministral3", "Ministral3ForCausalLM", {"head_dim": 32, "rope_parameters": _GROWING}),
    "mistral 3": Case(
        "Mistral3",
        "Mistral3ForConditionalGeneration",
        {"vision_config": _PIXTRAL, "image_token_index": 90, "tie_word_embeddings": False},
        text=_text(model_type="ministral3", head_dim=32, rope_parameters=_GROWING),
    ),
    "gemma": Case("Gemma", "GemmaForCausalLM", {"head_dim": 32, "tie_word_embeddings": True}, offset=1.0),
    "gemma 2": Case(
        "Gemma2",
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        offset=1.0,
    ),
    "gemma 3": Case("Gemma3Text", "Gemma3ForCausalLM", _GEMMA3, offset=1.0),
    "gemma 3 with images": Case(
        "Gemma3",
        "Gemma3ForConditionalGeneration",
        {"vision_config": _PIXTRAL, "mm_tokens_per_image": 4, "image_token_index": 90},
        offset=1.0,
        text=_text(**_GEMMA3 | {"pad_token_id": 0}),
    ),
    "qwen 2": Case(
        "Qwen2", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}
    ),
    "qwen 3": Case("Qwen3", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen 2.5 with images": Case(
        "Qwen2_5_VL",
        "Qwen2_5_VLForConditionalGeneration",
        {"vision_config": _QWEN_VISION | {"fullatt_block_indexes": [0]}, **_QWEN_TOKENS},
        text=_text(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}),
    ),
    "qwen 3 with images": Case(
        "Qwen3VL",
        "Qwen3VLForConditionalGeneration",
        {"vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]}, **_QWEN_TOKENS},
        text=_text(
            head_dim=16,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 3, 3],
                "mrope_interleaved": True,
            },
        ),
    ),
    "qwen 3.5": Case("Qwen3_5Text", "Qwen3_5ForCausalLM", _DELTA_NET, offset=1.0),
    "qwen 3.5 with images": Case(
        "Qwen3_5",
        "Qwen3_5ForConditionalGeneration",
        {"vision_config": _QWEN_VISION | {"num_position_embeddings": 16}, **_QWEN_TOKENS},
        offset=1.0,
        text=_text(**_DELTA_NET),
    ),
    "smollm 3": Case("SmolLM3", "SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm 3, windows": Case(
        "SmolLM3",
        "SmolLM3ForCausalLM",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 7, "attention_bias": True},
    ),
    "phi 3": Case(
        "Phi3",
        "Phi3ForCausalLM",
        {"pad_token_id": 0, "sliding_window": 9, "original_max_position_embeddings": 256},
    ),
    "phi 4 mini, short": Case(
        "Phi3",
        "Phi3ForCausalLM",
        {"pad_token_id": 0, "original_max_position_embeddings": 128, "rope_parameters": _LONGROPE}
        | {"tie_word_embeddings": True},
    ),
    "phi 4 mini, long": Case(
        "Phi3",
        "Phi3ForCausalLM",
        {"pad_token_id": 0, "original_max_position_embeddings": 32, "rope_parameters": _LONGROPE},
    ),
    "glm": Case("Glm", "GlmForCausalLM", {"head_dim": 16}),
    "glm 4": Case("Glm4", "Glm4ForCausalLM", {"head_dim": 16}),
    "ernie 4.5": Case("Ernie4_5", "Ernie4_5ForCausalLM", {"head_dim": 16, "use_bias": True}),
    "granite": Case("Granite", "GraniteForCausalLM", _MULTIPLIERS),
    "granite 4": Case(
        "GraniteMoeHybrid",
        "GraniteMoeHybridForCausalLM",
        _GRANITE4 | _MULTIPLIERS | {"position_embedding_type": "rope"},
    ),
    "granite 4, no rotation": Case(
        "GraniteMoeHybrid",
        "GraniteMoeHybridForCausalLM",
        _GRANITE4 | {"position_embedding_type": "nope", "attention_multiplier": 0.3},
    ),
    "olmo 2": Case("Olmo2", "Olmo2ForCausalLM"),
    "olmo 3": Case("Olmo3", "Olmo3ForCausalLM", {"sliding_window": 7, "rope_parameters": _OLMO3_ROPES}),
    "exaone 4": Case("Exaone4", "Exaone4ForCausalLM", {"sliding_window": 7, "sliding_window_pattern": 4}),
    "exaone 4, no windows": Case(
        "Exaone4", "Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 4}
    ),
    "hunyuan": Case(
        "HunYuanDenseV1",
        "HunYuanDenseV1ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 8.0, "factor": 1.0},
        },
    ),
    "seed-oss": Case("SeedOss", "SeedOssForCausalLM", {"head_dim": 32}),
    "cohere": Case("Cohere", "CohereForCausalLM", {"logit_scale": 0.3, "tie_word_embeddings": True}),
    "cohere, norms of heads": Case(
        "Cohere",
        "CohereForCausalLM",
        {"logit_scale": 0.3, "tie_word_embeddings": True, "use_qk_norm": True, "attention_bias": True},
    ),
    "cohere 2": Case(
        "Cohere2",
        "Cohere2ForCausalLM",
        {"logit_scale": 0.3, "tie_word_embeddings": True, "sliding_window": 7, "layer_types": _SOME_LOCAL},
    ),
    "nemotron": Case("Nemotron", "NemotronForCausalLM", {"head_dim": 16}, offset=1.0),
    "starcoder 2": Case("Starcoder2", "Starcoder2ForCausalLM", {"sliding_window": 9, "tie_word_embeddings": True}),
    "stablelm": Case("StableLm", "StableLmForCausalLM", {"use_qkv_bias": True, "rope_parameters": _HALF}),
    "stablelm, parallel": Case(
        "StableLm",
        "StableLmForCausalLM",
        {"use_parallel_residual": True, "qk_layernorm": True, "rope_parameters": _HALF},
    ),
    "phi 2": Case("Phi", "PhiForCausalLM", {"hidden_act": "gelu_new"}),
    "gpt 2": Case(
        "GPT2",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": 96,
            "n_layer": 3,
            "n_head": 6,
            "n_positions": 128,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "scale_attn_by_inverse_layer_idx": True,
        },
        has_base=False,
    ),
    "mixtral": Case(
        "Mixtral", "MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 9}
    ),
    "qwen 2, experts": Case(
        "Qwen2Moe",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 3,
        },
    ),
    "qwen 3, experts": Case(
        "Qwen3Moe",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
        adapts_mlps=False,
    ),
    "granite, experts": Case(
        "GraniteMoe", "GraniteMoeForCausalLM", _MULTIPLIERS | {"num_local_experts": 6, "num_experts_per_tok": 2}
    ),
    "glm 4.5": Case(
        "Glm4Moe",
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
        },
        adapts_mlps=False,
    ),
    "gpt-oss": Case(
        "GptOss",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 7,
            "rope_parameters": _YARN | {"factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
        },
    ),
}


def arguments_of(case: Case) -> dict[str, Any]:
    """Returns the arguments of the configuration's class."""
    if case.text is not None:
        return case.fields | {"text_config": case.text}
    return (_BASE if case.has_base else {}) | case.fields


def resized(case: Case) -> Case:
    """Returns the case with another vocabulary, as many tokens as a tokenizer of bytes needs, and wider layers."""
    if not case.has_base:
        return replace(case, fields=case.fields | {"vocab_size": 352, "n_embd": 160, "n_head": 10})
    sizes = {
        "vocab_size": 352,
        "hidden_size": 160,
        "intermediate_size": 112,
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
    }
    if case.text is not None:
        return replace(case, text=case.text | sizes)
    mamba = {"mamba_n_heads": 20} if "mamba_n_heads" in case.fields else {}
    return replace(case, fields=case.fields | sizes | mamba)
