"""Compiles every Triton kernel for each kind of GPU, as its wrapper launches it for a model of 7 billion parameters.

No GPU is needed: launches are recorded and compiled ahead of time. A block may have 99 KiB of shared memory on sm_86
and sm_89, 163 on sm_80 and 227 on sm_90 and sm_100. test_triton_releases.py runs these tests with another release, too.
"""

import re
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from caraserve.core.lora_layout import MAX_RANK
from caraserve.gpu.attention import triton as attention
from caraserve.gpu.attention.base import LayerAttention
from caraserve.gpu.attention.triton import ATTENTION
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.forward.decoder import issue_pass
from caraserve.gpu.kernels import experts
from caraserve.gpu.kernels.delta_net import DeltaNetState, DeltaNetWeights, apply_delta_net
from caraserve.gpu.kernels.elementwise import activate, cap_logits, embed, multiply_by_gate
from caraserve.gpu.kernels.experts import ExpertRoom, ExpertWeights, Routing, apply_experts
from caraserve.gpu.kernels.grouped import GroupedMatrix, embed_grouped
from caraserve.gpu.kernels.grouped import dequantise as dequantise_grouped
from caraserve.gpu.kernels.grouped import multiply as multiply_grouped
from caraserve.gpu.kernels.heads import Heads, RopeTables, rotate_and_append
from caraserve.gpu.kernels.lora import PLANES, Segments, SiteTables, lora_expand, lora_shrink
from caraserve.gpu.kernels.lora_sums import LoraSums
from caraserve.gpu.kernels.norms import NormWeights, add_and_norm
from caraserve.gpu.kernels.paged_cache import PagedCache, TokenTables
from caraserve.gpu.kernels.quantized import dequantise, halve_rows, multiply, round_rows, scale_rows
from caraserve.gpu.kernels.vocabulary import change_embeddings, change_logits
from caraserve.gpu.linear.base import LinearLoader
from caraserve.gpu.linear.grouped import load_matrices
from caraserve.gpu.linear.random_codes import random_matrix
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.pass_shape import PassShape, all_groups
from caraserve.model.dtype import Code
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import Activation
from tests.gpu.kernels.triton_launches import Launch, decoder_of, recording, usage
from tests.gpu.small_model import mixed_plan
from tests.gpu_device.grouped_codes import MadeUp

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
TOKENS, HIDDEN, INNER, HEADS, KV_HEADS, SLOTS, VOCAB = 64, 4096, 11008, 32, 8, 48, 32000


@pytest.fixture
def capability() -> int:
    """The compute capability whose launches are recorded, by default the one with the least shared memory."""
    return 86


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, capability: int) -> list[Launch]:
    for module in (attention, experts):
        monkeypatch.setattr(module, "compute_capability", lambda device: capability)
    return recording(monkeypatch)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def launch_lora(dtype: torch.dtype, ranks: int, *, gated: bool) -> None:
    x, y = empty(TOKENS, HIDDEN, dtype=dtype), empty(TOKENS, 3 * HIDDEN, dtype=dtype)
    part, shrunk = empty(PLANES, TOKENS, 3, ranks, dtype=torch.float32), empty(TOKENS, 3, ranks, dtype=dtype)
    segments = Segments(*(empty(TOKENS) for _ in range(4)))
    *addresses, vectors = (empty(3, SLOTS, dtype=torch.int64) for _ in range(3))
    scale = empty(3, SLOTS, dtype=torch.float32)
    tables = SiteTables(*addresses, empty(3, SLOTS), scale, empty(SLOTS), vectors, empty(1) if gated else None)
    lora_shrink(x, part, shrunk, segments, tables)
    lora_expand(y, shrunk, segments, tables, (0, HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN, HIDDEN))


def make_cache(dtype: torch.dtype, dim: int, kv_heads: int = KV_HEADS) -> PagedCache:
    memory = empty(20, 2, 2, 16, kv_heads, dim, dtype=dtype)
    return PagedCache(memory[:, 1, 0], memory[:, 1, 1], empty(SLOTS, 128))


