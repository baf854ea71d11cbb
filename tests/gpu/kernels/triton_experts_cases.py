"""Compares mixtures of experts with torch in double precision; run by test_triton_cases.py in Triton's interpreter, or
on a GPU."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from caraserve.gpu.kernels.experts import (
    ExpertRoom,
    ExpertWeights,
    Routing,
    apply_experts,
    most_tiles,
    route,
    sort,
)
from caraserve.model.plan import Activation
from tests.gpu.honest_dots import honest_dots
from tests.gpu_device import plain_layers as plain
from tests.plans import gpu
from tests.plans.driving import logprobs
from tests.plans.executor import Executor
from tests.plans.made_up import PLANS, VOCAB, Tensors

pytestmark = [
    pytest.mark.usefixtures(honest_dots.__name__),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of the interpreter, where the factor is 0
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TOLERANCES = {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}
HIDDEN, INNER = 40, 24  # no multiples of a tile, nor of 16


def random(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(DEVICE)


def room_of(rows: int, how: Routing, dtype: torch.dtype = F32) -> ExpertRoom:
    """Returns room full of NaN and of numbers that are no expert, row or tile."""
    room = ExpertRoom.empty(rows, how.top_k, how.experts, INNER, HIDDEN, dtype, DEVICE)
    for ints in (room.chosen, room.order, room.tiles.expert, room.tiles.first, room.tiles.rows):
        ints.fill_(1 << 30)
    for floats in (room.weights, room.inner, room.done):
        floats.fill_(float("nan"))
    return room


def positions(rows: int, *absent: int) -> Tensor:
    return torch.tensor([-1 if row in absent else row for row in range(rows)], dtype=torch.int32, device=DEVICE)


# --- route ---


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "how",
    [
        Routing(5, 2),
        Routing(5, 5, normalise=False),
        Routing(60, 4, scale=1.7, normalise=False),
        Routing(8, 1, "sigmoid", scale=2.5),
        Routing(40, 6, "sigmoid", groups=(8, 3, "top2"), correction=0.2 * random(40)),
        Routing(12, 3, groups=(4, 2, "max"), normalise=False),
        Routing(6, 2, "sigmoid", groups=(6, 2, "top2")),  # groups of one expert
        Routing(300, 8, correction=0.01 * random(300)),
    ],
    ids=lambda how: f"{how.top_k} of {how.experts} {how.scores} {how.groups}",
)
def test_each_row_gets_the_experts_with_the_highest_scores_and_their_weights(how: Routing, dtype: torch.dtype) -> None:
    rows, room = 6, room_of(6, how)
    logits = random(rows, how.experts + 3, dtype=dtype)[:, 1 : 1 + how.experts]
    route(logits, positions(rows, 2), how, room)
    chosen, weights = room.chosen.view(rows, -1), room.weights.view(rows, -1)
    double = replace(how, correction=None if how.correction is None else how.correction.double())
    for row in range(rows):
        if row == 2:  # no token
            assert chosen[row].tolist() == [how.experts] * how.top_k
            assert not weights[row].any()
            continue
        wanted = plain.chosen(logits[row].double(), double)
        assert chosen[row].tolist() == [expert for expert, _ in wanted]
        torch.testing.assert_close(weights[row].double(), torch.stack([each for _, each in wanted]), atol=1e-6, rtol=0)


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    for how in (Routing(5, 3), Routing(8, 3, "sigmoid", groups=(4, 2, "top2"))):
        room = room_of(2, how)
        route(torch.zeros(2, how.experts, device=DEVICE), positions(2), how, room)
        assert room.chosen.tolist() == [0, 1, 2] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter
@pytest.mark.parametrize("how", [Routing(5, 3), Routing(8, 2, "sigmoid", groups=(4, 2, "top2"))])
def test_scores_that_are_not_finite_choose_experts_that_there_are_and_are_not_hidden(how: Routing) -> None:
    logits, room = random(3, how.experts), room_of(3, how)
    logits[0], logits[1, 2], logits[2, 1] = torch.nan, torch.nan, torch.inf
    route(logits, positions(3), how, room)
    assert room.chosen.min() >= 0
    assert room.chosen.max() < how.experts
    assert all(len(set(row)) == how.top_k for row in room.chosen.view(3, -1).tolist())
    assert bool(room.weights.view(3, -1)[0].isnan().all())


# --- sort ---


@pytest.mark.parametrize(
    ("choices", "experts", "tile_rows"), [(1, 5, 16), (9, 128, 16), (50, 5, 16), (1500, 7, 64), (1100, 1, 128)]
)
def test_tiles_have_every_choice_once_beside_others_of_its_expert(choices: int, experts: int, tile_rows: int) -> None:
    room = room_of(choices, Routing(experts, 1))
    expert_of = np.random.default_rng(choices).integers(0, experts + 1, choices)  # the last one: of no token
    expert_of[: choices // 3] = experts // 2  # many of one expert
    room.chosen.copy_(torch.from_numpy(expert_of))
    sort(choices, experts, tile_rows, room)
    count, found = most_tiles(choices, experts, tile_rows), list[tuple[int, int]]()
    tiles = zip(
        *(each[:count].tolist() for each in (room.tiles.expert, room.tiles.first, room.tiles.rows)), strict=True
    )
    cut = [(expert, first, rows) for expert, first, rows in tiles if rows]
    for expert, first, rows in cut:
        assert 0 < rows <= tile_rows
        found += [(choice, expert) for choice in room.order[first : first + rows].tolist()]
    assert sorted(found) == [(choice, expert) for choice, expert in enumerate(expert_of) if expert < experts]
    least = np.bincount(expert_of, minlength=experts)[:experts]
    assert len(cut) == sum(-(-least // tile_rows))  # no expert's weights are read more often than necessary
    assert torch.all(room.tiles.rows[count:] == 1 << 30)


# --- all of it ---


def experts_of(how: Routing, kind: Activation, dtype: torch.dtype, *, has_bias: bool) -> ExpertWeights:
    gate_up = random(how.experts, 2 * INNER, HIDDEN, dtype=dtype) / 8
    down = random(how.experts, HIDDEN, INNER, dtype=dtype) / 5
    biases = (random(how.experts, width, dtype=dtype) for width in (2 * INNER, HIDDEN))
    return ExpertWeights(how, kind, gate_up, down, *(biases if has_bias else ()))


def check(rows: int, how: Routing, kind: Activation, dtype: torch.dtype, *, has_bias: bool, adds: bool) -> None:
    experts, room = experts_of(how, kind, dtype, has_bias=has_bias), room_of(rows, how, dtype)
    x, out = random(rows, HIDDEN + 8, dtype=dtype)[:, :HIDDEN], random(rows, HIDDEN + 3, dtype=dtype)[:, :HIDDEN]
    logits, at = random(rows, how.experts + 9, dtype=dtype)[:, : how.experts], positions(rows, 1)
    wanted = out.double()
    plain.apply_experts(x.double(), logits, at, experts, None, wanted, adds=adds)
    apply_experts(x, logits, at, experts, room, out, adds=adds)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rows", [1, 3, 25, 260])  # tiles of 16, of 64 and of 128 rows
def test_rows_are_the_weighted_sums_of_their_experts_outputs(rows: int, dtype: torch.dtype) -> None:
    if rows < 100 or dtype is BF16:  # which takes the interpreter a second
        check(rows, Routing(5, 2), "silu", dtype, has_bias=rows == 3, adds=rows == 25)


@pytest.mark.parametrize("kind", get_args(Activation))
def test_experts_have_every_activation(kind: Activation) -> None:
    check(4, Routing(3, 2, "sigmoid", scale=1.5), kind, F32, has_bias=True, adds=True)


def test_a_rows_result_does_not_depend_on_the_others() -> None:
    how, dtype = Routing(5, 2), F32
    experts, x, logits = experts_of(how, "silu", dtype, has_bias=True), random(9, HIDDEN), random(9, 5)

    def results(rows: slice) -> Any:
        out = torch.empty_like(x[rows])
        count = len(out)
        apply_experts(x[rows], logits[rows], positions(count), experts, room_of(count, how), out, adds=False)
        return out

    together = results(slice(9))
    for row in range(9):
        assert torch.equal(results(slice(row, row + 1))[0], together[row])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the raw kernels are those of an emulated device")
def test_a_decoder_with_experts_computes_the_probabilities_of_its_plan() -> None:
    plan, tokens = PLANS["experts"](), [(37 * index * index + 11) % VOCAB for index in range(12)]
    backend = gpu.backend_of(plan, Tensors())
    found = logprobs(backend, VOCAB, tokens, (9, 1, 2), VOCAB // 2)
    backend.close()
    logits = torch.from_numpy(Executor(plan, Tensors()).logits(tokens)[:-1])
    known = np.isfinite(found)
    np.testing.assert_allclose(found[known], logits.log_softmax(1).numpy()[known], atol=2e-5)
