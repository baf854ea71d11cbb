"""A decode batch whose adapters are in memory as in the device pool, and the expected result in fp64."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import A_COLUMNS, MAX_RANK, PANEL, aligned_bytes
from caraserve.cpu.weight_memory import convert
from caraserve.gpu.kernels import cuda_launch
from caraserve.gpu.kernels.bgmv_work import PLANES, adapter_items, plan_items
from caraserve.gpu.kernels.work_orders import delta_columns
from caraserve.model.dtype import Dtype, to_float32
from caraserve.util.units import align_up
from tests.gpu.emulator import run, run_early

NO_NUMBER = 0xFF  # NaN in every dtype, if every byte has this value


def stored(values: NDArray[np.float64], dtype: Dtype) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Returns values as bytes, 64-byte aligned, and the exact values that these bytes represent."""
    raw = np.ascontiguousarray(convert(np.ascontiguousarray(values, np.float32), Dtype.F32, dtype))
    data = aligned_bytes(raw.nbytes)
    data[:] = raw.reshape(-1).view(np.uint8)
    return data, to_float32(raw, dtype).astype(np.float64)


def address(array: NDArray[np.generic]) -> int:
    return int(array.ctypes.data)


@dataclass(slots=True)
class LoraCase:
    """A case. `ranks`: [projections][slots], slot 0 is the base model; `padded_to`: rank at which every slot is stored,
    or 0; `with_vectors`: slots whose adapters have some; `most_rank`: that a batch computes, stored rank rows beyond it
    are NaN; `step`: a projection's first column is the next multiple of it."""

    inputs: int
    outputs: tuple[int, ...]
    ranks: list[list[int]]
    dtypes: list[Dtype]
    activation: Dtype = Dtype.F32
    padded_to: int = 0
    with_vectors: frozenset[int] = frozenset()
    most_rank: int = MAX_RANK
    step: int = 4
    seed: int = 0
    products: dict[tuple[int, int], NDArray[np.float64]] = field(default_factory=dict)
    vectors: dict[tuple[int, int], NDArray[np.float32]] = field(default_factory=dict)  # [2, outputs]
    _kept: list[NDArray[np.generic]] = field(default_factory=list)
    _weights: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        projections, slots = len(self.outputs), len(self.dtypes)
        a, b, vectors = (np.zeros((projections, slots), np.uint64) for _ in range(3))
        rank = np.zeros((projections, slots), np.int32)
        scale = rng.uniform(0.5, 2, (projections, slots)).astype(np.float32)
        for projection, columns in enumerate(self.outputs):
            for slot, real in enumerate(self.ranks[projection]):
                if real == 0:
                    continue
                rows = self.padded_to or align_up(real, 8)
                rank[projection, slot] = rows
                first = np.zeros((rows, align_up(self.inputs, A_COLUMNS)))
                first[:real, : self.inputs] = rng.standard_normal((real, self.inputs)) / np.sqrt(self.inputs)
                second = np.zeros((rows, align_up(columns, PANEL)))
                second[:real, :columns] = rng.standard_normal((real, columns)) / np.sqrt(real)
                first[self.most_rank :] = second[self.most_rank :] = np.nan
                a_data, a_value = stored(first, self.dtypes[slot])
                b_data, b_value = stored(second.reshape(rows, -1, PANEL).swapaxes(0, 1), self.dtypes[slot])
                self._kept += [a_data, b_data]
                a[projection, slot], b[projection, slot] = address(a_data), address(b_data)
                product = a_value[:real].T @ b_value.swapaxes(0, 1).reshape(rows, -1)[:real]
                self.products[projection, slot] = scale[projection, slot] * product[: self.inputs, :columns]
                if slot in self.with_vectors:
                    pair = aligned_bytes(8 * align_up(columns, PANEL)).view(np.float32).reshape(2, -1)
                    pair[:] = rng.standard_normal(pair.shape)
                    self._kept.append(pair)
                    vectors[projection, slot], self.vectors[projection, slot] = address(pair), pair[:, :columns]
        codes = np.array([dtype.value for dtype in self.dtypes], np.int32)
        self._weights = {"a": a, "b": b, "rank": rank, "scale": scale, "dtype": codes, "vectors": vectors}

    def tables(self) -> cuda_launch.WeightTables:
        names = {name: address(array) for name, array in self._weights.items()}
        return cuda_launch.WeightTables(**names, slots=len(self.dtypes))

    def run(
        self,
        x: NDArray[np.float64],
        y: NDArray[np.float64],
        row_slots: list[int],
        grid: int = 3,
        seed: int = 0,
        *,
        apart: bool = False,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns (y + LoRA from the kernels, the same in fp64), both [rows, columns of all projections].

        x and y are rounded to the activations' dtype; the bytes after each row of x are NaN. `apart`: the kernels leave
        the sums apart, which are added to y here.
        """
        rows, step = len(row_slots), self.activation.storage.itemsize
        x_stride, starts = (
            align_up(self.inputs, A_COLUMNS),
            np.cumsum([0, *(align_up(n, self.step) for n in self.outputs)]),
        )
        y_stride = align_up(int(starts[-1]), A_COLUMNS)
        x_data, y_data = (aligned_bytes(rows * stride * step) for stride in (x_stride, y_stride))
        x_data[:] = y_data[:] = NO_NUMBER
        x_rows = x_data.view(self.activation.storage).reshape(rows, x_stride)
        y_rows = y_data.view(self.activation.storage).reshape(rows, y_stride)
        x_rows[:, : self.inputs] = convert(x.astype(np.float32), Dtype.F32, self.activation)
        spans = [slice(start, start + columns) for start, columns in zip(starts, self.outputs, strict=False)]
        for span, values in zip(spans, np.split(y, np.cumsum(self.outputs)[:-1], axis=1), strict=True):
            y_rows[:, span] = convert(np.ascontiguousarray(values, np.float32), Dtype.F32, self.activation)
        expected = np.concatenate([self._float(y_rows[:, span]) for span in spans], axis=1)
        x_exact, at = self._float(x_rows[:, : self.inputs]), np.cumsum([0, *self.outputs])
        for (projection, slot), product in self.products.items():
            mine = [row for row, of in enumerate(row_slots) if of == slot]
            factor, bias = self.vectors.get((projection, slot), (1.0, 0.0))
            columns = slice(at[projection], at[projection + 1])
            expected[mine, columns] = (expected[mine, columns] + x_exact[mine] @ product) * factor + bias

        slots, ranks = np.array(row_slots, np.int32), np.minimum(self._weights["rank"], self.most_rank)
        adapters = [
            adapter_items(slot, ranks[:, slot].tolist(), dtype, self.outputs) for slot, dtype in enumerate(self.dtypes)
        ]
        plan = plan_items(slots, adapters, self.most_rank)
        max_rank = max(int(ranks.max()), 8)
        part: NDArray[np.float32] = np.full(PLANES * rows * len(self.outputs) * max_rank, np.nan, np.float32)
        planes = cuda_launch.ShrinkBuffer(address(part), rows, len(self.outputs), max_rank)
        for list_, launch in ((plan.shrink, "shrink"), (plan.expand, "expand")):
            count = np.array([len(list_)], np.int32)
            items = cuda_launch.WorkList(address(list_), address(count), address(plan.groups))
            if launch == "shrink":
                source = cuda_launch.ActivationRows(address(x_data), x_stride, self.inputs)
                run(cuda_launch.shrink(grid, self.tables(), items, source, planes), self.activation, seed)
            elif apart:
                columns, stride = delta_columns(self.outputs)
                sums: NDArray[np.float32] = aligned_bytes(4 * rows * stride).view(np.float32).reshape(rows, stride)
                sums[:] = np.nan
                target = cuda_launch.ActivationRows(address(sums), stride, stride)
                places = cuda_launch.Projections(columns, self.outputs)
                made = cuda_launch.expand_apart(grid, self.tables(), items, planes, target, places)
                run_early(made, self.activation, part, seed)
                self._add(y_rows, spans, sums, columns, row_slots)
            else:
                target = cuda_launch.ActivationRows(address(y_data), y_stride, int(starts[-1]))
                places = cuda_launch.Projections(tuple(starts[:-1].tolist()), self.outputs)
                made = cuda_launch.expand(grid, self.tables(), items, planes, target, places)
                run_early(made, self.activation, part, seed)
        return np.concatenate([self._float(y_rows[:, span]) for span in spans], axis=1), expected

    def _add(
        self,
        y: NDArray[np.generic],
        spans: list[slice],
        sums: NDArray[np.float32],
        columns: tuple[int, ...],
        row_slots: list[int],
    ) -> None:
        """Adds sums to rows of y as the kernels do: one fused operation for the sum, one for the vectors."""
        ranks, scales = self._weights["rank"], self._weights["scale"].astype(np.float64)
        for projection, (span, first) in enumerate(zip(spans, columns, strict=True)):
            width = self.outputs[projection]
            for row, slot in enumerate(row_slots):
                if ranks[projection, slot] == 0:
                    continue
                value = self._float(y[row, span])
                value = np.float32(scales[projection, slot] * sums[row, first : first + width] + value)
                if (projection, slot) in self.vectors:
                    factor, bias = self.vectors[projection, slot].astype(np.float64)
                    value = np.float32(factor * value + bias)
                y[row, span] = convert(value, Dtype.F32, self.activation)

    def _float(self, values: NDArray[np.generic]) -> NDArray[np.float64]:
        return to_float32(np.ascontiguousarray(values), self.activation).astype(np.float64)
