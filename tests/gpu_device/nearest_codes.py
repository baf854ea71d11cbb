"""Quantises rows of numbers with numpy, whose division is IEEE's: what `round_rows` must produce, bit by bit.

torch divides on a GPU by multiplying with the reciprocal where the divisor is a Python number. That is a step off in
the last bit of every second scale, and a number between two codes, of which bf16 has many, then gets the other one.
"""

import numpy as np
import torch
from torch import Tensor

from caraserve.model.dtype import Code

_LEAST_SCALE = np.float32(1e-30)


def nearest_codes(x: Tensor, code: Code, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the values of the nearest codes of x, [rows, width], and the rows' scales, float32 on x's device.

    Each row has the scale of its own largest number, or all have `given`, [1].
    """
    numbers, largest = x.detach().float().cpu().numpy(), np.float32(code.largest)
    if given is None:
        scales = np.maximum(np.abs(numbers).max(1) / largest, _LEAST_SCALE)
    else:
        scales = np.repeat(given.float().cpu().numpy(), len(numbers))
    with np.errstate(invalid="ignore"):  # rows that are not finite
        limited = np.clip(numbers / scales[:, None], -largest, largest)
    values = np.rint(limited) if code is Code.I8 else torch.from_numpy(limited).to(torch.float8_e4m3fn).float().numpy()
    return torch.from_numpy(values).to(x.device), torch.from_numpy(scales).to(x.device)
