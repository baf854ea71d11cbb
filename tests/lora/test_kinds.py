"""Kinds of adapters other than LoRA: how their tensors become A, B and vectors, and what is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft.tuners.lora.variants import QALoraLinearVariant
from safetensors.numpy import save_file

from caraserve.core.lora_layout import HostAdapter, SiteSpan, aligned_bytes, stored_vectors
from caraserve.errors import AdapterRejected
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.manifest import manifest_of, read_manifest
from caraserve.lora.peft import inspect_adapter, read_adapter, specify
from caraserve.lora.upload_stream import ArrivingImage
from caraserve.lora.writers import peft_adapter
from caraserve.model.base_linears import BaseLinears
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.safetensors_reader import TensorFile
from tests.lora.folders import RANK, SPEC, Tensors, matrices, read, tensor_name, tensors_for, write_adapter

A0, B0 = tensor_name(0, "q_proj", "A"), tensor_name(0, "q_proj", "B")
MAGNITUDE, BIAS = B0.replace("lora_B.weight", "lora_magnitude_vector"), B0.replace("weight", "bias")
Q = SPEC.layers[0].linears[0]


class Linears(BaseLinears):
    """Random weights of the base model, a row at a time, with biases."""

    def weights(self, linear: LinearPlan) -> Iterator[NDArray[np.float32]]:
        yield from np.random.default_rng(7).standard_normal((linear.outputs, 1, linear.inputs), np.float32)

    def bias(self, linear: LinearPlan) -> NDArray[np.float32]:
        return np.arange(linear.outputs, dtype=np.float32)


@pytest.fixture
def base(tmp_path: Path) -> BaseTensors:
    (tmp_path / "base").mkdir()
    save_file({}, tmp_path / "base" / "model.safetensors")
    made = BaseTensors(tmp_path / "base", SPEC)
    made.linears = Linears(tmp_path / "base")
    return made


def with_vectors(kind: str) -> Tensors:
    """Returns tensors of q_proj with a magnitude or a bias beside each B."""
    ending, rng = {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}[kind], np.random.default_rng(2)
    tensors = tensors_for()
    own = {name.replace("lora_B.weight", ending): values for name, values in tensors.items() if "lora_B" in name}
    return tensors | {name: rng.standard_normal(len(b)).astype(np.float32) for name, b in own.items()}


def vectors_of(adapter: HostAdapter, span: SiteSpan) -> NDArray[Any]:
    return stored_vectors(adapter.data, span, Q.outputs)[:, : Q.outputs]


def read_with(base: BaseTensors, folder: Path) -> HostAdapter:
    return read_adapter(folder, SPEC, aligned_bytes(inspect_adapter(folder, SPEC, base).num_bytes), base)


def test_factors_of_dora_are_magnitudes_over_norms_and_leave_the_base_bias_as_it_is(
    base: BaseTensors, tmp_path: Path
) -> None:
    tensors = with_vectors("use_dora")
    adapter = read_with(base, write_adapter(tmp_path / "own", {"use_dora": True, "use_rslora": True}, tensors))
    weights = np.concatenate(list(base.linears.weights(Q))).astype(np.float64)
    changed = weights + 8 / np.sqrt(RANK) * tensors[B0].astype(np.float64) @ tensors[A0]
    factors, biases = vectors_of(adapter, adapter.spec.spans[0])
    np.testing.assert_allclose(factors, tensors[MAGNITUDE] / np.linalg.norm(changed, axis=1), rtol=1e-6)
    x = np.random.default_rng(1).standard_normal(Q.inputs)
    served = factors * (changed @ x + base.linears.bias(Q)) + biases
    np.testing.assert_allclose(served, factors * (changed @ x) + base.linears.bias(Q), rtol=1e-4, atol=1e-4)


def test_norms_are_computed_once(base: BaseTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is read when it is registered, and again when it is needed."""
    folder = write_adapter(tmp_path / "own", {"use_dora": True}, with_vectors("use_dora"))
    first = read_with(base, folder)
    monkeypatch.setattr(Linears, "weights", None)
    assert (read_with(base, folder).data == first.data).all()


