"""The layer and the adapters that `caraserve bench lora` computes with."""

from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes, lay_out
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec, parse_spec
from caraserve.profiling.microbench import random_adapter

QKV = SITES[:3]
_HEAD_DIM = 128


def one_layer_spec(hidden: int, layers: int = 1) -> ModelSpec:
    """Layers that have only the projections of attention in full size: LoRA needs no more of the base model."""
    heads = max(1, hidden // _HEAD_DIM)
    return parse_spec(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": 64,
            "vocab_size": 64,
            "max_position_embeddings": 1024,
        }
    )


def adapter_spec(model: ModelSpec, dtype: Dtype, rank: int) -> AdapterSpec:
    """Of q, k and v in every layer, as the papers have it."""
    spans, ends = lay_out(model, dtype, {(layer, site): (rank, 1.0) for layer in range(model.layers) for site in QKV})
    return AdapterSpec(f"synthetic {dtype.name} {rank}", dtype, rank, QKV, ends, spans)


def adapter_of(model: ModelSpec, dtype: Dtype, rank: int) -> HostAdapter:
    """One with random weights, in memory of its own."""
    spec = adapter_spec(model, dtype, rank)
    return random_adapter(model, spec, aligned_bytes(spec.num_bytes))
