"""Compares LoRA kernels with fp64 for random ranks, dtypes and sizes, and a row's bits alone with those in a batch."""

import random

from caraserve.core.lora_layout import MAX_RANK
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.adapters import SEGMENTS_TOLERANCE, TOLERANCE, Adapters, DecodingRows, SegmentedRows, Site
from scripts.laboratory.gpu.results import check_close, check_same_bits
from scripts.laboratory.gpu.setup import CheckSetup

_RANKS = (0, 8, 8, 16, 24, 64, 128, 256)
_MOST_SLOTS = 6


def check_bgmv(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks decode LoRA. Like all checks, returns the largest error as a share of the tolerance."""
    rng = random.Random(case)
    site = _random_site(setup, rng)
    rows = [rng.randrange(site.slots) for _ in range(rng.choice((1, 3, 16, 64)))]
    adapters = Adapters(acc, site, layers=1, pool_bytes=setup.effort.lora_pool_bytes, seed=case)
    batch = DecodingRows(acc, adapters, rows, seed=case)
    before, expected = batch.y.clone(), batch.expected(0)
    if site.outputs[0] == setup.effort.shape.hidden:  # other widths would be compiled for each case
        by_norm = batch.added_by_norm(0)
        check_close(f"LoRA added by a norm, case {case}, {acc.dtype.name}", by_norm, expected, TOLERANCE[acc.dtype])
    batch.issue(0)
    acc.settle()
    worst = check_close(f"decode LoRA, case {case}, {acc.dtype.name}", batch.results(), expected, TOLERANCE[acc.dtype])
    row = rng.randrange(len(rows))
    alone = DecodingRows(acc, adapters, [rows[row]])
    alone.x.copy_(batch.x[row : row + 1])
    alone.y.copy_(before[row : row + 1])
    acc.settle()
    alone.issue(0)
    acc.settle()
    check_same_bits(f"decode LoRA, case {case}", alone.results(), batch.results()[row : row + 1])
    return worst


def check_prefill_lora(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks prefill LoRA on tensor cores."""
    rng = random.Random(1000 + case)
    site = _random_site(setup, rng)
    tokens = rng.choice((1, 40, 130))
    slots = [rng.randrange(site.slots) for _ in range(tokens)]
    adapters = Adapters(acc, site, layers=1, pool_bytes=setup.effort.lora_pool_bytes, seed=case)
    generator = acc.generator(case)
    x = acc.random(generator, tokens, site.inputs)
    y = acc.random(generator, tokens, site.width)
    expected = adapters.add_to(y, x, slots, 0)
    before = y.clone()
    SegmentedRows(acc, adapters, slots, x, y, MAX_RANK).issue(0)  # the rank that a lane's buffers have
    acc.settle()
    tolerance = SEGMENTS_TOLERANCE[acc.dtype]
    worst = check_close(f"prefill LoRA, case {case}, {acc.dtype.name}", y, expected, tolerance)
    token = rng.randrange(tokens)
    one = slice(token, token + 1)
    alone = before[one].clone()
    SegmentedRows(acc, adapters, [slots[token]], x[one].clone(), alone, MAX_RANK).issue(0)
    acc.settle()
    check_same_bits(f"prefill LoRA, case {case}", alone, y[one])
    return worst


def _random_site(setup: CheckSetup, rng: random.Random) -> Site:
    """Returns a random site: every other one as wide as the model, the rest of odd sizes."""
    hidden = setup.effort.shape.hidden
    if rng.random() < 0.5:
        inputs, outputs = hidden, (hidden,) * rng.choice((1, 3))
    else:
        inputs = rng.randrange(1, hidden)
        outputs = tuple(rng.randrange(1, hidden) for _ in range(rng.choice((1, 2, 3))))
    slots = rng.randrange(1, _MOST_SLOTS)
    most = max(setup.effort.lora_ranks)
    ranks = [[0, *(min(rng.choice(_RANKS), 2 * most) for _ in range(slots))] for _ in outputs]
    return Site(inputs, outputs, ranks, [rng.choice(list(Dtype)) for _ in range(slots + 1)])
