"""Adapters that peft saved are read as peft reads them: the same change of every weight, at the same place."""

import copy
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from caraserve.core.lora_layout import ALIGN_BYTES, HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.lora.peft_fields import PatternTable
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from tests.lora.folders import FIELDS, LINEARS, RANK, SPEC, TARGETS, Tensors, matrices, read, tensors_for, write_adapter

Deltas = dict[tuple[int, str], NDArray[np.float32]]  # (layer, module) → change of the weight, [out, in]

_CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**FIELDS),
    "qwen2": Qwen2Config(**FIELDS | {"architectures": ["Qwen2ForCausalLM"]}),
}
MODULES = [linear.module.replace(".0.", f".{layer}.") for layer in range(12) for linear in LINEARS.values()]

KINDS: dict[str, dict[str, Any]] = {
    "all modules": {"target_modules": list(TARGETS)},
    "all-linear": {"target_modules": "all-linear"},
    "two modules": {"target_modules": ["o_proj", "down_proj"]},
    "an end of a name": {"target_modules": ["self_attn.k_proj", "1.mlp.gate_proj"]},
    "whole names": {"target_modules": ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.v_proj"]},
    "a whole name beside layers": {
        "target_modules": ["model.layers.0.mlp.up_proj", "k_proj"],
        "layers_to_transform": [1],
    },
    "regular expression": {"target_modules": r".*layers\.(0|1)\.(self_attn\.[qv]|mlp\.up)_proj"},
    "one layer": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
    "layers with their list's name": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [0],
        "layers_pattern": ["h", "layers"],
    },
    "excluded by name": {"target_modules": list(TARGETS), "exclude_modules": ["k_proj", "1.mlp.up_proj"]},
    "excluded by expression": {"target_modules": list(TARGETS), "exclude_modules": r".*0\..*_proj"},
    "rank-stabilised": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 6},
    "fractional alpha": {"target_modules": ["q_proj"], "lora_alpha": 0.3},
    "rank 1": {"target_modules": ["v_proj"], "r": 1},
    "rank 512": {"target_modules": ["v_proj"], "r": 512},
    "ranks by module": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 9, r"^model\.layers\.0\.self_attn\.k_proj$": 16},
    },
    "alphas by module": {
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "alpha_pattern": {".*q_proj": 2, r".*\.1\.mlp\.up_proj": 9, "^model.layers.0.self_attn.k_proj": 3},
    },
    "the narrow pattern first": {
        "target_modules": ["q_proj"],
        "alpha_pattern": {"layers.0.self_attn.q_proj": 32, "q_proj": 2},
    },
    "the wide pattern first": {
        "target_modules": ["q_proj"],
        "alpha_pattern": {"q_proj": 2, "layers.0.self_attn.q_proj": 32},
    },
    "ranks, alphas and rank-stabilised": {
        "target_modules": list(TARGETS),
        "use_rslora": True,
        "rank_pattern": {"gate_proj": 3},
        "alpha_pattern": {"gate_proj": 5, "1.self_attn.o_proj": 7},
    },
}


@pytest.fixture(scope="module")
def bases() -> dict[str, Any]:
    create: Any = AutoModelForCausalLM.from_config
    return {family: create(config) for family, config in _CONFIGS.items()}


def spec_of(family: str) -> DecoderPlan:
    return plan_of(_CONFIGS[family].to_dict())


def save(base: Any, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Saves an adapter of random A and B with peft."""
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 4, "lora_alpha": 10, **options}))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    model.save_pretrained(str(folder))
    return folder


def deltas_of_peft(base: Any, folder: Path) -> Deltas:
    """Returns what peft adds to each weight when it loads the folder."""
    model = PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
    deltas: Deltas = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            words = name.split(".")
            deltas[int(words[-3]), words[-1]] = module.get_delta_weight("default").detach().numpy()
    return deltas


def deltas_of(adapter: HostAdapter, plan: DecoderPlan) -> Deltas:
    """Returns what a backend adds to each weight, computed from the image's bytes alone."""
    deltas: Deltas = {}
    for span in adapter.spec.spans:
        linear = plan.layers[span.layer].linears[span.linear]
        a, b = matrices(adapter, span, plan)
        deltas[span.layer, linear.target] = b[:, : linear.outputs].T @ a[:, : linear.inputs] * np.float32(span.scale)
    return deltas


def assert_same(ours: Deltas, theirs: Deltas) -> None:
    assert ours.keys() == theirs.keys()
    for place, delta in theirs.items():
        np.testing.assert_allclose(ours[place], delta, rtol=1e-6, atol=1e-6 * np.abs(delta).max(), err_msg=str(place))


@pytest.mark.parametrize(("family", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen2", "all modules")])
def test_every_weight_changes_as_in_peft(bases: Mapping[str, Any], tmp_path: Path, family: str, kind: str) -> None:
    """Also in a family whose linear layers have biases."""
    folder = save(bases[family], tmp_path, **KINDS[kind])
    assert_same(deltas_of(read(folder, spec_of(family)), spec_of(family)), deltas_of_peft(bases[family], folder))


@pytest.mark.parametrize("init", ["gaussian", "orthogonal", "eva", False])
def test_init_lora_weights_changes_nothing(bases: Mapping[str, Any], tmp_path: Path, init: object) -> None:
    folder = save(bases["llama"], tmp_path, target_modules=["q_proj"])
    config = folder / "adapter_config.json"
    expected = deltas_of(read(folder, SPEC), SPEC)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"init_lora_weights": init}))
    assert_same(deltas_of(read(folder, SPEC), SPEC), expected)


