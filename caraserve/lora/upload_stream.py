"""An adapter that is still being uploaded, as the source of its image: requests are computed as far as it has come.

request ─► host loader ─► UploadStream.read: memory for the image
piece of the body ─► written to the file ─► advance, on a thread ─► announce: layers for the prefill
checksum is right ─► complete: the last layer too          it is not ─► fail: the requests end with an error
"""

from collections import Counter, deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caraserve.core.lora_layout import AdapterSpec, HostAdapter
from caraserve.errors import AdapterRejected, CaraServeError
from caraserve.lora.adapter import Done, LayersArrived, Source, UploadSource
from caraserve.lora.adapter_folder import AdapterFolder
from caraserve.lora.adapter_reader import AdapterReader
from caraserve.lora.folder_contents import TENSORS_NAME
from caraserve.lora.image_writer import ImageWriter, TensorLayout
from caraserve.lora.manifest import ChunkHasher, identified
from caraserve.model.opened_file import TensorFileError
from caraserve.model.safetensors_reader import TensorFile


class ArrivingImage:
    """An image that is filled from a tensor file as that arrives, piece by piece: its first layers may be read while
    later ones arrive. Not thread-safe: for one thread at a time."""

    def __init__(self, layout: TensorLayout, into: NDArray[np.uint8]) -> None:
        """`into`: memory for the image, at least as large as it."""
        self.layers = 0  # first layers that are complete
        self._writer, self._spec = ImageWriter(layout), layout.spec
        self._into = into[: self._spec.num_bytes]
        self._into[:] = 0  # padding stays zero
        self._hasher = ChunkHasher(self._spec.layer_ends)
        self._ranges = list(pairwise((0, *self._spec.layer_ends)))
        pieces = [(module, piece) for module in self._writer.modules for piece in self._writer.pieces(module)]
        self._pending = deque(sorted((self._writer.end(*piece), *piece) for piece in pieces))
        self._missing = Counter(layer for _, (layer, _), _ in self._pending)  # pieces of each layer

    def advance(self, num_bytes: int) -> None:
        """Places the pieces that are complete now that the file's first `num_bytes` bytes have been written. Raises
        AdapterRejected for a value that is not finite, and TensorFileError."""
        while self._pending and self._pending[0][0] <= num_bytes:
            _, module, piece = self._pending.popleft()
            self._writer.write(module, piece, self._into)
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
        return HostAdapter(identified(self._writer.finished(), self._hasher.hashes), self._into)


@dataclass(slots=True)
class _Reading:
    """A read that the host loader has asked for: memory for the image, and the callbacks."""

    into: NDArray[np.uint8]
    done: Done
    layers_arrived: LayersArrived
    announced: int = 0  # layers


class UploadStream(UploadSource):
    """The tensors of one upload. `advance`, `image` and `close` are for one thread at a time, the rest for the event
    loop, while that thread does nothing."""

    def __init__(self, name: str, folder: Path, reader: AdapterReader) -> None:
        """Reads the file's header, which must have been written. Raises AdapterRejected for an adapter that does not
        fit the base model, or WholeFileNeeded."""
        self._reader = reader
        self._outcome: Source | CaraServeError | None = None
        self._reading: _Reading | None = None
        self._arriving: ArrivingImage | None = None
        try:
            self._file = TensorFile(folder / TENSORS_NAME)
            self._layout = reader.specify(name, folder, self._file)
        except TensorFileError as error:
            raise AdapterRejected(str(error)) from None

    @property
    def spec(self) -> AdapterSpec:
        """Without digest."""
        return self._layout.spec

    # --- on the event loop ---

    def read(self, into: NDArray[np.uint8], done: Done, layers_arrived: LayersArrived) -> None:
        """Fills `into` as the tensors arrive."""
        if self._outcome is None:
            self._reading = _Reading(into, done, layers_arrived)
        else:
            self._read_outcome(_Reading(into, done, layers_arrived))

    def announce(self) -> None:
        """Reports layers that have arrived since the last call."""
        reading, arriving = self._reading, self._arriving
        if reading is not None and arriving is not None and arriving.layers > reading.announced:
            reading.announced = arriving.layers
            reading.layers_arrived(arriving.so_far(), arriving.layers)

    def complete(self, image: HostAdapter | None) -> None:
        """Reports the whole image, whose checksum is right, if it was being read."""
        if image is not None and self._reading is not None:
            reading, self._reading, self._arriving = self._reading, None, None
            reading.done(image)

    def stored(self, folder: AdapterFolder) -> None:
        """From now on the adapter is read from its folder."""
        self._end(folder)

    def fail(self, error: CaraServeError) -> None:
        """Ends the read with an error, and every later one. No effect on an adapter that is stored."""
        if self._outcome is None:
            self._arriving = None
            self._end(error)

    def _end(self, outcome: Source | CaraServeError) -> None:
        self._outcome = outcome
        reading, self._reading = self._reading, None
        if reading is not None:
            self._read_outcome(reading)

    def _read_outcome(self, reading: _Reading) -> None:
        assert self._outcome is not None
        if isinstance(self._outcome, CaraServeError):
            self._reader.refuse(self._outcome, reading.done)
        else:
            self._reader.read(self._outcome, reading.into, reading.done)

    # --- on a thread ---

    def advance(self, num_bytes: int) -> None:
        """Places the tensors that have arrived with the file's first `num_bytes` bytes, if they are wanted."""
        if self._arriving is None and self._reading is not None:
            self._arriving = ArrivingImage(self._layout, self._reading.into)
        try:
            if self._arriving is not None:
                self._arriving.advance(num_bytes)
        except TensorFileError as error:
            raise AdapterRejected(str(error)) from None

    def image(self) -> HostAdapter | None:
        """Returns the whole image, if it was wanted. The file must be complete. Raises AdapterRejected for a copy of a
        tensor of the base model that differs."""
        if self._arriving is None:
            return None
        self._reader.check_copies(self._layout)
        return self._arriving.finished()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
