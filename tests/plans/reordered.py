"""A made-up weight format of the CPU, whose columns have another order than inputs; its import registers it."""

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caraserve.cpu.jit import compiled_separately
from caraserve.cpu.linear import register
from caraserve.cpu.linear.base import WeightKernels
from caraserve.cpu.linear.expanding import row_by_pieces
from caraserve.cpu.linear.plain import KERNELS as PLAIN_KERNELS
from caraserve.cpu.simd import load_f32, store_f32
from caraserve.cpu.structs import input_at, site_at
from caraserve.cpu.weight_memory import WeightMemory
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.formats import Matrix, TensorReader


@dataclass(frozen=True, slots=True)
class Reordered:
    """Numbers in fp32, columns in an order of each module, which gate and up share."""

    name: str = "reordered"

    def read(self, tensors: TensorReader, module: str, shape: tuple[int, int]) -> Matrix:
        """Returns `weight`, [outputs, inputs], with columns in the matrix's order."""
        seed = zlib.crc32(module.replace("up_proj", "gate_proj").encode())
        order = np.random.default_rng(seed).permutation(shape[1])
        values = to_float32(*tensors(f"{module}.weight", shape))
        return Matrix({"weight": values[:, order]}, order=tuple(order.tolist()))

    def read_stacked(self, tensors: TensorReader, tensor: str, shape: tuple[int, int, int]) -> Matrix:
        """Returns the weights of all experts, in one order."""
        order = np.random.default_rng(len(tensor)).permutation(shape[2])
        values = to_float32(*tensors(tensor, shape))
        return Matrix({"weight": values[..., order]}, order=tuple(order.tolist()))

    def values(self, matrix: Matrix) -> NDArray[np.float32]:
        """Returns the weights in the order of the inputs."""
        assert matrix.order is not None
        return matrix.arrays["weight"].astype(np.float32)[..., np.argsort(matrix.order)]

    def num_bytes(self, inputs: int, outputs: int, itemsize: int) -> int:
        """Returns the bytes of the numbers."""
        return 4 * inputs * outputs


def pack(matrix: Matrix, dtype: Dtype, memory: WeightMemory) -> dict[str, int]:
    """Packs columns as they are; rows are gathered in their order."""
    weights, order = matrix.arrays["weight"], matrix.order
    assert order is not None
    return {
        "weight": memory.panels(weights.astype(np.float32)),
        "order": memory.order(order),
        "prepare": gather.address,
        "prepared_bytes": 4 * len(order),
    }


@compiled_separately(6)
def gather(site_address, x, x_stride, rows, to, to_stride):  # type: ignore[no-untyped-def]
    """Writes rows in the order of the columns."""
    site = site_at(site_address)
    for row in range(rows):
        for column in range(site.inputs):
            value = load_f32(x + row * x_stride + 4 * input_at(site, column))
            store_f32(to + row * to_stride + 4 * column, value)


register(Reordered().name, WeightKernels(pack, PLAIN_KERNELS.product, PLAIN_KERNELS.expand, row_by_pieces.address))
