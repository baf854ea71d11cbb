"""Models in GGUF files give the logits that transformers gives with the same weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from caraserve.model.checkpoint import open_tensors
from caraserve.model.families import load_plan
from tests.families import gguf_models
from tests.families.cases import CASES, Case, arguments_of
from tests.families.model import TOKENS, logits_of, randomise
from tests.plans.executor import Executor

# What the converter does not write, or GGUF's architecture does not have.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "qwen 2": {"use_sliding_window": False},
    "qwen 2, experts": {"use_sliding_window": False, "decoder_sparse_step": 1},
    "qwen 3, experts": {"use_sliding_window": False, "mlp_only_layers": []},
    "mixtral": {"sliding_window": None},
    "smollm 3": {"no_rope_layer_interval": 4},
    "gemma 2": {"query_pre_attn_scalar": 32},
    "gemma 3": {"query_pre_attn_scalar": 32},
    "gpt 2": {"scale_attn_by_inverse_layer_idx": False},
}
_NAMES = (
    *("llama", "llama, biases", "llama, linear", "llama, llama3", "llama, yarn", "falcon 3", "mixtral"),
    *("gemma", "gemma 2", "gemma 3", "qwen 2", "qwen 3", "qwen 2, experts", "qwen 3, experts"),
    *("phi 2", "phi 3", "phi 4 mini, short", "phi 4 mini, long", "glm 4", "glm 4.5", "granite", "granite, experts"),
    *("olmo 2", "olmo 3", "exaone 4", "exaone 4, no windows", "hunyuan", "seed-oss", "smollm 3"),
    *("cohere", "cohere, norms of heads", "cohere 2", "nemotron", "starcoder 2", "stablelm", "stablelm, parallel"),
    *("gpt 2", "gpt-oss"),
)


def model_of(case: Case) -> Any:
    config = getattr(transformers, f"{case.config}Config")(**arguments_of(case))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, case.model)(config).eval()
    randomise(model, case)
    return model


def logits_in(path: Path) -> Any:
    plan = load_plan(path)
    with open_tensors(path, plan.stored_names) as read:
        return Executor(plan, read).logits(TOKENS)


@pytest.mark.parametrize("name", _NAMES)
def test_a_model_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = model_of(replace(case, fields=case.fields | _LEFT_OUT.get(name, {})))
    found, exact = logits_in(gguf_models.write(model, tmp_path / "model.gguf")), logits_of(model)
    assert np.abs(found - exact).max() < 1e-4 * exact.std()
