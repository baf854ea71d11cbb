"""The padded baseline: every module takes `max_rank` rows, as in Punica's and S-LoRA's BGMV. Pure.

The kernels are the same; they get the larger rank and read zeros for the rest. B is cut into panels of all ranks
(core/lora_layout.py), so a padded image is not a prefix of anything: it is copied piece by piece, over zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, SiteSpan, lay_out
from caraserve.errors import AdapterRejected
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up


@dataclass(frozen=True, slots=True)
class RowCopy:
    """`rows` pieces of `width` bytes, their beginnings a pitch apart; offsets into the images."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int


def padded(spec: AdapterSpec, model: ModelSpec, max_rank: int) -> AdapterSpec:
    """The adapter as it lies in the pool. Raises AdapterRejected for a larger rank."""
    if spec.rank > max_rank:
        raise AdapterRejected(f"rank {spec.rank} exceeds the {max_rank} rows that the padded kernels have")
    modules = {(span.layer, SITES[span.site]): (max_rank, span.scale) for span in spec.spans}
    spans, ends = lay_out(model, spec.dtype, modules)
    return replace(spec, rank=max_rank, spans=spans, layer_ends=ends)


def copies(spec: AdapterSpec, target: AdapterSpec, model: ModelSpec, layers: Sequence[int]) -> list[RowCopy]:
    """What is copied of `layers` from the host's image to `target`, which is full of zeros."""
    wanted, made = set(layers), []
    for narrow, wide in zip(spec.spans, target.spans, strict=True):
        if narrow.layer in wanted:
            made += _of_module(narrow, wide, model, spec.dtype.itemsize)
    return made


def _of_module(narrow: SiteSpan, wide: SiteSpan, model: ModelSpec, itemsize: int) -> list[RowCopy]:
    inputs, outputs = model.site_shape(SITES[narrow.site])
    a = narrow.padded_rank * align_up(inputs, A_COLUMNS) * itemsize
    width, pitch = (span.padded_rank * PANEL * itemsize for span in (narrow, wide))
    return [
        RowCopy(wide.a_offset, a, narrow.a_offset, a, a, 1),
        RowCopy(wide.b_offset, pitch, narrow.b_offset, width, width, align_up(outputs, PANEL) // PANEL),
    ]
