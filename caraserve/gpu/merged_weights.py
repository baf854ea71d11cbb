"""Base weights with one adapter merged into them, beside the base's own.

For the loading mode `merged`, after dLoRA. Every linear module is there twice, so that passes over merged weights, and
graphs of them, find them in one place; what an adapter has no module in equals the base's. To unmerge is to use the
base's again, which is exact and costs nothing.

Products are summed in fp32 and added in one rounding. Where an adapter's dtype is not the model's, A and B are rounded
to it first, which is little beside the rounding of the sum.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, GROUPS, PANEL, AdapterSpec, SiteSpan
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.weights import TORCH_DTYPES, Layer, Linear, Weights, columns_of
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up


class MergedDeviceWeights:
    """Room for every linear module, and which adapter is in it. The launching thread's alone."""

    def __init__(self, spec: ModelSpec, base: Weights, max_rank: int) -> None:
        """`max_rank`: of any adapter, with its padding."""
        self._spec, self._base = spec, base
        self.weights = replace(base, layers=tuple(_copied(layer) for layer in base.layers))
        inputs, outputs = (max(spec.site_shape(site)[side] for site in SITES) for side in range(2))
        # A and B in the model's dtype, as plain matrices.
        self._a = torch.empty(max_rank * inputs, dtype=base.dtype, device=base.device)
        self._b = torch.empty(align_up(outputs, PANEL) * max_rank, dtype=base.dtype, device=base.device)
        self._held: str | None = None
        self._changed: frozenset[tuple[int, int]] = frozenset()  # (layer, group) that differ from the base
        self.merges = 0

    def merge(self, adapter: AdapterSpec, image: Tensor, driver: Driver, stream: Stream) -> None:
        """Has an adapter merged for what is issued on `stream` from now on. The same as last time is not merged again.

        `image`: uint8, the adapter's bytes on the device. Allocates nothing there.
        """
        if self._held == adapter.digest:
            return
        spans = {(span.layer, SITES[span.site]): span for span in adapter.spans}
        changed = frozenset((layer, _group_of(site)) for layer, site in spans)
        left = self._changed - changed
        driver.run(stream, lambda: self._merge(spans, changed, left, adapter.dtype, image))
        self._held, self._changed = adapter.digest, changed
        self.merges += 1

    def _merge(
        self,
        spans: Mapping[tuple[int, str], SiteSpan],
        changed: Collection[tuple[int, int]],
        left: Collection[tuple[int, int]],
        dtype: Dtype,
        image: Tensor,
    ) -> None:
        for layer, group in left:
            self.weights.layers[layer].linears[group].weight.copy_(self._base.layers[layer].linears[group].weight)
        for layer, group in changed:
            base = self._base.layers[layer].linears[group].weight
            room = self.weights.layers[layer].linears[group].weight
            for site, column, width in zip(GROUPS[group], *columns_of(self._spec, group), strict=True):
                before, after = base[column : column + width], room[column : column + width]
                span = spans.get((layer, site))
                if span is None:
                    after.copy_(before)
                else:
                    a, b = self._unpack(span, dtype, image)
                    torch.addmm(before, b, a, alpha=span.scale, out=after)

    def _unpack(self, span: SiteSpan, dtype: Dtype, image: Tensor) -> tuple[Tensor, Tensor]:
        """A [rank, inputs] and B [outputs, rank] of a module, until the next one is unpacked."""
        inputs, outputs = self._spec.site_shape(SITES[span.site])
        rank, panels = span.padded_rank, align_up(outputs, PANEL) // PANEL

        def stored(offset: int, shape: tuple[int, ...]) -> Tensor:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            return image[offset : offset + num_bytes].view(TORCH_DTYPES[dtype]).view(shape)

        a = self._a[: rank * inputs].view(rank, inputs)
        a.copy_(stored(span.a_offset, (rank, align_up(inputs, A_COLUMNS)))[:, :inputs])
        b = self._b[: panels * PANEL * rank].view(panels, PANEL, rank)
        b.copy_(stored(span.b_offset, (panels, rank, PANEL)).transpose(1, 2))
        return a, b.view(-1, rank)[:outputs]


def _copied(layer: Layer) -> Layer:
    linears = tuple(Linear.of(linear.weight.clone(), linear.bias) for linear in layer.linears)
    return replace(layer, linears=linears)


def _group_of(site: str) -> int:
    return next(group for group, sites in enumerate(GROUPS) if site in sites)
