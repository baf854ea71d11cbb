"""A second copy of the base model's linear modules, with one adapter merged into it.

Serves the loading mode `merged`, after dLoRA. The copy has every linear module, so that passes over merged weights, and
their graphs, find them at fixed addresses; modules that the adapter lacks equal the base's. Unmerging means using the
base's weights again, which is exact and free.

B A is summed in fp32 and added to the base weight with one rounding. If the adapter's dtype is not the model's, A and B
are rounded to the model's first, an error that is small beside the rounding of the sum.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, PANEL, AdapterSpec, SiteSpan, lay_out
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.weights import TORCH_DTYPES, Layer, Weights
from caraserve.model.dtype import Dtype
from caraserve.model.plan import DecoderPlan, Site
from caraserve.util.units import align_up

_WARM_RANKS = (8, 16, 32, 64, 128, 256, 512)  # cuBLAS chooses among its kernels by sizes, of which the rank is one


class MergedDeviceWeights:
    """The copy of the weights, and which adapter is merged into it. Used by the launching thread only."""

    def __init__(self, plan: DecoderPlan, base: Weights, max_rank: int) -> None:
        """Allocates the copy. `max_rank`: the largest rank of any adapter, with padding."""
        self._plan, self._base, self._max_rank = plan, base, max_rank
        self.weights = replace(base, layers=tuple(map(_copied, base.layers)))
        # Buffers for one site's A and B as plain matrices in the model's dtype.
        self._a = torch.empty(max_rank * plan.widest_input, dtype=base.dtype, device=base.device)
        outputs = align_up(plan.widest_output, PANEL)
        self._b = torch.empty(outputs * max_rank, dtype=base.dtype, device=base.device)
        self._held: str | None = None
        self._changed: frozenset[tuple[int, int]] = frozenset()  # (layer, group) pairs that differ from the base
        self.merges = 0

    def warm_up(self, memory: Tensor, driver: Driver, stream: Stream) -> None:
        """Merges into the first layers that have all group shapes, so that torch and cuBLAS load their kernels for
        every dtype and many ranks; and undoes it. `memory`: uint8, on the device, whose bytes are taken as weights."""
        places = [
            (layer, linear)
            for layer in _layers_of_all_shapes(self._plan)
            for linear in range(len(self._plan.layers[layer].linears))
        ]
        for dtype, rank in product(Dtype, _WARM_RANKS):
            spans, (*_, end) = lay_out(self._plan, dtype, dict.fromkeys(places, (rank, 1.0)))
            if rank <= self._max_rank and end <= memory.numel():
                driver.run(stream, partial(self._merge, spans, (), dtype, memory))
        changed = {(span.layer, self._site(span).group) for span in spans}
        driver.run(stream, partial(self._merge, (), changed, Dtype.F32, memory))

    def merge(self, adapter: AdapterSpec, image: Tensor, driver: Driver, stream: Stream) -> None:
        """Merges an adapter, for everything issued on `stream` afterwards. Does nothing if it is merged already.

        `image`: uint8, the adapter's bytes on the device. Allocates no device memory.
        """
        if self._held == adapter.digest:
            return
        changed = frozenset((span.layer, self._site(span).group) for span in adapter.spans)
        left = self._changed - changed
        driver.run(stream, lambda: self._merge(adapter.spans, left, adapter.dtype, image))
        self._held, self._changed = adapter.digest, changed
        self.merges += 1

    def _merge(self, spans: Sequence[SiteSpan], left: Collection[tuple[int, int]], dtype: Dtype, image: Tensor) -> None:
        """Computes the groups in which an adapter has modules, and copies the base's to the groups in `left`."""
        of = {(span.layer, span.site): span for span in spans}
        for layer, group in left:
            self._weight(self.weights, layer, group).copy_(self._weight(self._base, layer, group))
        for layer, index in dict.fromkeys((span.layer, self._site(span).group) for span in spans):
            plan = self._plan.layers[layer].groups[index]
            base, room = (self._weight(weights, layer, index) for weights in (self._base, self.weights))
            for site, column in zip(plan.sites, plan.columns(), strict=True):
                before, after = (each[column : column + site.outputs] for each in (base, room))
                span = of.get((layer, site.index))
                if span is None:
                    after.copy_(before)
                else:
                    a, b = self._unpack(span, site, dtype, image)
                    torch.addmm(before, b, a, alpha=span.scale, out=after)

    def _site(self, span: SiteSpan) -> Site:
        return self._plan.layers[span.layer].sites[span.site]

    @staticmethod
    def _weight(weights: Weights, layer: int, group: int) -> Tensor:
        return weights.layers[layer].linears[group].weight

    def _unpack(self, span: SiteSpan, site: Site, dtype: Dtype, image: Tensor) -> tuple[Tensor, Tensor]:
        """Returns A [rank, inputs] and B [outputs, rank] of a site; valid until the next call, which reuses the
        buffers."""
        inputs, outputs, rank = site.inputs, site.outputs, span.padded_rank
        panels = align_up(outputs, PANEL) // PANEL

        def stored(offset: int, shape: tuple[int, ...]) -> Tensor:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            return image[offset : offset + num_bytes].view(TORCH_DTYPES[dtype]).view(shape)

        a = self._a[: rank * inputs].view(rank, inputs)
        a.copy_(stored(span.a_offset, (rank, align_up(inputs, A_COLUMNS)))[:, :inputs])
        b = self._b[: panels * PANEL * rank].view(panels, PANEL, rank)
        b.copy_(stored(span.b_offset, (panels, rank, PANEL)).transpose(1, 2))
        return a, b.view(-1, rank)[:outputs]


def _copied(layer: Layer) -> Layer:
    return replace(layer, linears=tuple(linear.copy() for linear in layer.linears))


def _layers_of_all_shapes(plan: DecoderPlan) -> list[int]:
    """Returns the layers that have the first group of a shape."""
    seen, layers = set[int](), []
    for layer, shapes in enumerate(plan.shapes_of_groups):
        if not seen.issuperset(shapes):
            layers.append(layer)
            seen.update(shapes)
    return layers
