"""The warm-up: Triton's own keys of all kernels are met before serving, and so are products of nearly all sizes."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import driver as triton_driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from caraserve.gpu.attention import triton as attention
from caraserve.gpu.builder import BackendParts, GpuSizes
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.driver.device import GpuDevice
from caraserve.gpu.forward.decoder import issue_pass
from caraserve.gpu.forward.warm_up import LateKernels, product_rows
from caraserve.gpu.kernels import elementwise, heads, lora, norms, sampling, vocabulary
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.memory import workspace
from caraserve.gpu.memory.host_memory import ASSISTED_CHUNK_TOKENS
from caraserve.gpu.memory.masks import MaskedOutputs
from caraserve.gpu.memory.pass_shape import PassShape, all_groups
from caraserve.gpu.merged_weights import MergedDeviceWeights
from caraserve.gpu.weights import dummy, load
from caraserve.model.dtype import Dtype
from caraserve.model.families import plan_of
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import adapter_spec
from scripts.laboratory.gpu.null_device import NullDriver, NullKernels
from tests.oracle.quantized import PER_TOKEN, compressed
from tests.plans import made_up

KERNELS = {  # all that are launched from Python
    name
    for module in (attention, elementwise, heads, norms, lora, sampling, vocabulary)
    for name, value in vars(module).items()
    if isinstance(value, JITFunction) and name.endswith("_kernel")
} - {"cap_kernel"}  # of models whose logits are scaled or capped
OF_SOME = {  # those of models with quantised weights, experts or delta nets
    "quantised in part": {"round_kernel", "product_kernel", "scale_kernel"},
    "int8 inputs": {"round_kernel", "product_kernel", "scale_kernel"},
    "fp8 weights": {"halve_kernel", "product_kernel", "numbers_kernel"},
    "experts": {"route_kernel", "sort_kernel", "expert_kernel", "sum_kernel"},
    "delta nets": {"convolve_kernel", "recur_kernel", "gate_heads_kernel"},
}
OF_MADE_UP = {"experts": 1, "delta nets": 2}  # the least layers that have all kernels
CPU, H100 = torch.device("cpu"), GPUTarget("cuda", 90, 32)
TOKENS, ROWS, CONTEXT = 400, 80, 2000
SIZES = GpuSizes(
    num_slots=ROWS, adapter_slots=1025, max_step_tokens=TOKENS, max_context=CONTEXT, memory_utilization=0.5,
    host_bytes=1 << 20, pool_bytes=64 << 20, graph_bytes=0, lora_cpus=(0,),
)  # fmt: skip
QWEN2 = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
PARTLY = compressed("float", PER_TOKEN, ignore=("lm_head", "re:.*layers.[02].self_attn", "re:.*layers.1.mlp"))
MODELS: dict[str, dict[str, Any]] = {
    "head norms": {"model_type": "qwen3", "head_dim": 32},
    "biases and windows": QWEN2,
    "quantised in part": {"model_type": "llama", "attention_bias": True, "quantization_config": PARTLY},
    "int8 inputs": {"model_type": "llama", "quantization_config": compressed("int", PER_TOKEN)},
    "fp8 weights": {"model_type": "llama", "quantization_config": compressed("float", None)},
}


def plan_with(model: str, count: int) -> DecoderPlan:
    if model in OF_MADE_UP:
        plan = made_up.PLANS[model]()
        layers = [plan.layers[layer % len(plan.layers)] for layer in range(max(count, OF_MADE_UP[model]))]
        return replace(plan, layers=tuple(layers), max_position=CONTEXT)
    sizes = {"vocab_size": 100, "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 2}
    return plan_of({"num_key_value_heads": 1, "num_hidden_layers": count, **sizes, **MODELS[model]})


@contextmanager
def parts_of(model: str, count: int) -> Iterator[BackendParts]:
    plan = plan_with(model, count)
    weights = load(plan, torch.bfloat16, CONTEXT, CPU, dummy(0, CPU))
    device = GpuDevice(NullDriver(), NullKernels(), CPU, "none")
    parts = BackendParts(plan, weights, SIZES, device, lambda: None)
    try:
        yield parts
    finally:
        parts.close()


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Records Triton's key of each launch, by which it looks for a compiled kernel, instead of launching; and computes
    no products."""
    keys: set[tuple[str, str]] = set()
    binders: dict[Any, Any] = {}

    def record(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            if kernel not in binders:
                backend = make_backend(H100)
                binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, backend)
            _, specialization, options = binders[kernel](*arguments, **named)
            keys.add((kernel.fn.__name__, f"{specialization} {options}"))

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", record)
    monkeypatch.setattr(DenseLinear, "apply", lambda linear, x, out, room=None: None)
    for product in ("_scaled_mm", "_int_mm"):
        monkeypatch.setattr(torch, product, lambda *arguments, **named: None)
    monkeypatch.setattr(workspace, "_SCRATCH_BYTES", 1 << 20)  # so that many rows are decoded in several launches
    return keys


