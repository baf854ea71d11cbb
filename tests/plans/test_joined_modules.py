"""Adapters whose modules are joined or split otherwise than the base model's change it as the modules they name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.errors import AdapterRejected
from caraserve.lora.peft import inspect_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from tests.lora.folders import SPEC, matrices, read
from tests.plans.fused import GATE_UP, HIDDEN, INTERMEDIATE, KV, QKV, Q, Tensors, fused_plan, tensors_of, write

SPLIT = {"q_proj": Q, "k_proj": KV, "v_proj": KV, "gate_proj": INTERMEDIATE, "up_proj": INTERMEDIATE}
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
RANKS = {"q_proj": 3, "up_proj": 6}
BOTH = list(SPLIT)
Updates = dict[tuple[int, str], NDArray[np.float64]]  # (layer, role) → change of the outputs, [outputs, inputs]


def module_name(layer: int, target: str) -> str:
    return f"base_model.model.model.layers.{layer}.{'mlp' if target[0] in 'gu' else 'self_attn'}.{target}"


def lora(outputs: dict[str, int], ranks: dict[str, int]) -> Tensors:
    """Returns A and B of modules in both layers, of rank 4 or another."""
    rng, tensors = np.random.default_rng(7), Tensors()
    for layer in (0, 1):
        for target, count in outputs.items():
            rank = ranks.get(target, 4)
            tensors[f"{module_name(layer, target)}.lora_A.weight"] = rng.standard_normal((rank, HIDDEN), np.float32)
            tensors[f"{module_name(layer, target)}.lora_B.weight"] = rng.standard_normal((count, rank), np.float32)
    return tensors


def product(tensors: Tensors, layer: int, target: str, scale: float) -> NDArray[np.float64]:
    a, b = (tensors[f"{module_name(layer, target)}.lora_{half}.weight"].astype(np.float64) for half in "AB")
    return np.asarray(scale * b @ a)


def updates_of(folder: Path, plan: DecoderPlan) -> Updates:
    """Returns what the image of an adapter adds to each site, with a part's rows in their order in the module."""
    adapter, found = read(folder, plan, filled=0xFF), Updates()
    for span in adapter.spec.spans:
        site = plan.layers[span.layer].sites[span.site]
        a, b = matrices(adapter, span, plan)
        update = (span.scale * b[:, : site.outputs].T @ a[:, : site.inputs]).astype(np.float64)
        rows = list(plan.layers[span.layer].linears[span.linear].parts[site.part].rows)
        found[span.layer, site.role] = update[np.argsort(rows)]
    return found


def check(found: Updates, expected: Updates) -> None:
    assert found.keys() == expected.keys()
    for place, update in expected.items():
        np.testing.assert_allclose(found[place], update, rtol=1e-4, atol=1e-4, err_msg=str(place))


def patterns(**changed: Any) -> dict[str, Any]:
    return {"rank_pattern": RANKS, **changed}


@pytest.mark.parametrize("gate_up", GATE_UP)
@pytest.mark.parametrize("qkv", QKV)
def test_split_names_on_joined_modules_keep_their_products(tmp_path: Path, qkv: str, gate_up: str) -> None:
    plan, tensors = fused_plan(qkv, gate_up), lora(SPLIT, RANKS)
    folder = write(tmp_path, plan, tensors, **patterns(target_modules=BOTH))
    scales = {target: 6 / RANKS.get(target, 4) for target in SPLIT}
    expected = {
        (layer, target.removesuffix("_proj")): product(tensors, layer, target, scales[target])
        for layer in (0, 1)
        for target in SPLIT
    }
    check(updates_of(folder, plan), expected)
    spec = inspect_adapter(folder, plan)
    assert (spec.rank, spec.targets) == (11, ("qkv_proj", "gate_up_proj"))


def test_a_joined_name_on_split_modules_keeps_its_product(tmp_path: Path) -> None:
    outputs = {"qkv_proj": Q + 2 * KV, "gate_up_proj": 2 * INTERMEDIATE}
    tensors = lora(outputs, {})
    folder = write(tmp_path, SPEC, tensors, target_modules=list(outputs))
    expected = Updates()
    for layer in (0, 1):
        for joined, parts in JOINED.items():
            rows = np.split(product(tensors, layer, joined, 6 / 4), np.cumsum([SPLIT[part] for part in parts])[:-1])
            for part, update in zip(parts, rows, strict=True):
                expected[layer, part.removesuffix("_proj")] = update
    check(updates_of(folder, SPEC), expected)
    assert inspect_adapter(folder, SPEC).rank == 4


