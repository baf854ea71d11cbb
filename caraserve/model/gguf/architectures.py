"""What each architecture of GGUF files is in Hugging Face's terms: data only.

The keys of an architecture's metadata are given without its name: `attention.key_length` for
`llama.attention.key_length`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RMS, LAYER = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"

# Sizes that most architectures have, and their fields in config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
# Keys that change no answer: the number of tokens is that of the embedding's rows, the other epsilon is of norms that
# the architecture does not have.
IGNORED = frozenset(("vocab_size", RMS, LAYER, "tensor_data_layout", "rope.scaling.finetuned", "nextn_predict_layers"))
_SECTIONS = frozenset(("rope.dimension_sections", "n_deepstack_layers"))  # of images
_EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_weights_norm": "norm_topk_prob"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_DELTA_NET = {
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
}
_GEMMA = {"attention.scale": "attention_scale", **_WINDOW, **_CAPS}


@dataclass(frozen=True, slots=True)
class Architecture:
    """`model`: first of `architectures` in config.json. `fields`: of keys beside the sizes. `constants`: fields that no
    key has. `needs`: keys without which answers could be wrong."""

    model: str
    epsilon: tuple[str, str] = (RMS, "rms_norm_eps")  # key and field
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    needs: tuple[str, ...] = ()


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM"),
    # All layers are alike; without yarn these are Mistral Small 3.1 and 3.2.
    "mistral3": Architecture(
        "Mistral3ForConditionalGeneration", constants={"model_type": "ministral3", "sliding_window": None}
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2_5_VLForConditionalGeneration", ignored=_SECTIONS),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3vl": Architecture("Qwen3VLForConditionalGeneration", ignored=_SECTIONS),
    "qwen35": Architecture(
        "Qwen3_5ForConditionalGeneration",
        fields=_DELTA_NET,
        ignored=_SECTIONS,
        needs=(*_DELTA_NET, "ssm.inner_size", "rope.dimension_count"),
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        fields={
            **_EXPERTS,
            "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        constants={"norm_topk_prob": False},
        needs=("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    ),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        fields={**_EXPERTS, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        constants={"norm_topk_prob": True},
        needs=("expert_count", "expert_used_count", "expert_feed_forward_length"),
    ),
    "gemma": Architecture("GemmaForCausalLM", constants={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Architecture("Gemma2ForCausalLM", fields=_GEMMA),
    "gemma3": Architecture(
        "Gemma3ForConditionalGeneration",
        fields={**_GEMMA, "rope.freq_base_swa": "rope_local_base_freq"},
        needs=("attention.sliding_window",),
    ),
    "phi2": Architecture(
        "PhiForCausalLM",
        (LAYER, "layer_norm_eps"),
        constants={"hidden_act": "gelu_new"},
        needs=("rope.dimension_count",),
    ),
    "phi3": Architecture("Phi3ForCausalLM", fields=_WINDOW, needs=("attention.sliding_window",)),
    "olmo2": Architecture("Olmo2ForCausalLM", fields=_WINDOW),
    "exaone4": Architecture("Exaone4ForCausalLM", fields=_WINDOW, constants={"sliding_window": None}),
    "granite": Architecture("GraniteForCausalLM", fields=_GRANITE, needs=tuple(_GRANITE)),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        fields={**_GRANITE, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        needs=(*_GRANITE, "expert_count", "expert_used_count"),
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "command-r": Architecture(
        "CohereForCausalLM", (LAYER, "layer_norm_eps"), {"logit_scale": "logit_scale"}, needs=("logit_scale",)
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM",
        (LAYER, "layer_norm_eps"),
        {"logit_scale": "logit_scale", **_WINDOW},
        needs=("logit_scale", "attention.sliding_window"),
    ),
    "chatglm": Architecture("GlmForCausalLM", needs=("rope.dimension_count",)),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM", needs=("rope.dimension_count",)),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        fields={
            **_EXPERTS,
            "expert_count": "n_routed_experts",
            "expert_shared_count": "n_shared_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        constants={"n_group": 1, "topk_group": 1},
        needs=("expert_count", "expert_used_count", "expert_feed_forward_length", "leading_dense_block_count"),
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        fields={
            **_WINDOW,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        needs=("expert_count", "expert_used_count", "expert_feed_forward_length", "attention.sliding_window"),
    ),
    # All models of this family have this window, which their files do not state.
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM", (LAYER, "norm_epsilon"), _WINDOW, {"sliding_window": 4096, "use_bias": True}
    ),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        (LAYER, "layer_norm_eps"),
        ignored=frozenset(("use_parallel_residual",)),  # its layers have one norm then
        needs=("rope.dimension_count",),
    ),
    "nemotron": Architecture("NemotronForCausalLM", (LAYER, "norm_eps"), needs=("rope.dimension_count",)),
    "gpt2": Architecture("GPT2LMHeadModel", (LAYER, "layer_norm_epsilon")),
    "internlm2": Architecture("LlamaForCausalLM"),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "seed_oss": Architecture("SeedOssForCausalLM"),
}