@pytest.mark.parametrize(
    ("torch_dtype", "dtype"),
    [(torch.float32, Dtype.F32), (torch.bfloat16, Dtype.BF16), (torch.float16, Dtype.F16)],
    ids=["fp32", "bf16", "fp16"],
)
def test_the_stored_dtype_is_kept(
    bases: Mapping[str, Any], tmp_path: Path, torch_dtype: torch.dtype, dtype: Dtype
) -> None:
    folder = save(bases["llama"], tmp_path, torch_dtype, target_modules=["q_proj", "up_proj"])
    adapter = read(folder, SPEC)
    assert adapter.spec.dtype is dtype
    assert_same(deltas_of(adapter, SPEC), deltas_of_peft(bases["llama"], folder))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_mixed_dtypes_become_fp32(bases: Mapping[str, Any], tmp_path: Path, half: torch.dtype) -> None:
    path = save(bases["llama"], tmp_path, target_modules=["q_proj"]) / "adapter_model.safetensors"
    save_file({name: t.to(half) if "lora_A" in name else t for name, t in load_file(path).items()}, path)
    adapter = read(tmp_path, SPEC)
    assert adapter.spec.dtype is Dtype.F32
    assert_same(deltas_of(adapter, SPEC), deltas_of_peft(bases["llama"], tmp_path))


@pytest.mark.parametrize("rename", [("lora_", "lora_"), (".weight", ".default.weight"), ("base_model.model.", "")])
def test_tensor_names_of_other_programs_are_accepted(tmp_path: Path, rename: tuple[str, str]) -> None:
    expected = deltas_of(read(write_adapter(tmp_path / "peft"), SPEC), SPEC)
    tensors = {name.replace(*rename): values for name, values in tensors_for().items()}
    assert_same(deltas_of(read(write_adapter(tmp_path / "other", tensors=tensors), SPEC), SPEC), expected)


def test_the_image_is_aligned_and_padded_with_zeros(tmp_path: Path) -> None:
    adapter = read(write_adapter(tmp_path), SPEC, filled=0xFF)
    assert adapter.data.ctypes.data % ALIGN_BYTES == 0
    assert adapter.data.size == adapter.spec.num_bytes
    for span in adapter.spec.spans:
        linear = SPEC.layers[span.layer].linears[span.linear]
        for values, columns in zip(matrices(adapter, span, SPEC), (linear.inputs, linear.outputs), strict=True):
            assert not values[RANK:].any()
            assert not values[:, columns:].any()


def test_layers_follow_one_another(bases: Mapping[str, Any], tmp_path: Path) -> None:
    """A group of layers is one range of bytes; a layer that is not adapted has none."""
    folder = save(bases["llama"], tmp_path, target_modules=list(TARGETS), layers_to_transform=[1])
    spec = inspect_adapter(folder, SPEC)
    assert spec.layer_ends[0] == 0
    assert set(spec.layer_ends[1:]) == {spec.num_bytes}
    assert all(offset < spec.num_bytes for span in spec.spans for offset in (span.a_offset, span.b_offset))


def test_an_adapter_larger_than_its_extent_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    room = aligned_bytes(inspect_adapter(folder, SPEC).num_bytes - ALIGN_BYTES)
    with pytest.raises(AdapterRejected, match="have changed"):
        read_adapter(folder, SPEC, room)


def test_inspecting_gives_the_same_spec_as_reading(bases: Mapping[str, Any], tmp_path: Path) -> None:
    folder = save(bases["llama"], tmp_path, target_modules=["down_proj", "q_proj"], rank_pattern={"q_proj": 9})
    spec = inspect_adapter(folder, SPEC)
    assert spec == read(folder, SPEC).spec
    assert (spec.rank, spec.targets) == (9, ("q_proj", "down_proj"))