def test_some_of_a_modules_parts_may_be_adapted(tmp_path: Path) -> None:
    plan, tensors = fused_plan("by KV head"), lora({"q_proj": Q, "v_proj": KV}, {})
    found = updates_of(write(tmp_path, plan, tensors, target_modules=["q_proj", "v_proj"], rank_pattern={}), plan)
    check({place: found[place] for place in found if place[1] != "k"}, {
        (layer, role): product(tensors, layer, f"{role}_proj", 6 / 4) for layer in (0, 1) for role in "qv"
    })  # fmt: skip
    assert not found[0, "k"].any()


@pytest.mark.parametrize(("alphas", "dtype"), [({}, Dtype.F16), ({"v_proj": 5}, Dtype.F32)], ids=["equal", "other"])
def test_values_are_rounded_only_where_scales_differ(tmp_path: Path, alphas: dict[str, int], dtype: Dtype) -> None:
    tensors = {name: each.astype(np.float16) for name, each in lora({"q_proj": Q, "v_proj": KV}, {}).items()}
    changed = {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {}, "alpha_pattern": alphas}
    folder = write(tmp_path, fused_plan(), tensors, **changed)  # type: ignore[arg-type]
    assert inspect_adapter(folder, fused_plan()).dtype is dtype


def without(tensors: Tensors, word: str) -> Tensors:
    return {name: each for name, each in tensors.items() if word not in name}


B0 = f"{module_name(0, 'k_proj')}.lora_B.weight"
REFUSED: dict[str, tuple[Tensors, dict[str, Any], str]] = {
    "a part is lost": (without(lora(SPLIT, {}), "v_proj"), {}, "covers model.layers.0.self_attn.v_proj, but"),
    "B alone": (without(lora(SPLIT, {}), "k_proj.lora_A"), {}, "k_proj.lora_B.weight has no lora_A beside it"),
    "another shape": (lora(SPLIT, {}) | {B0: np.zeros((Q, 4), np.float32)}, {}, "rank 4 on this base model needs [32,"),
    "joined and split": (
        lora(SPLIT | {"qkv_proj": Q + 2 * KV}, {}),
        {"target_modules": [*SPLIT, "qkv_proj"]},
        "model.layers.0.self_attn.qkv_proj and model.layers.0.self_attn.q_proj are the same module's",
    ),
    "too large a rank": (lora(SPLIT, dict.fromkeys(SPLIT, 200)), {"r": 200}, "parts add up to 600; 512 at most"),
    "not targeted": (lora(SPLIT, {}), {"target_modules": ["q_proj", "v_proj"]}, "does not target this module"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_converted_is_refused(tmp_path: Path, kind: str) -> None:
    tensors, changed, why = REFUSED[kind]
    plan = fused_plan()
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(write(tmp_path, plan, tensors, **{"target_modules": BOTH, "rank_pattern": {}} | changed), plan)
    assert why in caught.value.message


def test_names_of_other_models_in_target_modules_ask_for_nothing(tmp_path: Path) -> None:
    tensors = lora({"q_proj": Q, "k_proj": KV, "v_proj": KV}, {})
    targets = ["q_proj", "k_proj", "v_proj", "qkv_proj", "W_pack", "c_attn"]
    assert inspect_adapter(write(tmp_path, SPEC, tensors, target_modules=targets), SPEC).rank == 4


def test_the_gate_of_attention_and_the_parts_of_a_delta_net_have_no_names(tmp_path: Path) -> None:
    """Else gate_proj of the MLP and k_proj would ask for tensors of them, once a target is of another model."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 96, "head_dim": 16}
    widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    plan = plan_of({"architectures": ["Qwen3_5ForCausalLM"], "linear_num_value_heads": 2, **sizes, **widths})
    targets = ["k_proj", "gate_proj", "up_proj", "down_proj"]
    tensors = {name: each for name, each in tensors_of(plan).items() if any(f".{one}." in name for one in targets)}
    folder = write(tmp_path, plan, tensors, target_modules=[*targets, "linear_fc1"])
    assert inspect_adapter(folder, plan).targets == ("gate_proj", "up_proj", "down_proj", "k_proj")
