"""What each format of weights has on the CPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix

PIECE_INPUTS = 64  # `expand` is called for inputs from a multiple of this on, and for so many at most

# Packs the rows of a matrix, one for each output, and returns the fields `weight`, `scale` and `dtype` of a SITE record
# that its kernels need. The dtype is that of --dtype, for weights that are plain numbers.
Pack = Callable[[Matrix, Dtype, WeightMemory], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class WeightKernels:
    """What a format has on the CPU: `pack`, and the addresses of two separately compiled functions."""

    pack: Pack
    product: int  # (site, x, x_stride, rows, panel, y, y_stride, accumulate): y[rows, 64] (+)= x[rows, inputs] @ panel
    expand: int  # (site, panel, first, count, y): y[count, 64] = weights of inputs [first, first + count), as fp32
