"""A second copy of the base model's linear modules, with one adapter merged into it.

Serves the loading mode `merged`, after dLoRA. The copy has every linear module, so that passes over merged weights, and
their graphs, find them at fixed addresses; modules that the adapter lacks equal the base's. Unmerging means using the
base's weights again, which is exact and free.

B A is summed in fp32 and added to the base weight with one rounding. If the adapter's dtype is not the model's, A and B
are rounded to the model's first, an error that is small beside the rounding of the sum.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from caraserve.core.lora_layout import A_COLUMNS, GROUPS, PANEL, AdapterSpec, SiteSpan, lay_out
from caraserve.gpu.driver.api import Driver, Stream
from caraserve.gpu.weights import TORCH_DTYPES, Layer, Weights, columns_of
from caraserve.model.dtype import Dtype
from caraserve.model.spec import SITES, ModelSpec
from caraserve.util.units import align_up

_WARM_RANKS = (8, 16, 32, 64, 128, 256, 512)  # cuBLAS chooses among its kernels by sizes, of which the rank is one


class MergedDeviceWeights:
    """The copy of the weights, and which adapter is merged into it. Used by the launching thread only."""

    def __init__(self, spec: ModelSpec, base: Weights, max_rank: int) -> None:
        """Allocates the copy. `max_rank`: the largest rank of any adapter, with padding."""
        self._spec, self._base, self._max_rank = spec, base, max_rank
        self.weights = replace(base, layers=tuple(map(_copied, base.layers)))
        inputs, outputs = (max(spec.site_shape(site)[side] for site in SITES) for side in range(2))
        # Buffers for one module's A and B as plain matrices in the model's dtype.
        self._a = torch.empty(max_rank * inputs, dtype=base.dtype, device=base.device)
        self._b = torch.empty(align_up(outputs, PANEL) * max_rank, dtype=base.dtype, device=base.device)
        self._held: str | None = None
        self._changed: frozenset[tuple[int, int]] = frozenset()  # (layer, module group) pairs that differ from the base
        self.merges = 0

    def warm_up(self, memory: Tensor, driver: Driver, stream: Stream) -> None:
        """Merges into the first layer, whose shapes all layers have, so that torch and cuBLAS load their kernels for
        every dtype and many ranks; and undoes it. `memory`: uint8, on the device, whose bytes are taken as weights."""
        places = [(0, index) for index in range(len(SITES))]
        groups = frozenset((0, _group_of(site)) for site in SITES)
        for dtype, rank in product(Dtype, _WARM_RANKS):
            spans, (*_, end) = lay_out(self._spec.plan, dtype, dict.fromkeys(places, (rank, 1.0)))
            if rank <= self._max_rank and end <= memory.numel():
                of = {(span.layer, SITES[span.site]): span for span in spans}
                driver.run(stream, partial(self._merge, of, groups, (), dtype, memory))
        driver.run(stream, partial(self._merge, {}, (), groups, Dtype.F32, memory))

    def merge(self, adapter: AdapterSpec, image: Tensor, driver: Driver, stream: Stream) -> None:
        """Merges an adapter, for everything issued on `stream` afterwards. Does nothing if it is merged already.

        `image`: uint8, the adapter's bytes on the device. Allocates no device memory.
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
        """Returns A [rank, inputs] and B [outputs, rank] of a module; valid until the next call, which reuses the
        buffers."""
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
    return replace(layer, linears=tuple(linear.copy() for linear in layer.linears))


def _group_of(site: str) -> int:
    return next(group for group, sites in enumerate(GROUPS) if site in sites)
