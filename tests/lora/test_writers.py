"""Adapters that other programs wrote become the same images as PEFT's adapters with the same values."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from caraserve.errors import AdapterRejected
from caraserve.lora.adapter_tensors import AdapterTensors, Piece, View
from caraserve.lora.folder_contents import stamp
from caraserve.lora.peft import inspect_adapter, resolve_adapter_path
from caraserve.lora.peft_fields import CONFIG_NAME
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from caraserve.model.safetensors_reader import TensorFile
from tests.lora.folders import FIELDS, RANK, SPEC, TARGETS, Tensors, tensors_for, write_adapter
from tests.model.gguf_files import write_gguf
from tests.plans.fused import fused_plan, tensors_of, write

QWEN = plan_of(FIELDS | {"architectures": ["Qwen2ForCausalLM"]})
HEADS = {"q_proj": 4, "k_proj": 2}
PREFIX = "base_model.model."
Writer = Callable[[Path, Tensors], Path]  # writes tensors under PEFT's names, with scale 1.5


def digest(folder: Path, plan: DecoderPlan = SPEC) -> str:
    return inspect_adapter(folder, plan).digest


def peft(folder: Path, tensors: Tensors) -> Path:
    return write_adapter(folder, {"lora_alpha": 6, "target_modules": list(TARGETS)}, tensors)


def torch_save(folder: Path, tensors: Tensors) -> Path:
    (peft(folder, tensors) / "adapter_model.safetensors").unlink()
    torch.save({name: torch.from_numpy(each) for name, each in tensors.items()}, folder / "adapter_model.bin")
    return folder


def mlx(folder: Path, tensors: Tensors, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    parameters = {"rank": RANK, "scale": 1.5, "dropout": 0.0, "keys": list(TARGETS)}
    fields = {"fine_tune_type": "lora", "num_layers": 2, "model": "x", "lora_parameters": parameters} | changed
    (folder / CONFIG_NAME).write_text(json.dumps(fields))
    names = {name: name.removeprefix(PREFIX).replace(".lora_A.weight", ".lora_a") for name in tensors}
    names = {name: new.replace(".lora_B.weight", ".lora_b") for name, new in names.items()}
    save_file({names[name]: each.T.copy() for name, each in tensors.items()}, folder / "adapters.safetensors")
    return folder


def interleaved(values: Any, heads: int) -> Any:
    """Returns rows of q or k in the order of the original checkpoints, as llama.cpp's converter does."""
    return values.reshape(heads, 2, len(values) // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)


def in_pairs(tensors: Tensors) -> Tensors:
    """Returns the tensors with B of q and k in that order."""
    changed = {
        name: interleaved(each, HEADS[target])
        for name, each in tensors.items()
        for target in HEADS
        if f"{target}.lora_B" in name
    }
    return tensors | {name: np.ascontiguousarray(each) for name, each in changed.items()}


_GGUF = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
GGUF_NAMES = dict(zip(TARGETS, _GGUF, strict=True))
MISTRAL_NAMES = dict(zip(TARGETS, ("wq", "wk", "wv", "wo", "w1", "w3", "w2"), strict=True))


def gguf(folder: Path, tensors: Tensors, names: Mapping[str, str] = GGUF_NAMES, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0}
    metadata = metadata | {"general.architecture": "llama"} | changed
    renamed = {}
    for name, each in tensors.items():
        *_, layer, _, target, half, _ = name.split(".")
        renamed[f"blk.{layer}.{names[target]}.weight.{half.lower()}"] = each
    write_gguf(folder / "adapter.gguf", metadata, renamed)
    return folder


def mistral(folder: Path, tensors: Tensors, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    params = {"dim": 64, "lora": {"enable": True, "rank": RANK, "scaling": 1.5}} | changed
    (folder / "params.json").write_text(json.dumps(params))
    renamed = {}
    for name, each in in_pairs(tensors).items():
        *_, layer, block, target, half, _ = name.split(".")
        place = "attention" if block == "self_attn" else "feed_forward"
        renamed[f"layers.{layer}.{place}.{MISTRAL_NAMES[target]}.{half}.weight"] = each
    save_file(renamed, folder / "lora.safetensors")
    return folder


WRITERS: dict[str, Writer] = {
    "torch": torch_save,
    "MLX": mlx,
    "GGUF": lambda folder, tensors: gguf(folder, in_pairs(tensors)),
    "mistral-finetune": mistral,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_the_image_is_that_of_pefts_adapter(tmp_path: Path, writer: str) -> None:
    tensors = tensors_for(TARGETS)
    folder = WRITERS[writer](tmp_path / "other", tensors)
    assert digest(folder) == digest(peft(tmp_path / "peft", tensors))
    assert stamp(folder) != ""
    assert resolve_adapter_path("other", [tmp_path]) == folder.resolve()


def test_what_peft_saves_without_safetensors_is_read(tmp_path: Path) -> None:
    create: Any = AutoModelForCausalLM.from_config
    model = get_peft_model(create(LlamaConfig(**FIELDS)), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(str(tmp_path / "a"))
    model.save_pretrained(str(tmp_path / "b"), safe_serialization=False)
    assert sorted(path.suffix for path in (tmp_path / "b").iterdir() if "adapter_model" in path.name) == [".bin"]
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


def test_safetensors_are_read_where_both_are(tmp_path: Path) -> None:
    expected = digest(peft(tmp_path, tensors_for(TARGETS)))
    (tmp_path / "adapter_model.bin").write_bytes(b"no zip")
    assert digest(tmp_path) == expected


def test_gguf_files_of_other_families_have_the_rows_as_they_are(tmp_path: Path) -> None:
    tensors = tensors_for(TARGETS)
    for at, architecture in enumerate(("qwen2", ["llama"], 7)):  # a hostile file has one that is no name
        other = gguf(tmp_path / f"other{at}", tensors, **{"general.architecture": architecture})
        assert digest(other, QWEN) == digest(peft(tmp_path / f"peft{at}", tensors), QWEN)
    llama = gguf(tmp_path / "llama", tensors)
    assert digest(llama) != digest(tmp_path / "peft0")


def test_a_gguf_file_whose_architecture_is_no_text_has_the_rows_as_they_are(tmp_path: Path) -> None:
    other = gguf(tmp_path / "other", ALL, **{"general.architecture": "qwen2"})
    assert digest(gguf(tmp_path / "list", ALL, **{"general.architecture": ["llama"]})) == digest(other)


def test_gguf_ranks_and_scales_are_each_modules_own(tmp_path: Path) -> None:
    tensors = tensors_for(("v_proj", "down_proj"))
    for name in list(tensors):
        if "down_proj" in name:
            tensors[name] = np.ascontiguousarray(tensors[name][:2] if "lora_A" in name else tensors[name][:, :2])
    fields = {"lora_alpha": 6, "target_modules": ["v_proj", "down_proj"], "rank_pattern": {"down_proj": 2}}
    expected = digest(write_adapter(tmp_path / "peft", fields, tensors))
    assert digest(gguf(tmp_path / "gguf", tensors)) == expected
    ones = fields | {"alpha_pattern": {"down_proj": 2}, "lora_alpha": 4}
    without_alpha = gguf(tmp_path / "none", tensors, **{"adapter.lora.alpha": 0.0})
    assert digest(without_alpha) == digest(write_adapter(tmp_path / "ones", ones, tensors))


def test_gguf_names_of_joined_modules_are_found(tmp_path: Path) -> None:
    plan = fused_plan()
    tensors = tensors_of(plan)
    names = {"qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up", "o_proj": "attn_output", "down_proj": "ffn_down"}
    folder = gguf(tmp_path / "gguf", tensors, names, **{"general.architecture": "phi3"})
    assert digest(folder, plan) == digest(write(tmp_path / "peft", plan, tensors), plan)


def test_gguf_names_of_split_modules_are_found_in_joined_ones(tmp_path: Path) -> None:
    plan, tensors = fused_plan(), tensors_for(("q_proj", "k_proj", "v_proj"))
    folder = gguf(tmp_path / "gguf", tensors, **{"general.architecture": "qwen2"})
    fields = {"lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    assert digest(folder, plan) == digest(write_adapter(tmp_path / "peft", fields, tensors), plan)


def test_rows_of_a_tensor_under_another_name_are_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole heads are compared with the base's in pieces."""
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    save_file({"a": values}, tmp_path / "a.safetensors")
    with TensorFile(tmp_path / "a.safetensors") as file:
        monkeypatch.setattr(TensorFile, "raw", lambda *_: pytest.fail("all rows are read"))
        tensors = AdapterTensors(file, {"b": View((4, 3), (Piece("a"),))})
        np.testing.assert_array_equal(tensors.rows("b", 1, 3), values[1:3])


def test_names_of_tinker_are_those_of_peft(tmp_path: Path) -> None:
    tensors = tensors_for(("q_proj", "v_proj"))
    fields = {"lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
    renamed = {name.replace(".self_attn.", ".attn."): each for name, each in tensors.items()}
    other = digest(write_adapter(tmp_path / "tinker", fields, renamed))
    assert other == digest(write_adapter(tmp_path / "peft", fields, tensors))
    head = {f"{PREFIX}model.unembed_tokens.lora_A.weight": np.ones((4, 64), np.float32)}
    with pytest.raises(AdapterRejected, match=r"unembed|lm_head"):
        inspect_adapter(write_adapter(tmp_path / "head", fields, tensors | head), SPEC)


# --- refusals ---


def odd_tensor(folder: Path, file: str, name: str) -> Path:
    save_file(load_file(folder / file) | {name: np.ones((4, 4), np.float32)}, folder / file)
    return folder


ALL = tensors_for(TARGETS)
FULL = {"fine_tune_type": "full"}
REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "MLX, whole": (lambda at: mlx(at, ALL, **FULL), "fine_tune_type is 'full'; only lora and dora are served"),
    "MLX, no scale": (lambda at: mlx(at, ALL, lora_parameters={"rank": 4}), "an object with the scale is needed"),
    "MLX, alpha": (
        lambda at: mlx(at, ALL, lora_parameters={"rank": 4, "scale": 10.0, "alpha": 16}),
        "lora_parameters has an alpha, which versions of MLX apply differently",
    ),
    "MLX, scale of text": (lambda at: mlx(at, ALL, lora_parameters={"scale": "2"}), "lora_parameters is '2'; a number"),
    "MLX, other tensor": (
        lambda at: odd_tensor(mlx(at, ALL), "adapters.safetensors", "model.norm.weight"),
        "tensor 'model.norm.weight' is not lora_a, lora_b or m of a module",
    ),
    "MLX, unknown module": (
        lambda at: odd_tensor(mlx(at, ALL), "adapters.safetensors", "model.layers.0.x_proj.lora_a"),
        "x_proj",
    ),
    "GGUF, a model": (lambda at: gguf(at, ALL, **{"general.type": "model"}), "general.type is 'model', not 'adapter'"),
    "GGUF, other adapter": (lambda at: gguf(at, ALL, **{"adapter.type": "x"}), "adapter.type is 'x', not 'lora'"),
    "GGUF, alpha of text": (lambda at: gguf(at, ALL, **{"adapter.lora.alpha": "6"}), "adapter.lora.alpha is '6', not"),
    "GGUF, invocation": (
        lambda at: gguf(at, ALL, **{"adapter.alora.invocation_tokens": [1]}),
        "it has invocation tokens; of GGUF files, only plain LoRA is served",
    ),
    "GGUF, unknown module": (lambda at: gguf(at, ALL, dict.fromkeys(TARGETS, "ssm_in")), "ssm_in.weight.lora_a' is"),
    "GGUF, two files": (
        lambda at: write_gguf(gguf(at, ALL) / "b.gguf", {}, {}).parent,
        "the folder has 2 GGUF files, 'adapter.gguf', 'b.gguf'; an adapter is one",
    ),
    "Mistral, no scaling": (lambda at: mistral(at, ALL, lora={"rank": 4}), "params.json: lora is {'rank': 4}; an"),
    "Mistral, other tensor": (
        lambda at: odd_tensor(mistral(at, ALL), "lora.safetensors", "layers.0.attention.wx.lora_A.weight"),
        "is not LoRA A or B of a module of the base model",
    ),
    "Mistral, another part": (
        lambda at: odd_tensor(mistral(at, ALL), "lora.safetensors", "layers.0.feed_forward.wq.lora_A.weight"),
        "'layers.0.feed_forward.wq.lora_A.weight' is not LoRA A or B of a module",
    ),
    "Tinker and PEFT": (
        lambda at: odd_tensor(
            write_adapter(at, {"target_modules": list(TARGETS)}, ALL),
            "adapter_model.safetensors",
            f"{PREFIX}model.layers.0.attn.q_proj.lora_A.weight",
        ),
        "two tensors are 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'",
    ),
    "Mistral, layers": (
        lambda at: odd_tensor(mistral(at, ALL), "lora.safetensors", "layers.7.attention.wq.lora_A.weight"),
        "'layers.7.attention.wq.lora_A.weight' is not LoRA A or B of a module",
    ),
    "torch, a command": (
        lambda at: (torch_save(at, ALL) / "adapter_model.bin").write_bytes(b"PK") and at,
        "adapter_model.bin is not a valid file of PyTorch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_translated_is_refused(tmp_path: Path, kind: str) -> None:
    make, why = REFUSED[kind]
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(make(tmp_path), SPEC)
    assert why in caught.value.message


def test_a_gguf_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    secret = gguf(tmp_path / "secret", ALL) / "adapter.gguf"
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "x.gguf").symlink_to(secret)
    with pytest.raises(AdapterRejected, match=r"x\.gguf is a link that leads outside"):
        resolve_adapter_path("a", [tmp_path / "root"])


def test_rows_of_another_number_of_heads_are_refused_by_their_shape(tmp_path: Path) -> None:
    wide = replace(SPEC, layers=plan_of(FIELDS | {"num_key_value_heads": 4}).layers)
    with pytest.raises(AdapterRejected, match=r"has shape \[32, 4\]; rank 4 on this base model needs \[64, 4\]"):
        inspect_adapter(gguf(tmp_path, ALL), wide)
