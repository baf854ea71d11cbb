"""Stage `sampling`: times the choice of tokens over a large vocabulary, greedy and limited by top-p and top-k."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from caraserve.core.batch import SlotSampling
from caraserve.core.outputs import SAMPLE
from caraserve.core.request import MAX_LOGPROBS
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.sampling import Outputs, SamplerState, sample
from caraserve.model.dtype import Dtype
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import Lines, StageResult, WrongResult
from scripts.laboratory.gpu.setup import CheckSetup

_GREEDY = SlotSampling.greedy(1)
_TOP_P = replace(_GREEDY, temperature=1.0, top_p=0.9)
_WAYS = {"greedy": _GREEDY, "top-p": _TOP_P, "top-p and top-k": replace(_TOP_P, top_k=50)}
_TARGET_US = 100.0  # of top-p, with the most rows
_SPREAD = 3.0  # standard deviation of logits: the most likely token has some per cent


@dataclass(frozen=True, slots=True)
class SamplingPoint:
    """The choice of a token in each of `rows` rows of logits."""

    way: str
    rows: int
    us: float


@dataclass(frozen=True, slots=True)
class SamplingFigures:
    """All points, with `vocab` tokens to choose from."""

    vocab: int
    points: tuple[SamplingPoint, ...]


def sampling(setup: CheckSetup) -> StageResult[SamplingFigures]:
    """Measures every way with every number of rows; which tokens are right is checked in stage `correct`. Raises
    WrongResult when a row has no token."""
    acc, lines, points = setup.accelerator(Dtype.BF16), Lines(), list[SamplingPoint]()
    vocab, most = setup.effort.gqa_shape.vocab, max(setup.effort.sampled_rows)
    for way, parameters in _WAYS.items():
        for rows in setup.effort.sampled_rows:
            points.append(SamplingPoint(way, rows, _time_us(setup, acc, vocab, rows, parameters)))
            name = f"{way}, {rows} of {vocab} logits: µs"
            if way == "top-p" and rows == most:
                lines.at_most(name, points[-1].us, _TARGET_US, ".0f")
            else:
                lines.add(name, f"{points[-1].us:.0f}")
    return StageResult(SamplingFigures(vocab, tuple(points)), lines.all)


def _time_us(setup: CheckSetup, acc: Accelerator, vocab: int, rows: int, parameters: SlotSampling) -> float:
    table = np.zeros(rows, SLOT_SAMPLING)
    for slot in range(rows):
        write_sampling(table, slot, replace(parameters, seed=slot))
    logits = _SPREAD * acc.random(acc.generator(0), rows, vocab)
    ints = partial(torch.zeros, dtype=torch.int32, device=acc.place)
    outputs = Outputs(
        torch.arange(rows, dtype=torch.int32, device=acc.place),
        torch.full((rows,), SAMPLE, dtype=torch.int32, device=acc.place),
        ints(rows) - 1,
        ints(rows) - 1,
        torch.zeros(rows, device=acc.place),
        ints(rows),
        ints((rows, MAX_LOGPROBS)),
        torch.zeros((rows, MAX_LOGPROBS), device=acc.place),
    )
    tokens = TokenTables(torch.arange(rows, dtype=torch.int32, device=acc.place), ints(rows))
    state = SamplerState(
        torch.from_numpy(table.view(np.uint8).reshape(rows, -1).copy()).to(acc.place),
        ints((rows, 2)),
        torch.zeros((rows, vocab), device=acc.place),
        ints((rows, vocab)),
    )
    acc.settle()
    launch = sample(logits, outputs, tokens, state)
    us = acc.median_us(lambda: acc.launch(launch), setup.effort.replays)
    chosen = outputs.chosen.tolist()
    if not all(0 <= token < vocab for token in chosen):
        raise WrongResult(f"sampling over {vocab} logits has chosen {chosen}")
    return us
