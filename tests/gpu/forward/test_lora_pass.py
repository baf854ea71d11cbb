"""LoRA of decoding rows in every layer and group of a plan whose layers differ, compared with fp64."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, MAX_RANK, AdapterSpec, HostAdapter, aligned_bytes, stored_a, stored_b
from caraserve.gpu.driver.api import Stream
from caraserve.gpu.forward.batch import make_batch
from caraserve.gpu.forward.lora_pass import LoraLane
from caraserve.gpu.kernels.bgmv_work import PLANES
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.adapters import groups_of, items_by_shape
from caraserve.gpu.memory.pass_shape import Capacity, PassShape
from caraserve.model.dtype import Dtype, to_float32
from caraserve.profiling.microbench import random_adapter
from caraserve.util.units import align_up
from scripts.laboratory.gpu.null_device import NullDriver
from tests.gpu.emulator import run
from tests.gpu.filled_tables import write_column, write_items
from tests.gpu.small_model import mixed_plan

PLAN, RANK, CPU = mixed_plan(), 24, torch.device("cpu")
SLOTS = np.array([1, 0, 2, 1], np.int32)  # of the rows
# Of the second adapter: one module of each layer's first group and the last one of the second layer.
FEW = {(0, 0): (24, 2.0), (1, 0): (5, 0.5), (1, 3): (8, 1.0)}
ALL = {(layer, index): (8, 1.5) for layer, one in enumerate(PLAN.layers) for index in range(len(one.linears))}
PLACES = [(layer, group.index) for layer, one in enumerate(PLAN.layers) for group in one.groups]


def made(modules: dict[tuple[int, int], tuple[int, float]], dtype: Dtype) -> HostAdapter:
    spec = AdapterSpec.of(PLAN, dtype, modules)
    return random_adapter(PLAN, spec, aligned_bytes(spec.num_bytes))


class Lane:
    """A lane of an emulated device with both adapters, and rows of x and y for each group shape."""

    def __init__(self) -> None:
        self.adapters = {1: made(ALL, Dtype.F16), 2: made(FEW, Dtype.F32)}
        tables, batch = AdapterTables(PLAN, 3, CPU), make_batch(PLAN, Capacity(4, 4, 4, 16, 2), RANK, CPU)
        for slot, adapter in self.adapters.items():
            write_column(tables, PLAN, slot, adapter.spec, int(adapter.data.ctypes.data))
        specs = {slot: adapter.spec for slot, adapter in self.adapters.items()}
        items = {slot: items_by_shape(PLAN, slot, spec, MAX_RANK) for slot, spec in specs.items()}
        write_items(batch.lists, SLOTS, items)
        shapes = PLAN.group_shapes
        self.x = [rows(shape.inputs) for shape in shapes]
        self.y = [rows(sum(shape.widths)) for shape in shapes]
        parts = [torch.full((PLANES, len(SLOTS), len(shape.widths), RANK), torch.nan) for shape in shapes]
        workspace: Any = SimpleNamespace(activations=SimpleNamespace(inputs=self.x, outputs=self.y), parts=parts)
        kernels = SimpleNamespace(multiprocessors=1, launch=lambda launch, stream: run(launch, Dtype.F32))
        device: Any = SimpleNamespace(kernels=kernels, driver=NullDriver())
        self.lane = LoraLane(PLAN, batch, tables, workspace, device)

    def added(self, layer: int, group: int, groups: frozenset[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Returns what a pass over these group shapes has added to y in a group, and what it should have, if any."""
        shape = PLAN.shapes_of_groups[layer][group]
        x, before = self.x[shape].double().numpy(), self.y[shape].double().numpy()
        self.lane.pass_over(PassShape(4, 4, 0, 0, 0, True, 1, groups)).add(layer, group, Stream(0))
        expected, columns = np.zeros(before.shape), PLAN.layers[layer].groups[group].columns()
        first = PLAN.layers[layer].groups[group].sites[0].index
        for slot, adapter in self.adapters.items():
            for span in adapter.spec.spans:
                site = PLAN.layers[span.layer].sites[span.site]
                if (span.layer, site.group) != (layer, group):
                    continue
                dtype, start = adapter.spec.dtype, columns[span.site - first]
                a = to_float32(stored_a(adapter.data, span, site.inputs, dtype), dtype).astype(np.float64)
                b = to_float32(stored_b(adapter.data, span, site.outputs, dtype), dtype).astype(np.float64)
                b = b.swapaxes(0, 1).reshape(span.padded_rank, -1)[:, : site.outputs]
                added = span.scale * (x @ a[:, : site.inputs].T @ b)
                expected[slot == SLOTS, start : start + site.outputs] += added[slot == SLOTS]
        return self.y[shape].double().numpy() - before, expected


def rows(width: int) -> Tensor:
    """Returns random rows, which begin at multiples of 64 bytes."""
    return torch.randn((len(SLOTS), align_up(width, A_COLUMNS)))[:, :width]


@pytest.fixture(scope="module")
def lane() -> Lane:
    torch.manual_seed(0)
    return Lane()


@pytest.mark.parametrize(("layer", "group"), PLACES)
def test_each_group_of_each_layer_gets_its_own_sites(lane: Lane, layer: int, group: int) -> None:
    """Also where sites share A, and begin at any column."""
    both = frozenset.union(*(groups_of(adapter.spec, PLAN)[1] for adapter in lane.adapters.values()))
    added, expected = lane.added(layer, group, both)
    assert np.abs(expected).max() > 1e-3
    assert np.abs(added - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())


def test_a_pass_adds_nothing_in_groups_of_other_shapes(lane: Lane) -> None:
    layer, group = PLACES[0]
    others = frozenset(range(len(PLAN.group_shapes))) - {PLAN.shapes_of_groups[layer][group]}
    assert not lane.added(layer, group, others)[0].any()
