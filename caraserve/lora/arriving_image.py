"""Fills an adapter image from a tensor file that is still being written, tensor by tensor as each is complete."""

from collections import Counter, deque
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.lora.peft import Pair, Site, check_product, place_a, place_b, tensor_values
from caraserve.model.safetensors_reader import TensorFile
from caraserve.model.spec import SITES, ModelSpec


class ArrivingImage:
    """An image whose first layers may be read while later ones arrive. Not thread-safe: for one thread at a time."""

    def __init__(
        self,
        file: TensorFile,
        spec: AdapterSpec,
        pairs: Mapping[Site, Pair],
        model: ModelSpec,
        into: NDArray[np.uint8],
    ) -> None:
        """`spec`: without digest. `into`: memory for the image, at least `spec.num_bytes`."""
        self.layers = 0  # first layers that are complete
        self._file, self._spec, self._pairs, self._model = file, spec, pairs, model
        self._into = into[: spec.num_bytes]
        self._into[:] = 0  # padding stays zero
        self._hasher = ChunkHasher(spec.layer_ends)
        self._starts = {layer: start for layer, (start, _) in enumerate(pairwise((0, *spec.layer_ends)))}
        self._spans = {(span.layer, SITES[span.site]): span for span in spec.spans}
        tensors = [(file.end(name), site, name) for site, pair in pairs.items() for name in (pair.a, pair.b)]
        self._pending = deque(sorted(tensors))
        self._largest: dict[Site, float] = {}  # values of the halves that have come first
        self._missing = Counter(layer for _, (layer, _), _ in tensors)  # tensors of each layer

    def advance(self, num_bytes: int) -> None:
        """Places the tensors that are complete now that the file's first `num_bytes` bytes have been written. Raises
        AdapterRejected for a value that is not finite, and TensorFileError."""
        while self._pending and self._pending[0][0] <= num_bytes:
            _, site, name = self._pending.popleft()
            self._place(site, name)
            self._missing[site[0]] -= 1
        ends = self._spec.layer_ends
        while self.layers < len(ends) and self._missing[self.layers] == 0:
            self._hasher.update(self._into[self._starts[self.layers] : ends[self.layers]].data)
            self.layers += 1

    def _place(self, site: Site, name: str) -> None:
        span, (values, largest) = self._spans[site], tensor_values(self._file, name, self._spec.dtype)
        inputs, outputs = self._model.site_shape(site[1])
        if (other := self._largest.pop(site, None)) is None:
            self._largest[site] = largest
        else:
            check_product(self._pairs[site], inputs, largest * other)
        if name == self._pairs[site].a:
            place_a(values, self._into, span, span.a_offset, inputs)
        else:
            place_b(values, self._into, span, span.b_offset, outputs)

    def so_far(self) -> HostAdapter:
        """Returns the image, whose bytes after the first `layers` layers may not be read yet; without digest."""
        return HostAdapter(self._spec, self._into)

    def finished(self) -> HostAdapter:
        """Returns the complete image, with its digest."""
        assert not self._pending, "tensors are missing"
        return HostAdapter(identified(self._spec, self._hasher.hashes), self._into)
