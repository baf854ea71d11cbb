"""Tables and items of an adapter, for a plan with fused modules whose layers have other groups."""

from itertools import groupby

import numpy as np
import pytest
import torch

from caraserve.core.lora_layout import MAX_RANK, AdapterSpec, SiteSpan
from caraserve.gpu.kernels.bgmv_work import adapter_items
from caraserve.gpu.memory.adapter_tables import AdapterTables
from caraserve.gpu.memory.adapters import groups_of, items_by_shape
from caraserve.model.dtype import Dtype
from tests.gpu.filled_tables import write_column
from tests.gpu.small_model import mixed_plan

PLAN, SLOT, BASE = mixed_plan(), 3, 1 << 20
# The first layer lacks its third group, the second one its first group.
MODULES = {
    (0, 0): (8, 0.5),
    (0, 1): (24, 2.0),
    (0, 2): (8, 1.0),
    (0, 4): (40, 1.0),
    (1, 1): (16, 3.0),
    (1, 3): (8, 1.0),
}
ADAPTER = AdapterSpec.of(PLAN, Dtype.F16, MODULES)


@pytest.fixture
def tables() -> AdapterTables:
    made = AdapterTables(PLAN, SLOT + 1, torch.device("cpu"))
    write_column(made, PLAN, SLOT, ADAPTER, BASE)
    return made


def spans_of(layer: int, group: int) -> dict[int, SiteSpan]:
    """Returns the adapter's spans of a group, by place in the group."""
    first = PLAN.layers[layer].groups[group].sites[0].index
    sites = PLAN.layers[layer].sites
    spans = [span for span in ADAPTER.spans if span.layer == layer and sites[span.site].group == group]
    return {span.site - first: span for span in spans}


@pytest.mark.parametrize(("layer", "group"), [(layer, group) for layer in range(2) for group in range(4)])
def test_a_groups_tables_are_the_rows_of_its_sites(tables: AdapterTables, layer: int, group: int) -> None:
    rows, launch = tables.for_triton(layer, group), tables.for_launch(layer, group)
    assert rows.a.shape == (len(PLAN.layers[layer].groups[group].sites), tables.slots)
    for table in (rows.a, rows.b, rows.rank, rows.scale):
        assert table.data_ptr() % 64 == 0
    assert (launch.a, launch.rank) == (rows.a.data_ptr(), rows.rank.data_ptr())
    spans = spans_of(layer, group)
    found = [
        (place, int(rows.a[place, SLOT]), int(rows.b[place, SLOT])) for place in np.flatnonzero(rows.rank[:, SLOT])
    ]
    assert found == [(place, BASE + span.a_offset, BASE + span.b_offset) for place, span in spans.items()]
    assert [float(rows.scale[place, SLOT]) for place in spans] == [span.scale for span in spans.values()]


def test_parts_of_one_module_share_a() -> None:
    for _, parts in groupby(ADAPTER.spans, key=lambda span: span.module):
        spans = list(parts)
        assert len({span.a_offset for span in spans}) == 1
        assert len({span.b_offset for span in spans}) == len(spans)


@pytest.mark.parametrize("most_rank", [16, MAX_RANK])
def test_items_of_a_group_shape_are_made_for_the_largest_rank_of_any_layer(most_rank: int) -> None:
    made = items_by_shape(PLAN, SLOT, ADAPTER, most_rank)
    for number, shape in enumerate(PLAN.group_shapes):
        ranks = [0] * len(shape.widths)
        for layer, shapes in enumerate(PLAN.shapes_of_groups):
            for group in (group for group, of in enumerate(shapes) if of == number):
                for place, span in spans_of(layer, group).items():
                    ranks[place] = max(ranks[place], min(span.padded_rank, most_rank))
        wanted = adapter_items(SLOT, ranks, Dtype.F16, shape.widths)
        assert np.array_equal(made[number].shrink, wanted.shrink)
        assert np.array_equal(made[number].expand, wanted.expand)


def test_an_adapter_names_its_groups_by_layer_and_their_shapes() -> None:
    groups, shapes = groups_of(ADAPTER, PLAN)
    assert groups == ({0, 1, 3}, {1, 3})
    assert shapes == {PLAN.shapes_of_groups[layer][group] for layer, named in enumerate(groups) for group in named}
    assert len(shapes) == 3  # the layers' second groups, and their last ones, have the same shape