def launch_attention(dtype: torch.dtype, dim: int, kv_heads: int = KV_HEADS, **how: Any) -> None:
    q, out = empty(TOKENS, (HEADS + 2 * kv_heads) * dim, dtype=dtype), empty(TOKENS, HEADS * dim, dtype=dtype)
    tokens, cache = TokenTables(empty(TOKENS), empty(TOKENS)), make_cache(dtype, dim, kv_heads)
    scratch = ATTENTION.decode.scratch(TOKENS, HEADS, dim, 2048, torch.device("cpu"))
    given = q[:, : HEADS * dim], cache, tokens
    ATTENTION.decode.attend(*given, empty(TOKENS), out, scratch, LayerAttention(dim**-0.5, **how))
    ATTENTION.prefill.attend(*given, empty(8), empty(8), out, LayerAttention(dim**-0.5, window=4096, **how))


def check_attention_tiles(compiled: Any, launch: Launch) -> None:
    """Keys and values of the next tile arrive while one is computed, and only tiles at an edge are masked."""
    rows, keys, dim = (launch.arguments[name] for name in ("BM", "BN", "DIM_PAD"))
    assert compiled.metadata.shared >= 2 * 2 * keys * dim * 2  # two buffers of keys and values of two bytes each
    assert "fma.rn.f32" not in compiled.asm["ptx"]  # a sum fused with a product rounds otherwise
    # A wait that leaves two groups of copies, the next tile's keys and values; 0 would wait for all of them.
    assert re.search(r"cp\.async\.wait_group\s+2;", compiled.asm["ptx"])
    loop = compiled.asm["ttgir"].rpartition("scf.for")[2]
    mask = rf"arith\.select .*tensor<{rows}x{keys}xf32"
    branch, _, after = loop.partition("scf.if")[2].partition("else")
    assert re.search(mask, branch)
    assert not re.search(mask, after)


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.float32)


def launch_layers(dtype: torch.dtype) -> None:
    """Launches what today's models need."""
    hidden, norm, gate_up = empty(TOKENS, HIDDEN, dtype=dtype), NormWeights(floats(HIDDEN), None, 1e-5), 2 * INNER
    tokens = TokenTables(empty(TOKENS), empty(TOKENS))
    embed(empty(SLOTS, 2049), empty(8, HIDDEN, dtype=dtype), tokens, hidden)
    add_and_norm(hidden, None, hidden, norm)
    add_and_norm(hidden, hidden, hidden, norm, rows=empty(TOKENS))
    launch_heads(dtype, 128, NormWeights(floats(128), None, 1e-5, scope="head"), RopeTables(*[floats(2048, 64)] * 2))
    activate(*empty(TOKENS, gate_up, dtype=dtype).chunk(2, 1), empty(TOKENS, INNER, dtype=dtype), "silu")


def lora_sums(**widths: int) -> LoraSums:
    """Returns LoRA kept apart, of roles with so many columns, which are whole panels."""
    wide, count = (empty(len(widths), SLOTS, dtype=torch.int64) for _ in range(3)), empty(len(widths), SLOTS)
    a, b, vectors = wide
    tables = SiteTables(a, b, count, floats(len(widths), SLOTS), empty(SLOTS), vectors)
    places = {role: (site, sum(list(widths.values())[:site])) for site, role in enumerate(widths)}
    return LoraSums(floats(TOKENS, sum(widths.values())), empty(TOKENS), tables, places)


def launch_with_lora(dtype: torch.dtype) -> None:
    """Launches the kernels that add LoRA to what they read: for models of today, and with all that there may be."""
    hidden, norm = empty(TOKENS, HIDDEN, dtype=dtype), NormWeights(floats(HIDDEN), None, 1e-5)
    both = NormWeights(floats(HIDDEN), floats(HIDDEN), 1e-5, True)
    add_and_norm(hidden, hidden, hidden, norm, lora=lora_sums(out=HIDDEN))
    add_and_norm(hidden, hidden, hidden, both, both, 0.5, 2.0, lora=lora_sums(out=HIDDEN))
    gate, up = empty(TOKENS, 2 * INNER, dtype=dtype).chunk(2, 1)
    for kind in ("silu", "gelu"):
        activate(gate, up, up, kind, lora=lora_sums(gate=INNER, up=INNER))
    for dim, pairs, each in (
        (128, 64, NormWeights(floats(128), None, 1e-5, scope="head")),
        (256, 96, NormWeights(floats(HEADS, 256), floats(HEADS, 256), 1e-5, True, "heads")),
    ):
        lora = lora_sums(q=HEADS * dim, k=KV_HEADS * dim, v=KV_HEADS * dim)
        launch_heads(dtype, dim, each, RopeTables(*[floats(2048, pairs)] * 2), lora)


