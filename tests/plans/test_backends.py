"""Both backends compute what plans say: made-up decoders, a made-up weight format and a made-up kind of adapter against
numpy; every field of a plan has its effect."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.cpu import linear as cpu_formats
from caraserve.errors import ModelLoadError
from caraserve.gpu.driver.streams import Lane
from caraserve.gpu.linear import formats as gpu_formats
from caraserve.gpu.supported_plans import check_plan
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.dtype import Dtype
from caraserve.model.plan import Attention, DecoderPlan, LayerPlan, Mlp
from caraserve.profiling.microbench import MeasuredBackend
from tests.gpu.torch_kernels import torch_kernels
from tests.plans import cpu, four_bits_cpu, four_bits_gpu, gpu
from tests.plans.driving import greedy, logprobs, make_adapter
from tests.plans.executor import Executor
from tests.plans.four_bits import FourBits
from tests.plans.fused import tensors_of, write
from tests.plans.made_up import CHANGES, PLANS, VOCAB, Tensors, body, linears
from tests.plans.scaled_lora import ScaledLora

TOKENS = [(37 * index * index + 11) % VOCAB for index in range(45)]  # more than two KV blocks and all windows
# How a backend is made, and how many alternatives of a token it returns.
Make = Callable[..., Any]
BACKENDS: dict[str, tuple[Make, int]] = {
    "cpu": (cpu.backend_of, VOCAB),
    "gpu": (gpu.backend_of, VOCAB // 2),
}


@pytest.fixture(scope="module", autouse=True)
def torch_for_triton() -> Iterator[None]:
    """Replaces the Triton kernels, which tests of their own run, by torch's."""
    with torch_kernels():
        yield


def expected(
    plan: DecoderPlan,
    deltas: Mapping[str, NDArray[np.float64]] | None = None,
    tensors: Tensors | None = None,
    biases: Mapping[str, NDArray[np.float64]] | None = None,
) -> NDArray[np.float64]:
    logits = Executor(plan, tensors or Tensors(), deltas, biases).logits(TOKENS)[:-1]
    top = logits.max(1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))


@cache
def expected_of(name: str, change: str | None = None) -> NDArray[np.float64]:
    """Returns what is expected of a made-up plan, with a field changed or without: for both backends once."""
    plan = PLANS[name]()
    return expected(plan if change is None else CHANGES[name][change](plan))


def computed(name: str, plan: DecoderPlan, pieces: tuple[int, ...] = (len(TOKENS),), **how: Any) -> NDArray[np.float64]:
    make, alternatives = BACKENDS[name]
    backend = make(plan, Tensors(), **how)
    try:
        return logprobs(backend, VOCAB, TOKENS, pieces, alternatives)
    finally:
        backend.close()


def check(found: NDArray[np.float64], exact: NDArray[np.float64], tolerance: float = 2e-5) -> None:
    """Compares the probabilities that a backend has returned, of the most likely tokens."""
    known = np.isfinite(found)
    assert known.sum(1).min() >= VOCAB // 2
    np.testing.assert_allclose(found[known], exact[known], atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PLANS)
def test_a_prompt_in_pieces_gives_the_probabilities_of_the_plan(name: str, backend: str) -> None:
    check(computed(backend, PLANS[name](), (17, 1, 1, 26)), expected_of(name))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "change"), [(name, change) for name in CHANGES for change in CHANGES[name]])
def test_a_field_changed_alone_moves_the_probabilities_to_those_of_the_changed_plan(
    name: str, change: str, backend: str
) -> None:
    found = computed(backend, CHANGES[name][change](PLANS[name]()))
    check(found, expected_of(name, change))
    assert np.nanmax(np.abs(found - expected_of(name))) > 2e-4


# On a GPU weights in codes cannot hold a sum, and a server refuses them in loading mode `merged`.
ADAPTED = [(name, backend, False) for name in PLANS for backend in BACKENDS]
ADAPTED += [(name, backend, True) for name, backend, _ in ADAPTED if backend == "cpu" or not PLANS[name]().is_quantized]