def iterations(parts: BackendParts) -> None:
    """Issues passes of many shapes on the lane of iterations, with masked outputs and embeddings."""
    lane, stream, groups = parts.lanes[0], Stream(1), all_groups(parts.plan)
    for outputs in (range(1), range(3, 19), range(40)):
        masked = MaskedOutputs(np.array(outputs), has_scores=True, await_masks=lambda stream: None)
        lane.decoder.sample_masked(masked, 0, 64, stream)
        lane.decoder.embed_prompts(len(outputs), stream)
    for shape in (
        PassShape(1, 1, 0, 1, 0, has_items=False, context=1, groups=groups),
        PassShape(1, 1, 0, 1, 0, has_items=False, context=1, groups=groups, changes_vocabulary=True),
        PassShape(TOKENS, 7, 9, TOKENS, 12, has_items=True, context=16, groups=groups, changes_vocabulary=True),
        PassShape(3, 3, 0, 3, 0, has_items=True, context=500, groups=groups),
        PassShape(ROWS, ROWS, 0, ROWS, 0, has_items=True, context=CONTEXT, groups=groups),
        PassShape(5, 0, 1, 1, 1, has_items=False, context=0, groups=groups),
        PassShape(32, 16, 2, 17, 3, has_items=True, context=17, groups=groups),
        # Scores more tokens than there are logits.
        PassShape(TOKENS, 7, 9, TOKENS, 12, has_items=True, context=16, groups=groups),
    ):
        issue_pass(lane.decoder.make_pass(shape), stream, len(parts.plan.layers))


def assisted(parts: BackendParts) -> None:
    """Issues assisted chunks kernel by kernel."""
    decoder, stream = parts.lanes[1].decoder, Stream(1)
    for tokens in (1, 7, 16, ASSISTED_CHUNK_TOKENS):
        groups = all_groups(parts.plan)
        shape = PassShape(tokens, 0, 1, tokens % 2, 1, has_items=False, context=0, groups=groups)
        issue_pass(decoder.make_pass(shape, hand_offs=parts.assisted._hand_offs), stream, len(parts.plan.layers))
    masked = MaskedOutputs(np.array([0]), has_scores=True, await_masks=lambda stream: None)
    decoder.sample_masked(masked, 0, 1, stream)
    decoder.embed_prompts(1, stream)


@pytest.mark.parametrize("model", [*MODELS, *OF_MADE_UP])
@pytest.mark.parametrize("count", [1, 2, 5, 32], ids="{} layers".format)
def test_serving_meets_no_kernel_that_the_warm_up_has_not(model: str, count: int, met: set[tuple[str, str]]) -> None:
    with parts_of(model, count) as parts:
        parts.warm_up(lambda: None)
        before = met.copy()
        assert {kernel for kernel, _ in before} == KERNELS | OF_SOME.get(model, set())
        met.clear()
        iterations(parts)
        assisted(parts)
    assert met - before == set()


def test_a_tables_alignment_does_not_change_with_the_layer(met: set[tuple[str, str]]) -> None:
    """Two variants of the LoRA kernels for the sizes of each group shape: with a gate and without."""
    with parts_of("head norms", 32) as parts:
        parts.warm_up(lambda: None)
        shapes = len(parts.plan.group_shapes)
    for name in ("shrink_kernel", "expand_kernel"):
        assert len({key for kernel, key in met if kernel == name}) <= 2 * shapes


