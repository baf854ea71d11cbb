"""What each format of weights has on the CPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Dtype
from caraserve.model.formats import Matrix

K_BLOCK = 2048  # inputs summed before the partial sum is stored or added: all formats agree, to give the same bits
PIECE_INPUTS = 64  # `expand` is called for inputs from a multiple of this on, and for so many at most

# Packs the rows of a matrix, one for each output, and returns the fields of a SITE record that the format's kernels
# need: `weight`, and what else they read, or a `product` of its own for the matrix. The dtype is that of --dtype, for
# weights that are plain numbers.
#
# If `product` wants rows in another form than fp32, the fields include `prepared_bytes`, the bytes of such a row, and
# `prepare`, the address of a separately compiled function (site, x, x_stride, rows, to, to_stride) that writes them.
# Sites of one group with the same `prepare`, `order` and `group` share what it writes, which may depend on no other
# field.
Pack = Callable[[Matrix, Dtype, WeightMemory], Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class WeightKernels:
    """What a format has on the CPU: `pack`, and the addresses of separately compiled functions.

    `site` is the address of a SITE record. With an `order`, columns of the weights are in another order than inputs:
    `expand` counts columns, and `prepare` gathers rows by it; `row` has the order of the inputs.
    """

    pack: Pack
    # (site, x, x_stride, rows, first, end, y, y_stride, accumulate), for the panels [first, end):
    # y[rows, 64 · panel :] (+)= x[rows, inputs] @ panel. The order of a sum does not depend on rows or panels.
    product: int
    expand: int  # (site, panel, first, count, y): y[count, 64] = weights of inputs [first, first + count), as fp32
    row: int  # (site, output, y): y[inputs] = weights of one output, as fp32
