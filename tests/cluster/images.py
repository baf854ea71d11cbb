"""Adapter images of random bytes for a small model, with the digests that they have."""

import numpy as np

from caraserve.core.lora_layout import AdapterSpec, HostAdapter, aligned_bytes, lay_out, modules_of
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan

TARGETS = ("q_proj", "k_proj", "v_proj")
MODEL: DecoderPlan = plan_of(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
)


def image(rank: int = 8, seed: int = 0) -> HostAdapter:
    """Returns an image of random bytes; equal arguments give equal images."""
    spans, layer_ends = lay_out(MODEL, Dtype.F32, dict.fromkeys(modules_of(MODEL, TARGETS), (rank, 2.0)))
    data = aligned_bytes(layer_ends[-1])
    data[:] = np.frombuffer(np.random.default_rng(seed).bytes(data.nbytes), np.uint8)
    hasher = ChunkHasher(layer_ends)
    hasher.update(data.data)
    spec = AdapterSpec("", Dtype.F32, rank, TARGETS, layer_ends, spans)
    return HostAdapter(identified(spec, hasher.hashes), data)
