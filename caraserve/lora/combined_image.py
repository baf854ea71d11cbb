"""Makes the image of a combination of adapters from their images: their ranks side by side.

    Σ wᵢ · sᵢ · Bᵢ Aᵢ = B A,   A = [A₁; A₂; …],   B = [w₁ s₁ B₁ | w₂ s₂ B₂ | …],   all in fp32, with the scale 1

Each value of B is rounded once, in fp32. A module has the ranks of those adapters that change it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from caraserve.core.lora_layout import (
    MAX_RANK,
    AdapterSpec,
    Bytes,
    HostAdapter,
    Module,
    SiteSpan,
    stored_a,
    stored_b,
)
from caraserve.errors import AdapterRejected
from caraserve.lora.image_writer import check_update
from caraserve.model.dtype import Dtype, to_float32
from caraserve.model.plan import DecoderPlan


@dataclass(frozen=True, slots=True)
class WeightedImage:
    """One adapter of a combination."""

    name: str
    weight: float
    image: HostAdapter


def write_combination(plan: DecoderPlan, digest: str, members: Sequence[WeightedImage], into: Bytes) -> HostAdapter:
    """Writes the combination's image to `into`. Raises AdapterRejected for adapters that change more than modules by A
    and B, for ranks that add up to too much, and for values that are not finite."""
    for member in members:
        _refuse_others(member)
    own_ranks = [{span.module: span.rank for span in member.image.spec.spans} for member in members]
    ranks: Counter[Module] = Counter()
    for own in own_ranks:
        ranks.update(own)
    if (rank := max(ranks.values())) > MAX_RANK:
        raise rank_refusal([(one.name, one.image.spec.rank) for one in members], rank)
    spec = AdapterSpec.of(plan, Dtype.F32, {module: (rank, 1.0) for module, rank in ranks.items()}, digest)
    data = into[: spec.num_bytes]
    data[:] = 0
    spans = {(span.layer, span.site): span for span in spec.spans}
    first: Counter[Module] = Counter()  # the next free rank
    for member, own in zip(members, own_ranks, strict=True):
        for span in member.image.spec.spans:
            _write_site(plan, member, span, data, spans[span.layer, span.site], first[span.module])
        first.update(own)
    return HostAdapter(spec, data)


def rank_refusal(members: Sequence[tuple[str, int]], rank: int) -> AdapterRejected:
    """Returns the error for adapters, given with their ranks, whose ranks add up to `rank`."""
    ranks = ", ".join(f"{name} {one}" for name, one in members)
    return AdapterRejected(
        f"the ranks of a combination add up, here to {rank} ({ranks}), and {MAX_RANK} is the most", param="model"
    )


def _refuse_others(member: WeightedImage) -> None:
    spec = member.image.spec
    for what, is_so in (
        ("scales or biases of outputs (DoRA, lora_bias)", spec.has_vectors),
        ("changes of the vocabulary", bool(spec.vocabulary)),
        ("invocation tokens (activated LoRA)", bool(spec.invocation)),
        ("a score head", spec.head is not None),
    ):
        if is_so:
            raise AdapterRejected(f"{member.name} has {what}, so it cannot be combined or scaled", param="model")


def _write_site(
    plan: DecoderPlan, member: WeightedImage, source: SiteSpan, data: Bytes, target: SiteSpan, first: int
) -> None:
    """Writes one adapter's A and B of a site to the ranks from `first` on."""
    layer = plan.layers[source.layer]
    site, linear = layer.sites[source.site], layer.linears[source.linear]
    image, dtype, ranks = member.image, member.image.spec.dtype, slice(first, first + source.rank)
    a = to_float32(stored_a(image.data, source, linear.inputs, dtype)[: source.rank], dtype)
    stored_a(data, target, linear.inputs, Dtype.F32)[ranks] = a
    b = to_float32(stored_b(image.data, source, site.outputs, dtype)[:, : source.rank], dtype)
    with np.errstate(over="ignore"):  # what overflows is refused
        scaled = (b * np.float64(member.weight * source.scale)).astype(np.float32)
    largest_a, largest_b = (float(np.abs(one).max()) for one in (a, scaled))
    what = f"{member.name}, {linear.module}: with the weight {member.weight:.3g} the product of A and B"
    check_update(target.rank * linear.inputs * largest_a * largest_b, what)
    stored_b(data, target, site.outputs, Dtype.F32)[:, ranks] = scaled
