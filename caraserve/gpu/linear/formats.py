"""The weight formats: which class loads and multiplies modules whose weights are stored in one."""

from torch import Tensor

from caraserve.gpu.linear.base import Fill, JoinedModules, Linear, LinearLoader
from caraserve.gpu.linear.dense import DenseLinear
from caraserve.gpu.linear.fp8 import Fp8Linear
from caraserve.gpu.linear.int8 import Int8Linear
from caraserve.gpu.linear.quantized import QuantizedLinear
from caraserve.model.dtype import Code
from caraserve.model.formats import WeightFormat
from caraserve.model.formats.scaled_codes import ScaledCodes
from caraserve.model.quantization import Quantization

QUANTIZED: dict[Code, type[QuantizedLinear]] = {each.code: each for each in (Fp8Linear, Int8Linear)}
TORCH_CODES = {code: each.stored for code, each in QUANTIZED.items()}


def load_linear(loader: LinearLoader, modules: JoinedModules, stored: WeightFormat | None) -> Linear:
    """Returns a linear of modules that are all stored in this format; None: as numbers."""
    if not isinstance(stored, ScaledCodes):
        return DenseLinear.load(loader, modules)
    return QUANTIZED[stored.code].load(loader, modules, stored)


def dequantizing(fill: Fill, quantization: Quantization | None) -> Fill:
    """Returns a Fill that also fills matrices of numbers whose modules are quantised in the checkpoint."""
    if quantization is None:
        return fill

    def fill_numbers(name: str, target: Tensor) -> None:
        module, _, what = name.rpartition(".")
        is_numbers = what == "weight" and target.dim() == 2 and target.dtype not in TORCH_CODES.values()
        stored = quantization.format_of(module) if is_numbers else None
        if not isinstance(stored, ScaledCodes):
            fill(name, target)
        else:
            QUANTIZED[stored.code].fill_numbers(module, target, fill)

    return fill_numbers