def narrowed(tensors: Tensors, module: str, rank: int) -> Tensors:
    """Returns the tensors with a smaller rank of some modules."""
    cut = {name: values[:rank] if "lora_A" in name else values[:, :rank] for name, values in tensors.items()}
    return {name: np.ascontiguousarray(cut[name] if module in name else tensors[name]) for name in tensors}


DIGESTS: dict[str, tuple[dict[str, Any], Tensors]] = {
    "4c4671e8e15aff5418697c85e0a1ce99a4e5b8b12d0481720709fcdfd1f7a681": (
        {"target_modules": list(TARGETS)},
        tensors_for(TARGETS),
    ),
    "957cfadce5d5639167c1bf4ea2d855ac5c13015c0a887248ec695cf9b6b4d210": (
        {"target_modules": list(TARGETS), "rank_pattern": {"o_proj": 2, "1.mlp.up_proj": 3}, "use_rslora": True},
        narrowed(narrowed(tensors_for(TARGETS), "o_proj", 2), "1.mlp.up_proj", 3),
    ),
    "431a94c6a30fa7a51fa8fa5bfcc92ae130504eb86c2e8f4637a606c4f77c8772": (
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
        {name: values.astype(np.float16) for name, values in tensors_for(("q_proj", "down_proj"), (1,)).items()},
    ),
}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("expected", DIGESTS, ids=["all modules", "several ranks", "one layer, fp16"])
def test_digests_are_those_of_earlier_versions(tmp_path: Path, family: str, expected: str) -> None:
    """Registries, caches on disk and other instances know adapters by them."""
    model = plan_of(FIELDS | {"architectures": [f"{family}ForCausalLM"], "head_dim": 16})
    assert inspect_adapter(write_adapter(tmp_path, *DIGESTS[expected]), model).digest == expected


def digest(folder: Path, changes: Mapping[str, Any] | None = None, tensors: Any = None) -> str:
    return inspect_adapter(write_adapter(folder, changes, tensors), SPEC).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_dropout": 0.5},
        {"base_model_name_or_path": "elsewhere"},
        {"target_modules": ".*q_proj"},
        {"lora_alpha": 99, "alpha_pattern": {"q_proj": 8}},
    ],
    ids=str,
)
def test_the_digest_is_equal_if_the_arithmetic_is_equal(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert digest(tmp_path, changes) == digest(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"lora_alpha": 9}, {"use_rslora": True}, {"alpha_pattern": {"0.self_attn.q_proj": 9}}], ids=str
)
def test_the_digest_changes_with_the_scale(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert digest(tmp_path, changes) != digest(tmp_path)


def test_the_digest_changes_with_the_order_of_patterns(tmp_path: Path) -> None:
    patterns = [("q_proj", 2), ("layers.0.self_attn.q_proj", 32)]
    one, other = ({"alpha_pattern": dict(order)} for order in (patterns, patterns[::-1]))
    assert digest(tmp_path, one) != digest(tmp_path, other)


def test_the_digest_changes_with_a_single_weight(tmp_path: Path) -> None:
    tensors = tensors_for()
    next(iter(tensors.values()))[0, 0] += 1
    assert digest(tmp_path, tensors=tensors) != digest(tmp_path)


def patterns_of_peft() -> list[str]:
    ends = ["q_proj", "mlp.up_proj", *(f"{n}.self_attn.k_proj" for n in ("1", "11", "01"))]
    ends += [f"layers.{n}.mlp.up_proj" for n in (1, 11)] + ["model.layers.1.mlp.up_proj", "mlp.q_proj"]
    dotted = [end.replace(".", dot) for end in ends for dot in (".", r"\.")]
    return ["".join(parts) for parts in itertools.product(("", "^"), ("", ".*", ".*.", r".*\."), dotted, ("", "$"))]


def test_a_pattern_matches_the_same_modules_as_in_peft_or_is_refused() -> None:
    accepted = 0
    for pattern in patterns_of_peft():
        try:
            table = PatternTable(0, [(pattern, 1)], SPEC)
        except ValueError:
            continue
        accepted += 1
        theirs = [get_pattern_key([pattern], module) == pattern for module in MODULES]
        assert [table.of(module) == 1 for module in MODULES] == theirs, pattern
    assert accepted > 200


def test_the_first_of_several_patterns_decides_as_in_peft() -> None:
    patterns = ["1.mlp.up_proj", r".*\.up_proj", "^model.layers.2.mlp.up_proj", "up_proj", "q_proj$", "q_proj"]
    for order in itertools.permutations(patterns):
        table = PatternTable(-1, [(pattern, place) for place, pattern in enumerate(order)], SPEC)
        for module in ("model.layers.1.mlp.up_proj", "model.layers.2.mlp.up_proj", "model.layers.0.self_attn.q_proj"):
            assert order[table.of(module)] == get_pattern_key(order, module)
