"""Adapters of a model with experts: those that change experts are refused with their number and size."""

from pathlib import Path

import numpy as np
import pytest

from caraserve.errors import AdapterRejected
from caraserve.lora.peft import inspect_adapter
from tests.plans.fused import Tensors, tensors_of, write
from tests.plans.made_up import PLANS

PLAN = PLANS["experts"]()
MATRIX = np.ones((4, 8), np.float32)  # 128 bytes


def refusal(folder: Path, more: Tensors, **config: object) -> str:
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(write(folder, PLAN, tensors_of(PLAN) | more, **config), PLAN)
    return caught.value.message


def test_experts_of_their_own_are_counted(tmp_path: Path) -> None:
    names = [f"base_model.model.model.layers.{layer}.mlp.experts.{expert}" for layer in (1, 2) for expert in (0, 5, 7)]
    modules = [
        f"{name}.{module}_proj.lora_{half}.weight" for name in names for module in ("gate", "up") for half in "AB"
    ]
    assert refusal(tmp_path, dict.fromkeys(modules, MATRIX)) == (
        "the adapter changes 6 experts (3.0 KiB); adapters of experts are not supported; attention, router and shared "
        "experts are"
    )


def test_tensors_for_all_experts_of_a_layer_count_for_each(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.3.mlp.experts"
    tensors = {f"{name}.{inner}lora_{half}.weight": MATRIX for inner in ("", "base_layer.") for half in "AB"}
    message = refusal(tmp_path, tensors, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    assert message.startswith("the adapter changes 8 experts (512 B);")


def test_routers_and_shared_experts_are_adapted(tmp_path: Path) -> None:
    spec = inspect_adapter(write(tmp_path, PLAN), PLAN)
    assert {"router", "shared_gate", "gate_proj", "up_proj", "down_proj"} < set(spec.targets)


def test_a_router_may_be_targeted_by_its_parameter(tmp_path: Path) -> None:
    tensors = {name: value for name, value in tensors_of(PLAN).items() if ".router." in name or ".c_attn." in name}
    by_module = write(tmp_path / "module", PLAN, tensors, target_modules=["c_attn", "router"])
    by_parameter = {"target_modules": ["c_attn"], "target_parameters": ["router.weight"]}
    expected = inspect_adapter(by_module, PLAN).digest
    assert inspect_adapter(write(tmp_path / "a", PLAN, tensors, **by_parameter), PLAN).digest == expected
    for field, value in (("alpha_pattern", {"router": 2}), ("layers_to_transform", [1]), ("use_dora", True)):
        with pytest.raises(AdapterRejected, match="target_parameters"):
            inspect_adapter(write(tmp_path / field, PLAN, tensors, **by_parameter, **{field: value}), PLAN)