def launch_heads(
    dtype: torch.dtype, dim: int, norm: NormWeights, rope: RopeTables, lora: LoraSums | None = None, **fields: Any
) -> None:
    columns = 0, HEADS * dim, (HEADS + KV_HEADS) * dim
    heads = Heads(HEADS, KV_HEADS, dim, *columns, rope, norm, norm, **fields)
    projected, tokens = empty(TOKENS, columns[2] + KV_HEADS * dim, dtype=dtype), TokenTables(empty(64), empty(64))
    rotate_and_append(projected, tokens, make_cache(dtype, dim), heads, lora)


def launch_every_form(dtype: torch.dtype) -> None:
    """Launches what no model of today needs, as much of it together as there may be."""
    hidden, norm = empty(TOKENS, HIDDEN, dtype=dtype), NormWeights(floats(HIDDEN), floats(HIDDEN), 1e-5, True)
    tokens = TokenTables(empty(TOKENS), empty(TOKENS))
    embed(empty(SLOTS, 2049), empty(8, HIDDEN, dtype=dtype), tokens, hidden, 3.5, floats(2048, HIDDEN))
    add_and_norm(hidden, hidden, hidden, norm, norm, 0.5, 2.0)
    each = NormWeights(floats(HEADS, 256), floats(HEADS, 256), 1e-5, True, "heads")
    of_v = NormWeights(floats(256), None, 1e-5, scope="head")
    for after, pairs in ((False, 128), (True, 96)):
        rope = RopeTables(floats(2048, pairs), floats(2048, pairs), floats(2048))
        launch_heads(dtype, 256, each, rope, v_norm=of_v, norm_after_rope=after)
    gate, up = empty(TOKENS, 2 * INNER, dtype=dtype).chunk(2, 1)
    for kind in get_args(Activation):
        activate(gate, up, up, kind)
    multiply_by_gate(up, gate)
    cap_logits(empty(TOKENS, VOCAB, dtype=dtype), 0.5, 30.0)


def launch_vocabulary(dtype: torch.dtype, *, all_forms: bool) -> None:
    """Launches changes of the embedding and the head, with positions and a bias if `all_forms`."""
    hidden, logits = empty(TOKENS, HIDDEN, dtype=dtype), empty(TOKENS, VOCAB, dtype=dtype)
    tokens, adapters = TokenTables(empty(TOKENS), empty(TOKENS)), empty(TOKENS)
    tables = AdapterTables(mixed_plan(), SLOTS, torch.device("cpu")).vocabulary
    positions, scale = (floats(2048, HIDDEN), 3.5) if all_forms else (None, 1.0)
    change_embeddings(hidden, empty(SLOTS, 2049), tokens, adapters, tables, scale, positions)
    bias = empty(VOCAB, dtype=dtype) if all_forms else None
    change_logits(logits, hidden, floats(TOKENS, MAX_RANK), empty(TOKENS), adapters, tables, bias)


def launch_product(rows: int, code: Code, capability: int, *, rounded: bool) -> None:
    """Launches a product of 16-bit inputs, or of quantised ones, as a linear gives them."""
    weight, scale = empty(HIDDEN, HIDDEN, dtype=torch.int8), empty(HIDDEN, dtype=torch.float32)
    out, x_scale = empty(rows, HIDDEN, dtype=torch.bfloat16), empty(rows, dtype=torch.float32)
    is_scaled = rounded or code is Code.F8_E4M3
    x = empty(rows, HIDDEN, dtype=torch.bfloat16 if code is Code.I8 else torch.float16)
    multiply(x, weight, out, scale, code, capability, x_scale if is_scaled else None, out[0])


def launch_experts(dtype: torch.dtype, rows: int) -> None:
    """Launches what a layer of Qwen3-30B-A3B needs, and biases."""
    hidden, inner, how = 2048, 768, Routing(128, 8)
    weights = empty(128, 2 * inner, hidden, dtype=dtype), empty(128, hidden, inner, dtype=dtype)
    layer = ExpertWeights(how, "silu", *weights, weights[0][:, :, 0].contiguous(), weights[1][:, :, 0].contiguous())
    room = ExpertRoom.empty(rows, 8, 128, inner, hidden, dtype, torch.device("meta"))
    x, logits = empty(rows, hidden, dtype=dtype), empty(rows, 128, dtype=dtype)
    apply_experts(x, logits, empty(rows), layer, room, x, adds=True)


