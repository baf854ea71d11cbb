"""Models in GGUF files give the logits that transformers gives with the same weights."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model

from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.checkpoint import open_tensors, stored_tensors
from caraserve.model.families import load_plan
from caraserve.model.formats.gguf_blocks import GGUF_BLOCKS
from caraserve.model.gguf_reader import GgufFile
from tests.families import gguf_models
from tests.families.cases import CASES, Case, arguments_of
from tests.families.model import TOKENS, logits_of, randomise
from tests.model.gguf_files import Blocks, random_blocks, write_gguf
from tests.model.tensors import Tensors
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
    *("gpt 2", "gpt-oss", "ministral 3", "qwen 3.5", "glm", "ernie 4.5"),
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


def quantise(path: Path) -> None:
    """Replaces the matrices of a GGUF file by random blocks of two types."""
    rng, made = np.random.default_rng(1), dict[str, NDArray[Any] | Blocks]()
    with GgufFile(path) as file:
        for index, name in enumerate(file.names):
            kind, inverse = ("Q8_0", 700) if index % 2 else ("Q4_0", 60)
            values = file.raw(name)
            made[name] = random_blocks(rng, kind, *values.shape, 1 / inverse) if values.ndim == 2 else values
        metadata = file.metadata
    write_gguf(path, metadata, made)


def test_columns_of_blocks_are_those_of_heads(tmp_path: Path) -> None:
    """The converter reorders heads within blocks of a delta net's last matrix before it quantises them."""
    fields = {"hidden_size": 256, "linear_num_value_heads": 6, "linear_value_head_dim": 128}
    case = CASES["qwen 3.5"]
    model = model_of(replace(case, fields=case.fields | fields))
    path, rng = gguf_models.write(model, tmp_path / "model.gguf"), np.random.default_rng(1)
    made, state = dict[str, NDArray[Any] | Blocks](), model.state_dict()
    with GgufFile(path) as file:
        metadata, numbers = file.metadata, {name: file.raw(name) for name in file.names}
    for name, values in numbers.items():
        made[name] = values
        if match := re.fullmatch(r"blk\.(\d)\.ssm_out\.weight", name):
            made[name] = blocks = random_blocks(rng, "Q6_K", *values.shape, 1 / 16000)
            form = GGUF_BLOCKS["Q6_K"]
            of_tiles = form.values(form.read(Tensors({"a.weight": blocks.rows}), "a", blocks.shape))
            of_heads = of_tiles.reshape(256, 3, 2, 128).swapaxes(1, 2).reshape(256, -1)
            state[f"model.layers.{match[1]}.linear_attn.out_proj.weight"].copy_(torch.from_numpy(of_heads))
    write_gguf(path, metadata, made)
    exact = logits_of(model)
    assert np.abs(logits_in(path) - exact).max() < 1e-4 * exact.std()


def with_values_of(model: Any, path: Path) -> Any:
    """Returns a model of transformers with the values that a file's blocks stand for."""
    plan, stored, state = load_plan(path), stored_tensors(path), model.state_dict()
    for name, in_file in plan.names_in_file.items():
        with stored.open(in_file) as (rows, _):
            state[name] = torch.tensor(rows(0, stored.shape(in_file)[0]))
    model.load_state_dict(state)
    return model


def test_blocks_give_what_their_values_give_also_with_an_adapter_that_needs_norms(tmp_path: Path) -> None:
    """DoRA divides by the norms of the base's rows."""
    model = model_of(replace(CASES["llama"], fields={"intermediate_size": 64}))
    path = gguf_models.write(model, tmp_path / "model.gguf")
    quantise(path)
    model = with_values_of(model, path)
    exact = logits_of(model)
    assert np.abs(logits_in(path) - exact).max() < 1e-4 * exact.std()
    model.save_pretrained(tmp_path / "folder")
    fields = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, use_dora=True, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, fields)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.create_or_update_model_card = lambda folder: None
    adapted.save_pretrained(str(tmp_path / "adapter"))
    images = []
    for base in (path, tmp_path / "folder"):
        plan = load_plan(base)
        tensors = BaseTensors(base, plan)
        into = np.zeros(inspect_adapter(tmp_path / "adapter", plan, tensors).num_bytes, np.uint8)
        images.append(bytes(read_adapter(tmp_path / "adapter", plan, into, tensors).data))
    assert images[0] == images[1]
