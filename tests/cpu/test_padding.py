"""The padding of a batch: how much each adapter computes after its own rank."""

import numpy as np
import pytest

from caraserve.bench.lora.kernels import QKV, one_layer_plan
from caraserve.core.batch import Batch, ScheduledRow
from caraserve.core.lora_layout import HostAdapter, aligned_bytes
from caraserve.cpu.adapters import CpuImage, DeviceAdapters
from caraserve.cpu.batch import BatchShape, build_batch
from caraserve.cpu.structs import LORA_ENTRY
from caraserve.model.dtype import Dtype
from caraserve.profiling.microbench import adapter_spec

SPEC = one_layer_plan(256, layers=2)
RANKS = {1: 8, 2: 16, 3: 64}  # by slot


def adapters(*, padded: bool = True) -> DeviceAdapters:
    made = DeviceAdapters(SPEC, 4, padded=padded)
    for slot, rank in RANKS.items():
        spec = adapter_spec(SPEC, Dtype.F16, rank, len(SPEC.layers), QKV)
        made.bind(slot, CpuImage.empty(HostAdapter(spec, aligned_bytes(spec.num_bytes))))
    return made


def padded_ranks(rows: list[tuple[int, int]], *, padded: bool = True) -> list[int]:
    """The rank at which q is computed for each segment of rows, given as (adapter slot, tokens)."""
    scheduled = tuple(ScheduledRow(index, 0, count, slot, samples=False) for index, (slot, count) in enumerate(rows))
    table = adapters(padded=padded)
    built = build_batch(
        Batch((), (), scheduled), table, np.full(8, 64), BatchShape(len(SPEC.layers), 4, 0, traced=False)
    )
    own = [RANKS[segment.adapter_slot] for segment in built.segments]
    if built.record["padding"][0] == 0:
        return own
    sites = SPEC.most_sites
    words = len(own) * len(SPEC.layers) * sites * LORA_ENTRY.itemsize // 8
    (padding,) = [array for array in built.arrays if array.size == words]
    entries = padding.view(LORA_ENTRY).reshape(len(own), len(SPEC.layers), sites)
    assert (entries["rank"][:, :, 3:] == 0).all(), "modules that no adapter has are not padded"
    assert (entries["rank"][:, 0] == entries["rank"][:, 1]).all()
    return [rank + int(more) for rank, more in zip(own, entries["rank"][:, 0, 0], strict=True)]


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ([(1, 1), (1, 1)], [8]),
        ([(1, 1), (2, 1)], [16, 16]),
        ([(0, 1), (1, 1), (2, 1), (3, 1)], [64, 64, 64]),
        ([(1, 1), (2, 1), (3, 9)], [16, 16, 64]),
        ([(1, 9), (3, 1)], [8, 64]),
        ([(0, 5), (1, 9), (2, 7)], [16, 16]),
        ([(1, 1), (2, 1), (1, 9), (3, 9)], [16, 16, 64, 64]),
    ],
    ids=[
        *("one rank", "two ranks", "with the base model", "beside a large prefill", "beside a small prefill"),
        *("two prefills", "both"),
    ],
)
def test_adapters_are_computed_at_the_largest_rank_that_decodes_or_that_prefills(
    rows: list[tuple[int, int]], ranks: list[int]
) -> None:
    assert padded_ranks(rows) == ranks


def test_the_usual_kernel_computes_each_adapter_at_its_own_rank() -> None:
    assert padded_ranks([(1, 1), (2, 1), (3, 1)], padded=False) == [8, 16, 64]


def test_padding_lies_within_the_zeros() -> None:
    table = adapters()
    entries = table.padding([1, 2, 3] * 300, [False, True] * 450).view(LORA_ENTRY)
    start = int(table._zeros.ctypes.data)
    widest = 256
    ends = entries["a"] + 4 * entries["rank"] * widest
    assert entries["a"].min() >= start
    assert ends.max() <= start + table._zeros.size
    assert (entries["a"] == entries["b"]).all()