@pytest.mark.parametrize(("name", "backend", "is_merged"), ADAPTED)
def test_an_adapter_changes_every_module_of_a_plan(name: str, backend: str, is_merged: bool) -> None:
    plan, (make, alternatives) = PLANS[name](), BACKENDS[backend]
    served = make(plan, Tensors(), merging=True) if is_merged and backend == "gpu" else make(plan, Tensors())
    adapter, deltas = make_adapter(plan, served.host_memory)
    MeasuredBackend(served).load(adapter, 1)
    found = logprobs(served, VOCAB, TOKENS, (17, 1, 27), alternatives, adapter=1, is_merged=is_merged)
    served.close()
    check(found, expected(plan, deltas), 5e-5)
    assert np.nanmax(np.abs(found - expected_of(name))) > 0.1


@pytest.mark.parametrize(
    ("kinds", "last"), [("mixed", Lane.LORA), ("sandwich", Lane.COMPUTE), ("experts", Lane.LORA), ("delta nets", None)]
)
def test_layers_of_different_kinds_are_computed_by_captured_graphs(kinds: str, last: Lane | None) -> None:
    """Also if LoRA's products beside the base products end late, or begin as early as they may."""
    plan = PLANS[kinds]()
    served = gpu.backend_of(plan, Tensors(), with_graphs=True, last=last)
    adapter, deltas = make_adapter(plan, served.host_memory)
    MeasuredBackend(served).load(adapter, 1)
    found = [greedy(served, TOKENS[:20], adapter=slot, count=6) for slot in (0, 1)]
    served.close()
    for tokens, added in zip(found, ({}, deltas), strict=True):
        logits = Executor(plan, Tensors(), added).logits(tokens)[19:-1]
        assert logits.argmax(1).tolist() == tokens[20:]


def test_results_do_not_depend_on_the_pieces_of_a_prompt_or_the_number_of_threads() -> None:
    for make in PLANS.values():
        whole = computed("cpu", make())
        assert whole.tobytes() == computed("cpu", make(), (3, 30, 12)).tobytes()
        assert whole.tobytes() == computed("cpu", make(), (3, 30, 12), threads=3).tobytes()


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_in_16_bits_are_close_to_those_in_32(backend: str) -> None:
    plan = PLANS["sandwich"]()
    assert 1e-4 < np.nanmax(np.abs(computed(backend, plan, dtype=Dtype.F16) - expected(plan))) < 0.1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_delta_net_of_another_order_is_refused_before_a_tensor_is_read(backend: str) -> None:
    plan = PLANS["delta nets"]()
    first, *others = plan.layers
    net, mlp = first.blocks
    body = replace(net.body, linears=net.body.linears[::-1])
    with pytest.raises(ModelLoadError, match="layer 0 has a delta net whose first outputs are not q, k and v"):
        computed(backend, replace(plan, layers=(LayerPlan((replace(net, body=body), mlp)), *others)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (body(Attention, head_dim=512), "heads of 512 numbers, more than 256"),
        (body(Mlp, activation="clamped_swiglu"), "clamped_swiglu without a gate"),
    ],
    ids=["wide heads", "no gate"],
)
def test_what_a_gpu_cannot_compute_is_refused_before_the_start(change: Any, said: str) -> None:
    with pytest.raises(ModelLoadError, match=f"layer 1 has {said}, which a GPU cannot compute"):
        check_plan(change(PLANS["parallel"]()))


