"""Weights in grouped codes on the CUDA backend, over an emulated device: they stay packed, and answers are those of the
numbers that they stand for."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from caraserve.backend_factory import check_options
from caraserve.errors import ConfigError, ModelLoadError
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.kernels.grouped import GroupedMatrix
from caraserve.gpu.linear.base import JoinedModules, Linear, LinearLoader
from caraserve.gpu.linear.formats import class_of, load_linear
from caraserve.gpu.linear.grouped import GroupedLinear, load_matrices
from caraserve.gpu.linear.mixed import MixedLinear
from caraserve.gpu.weights import Weights, dummy, load, num_bytes
from caraserve.model.dtype import Code, Dtype
from caraserve.model.formats import Matrix, TensorReader
from caraserve.model.formats.grouped import GroupedFormat, Scale
from caraserve.model.linear_plan import LinearPlan, Part
from caraserve.model.plan import DecoderPlan
from caraserve.profiling.microbench import MeasuredBackend
from tests.gpu.host_device import host_device
from tests.gpu_device.grouped_codes import KINDS, MadeUp, plain_values
from tests.plans.driving import greedy, logprobs, make_adapter
from tests.plans.executor import Executor
from tests.plans.gpu import backend_of, fill_from, matrices_of
from tests.plans.made_up import PLANS, VOCAB, Tensors
from tests.serving import engine_config, lora_config, model_config

CPU = torch.device("cpu")
# Formats whose inputs need not be whole super groups of 256.
SMALL = [name for name, (kind, _) in KINDS.items() if kind.scale is not Scale.NESTED]

pytestmark = pytest.mark.usefixtures("torch_for_triton")


def loader(dtype: torch.dtype = torch.float32) -> LinearLoader:
    return LinearLoader(dtype, CPU, fill_from(Tensors()), matrices_of(Tensors()), torch.ones(1))


def linear(name: str, kind: str, inputs: int = 256, outputs: int = 40) -> LinearPlan:
    return replace(LinearPlan.of_role(name, inputs, outputs, "out"), format=MadeUp.of(kind))


def numbers(one: LinearPlan) -> Tensor:
    """Returns a module's weights as the reference has them."""
    read = one.format.read(Tensors(), one.module, (one.outputs, one.inputs))
    return torch.from_numpy(one.format.values(read))


