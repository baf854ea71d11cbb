"""Plans of every family, and both backends that compute them, against transformers and peft: logits of 40 tokens."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from caraserve.lora.peft import inspect_adapter, read_adapter
from caraserve.model.families import load_plan
from caraserve.model.folder_reader import FolderReader
from caraserve.profiling.microbench import MeasuredBackend
from tests.families.cases import CASES, VOCAB
from tests.families.model import TOKENS, Made, configured, make
from tests.families.mutations import MUTATIONS, mutants
from tests.gpu.torch_kernels import torch_kernels
from tests.plans import cpu, gpu
from tests.plans.driving import logprobs
from tests.plans.executor import Executor

LIMIT = 1e-4  # of the logits' deviation; the smallest mistake of a plan moves them by 2.6e-4
# Together they have a place for every change of a plan's field. Others are compared with `-m slow`: all plans give the
# right logits, and tests/plans/test_backends.py shows that a backend follows every field of a plan.
WITH_EVERY_FIELD = (
    *("glm 4.5", "qwen 3.5", "gemma 2", "phi 2", "phi 4 mini, short", "cohere, norms of heads", "gpt 2", "gpt-oss"),
)
MARKED = [name if name in WITH_EVERY_FIELD else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
BACKENDS: dict[str, tuple[Callable[..., Any], int]] = {
    "cpu": (cpu.backend_of, VOCAB),
    "gpu": (gpu.backend_of, VOCAB // 2),
}


@pytest.fixture(scope="module", autouse=True)
def torch_for_triton() -> Iterator[None]:
    """Replaces the Triton kernels, which tests of their own run, by torch's."""
    with torch_kernels():
        yield


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The model of each family in turn: all tests of one are run before those of the next, so that one process of
    xdist makes it, once."""
    return make(CASES[request.param], tmp_path_factory.mktemp("family"))


def test_the_plan_of_a_family_gives_the_logits_of_transformers(model: Made) -> None:
    plan = load_plan(model.folder)
    with FolderReader(model.folder, plan.stored_names) as read:
        assert distance(Executor(plan, read).logits(TOKENS), model.logits) < LIMIT


@pytest.mark.parametrize("model", MARKED, indirect=True, scope="module")
def test_the_comparison_sees_every_field_of_the_plan(model: Made) -> None:
    plan = load_plan(model.folder)
    with FolderReader(model.folder, plan.stored_names) as read:
        tensors = cache(read)
        found = {what: distance(Executor(other, tensors).logits(TOKENS), model.logits) for what, other in mutants(plan)}
    assert {what: moved for what, moved in found.items() if moved < LIMIT} == {}


def test_every_change_of_a_field_is_compared(tmp_path: Path) -> None:
    compared = set[str]()
    for name in WITH_EVERY_FIELD:
        configured(CASES[name]).save_pretrained(tmp_path / name)
        compared |= {what for what, _ in mutants(load_plan(tmp_path / name))}
    assert compared == set(MUTATIONS)


def test_the_cpu_backend_gives_the_logits_of_peft(model: Made) -> None:
    check_backend("cpu", model)


@pytest.mark.parametrize("model", MARKED, indirect=True, scope="module")
def test_the_gpu_backend_gives_the_logits_of_peft(model: Made) -> None:
    check_backend("gpu", model)


def check_backend(backend: str, model: Made) -> None:
    """Compares logits without an adapter, and with two, one after another; of a prompt in pieces."""
    make_backend, alternatives = BACKENDS[backend]
    plan = load_plan(model.folder)
    with FolderReader(model.folder, plan.stored_names) as read:
        served = make_backend(plan, read)
    try:
        pieces = (17, 1, 1, len(TOKENS) - 19)
        compare(logprobs(served, VOCAB, TOKENS, pieces, alternatives), model.logits)
        for slot, (folder, logits) in enumerate(model.adapters.values(), 1):
            into = served.host_memory[: inspect_adapter(folder, plan).num_bytes]
            MeasuredBackend(served).load(read_adapter(folder, plan, into), slot)
            compare(logprobs(served, VOCAB, TOKENS, pieces, alternatives, adapter=slot), logits)
    finally:
        served.close()


def distance(found: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    """Returns the largest difference of logits, in deviations of the right ones."""
    return float(np.abs(found - exact).max() / exact.std())


def compare(found: NDArray[np.float64], logits: NDArray[np.float64]) -> None:
    """Compares the probabilities that a backend has returned, of the most likely tokens."""
    exact = logits[:-1] - logits[:-1].max(1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    known = np.isfinite(found)
    assert known.sum(1).min() >= VOCAB // 2
    assert np.abs(found - exact)[known].max() < LIMIT * logits.std()
