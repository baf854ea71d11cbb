"""Quantised checkpoints answer token for token like transformers + peft over the numbers that they stand for."""

import asyncio
import json
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from caraserve.cpu.weights import dummy_reader, load_model
from caraserve.errors import AdapterRejected, ModelLoadError
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan
from tests.oracle import packed_weights as weights
from tests.oracle.models import make_adapter, make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.packed_weights import Make
from tests.oracle.subject import KINDS as ADAPTERS
from tests.serving import engine_config, lora_config, model_config, running, submit

_PLAIN = "1.mlp.up_proj"  # stays numbers, of which config.json does not say that


@dataclass(frozen=True)
class Case:
    """A form of checkpoint. `makes`: the weights of the modules that a regular expression finds, the first that does.
    `dtype`: what config.json says that weights were."""

    section: Mapping[str, Any]
    makes: Mapping[str, Make]
    dtype: str = "float16"


def gptq(version: int) -> Case:
    """In one layer the codes have 4 bits, in the other 8."""
    section = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}
    dynamic = {
        "+:.*\\.1\\.mlp": {"bits": 8, "group_size": 32},
        "+:.*\\.1\\..*": {"bits": 8, "group_size": -1, "desc_act": False},
        ".*o_proj": {"sym": True},
    }
    makes = {
        "1.mlp": weights.gptq(8, 32, version=version, shuffled=True),
        "layers.1": weights.gptq(8, 0, version=version),
        "o_proj": weights.gptq(4, 16, version=version, symmetric=True, shuffled=True),
        "": weights.gptq(4, 16, version=version, shuffled=True),
    }
    form = {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    return Case({**section, "dynamic": dynamic, **form}, makes)


_IN_GROUPS = {"strategy": "group", "group_size": 32}
_ASYMMETRIC = {"symmetric": False}
_FP4 = {"type": "float", "num_bits": 4}
_COMPRESSED: tuple[tuple[str, str, dict[str, Any], Make], ...] = (  # modules, format, arguments of weights
    ("0.self_attn.q_proj", "pack-quantized", {"num_bits": 4} | _IN_GROUPS, weights.packed(4, 32, symmetric=True)),
    (
        "0.self_attn.k_proj",
        "pack-quantized",
        {"num_bits": 4, "actorder": "group"} | _IN_GROUPS | _ASYMMETRIC,
        weights.packed(4, 32, symmetric=False, shuffled=True),
    ),
    ("0.self_attn.v_proj", "pack-quantized", {"num_bits": 8} | _IN_GROUPS, weights.packed(8, 32, symmetric=True)),
    (
        "0.self_attn.o_proj",
        "pack-quantized",
        {"num_bits": 8} | _IN_GROUPS | _ASYMMETRIC,
        weights.packed(8, 32, symmetric=False),
    ),
    ("0.mlp.gate_proj", "pack-quantized", {"num_bits": 4} | _ASYMMETRIC, weights.packed(4, 0, symmetric=False)),
    ("0.mlp.up_proj", "nvfp4-pack-quantized", _FP4 | {"strategy": "tensor_group", "group_size": 16}, weights.nvfp4),
    ("0.mlp.down_proj", "mxfp4-pack-quantized", _FP4 | _IN_GROUPS, weights.mxfp4),
    (
        "1.self_attn.(q|k)_proj",
        "float-quantized",
        {"type": "float", "strategy": "block", "block_structure": [128, 128]},
        weights.eight_bits(128, 128, ".weight_scale"),
    ),
    ("1.self_attn.v_proj", "float-quantized", {"type": "float"}, weights.eight_bits(1, 0, ".weight_scale")),
    (
        "1.self_attn.o_proj",
        "float-quantized",
        {"type": "float", "strategy": "tensor"},
        weights.eight_bits(0, 0, ".weight_scale"),
    ),
    ("1.mlp.*", "int-quantized", {}, weights.eight_bits(1, 0, ".weight_scale", is_float=False)),
)


def compressed() -> Case:
    """Each module of a layer has another format."""
    common = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None}
    groups = {
        f"group_{index}": {"targets": [f"re:.*layers\\.{module}$"], "format": form, "weights": common | changed}
        for index, (module, form, changed, _) in enumerate(_COMPRESSED)
    }
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    return Case({**section, "ignore": ["lm_head"]}, {module: make for module, _, _, make in _COMPRESSED})