def packed(one: Linear) -> Tensor:
    assert isinstance(one, GroupedLinear)
    return plain_values(one.matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_codes_stand_for_the_numbers_and_are_not_larger_than_on_disk(kind: str) -> None:
    one = linear("module", kind, inputs=768)
    assert isinstance(one.format, GroupedFormat)
    (matrix,) = load_matrices(loader(), one.format, (one,))
    assert torch.equal(plain_values(matrix), numbers(one))
    assert matrix.nbytes <= one.format.num_bytes(768, 40, 2) * 1.001


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_0", "NVFP4"])
def test_inputs_need_not_be_whole_blocks(kind: str) -> None:
    one = linear("module", kind, inputs=80)
    assert torch.equal(packed(load_linear(loader(), (one,))), numbers(one))


def test_modules_of_one_format_are_one_matrix_whose_outputs_follow_their_parts() -> None:
    rows = tuple(range(0, 40, 2)), range(1, 40, 2)
    fused = replace(linear("fused", "Q4_1"), parts=(Part("q", rows[0]), Part("k", rows[1])), bias=True)
    loaded = load_linear(loader(), (linear("a", "Q4_1"), fused))
    wanted = numbers(fused)
    assert torch.equal(packed(loaded), torch.cat([numbers(linear("a", "Q4_1")), wanted[::2], wanted[1::2]]))
    assert isinstance(loaded, GroupedLinear)
    assert loaded.bias is not None
    assert torch.all(loaded.bias[:40] == 0)
    assert torch.all(loaded.bias[40:] != 0)


@dataclass(frozen=True, slots=True)
class Sorted(MadeUp):
    """Columns of `v` are in another order than those of other modules."""

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        return MadeUp.of(self.name, 2 if module == "v" else 1).read(tensors, module, shape)


def test_modules_whose_columns_are_in_another_order_are_apart() -> None:
    modules = [replace(linear(name, "GPTQ"), format=Sorted.of("GPTQ")) for name in "qkv"]
    modules.append(linear("z", "Q8_0"))
    loaded, x = load_linear(loader(), modules), torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    assert isinstance(loaded, MixedLinear)
    first, *_ = (part for part, _ in loaded.parts)
    assert isinstance(first, MixedLinear)
    assert [part.weight.shape[0] for part, _ in first.parts] == [80, 40]
    out = torch.empty(3, 160)
    loaded.apply(x, out)
    torch.testing.assert_close(out, x @ torch.cat(list(map(numbers, modules))).T)


@pytest.mark.parametrize(("inputs", "kind", "group"), [(96, "Q4_0", 24), (96, "Q6_K", 16), (768, "Q4_K", 48)])
def test_groups_that_kernels_cannot_compute_are_refused(inputs: int, kind: str, group: int) -> None:
    one = linear("module", kind, inputs)
    with pytest.raises(ModelLoadError, match=f"groups of {group} of {inputs} inputs .* cannot be computed on a GPU"):
        load_linear(loader(), (replace(one, format=replace(MadeUp.of(kind), group=group)),))


def test_weights_stored_as_inputs_by_outputs_are_refused() -> None:
    one = replace(linear("module", "Q4_0"), transposed=True)
    with pytest.raises(ModelLoadError, match=r"module: weights stored as \[inputs, outputs\]"):
        load_linear(loader(), (one,))


def grouped(plan: DecoderPlan, kinds: list[str], embed: str = "Q8_0") -> DecoderPlan:
    """Returns a plan whose linears have formats in turn, and whose embedding and head have one each."""
    names = cycle(kinds)
    layers = tuple(
        layer.with_linears(lambda one: replace(one, format=MadeUp.of(next(names)), transposed=False))
        .with_expert_tensors(lambda one: replace(one, format=MadeUp.of(kinds[0]), is_transposed=False))
        for layer in plan.layers
    )  # fmt: skip
    return replace(plan, layers=layers, embed_format=MadeUp.of(embed), head_format=MadeUp.of("Q4_1"))


TOKENS = [(37 * index * index + 11) % VOCAB for index in range(40)]
MIXES = {"sandwich": SMALL, "parallel": ["Q4_0", "GPTQ"], "experts": ["MXFP4"], "gated": ["nf4", "Q5_1", "w8"]}


@pytest.mark.parametrize("name", MIXES)
def test_a_model_of_several_formats_gives_the_probabilities_of_its_numbers(name: str) -> None:
    """Through graphs, with an adapter; the embedding stays packed, also where it is the head."""
    plan = grouped(PLANS[name](), MIXES[name])
    served = backend_of(plan, Tensors(), with_graphs=name == "sandwich")
    adapter, deltas = make_adapter(plan, served.host_memory)
    try:
        found = logprobs(served, VOCAB, TOKENS, (17, 1, 22), VOCAB // 2)
        MeasuredBackend(served).load(adapter, 1)
        chosen = greedy(served, TOKENS[:20], adapter=1, count=4)
    finally:
        served.close()
    logits = Executor(plan, Tensors()).logits(TOKENS)[:-1]
    exact = logits - np.logaddexp.reduce(logits, 1, keepdims=True)
    known = np.isfinite(found)
    assert known.sum(1).min() >= VOCAB // 2
    np.testing.assert_allclose(found[known], exact[known], atol=5e-5)
    assert Executor(plan, Tensors(), deltas).logits(chosen)[19:-1].argmax(1).tolist() == chosen[20:]


def test_a_tied_head_shares_the_packed_embedding_and_memory_is_counted() -> None:
    plan = grouped(PLANS["sandwich"](), ["Q4_0"], embed="Q4_1")
    weights = load(plan, torch.bfloat16, 32, CPU, fill_from(Tensors()), read=matrices_of(Tensors()))
    assert isinstance(weights.embedding, GroupedMatrix)
    assert isinstance(weights.head, GroupedLinear)
    assert weights.head.matrix is weights.embedding
    assert weights.dtype is torch.bfloat16
    assert sum(matrix.nbytes for matrix in matrices(weights)) == num_bytes(plan, torch.bfloat16)


def matrices(weights: Weights) -> Iterator[GroupedMatrix]:
    """Yields every matrix of weights once."""
    assert isinstance(weights.embedding, GroupedMatrix)
    yield weights.embedding
    for layer in weights.layers:
        for one in layer.linears:
            for part in [part for part, _ in one.parts] if isinstance(one, MixedLinear) else [one]:
                assert isinstance(part, GroupedLinear)
                yield part.matrix


@pytest.mark.parametrize("kind", SMALL)
def test_random_weights_are_of_plausible_size(kind: str) -> None:
    plan = grouped(PLANS["sandwich"](), [kind])
    weights = load(plan, torch.float32, 32, CPU, dummy(0, CPU))
    for matrix in matrices(weights):
        values = plain_values(matrix)
        assert 0.012 < float(values.std()) < 0.03
        assert abs(float(values.mean())) < 0.005


def test_the_merged_mode_names_the_formats_that_cannot_hold_a_sum() -> None:
    plan = grouped(PLANS["sandwich"](), ["Q4_0", "nf4"])
    how = model_config(Path()), engine_config(seqs=2), lora_config({}, mode="merged")
    with pytest.raises(ConfigError, match=r"--loading-mode merged .* those in Q4_0, nf4 cannot hold the sum on a GPU"):
        check_options(plan, *how, "cuda")
    check_options(plan, *how, "cpu")


@dataclass(frozen=True, slots=True)
class Stored(MadeUp):
    """Codes and scales as tensors of a safetensors file."""

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        codes = tensors.codes(f"{module}.codes", shape, Code.U8)
        scale, dtype = tensors(f"{module}.scales", (shape[0], shape[1] // self.group))
        assert dtype is Dtype.F16
        return Matrix({"codes": codes, "scale": scale}, None, self.group)


def test_codes_of_a_checkpoint_are_read_beside_tensors_that_are_copied_ahead(tmp_path: Path) -> None:
    stored = Stored.of("Q4_0")
    plan = PLANS["sandwich"]()
    layers = (layer.with_linears(lambda one: replace(one, format=stored)) for layer in plan.layers)
    plan = replace(plan, layers=tuple(layers))
    tensors, matrices = dict[str, Tensor](), dict[str, Matrix]()

    def fill(name: str, target: Tensor) -> None:
        tensors[name] = torch.from_numpy(Tensors()(name, tuple(target.shape))[0].copy())

    def read(_: object, module: str, shape: tuple[int, ...]) -> Matrix:
        matrices[module] = MadeUp.of("Q4_0").read(Tensors(), module, (shape[0], shape[1]))
        tensors[f"{module}.codes"] = torch.from_numpy(matrices[module].arrays["codes"])
        tensors[f"{module}.scales"] = torch.from_numpy(matrices[module].arrays["scale"].view(np.float16))
        return matrices[module]

    load(plan, torch.float32, 32, CPU, fill, read=read)
    save_file(tensors, tmp_path / "model.safetensors")
    weights, figures = load_checkpoint(tmp_path, host_device()[0], partial(load, plan, torch.float32, 32))
    q_proj = weights.layers[2].linears[0]
    wanted = [stored.values(matrices[f"model.layers.2.{name}_proj"]) for name in "qkv"]
    assert torch.equal(packed(q_proj), torch.from_numpy(np.concatenate(wanted)))
    assert isinstance(weights.embedding, Tensor)
    assert torch.equal(weights.embedding, tensors[plan.embed])
    copied = [one.nbytes for name, one in tensors.items() if not name.endswith((".codes", ".scales"))]
    assert figures.num_bytes == sum(copied)
    del tensors["model.layers.1.k_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.k_proj\.scales is missing"):
        load_checkpoint(tmp_path, host_device()[0], partial(load, plan, torch.float32, 32))


def test_the_class_of_a_format_is_found_by_what_it_is() -> None:
    modules = JoinedModules((linear("module", "Q4_0"),))
    assert isinstance(class_of(modules.format).load(loader(), modules), GroupedLinear)
