"""The base weights of the CUDA backend, read from a checkpoint or generated."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.memory.weight_transfer import WeightTransfer
from caraserve.gpu.weights import Weights, dummy, load, num_bytes, progress_steps
from caraserve.model.families import load_plan, plan_of
from caraserve.model.plan import Attention, DecoderPlan
from tests.gpu.host_device import host_device
from tests.gpu.small_model import CONFIG, SPEC
from tests.oracle.models import FAMILIES, make_model

CPU = torch.device("cpu")


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DecoderPlan, Weights]:
    plan = load_plan(folder)
    return plan, load_checkpoint(folder, host_device()[0], partial(load, plan, dtype, 32))[0]


def all_tensors(weights: Weights) -> list[Tensor]:
    """Returns every matrix once."""
    linears = [linear.weight for layer in weights.layers for linear in layer.linears]
    return [*linears, weights.embedding, *([] if weights.head.weight is weights.embedding else [weights.head.weight])]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_checkpoint_is_loaded_to_its_place(family: str, tmp_path: Path) -> None:
    plan, weights = loaded(make_model(tmp_path, family))
    left = load_file(tmp_path / "model.safetensors")

    def takes(name: str, found: Tensor) -> None:
        torch.testing.assert_close(left.pop(name), found, atol=1e-6, rtol=0)  # 1 + w - 1 is rounded

    for index, layer in enumerate(weights.layers):
        for group, linear in zip(plan.layers[index].groups, layer.linears, strict=True):
            assert isinstance(linear, DenseLinear)
            for site, column in zip(group.sites, group.columns(), strict=True):
                name, rows = plan.layers[index].linears[site.linear].module, slice(column, column + site.outputs)
                takes(f"{name}.weight", linear.weight[rows])
                if linear.bias is not None:
                    takes(f"{name}.bias", linear.bias[rows])
        for block, own in zip(plan.layers[index].blocks, layer.blocks, strict=True):
            norms = [(block.pre, own.pre), (block.post, own.post)]
            if isinstance(block.body, Attention):
                norms += [(block.body.q_norm, own.heads.q_norm), (block.body.k_norm, own.heads.k_norm)]
            for norm, found in norms:
                if norm is not None:
                    takes(norm.weight, found.weight - norm.offset)
    takes("model.embed_tokens.weight", weights.embedding)
    takes("model.norm.weight", weights.final_norm.weight - plan.final.offset)
    if plan.head is not None:
        takes("lm_head.weight", weights.head.weight)
    assert left == {}
    assert (weights.head.weight is weights.embedding) == (plan.head is None)


@pytest.mark.parametrize(("stored", "kept"), [("bfloat16", torch.float16), ("float32", torch.bfloat16)])
def test_weights_are_rounded_to_the_requested_dtype_and_norms_are_not(
    stored: str, kept: torch.dtype, tmp_path: Path
) -> None:
    _, weights = loaded(make_model(tmp_path, "llama3", dtype=stored), kept)
    file = load_file(tmp_path / "model.safetensors")
    assert torch.equal(weights.embedding, file["model.embed_tokens.weight"].to(kept))
    assert torch.equal(weights.final_norm.weight, file["model.norm.weight"].float())
    assert {tensor.dtype for tensor in all_tensors(weights)} == {kept}


def test_equal_seeds_give_equal_dummy_weights() -> None:
    first, again, other = (load(SPEC, torch.bfloat16, 32, CPU, dummy(seed, CPU)) for seed in (1, 1, 2))
    for mine, same, different in zip(*map(all_tensors, (first, again, other)), strict=True):
        assert torch.equal(mine, same)
        assert not torch.equal(mine, different)
        assert 0.015 < float(mine.float().std()) < 0.025
    assert torch.all(first.final_norm.weight == 1)


def test_loading_reports_its_progress() -> None:
    steps: list[None] = []
    weights = load(SPEC, torch.float16, 32, CPU, dummy(0, CPU), lambda: steps.append(None))
    assert len(steps) == progress_steps(SPEC)
    assert sum(tensor.nbytes for tensor in all_tensors(weights)) == num_bytes(SPEC, torch.float16)


def test_sizes_that_the_kernels_do_not_support_are_rejected() -> None:
    plan = plan_of(CONFIG | {"intermediate_size": 100})
    with pytest.raises(ModelLoadError, match=r"mlp\.down_proj has 100 inputs, not a multiple of 16"):
        load(plan, torch.float32, 32, CPU, dummy(0, CPU))


def test_a_checkpoint_is_loaded_with_its_progress_and_its_figures(tmp_path: Path) -> None:
    plan = load_plan(make_model(tmp_path, "llama3"))
    steps: list[None] = []
    _, figures = load_checkpoint(
        tmp_path, host_device()[0], partial(load, plan, torch.bfloat16, 32), lambda: steps.append(None)
    )
    assert len(steps) == progress_steps(plan)
    assert figures.num_bytes == sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())


def test_nothing_is_read_of_a_checkpoint_that_lacks_a_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "llama3")
    config = json.loads((tmp_path / "config.json").read_text())
    plan = plan_of(config | {"num_hidden_layers": 3})
    monkeypatch.setattr(WeightTransfer, "__enter__", lambda self: pytest.fail("reading has begun"))
    with pytest.raises(ModelLoadError, match=r"layers\.2\.self_attn\.q_proj\.weight is missing"):
        load_checkpoint(tmp_path, host_device()[0], partial(load, plan, torch.bfloat16, 32))


def test_weights_larger_than_device_memory_are_a_one_line_error() -> None:
    def fill(name: str, target: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmany more lines")

    with pytest.raises(ModelLoadError, match=r"^the model's weights take \S+ KiB of device memory, more than is free$"):
        load(SPEC, torch.float32, 32, CPU, fill)
