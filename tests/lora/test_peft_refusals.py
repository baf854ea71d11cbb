"""Adapters that cannot be applied exactly are refused with the field's or tensor's name, and paths outside of the
roots."""

import errno
import os
import re
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from caraserve.core.lora_layout import aligned_bytes
from caraserve.errors import AdapterRejected, Forbidden, NotFound, ServerBusy
from caraserve.lora.peft import inspect_adapter, read_adapter, resolve_adapter_path
from caraserve.lora.target_patterns import matched
from caraserve.model.safetensors_reader import TensorFile
from tests.lora.folders import MISSING, RANK, SPEC, Tensors, read, tensor_name, tensors_for, write_adapter

A0, B0 = tensor_name(0, "q_proj", "A"), tensor_name(0, "q_proj", "B")
LAYER = "base_model.model.model.layers.0"


def refusal_of(folder: Path) -> str:
    """Returns the message with which the folder is refused, before its tensors are read."""
    with pytest.raises(AdapterRejected) as caught:
        inspect_adapter(folder, SPEC)
    caught.value.message.encode()  # valid in a JSON response
    return caught.value.message


REFUSED_FIELDS: list[tuple[str, Any]] = [
    *(("peft_type", value) for value in (MISSING, None, "IA3", "ADALORA", 5)),
    *(("r", value) for value in (MISSING, None, 0, -1, 8.0, True, "8", 10**9, 513, [8])),
    *(("lora_alpha", value) for value in (MISSING, None, "16", True, float("nan"), float("inf"), 10**10, [1])),
    *(("use_rslora", value) for value in ("yes", 1)),
    *(("bias", value) for value in ("all", "lora_only", True)),
    *(("target_modules", value) for value in (MISSING, None, [], "", {}, 5, [5], [""], ["lm_head"], ["embed_tokens"])),
    ("target_modules", ["q_proj", "k_proj"]),  # k_proj has no tensors
    ("target_modules", "all-linear"),  # likewise
    *(("exclude_modules", value) for value in (5, [5], {"k_proj": 1})),
    *(("layers_to_transform", value) for value in ([2], ["0"], [True], [-1], [0, 99], 10**4000)),
    *(("layers_pattern", value) for value in ("h", ["blocks"], 5)),
    *(("rank_pattern", value) for value in ([1], {"q_proj": 0}, {"q_proj": 4.0}, {"q_proj": None}, {"(q|k)_proj": 4})),
    *(("alpha_pattern", value) for value in ("q", {"q_proj": None}, {"q_proj": "8"}, {"q.proj": 8}, {"(a+)+$": 8})),
    *(("alpha_pattern", {pattern: 8}) for pattern in ("", ".*", r"\d+.mlp.up_proj", ".*.1.mlp.up_proj", "\ud800")),
    *(("init_lora_weights", value) for value in ("pissa", "PiSSA_niter_16", "olora", "corda", "loftq", "lora_ga")),
    *(("init_lora_weights", value) for value in ("a way of tomorrow", 5, ["pissa"])),
    ("modules_to_save", ["lm_head"]),
    ("trainable_token_indices", [1, 2]),
    ("trainable_token_indices", {"embed_tokens": [1]}),
    ("layer_replication", [[0, 2], [1, 2]]),
    ("megatron_config", {"tensor_model_parallel_size": 2}),
    *(("alora_invocation_tokens", value) for value in ([], "text", 5, [1.5], [True], [-1], [1 << 31], [1] * 257, [96])),
    ("target_parameters", ["mlp.experts.gate_up_proj"]),
    *(("use_bdlora", value) for value in (True, {"nblocks": 2}, {"nblocks": 0, "match_strict": False}, {"rows": 2})),
    ("arrow_config", {"top_k": 2}),
    ("monteclora_config", {"num_samples": 2}),
    ("kasa_config", {"beta": 0.1}),
    ("a_field_of_tomorrow", 1),
    ("a_field_of_tomorrow", "on"),
]


def stable_id(part: object) -> str:
    """Returns an id that is the same in every process, unlike the address of an object."""
    return "missing" if part is MISSING else ascii(part)[:40]


