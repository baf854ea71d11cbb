"""Formats whose kernels read rows in a form of their own: here gathered in the order of a module's columns."""

from dataclasses import replace

import numpy as np
import pytest

from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import MeasuredBackend
from tests.plans import cpu
from tests.plans.driving import logprobs, make_adapter
from tests.plans.made_up import PLANS, VOCAB, Tensors, expert_tensors
from tests.plans.reordered import Reordered
from tests.plans.test_backends import TOKENS, check, expected


def reordered(name: str) -> DecoderPlan:
    """Returns a plan whose modules, but for k, v and some experts, have columns in orders of their own."""
    plan, kind = PLANS[name](), Reordered()
    layers = tuple(
        layer.with_linears(
            lambda one: one if one.transposed or one.target in ("k_proj", "v_proj") else replace(one, format=kind)
        )
        for layer in plan.layers
    )
    plan = expert_tensors(lambda one: not one.is_transposed, format=kind)(replace(plan, layers=layers))
    return replace(plan, embed_format=kind, head_format=kind, logit_cap=None)


@pytest.mark.parametrize("name", ["sandwich", "gated", "experts"])
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_gathered_for_each_module_of_a_group_and_for_each_expert(name: str, threads: int) -> None:
    plan = reordered(name)
    served = cpu.backend_of(plan, Tensors(), threads=threads)
    found = logprobs(served, VOCAB, TOKENS, (17, 1, 1, 26), VOCAB)
    served.close()
    check(found, expected(plan))


@pytest.mark.parametrize("is_merged", [False, True])
def test_adapters_read_the_rows_as_they_are(is_merged: bool) -> None:
    plan = reordered("gated")
    served = cpu.backend_of(plan, Tensors(), threads=2)
    adapter, deltas = make_adapter(plan, served.host_memory)
    MeasuredBackend(served).load(adapter, 1)
    found = logprobs(served, VOCAB, TOKENS, (17, 1, 27), VOCAB, adapter=1, is_merged=is_merged)
    served.close()
    check(found, expected(plan, deltas), 5e-5)
    assert np.nanmax(np.abs(found - expected(plan))) > 0.1
