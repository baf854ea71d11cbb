"""A kind of adapter is one file: the adapters of one that this folder adds become images like those of LoRA, which all
backends read."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caraserve.core.lora_layout import aligned_bytes
from caraserve.errors import AdapterRejected
from caraserve.lora import kinds
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.peft import inspect_adapter, specify
from caraserve.lora.upload_stream import ArrivingImage
from caraserve.lora.writers import peft_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan
from caraserve.model.safetensors_reader import TensorFile
from tests.lora.folders import RANK, SPEC, TARGETS, Tensors, matrices, read, tensor_name, tensors_for, write_adapter
from tests.plans.fused import fused_plan, tensors_of, write
from tests.plans.scaled_lora import ScaledLora

SCALED = {"use_output_scales": True, "target_modules": list(TARGETS), "lora_alpha": 6}


def scaled_tensors() -> Tensors:
    """Returns an adapter of the made-up kind for `SPEC`."""
    rng, tensors = np.random.default_rng(1), tensors_for(TARGETS)
    outputs = {name: len(values) for name, values in tensors.items() if "lora_B" in name}
    factors = {name: rng.standard_normal(count).astype(np.float32) for name, count in outputs.items()}
    return tensors | {name.replace("lora_B.weight", "lora_scale"): values for name, values in factors.items()}


def expanded(tensors: Tensors) -> Tensors:
    """Returns the LoRA that an adapter of the made-up kind stands for."""
    lora = {name: values for name, values in tensors.items() if "lora_scale" not in name}
    for name in lora:
        if "lora_B" in name:
            lora[name] = lora[name] * tensors[name.replace("lora_B.weight", "lora_scale")][:, None]
    return lora


def test_an_adapter_of_another_kind_becomes_the_image_of_the_lora_it_stands_for(tmp_path: Path) -> None:
    tensors = scaled_tensors()
    adapter = read(write_adapter(tmp_path / "scaled", SCALED, tensors), SPEC)
    plain = write_adapter(tmp_path / "lora", SCALED | {"use_output_scales": False}, expanded(tensors))
    assert adapter.spec == inspect_adapter(plain, SPEC)


def test_the_image_computes_what_the_kinds_reference_says(tmp_path: Path) -> None:
    tensors = scaled_tensors()
    adapter = read(write_adapter(tmp_path, SCALED, tensors), SPEC)
    for span in adapter.spec.spans:
        linear = SPEC.layers[span.layer].linears[span.linear]
        names = {half: tensor_name(span.layer, linear.target, half[-1]) for half in ("lora_A", "lora_B")}
        names["lora_scale"] = names["lora_B"].replace("lora_B.weight", "lora_scale")
        exact = {half: tensors[name].astype(np.float64) for half, name in names.items()}
        a, b = matrices(adapter, span, SPEC)
        delta = span.scale * b[:, : linear.outputs].T @ a[:, : linear.inputs]
        np.testing.assert_allclose(delta, ScaledLora.update(exact, 6 / RANK), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", [SPEC, fused_plan("rotated in pairs", "alternating")], ids=["split", "fused"])
def test_an_image_can_be_read_while_its_tensors_arrive(tmp_path: Path, plan: DecoderPlan) -> None:
    tensors = tensors_of(plan)
    factors = {
        name.replace("lora_B.weight", "lora_scale"): each[:, 0] for name, each in tensors.items() if "_B" in name
    }
    tensors |= {name: np.ascontiguousarray(each) for name, each in factors.items()}
    folder = write(tmp_path, plan, tensors, use_output_scales=True)
    path, whole = folder / TENSORS_NAME, read(folder, plan)
    content = path.read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    path.write_bytes(content[: 8 + header] + bytes(len(content) - 8 - header))
    with TensorFile(path) as file, path.open("r+b") as growing:
        layout = specify(peft_adapter(folder, file, plan), plan)
        arriving = ArrivingImage(layout, aligned_bytes(layout.spec.num_bytes))
        for num_bytes in range(0, len(content) + 1000, 1000):
            os.pwrite(growing.fileno(), content[:num_bytes], 0)
            arriving.advance(num_bytes)
            there = layout.spec.layer_ends[arriving.layers - 1] if arriving.layers else 0
            assert (arriving.so_far().data[:there] == whole.data[:there]).all()
        assert arriving.finished().spec == whole.spec
        assert (arriving.finished().data == whole.data).all()


def test_what_is_computed_at_load_is_kept_in_float32(tmp_path: Path) -> None:
    tensors = {name: values.astype(np.float16) for name, values in scaled_tensors().items()}
    assert inspect_adapter(write_adapter(tmp_path, SCALED, tensors), SPEC).dtype is Dtype.F32


B0 = tensor_name(0, "q_proj", "B")
SCALE0 = B0.replace("lora_B.weight", "lora_scale")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({SCALE0: None}, "has no lora_scale beside it"),
        ({SCALE0: np.ones(3, np.float32)}, f"tensor {SCALE0} has shape [3]; rank 4 on this base model needs [64]"),
        ({SCALE0: np.inf}, f"tensor {SCALE0} has values that are not finite"),
        (dict.fromkeys((SCALE0, B0), 1e10), "their product may reach"),
        ({f"{SCALE0}_x": np.ones(3, np.float32)}, "is not lora_A, lora_B or lora_scale of one of q_proj, k_proj, v_pr"),
    ],
    ids=["missing", "shape", "infinite", "too large", "unknown"],
)
def test_tensors_of_another_kind_are_checked_as_those_of_lora(
    tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    tensors = scaled_tensors()
    made = {name: np.full_like(tensors[name], new) if isinstance(new, float) else new for name, new in changed.items()}
    tensors = {name: values for name, values in (tensors | made).items() if values is not None}
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(write_adapter(tmp_path, SCALED, tensors), SPEC)
    assert why in caught.value.message


def test_a_kinds_field_is_refused_by_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(AdapterRejected, match="use_output_scales is True; adapters that use it are not supported"):
        inspect_adapter(write_adapter(tmp_path, SCALED | {"use_dora": True}, scaled_tensors()), SPEC)


def test_a_kind_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered already"):
        kinds.register(ScaledLora)