@pytest.mark.parametrize(("field", "value"), REFUSED_FIELDS, ids=stable_id)
def test_a_field_that_cannot_be_applied_is_named(tmp_path: Path, field: str, value: object) -> None:
    message = refusal_of(write_adapter(tmp_path, {field: value}))
    assert message.startswith(f"adapter_config.json: {field} ")
    assert len(message) < 300


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("a_field_of_tomorrow", value) for value in (None, False, 0, 0.0, "")),
        ("a_field_of_tomorrow", []),
        ("a_field_of_tomorrow", {}),
        *((field, None) for field in ("modules_to_save", "rank_pattern", "exclude_modules", "layers_to_transform")),
        *((field, value) for field in ("use_dora", "lora_bias", "use_rslora") for value in (False, None)),
        ("init_lora_weights", None),
        ("bias", "none"),
        ("task_type", "FEATURE_EXTRACTION"),
        ("lora_dropout", 0.1),
        ("runtime_config", {"ephemeral_gpu_offload": False}),
        ("loftq_config", {"loftq_bits": 4}),
        ("megatron_core", "megatron.core"),
        ("qalora_group_size", 16),
        ("layers_to_transform", []),
        ("fan_in_fan_out", True),
        ("velora_config", {"num_groups": 2}),
        ("init_lora_weights", "mica"),
        ("unsloth_version", "2026.1"),
        ("task", "text-generation"),
        ("alpha_pattern", {"visual.blocks.0.attn.qkv": 8, "vision_tower": 9}),
        ("target_modules", ["q_proj", "qkv", "fc1"]),
    ],
    ids=str,
)
def test_a_field_that_changes_nothing_is_accepted(tmp_path: Path, field: str, value: object) -> None:
    assert inspect_adapter(write_adapter(tmp_path, {field: value}), SPEC).rank == RANK


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (r"((((.*)*)*)*)*(?!.)x" + "(a?){40}" * 40, "matching it takes more than 0.05 s of CPU"),
        ("(" * 5000, "it is not a valid regular expression"),
        ("a" * 20_000, "it has 20000 characters"),
    ],
    ids=["without end", "invalid", "long"],
)
def test_a_pattern_that_cannot_be_matched_is_refused(
    tmp_path: Path, field: str, pattern: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caraserve.lora.target_patterns._CPU_S", 0.05)
    message = refusal_of(write_adapter(tmp_path, {field: pattern}))
    assert f"adapter_config.json: {field} is " in message
    assert why in message


@pytest.mark.parametrize("failure", [OSError(errno.EAGAIN, "no process"), TimeoutExpired("python", 60.0)])
def test_a_pattern_that_cannot_be_matched_now_refuses_only_new_adapters_and_for_now(
    tmp_path: Path, failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise failure

    folder = write_adapter(tmp_path, {"target_modules": r".*\.q_proj"})
    digest = inspect_adapter(folder, SPEC).digest
    matched.cache_clear()
    monkeypatch.setattr("caraserve.lora.target_patterns.subprocess.run", run)
    assert read_adapter(folder, SPEC, aligned_bytes(1 << 20)).spec.digest == digest
    with pytest.raises(ServerBusy, match="cannot be used now"):
        inspect_adapter(folder, SPEC)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"target_modules": r".*\.k_proj"}, "matches no module with tensors"),
        ({"target_modules": r"q_proj"}, "matches no module with tensors"),  # not the whole name
        ({"target_modules": r".*0\..*\.q_proj"}, "model.layers.1.self_attn.q_proj has tensors, and"),
        ({"exclude_modules": r".*1\..*"}, "model.layers.1.self_attn.q_proj has tensors, and"),
    ],
    ids=str,
)
def test_tensors_of_modules_that_a_pattern_does_not_target_are_refused(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    assert why in refusal_of(write_adapter(tmp_path, changes))


@pytest.mark.timeout(10)
def test_thousands_of_patterns_take_no_time(tmp_path: Path) -> None:
    patterns = {f"layers.{layer}.self_attn.q_proj": 8 for layer in range(20_000)}
    assert inspect_adapter(write_adapter(tmp_path, {"alpha_pattern": patterns}), SPEC).rank == RANK


def test_a_name_that_is_not_text_is_shown_escaped(tmp_path: Path) -> None:
    assert r"'\ud800' is 1" in refusal_of(write_adapter(tmp_path, {"\ud800": 1}))


CONFIG_TEXTS = {
    "empty": (b"", "not valid JSON"),
    "cut short": (b'{"r": 8', "not valid JSON"),
    "no text": (b"\xff\xfe\xfd", "not valid JSON"),
    "a list": (b"[1]", "must hold a JSON object"),
    "deeply nested": (b'{"r":' + b"[" * 500_000, "not valid JSON"),
    "a number too long": (b'{"r": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    "over a mebibyte": (b" " * (1 << 20) + b"{}", "larger than"),
}


@pytest.mark.parametrize("kind", CONFIG_TEXTS)
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, kind: str) -> None:
    text, why = CONFIG_TEXTS[kind]
    (write_adapter(tmp_path) / "adapter_config.json").write_bytes(text)
    message = refusal_of(tmp_path)
    assert "adapter_config.json" in message
    assert why in message


@pytest.mark.parametrize("field", ["peft_type", "kasa_config"])
def test_a_value_nested_about_as_deep_as_the_stack_allows_is_refused(tmp_path: Path, field: str) -> None:
    path = write_adapter(tmp_path) / "adapter_config.json"
    for depth in range(800, 1000, 3):
        path.write_text(f'{{"peft_type": "LORA", "{field}": {"[" * depth}{"]" * depth}}}')
        message = refusal_of(tmp_path)
        assert field in message or "not valid JSON" in message


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["missing", "pipe", "folder", "broken link"])
@pytest.mark.timeout(10)
def test_a_path_that_is_not_a_regular_file_is_named(tmp_path: Path, name: str, kind: str) -> None:
    path = write_adapter(tmp_path) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "broken link":
        path.symlink_to(tmp_path / "nowhere")
    assert name in refusal_of(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.pth", "adapter_model.pt"])
def test_a_pickle_is_never_read(tmp_path: Path, name: str) -> None:
    (write_adapter(tmp_path) / "adapter_model.safetensors").rename(tmp_path / name)
    assert f"the folder holds a pickle, {name}; only adapter_model.safetensors and" in refusal_of(tmp_path)


def test_a_tensor_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_adapter(tmp_path) / "adapter_model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    assert "adapter_model.safetensors is not a valid safetensors file" in refusal_of(tmp_path)


def with_tensor(name: str, *shape: int, dtype: str = "float32") -> Tensors:
    return tensors_for() | {name: np.zeros(shape, dtype)}


def without(name: str) -> Tensors:
    return {key: values for key, values in tensors_for().items() if key != name}


def renamed(*pairs: tuple[str, str]) -> Tensors:
    names = dict(pairs)
    return {names.get(key, key): values for key, values in tensors_for().items()}


REFUSED_TENSORS: dict[str, tuple[Tensors, str]] = {
    "none": ({}, "has no LoRA tensors"),
    "lm_head": (with_tensor("base_model.model.lm_head.lora_A.weight", 4, 64), "lm_head.lora_A"),
    "embedding": (with_tensor("base_model.model.model.embed_tokens.lora_embedding_A", 4, 96), "lora_embedding_A"),
    "saved module": (with_tensor("base_model.model.classifier.weight", 2, 64), "classifier.weight"),
    "DoRA": (with_tensor(f"{LAYER}.self_attn.q_proj.lora_magnitude_vector", 64), "lora_magnitude_vector"),
    "LoRA bias": (with_tensor(f"{LAYER}.self_attn.q_proj.lora_B.bias", 64), "lora_B.bias"),
    "base bias": (with_tensor(f"{LAYER}.self_attn.q_proj.bias", 64), "q_proj.bias"),
    "norm": (with_tensor(f"{LAYER}.input_layernorm.weight", 64), "input_layernorm"),
    "not the module's block": (with_tensor(f"{LAYER}.mlp.q_proj.lora_A.weight", 4, 64), "mlp.q_proj"),
    "no text": (with_tensor("\n\x07", 1), r"'\n\x07'"),
    "A alone": (without(B0), f"tensor {A0} has no lora_B beside it"),
    "B alone": (without(A0), f"tensor {B0} has no lora_A beside it"),
    "A of another rank": (tensors_for() | {A0: np.zeros((5, 64), "float32")}, f"tensor {A0} has shape [5, 64]"),
    "B of another rank": (tensors_for() | {B0: np.zeros((64, 5), "float32")}, f"tensor {B0} has shape [64, 5]"),
    "A transposed": (tensors_for() | {A0: np.zeros((64, 4), "float32")}, f"tensor {A0} has shape [64, 4]"),
    "A of a larger model": (tensors_for() | {A0: np.zeros((4, 128), "float32")}, f"tensor {A0} has shape [4, 128]"),
    "A flat": (tensors_for() | {A0: np.zeros(256, "float32")}, f"tensor {A0} has shape [256]"),
    "integers": (tensors_for() | {A0: np.zeros((4, 64), "int32")}, f"tensor {A0} has dtype I32"),
    "doubles": (tensors_for() | {A0: np.zeros((4, 64), "float64")}, f"tensor {A0} has dtype F64"),
    "a layer too many": (tensors_for(layers=(0, 1, 2)), "the base model has only 2 layers"),
    "a layer out of any range": (with_tensor(LAYER[:-1] + "9" * 40 + ".mlp.up_proj.lora_A.weight", 4, 64), "9999"),
    "a layer's number padded": (renamed((A0, A0.replace("layers.0", "layers.00"))), "layers.00"),
    "a layer's number in other digits": (with_tensor(A0.replace("layers.0", "layers.٠"), 4, 64), "layers"),
    "a module not targeted": (tensors_for(("q_proj", "k_proj")), "adapter_config.json does not target this module"),
    "a targeted module's lost": (tensors_for(layers=(0,)), "covers model.layers.1.self_attn.q_proj, but"),
    "the same twice": (with_tensor(A0.replace(".weight", ".default.weight"), 4, 64), "are the same module's"),
    "two adapters": (renamed((B0, B0.replace(".weight", ".other.weight"))), "belongs to another adapter"),
}


@pytest.mark.parametrize("kind", REFUSED_TENSORS)
def test_a_tensor_that_cannot_be_applied_is_named(tmp_path: Path, kind: str) -> None:
    tensors, why = REFUSED_TENSORS[kind]
    message = refusal_of(write_adapter(tmp_path, tensors=tensors))
    assert why in message
    assert len(message) < 500


@pytest.mark.parametrize("changes", [{"layers_to_transform": [0]}, {"exclude_modules": ["q_proj"]}], ids=str)
def test_tensors_of_modules_that_are_not_targeted_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert "does not target this module" in refusal_of(write_adapter(tmp_path, changes))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [A0, B0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float, name: str, dtype: str) -> None:
    tensors = {key: values.astype(dtype) for key, values in tensors_for().items()}
    tensors[name][-1, -1] = value
    with pytest.raises(AdapterRejected, match=re.escape(f"tensor {name} has values that are not finite")):
        read(write_adapter(tmp_path, tensors=tensors), SPEC)


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81])
def test_bfloat16_values_that_are_not_finite_are_refused(tmp_path: Path, bits: int) -> None:
    tensors = {name: torch.zeros(values.shape, dtype=torch.int16) for name, values in tensors_for().items()}
    tensors[B0][3, 1] = bits - (1 << 16) if bits >> 15 else bits
    folder = write_adapter(tmp_path)
    save_file({name: t.view(torch.bfloat16) for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterRejected, match=re.escape(f"tensor {B0} has values that are not finite")):
        read(folder, SPEC)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_finite_values_are_accepted(tmp_path: Path, dtype: torch.dtype, sign: int) -> None:
    folder, largest = write_adapter(tmp_path), sign * torch.finfo(dtype).max
    halves = {"A": largest, "B": 2**-20 if dtype is torch.float16 else 1e-30}
    tensors = {name: torch.full(values.shape, halves[name[-8]], dtype=dtype) for name, values in tensors_for().items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert read(folder, SPEC).spec.rank == RANK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_finite_values_whose_product_is_not_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_adapter(tmp_path)
    tensors = {name: torch.full(values.shape, 1e19, dtype=dtype) for name, values in tensors_for().items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    assert f"tensors {A0} and lora_B: with the scale 2 their product may reach 5e+40" in refusal_of(folder)


def test_an_adapter_rewritten_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_raw = TensorFile.raw

    def read_beside_a_writer(file: TensorFile, name: str) -> object:
        os.utime(tmp_path / "adapter_model.safetensors", ns=(0, 0))
        return read_raw(file, name)

    monkeypatch.setattr(TensorFile, "raw", read_beside_a_writer)
    with pytest.raises(AdapterRejected, match="was changed while it was being read"):
        read(write_adapter(tmp_path), SPEC)


def test_without_a_root_nothing_is_loaded_and_the_flags_are_named(tmp_path: Path) -> None:
    with pytest.raises(Forbidden, match="--adapters-dir DIR or --allow-adapter-path ROOT"):
        resolve_adapter_path(str(write_adapter(tmp_path / "a")), [])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Returns a root with one adapter `a`, beside an adapter `secret` outside of it."""
    write_adapter(tmp_path / "secret")
    write_adapter(tmp_path / "root" / "a")
    return tmp_path / "root"


@pytest.mark.parametrize("path", ["a", "./a", "a/../a", "a/"])
def test_relative_paths_start_at_the_root(root: Path, path: str) -> None:
    assert resolve_adapter_path(path, [root]) == (root / "a").resolve()


def test_an_absolute_path_inside_is_found(root: Path) -> None:
    assert resolve_adapter_path(str(root / "a"), [root]) == (root / "a").resolve()


def test_links_within_the_root_are_followed(root: Path) -> None:
    store = write_adapter(root / "store")
    (root / "b").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "b" / name).symlink_to(store / name)
    (root / "c").symlink_to(root / "b")
    assert inspect_adapter(resolve_adapter_path("c", [root]), SPEC).rank == RANK


@pytest.mark.parametrize("path", ["../secret", "a/../../secret", "/etc", "/", "..", "../nowhere", "link"])
def test_a_path_that_leads_out_is_refused_whether_or_not_it_exists(root: Path, path: str) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    reason = f"lies outside {root}, from where adapters may be loaded; --allow-adapter-path allows more"
    with pytest.raises(AdapterRejected, match=re.escape(reason)):
        resolve_adapter_path(path, [root])


def test_adapters_may_be_loaded_from_every_root_and_errors_name_all_roots(root: Path) -> None:
    roots = [root, root.parent / "secret"]
    assert resolve_adapter_path(str(root / "a"), roots) == (root / "a").resolve()
    assert resolve_adapter_path(str(root.parent / "secret"), roots) == (root.parent / "secret").resolve()
    with pytest.raises(AdapterRejected, match=re.escape(f"lies outside {root} or {root.parent / 'secret'}, ")):
        resolve_adapter_path("/etc", roots)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_links_out_is_refused(root: Path, name: str) -> None:
    (root / "a" / name).unlink()
    (root / "a" / name).symlink_to(root.parent / "secret" / name)
    with pytest.raises(AdapterRejected, match=f"{name} is a link that leads outside"):
        resolve_adapter_path("a", [root])


@pytest.mark.parametrize("path", ["nowhere", "a/adapter_config.json", "x" * 300, "loop", "\ud800"], ids=ascii)
def test_a_path_without_a_folder_is_not_found(root: Path, path: str) -> None:
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(NotFound) as caught:
        resolve_adapter_path(path, [root])
    caught.value.message.encode()


@pytest.mark.parametrize("path", ["a\0b", "a/" * 3000])
def test_an_invalid_path_is_refused(root: Path, path: str) -> None:
    with pytest.raises(AdapterRejected, match="not a path"):
        resolve_adapter_path(path, [root])
