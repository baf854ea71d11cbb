"""The spec of a small model, for tests that need no checkpoint."""

from typing import Any

from caraserve.model.spec import ModelSpec, parse_spec

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SPEC: ModelSpec = parse_spec(CONFIG)
