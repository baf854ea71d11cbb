"""The numbers of docs/sizing.md are those that the server plans with."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from caraserve import demo
from caraserve.config import LoraConfig
from caraserve.core.lora_layout import MAX_RANK, AdapterSpec, modules_of
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.builder import GRAPH_BYTES
from caraserve.gpu.memory.pass_shape import Capacity
from caraserve.gpu.memory.workspace import make_workspace
from caraserve.model.dtype import Dtype
from caraserve.model.families import load_plan, plan_of
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.gguf_blocks import GGUF_BLOCKS
from caraserve.model.formats.plain import PLAIN
from caraserve.model.plan import DecoderPlan

PAGE = (Path(__file__).parent.parent / "docs" / "sizing.md").read_text(encoding="utf-8")
GIB, MIB = 1 << 30, 1 << 20
ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj")
# hidden, layers, inner, vocabulary, heads, KV heads, whether the head is the embedding
SHAPES = {
    "SmolLM2 135M": (576, 30, 1536, 49152, 9, 3, True),
    "Llama 3.2 1B": (2048, 16, 8192, 128256, 32, 8, True),
    "Llama 2 7B": (4096, 32, 11008, 32000, 32, 32, False),
    "Mistral 7B": (4096, 32, 14336, 32000, 32, 8, False),
    "Llama 3.1 8B": (4096, 32, 14336, 128256, 32, 8, False),
    "Llama 2 13B": (5120, 40, 13824, 32000, 40, 40, False),
    "Qwen2.5 32B": (5120, 64, 27648, 152064, 40, 8, False),
    "Llama 3.1 70B": (8192, 80, 28672, 128256, 64, 8, False),
}


def plan_named(name: str, **more: Any) -> DecoderPlan:
    hidden, layers, inner, vocab, heads, kv_heads, tied = SHAPES[name]
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"}
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    return plan_of(config | sizes | heads_of | {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5} | more)


def in_format(plan: DecoderPlan, kind: WeightFormat) -> DecoderPlan:
    layers = tuple(layer.with_linears(lambda linear: replace(linear, format=kind)) for layer in plan.layers)
    return replace(plan, layers=layers, embed_format=kind, head_format=kind)


def adapter_bytes(plan: DecoderPlan, rank: int, targets: tuple[str, ...] = ()) -> int:
    modules = modules_of(plan, targets or plan.targets)
    return AdapterSpec.of(plan, Dtype.BF16, dict.fromkeys(modules, (rank, 1.0))).num_bytes


def tables() -> Iterator[list[str]]:
    """Yields the cells of each row of the page's tables."""
    for line in PAGE.splitlines():
        if line.startswith("| ") and "---" not in line:
            yield [cell.strip() for cell in line.strip("|").split("|")]


def formulas() -> dict[str, Any]:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(code, names)
    return names


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_of_models_has_the_planned_bytes(name: str) -> None:
    plan = plan_named(name)
    kept = [plan.weight_bytes(2), *(in_format(plan, GGUF_BLOCKS[kind]).weight_bytes(2) for kind in ("Q8_0", "Q4_K"))]
    kv = [plan.kv_bytes_per_token(itemsize) >> 10 for itemsize in (4, 2)]
    adapters = [adapter_bytes(plan, 16, targets) / MIB for targets in ((), ATTENTION_MODULES)]
    row = [*(f"{size / GIB:.2f}" for size in kept), *map(str, kv), *(f"{size:.1f}" for size in adapters)]
    assert [name, *row] in list(tables())


def test_the_page_s_formula_of_an_adapter_is_the_layout_of_the_server() -> None:
    written = formulas()["adapter_bytes"]
    for plan in (load_plan(demo.model_folder()), plan_named("SmolLM2 135M"), plan_named("Llama 3.1 8B")):
        modules = [(linear.inputs, linear.outputs) for linear in plan.layers[0].linears]
        for rank in (4, 16, 60):
            assert written(rank, modules, len(plan.layers), 2) == adapter_bytes(plan, rank)


def test_the_formulas_of_weights_and_of_keys_and_values_are_the_plan_s() -> None:
    for plan in (load_plan(demo.model_folder()), plan_named("Llama 3.2 1B")):
        attention = plan.layers[0].attention
        assert attention is not None
        one = 2 * len(plan.layers) * attention.kv_heads * attention.head_dim
        assert [plan.kv_bytes_per_token(itemsize) for itemsize in (2, 4)] == [2 * one, 4 * one]
        assert plan.weight_bytes(2) == 2 * plan.num_parameters


