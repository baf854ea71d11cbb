"""The experts of a layer on a GPU, read from every form in which checkpoints store them."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.checkpoint import load_checkpoint
from caraserve.gpu.linear.base import LinearLoader
from caraserve.gpu.linear.experts import load_experts
from caraserve.gpu.linear.random_codes import random_matrix
from caraserve.gpu.supported_plans import check_plan
from caraserve.gpu.weights import dummy, load, num_bytes
from caraserve.model.plan import ExpertTensor, Moe
from tests.gpu.host_device import host_device
from tests.plans.made_up import PLANS, Tensors, body, linear

CPU = torch.device("cpu")
EXPERTS, HIDDEN, INNER = 3, 32, 24
GATE_UP, DOWN = ExpertTensor("gate_up", INNER, HIDDEN, 2 * INNER), ExpertTensor("down", HIDDEN, INNER)
HALVES = range(INNER), range(INNER, 2 * INNER)
EVEN_AND_ODD = range(0, 2 * INNER, 2), range(1, 2 * INNER, 2)
REVERSED = tuple(reversed(HALVES[1])), tuple(reversed(HALVES[0]))

Three = tuple[ExpertTensor, ExpertTensor, ExpertTensor]


def each(gate: str, up: str, down: str) -> Three:
    return ExpertTensor(gate, INNER, HIDDEN), ExpertTensor(up, INNER, HIDDEN), replace(DOWN, tensor=down)


def fused(rows: tuple[range | tuple[int, ...], range | tuple[int, ...]], **fields: object) -> Three:
    gate, up = (replace(GATE_UP, rows=own, **fields) for own in rows)  # type: ignore[arg-type]
    return gate, up, DOWN


def moe(three: Three) -> Moe:
    return Moe((linear(0, "router", HIDDEN, ("router", EXPERTS)),), None, EXPERTS, 2, *three)


def stored(three: Three) -> dict[str, Tensor]:
    """Returns random tensors of a checkpoint, in all their forms."""
    made, generator = dict[str, Tensor](), torch.Generator().manual_seed(1)
    for part in three:
        outputs = part.stored_outputs or part.outputs
        matrix = (part.inputs, outputs) if part.is_transposed else (outputs, part.inputs)
        for name, shape in ((part.tensor, matrix), (part.bias, (outputs,))):
            if name is not None and "{expert}" in name:
                made |= {name.format(expert=expert): torch.randn(shape, generator=generator) for expert in range(3)}
            elif name is not None:
                made[name] = torch.randn((EXPERTS, *shape), generator=generator)
    return made


def wanted(three: Three, tensors: dict[str, Tensor], expert: int, *, bias: bool = False) -> list[Tensor]:
    """Returns the matrices of one expert, or its biases."""
    found = []
    for part in three:
        name = part.bias if bias else part.tensor
        if name is None:
            continue
        values = tensors[name.format(expert=expert)] if "{expert}" in name else tensors[name][expert]
        values = values.T if part.is_transposed and not bias else values
        found.append(values if part.rows is None else values[list(part.rows)])
    return found


FORMS = {
    "a tensor each": each("e.{expert}.gate", "e.{expert}.up", "e.{expert}.down"),
    "all of a kind": each("gate", "up", "down"),
    "gate above up": fused(HALVES, bias="gate_up_bias"),
    "alternating": fused(EVEN_AND_ODD, is_transposed=True, bias="gate_up_bias"),
    "in any order": fused(REVERSED),
    "fused, one each": fused(HALVES, tensor="e.{expert}.gate_up", bias="e.{expert}.bias"),
    "fused and transposed, one each": fused(HALVES, tensor="e.{expert}.gate_up", is_transposed=True),
    "a bias of down": (*fused(HALVES)[:2], replace(DOWN, bias="down_bias", is_transposed=True)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_once_to_its_place(form: str) -> None:
    three, filled = FORMS[form], list[tuple[str, Tensor]]()
    tensors = stored(three)

    def fill(name: str, target: Tensor) -> None:
        assert target.is_contiguous()
        target.copy_(tensors[name])
        filled.append((name, target))

    experts = load_experts(LinearLoader(torch.float32, CPU, fill, random_matrix, torch.ones(1)), moe(three))
    for expert in range(EXPERTS):
        gate, up, down = wanted(three, tensors, expert)
        assert torch.equal(experts.gate_up[expert], torch.cat([gate, up]))
        assert torch.equal(experts.down[expert], down)
        for found, parts in ((experts.gate_up_bias, three[:2]), (experts.down_bias, three[2:])):
            biases = wanted(parts, tensors, expert, bias=True)  # type: ignore[arg-type]
            assert (found is None) == (not biases)
            assert found is None or torch.equal(found[expert], torch.cat(biases))
    assert sorted(name for name, _ in filled) == sorted(tensors)
    if form in ("a tensor each", "gate above up", "fused, one each"):  # there is no second copy
        made = [experts.gate_up, experts.down, *([] if three[0].bias is None else [experts.gate_up_bias])]
        assert {start_of(target) for _, target in filled} == set(map(start_of, made))


def start_of(tensor: Tensor | None) -> int:
    """Returns the address of the memory that a tensor is a part of."""
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


def checkpoint(folder: Path) -> None:
    """Writes the tensors of the made-up decoder with experts."""
    tensors = dict[str, Tensor]()

    def fill(name: str, target: Tensor) -> None:
        tensors[name] = torch.from_numpy(Tensors()(name, tuple(target.shape))[0].copy())

    load(PLANS["experts"](), torch.float32, 128, CPU, fill)
    save_file(tensors, folder / "model.safetensors")


def test_experts_of_a_checkpoint_take_the_memory_that_the_plan_says(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    plan = PLANS["experts"]()
    weights, _ = load_checkpoint(tmp_path, host_device()[0], partial(load, plan, torch.bfloat16, 128))
    experts = [block.experts for layer in weights.layers for block in layer.blocks if block.experts is not None]
    linears = [linear.weight for layer in weights.layers for linear in layer.linears]
    kept = [weights.embedding, weights.head.weight, *linears]
    kept += [each for one in experts for each in (one.gate_up, one.down)]
    assert sum(each.nbytes for each in kept) == num_bytes(plan, torch.bfloat16)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    whole = torch.from_numpy(Tensors()(name, (8, 96, 96))[0].copy()).bfloat16()
    assert torch.equal(experts[0].gate_up[5], torch.cat([whole[5, :, 0::2], whole[5, :, 1::2]], dim=1).T)


def test_a_missing_expert_and_one_of_another_shape_are_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    device, gate = host_device()[0], "model.layers.3.mlp.experts.{expert}.gate_proj.weight"
    for change, said in (
        (body(Moe, experts=9), r"layers\.3\.mlp\.experts\.8\.gate_proj\.weight is missing"),
        (body(Moe, gate=ExpertTensor(gate, 48, 96, 50, range(48))), r"shape \[48, 96\], config.json asks \[50, 96\]"),
    ):
        with pytest.raises(ModelLoadError, match=said):
            load_checkpoint(tmp_path, device, partial(load, change(PLANS["experts"]()), torch.float32, 128))


def test_dummy_experts_are_random() -> None:
    weights = load(PLANS["experts"](), torch.float32, 128, CPU, dummy(3, CPU))
    experts = weights.layers[1].blocks[1].experts
    assert experts is not None
    assert 0.015 < float(experts.gate_up.std()) < 0.025
    assert not torch.equal(experts.down[0], experts.down[1])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"groups": (3, 1, "max")}, "8 experts in 3 groups"),
        ({"groups": (4, 5, "max")}, "2 experts of a token, from 5 of 4 groups that have 8"),
        ({"groups": (8, 1, "max")}, "2 experts of a token, from 1 of 8 groups that have 8"),
        ({"top_k": 9}, "9 experts of a token, from 1 of 1 groups that have 8"),
        ({"up": ExpertTensor("up", 47, 96)}, "experts of 48, 47 and 48 numbers"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_experts_that_cannot_be_computed_are_refused_before_the_start(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ModelLoadError, match=f"layer 3 has {said}, which a GPU cannot compute"):
        check_plan(body(Moe, **fields)(PLANS["experts"]()))
