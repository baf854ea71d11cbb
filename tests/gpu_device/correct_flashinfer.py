"""A part of stage `correct`: compares prompt chunks by FlashInfer, beside a row that decodes, with fp64."""

import random
from dataclasses import dataclass, replace

import torch

from caraserve.bench.synthetic import shape_spec
from caraserve.core.batch import ScheduledRow
from caraserve.gpu.forward.flashinfer_prefill import DTYPES, FlashInferPrefill, Ints, check_flashinfer
from caraserve.gpu.kernels.attention import NO_WINDOW
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import Lines, StageResult, check_close
from scripts.laboratory.gpu.setup import CheckSetup
from tests.gpu_device.correct_model import ATTENTION, Paged

_CASES, _WINDOW = 4, 75
_PAST = 5  # positions of the longest context that are NaN


@dataclass(frozen=True, slots=True)
class FlashInferFigures:
    """The largest share of the tolerance by dtype, of random cases that are all right."""

    worst_share_of_tolerance: dict[str, float]


def correct_flashinfer(setup: CheckSetup) -> StageResult[FlashInferFigures]:
    """Runs the part. Raises WrongResult at the first wrong result, and ConfigError for sizes that FlashInfer lacks."""
    lines, worst = Lines(), dict[str, float]()
    for dtype in setup.effort.dtypes:
        if dtype in DTYPES:
            acc = setup.accelerator(dtype)
            worst[dtype.name.lower()] = max(_check(setup, acc, case) for case in range(_CASES))
    lines.add("prompts by FlashInfer beside fp64", f"{_CASES * len(worst)} random cases right")
    return StageResult(FlashInferFigures(worst), lines.all)


def _check(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks a chunk with a context, a row that decodes, and a chunk that begins with its prompt; with and without a
    window. Heads share keys in every other case."""
    rng, generator, shape = random.Random(case), acc.generator(case), setup.effort.shape
    dim, heads, context = shape.hidden // shape.heads, shape.heads, setup.effort.context - _PAST
    kv_heads = heads if case % 2 else max(1, heads // 4)
    spec = replace(shape_spec(shape, context), kv_heads=kv_heads, windows=(None, _WINDOW))
    check_flashinfer(spec, acc.dtype)
    paged = Paged.random(acc, generator, context + _PAST, kv_heads, dim)
    counts = [rng.randrange(100, 150) for _ in range(2)]
    rows = [_row(2, context - counts[0], counts[0]), _row(0, 9, 1), _row(3, 0, counts[1])]
    for row in rows:
        paged.poison(row.slot, row.start + row.count)
    q = acc.random(generator, sum(counts) + 1, (heads + 2 * kv_heads) * dim)[:, : heads * dim]

    def send(address: int, blocks: Ints) -> None:
        target = prefill.blocks[: len(blocks)]
        acc.run(lambda: target.copy_(torch.from_numpy(blocks)))

    slots, most = paged.cache.block_table.shape
    driver = acc.device.driver
    prefill = FlashInferPrefill(spec, acc.torch_dtype, (slots, most), 2, driver, acc.stream, acc.place, send)
    planned = prefill.plan(rows, paged.cache.block_table.cpu().numpy())
    assert planned is not None
    tokens = [(row.slot, row.start + index) for row in rows for index in range(row.count)]
    wanted = sorted({0, rng.randrange(counts[0]), counts[0] - 1, counts[0] + 1, len(tokens) - 1})
    worst = 0.0
    for window in (NO_WINDOW, _WINDOW):
        out = torch.full((len(q), heads * dim), torch.nan, dtype=acc.torch_dtype, device=acc.place)
        driver.call(acc.stream, lambda out=out, window=window: planned.attend(q, paged.cache, out, window))
        acc.settle()
        expected = torch.stack([paged.attended(q[index], *tokens[index], window) for index in wanted])
        name = f"prefill by FlashInfer, {acc.dtype.name}"
        worst = max(worst, check_close(name, out[wanted], expected, ATTENTION[acc.dtype]))
    return worst


def _row(slot: int, start: int, count: int) -> ScheduledRow:
    return ScheduledRow(slot, start, count, 0, samples=False)
