"""Both backends apply the factors and biases of DoRA and of LoRA with a trained bias, of every module of made-up
decoders: fused and biased modules, weights in codes, outputs that join the residual stream at once or after a norm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from caraserve.errors import AdapterRejected
from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.base_linears import BaseLinears
from caraserve.model.base_tensors import BaseTensors
from caraserve.model.linear_plan import LinearPlan
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import MeasuredBackend
from tests.gpu.torch_kernels import torch_kernels
from tests.plans import gpu
from tests.plans.driving import greedy, logprobs
from tests.plans.executor import Executor
from tests.plans.fused import tensors_of, write
from tests.plans.made_up import CHANGES, PLANS, VOCAB, Tensors
from tests.plans.test_backends import BACKENDS, TOKENS, check, expected

Changes = dict[str, NDArray[np.float64]]


@pytest.fixture(scope="module", autouse=True)
def torch_for_triton() -> Iterator[None]:
    with torch_kernels():
        yield


class Linears(BaseLinears):
    """The made-up weights, as if they were those of a folder."""

    def weights(self, linear: LinearPlan) -> Iterator[NDArray[np.float32]]:
        shape = (linear.inputs, linear.outputs) if linear.transposed else (linear.outputs, linear.inputs)
        values = linear.format.values(linear.format.read(Tensors(), linear.module, shape))
        whole = values.T if linear.transposed else values
        yield from (whole[:7], whole[7:])

    def bias(self, linear: LinearPlan) -> NDArray[np.float32]:
        zeros = np.zeros(linear.outputs, np.float32)
        return cast(Any, Tensors()(f"{linear.module}.bias", zeros.shape)[0]) if linear.bias else zeros


def adapter_of(folder: Path, plan: DecoderPlan, kind: str) -> tuple[Path, Changes, Changes]:
    """Writes an adapter of every module. Returns what it adds to modules' weights and to their outputs."""
    tensors, rng = dict(tensors_of(plan)), np.random.default_rng(4)
    deltas, biases = Changes(), Changes()
    for linear in (linear for layer in plan.layers for linear in layer.linears):
        prefix = f"base_model.model.{linear.name_in_adapters}"
        for half in "AB":
            tensors[f"{prefix}.lora_{half}.weight"] /= 8
        a, b = (tensors[f"{prefix}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        delta = 6 / len(a) * b @ a
        own = rng.standard_normal(linear.outputs).astype(np.float32)
        if kind == "dora":
            weights = np.concatenate(list(Linears(Path()).weights(linear))).astype(np.float64)
            norms = np.linalg.norm(weights + delta, axis=1)
            own = (norms * (1 + own / 10)).astype(np.float32)
            tensors[f"{prefix}.lora_magnitude_vector"] = own
            deltas[linear.module] = (own / norms)[:, None] * (weights + delta) - weights
        else:
            if any(moe.gates_shared and moe.out is linear for layer in plan.layers for moe in layer.moes):
                own = np.zeros_like(own)  # others are refused
            tensors[f"{prefix}.lora_B.bias"] = own
            deltas[linear.module], biases[linear.module] = delta, 6 / len(a) * own.astype(np.float64)
    ranks = {"gate_up_proj": 9} if "gate_up_proj" in plan.targets else {}
    switch = {"use_dora": True} if kind == "dora" else {"lora_bias": True}
    return write(folder, plan, tensors, rank_pattern=ranks, **switch), deltas, biases


def load(backend: Any, plan: DecoderPlan, folder: Path) -> None:
    base = BaseTensors(Path(), plan)
    base.linears = Linears(Path())
    into = backend.host_memory[: inspect_adapter(folder, plan, base).num_bytes]
    MeasuredBackend(backend).load(read_adapter(folder, plan, into, base), 1)


CASES = [(name, backend) for name in PLANS for backend in BACKENDS]


@pytest.mark.parametrize("kind", ["dora", "bias"])
@pytest.mark.parametrize(("name", "backend"), CASES)
def test_probabilities_are_those_of_the_formula(name: str, backend: str, kind: str, tmp_path: Path) -> None:
    """Of a prompt in pieces: segments of tokens, and rows as in decoding."""
    plan = CHANGES[name]["biases"](PLANS[name]()) if "biases" in CHANGES.get(name, {}) else PLANS[name]()
    folder, deltas, biases = adapter_of(tmp_path, plan, kind)
    make, alternatives = BACKENDS[backend]
    served = make(plan, Tensors())
    load(served, plan, folder)
    found = logprobs(served, VOCAB, TOKENS, (17, 1, 27), alternatives, adapter=1)
    served.close()
    check(found, expected(plan, deltas, biases=biases), 2e-4)
    assert np.nanmax(np.abs(found - expected(plan))) > 0.1


def test_a_bias_behind_the_gate_of_a_shared_expert_is_refused(tmp_path: Path) -> None:
    plan = PLANS["experts"]()
    folder, *_ = adapter_of(tmp_path, plan, "bias")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "mlp.down_proj.lora_B.bias" in name)
    save_file(tensors | {name: tensors[name] + 1}, path)
    with pytest.raises(AdapterRejected, match=r"mlp\.down_proj: a bias of this module is multiplied by the shared"):
        inspect_adapter(folder, plan)


def test_captured_graphs_apply_factors_and_biases(tmp_path: Path) -> None:
    plan = PLANS["mixed"]()
    folder, *changes = adapter_of(tmp_path, plan, "dora")
    served = gpu.backend_of(plan, Tensors(), with_graphs=True)
    load(served, plan, folder)
    tokens = greedy(served, TOKENS[:20], adapter=1, count=6)
    served.close()
    logits = Executor(plan, Tensors(), *changes).logits(tokens)[19:-1]
    assert logits.argmax(1).tolist() == tokens[20:]