_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CASES = {
    "gptq": gptq(1),
    "gptq, version 2": gptq(2),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}, {"": weights.awq(16)}),
    "compressed-tensors": compressed(),
    "fp8, blocks": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        {"": weights.eight_bits(128, 128, ".weight_scale_inv")},
    ),
    "fp8": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]},
        {
            "layers.0": weights.eight_bits(1, 0, ".weight_scale"),
            "mlp": weights.eight_bits(0, 0, ".weight_scale"),
            "": weights.eight_bits(0, 0, ".weight_scale_inv", is_scalar=True),
        },
    ),
    "bitsandbytes int8": Case({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"": weights.int8}),
    "bitsandbytes fp4": Case(
        _BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"},
        {"": weights.four_bits("fp4", torch.bfloat16, nested=False)},
        "bfloat16",
    ),
    "bitsandbytes nf4, double quantisation": Case(
        _BITSANDBYTES | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"": weights.four_bits("nf4", torch.bfloat16, nested=True)},
        "bfloat16",
    ),
}


def write(source: Path, folder: Path, case: Case, plain: Path | None = None) -> Path:
    """Writes a model with random packed weights in all its linears but one, and to `plain` the numbers that they stand
    for."""
    rng, stored, numbers = np.random.default_rng(0), dict[str, Any](), load_file(source / "model.safetensors")
    for name, tensor in list(numbers.items()):
        module = name.removesuffix(".weight")
        make = next((make for pattern, make in case.makes.items() if re.search(pattern, module)), None)
        if "layers." not in name or tensor.dim() != 2 or module.endswith(_PLAIN) or make is None:
            stored[name] = tensor
            continue
        tensors, values = make(*tensor.shape, rng)
        stored |= {f"{module}{end}": torch.as_tensor(one).contiguous() for end, one in tensors.items()}
        numbers[name] = torch.from_numpy(values.astype(np.float32))
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    quantised = config | {"quantization_config": case.section, "dtype": case.dtype}
    for target, tensors, written in ((folder, stored, quantised), (plain, numbers, config)):
        if target is not None:
            shutil.copytree(source, target)
            save_file(tensors, target / "model.safetensors", {"format": "pt"})
            (target / "config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source"), "llama3")


@pytest.fixture(scope="module")
def adapters(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_adapters(tmp_path_factory.mktemp("adapters"), source, {"r8": ADAPTERS["r8"]})


@pytest.mark.parametrize("case", CASES)
async def test_packed_checkpoints_answer_like_their_numbers(
    case: str, source: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write(source, packed, CASES[case], plain)
    assert len(load_plan(packed).layer_formats) > 1
    oracle, rng = Oracle(plain, adapters), random.Random(1)
    asked = [(prompt_of(rng, tokens), name) for tokens in (3, 40) for name in (None, *adapters)]
    async with running(model_config(packed, "float32"), lora_config(adapters), engine_config()) as engine:
        answers = await asyncio.gather(*(submit(engine, *each, max_tokens=8) for each in asked))
    oracle.check_answers(asked, answers)


def image(base: Path, adapter: Path) -> bytes:
    """Returns the bytes of an adapter as they lie on a device."""
    plan = load_plan(base)
    tensors = BaseTensors(base, plan)
    into = np.zeros(inspect_adapter(adapter, plan, tensors).num_bytes, np.uint8)
    return bytes(read_adapter(adapter, plan, into, tensors).data)


@pytest.mark.parametrize("case", ["gptq", "compressed-tensors", "bitsandbytes nf4, double quantisation"])
def test_adapters_that_need_the_base_are_those_over_its_numbers(case: str, source: Path, tmp_path: Path) -> None:
    """DoRA divides by norms of the base's weights; rows of the head are compared with the base's."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write(source, packed, CASES[case], plain)
    adapter = make_adapter(tmp_path / "dora", plain, rank=4, seed=3, dora=True, saved={"lm_head": [3, 5]})
    assert image(packed, adapter) == image(plain, adapter)


@pytest.mark.parametrize("case", ["gptq", "fp8", "bitsandbytes fp4"])
def test_a_copy_of_quantised_weights_is_refused_by_its_name(case: str, source: Path, tmp_path: Path) -> None:
    packed = write(source, tmp_path / "packed", CASES[case])
    saved = {"targets": ["q_proj"], "saved": {"k_proj": [3]}}
    with pytest.raises(AdapterRejected, match=r"tensor .*model\.layers\.0\.self_attn\.k_proj\.weight"):
        image(packed, make_adapter(tmp_path / "adapter", source, rank=4, seed=3, **saved))


@pytest.mark.parametrize("case", ["gptq", "awq", "bitsandbytes int8", "bitsandbytes fp4"])
def test_random_weights_of_packed_formats_are_refused_by_name(case: str, source: Path, tmp_path: Path) -> None:
    plan = load_plan(write(source, tmp_path / "packed", CASES[case]))
    says = (
        r"^model\.layers\.0\.self_attn\.q_proj\..*: random weights of its format are not made .* without --load-format"
    )
    with pytest.raises(ModelLoadError, match=says):
        load_model(plan, Dtype.F32, 64, dummy_reader(0, Dtype.F32), lambda: None)
