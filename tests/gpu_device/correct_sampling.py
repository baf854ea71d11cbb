"""Compares sampling with the CPU backend's."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from caraserve.core.batch import SlotSampling
from caraserve.core.grammar import mask_words
from caraserve.core.outputs import SAMPLE, SAMPLE_MASKED
from caraserve.core.request import MAX_LOGPROBS
from caraserve.cpu import sampling
from caraserve.cpu.sampling import SLOT_SAMPLING, write_sampling
from caraserve.gpu.kernels.paged_cache import TokenTables
from caraserve.gpu.kernels.sampling import MaskedRows, Outputs, SamplerState, sample, score
from scripts.laboratory.gpu.accelerator import Accelerator
from scripts.laboratory.gpu.results import WrongResult, check_close
from scripts.laboratory.gpu.setup import CheckSetup
from tests.cpu.as_python import callable_from_python

_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.2},
    {"logit_bias": ((11, 30.0), (12, 29.5))},
)
_choose = callable_from_python(sampling.choose)
_KNOWN = 40  # tokens of each request's history


def check_sampling(setup: CheckSetup, acc: Accelerator, case: int) -> float:
    """Checks that tokens, of which masks limit every second one, and log-probabilities are those of the CPU backend."""
    rows, vocab, rng = len(_WAYS), setup.effort.vocab, np.random.default_rng(case)
    table = np.zeros(rows, SLOT_SAMPLING)
    for slot, way in enumerate(_WAYS):
        write_sampling(table, slot, replace(SlotSampling.greedy(3), seed=1000 * case + slot, **way))
    history = rng.integers(0, vocab, (rows, _KNOWN + 2)).astype(np.int32)
    logits = 3.0 * acc.random(acc.generator(case), rows, vocab)
    outputs = _outputs(acc, rows)
    position = torch.full((rows,), _KNOWN, dtype=torch.int32, device=acc.place)
    state = SamplerState(
        torch.from_numpy(table.view(np.uint8).reshape(rows, -1).copy()).to(acc.place),
        torch.from_numpy(history.copy()).to(acc.place),
        torch.full((2, vocab), torch.nan, device=acc.place),
        torch.zeros((2, vocab), dtype=torch.int32, device=acc.place),
    )

    masks = rng.integers(1, 1 << 32, (rows, mask_words(vocab)), np.uint32)  # of the rows with odd numbers
    masked = list(range(1, rows, 2))
    on_device = torch.from_numpy(masks[masked].view(np.int32)).to(acc.place)
    masked_rows = MaskedRows(torch.tensor(masked, dtype=torch.int32, device=acc.place), on_device)

    for each in (None, masked_rows):
        acc.launch(sample(logits, outputs, TokenTables(outputs.token, position), state, each))
        acc.launch(score(logits, outputs, each))
    acc.settle()
    values = logits.float().cpu().numpy()
    copies, seen = np.zeros(vocab, np.float32), np.zeros(vocab, np.uint8)
    known = history.astype(np.int64)
    wanted = [
        int(
            _choose(values[row], _KNOWN, known[row], table[row], copies, seen, masks[row, : masks.shape[1] * (row % 2)])
        )
        for row in range(rows)
    ]
    if outputs.chosen.tolist() != wanted or state.history[:, _KNOWN + 1].tolist() != wanted:
        raise WrongResult(f"sampling, case {case}: {outputs.chosen.tolist()} were taken, the CPU takes {wanted}")
    scores = torch.log_softmax(logits.double(), dim=1)[range(rows), wanted]
    return check_close("log-probabilities", outputs.logprob, scores, 1e-5)


def _outputs(acc: Accelerator, rows: int) -> Outputs:
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=acc.place)

    tops = rows, MAX_LOGPROBS
    return Outputs(
        ints(list(range(rows))),
        ints([SAMPLE_MASKED if row % 2 else SAMPLE for row in range(rows)]),
        ints([2] * rows),
        ints([-7] * rows),
        torch.full((rows,), torch.nan, device=acc.place),
        ints([-7] * rows),
        torch.full(tops, -7, dtype=torch.int32, device=acc.place),
        torch.full(tops, torch.nan, device=acc.place),
    )
