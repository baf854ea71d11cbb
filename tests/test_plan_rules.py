"""Rules for the source: only `model/families/` names a family, only formats and their kernels name a weight format, and
no code counts the modules of a layer itself.

Constants of the syntax tree are compared, so comments and docstrings may name what they explain.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from caraserve.model import families
from tests.test_architecture import nodes_of

PACKAGE = Path(__file__).parent.parent / "caraserve"
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))

FAMILY_NAMES = {name.lower() for family in families.families() for name in (family.model_type, family.architecture)}
FORMAT_NAMES = {"plain", "fp8", "int8", "mxfp4"}
TARGETS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

# Files that may name a family, and what else they name so.
FAMILIES_EXEMPT = {
    "model/families": "families",
    "config.py": "parsers of tool calls",
    "tokenizer/tool_format.py": "parsers of tool calls",
    "bench/synthetic.py": "shapes of models to measure",
    "model/gguf_reader.py": "models whose rows llama.cpp reorders",
    "model/gguf": "families by architectures of GGUF files",
    "tokenizer/gguf_tokenizer.py": "rules by which texts are split",
}
# Files that may name the modules of a Llama layer.
TARGETS_EXEMPT = {
    "model/families": "families",
    "bench/synthetic.py": "modules of models to measure",
}
# Files that may name a weight format, and why.
FORMATS_EXEMPT = {
    "model/formats": "formats",
    "model/quantization.py": "the parser of quantization_config",
    "model/compressed_groups.py": "the same, of one method",
    "model/plan.py": "the format of weights that are plain numbers",
    "model/linear_plan.py": "the same",
    "model/plan_formats.py": "the same",
    "cpu/linear": "kernels of formats",
    "config.py": "what inputs of modules are rounded to",
    "gpu/linear": "kernels of formats",
    "gpu/kernels/grouped.py": "kernels of formats",
    "model/gguf_reader.py": "types of tensors in its files",
    "model/gguf": "formats of types of tensors",
    "model/checkpoint.py": "the same",
    "gpu/weights.py": "embeddings are rows of plain numbers",
    "cpu/weights.py": "embeddings are rows of plain numbers",
    "cpu/merged_weights.py": "only plain numbers hold a sum",
}
# Files in which a number 7 counts something else than modules, and what.
SEVENS_EXEMPT = {
    "model/dtype.py": "bits of an exponent",
    "profiling/measure.py": "rounds of a measurement",
    "engine/iteration_times.py": "iterations of a median",
    "cpu/attention.py": "arguments of a compiled function",
    "cpu/forward.py": "arguments of a compiled function",
    "cpu/kv_kernels.py": "arguments of a compiled function",
    "cpu/libc.py": "arguments of a system call",
    "cpu/tiles.py": "arguments of an intrinsic",
    "cpu/linear": "bits of a code",
    "model/formats": "places of a code",
    "model/gguf_reader.py": "a type of metadata",
    "model/torch_pickle.py": "arguments of a function of torch",
    "gpu/kernels/work_orders.py": "words of a work order",
    "gpu/kernels/grouped.py": "bits of a code",
    "gpu/kernels/quantized.py": "bits of a code",
}


def constants(path: Path) -> Iterator[tuple[int, object]]:
    """Yields (line, value) of the constants of a file that are no docstrings."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and not (isinstance(node.value, str) and "\n" in node.value):
            yield node.lineno, node.value


def is_exempt(path: Path, exempt: Mapping[str, str]) -> bool:
    place = path.relative_to(PACKAGE).as_posix()
    return any(place == name or place.startswith(f"{name}/") for name in exempt)


def found(values: set[str], exempt: Mapping[str, str]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)}:{line}: {value}"
        for path in MODULES
        if not is_exempt(path, exempt)
        for line, value in constants(path)
        if isinstance(value, str) and value.lower() in values
    ]


def test_only_families_name_a_family() -> None:
    assert found(FAMILY_NAMES, FAMILIES_EXEMPT) == []


def test_only_families_name_the_modules_of_a_layer() -> None:
    assert found(TARGETS, TARGETS_EXEMPT) == []


def test_only_formats_and_their_kernels_name_a_weight_format() -> None:
    assert found(FORMAT_NAMES, FORMATS_EXEMPT) == []


def test_only_formats_and_their_kernels_import_a_weight_format() -> None:
    used = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.module}"
        for path in MODULES
        if not is_exempt(path, FORMATS_EXEMPT)
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("caraserve.model.formats.")
    ]
    assert used == []


def test_no_code_counts_the_seven_modules_of_a_llama_layer() -> None:
    sevens = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in MODULES
        if not is_exempt(path, SEVENS_EXEMPT)
        for line, value in constants(path)
        if type(value) is int and value == 7
    ]
    assert sevens == []


@pytest.mark.parametrize("exempt", [FAMILIES_EXEMPT, TARGETS_EXEMPT, FORMATS_EXEMPT, SEVENS_EXEMPT])
def test_exempt_files_exist(exempt: Mapping[str, str]) -> None:
    assert [name for name in exempt if not (PACKAGE / name).exists()] == []