@pytest.mark.usefixtures("met")
def test_products_of_all_sizes_are_computed_before_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: set[tuple[int, tuple[int, ...]]] = set()

    def record(linear: DenseLinear, x: Tensor, out: Tensor, room: object = None) -> None:
        multiplied.add((len(x), tuple(linear.weight.shape)))

    monkeypatch.setattr(DenseLinear, "apply", record)
    with parts_of("biases and windows", 1) as parts:
        parts.warm_up(lambda: None)
        linears = [*parts.lanes[0].decoder.weights.layers[0].linears, parts.lanes[0].decoder.weights.head]
        logits = len(parts.lanes[0].decoder.workspace.logits)
    for linear in linears:
        most = logits if linear is linears[-1] else TOKENS
        wanted = {rows for rows in product_rows(TOKENS) if rows <= most} | {most}
        assert {(rows, tuple(linear.weight.shape)) for rows in wanted} <= multiplied


class Operations(TorchDispatchMode):
    """Notes torch's operations with the dtypes and the layouts of their tensors, by which kernels are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.met: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        tensors = [each for each in (*arguments, *(named or {}).values()) if isinstance(each, Tensor)]
        layouts = (f"{each.dtype} {each.dim()} {each.is_contiguous()}" for each in tensors)
        self.met.add((str(operation), *layouts))
        return operation(*arguments, **(named or {}))


@pytest.mark.parametrize("dtype", Dtype)
def test_a_first_merge_meets_no_operation_that_the_warm_up_has_not(dtype: Dtype) -> None:
    plan = plan_with("head norms", 3)
    base = load(plan, torch.bfloat16, CONTEXT, CPU, dummy(0, CPU))
    merged = MergedDeviceWeights(plan, base, 64)
    driver = NullDriver()
    with Operations() as before:
        merged.warm_up(torch.full((1 << 18,), 0xFF, dtype=torch.uint8), driver, Stream(1))
    for layer, warmed in zip(base.layers, merged.weights.layers, strict=True):
        for linear, other in zip(layer.linears, warmed.linears, strict=True):
            assert torch.equal(linear.weight, other.weight)
    adapter = adapter_spec(plan, dtype, 16, len(plan.layers), plan.targets[2:])
    image = torch.zeros(adapter.num_bytes, dtype=torch.uint8)
    with Operations() as serving:
        merged.merge(adapter, image, driver, Stream(1))
    assert merged.merges == 1
    assert serving.met <= before.met


@pytest.mark.parametrize("most", [1, 16, 33, 100, 2048, 8192])
def test_rows_of_products_are_close_together(most: int) -> None:
    rows = product_rows(most)
    assert rows[: min(most, 32)] == list(range(1, min(most, 32) + 1))
    assert rows[-1] == most
    assert all(before < after <= max(before + 1, before * 17 / 16) for before, after in pairwise(rows))
    assert len(rows) <= 32 + 16 * max(0, (most - 1).bit_length() - 5)


def test_steps_of_the_warm_up_are_counted(met: set[tuple[str, str]]) -> None:
    steps: list[None] = []
    with parts_of("head norms", 1) as parts:
        parts.warm_up(lambda: steps.append(None))
        assert len(steps) == parts.warm_up_steps


# --- kernels that are compiled later ---


class OneTarget:
    """Triton's driver as far as compiling needs it."""

    def get_current_target(self) -> GPUTarget:
        return H100

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_cap(width: int) -> None:
    """Compiles a kernel as a launch does, unless it has met these arguments."""
    logits = torch.empty(2, width, dtype=torch.bfloat16)
    elementwise.cap_kernel.warmup(logits, width, width, 1.0, 0.0, HAS_CAP=False, BLOCK=1024, grid=(2,))


def test_a_kernel_compiled_while_serving_is_counted_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(triton_driver, "_active", OneTarget())
    caches = defaultdict(elementwise.cap_kernel.create_binder)  # of this target, and empty
    monkeypatch.setattr(elementwise.cap_kernel, "device_caches", caches)
    late = LateKernels()
    compile_cap(64)
    late.watch()
    compile_cap(64)
    assert (late.count, caplog.text) == (0, "")
    compile_cap(24)  # no multiple of 16
    assert late.count == 1
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "cap_kernel" in record.getMessage()
    late.stop()
    compile_cap(1)
    assert late.count == 1
    assert knobs.runtime.jit_post_compile_hook is None