def test_dora_of_mlx_is_that_of_peft(base: BaseTensors, tmp_path: Path) -> None:
    tensors, ours = with_vectors("use_dora"), Tensors()
    for name, values in tensors.items():
        module, _, tensor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        theirs = {"lora_A": "lora_a", "lora_B": "lora_b", "lora_magnitude_vector": "m"}[tensor]
        ours[f"{module}.{theirs}"] = np.ascontiguousarray(values.T)
    folder = tmp_path / "mlx"
    folder.mkdir()
    save_file(ours, folder / "adapters.safetensors")
    config = {"fine_tune_type": "dora", "lora_parameters": {"rank": RANK, "scale": 8 / RANK}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    peft = write_adapter(tmp_path / "own", {"use_dora": True}, tensors)
    assert inspect_adapter(folder, SPEC, base).digest == inspect_adapter(peft, SPEC, base).digest


def test_the_bias_of_b_is_scaled(tmp_path: Path) -> None:
    tensors = with_vectors("lora_bias")
    adapter = read(write_adapter(tmp_path / "own", {"lora_bias": True}, tensors), SPEC)
    factors, biases = vectors_of(adapter, adapter.spec.spans[0])
    assert (factors == 1).all()
    assert np.array_equal(biases, np.float32(8 / RANK) * tensors[BIAS])


@pytest.mark.parametrize("kind", ["use_dora", "lora_bias"])
def test_names_with_the_adapters_name_are_accepted(base: BaseTensors, tmp_path: Path, kind: str) -> None:
    tensors = with_vectors(kind)
    named = {
        name.replace("lora_A", "lora_A.default")
        .replace("lora_B", "lora_B.default")
        .replace("vector", "vector.default.weight"): values
        for name, values in tensors.items()
    }
    folders = [write_adapter(tmp_path / str(len(each)), {kind: True}, each) for each in (tensors, named)]
    assert len({inspect_adapter(folder, SPEC, base).digest for folder in folders}) == 1


def test_matrices_keep_their_dtype_beside_vectors_in_float32(base: BaseTensors, tmp_path: Path) -> None:
    tensors = with_vectors("use_dora")
    halves = {name: values if name == MAGNITUDE else values.astype(np.float16) for name, values in tensors.items()}
    assert inspect_adapter(write_adapter(tmp_path / "own", {"use_dora": True}, halves), SPEC, base).dtype is Dtype.F16


def test_vectors_are_part_of_the_manifest(tmp_path: Path) -> None:
    spec = inspect_adapter(write_adapter(tmp_path / "own", {"lora_bias": True}, with_vectors("lora_bias")), SPEC)
    assert spec.has_vectors
    assert read_manifest(manifest_of(spec), spec.digest, SPEC) == spec


def test_vectors_may_arrive_in_an_upload(base: BaseTensors, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "own", {"use_dora": True}, with_vectors("use_dora"))
    with TensorFile(folder / TENSORS_NAME) as file:
        layout = specify(peft_adapter(folder, file, SPEC), SPEC, base)
        arriving = ArrivingImage(layout, aligned_bytes(layout.spec.num_bytes))
        arriving.advance((folder / TENSORS_NAME).stat().st_size)
    assert arriving.finished().spec == inspect_adapter(folder, SPEC, base)


@pytest.mark.parametrize(
    ("kind", "changed", "why"),
    [
        ("use_dora", {MAGNITUDE: None}, "has no lora_magnitude_vector beside it"),
        ("use_dora", {MAGNITUDE: np.ones(3, np.float32)}, "has shape [3]; rank 4 on this base model needs [64]"),
        ("use_dora", {MAGNITUDE: np.full(64, np.nan, np.float32)}, f"{MAGNITUDE} has values that are not finite"),
        ("use_dora", {MAGNITUDE: np.full(64, 1e20, np.float32)}, f"tensor {MAGNITUDE}: a result may reach"),
        ("use_dora", {B0.replace("weight", "bias"): np.ones(64, np.float32)}, "or a magnitude vector of one of q_proj"),
        ("lora_bias", {BIAS: None}, "has no lora_B.bias beside it"),
        ("lora_bias", {BIAS: np.full(64, 1e20, np.float32)}, f"tensor {BIAS}: a result may reach"),
        ("lora_bias", {A0.replace("weight", "bias"): np.ones(4, np.float32)}, "is not LoRA A or B, or B's bias, of on"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.islower() else "",
)
def test_vectors_are_checked(base: BaseTensors, tmp_path: Path, kind: str, changed: dict[str, Any], why: str) -> None:
    tensors = {name: values for name, values in (with_vectors(kind) | changed).items() if values is not None}
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(write_adapter(tmp_path / "own", {kind: True}, tensors), SPEC, base)
    assert why in caught.value.message


def test_dora_without_weights_of_a_base_model_is_refused(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "own", {"use_dora": True}, with_vectors("use_dora"))
    with pytest.raises(AdapterRejected, match="norms of the base model's weights"):
        inspect_adapter(folder, SPEC)


def test_an_output_without_weights_is_refused(
    base: BaseTensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linears, "weights", lambda self, linear: iter([np.zeros((64, 64), np.float32)]))
    tensors = with_vectors("use_dora")
    tensors[B0][5] = 0
    with pytest.raises(AdapterRejected, match=r"output 5 of model.layers.0.self_attn.q_proj has weights of norm 0"):
        inspect_adapter(write_adapter(tmp_path / "own", {"use_dora": True}, tensors), SPEC, base)


# --- QALoRA ---


def test_qalora_computes_what_peft_computes(tmp_path: Path) -> None:
    tensors, size = tensors_for(), 16
    groups = {name: values[:, : 64 // size] if "lora_A" in name else values for name, values in tensors.items()}
    tensors = {name: np.ascontiguousarray(values) for name, values in groups.items()}
    adapter = read(write_adapter(tmp_path / "own", {"use_qalora": True, "qalora_group_size": size}, tensors), SPEC)
    (span, *_) = adapter.spec.spans
    a, b = matrices(adapter, span, SPEC)
    module = SimpleNamespace(
        lora_A={"default": SimpleNamespace(weight=torch.from_numpy(tensors[A0]))},
        lora_B={"default": SimpleNamespace(weight=torch.from_numpy(tensors[B0]))},
        lora_dropout={"default": torch.nn.Identity()},
        scaling={"default": span.scale},
        qalora_group_size={"default": size},
        in_features=64,
        training=False,
    )
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    theirs = QALoraLinearVariant.forward(module, "default", x, torch.zeros(3, 64)).numpy()
    np.testing.assert_allclose(span.scale * x.numpy() @ a.T @ b, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("size", "why"), [(0, "is 0; a positive integer"), ("16", "is '16'"), (24, "is 24; q_proj has 64 inputs")]
)
def test_groups_that_do_not_fit_are_refused(tmp_path: Path, size: Any, why: str) -> None:
    with pytest.raises(AdapterRejected, match=f"qalora_group_size {why}"):
        inspect_adapter(write_adapter(tmp_path / "own", {"use_qalora": True, "qalora_group_size": size}), SPEC)


# --- BD-LoRA ---


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"nblocks": 2}, "names q_proj neither for A nor for B"),
        ({"nblocks": 2, "target_modules_bd_a": ["q_"], "target_modules_bd_b": ["proj"]}, "names q_proj for A and B"),
        ({"nblocks": 3, "target_modules_bd_a": ["q_"]}, "has 3 nblocks, which do not divide A of q_proj, 4 × 64"),
        ({"nblocks": 2, "target_modules_bd_a": "q_proj"}, "has target_modules_bd_a 'q_proj'; a list of names"),
        ({"blocks": 2}, "has 'blocks'; adapters that use it are not supported"),
    ],
    ids=["no matrix", "both", "blocks", "names", "unknown"],
)
def test_blocks_that_peft_would_refuse_are_refused(tmp_path: Path, value: Any, why: str) -> None:
    with pytest.raises(AdapterRejected, match=f"use_bdlora {why}"):
        inspect_adapter(write_adapter(tmp_path / "own", {"use_bdlora": value}), SPEC)


# --- VeRA ---


def vera(**shared: tuple[int, ...]) -> Tensors:
    """Returns an adapter of q_proj in both layers. `shared`: shapes of the shared matrices."""
    prefix = "base_model.model.model.layers.{}.self_attn.q_proj.vera_lambda_{}"
    own = {prefix.format(layer, one): np.ones({"d": 12, "b": 64}[one], np.float32) for layer in (0, 1) for one in "db"}
    return own | {f"base_model.{name}": np.ones(shape, np.float32) for name, shape in shared.items()}


VERA = {"peft_type": "VERA", "r": 12, "lora_alpha": None}


@pytest.mark.parametrize(
    ("changed", "shapes", "why"),
    [
        ({"save_projection": False}, {}, "the file lacks vera_A and vera_B; save with save_projection true"),
        ({}, {}, "adapter_model.safetensors has no vera_A, which all modules share"),
        ({}, {"vera_A": (12, 64)}, "has no vera_B, which all modules share"),
        ({}, {"vera_A": (13, 64), "vera_B": (64, 12)}, r"base_model.vera_A has shape \[13, 64\]"),
        ({}, {"vera_A": (12, 64), "vera_B": (63, 12)}, r"base_model.vera_B has shape \[63, 12\]"),
        ({"bias": "vera_only"}, {"vera_A": (12, 64), "vera_B": (64, 12)}, "bias is 'vera_only'"),
        ({"r": 513}, {"vera_A": (12, 64), "vera_B": (64, 12)}, "r is 513; a rank is an integer from 1 to 512"),
    ],
    ids=["not saved", "no projections", "no B", "rank", "outputs", "bias", "large rank"],
)
def test_vera_without_what_it_needs_is_refused(
    tmp_path: Path, changed: dict[str, Any], shapes: dict[str, tuple[int, ...]], why: str
) -> None:
    with pytest.raises(AdapterRejected, match=why):
        inspect_adapter(write_adapter(tmp_path / "own", VERA | changed, vera(**shapes)), SPEC)


def test_shared_matrices_may_be_larger_than_a_module(tmp_path: Path) -> None:
    tensors = vera(vera_A=(12, 96), vera_B=(96, 12))
    assert inspect_adapter(write_adapter(tmp_path / "own", VERA, tensors), SPEC).rank == 12
