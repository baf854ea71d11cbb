"""Quantised checkpoints on the CUDA backend, over an emulated device: answers are those of dequantised weights, with
inputs quantised as the checkpoint says."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from caraserve.errors import ConfigError
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.linear import quantized as quantized_linear
from caraserve.gpu.linear import room
from caraserve.gpu.linear.base import Linear
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.formats import class_of
from caraserve.gpu.linear.fp8 import Fp8Linear
from caraserve.gpu.linear.grouped import GroupedCodesClass
from caraserve.gpu.linear.int8 import Int8Linear
from caraserve.gpu.linear.mixed import MixedLinear
from caraserve.gpu.linear.mxfp4 import Mxfp4
from caraserve.gpu.linear.quantized import Product, QuantizedLinear
from caraserve.gpu.linear.room import ProductRoom, RoomSize
from caraserve.gpu.weights import Weights, dummy, load, num_bytes
from caraserve.model.dtype import Code
from caraserve.model.families import load_plan, plan_of
from caraserve.model.formats.fp8 import Fp8
from caraserve.model.formats.int8 import Int8
from caraserve.model.formats.mxfp4 import MXFP4
from caraserve.model.formats.scaled_codes import BlockCodes, Inputs
from caraserve.model.plan import DecoderPlan
from tests.gpu.host_backend import GRANULE_BYTES, serving
from tests.gpu.host_device import host_device
from tests.gpu.small_model import CONFIG
from tests.oracle.models import make_adapters, make_model, prompt_of
from tests.oracle.oracle import Oracle
from tests.oracle.quantized import KINDS, compressed, dequantize, quantize, quantize_inputs
from tests.oracle.subject import KINDS as ADAPTERS
from tests.serving import MIB, engine_config, lora_config, model_config, submit

CPU = torch.device("cpu")
# Of two logits closer than this, either may be the best: an input between two codes, different in its last bit, has
# another code.
TIE_MARGIN = 0.05


pytestmark = pytest.mark.usefixtures("torch_for_triton")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source"), "llama_bias")


@pytest.mark.parametrize("kind", ["fp8-per-output", "fp8-static", "int8", "int8-weights-partly"])
def test_answers_are_those_of_rounded_inputs_and_dequantised_weights(kind: str, source: Path, tmp_path: Path) -> None:
    """Through graphs, with adapters that arrive while others decode."""
    folder = quantize(source, tmp_path / "quantised", KINDS[kind])
    plain = dequantize(folder, tmp_path / "plain")
    adapters = make_adapters(tmp_path, plain, {name: ADAPTERS[name] for name in ("r8", "r13")})
    oracle, rng = Oracle(plain, adapters), random.Random(kind)
    has_kept_inputs = any(
        linear.format in (Fp8(Inputs.KEPT), Int8(Inputs.KEPT)) for linear in load_plan(folder).layers[1].linears
    )
    if not has_kept_inputs:
        quantize_inputs(oracle._model, folder, KINDS[kind])
    asked = [(prompt_of(rng, tokens), name) for tokens in (1, 30) for name in (None, *adapters)]

    async def serve() -> list[list[int]]:
        lora = lora_config(adapters, mode="pipelined", device_bytes=24 * GRANULE_BYTES, host_bytes=4 * MIB)
        engine = engine_config(seqs=6, step_tokens=48, kv_bytes=24 * GRANULE_BYTES)
        model = model_config(folder, max_model_len=200)
        async with serving(model, lora, engine, graph_bytes=1 << 30) as (served, _):
            answers = await asyncio.gather(*(submit(served, *each, max_tokens=6) for each in asked))
            return [answer.token_ids for answer in answers]

    for (prompt, adapter), output in zip(asked, asyncio.run(serve()), strict=True):
        logits = oracle.logits([*prompt, *output], adapter)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        assert bool((logits.amax(1) - chosen < (1e-4 if has_kept_inputs else TIE_MARGIN)).all())


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DecoderPlan, Weights]:
    plan = load_plan(folder)
    return plan, load_checkpoint(folder, host_device()[0], partial(load, plan, dtype, 32))[0]


def linears(weights: Weights) -> list[Linear]:
    """Returns the linears of all groups."""
    return [linear for layer in weights.layers for linear in layer.linears]


def modules(plan: DecoderPlan) -> Iterator[tuple[tuple[str, slice], ...]]:
    """Yields the modules of each group, and their rows of its weights."""
    for layer in plan.layers:
        for group in layer.groups:
            columns = zip(group.sites, group.columns(), strict=True)
            yield tuple(
                (layer.linears[site.linear].module, slice(column, column + site.outputs)) for site, column in columns
            )


def room_of(linear: Linear, x: Tensor) -> ProductRoom:
    return ProductRoom.empty(linear.room(len(x), x.dtype), len(x), CPU)


def quantised(weights: Weights) -> list[QuantizedLinear]:
    return [linear for linear in linears(weights) if isinstance(linear, QuantizedLinear)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_quantised_on_the_device(kind: str, source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS[kind])
    stored, plain = load_file(folder / "model.safetensors"), dequantize(folder, tmp_path / "plain")
    plan, weights = loaded(folder)
    numbers = load_file(plain / "model.safetensors")
    for linear, group in zip(linears(weights), modules(plan), strict=True):
        assert isinstance(linear, QuantizedLinear | DenseLinear)
        for module, rows in group:
            wanted = numbers[f"{module}.weight"]
            if isinstance(linear, QuantizedLinear):
                assert torch.equal(linear.weight[rows].view(torch.uint8), stored[f"{module}.weight"].view(torch.uint8))
                scale = linear.scale[rows] if linear.input_scale is None else linear.scale[rows] / linear.input_scale
                torch.testing.assert_close(linear.weight[rows].float() * scale[:, None], wanted, atol=0.0, rtol=1e-6)
            else:
                assert torch.equal(linear.weight[rows], wanted)
            if linear.bias is not None:
                assert torch.equal(linear.bias[rows], numbers[f"{module}.bias"])
    is_quantised = [isinstance(linear, QuantizedLinear) for linear in linears(weights)]
    # Of the partly quantised one o of the first layer, and gate, up and down of the second are not.
    assert is_quantised == ([True, False, True, True, True, True, False, False] if "partly" in kind else [True] * 8)


def test_each_module_of_a_group_keeps_its_format(source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", replace(KINDS["int8"], ignored="lm_head|0.self_attn.k_proj"))
    config = (folder / "config.json").read_text().replace('["lm_head"]', '["lm_head", "re:.*0.self_attn.k_proj"]')
    (folder / "config.json").write_text(config)
    plan, weights = loaded(folder)
    numbers = load_file(dequantize(folder, tmp_path / "plain") / "model.safetensors")
    mixed, group = weights.layers[0].linears[0], next(modules(plan))
    assert isinstance(mixed, MixedLinear)
    assert [type(linear) for linear, _ in mixed.parts] == [Int8Linear, DenseLinear, Int8Linear]
    assert [columns for _, columns in mixed.parts] == [rows for _, rows in group]
    x = torch.randn(3, plan.hidden, generator=torch.Generator().manual_seed(0))
    out = torch.empty(3, group[-1][1].stop)
    mixed.apply(x, out, room_of(mixed, x))
    wanted = x @ torch.cat([numbers[f"{module}.weight"] for module, _ in group]).t()
    wanted += torch.cat([numbers[f"{module}.bias"] for module, _ in group])
    torch.testing.assert_close(out, wanted, atol=0.05, rtol=0.05)
    torch.testing.assert_close(out[:, group[1][1]], wanted[:, group[1][1]])


def test_the_largest_input_scale_serves_all_modules_of_an_input(source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS["fp8-static"])
    stored = load_file(folder / "model.safetensors")
    plan, weights = loaded(folder)
    for linear, group in zip(linears(weights), modules(plan), strict=True):
        scales = [float(stored[f"{module}.input_scale"]) for module, _ in group]
        assert isinstance(linear, QuantizedLinear)
        assert linear.input_scale is not None
        assert float(linear.input_scale) == max(scales)
        assert len(scales) == 1 or max(scales) > min(scales)


@pytest.mark.parametrize(("capability", "inputs"), [(86, Inputs.KEPT), (89, Inputs.PER_TOKEN), (100, Inputs.PER_TOKEN)])
def test_inputs_become_fp8_where_the_gpu_has_instructions_for_it(
    capability: int, inputs: Inputs, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_linear, "compute_capability", lambda device: capability)
    for kind, wanted in (("fp8-per-output", inputs), ("int8", Inputs.PER_TOKEN), ("fp8-weights", Inputs.KEPT)):
        _, weights = loaded(quantize(source, tmp_path / kind, KINDS[kind]))
        assert {linear.inputs for linear in quantised(weights)} == {wanted}
        assert (weights.room(1).inputs > 0) == (wanted is not Inputs.KEPT)


FEW, MANY = Product.FUSED, Product.DEQUANTISED
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("kind", "dtype", "capability", "products"),
    [
        ("fp8-per-output", BF16, 90, {1: FEW, 16: FEW, 17: Product.OF_CODES, 129: Product.OF_CODES}),
        ("fp8-static", BF16, 89, {16: FEW, 17: Product.OF_CODES}),
        ("fp8-per-output", BF16, 86, {17: FEW, 128: FEW, 129: MANY}),  # inputs are kept there
        ("fp8-per-output", F16, 90, {128: FEW, 129: MANY}),  # sums of codes exceed float16
        ("fp8-weights", BF16, 90, {128: FEW, 129: MANY}),
        ("int8", BF16, 80, {1: FEW, 31: FEW, 32: Product.OF_CODES}),
        ("int8-static", F16, 120, {31: FEW, 32: Product.OF_CODES}),
        ("int8", BF16, 100, {128: FEW, 129: MANY}),  # cuBLAS is slow there
        ("int8-weights-partly", BF16, 90, {128: FEW, 129: MANY}),
        ("int8", F32, 90, {1000: FEW}),
        ("fp8-per-output", F32, 90, {1000: FEW}),
        ("fp8-weights", F32, 90, {1000: FEW}),
    ],
)
def test_the_number_of_rows_chooses_the_product(
    kind: str,
    dtype: torch.dtype,
    capability: int,
    products: dict[int, Product],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_linear, "compute_capability", lambda device: capability)
    _, weights = loaded(quantize(source, tmp_path / "quantised", KINDS[kind]), dtype)
    for linear in quantised(weights):
        assert {rows: linear.product(rows, dtype) for rows in products} == products
        narrow = replace(linear, weight=linear.weight[:40])  # no multiple of 16
        assert narrow.product(1000, dtype) is (FEW if dtype is F32 else MANY)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_that_of_the_dequantised_weights(
    kind: str, dtype: torch.dtype, source: Path, tmp_path: Path
) -> None:
    """Also of modules that lie beside others, whose outputs do not fill rows."""
    _, weights = loaded(quantize(source, tmp_path / "quantised", KINDS[kind]), dtype)
    met = set[Product]()
    for linear in quantised(weights):
        outputs, inputs = linear.weight.shape
        scale = linear.scale if linear.input_scale is None else linear.scale / linear.input_scale
        numbers = linear.weight.float() * scale[:, None]
        for rows in (1, 20, 130):
            x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)
            plain = x.float() @ numbers.T + (0.0 if linear.bias is None else linear.bias.float())
            for width in (outputs, outputs + 8):
                fills_rows, out = width == outputs, torch.full((rows, width), 7.0, dtype=dtype)
                room = ProductRoom.empty(linear.room(rows, dtype, fills_rows=fills_rows), rows, CPU)
                linear.apply(x, out[:, :outputs], room)
                error = (out[:, :outputs].float() - plain).square().mean().sqrt() / plain.square().mean().sqrt()
                bound = 0.006 if linear.inputs is Inputs.KEPT else 0.05 if linear.code is Code.F8_E4M3 else 0.02
                assert float(error) < bound
                assert torch.all(out[:, outputs:] == 7.0)
                row, alone = rows // 2, torch.empty(1, outputs, dtype=dtype)
                linear.apply(x[row : row + 1], alone, room_of(linear, x[:1]))  # of few rows, as the bound says
                apart, size = (alone - out[row, :outputs]).float().norm(), plain[row].norm()
                assert float(apart / size) < 0.005
                met.add(linear.product(rows, dtype, fills_rows=fills_rows or rows == 1))
    is_fp8 = "fp8" in kind
    has_codes = "weights" not in kind and (dtype is BF16 or not is_fp8)
    assert met == {FEW} | ({Product.OF_CODES} if has_codes else set()) | ({MANY} if is_fp8 or not has_codes else set())


def test_large_matrices_are_dequantised_in_pieces(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are sums of integers; the result is the same to the bit."""
    for kind in ("fp8-weights", "int8"):
        _, weights = loaded(quantize(source, tmp_path / kind, KINDS[kind]), BF16)
        linear = max(quantised(weights), key=lambda one: len(one.weight))
        x = torch.randn(200, linear.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
        whole, parts = (torch.empty(200, len(linear.weight)).bfloat16() for _ in range(2))
        linear.apply(x, whole, room_of(linear, x))
        with monkeypatch.context() as patch:
            patch.setattr(room, "_MOST_MATRIX_BYTES", 20000)
            small = room_of(linear, x)
        assert small.matrix.nbytes <= 20000
        linear.apply(x, parts, small)
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("kind", ["fp8-per-output", "int8"])
def test_a_row_that_is_not_finite_is_not_hidden(kind: str, source: Path, tmp_path: Path) -> None:
    _, weights = loaded(quantize(source, tmp_path / "quantised", KINDS[kind]), BF16)
    linear = quantised(weights)[0]
    for rows in (2, 40):
        x = torch.ones(rows, linear.weight.shape[1]).bfloat16()
        x[1, 3] = torch.nan
        out = torch.empty(rows, len(linear.weight)).bfloat16()
        linear.apply(x, out, room_of(linear, x))
        assert bool(out[1].isnan().all())
        assert bool(out[0].isfinite().all())


def test_a_room_is_as_large_as_the_largest_product_needs() -> None:
    section = compressed("float", None, ignore=("lm_head",))
    plan = plan_of(CONFIG | {"quantization_config": section})
    weights = load(plan, BF16, 32, CPU, dummy(0, CPU))
    largest = max(linear.weight.numel() for linear in linears(weights))
    widest = max(linear.weight.shape[1] for linear in linears(weights))
    assert weights.room(128) == RoomSize(inputs=128 * widest * 2)
    assert weights.room(2048) == RoomSize(inputs=128 * widest * 2, matrix=largest * 2)
    plain = load(plan_of(CONFIG), BF16, 32, CPU, dummy(0, CPU))
    assert plain.room(2048) == RoomSize()


def test_formats_that_round_inputs_have_their_own_class_and_blocks_of_bytes_that_of_grouped_codes() -> None:
    for inputs in Inputs:
        assert class_of(Fp8(inputs)) is Fp8Linear
        assert class_of(Int8(inputs)) is Int8Linear
    assert class_of(MXFP4) is Mxfp4
    for rows in (1, 128):
        for code in (Code.F8_E4M3, Code.I8):
            assert isinstance(class_of(BlockCodes.of(code, rows, 128, ".weight_scale_inv")), GroupedCodesClass)


def test_the_memory_of_quantised_weights_is_counted_exactly() -> None:
    section = compressed("float", None, ignore=("lm_head", "re:.*0.self_attn.v_proj", "re:.*1.mlp"))
    plan = plan_of(CONFIG | {"quantization_config": section})
    weights = load(plan, torch.bfloat16, 32, CPU, dummy(0, CPU))
    total = weights.embedding.nbytes + weights.head.weight.nbytes
    for linear in linears(weights):
        for part, _ in linear.parts if isinstance(linear, MixedLinear) else ((linear, None),):
            total += part.weight.nbytes + (part.scale.nbytes if isinstance(part, QuantizedLinear) else 0)
    assert total == num_bytes(plan, torch.bfloat16) < plan.num_parameters * 2


def test_dummy_weights_are_of_plausible_size() -> None:
    for kind in ("fp8-static", "int8"):
        plan = plan_of(CONFIG | {"quantization_config": KINDS[kind].section})
        first, again, other = (load(plan, torch.bfloat16, 32, CPU, dummy(seed, CPU)) for seed in (1, 1, 2))
        for mine, same, different in zip(quantised(first), quantised(again), quantised(other), strict=True):
            codes, others = (each.weight.view(torch.uint8) for each in (mine, different))
            assert torch.equal(codes, same.weight.view(torch.uint8))
            assert not torch.equal(codes, others)
            scale = mine.scale if mine.input_scale is None else mine.scale / mine.input_scale
            assert 0.015 < float((mine.weight.float() * scale[:, None]).std()) < 0.025


def test_adapters_are_not_merged_into_quantised_weights(source: Path, tmp_path: Path) -> None:
    folder = quantize(source, tmp_path / "quantised", KINDS["int8"])

    async def start() -> None:
        lora = lora_config({}, mode="merged", device_bytes=24 * GRANULE_BYTES, host_bytes=4 * MIB)
        async with serving(model_config(folder), lora, engine_config(seqs=6, kv_bytes=24 * GRANULE_BYTES)):
            pass

    with pytest.raises(ConfigError, match=r"--loading-mode merged .* a checkpoint that is not quantised"):
        asyncio.run(start())
