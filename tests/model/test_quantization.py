"""`quantization_config` of config.json, and quantised weights as numbers."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Code, decoded
from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.plain import PLAIN
from caraserve.model.formats.scaled_codes import Inputs, ScaledCodes
from caraserve.model.quantization import _METHODS, Quantization, parse_quantization
from tests.oracle.models import make_model
from tests.oracle.quantized import KINDS, PER_TOKEN, STATIC, compressed, dequantize, quantize
from tests.oracle.test_packed_formats import CASES

UP = "model.layers.0.mlp.up_proj"
BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def parsed(section: Any) -> Quantization:
    found = parse_quantization({"quantization_config": section})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("fp8-per-output", Fp8(Inputs.PER_TOKEN)),
        ("fp8-per-tensor", Fp8(Inputs.PER_TOKEN)),
        ("fp8-static", Fp8(Inputs.STATIC)),
        ("fp8-weights", Fp8(Inputs.KEPT)),
        ("int8", Int8(Inputs.PER_TOKEN)),
        ("int8-static", Int8(Inputs.STATIC)),
        ("int8-weights-partly", Int8(Inputs.KEPT)),
    ],
)
def test_schemes_of_both_formats(kind: str, scheme: ScaledCodes) -> None:
    found = parsed(KINDS[kind].section)
    assert found.format_of(UP) == scheme
    assert found.format_of("lm_head") is None


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_a_config_without_the_section_is_not_quantised(config: dict[str, Any]) -> None:
    assert parse_quantization(config) is None


def test_the_sections_former_name_is_read() -> None:
    assert parse_quantization({"compression_config": KINDS["int8"].section}) == parsed(KINDS["int8"].section)


def test_dynamic_inputs_are_quantised_per_token_whatever_the_strategy() -> None:
    section = compressed("float", {"dynamic": True, "strategy": "tensor"})
    assert parsed(section).groups[0][1].inputs is Inputs.PER_TOKEN


def test_names_come_before_patterns_and_patterns_before_classes() -> None:
    section = compressed("int", None)
    first = section["config_groups"]["group_0"]
    floats = copy.deepcopy(compressed("float", None)["config_groups"]["group_0"])
    section["config_groups"] |= {
        "pattern": copy.deepcopy(floats) | {"targets": ["re:.*up_proj$"]},
        "name": floats | {"targets": [UP.replace("0", "1"), "model.layers.2"]},
    }
    first["targets"] = ["Linear", "re:.*layers.3.mlp.up_proj", UP.replace("0", "4")]
    found = parsed(section)
    codes = [found.format_of(UP.replace("0", str(layer))) for layer in range(5)]
    fp8, int8 = Fp8(Inputs.KEPT), Int8(Inputs.KEPT)
    assert codes == [fp8, fp8, fp8, int8, int8]
    assert found.format_of("model.layers.2.mlp.gate_proj") == int8  # a name is whole


@pytest.mark.parametrize(
    ("ignore", "ignored"),
    [
        ((), False),
        ((UP,), True),
        (("up_proj", "mlp.up_proj", "model.layers.0.mlp"), False),
        (("re:model.layers.0.mlp",), True),
        (("re:.*up_proj",), True),
        (("re:up_proj", "re:.*up_pro$"), False),
        (("Linear",), True),
    ],
)
def test_ignored_modules_are_whole_names_or_patterns_from_the_start(ignore: tuple[str, ...], ignored: bool) -> None:
    assert (parsed(compressed("int", None, ignore=ignore)).format_of(UP) is None) == ignored
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ignore}
    assert (parsed(section).format_of(UP) is None) == ignored


def packed(form: str = "pack-quantized", **fields: Any) -> dict[str, Any]:
    """Returns a section of packed weights with some of their fields changed."""
    section = compressed("int", None, strategy="group") | {"format": form}
    section["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "group_size": 128, **fields}
    return section


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def changed(**fields: Any) -> dict[str, Any]:
    """Returns a section with some fields of its weights or inputs (`inputs_…`) changed."""
    section = compressed("int", PER_TOKEN)
    group = section["config_groups"]["group_0"]
    for name, value in fields.items():
        part = group["input_activations" if name.startswith("inputs_") else "weights"]
        part[name.removeprefix("inputs_")] = value
    return section


REFUSED = {
    "gguf": ({"quant_method": "gguf"}, "quant_method 'gguf' is not read; gptq, awq, .* are"),
    "text": ("fp8", "it is 'fp8'"),
    "sparse pack": (compressed("int", None) | {"format": "marlin-24"}, "format 'marlin-24'"),
    "no groups": (compressed("int", None) | {"config_groups": {}}, "config_groups {}"),
    "static blocks": (BLOCK | {"activation_scheme": "static"}, r"weight_block_size \[128, 128\]"),
    "odd blocks": (BLOCK | {"weight_block_size": [128, 100]}, r"weight_block_size \[128, 100\]"),
    "unknown inputs": ({"quant_method": "fp8"}, "activation_scheme None"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
    "4 bits": (changed(num_bits=4), "weights of group_0 of type 'int' with 4 bits"),
    "asymmetric": (changed(symmetric=False), "symmetric False"),
    "asymmetric inputs": (changed(inputs_symmetric=False), "input_activations of group_0 .* symmetric False"),
    "no size": (changed(strategy="group"), r"weights of group_0 in blocks of \[1, None\]"),
    "other inputs": (changed(inputs_type="float"), "of type 'float' with weights of another type"),
    "blocks of inputs": (changed(inputs_strategy="group"), "input_activations of group_0 with strategy 'group'"),
    "static per token": (changed(inputs_dynamic=False), "strategy 'token', dynamic False"),
    "rotated": (compressed("int", None) | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
    "sparse": (compressed("int", None) | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
    "pattern": (compressed("int", None, ignore=("re:(",)), r"ignore 're:\(', which has a group without an end, is not"),
    "gptq of 3 bits": (GPTQ | {"bits": 3}, "bits 3 of GPTQ is not read; 4 or 8 is"),
    "gptq of bits that are no integer": (GPTQ | {"bits": 4.0}, "bits 4.0 of GPTQ is not read; 4 or 8 is"),
    "gptq for marlin": (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "gptq of marlin": (GPTQ | {"is_marlin_format": True}, "is_marlin_format true"),
    "gptq group": (GPTQ | {"group_size": 7}, "group_size 7 is not read; -1 or a multiple of 16 is"),
    "gptq with a correction": (GPTQ | {"adapter": {"type": "lora"}}, "adapter {'type': 'lora'}"),
    "gptq in other words": (GPTQ | {"pack_dtype": "int8"}, "pack_dtype 'int8'"),
    "gptq order": (GPTQ | {"desc_act": "yes"}, "desc_act 'yes' is not read; true or false is"),
    "dynamic pattern": (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic 're:\(', which"),
    "dynamic bits": (GPTQ | {"dynamic": {"x": {"bits": 2}}}, "bits 2 of GPTQ"),
    "gptq for bitblas": (GPTQ | {"checkpoint_format": "bitblas"}, "checkpoint_format 'bitblas'"),
    "gptq, rotated": (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard' is not read; none is"),
    "gptq of 2 bits": (GPTQ | {"bits": 2}, "bits 2 of GPTQ is not read; 4 or 8 is"),
    "awq gemv": (AWQ | {"version": "GEMV"}, "version 'gemv' of AWQ is not read; 'gemm' is"),
    "awq marlin": (AWQ | {"version": "marlin"}, "version 'marlin' of AWQ"),
    "awq exllama": (AWQ | {"version": "exllama"}, "version 'exllama' of AWQ"),
    "awq of 8 bits": (AWQ | {"bits": 8}, "bits 8 of AWQ is not read; 4 is"),
    "awq without zero points": (AWQ | {"zero_point": False}, "zero_point False of AWQ"),
    "llm-awq": (AWQ | {"backend": "llm-awq"}, "backend 'llm-awq' of AWQ"),
    "bitsandbytes of no bits": ({"quant_method": "bitsandbytes"}, "load_in_4bit False, load_in_8bit False"),
    "another table": (NF4 | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is not read; nf4 or fp4 is"),
    "another storage": (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage 'bfloat16'"),
    "packs of 3 bits": (packed(num_bits=3), "num_bits 3 of the weights of group_0 is not read; 4 or 8 is"),
    "packs of no inputs": (packed(group_size=0), "strategy 'group', group_size 0"),
    "a type that is a list": (packed("int-quantized", type=[], num_bits=8), r"type \[\]"),
    "order": (packed(actorder="random"), "actorder 'random' of group_0"),
    "packs per tensor": (packed(strategy="tensor"), "strategy 'tensor', group_size 128"),
    "nvfp4 groups": (
        packed("nvfp4-pack-quantized", type="float", group_size=32),
        "group_size 32 of the weights of group_0 is not read; 16 is",
    ),
}


@pytest.mark.parametrize(("section", "names"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line_that_says_what_can(section: Any, names: str) -> None:
    with pytest.raises(ModelLoadError, match=f"quantization_config: .*{names}") as refused:
        parse_quantization({"quantization_config": section})
    message = refused.value.message
    assert "\n" not in message
    assert re.search(r" is not read; .+ (?:is|are)$", message)


_ROW = re.compile(r"^\| `([a-z0-9-]+)` \| (.*) \| (.*?) ?\|$", re.MULTILINE)
_PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
_TABLE = _ROW.findall(_PAGE.partition("\n## Quantised checkpoints\n")[2].partition("\n## ")[0])


def words_of(cell: str) -> set[str]:
    return set(re.findall("`([^`]+)`", cell))


def test_the_table_of_the_documentation_has_each_method_once() -> None:
    assert sorted(method for method, _, _ in _TABLE) == sorted(_METHODS)


@pytest.mark.parametrize(("method", "read", "refused"), _TABLE, ids=[row[0] for row in _TABLE])
def test_what_the_documentation_names_is_tested(method: str, read: str, refused: str) -> None:
    """By a whole model, and by a refusal."""
    cases = [case for case in CASES.values() if case.section["quant_method"] == method]
    made = [make(32, 64, np.random.default_rng(0))[0] for case in cases for make in case.makes.values()]
    tested = [str([case.section for case in cases]), *(name for tensors in made for name in tensors)]
    assert {word for word in words_of(read) if not any(word in one for one in tested)} == set()
    sections = [str(section) for section, _ in REFUSED.values() if isinstance(section, dict)]
    ours = " ".join(section for section in sections if f"'quant_method': '{method}'" in section)
    assert {word for word in words_of(refused) if f"'{word}'" not in ours.lower()} == set()


def test_sections_that_change_nothing_are_accepted() -> None:
    section = compressed("float", STATIC) | {"sparsity_config": {"format": "dense"}, "kv_cache_scheme": {"num_bits": 8}}
    assert parsed(section) == parsed(compressed("float", STATIC))


def test_the_value_of_every_code() -> None:
    codes = np.arange(256, dtype=np.uint8)
    for code, theirs in ((Code.F8_E4M3, torch.float8_e4m3fn), (Code.I8, torch.int8)):
        values = torch.from_numpy(codes).view(theirs).float().numpy()
        np.testing.assert_array_equal(decoded(codes, code), values)
        assert np.nanmax(values) == code.largest


# --- checkpoints ---


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source"), "llama_bias")


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_read_as_the_numbers_they_stand_for(kind: str, source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS[kind])
    plain = load_file(dequantize(folder, tmp_path / "plain") / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    formats = {
        f"{linear.module}.weight": linear.format for layer in load_plan(folder).layers for linear in layer.linears
    }
    checkpoint = FolderReader(folder)
    for name, wanted in plain.items():
        is_quantised, module = stored[name].element_size() == 1, name.removesuffix(".weight")
        kept = formats.get(name, PLAIN)
        assert (kept is not PLAIN) == is_quantised, name
        if wanted.dim() == 2:
            outputs, inputs = wanted.shape
            values = kept.values(kept.read(checkpoint, module, (outputs, inputs)))
            assert torch.equal(torch.from_numpy(values), wanted), name
        if is_quantised and KINDS[kind].input_scale is not None:
            assert checkpoint.input_scale(module) == float(stored[f"{module}.input_scale"])


def test_weights_that_are_not_as_config_says_are_refused(source: Path, tmp_path: Path) -> None:
    checkpoint = FolderReader(quantize(source, tmp_path / "quantised", KINDS["int8"]))
    with pytest.raises(ModelLoadError, match=f"tensor {UP}.weight has dtype I8; config.json says F8_E4M3"):
        Fp8(Inputs.KEPT).read(checkpoint, UP, (144, 80))
    with pytest.raises(ModelLoadError, match=f"tensor {UP}.weight has dtype I8; F32, F16 and BF16 are supported"):
        checkpoint(f"{UP}.weight", (144, 80))


@pytest.mark.parametrize(
    ("scale", "says"),
    [
        (None, "tensor .*up_proj.weight_scale is missing"),
        (torch.ones(7), r"has shape \[7\], not 1 or 144 scales"),
        (torch.full((144, 1), float("nan")), "up_proj.weight_scale has a scale of nan; those from 0 to 6.646e.35"),
        (torch.tensor(1e36), "up_proj.weight_scale has a scale of 1e.36; those from 0"),
        (torch.tensor(-1.0), "up_proj.weight_scale has a scale of -1; those from 0 "),
    ],
    ids=["missing", "shape", "nan", "huge", "negative"],
)
def test_wrong_scales_are_refused(scale: torch.Tensor | None, says: str, source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS["int8"])
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{UP}.weight_scale"]
    save_file(tensors | ({} if scale is None else {f"{UP}.weight_scale": scale}), folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=says):
        Int8(Inputs.PER_TOKEN).read(FolderReader(folder), UP, (144, 80))


def test_scales_may_have_the_names_that_transformers_gives_them(source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS["fp8-static"])
    tensors, names = load_file(folder / "model.safetensors"), {"input_scale": "activation_scale"}
    names["weight_scale"] = "weight_scale_inv"

    def read() -> tuple[float, float]:
        with FolderReader(folder) as reader:
            return float(reader.scales(UP, 144)[143]), reader.input_scale(UP)

    first = read()
    for ours, theirs in names.items():
        tensors[f"{UP}.{theirs}"] = tensors[f"{UP}.{ours}"].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{UP}.weight_scale and {UP}.weight_scale_inv are both there; one of"):
        read()
    for ours in names:
        del tensors[f"{UP}.{ours}"]
    save_file(tensors, folder / "model.safetensors")
    assert read() == first


def test_an_input_scale_of_zero_is_refused(source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS["int8-static"])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {f"{UP}.input_scale": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"scale of the inputs of {UP} is 0"):
        FolderReader(folder).input_scale(UP)
