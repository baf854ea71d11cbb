"""The compute capability, by which kernels choose tile sizes and instructions; 9.0 is 90."""

from functools import cache

import torch
import triton

FP8_CAPABILITY = 89  # the first with instructions for fp8
SMALL_SHARED_MEMORY = frozenset({86, 89, 120, 121})  # 99 KiB per block; others have 163 or 227


@cache
def compute_capability(device: torch.device) -> int:
    """Returns the compute capability that Triton compiles for, which is 90 without a GPU."""
    try:
        return int(triton.runtime.driver.active.get_current_target().arch)
    except RuntimeError:  # in Triton's interpreter
        return 90