def launch_delta_net(dtype: torch.dtype) -> None:
    """Launches what a layer of Qwen3.5-27B needs."""
    key, value, kernel = (16, 128), (48, 128), 4
    keys, values = key[0] * key[1], value[0] * value[1]
    channels, rates = 2 * keys + values, floats(value[0])
    columns = channels, channels + values + value[0], channels + values
    norm = NormWeights(floats(value[1]), None, 1e-6, scope="head")
    net = DeltaNetWeights(key[0], value[0], key[1], value[1], *columns, floats(channels, kernel), rates, rates, norm)
    inputs = empty(SLOTS, kernel - 1, channels, dtype=dtype)
    state = DeltaNetState(inputs, floats(SLOTS, value[0], key[1], value[1]))
    projected = empty(TOKENS, channels + values + 2 * value[0], dtype=dtype)
    tokens = TokenTables(empty(TOKENS), empty(TOKENS))
    apply_delta_net(
        projected, empty(TOKENS, channels, dtype=dtype), empty(TOKENS, values, dtype=dtype), tokens, state, net
    )


def check(recorded: list[Launch], capability: int) -> dict[str, Any]:
    compiled = {}
    for launch in recorded:
        compiled[launch.name] = launch.compile(capability)
        used = usage(compiled[launch.name])
        assert used["shared"] <= SHARED_KIB[capability] * 1024, launch.name
        assert used["stack"] == 0, launch.name
    return compiled


# 89 is to these kernels what 86 is, for which other head sizes and a decoder's own launches are compiled below.
@pytest.mark.parametrize("capability", [80, pytest.param(86, marks=pytest.mark.slow), 90])
def test_bf16_kernels_fit_and_do_not_spill(launches: list[Launch], capability: int) -> None:
    launch_attention(torch.bfloat16, 128)
    # Another test compiles the rest for 86, as a decoder launches it. 80 has the registers and instructions of 86, and
    # only attention uses its shared memory.
    if capability == 90:
        launch_lora(torch.bfloat16, 64, gated=True)
        launch_layers(torch.bfloat16)
    compiled = check(launches, capability)
    check_instructions(compiled, capability)
    for launch in launches:
        if (name := launch.name) in ("prefill_kernel", "decode_kernel"):
            check_attention_tiles(compiled[name], launch)


def check_instructions(compiled: dict[str, Any], capability: int) -> None:
    """Checks that matrix instructions multiply, and that loads are wide."""
    product = "wgmma.mma_async" if capability == 90 else "mma.sync"
    for name in compiled.keys() & {"shrink_kernel", "expand_kernel", "prefill_kernel"}:
        assert product in compiled[name].asm["ptx"], name
    # Weights and keys must be loaded in 16-byte units, although their addresses come from tables.
    for name in compiled.keys() & {"shrink_kernel", "expand_kernel", "prefill_kernel", "decode_kernel"}:
        copies = re.findall(
            r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x(\w+)", compiled[name].asm["ptx"]
        )
        assert set(copies) == {"10"}, name


@pytest.mark.parametrize(("dim", "kv_heads"), [(64, HEADS), (80, 8), pytest.param(256, 8, marks=pytest.mark.slow)])
def test_fp16_and_other_head_sizes_fit_the_smallest_shared_memory(
    dim: int, kv_heads: int, launches: list[Launch]
) -> None:
    launch_attention(torch.float16, dim, kv_heads)
    compiled = check(launches, 86)
    check_attention_tiles(compiled["decode_kernel"], launches[0])
    if dim <= 128:  # larger heads leave room for one tile of keys and values in a prefill
        check_attention_tiles(compiled["prefill_kernel"], launches[2])


@pytest.mark.parametrize(
    ("capability", "dim", "kv_heads"),
    [
        (90, 256, 8),
        (100, 64, 8),
        pytest.param(90, 128, HEADS, marks=pytest.mark.slow),
        pytest.param(100, 128, 8, marks=pytest.mark.slow),
    ],
)
def test_attention_of_other_groups_and_head_sizes_does_not_spill_on_large_gpus(
    launches: list[Launch], capability: int, dim: int, kv_heads: int
) -> None:
    launch_attention(torch.bfloat16, dim, kv_heads)
    decode, _, prefill = launches
    compiled = check([decode, prefill], capability)
    check_attention_tiles(compiled["decode_kernel"], decode)
    check_attention_tiles(compiled["prefill_kernel"], prefill)


