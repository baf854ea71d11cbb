"""Weights of experts in MXFP4, which become numbers as they are loaded: no kernel multiplies by their codes."""

import torch
from torch import Tensor

from caraserve.errors import ModelLoadError
from caraserve.gpu.linear.base import TORCH_CODES, JoinedModules, Linear, LinearLoader
from caraserve.model.dtype import Code
from caraserve.model.formats.mxfp4 import GROUP, VALUES, check_inputs, check_scales

_EXPONENT_BIT = 23  # of float32, whose exponents have the same bias as scales
_LEAST = 1 << (_EXPONENT_BIT - 1)  # float32 bits of 2^-127, for which there is no exponent


class Mxfp4:
    """Implements LinearClass for the matrices of experts."""

    @classmethod
    def load(cls, loader: LinearLoader, modules: JoinedModules) -> Linear:
        raise ModelLoadError(f"{modules.linears[0].module}: weights in mxfp4 can only be those of experts")

    @classmethod
    def fill_numbers(cls, module: str, target: Tensor, loader: LinearLoader) -> None:
        """Fills matrices of all experts, [experts, outputs, inputs], with their weights, which most dtypes hold
        exactly. Raises ModelLoadError."""
        *outputs, inputs = target.shape
        check_inputs(module, inputs)
        groups, codes_dtype = (*outputs, inputs // GROUP), TORCH_CODES[Code.U8]
        codes = torch.empty((*groups, GROUP // 2), dtype=codes_dtype, device=target.device)
        scales = torch.empty(groups, dtype=codes_dtype, device=target.device)
        loader.fill(f"{module}_blocks", codes)
        loader.fill(f"{module}_scales", scales)
        if not scales.is_meta:
            check_scales(module, int(scales.max()))
        values = torch.tensor(VALUES, device=target.device)
        for matrix, code, scale in zip(target, codes, scales, strict=True):
            pairs = torch.stack([values[(code & 15).int()], values[(code >> 4).int()]], dim=-1).flatten(-2)
            exponents = scale.int()
            factors = torch.where(exponents > 0, exponents << _EXPONENT_BIT, _LEAST).view(torch.float32)
            matrix.copy_((pairs * factors[..., None]).flatten(-2))
