"""InternLM2 and 3, whose code transformers does not have: a Llama model stored in their form gives Llama's logits."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from tests.families.cases import CASES
from tests.families.model import TOKENS, make
from tests.families.test_families import LIMIT, distance
from tests.plans.executor import Executor

HEADS, KV_HEADS, DIM = 6, 2, 16
NAMES = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def stored_as_internlm2(folder: Path) -> None:
    """Rewrites a Llama checkpoint: rows of q, k and v lie together by key-value head."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = {}
    for name, values in tensors.items():
        if "self_attn.q_proj" in name:
            q, k, v = (tensors[name.replace("q_proj", f"{role}_proj")] for role in "qkv")
            grouped = [one.reshape(KV_HEADS, -1, DIM, one.shape[1]) for one in (q, k, v)]
            joined = np.concatenate(grouped, axis=1).reshape(-1, q.shape[1])
            changed[name.replace("self_attn.q_proj", "attention.wqkv")] = joined
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in NAMES.items():
                name = name.replace(old, new)
            changed[name] = values
    save_file(changed, path)


@pytest.mark.parametrize(("architecture", "model_type"), [("InternLM2", "internlm2"), ("InternLM3", "internlm3")])
def test_the_plan_gives_the_logits_of_the_llama_that_it_was_made_of(
    architecture: str, model_type: str, tmp_path: Path
) -> None:
    made = make(CASES["llama"], tmp_path)
    config = json.loads((made.folder / "config.json").read_text())
    config |= {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type, "bias": False}
    (made.folder / "config.json").write_text(json.dumps(config | {"qkv_bias": False}))
    if model_type == "internlm2":
        stored_as_internlm2(made.folder)
    plan = load_plan(made.folder)
    assert plan.family == model_type
    with FolderReader(made.folder, plan.stored_names) as read:
        assert distance(Executor(plan, read).logits(TOKENS), made.logits) < LIMIT
