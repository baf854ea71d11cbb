"""Names of tensors as programs write them, and copies of the base model's tensors, which are compared with these."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.peft import inspect_adapter
from caraserve.lora.tensor_names import saved_tensor
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.dtype import Dtype
from tests.lora.folders import FIELDS, SPEC, Tensors, tensors_for, write_adapter

PLAN = replace(SPEC, ignored_prefixes=("model.visual", "visual."), adapter_prefixes=("model.", "model.language_model."))
LAYER = "base_model.model.model.layers.0"


def digest(folder: Path, changed: Mapping[str, Any] | None, tensors: Tensors, base: BaseTensors | None = None) -> str:
    return inspect_adapter(write_adapter(folder, changed, tensors), PLAN, base).digest


def refusal(folder: Path, base: BaseTensors | None, fields: Mapping[str, Any] | None, tensors: Tensors) -> str:
    with pytest.raises(AdapterRejected) as caught:
        digest(folder, fields, tensors, base)
    return caught.value.message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".weight", ".default.weight"),
        (".weight", ".my-adapter_2.weight"),
        ("base_model.model.", "base_model.model._orig_mod."),
        ("base_model", "_orig_mod.base_model"),
        (".self_attn.", "._checkpoint_wrapped_module.self_attn._fsdp_wrapped_module."),
        ("base_model.model.model.", "base_model.model.model.language_model."),
        ("base_model.model.", ""),
    ],
)
def test_names_of_wrapped_modules_are_those_of_the_modules(tmp_path: Path, old: str, new: str) -> None:
    tensors = {name.replace(old, new): each for name, each in tensors_for().items()}
    assert digest(tmp_path / "a", None, tensors) == digest(tmp_path / "b", None, tensors_for())


def test_tensors_of_parts_that_text_does_not_use_are_left_out_and_counted(tmp_path: Path) -> None:
    vision = {
        f"base_model.model.{tower}.blocks.0.attn.qkv.lora_{half}.weight": np.ones((4, 4), np.float32)
        for tower in ("model.visual", "visual")
        for half in "AB"
    }
    folder = write_adapter(tmp_path / "a", {"target_modules": ["q_proj", "qkv"]}, tensors_for() | vision)
    reader = AdapterReader(PLAN, lambda call: call())
    found = reader.inspect(folder)
    reader.close()
    assert found.digest == digest(tmp_path / "b", None, tensors_for())
    target, left_out = found.notes
    assert target == "adapter_config.json: target_modules has 'qkv', which the base model lacks"
    assert left_out.startswith("4 tensors of parts that text does not use are left out, as base_model.")


def test_a_name_that_only_begins_like_a_part_that_text_does_not_use_is_refused(tmp_path: Path) -> None:
    other = {"base_model.model.visualiser.lora_A.weight": np.ones((4, 4), np.float32)}
    assert "visualiser.lora_A.weight' is not LoRA" in refusal(tmp_path, None, None, tensors_for() | other)


# --- copies of the base model's tensors ---


@pytest.fixture(scope="module")
def weights() -> Tensors:
    rng = np.random.default_rng(3)
    shapes = {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64), "model.norm.weight": (64,)}
    shapes |= {f"model.layers.{layer}.input_layernorm.weight": (64,) for layer in (0, 1)}
    shapes |= {f"model.layers.{layer}.self_attn.q_proj.weight": (64, 64) for layer in (0, 1)}
    shapes |= {"model.layers.0.self_attn.q_proj.bias": (64,)}
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def base(weights: Tensors, tmp_path_factory: pytest.TempPathFactory) -> BaseTensors:
    return BaseTensors(write_base(tmp_path_factory.mktemp("base"), weights), PLAN)


def write_base(folder: Path, weights: Tensors) -> Path:
    (folder / "config.json").write_text(json.dumps(FIELDS))
    save_file(weights, folder / "model.safetensors")
    return folder


P = "base_model.model."
COPIES = {  # name in the adapter: in the base
    f"{P}lm_head.weight": "lm_head.weight",
    f"{P}lm_head.base_layer.weight": "lm_head.weight",
    f"{P}lm_head.original_module.weight": "lm_head.weight",
    f"{P}lm_head.modules_to_save.default.weight": "lm_head.weight",
    f"{P}model.embed_tokens.weight": "model.embed_tokens.weight",
    f"{P}model.language_model.embed_tokens.base_layer.weight": "model.embed_tokens.weight",
    f"{P}model.layers.1.self_attn.q_proj.base_layer.weight": "model.layers.1.self_attn.q_proj.weight",
    f"{P}model.layers.0.self_attn.q_proj.base_layer.bias": "model.layers.0.self_attn.q_proj.bias",
    f"{P}model.norm.weight": "model.norm.weight",
    f"{P}model.language_model.layers.1.input_layernorm.weight": "model.layers.1.input_layernorm.weight",
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_equals_the_base_models_is_left_out(
    tmp_path: Path, base: BaseTensors, weights: Tensors, name: str
) -> None:
    tensors = tensors_for() | {name: weights[COPIES[name]]}
    assert digest(tmp_path / "a", None, tensors, base) == digest(tmp_path / "b", None, tensors_for())
    assert "is not LoRA A or B of one of" in refusal(tmp_path / "c", None, None, tensors)


WHOLE = (
    "replaces 1 of 64 rows (16.0 KiB) of the base; such changes are not supported. Train the module as a LoRA target"
)
DIFFERENT = "differs from the base model's; the adapter belongs to another base"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (f"{P}model.layers.0.self_attn.q_proj.modules_to_save.default.weight", f"q_proj.weight {WHOLE}"),
        (f"{P}model.embed_tokens.token_adapter.base_layer.weight", f"token_adapter.base_layer.weight {DIFFERENT}"),
        (f"{P}lm_head.base_layer.weight", f"lm_head.base_layer.weight {DIFFERENT}"),
        (f"{P}lm_head.original_module.weight", f"lm_head.original_module.weight {DIFFERENT}"),
        (f"{P}model.norm.weight", "modules_to_save holds model.norm.weight; trained norms are not supported"),
        (f"{P}model.layers.0.self_attn.q_proj.bias", "holds model.layers.0.self_attn.q_proj.bias; trained biases are"),
    ],
)
def test_a_copy_that_differs_is_refused(
    tmp_path: Path, base: BaseTensors, weights: Tensors, name: str, why: str
) -> None:
    saved = saved_tensor(name)
    assert saved is not None
    ours = weights[base.find(saved.name) or ""]
    changed = ours.copy()
    changed[-1] += 1
    assert why in refusal(tmp_path, base, None, tensors_for() | {name: changed})


def test_a_copy_is_compared_in_its_own_dtype(tmp_path: Path, base: BaseTensors, weights: Tensors) -> None:
    folder = write_adapter(tmp_path)
    halves = {name: torch.from_numpy(each) for name, each in load_file(folder / "adapter_model.safetensors").items()}
    for dtype in (torch.bfloat16, torch.float16):
        head = torch.from_numpy(weights["lm_head.weight"]).to(dtype)
        save_torch(halves | {f"{P}lm_head.weight": head}, folder / "adapter_model.safetensors")
        assert inspect_adapter(folder, PLAN, base).rank == 4
        head[5, 5] *= 1.01
        save_torch(halves | {f"{P}lm_head.weight": head}, folder / "adapter_model.safetensors")
        (span,) = inspect_adapter(folder, PLAN, base).vocabulary
        assert (span.change.side, span.change.tokens) == ("head", (5,))


def test_the_head_of_a_tied_model_is_its_embedding(tmp_path: Path, weights: Tensors) -> None:
    untied = {name: each for name, each in weights.items() if name != "lm_head.weight"}
    tied = replace(PLAN, head=None)
    base = BaseTensors(write_base(tmp_path, untied), tied)
    tensors = tensors_for() | {f"{P}lm_head.base_layer.weight": weights["model.embed_tokens.weight"]}
    assert inspect_adapter(write_adapter(tmp_path / "a", None, tensors), tied, base).rank == 4
    changed = tensors_for() | {f"{P}lm_head.weight": weights["model.embed_tokens.weight"] * 2}
    with pytest.raises(AdapterRejected, match="differs from the base model's; the adapter belongs to another base"):
        inspect_adapter(write_adapter(tmp_path / "b", None, changed), tied, base)
    folder = write_adapter(tmp_path / "c", {"modules_to_save": ["lm_head"]}, changed)
    assert [span.change.side for span in inspect_adapter(folder, tied, base).vocabulary] == ["head"]


def test_other_shapes_and_unknown_tensors_are_refused(tmp_path: Path, base: BaseTensors) -> None:
    longer = {f"{P}lm_head.weight": np.zeros((98, 64), np.float32)}
    assert "has shape [98, 64]; the base model's has [96, 64]" in refusal(tmp_path, base, None, tensors_for() | longer)
    unknown = {f"{P}scorer.weight": np.zeros((2, 64), np.float32)}
    assert "scorer.weight' is not LoRA A or B" in refusal(tmp_path, base, None, tensors_for() | unknown)


def test_modules_to_save_must_be_in_the_file(tmp_path: Path, base: BaseTensors, weights: Tensors) -> None:
    fields = {"modules_to_save": ["lm_head", "norm"]}
    tensors = tensors_for() | {f"{P}lm_head.weight": weights["lm_head.weight"]}
    assert "modules_to_save has 'norm', of which the file has no tensors" in refusal(tmp_path, base, fields, tensors)
    tensors |= {f"{LAYER}.input_layernorm.weight": weights["model.layers.0.input_layernorm.weight"]}
    assert digest(tmp_path, fields, tensors, base)


def test_comparing_reads_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((1000, 64), np.float32)
    folder = write_base(tmp_path, {"lm_head.weight": table})
    monkeypatch.setattr("caraserve.model.base_tensors._PIECE_BYTES", 64 * 4 * 30)
    changed, asked = table.copy(), []
    changed[[0, 29, 30, 999], 1] += 1

    def rows(start: int, stop: int) -> NDArray[Any]:
        asked.append(stop - start)
        return changed[start:stop]

    base = BaseTensors(folder, PLAN)
    assert base.changed_rows("lm_head.weight", rows, Dtype.F32).tolist() == [0, 29, 30, 999]
    assert max(asked) == 30
    assert sum(asked) == 1000