@pytest.mark.parametrize(("capability", "dim"), [pytest.param(86, 128, marks=pytest.mark.slow), (86, 256), (90, 256)])
def test_capped_scores_fit_and_do_not_spill(launches: list[Launch], capability: int, dim: int) -> None:
    launch_attention(torch.bfloat16, dim, cap=50.0)
    check(launches, capability)


@pytest.mark.parametrize(("capability", "dim"), [(86, 128), pytest.param(100, 128, marks=pytest.mark.slow)])
def test_sinks_and_slopes_fit_and_do_not_spill(launches: list[Launch], capability: int, dim: int) -> None:
    launch_attention(torch.bfloat16, dim, sinks=floats(HEADS), slopes=floats(HEADS))
    check(launches, capability)


@pytest.mark.parametrize("capability", [86, 100])
def test_all_that_a_layer_may_compute_fits_and_does_not_spill(launches: list[Launch], capability: int) -> None:
    launch_every_form(torch.bfloat16)
    check(launches, capability)


@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 86, 100))])
def test_kernels_that_add_lora_to_what_they_read_fit_and_do_not_spill(launches: list[Launch], capability: int) -> None:
    launch_with_lora(torch.bfloat16)
    check(launches, capability)


@pytest.mark.parametrize(("capability", "dtype"), [(86, torch.bfloat16), (90, torch.float16)])
def test_changes_of_the_vocabulary_fit_and_do_not_spill(
    launches: list[Launch], capability: int, dtype: torch.dtype
) -> None:
    launch_vocabulary(dtype, all_forms=capability == 86)
    check(launches, capability)


def test_fp32_and_high_ranks_fit_the_smallest_shared_memory(launches: list[Launch]) -> None:
    launch_attention(torch.float32, 128)
    launch_lora(torch.float32, 512, gated=False)
    check(launches, 86)


def test_lora_and_layers_do_not_spill_on_the_newest_gpus(launches: list[Launch]) -> None:
    launch_lora(torch.bfloat16, 64, gated=True)
    launch_layers(torch.bfloat16)
    check(launches, 100)


@pytest.mark.parametrize(
    ("capability", "code", "rounded"),
    [(86, Code.F8_E4M3, False), (89, Code.F8_E4M3, True), (90, Code.F8_E4M3, True), (100, Code.I8, False)],
)
def test_products_with_quantised_weights_fit_and_do_not_spill(
    launches: list[Launch], capability: int, code: Code, rounded: bool
) -> None:
    for rows in (16, 100):
        launch_product(rows, code, capability, rounded=rounded)
    compiled = [launch.compile(capability) for launch in launches]
    for product in compiled:
        used = usage(product)
        assert used["shared"] <= SHARED_KIB[capability] * 1024
        assert used["stack"] == 0
        has_instructions = "cvt.rn.f16x2.e4m3x2" in product.asm["ptx"]
        assert has_instructions == (code is Code.F8_E4M3 and capability >= 89)
        # Loads of the next tile's weights are on their way while this one's are multiplied.
        assert re.search(r"cp\.async\.wait_group\s+[1-9]", product.asm["ptx"])
    many = compiled[-1].asm["ptx"]
    assert {86: "mma.sync", 89: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability] in many


@pytest.mark.parametrize(("capability", "kind", "rows"), [(86, "Q6_K", 16), (90, "Q4_K", 100), (100, "nf4", 64)])
def test_products_with_grouped_codes_fit_and_do_not_spill(
    launches: list[Launch], capability: int, kind: str, rows: int
) -> None:
    weight = launch_grouped(kind, rows)
    if capability == 86:
        tokens = TokenTables(empty(TOKENS), empty(TOKENS))
        embed_grouped(empty(SLOTS, 2049), weight, tokens, empty(TOKENS, HIDDEN, dtype=torch.bfloat16))
    if capability == 90:
        dequantise_grouped(weight, empty(HIDDEN, HIDDEN, dtype=torch.bfloat16))
    ptx = check(launches, capability)["grouped_product_kernel"].asm["ptx"]
    assert {86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability] in ptx
    # Codes of the next tile are on their way, 16 bytes at a time, while this one's are multiplied.
    assert re.search(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)
    assert re.search(r"cp\.async\.wait_group\s+[1-9]", ptx)


