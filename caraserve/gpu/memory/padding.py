"""The padded baseline: every module is stored with `max_rank` rows, and a decode batch computes all its adapters at the
largest rank among them, as Punica's and S-LoRA's BGMV do.

The kernels are the same; they get the larger rank and read zeros beyond an adapter's own. Panels of B contain all ranks
(core/lora_layout.py), so an image is not a prefix of its padded form: it is copied row by row onto zeros. Prompts are
computed at `max_rank`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, SiteSpan, lay_out, vectors_bytes
from caraserve.errors import AdapterRejected
from caraserve.model.plan import DecoderPlan
from caraserve.util.units import align_up, ceil_div


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Copies `rows` rows of `width` bytes; pitches are the bytes between the starts of two rows. Offsets into the
    images."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int


def padded(spec: AdapterSpec, plan: DecoderPlan, max_rank: int) -> AdapterSpec:
    """Returns the adapter's layout in the pool. Raises AdapterRejected if its rank is larger than `max_rank`."""
    if spec.rank > max_rank:
        raise AdapterRejected(f"rank {spec.rank} exceeds the {max_rank} rows that the padded kernels have")
    if spec.vocabulary:
        raise AdapterRejected("the padded kernels have no changes of the embedding or the head")
    modules = {span.module: (max_rank, span.scale) for span in spec.spans}
    spans, ends = lay_out(plan, spec.dtype, modules, has_vectors=spec.has_vectors)
    return replace(spec, rank=max_rank, spans=spans, layer_ends=ends)


def copies(spec: AdapterSpec, target: AdapterSpec, plan: DecoderPlan, layers: Sequence[int]) -> list[RowCopy]:
    """Returns the copies of `layers` from the host's image to `target`, whose bytes are zero."""
    wanted, made = set(layers), dict[RowCopy, None]()  # sites of one module have the same A
    for narrow, wide in zip(spec.spans, target.spans, strict=True):
        if narrow.layer in wanted:
            made |= dict.fromkeys(_of_site(narrow, wide, plan, spec.dtype.itemsize))
    return list(made)


def _of_site(narrow: SiteSpan, wide: SiteSpan, plan: DecoderPlan, itemsize: int) -> list[RowCopy]:
    site = plan.layers[narrow.layer].sites[narrow.site]
    a = narrow.padded_rank * align_up(site.inputs, A_COLUMNS) * itemsize
    width, pitch = (span.padded_rank * PANEL * itemsize for span in (narrow, wide))
    matrices = [
        RowCopy(wide.a_offset, a, narrow.a_offset, a, a, 1),
        RowCopy(wide.b_offset, pitch, narrow.b_offset, width, width, ceil_div(site.outputs, PANEL)),
    ]
    if wide.vectors_offset is None or narrow.vectors_offset is None:
        return matrices
    size = vectors_bytes(site.outputs)
    return [*matrices, RowCopy(wide.vectors_offset, size, narrow.vectors_offset, size, size, 1)]
