"""Fills an adapter image from a tensor file that is still being written, matrix by matrix as each is complete."""

from collections import Counter, deque
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import HostAdapter
from caraserve.lora.kinds import MATRICES
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.lora.peft import ImageWriter, TensorLayout
from caraserve.model.safetensors_reader import TensorFile


class ArrivingImage:
    """An image whose first layers may be read while later ones arrive. Not thread-safe: for one thread at a time."""

    def __init__(self, file: TensorFile, layout: TensorLayout, into: NDArray[np.uint8]) -> None:
        """`into`: memory for the image, at least as large as it."""
        self.layers = 0  # first layers that are complete
        self._writer, self._spec = ImageWriter(file, layout), layout.spec
        self._into = into[: self._spec.num_bytes]
        self._into[:] = 0  # padding stays zero
        self._hasher = ChunkHasher(self._spec.layer_ends)
        self._ranges = list(pairwise((0, *self._spec.layer_ends)))
        matrices = product(layout.modules, MATRICES)
        self._pending = deque(sorted((self._writer.end(*matrix), *matrix) for matrix in matrices))
        self._missing = Counter(layer for _, (layer, _), _ in self._pending)  # matrices of each layer

    def advance(self, num_bytes: int) -> None:
        """Places the matrices that are complete now that the file's first `num_bytes` bytes have been written. Raises
        AdapterRejected for a value that is not finite, and TensorFileError."""
        while self._pending and self._pending[0][0] <= num_bytes:
            _, module, matrix = self._pending.popleft()
            self._writer.write(module, matrix, self._into)
            self._missing[module[0]] -= 1
        while self.layers < len(self._ranges) and self._missing[self.layers] == 0:
            start, end = self._ranges[self.layers]
            self._hasher.update(self._into[start:end].data)
            self.layers += 1

    def so_far(self) -> HostAdapter:
        """Returns the image, whose bytes after the first `layers` layers may not be read yet; without digest."""
        return HostAdapter(self._spec, self._into)

    def finished(self) -> HostAdapter:
        """Returns the complete image, with its digest."""
        assert not self._pending, "tensors are missing"
        return HostAdapter(identified(self._spec, self._hasher.hashes), self._into)