def launch_grouped(kind: str, rows: int) -> GroupedMatrix:
    """Launches a product of bf16 inputs with weights in grouped codes."""
    nowhere, one = torch.device("meta"), LinearPlan.of_role("module", HIDDEN, HIDDEN, "out")
    loader = LinearLoader(torch.bfloat16, nowhere, lambda name, target: None, random_matrix, floats(1))
    (weight,) = load_matrices(loader, MadeUp.of(kind), (one,))
    x = empty(rows, HIDDEN, dtype=torch.bfloat16)
    multiply_grouped(x, weight, x, x[0])
    return weight


def test_rounding_scaling_and_dequantising_fit_and_do_not_spill(launches: list[Launch]) -> None:
    x, scales = empty(TOKENS, INNER, dtype=torch.bfloat16), empty(TOKENS, dtype=torch.float32)
    round_rows(x, empty(TOKENS, INNER, dtype=torch.float8_e4m3fn), scales, Code.F8_E4M3)
    round_rows(x, empty(TOKENS, INNER, dtype=torch.int8), scales, Code.I8, scales[:1])
    round_rows(x, x, scales, Code.I8, as_numbers=True)
    halve_rows(x, x.to(torch.float16), scales)
    scale_rows(empty(TOKENS, INNER), x, empty(INNER, dtype=torch.float32), scales, empty(INNER, dtype=torch.bfloat16))
    check(launches, 90)
    for code, capability in ((Code.I8, 80), (Code.F8_E4M3, 86), (Code.F8_E4M3, 90)):
        dequantise(
            empty(INNER, HIDDEN, dtype=torch.int8), floats(INNER), empty(INNER, HIDDEN, dtype=x.dtype), code, capability
        )
        product = check(launches[-1:], capability)["numbers_kernel"].asm["ptx"]
        assert re.search(r"ld\.global(?:\.\w+)*\.v4\.b32", product)  # codes
        assert re.search(r"st\.global(?:\.\w+)*\.v4\.b32", product)
    for launch in launches[:4]:  # a quotient decides which code is the nearest; Triton's `/` is off in the last bit
        quotients = re.findall(r"\b(?:div|rcp)\.[\w.]+", launch.compile(90).asm["ptx"])
        assert {quotient.replace(".ftz", "") for quotient in quotients} == {"div.rn.f32"}


@pytest.mark.parametrize(("capability", "rows"), [(86, 1), (86, 1024), (90, 4096), (100, 4096)])
def test_experts_fit_and_do_not_spill(launches: list[Launch], capability: int, rows: int) -> None:
    launch_experts(torch.bfloat16, rows)
    products = [launch for launch in launches if launch.name == "expert_kernel"]
    if rows == 1:  # the others depend on nothing that differs
        check([launch for launch in launches if launch.name != "expert_kernel"], capability)
    instruction = {86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability]
    for launch in products:
        ptx = check([launch], capability)[launch.name].asm["ptx"]
        assert instruction in ptx
        # Loads are of 16 bytes, and those of the next tiles on their way while one is multiplied.
        assert set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x(\w+)", ptx)) == {"10"}
        assert re.search(r"cp\.async\.wait_group\s+[1-9]", ptx)


@pytest.mark.parametrize("capability", [86, 90])
def test_delta_nets_fit_and_do_not_spill(launches: list[Launch], capability: int) -> None:
    launch_delta_net(torch.bfloat16)
    compiled = check(launches, capability)
    assert set(compiled) == {"convolve_kernel", "recur_kernel", "gate_heads_kernel"}


def test_a_decoders_own_launches_fit_the_smallest_shared_memory(launches: list[Launch]) -> None:
    """With the strides, dtypes and sizes of the product."""
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 128}
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER}
    decoder = decoder_of({"model_type": "qwen3", **heads, **sizes}, torch.bfloat16)
    shape = PassShape(TOKENS, 7, 3, 9, 4, True, 2048, all_groups(decoder.plan))
    issue_pass(decoder.make_pass(shape), Stream(0), len(decoder.plan.layers))
    distinct = {launch.identity: launch for launch in launches}
    assert len({launch.kernel for launch in distinct.values()}) == 10
    check_instructions(check(list(distinct.values()), 86), 86)