def test_the_table_of_formats_has_the_bytes_in_memory() -> None:
    configurations = {
        "fp8, int8 with a scale for each output": {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "GPTQ, 4 bits, groups of 128": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
        "AWQ, 4 bits, groups of 128": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        "bitsandbytes nf4": {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": "bfloat16",
        },
    }
    formats: dict[str, WeightFormat] = dict(GGUF_BLOCKS)
    for name, section in configurations.items():
        formats[name] = plan_named("Mistral 7B", quantization_config=section).layers[0].linears[0].format
    rows = [row for row in tables() if len(row) == 4 and re.fullmatch(r"\d\.\d\d", row[1])]
    stated = {name: share for row in rows for name, share in (row[:2], row[2:])}
    stated.pop("float32"), stated.pop("bfloat16, float16")
    assert stated == {name: f"{formats[name].num_bytes(4096, 4096, 2) / 4096**2:.2f}" for name in stated}
    assert PLAIN.num_bytes(4096, 4096, 2) == 2 * 4096**2


def test_the_table_of_adapters_in_a_gibibyte() -> None:
    plan = plan_named("Llama 3.1 8B")
    for name, targets in (("all", ()), ("q, k, v", ATTENTION_MODULES)):
        assert [name, *(str(GIB // adapter_bytes(plan, rank, targets)) for rank in (8, 16, 64))] in list(tables())


def test_the_example_of_a_gpu_is_what_the_server_plans() -> None:
    plan = plan_named("Llama 3.1 8B")
    work = sum(bytes_of(workspace(plan, capacity)) for capacity in ((2048, 256, 2304), (128, 1, 144)))
    assert f"activations and logits: {work / GIB:.1f} GiB" in PAGE
    usable, fixed = 0.9 * 80e9, GRAPH_BYTES + work
    left, kv = usable - plan.weight_bytes(2) - fixed, 64 * 2048 * plan.kv_bytes_per_token(2)
    every, attention = adapter_bytes(plan, 16), adapter_bytes(plan, 16, ATTENTION_MODULES)
    sizes = [usable, plan.weight_bytes(2), fixed, left, kv, 1000 * every, 1000 * attention]
    rows = [row for row in tables() if len(row) == 2]
    first = next(index for index, row in enumerate(rows) if row[0].startswith("usable"))
    assert [row[1] for row in rows[first : first + len(sizes)]] == [f"{size / GIB:.1f}" for size in sizes]
    text = " ".join(PAGE.split())
    assert f"with {(left - 1000 * attention) / GIB:.1f} GiB for KV" in text
    assert f"some {round((left - kv) / every, -1):.0f} are there" in text
    assert f"default of 4 GiB {LoraConfig().max_host_adapters_bytes // every} of" in text
    assert f"a load of {every // MIB} MiB takes {every / 55.5e9 * 1e3:.1f} ms" in text


def test_the_example_of_a_cpu_is_what_the_server_plans() -> None:
    plan = in_format(plan_named("Mistral 7B"), GGUF_BLOCKS["Q4_0"])
    size, kv = adapter_bytes(plan, 16), 8 << 30
    for row in (
        ["weights", f"{plan.weight_bytes(2) / GIB:.1f}"],
        [f"adapters in use: {GIB // size} of rank 16 on all modules", "1.0"],
        [f"adapters in host memory: {12 * GIB // size}", "12.0"],
        ["together", f"{plan.weight_bytes(2) / GIB + 8 + 1 + 12 + 1:.1f}"],
    ):
        assert row in list(tables())
    tokens = [kv // plan.kv_bytes_per_token(itemsize) for itemsize in (4, 2)]
    assert f"KV cache: {tokens[0]:,} tokens, or {tokens[1]:,} with" in PAGE
    weights = plan.num_parameters - plan.vocab_size * plan.hidden
    read_ms = weights * 0.5625 / 50e9 * 1e3
    assert f"its {weights / 1e9:.1f} billion weights takes {read_ms:.0f} ms" in " ".join(PAGE.split())
    assert f"= {weights * 1.6 / 8 / (8 * 3e9) * 1e3:.0f} ms: at best {1e3 / read_ms:.1f} tokens/s" in PAGE


def workspace(plan: DecoderPlan, capacity: tuple[int, int, int]) -> object:
    tokens, rows, outputs = capacity
    sizes = Capacity(tokens, rows, outputs, 64, 1024)
    return make_workspace(plan, torch.bfloat16, sizes, MAX_RANK, 8192, torch.device("meta"), ATTENTION.decode)


def bytes_of(made: object, seen: set[int] | None = None) -> int:
    """Returns the bytes of all tensors in a dataclass; those that share memory count once."""
    seen = set() if seen is None else seen
    if isinstance(made, torch.Tensor):
        base = made if made._base is None else made._base
        known, _ = id(base) in seen, seen.add(id(base))
        return 0 if known else base.numel() * base.element_size()
    if is_dataclass(made):
        return sum(bytes_of(getattr(made, field.name), seen) for field in fields(made))
    if isinstance(made, tuple):
        return sum(bytes_of(each, seen) for each in made)
    return sum(bytes_of(each, seen) for each in made.values()) if isinstance(made, dict) else 0
