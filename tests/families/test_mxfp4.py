"""A GPT-OSS checkpoint with experts in MXFP4 gives the logits of transformers with the numbers that they stand for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from caraserve.errors import ModelLoadError
from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from tests.families.cases import CASES, VOCAB, arguments_of
from tests.families.model import TOKENS, logits_of, randomise
from tests.families.test_families import BACKENDS, compare
from tests.gpu.torch_kernels import torch_kernels
from tests.plans.driving import logprobs

CASE = CASES["gpt-oss"]


def write(folder: Path) -> tuple[Path, Any]:
    """Saves a model whose experts are random codes and scales; returns it with their numbers."""
    fields = arguments_of(CASE) | {"intermediate_size": 64, "num_hidden_layers": 2}
    model: Any = transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields)).eval()
    model.config._attn_implementation = "eager"
    randomise(model, CASE)
    model.save_pretrained(folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 126, blocks.shape[:3], generator=generator, dtype=torch.uint8)
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert parameter.shape == (experts, inputs, outputs)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.fixture(autouse=True)
def torch_for_triton() -> Iterator[None]:
    """Replaces the Triton kernels by torch's."""
    with torch_kernels():
        yield


@pytest.mark.parametrize("backend", BACKENDS)
def test_experts_in_mxfp4_are_those_of_transformers(backend: str, tmp_path: Path) -> None:
    folder, model = write(tmp_path)
    plan, (backend_of, alternatives) = load_plan(folder), BACKENDS[backend]
    with FolderReader(folder) as read:
        served = backend_of(plan, read)
    try:
        compare(logprobs(served, VOCAB, TOKENS, (17, 1, 22), alternatives), logits_of(model))
    finally:
        served.close()
    experts = 2 * 5 * 3 * 96 * 64
    assert plan.weight_bytes(4) == 4 * (plan.num_parameters - experts) + experts * 17 // 32


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_that_is_not_a_number_is_refused(backend: str, tmp_path: Path) -> None:
    folder, _ = write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][4, 95, 1] = 255
    save_file(tensors, folder / "model.safetensors")
    refusal = pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.experts\.down_proj_scales has a scale of 255")
    with FolderReader(folder) as read, refusal:
        BACKENDS[backend][0](load_plan(folder), read)
