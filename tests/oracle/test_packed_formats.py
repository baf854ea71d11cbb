"""Checkpoints with packed weights answer like transformers + peft over the numbers that they stand for."""

import asyncio
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from caraserve.model.formats import Array
from caraserve.model.formats.bitsandbytes import TABLES
from tests.oracle.models import make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.subject import KINDS as ADAPTERS
from tests.serving import engine_config, lora_config, model_config, running, submit

GROUP = 16
Write = Callable[[str, int, int, np.random.Generator], dict[str, Array]]


def words(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def gptq(module: str, outputs: int, inputs: int, rng: np.random.Generator) -> dict[str, Array]:
    groups = inputs // GROUP
    return {
        f"{module}.qweight": words(rng, inputs // 8, outputs),
        f"{module}.qzeros": words(rng, groups, outputs // 8),
        f"{module}.scales": (rng.random((groups, outputs)) * 0.4 / inputs**0.5).astype(np.float16),
        f"{module}.g_idx": rng.permutation(np.arange(inputs, dtype=np.int32) // GROUP),
    }


def awq(module: str, outputs: int, inputs: int, rng: np.random.Generator) -> dict[str, Array]:
    made = gptq(module, outputs, inputs, rng)
    del made[f"{module}.g_idx"]
    return made | {f"{module}.qweight": words(rng, inputs, outputs // 8)}


def nf4(module: str, outputs: int, inputs: int, rng: np.random.Generator) -> dict[str, Array]:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [outputs, inputs]}
    return {
        f"{module}.weight": rng.integers(0, 256, (outputs * inputs // 2, 1), np.uint8),
        f"{module}.weight.absmax": rng.random(-(-outputs * inputs // 64), np.float32) * np.float32(4 / inputs**0.5),
        f"{module}.weight.quant_map": np.array(TABLES["nf4"], np.float32),
        f"{module}.weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


CASES: dict[str, tuple[dict[str, Any], Write]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, nf4),
}


def write(source: Path, folder: Path, section: dict[str, Any], make: Write) -> Path:
    """Writes a model with random packed weights in all its linears but one, which stays as numbers."""
    shutil.copytree(source, folder)
    rng, arrays = np.random.default_rng(0), dict[str, Array]()
    for name, tensor in load_file(source / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if "layers." in name and tensor.dim() == 2 and not module.endswith("1.mlp.up_proj"):
            arrays |= make(module, *tensor.shape, rng)
        else:
            arrays[name] = tensor.numpy()
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": section}), encoding="utf-8")
    return folder


def as_numbers(source: Path, packed: Path, folder: Path) -> Path:
    """Writes the numbers that packed weights stand for, for transformers."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    with FolderReader(packed) as reader:
        for linear in (linear for layer in load_plan(packed).layers for linear in layer.linears):
            matrix = linear.format.read(reader, linear.module, (linear.outputs, linear.inputs))
            tensors[f"{linear.module}.weight"] = torch.from_numpy(linear.format.values(matrix).copy())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("case", CASES)
async def test_packed_checkpoints_answer_like_their_numbers(case: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / "source", "llama3")
    packed = write(source, tmp_path / "packed", *CASES[case])
    assert len(load_plan(packed).layer_formats) == 2  # one module has numbers, of which config.json does not say that
    plain = as_numbers(source, packed, tmp_path / "plain")
    adapters = make_adapters(tmp_path, plain, {name: ADAPTERS[name] for name in ("r8", "r13")})
    oracle, rng = Oracle(plain, adapters), random.Random(1)
    asked = [(prompt_of(rng, tokens), name) for tokens in (3, 40) for name in (None, *adapters)]
    async with running(model_config(packed), lora_config(adapters), engine_config()) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=10) for each in asked))
    oracle.check_answers(asked, answers)
