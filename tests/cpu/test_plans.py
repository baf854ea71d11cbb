"""The pass computes what plans say: made-up decoders against numpy, and every field of a plan has its effect."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.cpu.linear import register
from caraserve.errors import ModelLoadError
from caraserve.model.dtype import Dtype
from caraserve.model.plan import Block, DecoderPlan, LayerPlan, Moe, Norm
from caraserve.profiling.microbench import MeasuredBackend
from tests.plans.cpu import backend_of, logprobs, make_adapter
from tests.plans.executor import Executor
from tests.plans.made_up import CHANGES, HIDDEN, PLANS, VOCAB, Tensors, linear, linears

TOKENS = [(37 * index * index + 11) % VOCAB for index in range(45)]  # more than two KV blocks and all windows


def expected(plan: DecoderPlan, deltas: Mapping[str, NDArray[np.float64]] | None = None) -> NDArray[np.float64]:
    logits = Executor(plan, Tensors(), deltas).logits(TOKENS)[:-1]
    top = logits.max(1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))


def computed(
    plan: DecoderPlan, pieces: tuple[int, ...] = (len(TOKENS),), *, dtype: Dtype = Dtype.F32, threads: int = 1
) -> NDArray[np.float64]:
    backend = backend_of(plan, Tensors(), dtype=dtype, threads=threads)
    try:
        return logprobs(backend, VOCAB, TOKENS, pieces)
    finally:
        backend.close()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", PLANS)
def test_a_prompt_in_pieces_gives_the_probabilities_of_the_plan(name: str, threads: int) -> None:
    plan = PLANS[name]()
    np.testing.assert_allclose(computed(plan, (17, 1, 1, 26), threads=threads), expected(plan), atol=2e-5)


@pytest.mark.parametrize(("name", "change"), [(name, change) for name in CHANGES for change in CHANGES[name]])
def test_a_field_changed_alone_moves_the_probabilities_to_those_of_the_changed_plan(name: str, change: str) -> None:
    plan = PLANS[name]()
    changed = CHANGES[name][change](plan)
    found = computed(changed)
    np.testing.assert_allclose(found, expected(changed), atol=2e-5)
    assert np.abs(found - expected(plan)).max() > 2e-4


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_an_adapter_changes_every_module_of_a_plan(name: str, is_merged: bool) -> None:
    plan = PLANS[name]()
    backend = backend_of(plan, Tensors(), threads=2)
    adapter, deltas = make_adapter(plan, backend.host_memory)
    MeasuredBackend(backend).load(adapter, 1)
    found = logprobs(backend, VOCAB, TOKENS, (17, 1, 27), adapter=1, is_merged=is_merged)
    backend.close()
    np.testing.assert_allclose(found, expected(plan, deltas), atol=5e-5)
    assert np.abs(found - expected(plan)).max() > 0.1


def test_results_do_not_depend_on_the_pieces_of_a_prompt() -> None:
    for make in PLANS.values():
        whole, cut = computed(make()), computed(make(), (3, 30, 12))
        assert whole.tobytes() == cut.tobytes()


def test_weights_in_16_bits_are_close_to_those_in_32() -> None:
    plan = PLANS["sandwich"]()
    assert 1e-4 < np.abs(computed(plan, dtype=Dtype.F16) - expected(plan)).max() < 0.1


def test_a_body_that_the_cpu_cannot_compute_is_refused_before_a_tensor_is_read() -> None:
    plan = PLANS["parallel"]()
    router = linear(0, "router", HIDDEN, ("router", 8))
    moe = Moe(router, 8, 2, *(None,) * 3)  # type: ignore[arg-type]
    layer = LayerPlan((Block(moe, Norm("model.norm.weight", 1e-5)),))
    with pytest.raises(ModelLoadError, match="layer 0 has a Moe, which the CPU cannot compute"):
        backend_of(DecoderPlan("made-up", VOCAB, HIDDEN, (layer,), plan.final, 128, "float32"), Tensors())


def test_a_weight_format_from_outside_the_package_computes_the_values_of_its_reference() -> None:
    from tests.plans import four_bits_cpu  # registers the format
    from tests.plans.four_bits import FourBits

    plan = CHANGES["gated"]["plain weights"](PLANS["gated"]())
    changed = linears(format=FourBits())(replace(plan, head_format=FourBits()))
    np.testing.assert_allclose(computed(changed), expected(changed), atol=2e-5)
    with pytest.raises(ValueError, match="weight format four-bits is registered already"):
        register("four-bits", four_bits_cpu.KERNELS)