def test_blocks_of_the_first_blocks_rows_follow_it() -> None:
    first, second = PLANS["parallel"]().layers[0].blocks
    with pytest.raises(ValueError, match="must follow it"):
        LayerPlan((first, replace(first, body=second.body), second))


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_experts_with_equal_scores_the_lower_are_chosen(backend: str) -> None:
    plan, tensors = PLANS["experts"](), EqualScores()
    make, alternatives = BACKENDS[backend]
    served = make(plan, tensors)
    found = logprobs(served, VOCAB, TOKENS, (len(TOKENS),), alternatives)
    served.close()
    check(found, expected(plan, tensors=tensors))
    assert np.nanmax(np.abs(found - expected(plan))) > 0.1


class EqualScores(Tensors):
    """Routers give all experts the same score, and groups too."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> tuple[NDArray[np.generic], Dtype]:
        values, dtype = super().__call__(name, shape)
        return (np.zeros_like(values) if "router" in name or "correction" in name else values), dtype


def test_a_gated_shared_expert_has_no_bias_after_its_down() -> None:
    moe = PLANS["experts"]().moes[0]
    assert moe.out is not None
    with pytest.raises(ValueError, match="down_proj: a gated shared expert has no bias"):
        replace(moe, out=replace(moe.out, bias=True))


# --- what a backend does not know ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weight_format_from_outside_the_package_computes_the_values_of_its_reference(backend: str) -> None:
    plan = CHANGES["gated"]["plain weights"](PLANS["gated"]())
    changed = linears(format=FourBits())(replace(plan, head_format=FourBits()))
    check(computed(backend, changed), expected(changed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_modules_of_a_group_may_have_different_formats(backend: str) -> None:
    plan = CHANGES["sandwich"]["biases"](PLANS["sandwich"]())
    *first, last = plan.layers
    mixed = last.with_linears(
        lambda one: replace(one, format=FourBits()) if one.target in ("k_proj", "up_proj") else one
    )
    changed = replace(plan, layers=(*first, mixed))
    check(computed(backend, changed), expected(changed))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PLANS)
def test_a_kind_of_adapter_from_outside_the_package_computes_what_its_reference_says(
    name: str, backend: str, tmp_path: Path
) -> None:
    plan, (make, alternatives), tensors = PLANS[name](), BACKENDS[backend], dict[str, Any]()
    deltas, rng = dict[str, NDArray[np.float64]](), np.random.default_rng(3)
    for module, own in by_module(tensors_of(plan)).items():
        own["lora_A"], own["lora_B"] = own["lora_A"] / 8, own["lora_B"] / 8
        own["lora_scale"] = rng.standard_normal(len(own["lora_B"])).astype(np.float32)
        rank = len(own["lora_A"])
        deltas[module] = ScaledLora.update({key: each.astype(np.float64) for key, each in own.items()}, 6 / rank)
        prefix = f"base_model.model.{module}"
        tensors |= {f"{prefix}.{key}{'' if key == 'lora_scale' else '.weight'}": each for key, each in own.items()}
    ranks = {"gate_up_proj": 9} if "gate_up_proj" in plan.targets else {}
    folder = write(tmp_path, plan, tensors, use_output_scales=True, rank_pattern=ranks)
    served = make(plan, Tensors())
    into = served.host_memory[: inspect_adapter(folder, plan).num_bytes]
    MeasuredBackend(served).load(read_adapter(folder, plan, into), 1)
    found = logprobs(served, VOCAB, TOKENS, (20, 25), alternatives, adapter=1)
    served.close()
    check(found, expected(plan, deltas), 2e-4)


def by_module(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the tensors of each module, by the last word of their names."""
    modules: dict[str, dict[str, Any]] = {}
    for name, values in tensors.items():
        module, _, tensor = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        modules.setdefault(module, {})[tensor] = values
    return modules


def test_a_format_is_registered_once() -> None:
    with pytest.raises(ValueError, match="weight format four-bits is registered already"):
        cpu_formats.register("four-bits", four_bits_cpu.KERNELS)
    with pytest.raises(ValueError, match="weight format four-bits is registered already"):
        gpu_formats.register("four-bits", four_bits_gpu.FourBitsLinear)
