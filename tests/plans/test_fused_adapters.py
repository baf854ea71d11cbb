"""Adapters take modules, names and rows from the plan: fused modules, parts whose rows lie anywhere, names in adapters
that differ from the checkpoint's, prefixes of wrappers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.errors import AdapterRejected
from caraserve.lora.manifest import manifest_of, read_manifest
from caraserve.lora.peft import inspect_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.apply import delta_bytes
from caraserve.profiling.microbench import adapter_spec, random_adapter, target_sets
from tests.lora.folders import SPEC, matrices, read
from tests.plans.fused import GATE_UP, HIDDEN, INTERMEDIATE, KV, QKV, Q, Tensors, fused_plan, tensors_of, write


def refusal(folder: Path, plan: DecoderPlan) -> str:
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(folder, plan)
    return caught.value.message


def check_products(adapter: HostAdapter, plan: DecoderPlan, tensors: Tensors) -> None:
    """Checks x A B of each site against the product of the stored tensors, of which it has its part's rows."""
    assert [span.site for span in adapter.spec.spans if span.layer == 1] == [
        site.index for site in plan.layers[1].sites
    ]
    for span in adapter.spec.spans:
        linear = plan.layers[span.layer].linears[span.linear]
        part = linear.parts[plan.layers[span.layer].sites[span.site].part]
        name = f"base_model.model.{linear.name_in_adapters}"
        a, b = (tensors[f"{name}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        x = np.random.default_rng(span.site).standard_normal((3, linear.inputs))
        expected = (x @ a.T @ b.T * (6 / len(a)))[:, list(part.rows)]
        stored_a, stored_b = matrices(adapter, span, plan)
        y = x @ stored_a[:, : linear.inputs].T @ stored_b[:, : part.outputs] * span.scale
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate_up", GATE_UP)
@pytest.mark.parametrize("qkv", QKV)
def test_each_part_of_a_fused_module_gets_its_rows(tmp_path: Path, qkv: str, gate_up: str) -> None:
    plan = fused_plan(qkv, gate_up)
    adapter = read(write(tmp_path, plan), plan, filled=0xFF)
    assert adapter.spec.targets == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    check_products(adapter, plan, tensors_of(plan))


def test_parts_of_a_fused_module_share_a(tmp_path: Path) -> None:
    plan = fused_plan()
    spec = inspect_adapter(write(tmp_path, plan), plan)
    offsets = [span.a_offset for span in spec.spans if span.layer == 0]
    assert spec.spans[0].b_offset == spec.spans[0].padded_rank * HIDDEN * 4  # there is nothing else before it
    assert 0 == offsets[0] == offsets[1] == offsets[2] < offsets[3] < offsets[4] == offsets[5] < offsets[6]
    assert len({span.b_offset for span in spec.spans}) == len(spec.spans)


def test_a_manifest_has_a_fused_module_once(tmp_path: Path) -> None:
    plan = fused_plan("by KV head", "alternating")
    spec = inspect_adapter(write(tmp_path, plan), plan)
    _, _, modules, _ = json.loads(manifest_of(spec))
    assert [module[:3] for module in modules[:4]] == [[0, 0, 4], [0, 1, 4], [0, 2, 9], [0, 3, 4]]
    assert len(modules) == 8
    assert read_manifest(manifest_of(spec), spec.digest, plan) == spec
    with pytest.raises(AdapterRejected, match="not for this base model"):
        read_manifest(manifest_of(spec), spec.digest, replace(plan, layers=plan.layers[:1]))


# --- names ---


def renamed(plan: DecoderPlan, prefix: str, **changed: Any) -> DecoderPlan:
    """Returns a plan with another prefix of its modules' names in the checkpoint."""
    layers = tuple(
        layer.with_linears(lambda one: replace(one, module=prefix + one.module.removeprefix("model.")))
        for layer in plan.layers
    )
    return replace(plan, layers=layers, **changed)


PREFIXES = ("model.language_model.", "language_model.model.", "model.")


@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_prefix_of_a_wrapper_is_accepted(tmp_path: Path, prefix: str) -> None:
    plan = renamed(fused_plan(), "language_model.model.", adapter_prefixes=PREFIXES)
    tensors = {name.replace("language_model.model.", prefix): values for name, values in tensors_of(plan).items()}
    whole = f"{prefix}layers.0.self_attn.qkv_proj"
    adapter = read(write(tmp_path, plan, tensors, alpha_pattern={f"^{whole}$": 6}), plan)
    check_products(adapter, plan, tensors_of(plan))


def test_a_prefix_that_the_plan_lacks_is_refused(tmp_path: Path) -> None:
    plan = renamed(fused_plan(), "language_model.model.", adapter_prefixes=PREFIXES)
    tensors = {name.replace("language_model.", "vision_model."): each for name, each in tensors_of(plan).items()}
    assert "is not LoRA A or B of one of qkv_proj, o_proj, gate_up_proj, down_proj" in refusal(
        write(tmp_path, plan, tensors), plan
    )


def test_one_module_under_two_prefixes_is_refused(tmp_path: Path) -> None:
    plan = fused_plan(adapter_prefixes=PREFIXES)
    tensors = tensors_of(plan)
    name = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
    other = {
        key.replace("model.model.", "model.model.language_model."): tensors[key] for key in tensors if ".0." in key
    }
    assert "are the same module's" in refusal(write(tmp_path, plan, tensors | other), plan)
    tensors[name.replace("model.model.", "model.model.language_model.")] = tensors.pop(name)
    assert "has no lora_" in refusal(write(tmp_path, plan, tensors), plan)


def with_names(plan: DecoderPlan) -> DecoderPlan:
    """Returns a plan whose modules have other names in adapters than in the checkpoint."""

    def change(linear: LinearPlan) -> LinearPlan:
        name = linear.module.replace("model.layers", "transformer.h").replace("self_attn.qkv_proj", "attn.c_attn")
        return replace(linear, adapter_module=name)

    layers = tuple(layer.with_linears(change) for layer in plan.layers)
    return replace(plan, layers=layers, adapter_prefixes=("transformer.",))


def test_names_in_adapters_may_differ_from_those_in_the_checkpoint(tmp_path: Path) -> None:
    plan = with_names(fused_plan())
    adapter = read(write(tmp_path, plan, layers_to_transform=[0, 1], layers_pattern="h"), plan)
    assert adapter.spec.targets == ("c_attn", "o_proj", "gate_up_proj", "down_proj")
    check_products(adapter, plan, tensors_of(plan))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"target_modules": ["qkv_proj"]}, "'qkv_proj'; supported modules are c_attn, o_proj, gate_up_proj, down_proj"),
        ({"layers_pattern": "layers"}, "layers_pattern is 'layers'; the base model's layers are at 'h'"),
        ({"alpha_pattern": {"c.attn": 3}}, "alpha_pattern 'c.attn' is a regular expression; write it as module names"),
        ({"exclude_modules": ["0.attn.c_attn"]}, "transformer.h.0.attn.c_attn.lora_A.weight: adapter_config.json does"),
        ({"rank_pattern": {}}, "mlp.gate_up_proj.lora_A.weight has shape [9, 64]; rank 4 on this base model needs [4,"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_messages_name_the_modules_of_the_plan(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    plan = with_names(fused_plan())
    assert why in refusal(write(tmp_path, plan, **changed), plan)


def test_all_linear_means_all_modules_of_the_plan(tmp_path: Path) -> None:
    plan = with_names(fused_plan())
    whole = tensors_of(plan)
    assert inspect_adapter(write(tmp_path, plan, target_modules="all-linear"), plan).rank == 9
    tensors = {name: values for name, values in whole.items() if "h.1.attn.c_attn" not in name}
    assert "covers transformer.h.1.attn.c_attn, but" in refusal(write(tmp_path, plan, tensors), plan)


def test_a_layer_past_the_last_one_is_named(tmp_path: Path) -> None:
    plan = with_names(fused_plan())
    tensors = {name.replace("h.1.", "h.2."): values for name, values in tensors_of(plan).items()}
    assert "the base model has only 2 layers" in refusal(write(tmp_path, plan, tensors), plan)


def test_layers_may_have_different_modules(tmp_path: Path) -> None:
    fused = fused_plan()
    plan = replace(fused, layers=(fused.layers[0], SPEC.layers[1]))
    adapter = read(write(tmp_path, plan), plan)
    assert adapter.spec.targets == plan.targets
    assert len(adapter.spec.spans) == 14
    check_products(adapter, plan, tensors_of(plan))


# --- profiles ---


def test_profiles_time_the_modules_of_the_plan() -> None:
    plan = fused_plan()
    assert target_sets(plan) == {"qkv": ("qkv_proj",), "all": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}
    assert delta_bytes(plan, 2) == {"qkv": 2 * (Q + 2 * KV), "all": 2 * (Q + 2 * KV + 2 * HIDDEN + 2 * INTERMEDIATE)}
    spec = adapter_spec(plan, Dtype.F32, 8, 1, target_sets(plan)["qkv"])
    assert [(span.layer, span.site) for span in spec.spans] == [(0, 0), (0, 1), (0, 2)]
    adapter = random_adapter(plan, spec, aligned_bytes(spec.num_bytes))
    for span in spec.spans:
        a, b = matrices(adapter, span, plan)
        assert (a != 0).all()
        assert (b[:, : plan.layers[0].sites[span.site].outputs] != 0).all()
