"""Compares mixtures of experts with fp64 for random sizes and ways of choosing; and a row's bits alone with those in a
batch that has tiles of the same size."""

import random
from typing import get_args

import torch

from caraserve.gpu.kernels.experts import ExpertRoom, ExpertWeights, Routing, apply_experts
from caraserve.model.dtype import Dtype
from caraserve.model.plan import Activation
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import check_close, check_same_bits
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device import plain_layers

# Of 1 or of the result, if that is larger. What the experts compute is rounded three times.
_TOLERANCE = {Dtype.F32: 5e-5, Dtype.BF16: 2.0**-6, Dtype.F16: 2.0**-9}
_ROWS = (1, 3, 17, 70, 400)  # tiles of 16, 64 and 128 rows


def check_experts(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks a layer with several numbers of rows. Like all checks, returns the largest error as a share of the
    tolerance."""
    rng, generator, worst = random.Random(case), acc.generator(case), 0.0
    hidden, inner, count = setup.effort.shape.hidden // 2, setup.effort.shape.intermediate // 8, rng.choice((5, 6, 8))
    groups = rng.choice((None, (2, 1, "max"), (2, 1, "top2"))) if count == 8 else None
    scores, normalise, scale = rng.choice(("softmax", "sigmoid")), rng.random() < 0.5, rng.choice((1.0, 1.7))
    correction = acc.random(generator, count, dtype=torch.float32) if rng.random() < 0.5 else None
    how = Routing(count, 2, scores, normalise, scale, groups, correction)
    gate_up = acc.random(generator, count, 2 * inner, hidden) * hidden**-0.5
    down = acc.random(generator, count, hidden, inner) * inner**-0.5
    biases = [acc.random(generator, count, width) if case % 2 else None for width in (2 * inner, hidden)]
    layer = ExpertWeights(how, rng.choice(get_args(Activation)), gate_up, down, *biases)
    for rows in (rows for rows in _ROWS if rows <= max(setup.effort.product_rows)):
        worst = max(worst, _check(acc, layer, generator, rows, f"experts, case {case}, {rows} rows, {acc.dtype.name}"))
    return worst


def _check(acc: Accelerator, layer: ExpertWeights, generator: torch.Generator, rows: int, name: str) -> float:
    how, (_, hidden, inner) = layer.routing, layer.down.shape
    x, before = (acc.random(generator, rows, hidden) for _ in range(2))
    logits = acc.random(generator, rows, how.experts)
    position = torch.arange(rows, dtype=torch.int32, device=acc.place)
    position[rows // 2] -= rows * (rows > 1)  # a row of no token
    expected, out = before.double(), before.clone()
    plain_layers.apply_experts(x.double(), logits, position, layer, None, expected, adds=True)

    def run(part: slice) -> torch.Tensor:
        got, count = out[part].clone(), len(out[part])
        room = ExpertRoom.empty(count, how.top_k, how.experts, inner, hidden, acc.torch_dtype, acc.place)
        for floats in (room.weights, room.inner, room.done):
            floats.fill_(torch.nan)
        given = x[part], logits[part], position[part].clone(), layer, room, got
        acc.run(lambda: apply_experts(*given, adds=True))
        acc.settle()
        return got

    whole = run(slice(rows))
    if rows == _ROWS[1]:
        check_same_bits(name, run(slice(2, 3)), whole[2:3])
    return check_close(name, whole, expected, _TOLERANCE[acc.dtype])
